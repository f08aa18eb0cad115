"""Files as data: texts turned into tokens, split into training and held-out data."""

from __future__ import annotations

import collections
import dataclasses
import hashlib
import zlib
from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction
from pathlib import Path

import numpy as np

from jshard._text import counted
from jshard.data.files import read_texts, stdlib_texts, weighted
from jshard.data.loader import Data, DataError, Mixture, Sample, Source
from jshard.data.token_files import Dtype, TokenFile, is_tokens, token_file
from jshard.data.tokenizer import ByteTokenizer, Tokenizer

Tokens = np.ndarray | TokenFile
"""Token ids, in memory or on the disk."""

_HELD_OUT_PER_MILLE = 50  # a twentieth
_FEWEST_FILES_TO_SPLIT_BY = 20  # by the hashes of a few names, none may be held out, or all
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

    Examples:
        >>> data = load_text(["train.bin"], held_out=["val.bin"], dtype="uint16", sequence_length=1024)
        >>> data = load_text(["web.jsonl=0.7", "code.parquet=0.3"], sequence_length=1024, tokenizer=tokenizer)
    """
    files, weights = weighted(paths)
    held_out_files = [Path(path) for path in held_out]
    has_text = not files or _has_text(files + held_out_files)
    # Files of ids alone need no tokenizer; and bytes are only the default, which says nothing of the ids.
    uses_tokenizer = has_text or not isinstance(tokenizer, ByteTokenizer)
    limit = _smallest(vocab_size, tokenizer.vocab_size if uses_tokenizer else None)
    reader = _Reader(tokenizer, text_key, dtype, limit)

    # Held out whole: with 0 per mille, all tokens are in `train` of these parts.
    held_out_parts = reader.read(held_out_files, per_mille=0)
    per_mille = 0 if held_out_files else _HELD_OUT_PER_MILLE
    parts: list[_TokenPart] = []
    for group in _groups(files, weights):
        parts += reader.read(group, per_mille=per_mille)
    if not files:
        parts.append(reader.read_library(per_mille=per_mille))
    text = _TextData(parts, held_out_parts)

    source = ", ".join(map(str, paths)) or "the Python standard library"
    held_out_is = ", ".join(map(str, held_out_files)) or text.how_held_out
    unit = _unit(tokenizer) if has_text else "M tokens"
    description = _described(text, source=source, held_out_is=held_out_is, unit=unit)
    _check_lengths(_sizes(text, files, weights), sequence_length, description)
    return Data(
        train=_windows(text.train, sequence_length, weights),
        held_out=_windows(text.held_out, sequence_length),
        description=description,
        fingerprint=_fingerprint(text, weights, tokenizer, sequence_length),
        tokens_per_sample=sequence_length,
        tokenizer=tokenizer if uses_tokenizer else None,
    )


def _has_text(paths: Sequence[Path]) -> bool:
    return not all(is_tokens(path) for path in paths)


def _smallest(*sizes: int | None) -> int | None:
    """Returns the smallest of the vocabularies that are known."""
    known = [size for size in sizes if size is not None]
    return min(known, default=None)


def _groups(files: list[Path], weights: Sequence[Fraction]) -> list[list[Path]]:
    """Returns the files that are read together: all, or each by itself if each has a weight."""
    if weights:
        return [[path] for path in files]
    return [files]


# ---- what is read


@dataclasses.dataclass(frozen=True)
class _TokenPart:
    """Tokens that belong together.

    Attributes:
        train: those to train on.
        held_out: the others.
        count: of how many files or documents.
        noun: the word for one of them.
        held_out_is: how they were chosen, in words.
    """

    train: Tokens
    held_out: Tokens
    count: int
    noun: str
    held_out_is: str


@dataclasses.dataclass(frozen=True)
class _TextData:
    """All that was read.

    Attributes:
        parts: of the files to train on.
        held_out_parts: of the files that are held out whole; empty if a piece of each part is.
    """

    parts: Sequence[_TokenPart]
    held_out_parts: Sequence[_TokenPart]

    @property
    def train(self) -> list[Tokens]:
        """The tokens to train on, part by part."""
        return [part.train for part in self.parts]

    @property
    def held_out(self) -> list[Tokens]:
        """The tokens that are held out, part by part."""
        if self.held_out_parts:
            return [part.train for part in self.held_out_parts]
        return [part.held_out for part in self.parts]

    @property
    def train_sizes(self) -> list[int]:
        """The number of tokens to train on of each part."""
        return [tokens.size for tokens in self.train]

    @property
    def held_out_sizes(self) -> list[int]:
        """The number of tokens of each part that is held out."""
        return [tokens.size for tokens in self.held_out]

    @property
    def how_held_out(self) -> str:
        """How pieces of the parts were chosen, in words."""
        return " and ".join(dict.fromkeys(part.held_out_is for part in self.parts))

    @property
    def counts(self) -> str:
        """How many files and documents there are to train on."""
        counts = collections.Counter[str]()
        for part in self.parts:
            counts[part.noun] += part.count
        return " and ".join(counted(count, noun) for noun, count in sorted(counts.items(), reverse=True))


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

    def read(self, paths: Sequence[Path], *, per_mille: int) -> list[_TokenPart]:
        """Returns the text of all files as one part, then a part for each file of ids; nothing without files.

        Args:
            paths: files and folders.
            per_mille: how many of a thousand tokens, or files, are held out.
        """
        parts = []
        text_paths = []
        for path in paths:
            if is_tokens(path):
                file = token_file(path, self.dtype, self.limit)
                parts.append(_part_of_ids(file, per_mille))
            else:
                text_paths.append(path)
        if text_paths:
            end = b"\0" if isinstance(self.tokenizer, ByteTokenizer) else b""
            texts, noun = read_texts(text_paths, self.text_key, end=end)
            parts.insert(0, self._part_of_texts(texts, noun, per_mille))
        return parts

    def read_library(self, *, per_mille: int) -> _TokenPart:
        """Returns the text of the Python standard library."""
        return self._part_of_texts(stdlib_texts(), "file", per_mille)

    def _part_of_texts(self, texts: Mapping[str, bytes], noun: str, per_mille: int) -> _TokenPart:
        """Encodes texts, and holds out whole ones if there are enough of them, else the end of each."""
        by_file = len(texts) >= _FEWEST_FILES_TO_SPLIT_BY
        # For a part without tokens, and of the dtype of the ids: others would widen the result.
        empty = np.empty(0, np.min_scalar_type(self.tokenizer.vocab_size - 1))
        train = [empty]
        held_out = [empty]
        for name, tokens in self._encoded(texts).items():
            cut = _num_to_train_on(tokens.size, per_mille)
            if by_file:
                # By a hash of its name, so that a file stays on its side when others come and go.
                is_held_out = zlib.crc32(name.encode()) % 1000 < per_mille
                cut = 0 if is_held_out else tokens.size
            train.append(tokens[:cut])
            held_out.append(tokens[cut:])
        held_out_is = f"by {noun}" if by_file else f"the end of each {noun}"
        return _TokenPart(np.concatenate(train), np.concatenate(held_out), len(texts), noun, held_out_is)

    def _encoded(self, texts: Mapping[str, bytes]) -> dict[str, np.ndarray]:
        """Returns the ids of each text, with the end of a text if the vocabulary has one."""
        return dict(zip(texts, with_ends(self.tokenizer, list(texts.values())), strict=True))


def with_ends(tokenizer: Tokenizer, texts: Sequence[bytes]) -> list[np.ndarray]:
    """Returns the ids of each text, with the end of a text if the vocabulary has one."""
    end = [] if tokenizer.end_of_text is None else [tokenizer.end_of_text]
    ending = np.array(end, np.min_scalar_type(tokenizer.vocab_size - 1))
    return [np.concatenate([ids, ending]) for ids in tokenizer.encode_batch(texts)]


def _part_of_ids(file: TokenFile, per_mille: int) -> _TokenPart:
    cut = _num_to_train_on(file.size, per_mille)
    return _TokenPart(file.part(0, cut), file.part(cut, file.size), 1, "file", "the end of each file")


def _num_to_train_on(num_tokens: int, per_mille: int) -> int:
    return num_tokens * (1000 - per_mille) // 1000


# ---- what is said of it


def _unit(tokenizer: Tokenizer) -> str:
    return "MB" if isinstance(tokenizer, ByteTokenizer) else f"M tokens ({tokenizer.name})"


def _described(text: _TextData, *, source: str, held_out_is: str, unit: str) -> str:
    """Returns the line that a run prints of its data."""
    num_train = sum(text.train_sizes)
    num_held_out = sum(text.held_out_sizes)
    short_unit = unit.split()[0]  # without the tokenizer's name
    return (
        f"{text.counts} of {source}: {num_train / 1e6:.2f} {unit} to train on, "
        f"{num_held_out / 1e6:.2f} {short_unit} held out ({held_out_is})"
    )


def _sizes(text: _TextData, files: Sequence[Path], weights: Sequence[Fraction]) -> dict[str, int]:
    """Returns the numbers of tokens that must suffice for a sample, by their name in a message."""
    sizes = {}
    if weights:  # each file is sampled from by itself; otherwise one part with a sample is enough
        # Each file is a part of its own then, see `_groups`.
        for path, size in zip(files, text.train_sizes, strict=True):
            sizes[f"to train on from {path}"] = size
    else:
        sizes["to train on"] = max(text.train_sizes)
    sizes["held out"] = max(text.held_out_sizes)
    return sizes


def _check_lengths(sizes: Mapping[str, int], sequence_length: int, description: str) -> None:
    """Raises for parts without a single sample.

    Args:
        sizes: the tokens of each part, by its name.
        sequence_length: that of a sample.
        description: of the data.
    """
    # A sample has one token more, its last target.
    short = {part: size for part, size in sizes.items() if size <= sequence_length}
    if not short:
        return
    too_few = ", ".join(f"{size} are {part}" for part, size in short.items())
    longest = min(short.values()) - 1
    do = "give --data more text."
    if longest > 0:
        do = f"give --data more text, or use shorter sequences: --set sequence_length={longest}"
    raise DataError(
        "The text is shorter than one sequence.",
        where=description,
        why=f"a sequence of {sequence_length} and its last target take {sequence_length + 1} tokens; {too_few}.",
        do=do,
    )


def _fingerprint(text: _TextData, weights: Sequence[Fraction], tokenizer: Tokenizer, sequence_length: int) -> str:
    """Returns a text that differs if the samples of a run do."""
    words = ["text"]
    for weight in weights:
        words.append(f"{weight}x")
    for part in (*text.parts, *text.held_out_parts):
        words.append(_fingerprint_of_part(part, tokenizer, sequence_length))
    return " ".join(words)


def _fingerprint_of_part(part: _TokenPart, tokenizer: Tokenizer, sequence_length: int) -> str:
    train = part.train
    held_out = part.held_out
    # With the dtype: the same bytes are other ids in another width.
    digest = hashlib.sha256(f"{tokenizer.name} {sequence_length} {train.dtype} {train.size} {held_out.size}".encode())
    for ids in (train, held_out):
        # A large file by a sample of its ids: reading all of it would take minutes.
        for piece in _pieces(ids):
            digest.update(piece.data)
    return digest.hexdigest()[:16]


def _pieces(ids: Tokens) -> Iterator[np.ndarray]:
    """Yields all ids, or of a large file those that are quickly read."""
    if isinstance(ids, TokenFile):
        yield from ids.pieces()
    else:
        yield ids


# ---- samples


def _windows(tokens: Sequence[Tokens], sequence_length: int, weights: Sequence[Fraction] = ()) -> Source:
    sources = [TokenWindows(ids, sequence_length) for ids in tokens]
    return sources[0] if len(sources) == 1 else Mixture(sources, weights)


class TokenWindows:
    """Tokens as consecutive windows of one more than a sequence: a `Source` of inputs and targets.

    Args:
        tokens: one text after another, of any integer dtype; an array or a `TokenFile`.
        sequence_length: length of the inputs.
    """

    def __init__(self, tokens: Tokens, sequence_length: int):
        self._tokens = tokens
        self._length = sequence_length

    def __len__(self) -> int:
        return max(0, self._tokens.size - 1) // self._length  # the last target is no input

    def __getitem__(self, index: int, /) -> Sample:
        start = index * self._length
        window = self._tokens[start : start + self._length + 1].astype(np.int32)
        return {"inputs": window[:-1], "targets": window[1:]}
