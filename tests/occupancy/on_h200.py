"""Programs for an H200 that is not there: traced and lowered, not compiled."""

import jax
import jax.numpy as jnp
from jax.sharding import AbstractDevice, AbstractMesh, AxisType

KIND = "NVIDIA H200"
H200 = (KIND, "gpu", 132)


def of(*shape, dtype=jnp.bfloat16):
    return jax.ShapeDtypeStruct(shape, dtype)


def on(device, axes=()):
    """A context for a kind of device, its platform and its multiprocessors, on a mesh with some axes."""
    kind, platform, cores = device
    there = AbstractDevice(device_kind=kind, platform=platform, num_cores=cores)
    degrees, names = tuple(degree for _, degree in axes), tuple(name for name, _ in axes)
    mesh = AbstractMesh(degrees, names, axis_types=(AxisType.Auto,) * len(axes), abstract_device=there)
    return jax.sharding.use_abstract_mesh(mesh)


def lowered(function, *arrays, device=H200, axes=()):
    with on(device, axes):
        return jax.jit(function).trace(*arrays).lower(lowering_platforms=("cuda",))
