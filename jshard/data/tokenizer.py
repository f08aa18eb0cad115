"""Text to numbers and back: bytes by default, or a Hugging Face `tokenizer.json`."""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from jshard.data.source import DataError

# What a tokenizer file may call the token between two texts, the likeliest first.
_END_OF_TEXT = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>")
# An encoding takes some hundred times the bytes of its ids: this many pieces are about half a GB.
_PIECE_CHARS = 1 << 18
_PIECES_AT_ONCE = 64


class Tokenizer(Protocol):
    """Turns text into token ids.

    Attributes:
        name: what identifies it, e.g. in the fingerprint of the data.
        vocab_size: every id is smaller than this; a model needs at least as many rows of embeddings.
        end_of_text: the id put after every text, or None where the vocabulary has no such token.
    """

    name: str
    vocab_size: int
    end_of_text: int | None

    def encode(self, text: bytes) -> np.ndarray:
        """The ids of one text in UTF-8, of the dtype `token_dtype(vocab_size)`, without `end_of_text`."""
        ...

    def encode_batch(self, texts: Sequence[bytes]) -> list[np.ndarray]:
        """The ids of each text; faster than one by one where a tokenizer uses several cores."""
        ...

    def decode(self, ids: np.ndarray) -> str:
        """The text of `ids`; what is not UTF-8 becomes U+FFFD."""
        ...


def token_dtype(vocab_size: int) -> np.dtype:
    """The smallest unsigned dtype that holds every id of a vocabulary."""
    return np.min_scalar_type(vocab_size - 1)


class ByteTokenizer:
    """Every byte is a token, so there is nothing to install and no text it cannot read; a zero byte ends a text."""

    name = "bytes"
    vocab_size = 256
    end_of_text: int | None = 0

    def encode(self, text: bytes) -> np.ndarray:
        """The bytes, as they are."""
        return np.frombuffer(text, dtype=np.uint8)

    def encode_batch(self, texts: Sequence[bytes]) -> list[np.ndarray]:
        """The bytes of each text."""
        return [self.encode(text) for text in texts]

    def decode(self, ids: np.ndarray) -> str:
        """The text of `ids`; what is not UTF-8 becomes U+FFFD."""
        return np.asarray(ids, dtype=np.uint8).tobytes().decode(errors="replace")


class HuggingFaceTokenizer:
    """The tokenizer of a `tokenizer.json`, through the package `tokenizers`.

    A long text is cut at line ends into pieces of about 256 kB, which are encoded in parallel: the memory stays
    bounded, and a merge across such a cut is lost.

    Args:
        path: the file.

    Raises:
        DataError: `tokenizers` is not installed, or the file cannot be read as a tokenizer.
    """

    def __init__(self, path: str | Path):
        path = Path(path)
        content = _read(path)
        self._tokenizer = _parse(path, content)
        vocabulary = self._tokenizer.get_vocab(with_added_tokens=True)
        # The ids of a file may have gaps: their count is not enough.
        self.vocab_size: int = max(vocabulary.values()) + 1
        self.end_of_text: int | None = next((vocabulary[t] for t in _END_OF_TEXT if t in vocabulary), None)
        # By content and not by path: the file may be elsewhere on the next machine.
        self.name = f"{path.name} {zlib.crc32(content):08x}"

    def encode(self, text: bytes) -> np.ndarray:
        """The ids of one text in UTF-8, without the special tokens a file may put around it."""
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[bytes]) -> list[np.ndarray]:
        """The ids of each text, encoded on all cores."""
        dtype = token_dtype(self.vocab_size)
        parts = [[np.empty(0, dtype)] for _ in texts]
        pieces = ((own, piece) for own, text in zip(parts, texts, strict=True) for piece in _pieces(text))
        while batch := list(itertools.islice(pieces, _PIECES_AT_ONCE)):
            encodings = self._tokenizer.encode_batch([piece for _, piece in batch], add_special_tokens=False)
            for (own, _), encoding in zip(batch, encodings, strict=True):
                own.append(np.array(encoding.ids, dtype))
        return [np.concatenate(own) for own in parts]

    def decode(self, ids: np.ndarray) -> str:
        """The text of `ids`, special tokens left out."""
        return self._tokenizer.decode(np.asarray(ids).tolist())


def _pieces(text_bytes: bytes) -> Iterator[str]:
    text = text_bytes.decode(errors="replace")
    start = 0
    while start < len(text):
        end = text.find("\n", start + _PIECE_CHARS) + 1 or len(text)
        yield text[start:end]
        start = end


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise DataError(
            "The tokenizer cannot be read.",
            where=str(path),
            why=f"{(error.strerror or repr(error)).lower()}.",
            do="give the tokenizer.json of the model, e.g. --tokenizer gpt2/tokenizer.json.",
        ) from error


def _parse(path: Path, content: bytes) -> Any:
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
        return tokenizers.Tokenizer.from_buffer(content)
    except Exception as error:  # the package raises bare Exception
        raise DataError(
            "The file is no tokenizer.",
            where=str(path),
            why=f"{len(content)} bytes that `tokenizers` {tokenizers.__version__} cannot read: {error}.",
            do="give the tokenizer.json of the model (not tokenizer_config.json, vocab.json or merges.txt).",
        ) from error
