"""Which stored leaves are parameters that a state has no place for: without them it is another model."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping

import jax.numpy as jnp
import numpy as np

from jshard.checkpoint.manifest import StoredLeaf
from jshard.checkpoint.matching import EMBEDDING, HEAD, is_in, layers_of, stacks
from jshard.checkpoint.opened import Opened

# What a training state has beside the model, by the first key. Other libraries save it without a name for the model.
_BESIDE_A_MODEL = frozenset(
    "optim optimizer optimizers opt_state optimizer_state optimizer_states optimizer_state_dict scheduler "
    "lr_scheduler lr_schedulers dataloader data_loader train_state rng rngs rng_state step epoch".split()
)
_OPTIMIZER = "opt_state"  # of `nnx.Optimizer` and of Linen's TrainState, wherever they are
_MOST_COPIES = 8  # surplus arrays that are compared with those that are read
_COPY_BYTES = 64 << 20  # of them compared at a time


def not_parameters(stored: Mapping[str, StoredLeaf], root: str) -> set[str]:
    """The stored paths below a root that cannot be parameters: optimizer state, counters, random keys, text."""
    return {path for path in stored if is_in(root, path) and not _may_be_parameter(path, root, stored)}


def _may_be_parameter(path: str, root: str, stored: Mapping[str, StoredLeaf]) -> bool:
    leaf = stored[path]
    keys = re.split("[/.]", path[len(root) :].lstrip("/"))
    if keys[0] in _BESIDE_A_MODEL or _OPTIMIZER in keys:
        return False
    if not leaf.is_array or leaf.key is not None:
        return False
    is_counter = leaf.shape == () and jnp.issubdtype(leaf.dtype, jnp.integer)
    if is_counter:
        return False
    # Orbax stores a random key of nnx as plain numbers, beside its counter.
    above = path.rpartition("/")[0]
    return not (path == f"{above}/key" and f"{above}/count" in stored)


def places(path: str, stored: Mapping[str, StoredLeaf]) -> Iterator[str]:
    """The stored paths that hold a leaf of this path, whole, as a layer of a stack, or layer by layer."""
    if path in stored:
        yield path
    for stack, _ in stacks(path):
        if stack in stored:
            yield stack
    keys = path.split("/")
    for place in range(len(keys), 0, -1):
        yield from layers_of(keys[:place], keys[place:], stored)


def copies(opened: Opened, surplus: Collection[str], used: Collection[str]) -> dict[str, str]:
    """Surplus heads and embeddings that are copies of an embedding that is read: PyTorch stores tied weights twice.

    Only these are tied in practice. Any two other arrays may have equal numbers, such as layers that begin as zeros.
    Values are read only if every surplus array may be a copy: otherwise the restore fails whatever they are.
    """
    stored = opened.leaves
    if not surplus or len(surplus) > _MOST_COPIES:
        return {}
    embeddings = [name for name in used if EMBEDDING.search(name)]
    may_be_tied = all(HEAD.search(name) or EMBEDDING.search(name) for name in surplus)
    alike = {name: [other for other in embeddings if _are_alike(stored[name], stored[other])] for name in surplus}
    if not may_be_tied or not all(alike.values()):
        return {}
    pairs: dict[str, str] = {}
    for name, others in alike.items():
        same = next((other for other in others if _are_equal(opened, name, other)), None)
        if same is not None:
            pairs[name] = same
    return pairs


def _are_alike(surplus: StoredLeaf, used: StoredLeaf) -> bool:
    """Whether the numbers of two arrays may be the same, of which the second may be transposed."""
    is_matrix = len(surplus.shape) == 2
    return is_matrix and surplus.dtype == used.dtype and used.shape in (surplus.shape, surplus.shape[::-1])


def _are_equal(opened: Opened, surplus: str, used: str) -> bool:
    """Compares box by box, up to the first difference."""
    is_transposed = opened.leaves[surplus].shape != opened.leaves[used].shape
    for box in opened.boxes(surplus, _COPY_BYTES):
        numbers = opened.read(surplus, box)
        other = opened.read(used, box[::-1] if is_transposed else box)
        if is_transposed:
            other = other.T
        if not np.array_equal(np.ascontiguousarray(numbers).view(np.uint8), np.ascontiguousarray(other).view(np.uint8)):
            return False
    return True
