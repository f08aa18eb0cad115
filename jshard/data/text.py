"""Files of text as data: found, checked, turned into tokens, split into what is trained on and what is held out."""

from __future__ import annotations

import hashlib
import itertools
import os
import sysconfig
import warnings
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from jshard.data.loader import Data, DataError, Sample

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

    def encode_batch(self, texts: Sequence[bytes]) -> list[np.ndarray]:
        """The ids of each text in UTF-8, of the smallest unsigned dtype that holds all, without `end_of_text`."""
        ...

    def decode(self, ids: np.ndarray) -> str:
        """The text of `ids`; what is not UTF-8 becomes U+FFFD."""
        ...


class ByteTokenizer:
    """Every byte is a token, so there is nothing to install and no text it cannot read; a zero byte ends a text."""

    name = "bytes"
    vocab_size = 256
    end_of_text: int | None = 0

    def encode_batch(self, texts: Sequence[bytes]) -> list[np.ndarray]:
        """The bytes of each text, as they are."""
        return [np.frombuffer(text, dtype=np.uint8) for text in texts]

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
        content, self._tokenizer = _read_tokenizer(path)
        vocabulary = self._tokenizer.get_vocab(with_added_tokens=True)
        # The ids of a file may have gaps: their count is not enough.
        self.vocab_size: int = max(vocabulary.values()) + 1
        self.end_of_text: int | None = next((vocabulary[t] for t in _END_OF_TEXT if t in vocabulary), None)
        # By content and not by path: the file may be elsewhere on the next machine.
        self.name = f"{path.name} {zlib.crc32(content):08x}"

    def encode_batch(self, texts: Sequence[bytes]) -> list[np.ndarray]:
        """The ids of each text, encoded on all cores, without the special tokens a file may put around it."""
        dtype = np.min_scalar_type(self.vocab_size - 1)
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


def _read_tokenizer(path: Path) -> tuple[bytes, Any]:
    """What is in the file, and the tokenizer of that."""
    what, why, do = (
        "The tokenizer cannot be read.",
        "",
        "give the tokenizer.json of the model, e.g. --tokenizer gpt2/tokenizer.json.",
    )
    try:
        import tokenizers

        content = path.read_bytes()
        return content, tokenizers.Tokenizer.from_buffer(content)
    except OSError as error:
        why, cause = f"{(error.strerror or repr(error)).lower()}.", error
    except ImportError as error:
        what, why, cause = "A Hugging Face tokenizer needs the package `tokenizers`.", "it is not installed.", error
        do = "pip install 'jshard[hf]', or leave out the tokenizer to train on bytes."
    except Exception as error:  # the package raises bare Exception
        what, why, cause = (
            "The file is no tokenizer.",
            f"`tokenizers` cannot read it: {error}.",
            error,
        )
        do = "give the tokenizer.json of the model (not tokenizer_config.json, vocab.json or merges.txt)."
    raise DataError(what, where=str(path), why=why, do=do) from cause


_SHOWN = 10


def _read_texts(paths: Sequence[str | Path]) -> dict[str, bytes]:
    """The texts of files and folders by relative path, in its order; all that cannot be used is one `DataError`."""
    texts: dict[str, bytes] = {}
    places: set[Path] = set()
    bad: dict[Path, str] = {}
    skipped: dict[Path, str] = {}
    for root in map(Path, paths):
        read, others = _texts_in(root)
        if not any(read.values()):
            bad |= others or {root: "a folder without text (hidden files are left out)" if root.is_dir() else "empty"}
            continue
        skipped |= others
        for path, text in read.items():
            if path.resolve() not in places:  # a file that is given twice is read once
                texts[_name(path, root, texts)] = text
                places.add(path.resolve())
    if bad:
        raise DataError(
            f"{len(bad)} of the files and folders given cannot be trained on.",
            where=[f"{path}: {why}" for path, why in bad.items()],
            why=f"--data takes text files in UTF-8, and folders that hold some; seen from {Path.cwd()}.",
            do="correct or leave out those paths; iconv -f latin1 -t utf-8 OLD > NEW turns other text into UTF-8.",
        )
    if skipped:
        listed = [f"\n  {path}: {why}" for path, why in skipped.items()]
        more = f"\n  ... and {len(listed) - _SHOWN} more" if len(listed) > _SHOWN else ""
        warnings.warn(f"{len(skipped)} file(s) are left out of the text:{''.join(listed[:_SHOWN])}{more}", stacklevel=3)
    return dict(sorted(texts.items()))


def _texts_in(root: Path) -> tuple[dict[Path, bytes], dict[Path, str]]:
    """The files at or below `root` that are text, and why others are not."""
    texts: dict[Path, bytes] = {}
    others: dict[Path, str] = {}

    def unreadable(error: OSError) -> None:
        others[Path(error.filename)] = f"{(error.strerror or repr(error)).lower()}"

    files = []
    for folder, folders, names in os.walk(root, onerror=unreadable) if root.is_dir() else ():
        visible = sorted(name for name in folders if not name.startswith("."))
        links = [name for name in visible if os.path.islink(os.path.join(folder, name))]
        others |= {Path(folder, name): "a link to a folder, which is not followed; name it itself" for name in links}
        folders[:] = [name for name in visible if name not in links]
        files += [Path(folder, name) for name in sorted(names) if not name.startswith(".")]
    for path in files if root.is_dir() else [root]:
        try:
            if path.exists() and not path.is_file():
                raise ValueError("neither a file nor a folder")
            text = path.read_bytes()
            text.decode()
            if b"\0" in text:
                raise ValueError(f"a zero byte in position {text.index(0)}")
            texts[path] = text
        except OSError as error:
            unreadable(error)
        except ValueError as error:
            others[path] = f"not text: {error}"
    return texts, others


def _name(path: Path, root: Path, taken: dict[str, bytes]) -> str:
    # The last part of what was given stays in the name, so that two folders may hold equal names.
    name = Path(Path(os.path.abspath(root)).name, path.relative_to(root)).as_posix()
    return path.as_posix() if name in taken else name


# Parts of the standard library that are not there everywhere (packagers split them off), or that
# are tables and tests and not code that people read.
_STDLIB_SKIPPED = frozenset(
    "__pycache__ distutils encodings ensurepip idlelib lib2to3 pydoc_data site-packages "
    "dist-packages test tests tkinter turtledemo turtle.py".split()
)
_HELD_OUT_PER_MILLE = 50
_FEWEST_FILES_TO_SPLIT_BY = 20
_BYTES = ByteTokenizer()


def load_text(paths: Sequence[str | Path] = (), *, sequence_length: int, tokenizer: Tokenizer = _BYTES) -> Data:
    """Reads text files, and folders of them recursively, in the order of their relative paths.

    A sample is `sequence_length` consecutive tokens, "inputs", and "targets", the same text one token later, both
    int32. About one file in twenty, picked by a hash of its relative path, is held out: adding a file moves no other
    one across. With fewer than 20 files it is the last twentieth of each.

    Text is UTF-8 without zero bytes. In a folder, hidden files and folders are left out, and what cannot be read as
    text is left out with a warning; a file that was named itself has to be text.

    Args:
        paths: text files or folders of them; none means the sources of the standard library.
        sequence_length: tokens per sample.
        tokenizer: bytes by default.

    Returns:
        The two parts as windows of tokens, "inputs" and "targets".

    Raises:
        DataError: a path is missing, empty, unreadable or not text (all such paths in one message), or the text is
            shorter than a sequence.
    """
    texts = _read_texts(paths) if paths else _stdlib_texts()
    by_file = len(texts) >= _FEWEST_FILES_TO_SPLIT_BY
    train, held_out = _split(_encoded(texts, tokenizer), tokenizer, by_file)
    origin = ", ".join(map(str, paths)) or "the Python standard library"
    unit = "MB" if isinstance(tokenizer, ByteTokenizer) else f"M tokens ({tokenizer.name})"
    description = (
        f"{len(texts)} file{'s' * (len(texts) > 1)} of {origin}: {train.size / 1e6:.2f} {unit} to train on, "
        f"{held_out.size / 1e6:.2f} {unit.split()[0]} held out ({'by file' if by_file else 'the end of each file'})"
    )
    _check_lengths({"to train on": train, "held out": held_out}, sequence_length, description)
    return Data(
        train=TokenWindows(train, sequence_length),
        held_out=TokenWindows(held_out, sequence_length),
        description=description,
        fingerprint=_fingerprint(train, held_out, tokenizer, sequence_length),
        tokens_per_sample=sequence_length,
        tokenizer=tokenizer,
    )


class TokenWindows:
    """Tokens as consecutive windows of one more than a sequence: a `Source` of inputs and targets.

    Args:
        tokens: one text after another, of any integer dtype.
        sequence_length: length of the inputs.
    """

    def __init__(self, tokens: np.ndarray, sequence_length: int):
        self._tokens = tokens
        self._length = sequence_length

    def __len__(self) -> int:
        return max(0, self._tokens.size - 1) // self._length

    def __getitem__(self, index: int, /) -> Sample:
        start = index * self._length
        window = self._tokens[start : start + self._length + 1].astype(np.int32)
        return {"inputs": window[:-1], "targets": window[1:]}


def _stdlib_texts() -> dict[str, bytes]:
    root, texts = Path(sysconfig.get_paths()["stdlib"]), {}
    for folder, folders, files in os.walk(root):
        folders[:] = [name for name in folders if name not in _STDLIB_SKIPPED]  # site-packages may be very large
        for name in files:
            path = Path(folder, name)
            is_generated = name.startswith("_sysconfigdata")  # different on each machine
            if path.suffix == ".py" and name not in _STDLIB_SKIPPED and not is_generated:
                texts[path.relative_to(root).as_posix()] = path.read_bytes()
    return dict(sorted(texts.items()))


def _encoded(texts: Mapping[str, bytes], tokenizer: Tokenizer) -> dict[str, np.ndarray]:
    end = [] if tokenizer.end_of_text is None else [tokenizer.end_of_text]
    ending = np.array(end, np.min_scalar_type(tokenizer.vocab_size - 1))
    encoded = tokenizer.encode_batch(list(texts.values()))
    return {name: np.concatenate([ids, ending]) for name, ids in zip(texts, encoded, strict=True)}


def _split(encoded: Mapping[str, np.ndarray], tokenizer: Tokenizer, by_file: bool) -> tuple[np.ndarray, np.ndarray]:
    nothing = np.empty(0, np.min_scalar_type(tokenizer.vocab_size - 1))
    train, held_out = [nothing], [nothing]
    for name, tokens in encoded.items():
        cut = tokens.size * (1000 - _HELD_OUT_PER_MILLE) // 1000
        if by_file:
            cut = 0 if zlib.crc32(name.encode()) % 1000 < _HELD_OUT_PER_MILLE else tokens.size
        train.append(tokens[:cut])
        held_out.append(tokens[cut:])
    return np.concatenate(train), np.concatenate(held_out)


def _check_lengths(parts: Mapping[str, np.ndarray], sequence_length: int, description: str) -> None:
    short = {part: tokens.size for part, tokens in parts.items() if tokens.size <= sequence_length}
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


def _fingerprint(train: np.ndarray, held_out: np.ndarray, tokenizer: Tokenizer, sequence_length: int) -> str:
    digest = hashlib.sha256(f"{tokenizer.name} {sequence_length} {train.dtype} {train.size} {held_out.size}".encode())
    digest.update(train.data)
    digest.update(held_out.data)
    return f"text {digest.hexdigest()[:16]}"
