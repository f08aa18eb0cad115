"""Remat policies by name: what of a unit's forward is kept for backward, and what is computed again."""

import functools
import types
from collections.abc import Callable, Mapping
from typing import Any

from jax import checkpoint_policies as policies

from jshard._kernel_names import ATTENTION, CONTEXT, PRODUCT
from jshard.errors import AnnotationError

Remat = str | Callable[..., Any]
"""A name of `KEEPS`, `"names:NAME,..."`, or a policy from `jax.checkpoint_policies`."""

NONE, FULL, OFFLOADED, ATTENTION_AGAIN, SELECTIVE = "none", "full", "offload", "attention", "torchtitan_selective"

_QKV = "query_proj", "key_proj", "value_proj", "qkv_proj"
_PROJECTIONS = (*_QKV, "out_proj")
_ALL = (*_PROJECTIONS, "mlpwi_0", "mlpwi_1", "mlpwi", "mlpwo")

NAMED: Mapping[str, tuple[str, ...]] = types.MappingProxyType(
    {
        "minimal": _ALL,
        "minimal_flash": (*_ALL, CONTEXT),
        "minimal_with_context": (*_ALL, CONTEXT),
        "save_dot_with_context_except_mlp": (*_PROJECTIONS, CONTEXT),
        "save_dot_except_mlpwi": (*_PROJECTIONS, "mlpwo"),
        "save_dot_except_mlp": _PROJECTIONS,
        "save_qkv_proj": _QKV,
        "save_out_proj": ("out_proj",),
    }
)
"""MaxText's policies: the names that each keeps."""

KEEPS: Mapping[str, str] = types.MappingProxyType(
    {
        NONE: "everything",
        "dots": "the results of matrix products, and of attention by cuDNN",
        "dots_with_no_batch_dims": "the results of products with weights",
        ATTENTION_AGAIN: "everything but what js.kernels.attention computes",
        SELECTIVE: "every second product with weights, and the result of attention",
        OFFLOADED: "the results of products with weights, in host memory",
        FULL: "nothing",
    }
)
"""What the other policies keep, in words."""

KEPT_PRODUCT = "jshard kept product"
"""What a product that `SELECTIVE` keeps is called: see `jshard.engine.trace.named_products`."""

# A gathered parameter must not be kept for backward under another name: these primitives only rename or recast.
_FREE = frozenset(
    "all_gather broadcast_in_dim convert_element_type copy expand_dims name pcast pvary reshape reshard"
    " sharding_constraint slice split squeeze transpose".split()
)


def check_remat(remat: Remat) -> None:
    """Raises for a remat policy that does not exist."""
    if callable(remat) or (isinstance(remat, str) and (remat in KEEPS or remat in NAMED or kept_names(remat))):
        return
    keeps = "; ".join(f'"{name}" keeps {what}' for name, what in KEEPS.items())
    raise AnnotationError(
        "The remat policy is not known.",
        where=f"fully_shard(remat={remat!r})",
        why=f"{keeps}. Of MaxText: {', '.join(NAMED)}. "
        '"names:NAME,..." keeps what jax.ad_checkpoint.checkpoint_name has called so.'
        " Or it is a function from jax.checkpoint_policies.",
        do='js.fully_shard(block, mesh=mesh, remat="full")',
    )


def kept_names(remat: Remat) -> tuple[str, ...]:
    """The names that a policy keeps; empty for one that does not go by names."""
    if not isinstance(remat, str):
        return ()
    head, _, rest = remat.partition(":")
    return tuple(filter(None, map(str.strip, rest.split(",")))) if head == "names" else NAMED.get(remat, ())


@functools.cache  # one object for all units of a policy
def checkpoint_policy(remat: Remat) -> Callable[..., Any] | None:
    """The `jax.checkpoint` policy for a unit whose gathered parameters are not kept; None keeps nothing."""
    if remat == FULL:
        return None
    inner = _inner(remat)

    def policy(prim: Any, *args: Any, **params: Any) -> Any:
        is_free = prim.name in _FREE and params.get("name") != PRODUCT and not _by_name(inner, prim, args, params)
        return False if is_free else inner(prim, *args, **params)

    return policy


def _inner(remat: Remat) -> Callable[..., Any]:
    if callable(remat):
        return remat
    by_name = policies.save_only_these_names
    match remat:
        case "none" | "attention":
            return policies.everything_saveable
        case "dots":
            return policies.save_from_both_policies(policies.dots_saveable, _with_context(by_name(PRODUCT)))
        case "dots_with_no_batch_dims":
            dots = policies.dots_with_no_batch_dims_saveable
            return policies.save_from_both_policies(dots, by_name(PRODUCT))
        case "torchtitan_selective":
            return _with_context(by_name(KEPT_PRODUCT, CONTEXT))
        case "offload":
            return _products_offloaded
    names = kept_names(remat)
    return _with_context(by_name(*names)) if CONTEXT in names else by_name(*names)


def _with_context(policy: Callable[..., Any]) -> Callable[..., Any]:
    """A policy that keeps the results of cuDNN's attention, too, so that backward does not run it again."""
    return lambda prim, *args, **params: prim.name == ATTENTION or policy(prim, *args, **params)


_PRODUCTS_BY_NAME = policies.save_and_offload_only_these_names(
    names_which_can_be_saved=[], names_which_can_be_offloaded=[PRODUCT], offload_src="device", offload_dst="pinned_host"
)
_DOTS_OFFLOADED = policies.offload_dot_with_no_batch_dims("device", "pinned_host")


def _products_offloaded(prim: Any, *args: Any, **params: Any) -> Any:
    """Results of matrix products go to host memory; those of our kernels are known by their name."""
    return (_PRODUCTS_BY_NAME if prim.name == "name" else _DOTS_OFFLOADED)(prim, *args, **params)


def _by_name(inner: Callable[..., Any], prim: Any, args: tuple, params: dict[str, Any]) -> bool:
    """Whether a policy treats a named value by its name: one that keeps any would keep gathered parameters, too."""
    if prim.name != "name":
        return False
    return inner(prim, *args, **params) != inner(prim, *args, **params | {"name": "a name that nothing has"})
