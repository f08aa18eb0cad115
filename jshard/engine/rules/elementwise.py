"""Operations on each element by itself."""

from typing import TYPE_CHECKING

from jshard.engine.rules.table import rule, same, split_dim
from jshard.engine.values import Eqn, Value

if TYPE_CHECKING:
    from jshard.engine.partitioner import Partitioner

ELEMENTWISE = frozenset(
    """
    abs add add_any and asin asinh acos acosh atan atan2 atanh bessel_i0e bessel_i1e bitcast_convert_type cbrt ceil
    clamp clz complex conj convert_element_type copy cos cosh digamma div eq eq_to erf erf_inv erfc exp exp2 expm1 floor
    ge gt igamma igamma_grad_a igammac imag integer_pow is_finite le le_to lgamma log log1p log2 logistic lt lt_to max
    min mul mulhi name ne neg nextafter not one_minus_square or polygamma polynomial population_count pow random_clone
    random_fold_in random_seed real reduce_precision regularized_incomplete_beta rem round rsqrt select_n shift_left
    shift_right_arithmetic shift_right_logical sign sin sinh sqrt square stop_gradient sub tan tanh threefry2x32 xor
    zeta
    """.split()
)


@rule(*ELEMENTWISE, converts_partial=True)
def elementwise(p: "Partitioner", eqn: Eqn, values: list[Value]) -> list[Value] | None:
    """Split as the largest operand is. Scalars and dims of size 1 stay whole."""
    dim, old, new = split_dim(values), eqn.invars[0].aval.ndim, eqn.outvars[0].aval.ndim
    if eqn.primitive.name == "bitcast_convert_type" and old != new:  # the last dim comes or goes
        return same(p, eqn, [p.split(values[0], dim)], dim) if dim < max(old, new) - 1 else None
    if any(v.ndim and p.full_shape(v)[dim] not in (1, eqn.outvars[0].aval.shape[dim]) for v in values):
        return None
    stays = lambda v: v.ndim == 0 or p.full_shape(v)[dim] == 1
    return same(p, eqn, [p.whole(v) if stays(v) else p.split(v, dim) for v in values], dim)


@rule("tie", takes_partial=True)
def tie(p: "Partitioner", eqn: Eqn, values: list[Value]) -> list[Value]:
    """The second operand."""
    return [values[1]]
