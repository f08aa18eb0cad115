"""Runs the parts one after another, each in a process of its own that is killed at the end of its share of the time."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from benchmarks.first_gpu.parts import PARTS, shares
from benchmarks.first_gpu.processes import kill_group, kill_tree
from benchmarks.first_gpu.worker import Figures, Setup

_ROOT = Path(__file__).parents[2]
_LAST_LINES = 12
_LEAST_S = 1.0  # a part is not begun with less
DONE = "done"
NOT_BEGUN = "not begun"
INTERRUPTED = "interrupted"


@dataclasses.dataclass(frozen=True, kw_only=True)
class PartResult:
    """What came of a part.

    Attributes:
        outcome: `DONE`, or what happened instead.
        share_s: the seconds that it could take.
        used_s: the seconds that it took.
        figures: those that it had kept.
        last_lines: of its output, if it is not done.
    """

    outcome: str
    share_s: float = 0.0
    used_s: float = 0.0
    figures: Figures = dataclasses.field(default_factory=dict)
    last_lines: Sequence[str] = ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Session:
    """All parts of a call.

    Attributes:
        names: of the parts, in the order in which they run.
        seconds: for all of them.
        setup: of each part; its seconds are those of its share.
    """

    names: Sequence[str]
    seconds: float
    setup: Setup

    def run(self) -> Iterator[dict[str, PartResult]]:
        """Yields all that is known after each part. Ctrl-C ends the part at work, and the others are not begun."""
        end_s = time.monotonic() + self.seconds
        results = {name: PartResult(outcome=NOT_BEGUN) for name in self.names}
        with tempfile.TemporaryDirectory(prefix="jshard-first-gpu-", ignore_cleanup_errors=True) as folder:
            for position, name in enumerate(self.names):
                share_s = shares(list(self.names[position:]), end_s - time.monotonic())
                if share_s < _LEAST_S:
                    return
                results[name] = self._result(name, share_s, Path(folder))
                yield dict(results)
                if results[name].outcome == INTERRUPTED:
                    return

    def _result(self, name: str, share_s: float, folder: Path) -> PartResult:
        """Runs a part."""
        print(f"{name}: at most {share_s:.0f} s", flush=True)
        setup = dataclasses.replace(self.setup, seconds=share_s)
        path = folder / f"{name}.json"
        output = folder / f"{name}.txt"
        begin_s = time.monotonic()
        command = [sys.executable, "-m", "benchmarks.first_gpu.worker", PARTS[name].module, str(path), setup.text()]
        with (
            output.open("wb") as file,
            subprocess.Popen(
                command,
                stdin=subprocess.PIPE,  # it ends when this process does: see `worker`
                stdout=file,
                stderr=subprocess.STDOUT,
                cwd=_ROOT,
                env=environment(os.environ, device=setup.device, folder=folder),
                start_new_session=True,
            ) as process,
        ):
            outcome = _outcome(process, share_s)
        used_s = time.monotonic() - begin_s
        print(f"{name}: {outcome} after {used_s:.0f} s", flush=True)
        return PartResult(
            outcome=outcome,
            share_s=share_s,
            used_s=used_s,
            figures=_figures(path),
            last_lines=[] if outcome == DONE else _last_lines(output),
        )


def environment(environ: Mapping[str, str], *, device: str, folder: Path) -> dict[str, str]:
    """Returns the variables of a part: one device of the kind, and a folder that keeps programs between processes."""
    variables = dict(environ)
    variables["PYTHONPATH"] = os.pathsep.join([str(_ROOT), environ.get("PYTHONPATH", "")])
    variables["PYTHONUNBUFFERED"] = "1"  # its last lines are there when it is killed
    variables["JAX_COMPILATION_CACHE_DIR"] = str(folder / "programs")
    variables["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
    if device == "cpu":
        return variables | {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "1"}
    variables.pop("JAX_PLATFORMS", None)  # the best that there is, CUDA or ROCm
    variables["CUDA_VISIBLE_DEVICES"] = _first_device(environ.get("CUDA_VISIBLE_DEVICES"))
    # ROCm reads CUDA's variable, too, but prefers its own.
    if "HIP_VISIBLE_DEVICES" in environ:
        variables["HIP_VISIBLE_DEVICES"] = _first_device(environ["HIP_VISIBLE_DEVICES"])
    return variables


def _first_device(visible: str | None) -> str:
    return (visible or "0").split(",")[0]


def _outcome(process: subprocess.Popen[bytes], share_s: float) -> str:
    """Waits for a part, kills it at the end of its share, and returns what happened."""
    try:
        return _ending(process.wait(share_s))
    except subprocess.TimeoutExpired:
        return "killed at the end of its share"
    except KeyboardInterrupt:
        return INTERRUPTED
    finally:
        kill_tree(process)
        kill_group(process)


def _ending(code: int) -> str:
    if code == 0:
        return DONE
    if code > 0:
        return f"failed: exit code {code}"
    return f"crashed: {signal.Signals(-code).name}"


def _figures(path: Path) -> Figures:
    return json.loads(path.read_text()) if path.exists() else {}


def _last_lines(output: Path) -> list[str]:
    """Returns the last lines of a part's output, without the names of folders of this machine."""
    text = output.read_text(errors="replace")
    for folder, name in ((output.parent, "FOLDER"), (_ROOT, "."), (Path(sys.prefix), "PYTHON"), (Path.home(), "~")):
        text = text.replace(str(folder), name)
    lines = [line.rstrip() for line in text.splitlines() if line.strip()]
    return lines[-_LAST_LINES:]
