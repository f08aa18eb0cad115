"""Programs for a GPU that is not there: traced and lowered, not compiled."""

import contextlib
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, AxisType

from jshard import _compat
from jshard.facts.gpus import gpu

KIND = "NVIDIA H200"
H200 = (KIND, "gpu", 132)
A100 = ("NVIDIA A100-SXM4-80GB", "gpu", 108)
A40 = ("NVIDIA A40", "gpu", 84)

needs_ampere_kernels = pytest.mark.skipif(
    not _compat.COMPILES_FOR_AMPERE, reason="JAX compiles kernels for Ampere since 0.12"
)


def of(*shape, dtype=jnp.bfloat16):
    return jax.ShapeDtypeStruct(shape, dtype)


@contextlib.contextmanager
def on(device, axes=()) -> Iterator[None]:
    """A kind of device, its platform and its multiprocessors, on a mesh with some axes."""
    kind, platform, cores = device
    there = AbstractDevice(device_kind=kind, platform=platform, num_cores=cores)
    degrees, names = tuple(degree for _, degree in axes), tuple(name for name, _ in axes)
    mesh = AbstractMesh(degrees, names, axis_types=(AxisType.Auto,) * len(axes), abstract_device=there)
    with contextlib.ExitStack() as stack:
        stack.enter_context(jax.sharding.use_abstract_mesh(mesh))
        if device in (A100, A40):
            stack.enter_context(_compat.gpu_assumed((gpu(kind).major, 0)))
        yield


def lowered(function, *arrays, device=H200, axes=()):
    with on(device, axes):
        return jax.jit(function).trace(*arrays).lower(lowering_platforms=("cuda",))
