"""A small state under every strategy, of known numbers, whole or without arrays: what tests of checkpoints save.

And how they compare what they get.
"""

import functools
import math
import zlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import jshard as js
from jshard.api.optimizer import abstract_optimizer
from jshard.checkpoint.formats.source import stored_array
from jshard.data.batches import GlobalBatches

# By name: the degrees of the mesh.
LAYOUTS: dict[str, dict[str, int]] = {
    "one device": {"fsdp": 1},
    "replicate": {"replica": -1, "fsdp": 1},
    "zero3": {"fsdp": -1},
    "hsdp": {"replica": 2, "fsdp": -1},
    "tensor": {"fsdp": 4, "tensor": 2},
    "all axes": {"replica": 2, "fsdp": 2, "tensor": 2},
}
SAMPLES = 10_000


class WithDropout(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.up = nnx.Linear(16, 24, rngs=rngs)
        self.drop = nnx.Dropout(0.5, rngs=rngs)
        self.down = nnx.Linear(24, 16, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return x + self.down(self.drop(jax.nn.gelu(self.up(x))))


class WithAPaddedHead(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.layers = nnx.List([WithDropout(rngs) for _ in range(2)])
        self.odd = nnx.Linear(16, 13, rngs=rngs)  # no axis divides 13: stored padded

    def __call__(self, x: jax.Array) -> jax.Array:
        for layer in self.layers:
            x = layer(x)
        return self.odd(x)


def mesh_of(layout: str) -> Any:
    degrees = LAYOUTS[layout]
    count = math.prod(degrees.values())
    return js.mesh(**degrees, devices=jax.devices()[:count] if count > 0 else None)


def abstract(layout: str) -> dict[str, Any]:
    """The state of a layout without arrays: what a checkpoint is restored into."""
    return _modules(layout) | {
        "data": GlobalBatches(range(SAMPLES), batch_size=8, rows=range(8)),
        "best": {"loss": 0.0, "at": np.zeros(2, np.int64)},
        "step": 0,
    }


@functools.cache  # a restore leaves them alone
def _modules(layout: str) -> dict[str, Any]:
    mesh = mesh_of(layout)

    def annotate(model: WithAPaddedHead) -> None:
        for layer in model.layers:
            if mesh.shape["tensor"] > 1:
                layer.up.kernel.set_metadata(out_sharding=(None, "tensor"), eager_sharding=False)
            js.fully_shard(layer, mesh=mesh, placement=js.PlacementPolicy(min_size=1))
        js.fully_shard(model, mesh=mesh, placement=js.PlacementPolicy(shard_dim=-1))

    model = js.abstract_init(lambda: WithAPaddedHead(nnx.Rngs(0)), annotate)
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))
    return {"model": model, "optimizer": abstract_optimizer(model, tx)}


def filled(layout: str, seed: int) -> dict[str, Any]:
    """The state of a layout with numbers that hang on the seed and the leaf alone."""
    state = abstract(layout)
    mesh = mesh_of(layout)
    for name in ("model", "optimizer"):
        graphdef, shapes = nnx.split(state[name])
        flat = [
            (path, variable.replace(_filled(variable.get_raw_value(), numbers(seed, path, variable), mesh)))
            for path, variable in nnx.to_flat_state(shapes)
        ]
        state[name] = nnx.merge(graphdef, nnx.from_flat_state(flat))
    state["data"].samples = 8 * (seed + 1)
    return state | {"best": {"loss": 0.5 + seed, "at": np.array([seed, seed + 1])}, "step": seed + 1}


def numbers(seed: int, path: tuple, variable: nnx.Variable) -> np.ndarray:
    """What `filled` puts into a variable, with its padding; of a random key, its numbers."""
    leaf = variable.get_raw_value()
    is_key = jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    shape = (*leaf.shape, 2) if is_key else variable.shape
    draw = np.random.default_rng([seed, zlib.crc32(str(path).encode())])
    if is_key or not jnp.issubdtype(leaf.dtype, jnp.floating):
        return draw.integers(0, 2**16, shape).astype(np.uint32 if is_key else leaf.dtype)
    padding = [(0, stored - size) for stored, size in zip(leaf.shape, shape, strict=True)]
    return np.pad(draw.standard_normal(shape).astype(leaf.dtype), padding)


def differences(state: dict[str, Any], layout: str, seed: int) -> list[str]:
    """What differs between this process's part of a restored state and `filled(layout, seed)`."""
    like, found = abstract(layout), []
    for name in ("model", "optimizer"):
        wanted = dict(nnx.to_flat_state(nnx.state(like[name])))
        here = dict(nnx.to_flat_state(nnx.state(state[name])))
        if here.keys() != wanted.keys():
            found.append(f"{name}: other paths")
        for path, variable in here.items():
            leaf, sharding = variable.get_raw_value(), wanted[path].get_raw_value().sharding
            if sharding is not None and not leaf.sharding.is_equivalent_to(sharding, leaf.ndim):
                found.append(f"{name}/{path}: is as {leaf.sharding}")
            found += [f"{name}/{path}: other numbers"] * (not _equal(leaf, numbers(seed, path, variable)))
    if state["step"] != seed + 1 or state["data"].samples != 8 * (seed + 1):
        found.append(f"step {state['step']}, sample {state['data'].samples}")
    if state["best"]["loss"] != 0.5 + seed or list(state["best"]["at"]) != [seed, seed + 1]:
        found.append(f"{state['best']}")
    return found


def _equal(leaf: jax.Array, wanted: np.ndarray) -> bool:
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    return all(np.asarray(s.data).tobytes() == wanted[s.index].tobytes() for s in leaf.addressable_shards)


def _filled(leaf: Any, values: np.ndarray, mesh: Any) -> jax.Array:
    sharding = leaf.sharding or jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    array = jax.make_array_from_callback(values.shape, sharding, lambda box: values[box])
    return jax.random.wrap_key_data(array) if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) else array


def raw(tree: Any) -> dict[str, Any]:
    """Leaves by path, in the form that says most: type, dtype and bytes."""
    found = {}
    for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
        kind = type(leaf)
        if isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            kind, leaf = str(leaf.dtype), jax.random.key_data(leaf)
        value = leaf if isinstance(leaf, str) else (np.asarray(leaf).dtype, np.shape(leaf), np.asarray(leaf).tobytes())
        found[jax.tree_util.keystr(path)] = (kind, value)
    return found


def bits(array: Any) -> np.ndarray:
    """The bytes of an array."""
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def everything(array: np.ndarray) -> tuple[slice, ...]:
    """The box that is all of it."""
    return (slice(None),) * array.ndim


class Held:
    """Arrays in memory as a source; `boxes` are those that were read."""

    def __init__(self, arrays: dict[str, Any]):
        self.arrays = {name: np.asarray(array) for name, array in arrays.items()}
        self.leaves = {name: stored_array(array.shape, array.dtype) for name, array in self.arrays.items()}
        self.boxes: list[Any] = []

    def read(self, name: str, box: Any) -> np.ndarray:
        self.boxes.append((name, box))
        return self.arrays[name][box].copy()


def check_source(source: Any, arrays: dict[str, np.ndarray]) -> None:
    """Whether a source holds these arrays, as a whole and by any box."""
    draw = np.random.default_rng(0)
    for name, array in arrays.items():
        assert source.leaves[name] == stored_array(array.shape, array.dtype)
        boxes = [tuple(slice(*sorted(draw.integers(0, n + 1, 2).tolist())) for n in array.shape) for _ in range(20)]
        for box in (everything(array), *boxes):
            got = source.read(name, box)
            assert (got.shape, got.dtype) == (array[box].shape, array.dtype)
            np.testing.assert_array_equal(bits(got), bits(array[box]))
