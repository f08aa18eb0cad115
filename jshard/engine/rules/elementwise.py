"""Elementwise primitives: each element of the result is computed from the elements at its position."""

from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
from jax.extend.core import JaxprEqn

from jshard._compat import is_tracer
from jshard.engine.rules.building_blocks import same, split_dim
from jshard.engine.rules.index_dims import index_dim_of
from jshard.engine.rules.keys import draws_alone
from jshard.engine.rules.registry import (
    IN_ALL,
    IN_EITHER,
    Linear,
    OperandStates,
    Partitioner,
    Rule,
    index_dim,
    inverse_rule,
    rule,
)
from jshard.engine.rules.values import Value, type_of


def elementwise(p: Partitioner, eqn: JaxprEqn, operands: list[Value]) -> list[Value] | None:
    """Splits all operands like the largest one. Scalars and dims of size 1 stay whole: they are broadcast."""
    # Operands have one rank, but for scalars of some primitives such as `select_n` and `clamp`.
    dim = split_dim(operands)
    result_size = type_of(eqn.outvars[0]).shape[dim]
    sizes = [p.full_shape(v)[dim] if v.ndim else 1 for v in operands]
    if not {1, result_size}.issuperset(sizes):
        return None  # not one element of the operand for each of the result
    local_operands = []
    for value, size in zip(operands, sizes, strict=True):
        # By its size, and not by its state: what is broadcast has no part for each shard.
        if size == 1:
            local_operands.append(p.whole(value))
        else:
            local_operands.append(p.split(value, dim))
    return same(p, eqn, local_operands, dim)


def bitcast(p: Partitioner, eqn: JaxprEqn, operands: list[Value]) -> list[Value] | None:
    """Leaves the last dim whole where a wider or a narrower dtype adds or removes it."""
    old_ndim = type_of(eqn.invars[0]).ndim
    new_ndim = type_of(eqn.outvars[0]).ndim
    if old_ndim == new_ndim:
        return elementwise(p, eqn, operands)
    (value,) = operands
    dim = split_dim(operands)
    last_dim = max(old_ndim, new_ndim) - 1
    if dim == last_dim:
        return None  # the parts of one number would be on several shards
    return same(p, eqn, [p.split(value, dim)], dim)


def fold_in(p: Partitioner, eqn: JaxprEqn, operands: list[Value]) -> list[Value] | None:
    """Folds numbers into keys, elementwise if the keys of a batch are independent."""
    if not draws_alone(operands[0]):
        return None
    return elementwise(p, eqn, operands)


def _operand_dims(p: Partitioner, eqn: JaxprEqn, operands: Sequence[Value], dim: int) -> Sequence[int | None]:
    """Splits what is not broadcast along the dim."""
    result_size = type_of(eqn.outvars[0]).shape[dim]
    dims: list[int | None] = []
    for value in operands:
        is_like_result = dim < value.ndim and value.shape[dim] == result_size
        dims.append(dim if is_like_result else None)
    return dims


def _enter(names: str, function: Rule = elementwise, *, linear: Linear | None = None, is_costly: bool = False) -> None:
    """Enters elementwise primitives into the registry."""
    # A partial operand beside a split one is needed as a shard only: `p.split` makes it by a reduce-scatter, where the
    # partitioner would take an all-reduce before.
    enter_rule = rule(*names.split(), operands=OperandStates.PARTIAL_BESIDE_SPLIT, linear=linear, is_elementwise=True)
    enter_rule(function)
    enter_operand_dims = inverse_rule(*names.split(), is_costly=is_costly)
    enter_operand_dims(_operand_dims)


def _is_of_floats(eqn: JaxprEqn) -> bool:
    """Returns whether the result has floating-point numbers. A division of integers drops the rest."""
    return jnp.issubdtype(type_of(eqn.outvars[0]).dtype, jnp.inexact)


# Only entries with `linear` take parts of a sum as they are. A wrong one is silent: see `Linear`.
_enter(
    """
    abs acos acosh and asin asinh atan atan2 atanh bessel_i0e bessel_i1e cbrt ceil clamp clz cos cosh digamma eq eq_to
    erf erfc exp exp2 expm1 floor ge gt igamma igamma_grad_a igammac integer_pow is_finite le le_to lgamma log log1p
    log2 logistic lt lt_to max min mulhi ne nextafter not one_minus_square or polygamma polynomial population_count pow
    random_clone random_seed reduce_precision regularized_incomplete_beta rem round rsqrt shift_left
    shift_right_arithmetic shift_right_logical sign sin sinh sqrt square tan tanh xor zeta
    """
)
_enter("erf_inv threefry2x32", is_costly=True)  # random bits, and what makes normal numbers of them
_enter("add add_any complex sub", linear=IN_ALL)
_enter("conj convert_element_type copy imag name neg real stop_gradient", linear=IN_ALL)
_enter("mul", linear=IN_EITHER)
# In the numerator alone: 1 / (x + y) is no sum.
_enter("div", linear=Linear(slice(1), condition=_is_of_floats))
_enter("select_n", linear=Linear(slice(1, None)))  # operand 0 is the predicate
_enter("bitcast_convert_type", bitcast)
_enter("random_fold_in", fold_in)


@rule("tie", operands=OperandStates.ANY)
def tie(p: Partitioner, eqn: JaxprEqn, operands: list[Value]) -> list[Value]:
    """Returns the second operand."""
    return [operands[1]]


# ---- indices


@index_dim("copy", "name")
def _copy_index_dim(eqn: JaxprEqn, operands: Sequence[Value]) -> int | None:
    return index_dim_of(operands[0])


@index_dim("convert_element_type")
def _convert_index_dim(eqn: JaxprEqn, operands: Sequence[Value]) -> int | None:
    """Indices stay indices in an integer dtype that holds the last of them."""
    dim = index_dim_of(operands[0])
    new_dtype = eqn.params["new_dtype"]
    if dim is None or not jnp.issubdtype(new_dtype, jnp.integer):
        return None
    last_index = type_of(eqn.outvars[0]).shape[dim] - 1
    if last_index > jnp.iinfo(new_dtype).max:
        return None
    return dim


@index_dim("select_n")
def _select_index_dim(eqn: JaxprEqn, operands: Sequence[Value]) -> int | None:
    """JAX reads negative indices from the end, by `where(i < 0, i + n, i)`. No index that counts up is negative."""
    predicate, if_false = operands[:2]
    test = predicate.provenance
    if test is None or test.name != "lt" or index_dim_of(test.operands[0]) is None:
        return None
    bound = test.operands[1].x
    if is_tracer(bound) or not (np.asarray(bound) <= 0).all():
        return None
    return index_dim_of(if_false)
