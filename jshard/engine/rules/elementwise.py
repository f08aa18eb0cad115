"""Operations on each element by itself."""

from typing import TYPE_CHECKING

from jshard.engine.rules.table import rule, same
from jshard.engine.values import Eqn, Value, array_bytes

if TYPE_CHECKING:
    from jshard.engine.partitioner import Partitioner

ELEMENTWISE = frozenset(
    """
    abs add add_any and asin asinh acos acosh atan atan2 atanh bessel_i0e bessel_i1e bitcast_convert_type cbrt ceil
    clamp clz complex conj convert_element_type copy copy_p cos cosh digamma div eq eq_to erf erf_inv erfc exp exp2
    expm1 floor ge gt igamma igammac imag integer_pow is_finite le lgamma log log1p logistic lt le_to lt_to max min mul
    mulhi ne neg nextafter not or polygamma population_count pow real reduce_precision regularized_incomplete_beta rem
    round rsqrt select_n shift_left shift_right_arithmetic shift_right_logical sign sin sinh sqrt square stop_gradient
    sub tan tanh threefry2x32 xor zeta
    """.split()
)


@rule(*ELEMENTWISE)
def elementwise(p: "Partitioner", eqn: Eqn, values: list[Value]) -> list[Value] | None:
    """Split as the largest operand is. Scalars and dims of size 1 stay whole."""
    if eqn.invars[0].aval.ndim != eqn.outvars[0].aval.ndim and eqn.primitive.name == "bitcast_convert_type":
        return None
    dim = max((v for v in values if v.is_split), key=lambda v: array_bytes(v.x)).dim
    stays = lambda v: v.ndim == 0 or (v.shape[dim] == 1 and v.state != dim)
    return same(p, eqn, [p.whole(v) if stays(v) else p.split(v, dim) for v in values], dim)
