"""The table of the kernels' registers and shared memory, made again: `python -m benchmarks.kernels.table`.

Its lines go into `jshard/occupancy/shipped_kernels.py`. It needs the extra `plan-gpu`, and no GPU.
"""

from __future__ import annotations

from benchmarks.kernels.compiled import CompiledKernel, KernelCall, assembler, compile_calls
from jshard import _compat
from jshard._text import PREFIX
from jshard.kernels.backend import Occupancy, with_half_the_rows
from jshard.occupancy.shipped_kernels import ShippedKernel

_SIZE = 4096  # of each dim of the products; what a block takes does not depend on it
_WIDTHS = (1024, 4096)  # of the norms' rows, on which it does

TILED = tuple(
    Occupancy(persistent=False, tile_m=tile_m, tile_n=tile_n, stages=stages)
    for tile_m, tile_n, stages in ((128, 128, 4), (64, 128, 3), (64, 64, 2))
)


def calls() -> tuple[KernelCall, ...]:
    """The kernels of the table."""
    square, line = (_SIZE, _SIZE), (_SIZE,)
    products = {"x": square, "w": square}
    biased = {"x": square, "w_up": square, "w_down": square, "b_up": line, "b_down": line}
    gated = {"x": square, "w_up": square, "w_down": square, "w_gate": square}
    matmuls = [KernelCall(kernel="matmul", shapes=products, occupancy=form) for form in (Occupancy(), *TILED)]
    mlps = [
        KernelCall(kernel="mlp", shapes=shapes, settings={"activation": activation}, occupancy=form)
        for shapes, activation in ((biased, "gelu"), (gated, "silu"))
        for form in (Occupancy(), TILED[0])
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


def assembled(compiled: tuple[tuple[CompiledKernel, ...], ...]) -> tuple[ShippedKernel, ...]:
    """Lines of the table."""
    each = [(call, kernel) for call, kernels in zip(calls(), compiled, strict=True) for kernel in kernels]
    return tuple(_shipped(call, kernel) for call, kernel in each if _is_listed(call, kernel))


def _is_listed(call: KernelCall, kernel: CompiledKernel) -> bool:
    """Of an MLP the first product, as the others are those of `matmul`; of this the one with nothing transposed."""
    name = kernel.launch.name.removeprefix(PREFIX)
    if call.kernel == "matmul":
        return name.startswith("matmul_nn")
    return call.kernel != "mlp" or name.startswith(f"mlp_{call.settings['activation']}")


def _shipped(call: KernelCall, kernel: CompiledKernel) -> ShippedKernel:
    launch, knobs = kernel.launch, call.occupancy
    if knobs is None:
        tiles, persistent = str(call.shapes["x"][1]), False
    else:
        knobs = with_half_the_rows(knobs) if "w_gate" in call.shapes else knobs
        tiles, persistent = f"{knobs.tile_m}x{knobs.tile_n}x{knobs.tile_k}/{knobs.stages}", knobs.persistent
    smem_bytes = launch.smem_bytes + kernel.static_bytes
    name = launch.name.removeprefix(PREFIX)
    return ShippedKernel(name, tiles, launch.threads, kernel.registers, smem_bytes, persistent)


def main() -> None:
    """Prints the lines, and where they are from."""
    found = compile_calls(calls())
    print(f'SHIPPED_SOURCE = "compiled for {found[0][0].arch} by {assembler()} with jax {_compat.jax_version()}"')
    print("SHIPPED = (", *map(_line, assembled(found)), ")", sep="\n")


def _line(kernel: ShippedKernel) -> str:
    form, takes = f'"{kernel.name}", "{kernel.tiles}"', f"{kernel.threads}, {kernel.registers}, {kernel.smem_bytes:_}"
    return f"    ShippedKernel({form}, {takes}, {kernel.persistent}),"


if __name__ == "__main__":
    main()
