"""What kernels take of a GPU, read from what its compiler says: registers, spills, instructions. No GPU is needed.

The compiler prints, and only a whole process can be told to listen: the work is done by one of its own
(`jshard.kernels.compiled_child`), for a GPU that is not there.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from jshard import _compat
from jshard.cluster.compile import ERROR, OUTPUT, RESULT, CompileError, child_environment, crashed, rebuilt
from jshard.cluster.topology import require_compiler
from jshard.kernels.knobs import Occupancy
from jshard.kernels.launch import Launch

_DUMP = {"MOSAIC_GPU_DUMP_PTXAS": "1", "MOSAIC_GPU_DUMP_PTX": "1"}
_SUFFIX = "_mosaic_gpu_kernel"  # of a kernel's name, in what the compiler makes of it
_ENTRY = re.compile(rf"^\.visible \.entry (\w+){_SUFFIX}\(", re.MULTILINE)
_ASSEMBLED = re.compile(rf"Compiling entry function '(\w+){_SUFFIX}' for '(\w+)'")
_WGMMA = "wgmma.mma_async"


@dataclasses.dataclass(frozen=True, kw_only=True)
class KernelCall:
    """A call of one of jshard's kernels, forward and backward, as something to compile.

    Args:
        kernel: its name in `jshard.kernels`.
        shapes: of its arrays, by argument.
        dtype: of all of them.
        settings: its other arguments.
        occupancy: its knobs; its own by default.

    Example:
        >>> KernelCall(kernel="matmul", shapes={"x": (512, 256), "w": (256, 512)})
    """

    kernel: str
    shapes: Mapping[str, tuple[int, ...]]
    dtype: str = "bfloat16"
    settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    occupancy: Occupancy | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class CompiledKernel:
    """A kernel as it was compiled.

    Attributes:
        launch: what it asks for.
        arch: what it was compiled for, e.g. "sm_90a".
        registers: of a thread.
        spill_bytes: of a thread, written to memory as there are not enough registers.
        static_bytes: shared memory that it takes beside what it asks for.
        uses_wgmma: whether it multiplies on the tensor cores, a warpgroup at a time.
    """

    launch: Launch
    arch: str
    registers: int
    spill_bytes: int
    static_bytes: int
    uses_wgmma: bool


def compile_calls(
    calls: Sequence[KernelCall], *, device: str = "h200", timeout_s: float = 1800
) -> tuple[tuple[CompiledKernel, ...], ...]:
    """Compiles kernels for a GPU that is not there.

    Args:
        calls: what to compile.
        device: of `jshard.facts.devices.DEVICES`.
        timeout_s: seconds after which the process is stopped.

    Returns:
        For each call its kernels, those of the gradients too, by the order in which they run; of kernels with one name
        each has the most that any of them takes.

    Raises:
        MissingExtraError: the compiler is not installed.
        ShardingError: a kernel cannot run like this.
        CompileError: the process has crashed, taken too long, or has not said what a kernel takes.

    Example:
        >>> ((forward, *backward),) = compile_calls([KernelCall(kernel="matmul", shapes={"x": (8, 64), "w": (64, 64)})])
    """
    require_compiler("gpu", where="registers and spills of a kernel")
    with tempfile.TemporaryDirectory(prefix="jshard-kernels-") as name:
        folder = Path(name)
        asked = json.dumps({"device": device, "calls": [dataclasses.asdict(call) for call in calls]})
        subject = f"{len(calls)} calls of kernels for {device}"
        code = _run_child(asked, folder, subject, timeout_s)
        if (folder / ERROR).exists():
            raise rebuilt(json.loads((folder / ERROR).read_text()))
        if code or not (folder / RESULT).exists():
            raise crashed(subject, code, folder, do="JSHARD_DEBUG=1 shows all that it said.")
        started = json.loads((folder / RESULT).read_text())
        said = [(folder / said_file(i)).read_text(errors="replace") for i in range(len(calls))]
    known: dict[Launch, CompiledKernel] = {}
    return tuple(tuple(_matched(_launches(each), text, known)) for each, text in zip(started, said, strict=True))


def said_file(number: int) -> str:
    """Where the child leaves what the compiler says of a call."""
    return f"{number}.txt"


def assembler() -> str:
    """Name and version of the assembler, e.g. "ptxas 12.9.86"."""
    package = "nvidia-cuda-nvcc-cu12"
    return f"ptxas {_compat.versions((package,)).get(package, '')}".strip()


def _run_child(asked: str, folder: Path, subject: str, timeout_s: float) -> int:
    with (folder / OUTPUT).open("wb") as output:
        try:
            done = subprocess.run(
                [sys.executable, "-m", "jshard.kernels.compiled_child", asked, str(folder)],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=child_environment(os.environ) | _DUMP,
                timeout=timeout_s,
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            raise CompileError(
                "Compiling kernels takes too long.",
                where=subject,
                why=f"it was stopped after {timeout_s:g} s.",
                do="compile_calls(..., timeout_s=3600), or fewer of them at once.",
            ) from error
    return done.returncode


def _launches(told: Sequence[dict[str, Any]]) -> list[Launch]:
    return [Launch(**{**each, "grid": tuple(each["grid"])}) for each in told]


def _matched(launches: Sequence[Launch], said: str, known: dict[Launch, CompiledKernel]) -> Iterator[CompiledKernel]:
    """The kernels of a program with what the compiler said of them; a kernel of an earlier one is not told of again."""
    figures, products = _figures(said), _wgmma(said)
    for launch in launches:
        key = dataclasses.replace(launch, latency_ns=None)
        if launch.name in figures:
            arch, numbers = figures[launch.name]
            known[key] = CompiledKernel(launch=key, arch=arch, uses_wgmma=launch.name in products, **numbers)
        elif key not in known:
            raise CompileError(
                "The compiler has not said what a kernel takes.",
                where=launch.name,
                why=f"it has told of {', '.join(figures) or 'none'}.",
                do="report this with your versions of jax and jaxlib.",
            )
        yield dataclasses.replace(known[key], launch=launch)


def _figures(said: str) -> dict[str, tuple[str, dict[str, int]]]:
    """By kernel what it was assembled for and what it takes: the most of kernels of one name."""
    found: dict[str, tuple[str, dict[str, int]]] = {}
    _, *parts = _ASSEMBLED.split(said)
    for name, arch, told in zip(*[iter(parts)] * 3, strict=True):
        numbers = {
            "registers": _number(r"Used (\d+) registers", told),
            "spill_bytes": _number(r"(\d+) bytes spill stores", told),
            "static_bytes": _number(r"Used .*?(\d+) bytes smem", told, default=0),
        }
        before = found.get(name, (arch, numbers))[1]
        found[name] = arch, {key: max(number, before[key]) for key, number in numbers.items()}
    return found


def _number(form: str, told: str, default: int | None = None) -> int:
    match = re.search(form, told)
    if match is None and default is None:
        raise CompileError(
            "The compiler does not say what a kernel takes.",
            where=form,
            why=f"the assembler's words have changed: {told.strip()[:200]}",
            do="report this with your versions of jax, jaxlib and ptxas.",
        )
    return int(match[1]) if match else int(default or 0)


def _wgmma(said: str) -> set[str]:
    """Names of the kernels with products of the tensor cores."""
    _, *parts = _ENTRY.split(said)
    return {name for name, body in zip(*[iter(parts)] * 2, strict=True) if _WGMMA in body}
