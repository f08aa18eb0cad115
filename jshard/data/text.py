"""Files as data: texts turned into tokens, split into training and held-out data."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import hashlib
import itertools
import json
import zlib
from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from jshard._files import read_bytes
from jshard._paths import expanded
from jshard._text import counted
from jshard.data.files import Dtype, TokenFile, is_tokens, read_texts, stdlib_texts, token_file, weighted
from jshard.data.loader import Data, DataError, Mixture, Sample, Source
from jshard.errors import UnsafeFileError

# Possible names of the token between texts in a tokenizer file, the likeliest first.
_END_OF_TEXT = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>")
# An encoding takes some hundred times the bytes of its ids: this many pieces are about half a GB.
_PIECE_CHARS = 1 << 18
_PIECES_AT_ONCE = 64


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
        """The ids of each UTF-8 text, in the smallest unsigned dtype that fits all, without `end_of_text`."""
        ...

    def decode(self, ids: np.ndarray) -> str:
        """The text of `ids`; what is not UTF-8 becomes U+FFFD."""
        ...


class ByteTokenizer:
    """Every byte is a token, so it needs no installation and can read any text; a zero byte ends a text."""

    name = "bytes"
    vocab_size = 256
    end_of_text: int | None = 0

    def encode_batch(self, texts: Sequence[bytes]) -> list[np.ndarray]:
        """The bytes of each text, unchanged."""
        return [np.frombuffer(text, dtype=np.uint8) for text in texts]

    def decode(self, ids: np.ndarray) -> str:
        """The text of `ids`; what is not UTF-8 becomes U+FFFD."""
        return np.asarray(ids, dtype=np.uint8).tobytes().decode(errors="replace")


class HuggingFaceTokenizer:
    """The tokenizer of a `tokenizer.json`, using the package `tokenizers`.

    A long text is cut at line ends into pieces of about 256 kB, which are encoded in parallel: memory stays
    bounded, but merges across such a cut are lost.

    Args:
        path: the file.

    Raises:
        DataError: `tokenizers` is not installed, or the file cannot be read as a tokenizer.
    """

    def __init__(self, path: str | Path):
        path = expanded(path)
        content, self._tokenizer = _read_tokenizer(path)
        vocabulary = self._tokenizer.get_vocab(with_added_tokens=True)
        largest = max(vocabulary.values(), default=_INT32_IDS)
        if largest >= _INT32_IDS:
            why = "its vocabulary is empty." if not vocabulary else f"it has the id {largest}; ids are int32."
            raise DataError("The tokenizer has no usable ids.", where=str(path), why=why, do=_GIVE_ITS_OWN)
        self._path = path
        # The ids of a file may have gaps: their count is not enough.
        self.vocab_size: int = largest + 1
        self.end_of_text: int | None = next((vocabulary[t] for t in _END_OF_TEXT if t in vocabulary), None)
        # By content and not by path: the file may be elsewhere on the next machine.
        self.name = f"{path.name} {zlib.crc32(content):08x}"

    def encode_batch(self, texts: Sequence[bytes]) -> list[np.ndarray]:
        """The ids of each text, encoded on all cores, without the special tokens that the file may add around it."""
        dtype = np.min_scalar_type(self.vocab_size - 1)
        parts = [[np.empty(0, dtype)] for _ in texts]
        pieces = ((own, piece) for own, text in zip(parts, texts, strict=True) for piece in _pieces(text))
        while batch := list(itertools.islice(pieces, _PIECES_AT_ONCE)):
            with _in_four_parts("The tokenizer cannot encode the text.", self._path):
                encodings = self._tokenizer.encode_batch([piece for _, piece in batch], add_special_tokens=False)
            for (own, _), encoding in zip(batch, encodings, strict=True):
                own.append(np.array(encoding.ids, dtype))
        return [np.concatenate(own) for own in parts]

    def decode(self, ids: np.ndarray) -> str:
        """The text of `ids`, without special tokens."""
        return self._tokenizer.decode(np.asarray(ids).tolist())


def transformers_files(path: Path | None) -> dict[str, str]:
    """The files by which Transformers' AutoTokenizer turns text into the same ids, by name.

    Args:
        path: a tokenizer.json; None for bytes.
    """
    if path is None:
        content, end = _json_of_bytes(), _END_OF_TEXT[0]
    else:
        raw, tokenizer = _read_tokenizer(path)
        content = raw.decode()
        end = next((t for t in _END_OF_TEXT if t in tokenizer.get_vocab(with_added_tokens=True)), None)
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    config |= {} if end is None else {"eos_token": end}
    return {"tokenizer.json": content, "tokenizer_config.json": json.dumps(config, indent=2) + "\n"}


def _json_of_bytes() -> str:
    """`ByteTokenizer` as a tokenizer.json: a byte-level BPE without merges, whose id 0 is the end of a text."""
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]  # GPT-2's alphabet: these bytes stand for themselves
    hidden = [byte for byte in range(256) if byte not in shown]
    letters = {chr(byte): byte for byte in shown} | {chr(256 + i): byte for i, byte in enumerate(hidden) if byte}
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    content = {
        "version": "1.0",
        "added_tokens": [{"id": 0, "content": _END_OF_TEXT[0], **flags, "special": True}],
        "pre_tokenizer": level,
        "decoder": level,
        "model": {"type": "BPE", "vocab": {_END_OF_TEXT[0]: 0, **letters}, "merges": []},
    }
    return json.dumps(content)


def _pieces(text_bytes: bytes) -> Iterator[str]:
    text = text_bytes.decode(errors="replace")
    start = 0
    while start < len(text):
        end = text.find("\n", start + _PIECE_CHARS) + 1 or len(text)
        yield text[start:end]
        start = end


def _read_tokenizer(path: Path) -> tuple[bytes, Any]:
    """The contents of the file, and its tokenizer."""
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


_INT32_IDS = 2**31
_TOKENIZER_BYTES = 1 << 30
_GIVE_ITS_OWN = "give the tokenizer.json of the model (not tokenizer_config.json, vocab.json or merges.txt)."


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


_HELD_OUT_PER_MILLE = 50
_FEWEST_FILES_TO_SPLIT_BY = 20
_BYTES = ByteTokenizer()


def load_text(
    paths: Sequence[str | Path] = (),
    *,
    sequence_length: int,
    tokenizer: Tokenizer = _BYTES,
    held_out: Sequence[str | Path] = (),
    text_key: str = "text",
    dtype: Dtype | None = None,
    vocab_size: int | None = None,
) -> Data:
    """Reads files of text, documents or token ids, and recursively folders of text or documents, by relative path.

    A sample is `sequence_length` consecutive tokens, "inputs", and "targets", the same text one token later, both
    int32. About one file in twenty, chosen by a hash of its relative path, is held out, so that adding a file moves no
    other one. With fewer than 20 files it is the last twentieth of each. Each document (in `.jsonl` and `.ndjson`, also
    with `.gz`; `.parquet`; folders of Hugging Face datasets) is treated as a file. Token ids (`.bin`, `.npy`) stay on
    the disk, and the last twentieth of each file is held out.

    Text is UTF-8 without zero bytes. In a folder, hidden files and folders are skipped, and files that cannot be read
    as text are skipped with a warning; a file that is given directly must be text.

    Args:
        paths: files or folders; none means the sources of the standard library. If all are `"PATH=WEIGHT"`, each
            provides that share of the samples, see `Mixture`.
        sequence_length: tokens per sample.
        tokenizer: bytes by default.
        held_out: files or folders to hold out, instead of a part of `paths`.
        text_key: key or column of a document's text.
        dtype: of the ids in `.bin` files.
        vocab_size: the model's: larger ids in a file are an error when they are read.

    Returns:
        Training and held-out data as windows of tokens, "inputs" and "targets".

    Raises:
        DataError: a path is missing, empty, unreadable or not text (all such paths in one message), or the text is
            shorter than a sequence.

    Example:
        >>> data = load_text(["train.bin"], held_out=["val.bin"], dtype="uint16", sequence_length=1024)
        >>> data = load_text(["web.jsonl=0.7", "code.parquet=0.3"], sequence_length=1024, tokenizer=tokenizer)
    """
    files, weights = weighted(paths)
    own_held_out = [Path(path) for path in held_out]
    reads_bytes = isinstance(tokenizer, ByteTokenizer)
    has_text = not files or not all(map(is_tokens, files + own_held_out))
    uses_tokenizer = has_text or not reads_bytes  # ids alone need none, and bytes are only the default
    reader = _Reader(tokenizer, text_key, dtype, _limit(vocab_size, tokenizer.vocab_size if uses_tokenizer else None))

    held_out_parts = reader.read(own_held_out, per_mille=0) if own_held_out else []
    per_mille = 0 if own_held_out else _HELD_OUT_PER_MILLE
    parts: list[_Tokenized] = []
    for group in _groups(files, weights):
        parts += reader.read(group, per_mille=per_mille)
    train = [part.train for part in parts]
    evaluated = [part.train for part in held_out_parts] or [part.held_out for part in parts]

    description = _described(
        parts,
        source=", ".join(map(str, paths)) or "the Python standard library",
        num_train=sum(ids.size for ids in train),
        num_held_out=sum(ids.size for ids in evaluated),
        held_out_is=", ".join(map(str, own_held_out)) or " and ".join(dict.fromkeys(p.held_out_is for p in parts)),
        unit=_unit(tokenizer) if has_text else "M tokens",
    )
    sizes = {"to train on": max(ids.size for ids in train)}
    if weights:  # each file is sampled from by itself
        sizes = {f"to train on from {path}": ids.size for path, ids in zip(files, train, strict=True)}
    sizes["held out"] = max(ids.size for ids in evaluated)
    _check_lengths(sizes, sequence_length, description)

    fingerprints = [_fingerprint(part, tokenizer, sequence_length) for part in parts + held_out_parts]
    return Data(
        train=_windows(train, sequence_length, weights),
        held_out=_windows(evaluated, sequence_length),
        description=description,
        fingerprint=" ".join(["text", *(f"{weight}x" for weight in weights), *fingerprints]),
        tokens_per_sample=sequence_length,
        tokenizer=tokenizer if uses_tokenizer else None,
    )


@dataclasses.dataclass(frozen=True)
class _Reader:
    """Reads files into tokens.

    Attributes:
        tokenizer: for text.
        text_key: the key or column of a document's text.
        dtype: of the ids in `.bin` files.
        limit: ids must be smaller; None if nothing says so.
    """

    tokenizer: Tokenizer
    text_key: str
    dtype: Dtype | None
    limit: int | None

    def read(self, paths: Sequence[Path], *, per_mille: int) -> list[_Tokenized]:
        """Returns the text of all files as one part, then a part for each file of ids; no paths: the library's text.

        Args:
            paths: files and folders.
            per_mille: how many of a thousand tokens, or files, are held out.
        """
        ids = [token_file(path, self.dtype, self.limit) for path in paths if is_tokens(path)]
        id_parts = [_token_part(file, per_mille) for file in ids]
        text_paths = [path for path in paths if not is_tokens(path)]
        if paths and not text_paths:
            return id_parts
        if paths:
            end = b"\0" if isinstance(self.tokenizer, ByteTokenizer) else b""
            texts, noun = read_texts(text_paths, self.text_key, end=end)
        else:
            texts, noun = stdlib_texts(), "file"
        return [_text_part(texts, noun, self.tokenizer, per_mille), *id_parts]


def _limit(*sizes: int | None) -> int | None:
    """Returns the smallest of the vocabularies that are known."""
    return min((size for size in sizes if size is not None), default=None)


def _groups(files: list[Path], weights: Sequence[Fraction]) -> list[list[Path]]:
    """Returns the files that are read together: all, or each by itself if each has a weight."""
    return [[path] for path in files] if weights else [files]


def _unit(tokenizer: Tokenizer) -> str:
    return "MB" if isinstance(tokenizer, ByteTokenizer) else f"M tokens ({tokenizer.name})"


def _described(
    parts: Sequence[_Tokenized], *, source: str, num_train: int, num_held_out: int, held_out_is: str, unit: str
) -> str:
    """Returns the line that a run prints of its data."""
    short_unit = unit.split()[0]  # without the tokenizer's name
    return (
        f"{_counted(parts)} of {source}: {num_train / 1e6:.2f} {unit} to train on, "
        f"{num_held_out / 1e6:.2f} {short_unit} held out ({held_out_is})"
    )


@dataclasses.dataclass(frozen=True)
class _Tokenized:
    """Tokens that belong together, on the disk or in memory."""

    train: Any
    held_out: Any
    count: int
    noun: str
    held_out_is: str


def _counted(parts: Sequence[_Tokenized]) -> str:
    counts = collections.Counter[str]()
    for part in parts:
        counts[part.noun] += part.count
    return " and ".join(counted(count, noun) for noun, count in sorted(counts.items(), reverse=True))


def _text_part(texts: Mapping[str, bytes], noun: str, tokenizer: Tokenizer, per_mille: int) -> _Tokenized:
    by_file = len(texts) >= _FEWEST_FILES_TO_SPLIT_BY
    train, held_out = _split(_encoded(texts, tokenizer), tokenizer, by_file, per_mille)
    return _Tokenized(train, held_out, len(texts), noun, f"by {noun}" if by_file else f"the end of each {noun}")


def _token_part(file: TokenFile, per_mille: int) -> _Tokenized:
    cut = file.size * (1000 - per_mille) // 1000
    return _Tokenized(file.part(0, cut), file.part(cut, file.size), 1, "file", "the end of each file")


def _windows(tokens: Sequence[Any], sequence_length: int, weights: Sequence[Fraction] = ()) -> Source:
    sources = [TokenWindows(ids, sequence_length) for ids in tokens]
    return sources[0] if len(sources) == 1 else Mixture(sources, weights)


class TokenWindows:
    """Tokens as consecutive windows of one more than a sequence: a `Source` of inputs and targets.

    Args:
        tokens: one text after another, of any integer dtype; an array or a `TokenFile`.
        sequence_length: length of the inputs.
    """

    def __init__(self, tokens: np.ndarray | TokenFile, sequence_length: int):
        self._tokens = tokens
        self._length = sequence_length

    def __len__(self) -> int:
        return max(0, self._tokens.size - 1) // self._length

    def __getitem__(self, index: int, /) -> Sample:
        start = index * self._length
        window = self._tokens[start : start + self._length + 1].astype(np.int32)
        return {"inputs": window[:-1], "targets": window[1:]}


def _encoded(texts: Mapping[str, bytes], tokenizer: Tokenizer) -> dict[str, np.ndarray]:
    end = [] if tokenizer.end_of_text is None else [tokenizer.end_of_text]
    ending = np.array(end, np.min_scalar_type(tokenizer.vocab_size - 1))
    encoded = tokenizer.encode_batch(list(texts.values()))
    return {name: np.concatenate([ids, ending]) for name, ids in zip(texts, encoded, strict=True)}


def _split(encoded: Mapping[str, np.ndarray], tokenizer: Tokenizer, by_file: bool, per_mille: int) -> tuple[Any, Any]:
    nothing = np.empty(0, np.min_scalar_type(tokenizer.vocab_size - 1))
    train, held_out = [nothing], [nothing]
    for name, tokens in encoded.items():
        cut = tokens.size * (1000 - per_mille) // 1000
        if by_file:
            cut = 0 if zlib.crc32(name.encode()) % 1000 < per_mille else tokens.size
        train.append(tokens[:cut])
        held_out.append(tokens[cut:])
    return np.concatenate(train), np.concatenate(held_out)


def _check_lengths(sizes: Mapping[str, int], sequence_length: int, description: str) -> None:
    short = {part: size for part, size in sizes.items() if size <= sequence_length}
    if not short:
        return
    longest = min(short.values()) - 1
    shorter = f", or use shorter sequences: --set sequence_length={longest}" if longest > 0 else "."
    raise DataError(
        "The text is shorter than one sequence.",
        where=description,
        why=f"a sequence of {sequence_length} and its last target take {sequence_length + 1} tokens; "
        + ", ".join(f"{size} are {part}" for part, size in short.items())
        + ".",
        do=f"give --data more text{shorter}",
    )


def _fingerprint(part: _Tokenized, tokenizer: Tokenizer, sequence_length: int) -> str:
    train, held_out = part.train, part.held_out
    digest = hashlib.sha256(f"{tokenizer.name} {sequence_length} {train.dtype} {train.size} {held_out.size}".encode())
    for ids in (train, held_out):
        for piece in ids.pieces() if isinstance(ids, TokenFile) else [ids]:
            digest.update(piece.data)
    return digest.hexdigest()[:16]
