"""The process of a part: `python -m benchmarks.first_gpu.worker MODULE FILE SETUP`, which keeps figures in a file.

The file is whole at any time, so that it has the last figures also if the process crashes or is killed.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from jshard._types import Json

Figures = Mapping[str, Json]
"""The figures of a part, by name, as they go into the report's JSON."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Setup:
    """What a part must know."""

    device: str  # "gpu" or "cpu"
    quick: bool  # tiny sizes
    batch: int  # sequences of a step that is measured
    seconds: float  # its share of the time, at the end of which it is killed

    @classmethod
    def of(cls, text: str) -> Setup:
        """Reads a setup from JSON."""
        return cls(**json.loads(text))

    def text(self) -> str:
        """Returns it as JSON."""
        return json.dumps(dataclasses.asdict(self))


class Work:
    """A part at work.

    Args:
        setup: what it must know.
        path: the file for its figures.
    """

    def __init__(self, setup: Setup, path: Path) -> None:
        self.setup = setup
        self._path = path
        self._begin_s = time.monotonic()
        self._figures: dict[str, Json] = {"left_out": {}}

    @property
    def folder(self) -> Path:
        """Returns a folder for files, which is removed after the last part."""
        return self._path.parent

    @property
    def left_s(self) -> float:
        """Returns the seconds until it is killed."""
        return self.setup.seconds - (time.monotonic() - self._begin_s)

    def keep(self, **figures: Json) -> None:
        """Adds figures to the file; those of the same name are replaced."""
        self._figures |= figures
        draft = self._path.with_suffix(".part")
        draft.write_text(json.dumps(self._figures))
        draft.replace(self._path)

    def add(self, name: str, figure: Json) -> None:
        """Adds a figure to a list of them."""
        self.keep(**{name: [*self._figures.get(name, []), figure]})

    def leave_out(self, name: str, why: str) -> None:
        """Notes that something is not measured."""
        print(f"left out: {name}: {why}", flush=True)
        self.keep(left_out={**self._figures["left_out"], name: why})


def main(argv: Sequence[str]) -> None:
    """Runs a part."""
    module, path, setup = argv
    threading.Thread(target=_end_with_parent, daemon=True).start()
    work = Work(Setup.of(setup), Path(path))
    importlib.import_module(module).measure(work)


def _end_with_parent() -> None:
    """Kills this process and those that it has started, once the parent is gone: stdin is a pipe from it."""
    os.read(sys.stdin.fileno(), 1)
    os.killpg(os.getpgrp(), signal.SIGKILL)


if __name__ == "__main__":
    main(sys.argv[1:])
