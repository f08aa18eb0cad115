"""Files of text as data: found, checked, cut into tokens, split into what is trained on and what is held out.

With no file given the text is the source code of Python's standard library: every machine has it.
"""

from __future__ import annotations

import hashlib
import os
import sysconfig
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from jshard.train.data.source import Data, DataError, Sample
from jshard.train.data.text_files import read_texts
from jshard.train.data.tokenizer import ByteTokenizer, Tokenizer, token_dtype

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
        DataError: a path is missing, empty, unreadable or not text (all such paths are told at once), or the text is
            shorter than a sequence.
    """
    texts = read_texts(paths) if paths else _stdlib_texts()
    by_file = len(texts) >= _FEWEST_FILES_TO_SPLIT_BY
    train, held_out = _split(_encoded(texts, tokenizer), tokenizer, by_file)
    amount = (
        f"{len(texts)} file{'s' * (len(texts) > 1)} of {', '.join(map(str, paths)) or 'the Python standard library'}"
    )
    unit = "MB" if isinstance(tokenizer, ByteTokenizer) else f"M tokens ({tokenizer.name})"
    description = (
        f"{amount}: {train.size / 1e6:.2f} {unit} to train on, {held_out.size / 1e6:.2f} {unit.split()[0]} held out "
        f"({'by file' if by_file else 'the end of each file'})"
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
    ending = np.array(end, token_dtype(tokenizer.vocab_size))
    encoded = tokenizer.encode_batch(list(texts.values()))
    return {name: np.concatenate([ids, ending]) for name, ids in zip(texts, encoded, strict=True)}


def _split(encoded: Mapping[str, np.ndarray], tokenizer: Tokenizer, by_file: bool) -> tuple[np.ndarray, np.ndarray]:
    nothing = np.empty(0, token_dtype(tokenizer.vocab_size))
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
