"""Text in, batches out, in an order that depends on nothing but the seed.

Every file is read as bytes, so the vocabulary is 256 and there is no tokenizer to install. With no
folder given the text is the source code of Python's standard library: every machine has it.

The sample with global index `i` is a pure function of (text, sequence_length, seed, i), and step
`s` takes the indices from `s * batch_size` on. Neither the mesh nor the number of processes enters,
so a run may continue on other machines with the very samples it would have seen.
"""

from __future__ import annotations

import dataclasses
import sysconfig
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import grain
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jshard._errors import ShardingError

# Parts of the standard library that are not there everywhere (packagers split them off), or that
# are tables and tests and not code that people read.
_STDLIB_SKIPPED = frozenset(
    "__pycache__ distutils encodings ensurepip idlelib lib2to3 pydoc_data site-packages "
    "dist-packages test tests tkinter turtledemo turtle.py".split()
)
_HELD_OUT_PER_MILLE = 50
_FEWEST_FILES_TO_SPLIT_BY = 20
_END_OF_FILE = b"\0"


Tokens = dict[str, np.ndarray]


class DataError(ShardingError):
    """The text cannot be used for this run."""


@dataclasses.dataclass(frozen=True)
class Corpus:
    """Text as bytes, split into what is trained on and what is held out.

    Attributes:
        train: uint8, every training file, one after another.
        held_out: uint8, text that training never sees.
        description: one line: where the text is from and how it was split.
    """

    train: np.ndarray
    held_out: np.ndarray
    description: str


def load_corpus(paths: Sequence[str | Path] = ()) -> Corpus:
    """Reads files and folders (recursively) in the order of their relative paths.

    About one file in twenty, picked by a hash of its relative path, is held out: adding a file
    moves no other one across. With fewer than 20 files it is the last twentieth of each.

    Args:
        paths: text files or folders of them; none means the sources of the standard library.

    Raises:
        DataError: a path does not exist, or there is no text.
    """
    files = _given_files(paths) if paths else _stdlib_files()
    texts = {name: path.read_bytes() + _END_OF_FILE for name, path in sorted(files.items())}
    by_file = len(texts) >= _FEWEST_FILES_TO_SPLIT_BY
    train: list[bytes] = []
    held_out: list[bytes] = []
    for name, text in texts.items():
        cut = len(text) * (1000 - _HELD_OUT_PER_MILLE) // 1000
        if by_file:
            cut = 0 if zlib.crc32(name.encode()) % 1000 < _HELD_OUT_PER_MILLE else len(text)
        train.append(text[:cut])
        held_out.append(text[cut:])
    source = ", ".join(map(str, paths)) if paths else "the Python standard library"
    rule = "by file" if by_file else "the end of each file"
    corpus = Corpus(_bytes(train), _bytes(held_out), "")
    description = (
        f"{len(texts)} files of {source}: {corpus.train.size / 1e6:.2f} MB to train on, "
        f"{corpus.held_out.size / 1e6:.2f} MB held out ({rule})"
    )
    return dataclasses.replace(corpus, description=description)


def _bytes(parts: list[bytes]) -> np.ndarray:
    return np.frombuffer(b"".join(parts), dtype=np.uint8)


def _stdlib_files() -> dict[str, Path]:
    root = Path(sysconfig.get_paths()["stdlib"])
    files = {path.relative_to(root): path for path in root.rglob("*.py")}
    return {
        name.as_posix(): path
        for name, path in files.items()
        if not _STDLIB_SKIPPED.intersection(name.parts)
        and not name.name.startswith("_sysconfigdata")  # generated, different on each machine
    }


def _given_files(paths: Sequence[str | Path]) -> dict[str, Path]:
    files: dict[str, Path] = {}
    for root in map(Path, paths):
        found = [root] if root.is_file() else sorted(p for p in root.rglob("*") if p.is_file())
        if not found:
            raise DataError(
                "There is no text to train on.",
                where=str(root),
                why="the folder holds no file." if root.is_dir() else "no such file or folder.",
                do="give --data a text file or a folder of text files.",
            )
        # The last part of what was given stays in the name: two folders may hold equal names.
        files |= {path.relative_to(root.parent).as_posix(): path for path in found}
    return files


class _Windows:
    """A text as consecutive windows of one token more than a sequence: inputs and targets."""

    def __init__(self, text: np.ndarray, sequence_length: int):
        self._text = text
        self._length = sequence_length

    def __len__(self) -> int:
        return (self._text.size - 1) // self._length

    def __getitem__(self, index: int) -> np.ndarray:
        start = int(index) * self._length
        return self._text[start : start + self._length + 1]


def local_rows(batch_size: int, mesh: Mesh) -> list[int]:
    """The rows of a global batch that lie on this process's devices, in order.

    Raises:
        DataError: the batch does not split evenly over the data axes of the mesh.
    """
    degree = mesh.shape["replica"] * mesh.shape["fsdp"]
    if batch_size % degree:
        raise DataError(
            f"A batch of {batch_size} sequences does not split over {degree} devices.",
            where=f"mesh {dict(mesh.shape)}",
            why=f"{batch_size} = {batch_size // degree} x {degree} + {batch_size % degree}.",
            do=f"use a batch size that is a multiple of {degree}, or a smaller mesh.",
        )
    sharding = NamedSharding(mesh, PartitionSpec(("replica", "fsdp")))
    slices = sharding.addressable_devices_indices_map((batch_size,)).values()
    return sorted({row for index in slices if index for row in range(*index[0].indices(batch_size))})


@dataclasses.dataclass(frozen=True, kw_only=True)
class Loader:
    """This process's share of the batches of a run.

    Every batch is a dict of two int32 arrays of shape (len(rows), sequence_length): "inputs", and
    "targets", the same text one token later.

    Attributes:
        corpus: the text.
        sequence_length: tokens per sequence.
        batch_size: sequences in a global batch.
        seed: seed of the order.
        rows: rows of each global batch to read; see `local_rows`.
    """

    corpus: Corpus
    sequence_length: int
    batch_size: int
    seed: int
    rows: Sequence[int]

    def __post_init__(self) -> None:
        for text in (self.corpus.train, self.corpus.held_out):
            if not len(_Windows(text, self.sequence_length)):
                raise DataError(
                    "The text is too short.",
                    where=self.corpus.description,
                    why=f"one part has {text.size} bytes, a sequence {self.sequence_length}.",
                    do="give --data more text, or use a recipe with shorter sequences.",
                )

    def train(self, num_steps: int, *, start_step: int = 0) -> Iterator[Tokens]:
        """The batches of steps `start_step` to `num_steps`, shuffled anew in every pass."""
        windows = _Windows(self.corpus.train, self.sequence_length)
        samples: Any = grain.MapDataset.source(windows).shuffle(self.seed).repeat()

        def batch(step: int) -> Tokens:
            first = int(step) * self.batch_size
            return _stack([samples[first + row] for row in self.rows])

        # Slicing bytes is far cheaper than a step: one thread, two batches ahead.
        options = grain.ReadOptions(num_threads=1, prefetch_buffer_size=2)
        steps = grain.MapDataset.range(start_step, num_steps)
        yield from steps.map(batch).to_iter_dataset(options)

    def held_out(self, num_sequences: int) -> Iterator[Tokens]:
        """The same sequences every time, spread evenly over the held-out text.

        `num_sequences` is rounded down to whole batches, but at least one; where the text is
        shorter than a batch, sequences repeat.
        """
        windows = _Windows(self.corpus.held_out, self.sequence_length)
        num_batches = max(1, min(num_sequences, len(windows)) // self.batch_size)
        picked = np.linspace(0, len(windows) - 1, num_batches * self.batch_size).astype(int)
        for batch in picked.reshape(num_batches, self.batch_size):
            yield _stack([windows[batch[row]] for row in self.rows])


def _stack(windows: list[np.ndarray]) -> Tokens:
    tokens = np.stack(windows).astype(np.int32)
    return {"inputs": tokens[:, :-1], "targets": tokens[:, 1:]}
