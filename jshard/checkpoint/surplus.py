"""Which stored leaves are parameters that a state has no place for: without them it is another model."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping

import jax.numpy as jnp
import numpy as np

from jshard.checkpoint.manifest import StoredLeaf
from jshard.checkpoint.matching import is_in, layers_of, stacks
from jshard.checkpoint.opened import Opened

HEAD = re.compile(r"(^|[/._])((lm_)?head|output|unembed\w*)([/.]|$)")
EMBEDDING = re.compile(r"emb|wte|tokens|shared")

# What a training state has beside the model, by the first key. Other libraries save it without a name for the model.
_BESIDE_A_MODEL = frozenset(
    "optim optimizer optimizers opt_state optimizer_state optimizer_states optimizer_state_dict scheduler "
    "lr_scheduler lr_schedulers dataloader data_loader train_state rng rngs rng_state step epoch".split()
)
_OPTIMIZER = "opt_state"  # of `nnx.Optimizer` and of Linen's TrainState, wherever they are
_MAX_COPIES = 8  # surplus arrays that are compared with those that are read
_COPY_BYTES = 64 << 20  # of them compared at a time


def not_parameters(stored: Mapping[str, StoredLeaf], root: str) -> set[str]:
    """Returns the stored paths below a root that cannot be parameters: optimizer state, counters, random keys, text."""
    paths: set[str] = set()
    for path in stored:
        if is_in(root, path) and not _may_be_parameter(path, root, stored):
            paths.add(path)
    return paths


def _may_be_parameter(path: str, root: str, stored: Mapping[str, StoredLeaf]) -> bool:
    leaf = stored[path]
    keys = re.split("[/.]", path[len(root) :].lstrip("/"))
    if keys[0] in _BESIDE_A_MODEL or _OPTIMIZER in keys:
        return False
    if not leaf.is_array or leaf.key is not None:
        return False
    # Such as the step of an optimizer, or a count of draws.
    is_counter = leaf.shape == () and jnp.issubdtype(leaf.dtype, jnp.integer)
    if is_counter:
        return False
    # Orbax stores a random key of nnx as plain numbers, beside its counter.
    parent = path.rpartition("/")[0]
    is_key_of_nnx = path == f"{parent}/key" and f"{parent}/count" in stored
    return not is_key_of_nnx


def places(path: str, stored: Mapping[str, StoredLeaf]) -> Iterator[str]:
    """Yields the stored paths that hold a leaf of this path, whole, as a layer of a stack, or layer by layer."""
    if path in stored:
        yield path
    for stack, _ in stacks(path):
        if stack in stored:
            yield stack
    keys = path.split("/")
    for position in range(len(keys), 0, -1):
        yield from layers_of(keys[:position], keys[position:], stored)


def copies(opened: Opened, surplus: Collection[str], used: Collection[str]) -> dict[str, str]:
    """Returns surplus heads and embeddings that are copies of an embedding that is read, with the path of that one.

    PyTorch stores tied weights twice. Only these are tied in practice. Any two other arrays may have equal numbers,
    such as layers that begin as zeros. Values are read only if every surplus array may be a copy: otherwise the restore
    fails whatever they are.
    """
    if len(surplus) > _MAX_COPIES:
        return {}
    candidates = {path: _possible_originals(path, used, opened.leaves) for path in surplus}
    # One that cannot be a copy makes the restore fail, and no value has to be read for that.
    if not all(candidates.values()):
        return {}
    originals = {}
    for path, embeddings in candidates.items():
        for embedding in embeddings:
            if _are_equal(opened, path, embedding):
                originals[path] = embedding
                break
    return originals


def _possible_originals(surplus: str, used: Collection[str], stored: Mapping[str, StoredLeaf]) -> list[str]:
    """Returns the embeddings that a surplus leaf may be a copy of; none if it is no head or embedding itself."""
    if not HEAD.search(surplus) and not EMBEDDING.search(surplus):
        return []
    embeddings = []
    for path in used:
        if EMBEDDING.search(path) and _may_be_equal(stored[surplus], stored[path]):
            embeddings.append(path)
    return embeddings


def _may_be_equal(surplus: StoredLeaf, used: StoredLeaf) -> bool:
    """Returns whether the numbers of two arrays may be the same, of which the second may be transposed."""
    is_matrix = len(surplus.shape) == 2
    return is_matrix and surplus.dtype == used.dtype and used.shape in (surplus.shape, surplus.shape[::-1])


def _are_equal(opened: Opened, surplus: str, used: str) -> bool:
    """Compares two arrays box by box, up to the first difference."""
    is_transposed = opened.leaves[surplus].shape != opened.leaves[used].shape
    for box in opened.boxes(surplus, _COPY_BYTES):
        numbers = opened.read(surplus, box)
        used_box = box[::-1] if is_transposed else box
        used_numbers = opened.read(used, used_box)
        if is_transposed:
            used_numbers = used_numbers.T
        if not np.array_equal(_bytes(numbers), _bytes(used_numbers)):
            return False
    return True


def _bytes(numbers: np.ndarray) -> np.ndarray:
    # A copy of NaN is a copy, too.
    return np.ascontiguousarray(numbers).view(np.uint8)
