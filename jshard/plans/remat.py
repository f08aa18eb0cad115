"""Remat policies by name: which values of a unit's forward are kept for backward, and which are recomputed."""

import functools
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from jax import checkpoint_policies as jax_policies
from jax.extend.core import Primitive

from jshard._text import ATTENTION, CONTEXT, PRODUCT
from jshard.errors import AnnotationError

Policy = Callable[..., Any]
"""Decides by an equation's primitive, types and parameters what becomes of its results, as `jax.checkpoint` asks."""

Remat = str | Policy
"""A name of `KEEPS` or `NAMED`, `"names:NAME,..."`, or a policy from `jax.checkpoint_policies`."""

AUTO = "auto"
NONE = "none"
FULL = "full"
DOTS = "dots"
DOTS_WITH_NO_BATCH_DIMS = "dots_with_no_batch_dims"
OFFLOADED = "offload"
ATTENTION_AGAIN = "attention"
SELECTIVE = "torchtitan_selective"

_QKV = "query_proj", "key_proj", "value_proj", "qkv_proj"
_PROJECTIONS = (*_QKV, "out_proj")
_PRODUCTS = (*_PROJECTIONS, "mlpwi_0", "mlpwi_1", "mlpwi", "mlpwo")

NAMED: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "minimal": _PRODUCTS,
        "minimal_flash": (*_PRODUCTS, CONTEXT),
        "minimal_with_context": (*_PRODUCTS, CONTEXT),
        "save_dot_with_context_except_mlp": (*_PROJECTIONS, CONTEXT),
        "save_dot_except_mlpwi": (*_PROJECTIONS, "mlpwo"),
        "save_dot_except_mlp": _PROJECTIONS,
        "save_qkv_proj": _QKV,
        "save_out_proj": ("out_proj",),
    }
)
"""MaxText's policies, with the names that each keeps."""

KEEPS: Mapping[str, str] = MappingProxyType(
    {
        NONE: "everything",
        DOTS: "the results of matrix products, and of cuDNN attention",
        DOTS_WITH_NO_BATCH_DIMS: "the results of products with weights",
        ATTENTION_AGAIN: "everything but what js.kernels.attention computes",
        SELECTIVE: "every second product with weights, and the result of attention",
        OFFLOADED: "the results of products with weights, in host memory",
        FULL: "nothing",
        AUTO: "what the fastest of none, dots and full keeps, by estimates",
    }
)
"""Descriptions of what the other policies keep."""

KEPT_PRODUCT = "jshard kept product"
"""The name of a product that `SELECTIVE` keeps: see `jshard.engine.program.checkpointed`."""

# A gathered parameter must not be kept for backward under another name: these primitives only rename or recast.
_FREE = frozenset(
    "all_gather broadcast_in_dim convert_element_type copy expand_dims name pcast pvary reshape reshard"
    " sharding_constraint slice split squeeze transpose".split()
)


def check_remat(remat: Remat) -> None:
    """Raises for an unknown remat policy."""
    if callable(remat):
        return
    if isinstance(remat, str) and (remat in KEEPS or kept_names(remat)):
        return
    keeps = "; ".join(f'"{name}" keeps {values}' for name, values in KEEPS.items())
    raise AnnotationError(
        "The remat policy is unknown.",
        where=f"fully_shard(remat={remat!r})",
        why=f"{keeps}. Of MaxText: {', '.join(NAMED)}. "
        '"names:NAME,..." keeps the values with these names from jax.ad_checkpoint.checkpoint_name.'
        " A function from jax.checkpoint_policies also works.",
        do='js.fully_shard(block, mesh=mesh, remat="full")',
    )


def kept_names(remat: Remat) -> tuple[str, ...]:
    """Returns the names that a policy keeps; empty for a policy that does not use names."""
    if not isinstance(remat, str):
        return ()
    # Names without a colon are those of a policy of MaxText.
    head, _, listed = remat.partition(":")
    if head != "names":
        return NAMED.get(remat, ())
    names = map(str.strip, listed.split(","))
    return tuple(name for name in names if name)


@functools.cache  # one object for all units of a policy: functions are compared by identity
def checkpoint_policy(remat: Remat) -> Policy | None:
    """Returns the `jax.checkpoint` policy for a unit whose gathered parameters are not kept; None keeps nothing."""
    if remat == FULL:
        return None
    requested = _requested_policy(remat)

    def policy(prim: Primitive, *args: object, **params: object) -> object:
        # `PRODUCT` is the name that jshard's own kernels give their results, which are never parameters.
        may_rename_parameter = prim.name in _FREE and params.get("name") != PRODUCT
        if may_rename_parameter and not _depends_on_name(requested, prim, args, params):
            return False
        return requested(prim, *args, **params)

    return policy


def _requested_policy(remat: Remat) -> Policy:
    """Returns the policy of a name, which knows nothing of gathered parameters."""
    if callable(remat):
        return remat
    keep_named = jax_policies.save_only_these_names
    keep_both = jax_policies.save_from_both_policies
    # `ATTENTION_AGAIN` keeps everything here: attention has a checkpoint of its own.
    if remat in (NONE, ATTENTION_AGAIN):
        return jax_policies.everything_saveable
    if remat == DOTS:
        return keep_both(jax_policies.dots_saveable, _with_cudnn_attention(keep_named(PRODUCT, CONTEXT)))
    if remat == DOTS_WITH_NO_BATCH_DIMS:
        return keep_both(jax_policies.dots_with_no_batch_dims_saveable, keep_named(PRODUCT))
    if remat == SELECTIVE:
        return _with_cudnn_attention(keep_named(KEPT_PRODUCT, CONTEXT))
    if remat == OFFLOADED:
        return _products_offloaded
    names = kept_names(remat)
    policy = keep_named(*names)
    if CONTEXT in names:
        return _with_cudnn_attention(policy)
    return policy


def _with_cudnn_attention(policy: Policy) -> Policy:
    """Returns a policy that also keeps the results of cuDNN attention, so that backward does not run it again."""

    def with_attention(prim: Primitive, *args: object, **params: object) -> object:
        return prim.name == ATTENTION or policy(prim, *args, **params)

    return with_attention


_PRODUCTS_BY_NAME = jax_policies.save_and_offload_only_these_names(
    names_which_can_be_saved=[], names_which_can_be_offloaded=[PRODUCT], offload_src="device", offload_dst="pinned_host"
)
_DOTS_OFFLOADED = jax_policies.offload_dot_with_no_batch_dims("device", "pinned_host")


def _products_offloaded(prim: Primitive, *args: object, **params: object) -> object:
    """Offloads results of matrix products to host memory; those of our kernels are recognised by name."""
    if prim.name == "name":
        return _PRODUCTS_BY_NAME(prim, *args, **params)
    return _DOTS_OFFLOADED(prim, *args, **params)


def _depends_on_name(policy: Policy, prim: Primitive, args: tuple[object, ...], params: dict[str, object]) -> bool:
    """Returns whether a policy uses a value's name: a policy that keeps any value would also keep gathered parameters.

    A policy is a black box. So it is called again, with another name.
    """
    if prim.name != "name":
        return False
    # Another answer means that the policy asked for this name, and so for a value that the model named itself.
    other_name = {**params, "name": "a name that nothing has"}
    return policy(prim, *args, **params) != policy(prim, *args, **other_name)
