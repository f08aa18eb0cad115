"""Models that are moved in memory, and the values that they have wherever they are."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import jshard as js
from tests.helpers import Config, Decoder, builder

CONFIG = Config(layers=2)
"""Its embedding is tied to its head; with 3, 5 or 8 devices some parameters are stored padded."""


def annotator(mesh: Any, **settings: Any) -> Callable[[Decoder], None]:
    """Returns an annotation under which every parameter is sharded along its first dim, with padding where needed."""

    def annotate(model: Decoder) -> None:
        placement = js.PlacementPolicy(shard_dim=0, min_size=16)
        for block in model.blocks:
            js.fully_shard(block, mesh=mesh, placement=placement, **settings)
        js.fully_shard(model, mesh=mesh, placement=placement, **settings)

    return annotate


def padded_model(mesh: Any, config: Config = CONFIG, seed: int = 0) -> Decoder:
    return js.shard_init(builder(config, seed), annotator(mesh))


def plain_values(filter: Any = ..., config: Config = CONFIG) -> Any:
    """Returns the values of the model on one device, as `js.gather` names them."""
    state = nnx.state(builder(config)(), filter)
    return jax.tree.map(_numbers, nnx.to_pure_dict(state))


def _numbers(x: Any) -> np.ndarray:
    is_key = jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
    return np.asarray(jax.random.key_data(x) if is_key else x)


def differences(values: Any, expected: Any) -> list[str]:
    """Returns the paths at which two trees differ in any bit."""
    by_path = dict(jax.tree.leaves_with_path(values))
    expected_by_path = dict(jax.tree.leaves_with_path(expected))
    paths = by_path.keys() ^ expected_by_path.keys()
    for path in by_path.keys() & expected_by_path.keys():
        x, y = np.asarray(by_path[path]), np.asarray(expected_by_path[path])
        if x.dtype != y.dtype or x.shape != y.shape or x.tobytes() != y.tobytes():
            paths = paths | {path}
    return sorted(map(jax.tree_util.keystr, paths))
