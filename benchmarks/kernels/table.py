"""The tables of the kernels' registers and shared memory, made again: `python -m benchmarks.kernels.table`.

Their lines go into `jshard/occupancy/shipped_kernels.py`: of Hopper with jax 0.10.2, of Ampere with jax 0.12. It needs
the extra `plan-gpu`, and no GPU.
"""

from __future__ import annotations

import dataclasses
import sys

from benchmarks.kernels.compiled import CompiledKernel, KernelCall, assembler, compile_calls
from jshard import _compat
from jshard._text import PREFIX
from jshard.kernels.backend import Occupancy, with_half_the_rows
from jshard.kernels.generation import AMPERE, HOPPER, Generation
from jshard.occupancy.shipped_kernels import ShippedKernel

_SIZE = 4096  # of each dim of the products; what a block takes does not depend on it
_WIDTHS = (1024, 4096)  # of the norms' rows, on which it does


@dataclasses.dataclass(frozen=True)
class Table:
    """The kernels of one generation, as they are compiled for one of its GPUs."""

    generation: Generation
    device: str
    forms: tuple[Occupancy, ...]  # of the products; those of an MLP have the first two
    has_transposed: bool  # whether products of transposed operands have rows: they take other registers


def _tiled(tile_m: int, tile_n: int, stages: int) -> Occupancy:
    return Occupancy(persistent=False, tile_m=tile_m, tile_n=tile_n, stages=stages)


OF_HOPPER = Table(
    HOPPER,
    "h200",
    (Occupancy(), _tiled(128, 128, 4), _tiled(64, 128, 3), _tiled(64, 64, 2)),
    has_transposed=False,
)
OF_AMPERE = Table(
    AMPERE,
    "a100-80",
    (Occupancy(), _tiled(128, 64, 3), _tiled(128, 64, 2), _tiled(64, 128, 3), _tiled(64, 64, 2)),
    has_transposed=True,
)
TABLES = {"hopper": OF_HOPPER, "ampere": OF_AMPERE}


def calls(table: Table = OF_HOPPER) -> tuple[KernelCall, ...]:
    """The kernels of a table."""
    square, line = (_SIZE, _SIZE), (_SIZE,)
    products = {"x": square, "w": square}
    biased = {"x": square, "w_up": square, "w_down": square, "b_up": line, "b_down": line}
    gated = {"x": square, "w_up": square, "w_down": square, "w_gate": square}
    matmuls = [KernelCall(kernel="matmul", shapes=products, occupancy=form) for form in table.forms]
    mlps = [
        KernelCall(kernel="mlp", shapes=shapes, settings={"activation": activation}, occupancy=form)
        for shapes, activation in ((biased, "gelu"), (gated, "silu"))
        for form in table.forms[:2]
    ]
    norms = [
        KernelCall(kernel=kernel, shapes={"x": (_SIZE, width), "residual": (_SIZE, width)} | vectors)
        for width in _WIDTHS
        for kernel, vectors in (
            ("rms_norm", {"scale": (width,)}),
            ("layer_norm", {"scale": (width,), "bias": (width,)}),
        )
    ]
    return (*matmuls, *mlps, *norms)


def assembled(table: Table, compiled: tuple[tuple[CompiledKernel, ...], ...]) -> tuple[ShippedKernel, ...]:
    """Lines of a table."""
    each = [(call, kernel) for call, kernels in zip(calls(table), compiled, strict=True) for kernel in kernels]
    return tuple(_shipped(table, call, kernel) for call, kernel in each if _is_listed(table, call, kernel))


def _is_listed(table: Table, call: KernelCall, kernel: CompiledKernel) -> bool:
    """Of an MLP the first product, as the others are those of `matmul`."""
    name = kernel.launch.name.removeprefix(PREFIX)
    if call.kernel == "matmul":
        return table.has_transposed or name.startswith("matmul_nn")
    return call.kernel != "mlp" or name.startswith(f"mlp_{call.settings['activation']}")


def _shipped(table: Table, call: KernelCall, kernel: CompiledKernel) -> ShippedKernel:
    launch, knobs = kernel.launch, call.occupancy
    if knobs is None:
        tiles, persistent = str(call.shapes["x"][1]), False
    else:
        knobs = knobs.on(table.generation)
        knobs = with_half_the_rows(knobs, table.generation) if "w_gate" in call.shapes else knobs
        tiles, persistent = f"{knobs.tile_m}x{knobs.tile_n}x{knobs.tile_k}/{knobs.stages}", knobs.persistent
    smem_bytes = launch.smem_bytes + kernel.static_bytes
    name = launch.name.removeprefix(PREFIX)
    return ShippedKernel(name, tiles, launch.threads, kernel.registers, smem_bytes, persistent)


def source(compiled: tuple[tuple[CompiledKernel, ...], ...]) -> str:
    """What the figures are from."""
    return f"compiled for {compiled[0][0].arch} by {assembler()} with jax {_compat.jax_version()}"


def main(names: list[str]) -> None:
    """Prints the lines of tables, by default of all, and where they are from."""
    for name in names or TABLES:
        table = TABLES[name]
        found = compile_calls(calls(table), device=table.device)
        print(f'    "{source(found)}",', "    (", *map(_line, assembled(table, found)), "    ),", sep="\n")


def _line(kernel: ShippedKernel) -> str:
    form, takes = f'"{kernel.name}", "{kernel.tiles}"', f"{kernel.threads}, {kernel.registers}, {kernel.smem_bytes:_}"
    return f"        ShippedKernel({form}, {takes}, {kernel.persistent}),"


if __name__ == "__main__":
    main(sys.argv[1:])
