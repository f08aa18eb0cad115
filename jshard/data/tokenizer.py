"""Tokenizers: text as token ids, byte by byte or by a `tokenizer.json`."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import zlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from jshard._files import read_bytes
from jshard._paths import expanded
from jshard._types import Json
from jshard.data.chat_template import CONFIG, companion_files
from jshard.data.loader import DataError
from jshard.errors import UnsafeFileError

# Possible names of the token between texts in a tokenizer file, the likeliest first.
_END_OF_TEXT = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>")
# An encoding takes some hundred times the bytes of its ids: this many pieces are about half a GB.
_PIECE_CHARS = 1 << 18
_PIECES_AT_ONCE = 64
_INT32_IDS = 2**31  # ids are below: the samples of text are int32
_TOKENIZER_BYTES = 1 << 30  # a larger file is no tokenizer
_GIVE_ITS_OWN = "give the tokenizer.json of the model (not tokenizer_config.json, vocab.json or merges.txt)."


class Tokenizer(Protocol):
    """Turns text into token ids.

    Attributes:
        name: its identifier, e.g. in the fingerprint of the data.
        vocab_size: every id is smaller than this; a model needs at least as many rows of embeddings.
        end_of_text: the id put after every text, or None if the vocabulary has no such token.
    """

    name: str
    vocab_size: int
    end_of_text: int | None

    def encode_batch(self, texts: Sequence[bytes]) -> list[np.ndarray]:
        """Returns the ids of each UTF-8 text, in the smallest unsigned dtype that fits all, without `end_of_text`."""
        ...

    def decode(self, ids: np.ndarray) -> str:
        """Returns the text of `ids`; what is not UTF-8 becomes U+FFFD."""
        ...


class ByteTokenizer:
    """Every byte is a token, so it needs no installation and can read any text; a zero byte ends a text."""

    name = "bytes"
    vocab_size = 256
    end_of_text: int | None = 0

    def encode_batch(self, texts: Sequence[bytes]) -> list[np.ndarray]:
        """Returns the bytes of each text, unchanged."""
        return [np.frombuffer(text, dtype=np.uint8) for text in texts]

    def decode(self, ids: np.ndarray) -> str:
        """Returns the text of `ids`; what is not UTF-8 becomes U+FFFD."""
        return np.asarray(ids, dtype=np.uint8).tobytes().decode(errors="replace")


@dataclasses.dataclass(frozen=True)
class PlacedTokens:
    """The tokens of a text.

    Attributes:
        ids: of the tokens.
        starts: for each, its first character in the text.
        stops: the character after its last one.
    """

    ids: np.ndarray
    starts: np.ndarray
    stops: np.ndarray


class HuggingFaceTokenizer:
    """The tokenizer of a `tokenizer.json`, using the package `tokenizers`.

    A long text is cut at line ends into pieces of about 256 kB, which are encoded in parallel: memory stays
    bounded, but merges across such a cut are lost.

    Args:
        path: the file, or the folder of a model that has it.

    Raises:
        DataError: `tokenizers` is not installed, or the file cannot be read as a tokenizer.
    """

    def __init__(self, path: str | Path):
        path = tokenizer_file(expanded(path))
        content, self._tokenizer = _read_tokenizer(path)
        vocabulary = self._tokenizer.get_vocab(with_added_tokens=True)
        # The default makes an empty vocabulary fail the check below.
        largest = max(vocabulary.values(), default=_INT32_IDS)
        if largest >= _INT32_IDS:
            why = "its vocabulary is empty." if not vocabulary else f"it has the id {largest}; ids are int32."
            raise DataError("The tokenizer has no usable ids.", where=str(path), why=why, do=_GIVE_ITS_OWN)
        self.path = path
        # The ids of a file may have gaps: their count is not enough.
        self.vocab_size: int = largest + 1
        end = _end_of_text(vocabulary)
        self.end_of_text: int | None = None if end is None else vocabulary[end]
        # By content and not by path: the file may be elsewhere on the next machine.
        self.name = f"{path.name} {zlib.crc32(content):08x}"

    def encode_batch(self, texts: Sequence[bytes]) -> list[np.ndarray]:
        """Returns the ids of each text, encoded on all cores, without special tokens that the file adds around it."""
        dtype = np.min_scalar_type(self.vocab_size - 1)
        # Each begins with an empty array: an empty text has no pieces, and `concatenate` needs one.
        ids: list[list[np.ndarray]] = [[np.empty(0, dtype)] for _ in texts]  # of the pieces of each text
        pieces = _numbered_pieces(texts)
        while True:
            batch = list(itertools.islice(pieces, _PIECES_AT_ONCE))
            if not batch:
                return [np.concatenate(ids_of_text) for ids_of_text in ids]
            with _in_four_parts("The tokenizer cannot encode the text.", self.path):
                encodings = self._tokenizer.encode_batch([piece for _, piece in batch], add_special_tokens=False)
            for (number, _), encoding in zip(batch, encodings, strict=True):
                ids[number].append(np.array(encoding.ids, dtype))

    def encode_with_places(self, texts: Sequence[str]) -> list[PlacedTokens]:
        """Returns the tokens of each text and their places in it, without special tokens that the file adds."""
        placed = []
        for start in range(0, len(texts), _PIECES_AT_ONCE):
            with _in_four_parts("The tokenizer cannot encode the text.", self.path):
                encodings = self._tokenizer.encode_batch(
                    list(texts[start : start + _PIECES_AT_ONCE]), add_special_tokens=False
                )
            for encoding in encodings:
                places = np.array(encoding.offsets, np.int64).reshape(-1, 2)
                placed.append(PlacedTokens(np.array(encoding.ids, np.int32), places[:, 0], places[:, 1]))
        return placed

    def id_of(self, token: str) -> int | None:
        """Returns the id of a token; None if the vocabulary does not have it."""
        return self._tokenizer.token_to_id(token)

    def decode(self, ids: np.ndarray) -> str:
        """Returns the text of `ids`, without special tokens."""
        return self._tokenizer.decode(np.asarray(ids).tolist())


def tokenizer_file(path: Path) -> Path:
    """Returns the tokenizer.json of a folder; another path is returned unchanged."""
    return path / "tokenizer.json" if path.is_dir() else path


def _end_of_text(vocabulary: Iterable[str]) -> str | None:
    """Returns the token between texts; None if a vocabulary has none."""
    for token in _END_OF_TEXT:
        if token in vocabulary:
            return token
    return None


def _numbered_pieces(texts: Sequence[bytes]) -> Iterator[tuple[int, str]]:
    """Yields the pieces of all texts, each with the number of its text."""
    for number, text in enumerate(texts):
        for piece in _pieces(text):
            yield number, piece


def _pieces(text_bytes: bytes) -> Iterator[str]:
    text = text_bytes.decode(errors="replace")
    start = 0
    while start < len(text):
        # A text without line ends stays whole: a cut elsewhere would change more of its tokens.
        newline = text.find("\n", start + _PIECE_CHARS)
        end = len(text) if newline == -1 else newline + 1
        yield text[start:end]
        start = end


def transformers_files(path: Path | None) -> dict[str, str]:
    """Returns the files by which Transformers' AutoTokenizer turns text into the same ids, by name.

    Args:
        path: a tokenizer.json; None for bytes.
    """
    if path is None:
        content = _json_of_bytes()
        end: str | None = _END_OF_TEXT[0]
    else:
        path = tokenizer_file(path)
        raw, tokenizer = _read_tokenizer(path)
        content = raw.decode()
        beside = companion_files(path)
        if CONFIG in beside:
            # What came with the tokenizer says more: its class, its special tokens and the chat template.
            return {"tokenizer.json": content, **beside}
        end = _end_of_text(tokenizer.get_vocab(with_added_tokens=True))
    # Without the clean-up: Transformers would drop spaces before punctuation when it decodes.
    config: dict[str, Json] = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    if end is not None:
        config["eos_token"] = end
    return {"tokenizer.json": content, "tokenizer_config.json": json.dumps(config, indent=2) + "\n"}


def _json_of_bytes() -> str:
    """Returns `ByteTokenizer` as a tokenizer.json: a byte-level BPE without merges, whose id 0 is the end of a text."""
    vocabulary = {_END_OF_TEXT[0]: 0}
    # GPT-2's alphabet: these bytes stand for themselves, and the others for letters from 256 on.
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    for byte in shown:
        vocabulary[chr(byte)] = byte
    hidden = [byte for byte in range(256) if byte not in shown]
    for i, byte in enumerate(hidden):
        if byte != 0:  # the id of the end of a text
            vocabulary[chr(256 + i)] = byte
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    content = {
        "version": "1.0",
        "added_tokens": [{"id": 0, "content": _END_OF_TEXT[0], **flags, "special": True}],
        "pre_tokenizer": level,
        "decoder": level,
        "model": {"type": "BPE", "vocab": vocabulary, "merges": []},
    }
    return json.dumps(content)


def _read_tokenizer(path: Path) -> tuple[bytes, Any]:
    """Returns the contents of the file, and its tokenizer."""
    try:
        import tokenizers
    except ImportError as error:
        raise DataError(
            "A Hugging Face tokenizer needs the package `tokenizers`.",
            where=str(path),
            why="it is not installed.",
            do="pip install 'jshard[hf]', or leave out the tokenizer to train on bytes.",
        ) from error
    try:
        content = read_bytes(path, _TOKENIZER_BYTES)
    except UnsafeFileError:
        raise
    except OSError as error:
        raise DataError(
            "The tokenizer cannot be read.",
            where=str(path),
            why=f"{(error.strerror or repr(error)).lower()}.",
            do="give the tokenizer.json of the model, e.g. --tokenizer gpt2/tokenizer.json.",
        ) from error
    with _in_four_parts("The file is not a tokenizer.", path):
        return content, tokenizers.Tokenizer.from_buffer(content)


@contextlib.contextmanager
def _in_four_parts(what: str, path: Path) -> Iterator[None]:
    """Turns any error of the package `tokenizers` into a `DataError`: it raises bare Exception, and Rust's panics."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:
        why = f"`tokenizers` cannot read it: {error}."
        raise DataError(what, where=str(path), why=why, do=_GIVE_ITS_OWN) from error
