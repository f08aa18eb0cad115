"""What kernels take of a GPU, read from what its compiler says: registers, spills, instructions. No GPU is needed.

The compiler prints, and only the output of a whole process can be read: this module runs as one of its own
(`python -m benchmarks.kernels.compiled REQUEST FOLDER`), for a GPU that is not there.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import os
import re
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.kernels.launches import Launch, launches
from jshard import _compat, kernels
from jshard.cluster.child_process import CompileError, answer, child_environment, run_child
from jshard.cluster.topology import parse_topology, require_compiler, topology_devices, traced_for_device
from jshard.kernels.backend import Occupancy

_DUMP = {"MOSAIC_GPU_DUMP_PTXAS": "1", "MOSAIC_GPU_DUMP_PTX": "1"}
_SUFFIX = "_mosaic_gpu_kernel"  # of a kernel's name, in what the compiler makes of it
_ENTRY = re.compile(rf"^\.visible \.entry (\w+){_SUFFIX}\(", re.MULTILINE)
_ASSEMBLED = re.compile(rf"Compiling entry function '(\w+){_SUFFIX}' for '(\w+)'")
_PRODUCTS = ("wgmma.mma_async", "mma.sync")  # instructions of the tensor cores: Hopper's, Ampere's


@dataclasses.dataclass(frozen=True, kw_only=True)
class KernelCall:
    """A call of one of jshard's kernels, forward and backward, as something to compile.

    Examples:
        >>> KernelCall(kernel="matmul", shapes={"x": (512, 256), "w": (256, 512)})
    """

    kernel: str  # its name in `jshard.kernels`.
    shapes: Mapping[str, tuple[int, ...]]  # of its arrays, by argument
    dtype: str = "bfloat16"  # of all of them
    settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # its other arguments
    occupancy: Occupancy | None = None  # its knobs; its own by default


@dataclasses.dataclass(frozen=True, kw_only=True)
class CompiledKernel:
    """A kernel as it was compiled."""

    launch: Launch  # what it asks for
    arch: str  # what it was compiled for, e.g. "sm_90a".
    registers: int  # of a thread
    spill_bytes: int  # of a thread, written to memory as there are not enough registers
    static_bytes: int  # shared memory that it takes beside what it asks for
    instructions: tuple[str, ...]  # those of `_PRODUCTS` that are in it: empty if it does not use the tensor cores


def compile_calls(
    calls: Sequence[KernelCall], *, device: str = "h200", timeout_s: float = 1800
) -> tuple[tuple[CompiledKernel, ...], ...]:
    """Compiles kernels for a GPU that is not there.

    Returns:
        For each call its kernels, those of the gradients too, by the order in which they run; of kernels with one name
        each has the most that any of them takes.

    Raises:
        MissingExtraError: the compiler is not installed.
        ShardingError: a kernel cannot run like this.
        CompileError: the process has crashed, taken too long, or has not said what a kernel takes.

    Examples:
        >>> ((forward, *backward),) = compile_calls([KernelCall(kernel="matmul", shapes={"x": (8, 64), "w": (64, 64)})])
    """
    require_compiler("cuda", where="registers and spills of a kernel")
    with tempfile.TemporaryDirectory(prefix="jshard-kernels-") as name:
        folder = Path(name)
        started = run_child(
            "benchmarks.kernels.compiled",
            {"device": device, "calls": [dataclasses.asdict(call) for call in calls]},
            folder,
            subject=f"{len(calls)} calls of kernels for {device}",
            timeout_s=timeout_s,
            environ=child_environment(os.environ) | _DUMP,
            more_time="compile_calls(..., timeout_s=3600), or fewer of them at once.",
            do="JSHARD_DEBUG=1 shows all that it said.",
        )
        printed = [_printed_file(folder, i).read_text(errors="replace") for i in range(len(calls))]
    known: dict[Launch, CompiledKernel] = {}
    return tuple(tuple(_matched(_launches(each), text, known)) for each, text in zip(started, printed, strict=True))


def _printed_file(folder: Path, number: int) -> Path:
    """Where the child leaves what the compiler prints of a call."""
    return folder / f"{number}.txt"


def assembler() -> str:
    """Name and version of the assembler, e.g. "ptxas 12.9.86"."""
    package = "nvidia-cuda-nvcc-cu12"
    return f"ptxas {_compat.versions((package,))[package] or ''}".strip()


def _launches(found: Sequence[dict[str, Any]]) -> list[Launch]:
    return [Launch(**{**each, "grid": tuple(each["grid"])}) for each in found]


def _matched(launches: Sequence[Launch], said: str, known: dict[Launch, CompiledKernel]) -> Iterator[CompiledKernel]:
    """The kernels of a program with what the compiler said of them; it says nothing again of an earlier one."""
    figures, products = _figures(said), _products(said)
    for launch in launches:
        key = dataclasses.replace(launch, latency_ns=None)
        if launch.name in figures:
            arch, numbers = figures[launch.name]
            known[key] = CompiledKernel(launch=key, arch=arch, instructions=products[launch.name], **numbers)
        elif key not in known:
            raise CompileError(
                "The compiler has not said what a kernel takes.",
                where=launch.name,
                why=f"it has named {', '.join(figures) or 'none'}.",
                do="report this with your versions of jax and jaxlib.",
            )
        yield dataclasses.replace(known[key], launch=launch)


def _figures(said: str) -> dict[str, tuple[str, dict[str, int]]]:
    """By kernel what it was assembled for and what it takes: the most of kernels of one name."""
    found: dict[str, tuple[str, dict[str, int]]] = {}
    _, *parts = _ASSEMBLED.split(said)
    for name, arch, words in zip(*[iter(parts)] * 3, strict=True):
        numbers = {
            "registers": _number(r"Used (\d+) registers", words),
            "spill_bytes": _number(r"(\d+) bytes spill stores", words),
            "static_bytes": _number(r"Used .*?(\d+) bytes smem", words, default=0),
        }
        before = found.get(name, (arch, numbers))[1]
        found[name] = arch, {key: max(number, before[key]) for key, number in numbers.items()}
    return found


def _number(form: str, words: str, default: int | None = None) -> int:
    match = re.search(form, words)
    if match is None and default is None:
        raise CompileError(
            "The compiler does not say what a kernel takes.",
            where=form,
            why=f"the assembler's words have changed: {words.strip()[:200]}",
            do="report this with your versions of jax, jaxlib and ptxas.",
        )
    return int(match[1]) if match else int(default or 0)


def _products(said: str) -> dict[str, tuple[str, ...]]:
    """By kernel the instructions with which it multiplies on the tensor cores."""
    _, *parts = _ENTRY.split(said)
    found = {}
    for name, body in zip(*[iter(parts)] * 2, strict=True):
        found[name] = tuple(instruction for instruction in _PRODUCTS if instruction in body)
    return found


# The process that compiles.


def main(argv: Sequence[str]) -> int:
    """Compiles, and leaves what the kernels ask for and what the compiler prints, or the error."""
    return answer(argv, _compile)


def _compile(asked: dict[str, Any], folder: Path) -> list[list[dict[str, Any]]]:
    topology = parse_topology(f"{asked['device']}:1x1")
    mesh = jax.sharding.Mesh(np.array(topology_devices(topology)), ("device",))
    with traced_for_device(topology.device):
        return [_compile_call(call, mesh, _printed_file(folder, i)) for i, call in enumerate(asked["calls"])]


def _compile_call(call: dict[str, Any], mesh: jax.sharding.Mesh, printed: Path) -> list[dict[str, Any]]:
    """What the kernels of a call ask for; the compiler's words are left in a file."""
    settings = {**call["settings"], "backend": "mosaic"}
    settings |= {"occupancy": Occupancy(**call["occupancy"])} if call["occupancy"] else {}
    whole = jax.NamedSharding(mesh, jax.P())
    arrays = {
        name: jax.ShapeDtypeStruct(shape, call["dtype"], sharding=whole) for name, shape in call["shapes"].items()
    }

    def both_ways(arrays: dict[str, jax.Array]) -> Any:
        y, back = jax.vjp(lambda arrays: getattr(kernels, call["kernel"])(**arrays, **settings), arrays)
        return y, back(jax.tree.map(jnp.ones_like, y))

    run = jax.shard_map(both_ways, mesh=mesh, in_specs=jax.P(), out_specs=jax.P())
    lowered = jax.jit(run).trace(arrays).lower()
    with _stdout_to(printed):
        lowered.compile()
    return [dataclasses.asdict(launch) for launch in launches(lowered)]


@contextlib.contextmanager
def _stdout_to(path: Path) -> Iterator[None]:
    """Inside, what C code prints goes to a file."""
    flush = ctypes.CDLL(None).fflush
    flush(None)
    kept = os.dup(1)
    with path.open("wb") as file:
        os.dup2(file.fileno(), 1)
        try:
            yield
        finally:
            flush(None)
            os.dup2(kept, 1)
            os.close(kept)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
