"""Runs a product on arrays of any size: pads them to whole tiles, states how long it takes, and cuts the result."""

from __future__ import annotations

from collections.abc import Sequence

import jax
from jax.ad_checkpoint import checkpoint_name

from jshard import _compat
from jshard._kernel_names import PRODUCT
from jshard.kernels.knobs import Occupancy
from jshard.kernels.latency import product_ns, stated
from jshard.kernels.mosaic.persistent import persistent
from jshard.kernels.mosaic.product import Product, check_fits, fitted, padded
from jshard.kernels.mosaic.tiled import tiled
from jshard.kernels.shapes import vary, varying_over
from jshard.kernels.where import Place


def run(
    product: Product,
    a: jax.Array,
    bs: Sequence[jax.Array],
    vectors: Sequence[jax.Array] = (),
    *,
    knobs: Occupancy,
    here: Place,
    interpret: bool = False,
) -> list[jax.Array]:
    """Runs a product.

    Args:
        product: what is computed.
        a: (m, k), or (k, m) if the product says so; bfloat16 or float16.
        bs: (k, n) each, or (n, k).
        vectors: (n,) each.
        knobs: tiles are shrunk to the arrays; all else is as asked.
        here: the device.
        interpret: whether to run step by step on a CPU.

    Returns:
        The outputs, (m, n) each.

    Raises:
        KernelError: the device has not what the knobs ask for.
    """
    m, n, k = product.sizes(a, bs[0])
    knobs = fitted(knobs, m, n, k)
    check_fits(product, knobs, a.dtype, smem_limit_bytes=here.smem_limit_bytes, sms=here.sms, title=here.kind)
    if interpret and not _compat.interpreter_transposes():
        a = a.T if product.a_transposed else a
        bs = [b.T if product.b_transposed else b for b in bs]
        product = product.plain()
    a_tiles, b_tiles = (knobs.tile_m, knobs.tile_k), (knobs.tile_k, knobs.tile_n)
    a = padded(a, a_tiles[::-1] if product.a_transposed else a_tiles)
    bs = [padded(b, b_tiles[::-1] if product.b_transposed else b_tiles) for b in bs]
    vectors = [padded(vector, (knobs.tile_n,)) for vector in vectors]
    latency_ns = knobs.latency_ns or product_ns(m, n, k, kind=here.kind, products=len(bs))

    @jax.custom_batching.sequential_vmap  # else all kernels of a batch would run at once, also where none is to run
    def launch(a: jax.Array, bs: Sequence[jax.Array], vectors: Sequence[jax.Array]) -> list[jax.Array]:
        if knobs.persistent:
            blocks = here.sms - knobs.reserved_sms
            return persistent(product, a, bs, vectors, knobs, blocks=blocks, interpret=interpret)
        return tiled(product, a, bs, vectors, knobs, interpret=interpret)

    with stated(latency_ns):
        outs = launch(a, bs, vectors)
    # The kernel's own type does not say over which axes of a mesh its results differ.
    axes = varying_over(a, *bs, *vectors)
    return [checkpoint_name(vary(out[:m, :n], axes), PRODUCT) for out in outs]
