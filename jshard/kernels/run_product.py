"""Runs a product of operands of any size on the GPU's generation."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Protocol

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.typing import DTypeLike

from jshard import _compat
from jshard._text import PRODUCT
from jshard.kernels import ampere_product, hopper_product
from jshard.kernels.backend import (
    KernelRun,
    Occupancy,
    fitted,
    product_ns,
    refuse_knobs,
    stated,
    vary,
    varying_over,
)
from jshard.kernels.generation import AMPERE, Generation
from jshard.kernels.product import Product, ProductInputs, StageShape, smem_bytes

_MOST_BARRIERS_BYTES = 1024  # of the pipeline, and of static shared memory


def run(
    call: KernelRun, product: Product, a: jax.Array, bs: Sequence[jax.Array], vectors: Sequence[jax.Array] = ()
) -> list[jax.Array]:
    """Computes the outputs, (m, n) each, of operands of any size, which are padded to whole tiles."""
    # Sizes before the padding: the latency and the cut of the outputs use them, too.
    m, n, k = product.sizes(a, bs[0])
    knobs = fitted(call.knobs, m, n, k, call.generation)
    check_fits(product, knobs, a.dtype, call)
    inputs = ProductInputs(a, bs, vectors)
    if call.interpret and not _compat.interpreter_transposes():
        inputs = _transposed_in_memory(product, inputs)
        # From here on the operands are stored as the plain product takes them.
        product = dataclasses.replace(product, a_transposed=False, b_transposed=False)
    inputs = _padded_to_tiles(product, inputs, knobs)

    @jax.custom_batching.sequential_vmap  # else all kernels of a batch would run at once, even those that must not run
    def launch(inputs: ProductInputs) -> list[jax.Array]:
        forms = _forms(call.generation)
        if knobs.persistent:
            blocks = call.device.sms - knobs.reserved_sms
            return forms.persistent(product, inputs, knobs, blocks=blocks, interpret=call.interpret)
        return forms.tiled(product, inputs, knobs, interpret=call.interpret)

    # Without it XLA's scheduler assumes that a kernel takes no time.
    with stated(knobs.latency_ns or product_ns(m, n, k, kind=call.device.kind, products=len(bs))):
        outs = launch(inputs)
    # The kernel's own type does not state over which mesh axes its results vary.
    axes = varying_over(inputs.a, *inputs.bs, *inputs.vectors)
    return [checkpoint_name(vary(out[:m, :n], axes), PRODUCT) for out in outs]


class ProductForms(Protocol):
    """The forms of a product on one generation, which are a module."""

    @staticmethod
    def stage_shape(knobs: Occupancy) -> StageShape:
        """Returns the shape of the shared memory through which outputs leave a block."""
        ...

    @staticmethod
    def persistent(
        product: Product, inputs: ProductInputs, knobs: Occupancy, *, blocks: int, interpret: bool = False
    ) -> list[jax.Array]:
        """Computes the outputs of whole tiles, with one block on each multiprocessor in use."""
        ...

    @staticmethod
    def tiled(product: Product, inputs: ProductInputs, knobs: Occupancy, *, interpret: bool = False) -> list[jax.Array]:
        """Computes the outputs of whole tiles, with one block for each tile."""
        ...


def _forms(generation: Generation) -> ProductForms:
    """Returns the forms of a product on a generation."""
    return ampere_product if generation is AMPERE else hopper_product


def check_fits(product: Product, knobs: Occupancy, dtype: DTypeLike, call: KernelRun) -> None:
    """Raises for knobs that need more than the GPU has."""
    device = call.device
    generation = call.generation
    faults = []
    row_unit = generation.row_unit(persistent=knobs.persistent)
    if knobs.tile_m % row_unit != 0:
        faults.append(f"tile_m: a persistent kernel takes multiples of {row_unit} on {generation.title}.")
    stage = _forms(generation).stage_shape(knobs)
    requested_bytes = smem_bytes(product, knobs, dtype, stage) + _MOST_BARRIERS_BYTES
    if requested_bytes > device.smem_limit_bytes:
        faults.append(f"{requested_bytes:,} bytes of shared memory: a block has at most {device.smem_limit_bytes:,}.")
    num_warpgroups = generation.warpgroups(persistent=knobs.persistent)
    num_sums = product.num_b * knobs.tile_m * knobs.tile_n // num_warpgroups
    if num_sums > generation.most_sums:
        faults.append(
            f"{num_sums:,} sums in the registers of a warpgroup: {generation.most_sums:,} fit without spilling."
        )
    if knobs.reserved_sms >= device.sms:
        faults.append(f"reserved_sms={knobs.reserved_sms} leaves none of {device.sms} multiprocessors.")
    refuse_knobs(product.name, knobs, device, faults)


def _transposed_in_memory(product: Product, inputs: ProductInputs) -> ProductInputs:
    """Returns the operands as a kernel takes them that transposes none itself."""
    a, bs, vectors = inputs
    if product.a_transposed:
        a = a.T
    if product.b_transposed:
        bs = [b.T for b in bs]
    return ProductInputs(a, bs, vectors)


def _padded_to_tiles(product: Product, inputs: ProductInputs, knobs: Occupancy) -> ProductInputs:
    """Adds zeros, which change no sum, up to whole tiles; the outputs are cut to size again."""
    a_tile = (knobs.tile_k, knobs.tile_m) if product.a_transposed else (knobs.tile_m, knobs.tile_k)
    b_tile = (knobs.tile_n, knobs.tile_k) if product.b_transposed else (knobs.tile_k, knobs.tile_n)
    return ProductInputs(
        a=_padded(inputs.a, a_tile),
        bs=[_padded(b, b_tile) for b in inputs.bs],
        vectors=[_padded(vector, (knobs.tile_n,)) for vector in inputs.vectors],
    )


def _padded(x: jax.Array, multiples: Sequence[int]) -> jax.Array:
    """Returns an array with zeros at the end of its dims, up to multiples."""
    missing = [-size % multiple for size, multiple in zip(x.shape, multiples, strict=True)]
    if not any(missing):
        return x
    return jnp.pad(x, [(0, count) for count in missing])
