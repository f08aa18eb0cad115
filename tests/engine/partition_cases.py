"""For each primitive of the table of rules: functions that hold it, and arrays to call them on.

All numbers are multiples of 1/256 and small, so that a value is the exact sum of its parts on 8 shards.
"""

import dataclasses
import functools
import importlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.extend import core as jex
from jax.extend.core import primitives

# Primitives that only some of the tested versions of jax have: the cases of the others are left out.
SINCE_0_12 = frozenset({"log2", "mulhi", "one_minus_square", "polynomial", "xla_metadata_call"})
UNTIL_0_11 = frozenset({"closed_call", "geqp3_"})


@dataclasses.dataclass(frozen=True)
class Case:
    """A function and its arguments.

    Args:
        function: of arrays; an equation of the primitive is in its program.
        args: whole arrays.
        sharded: whether some split of an argument gathers nothing.
        tolerance: relative to the largest number of a result. XLA may keep more bits than bfloat16 has between two
            operations: a difference that is gone with XLA_FLAGS=--xla_allow_excess_precision=false is not the rule's.
        long: it compiles long, and is tried in few states but for `-m wide`.
        rare: another primitive has the same entry in the table; it is tried with `-m wide` alone.
    """

    function: Callable[..., Any]
    args: tuple[Any, ...]
    sharded: bool = True
    tolerance: float = 2e-5
    long: bool = False
    rare: bool = False


_random = np.random.default_rng(0)


def floats(*shape: int) -> np.ndarray:
    return (_random.integers(48, 208, shape) / 256).astype(np.float32)


def ints(*shape: int, below: int = 8, dtype: Any = np.int32) -> np.ndarray:
    return _random.integers(0, below, shape).astype(dtype)


def bools(*shape: int) -> np.ndarray:
    return _random.integers(0, 2, shape).astype(bool)


def complexes(*shape: int) -> np.ndarray:
    return (floats(*shape) + 1j * floats(*shape)).astype(np.complex64)


_HOMES = "jax._src.lax.lax jax._src.lax.linalg jax._src.lax.special jax._src.lax.windowed_reductions jax._src.ad_util"


def after(function: Callable[..., Any], *settings: Any) -> Callable[..., Any]:
    """A function of its first argument."""
    return lambda a: function(a, *settings)


@functools.cache
def _primitives() -> dict[str, Any]:
    found = [value for home in _HOMES.split() for value in vars(importlib.import_module(home)).values()]
    found += [getattr(primitives, name) for name in dir(primitives)]
    return {value.name: value for value in found if isinstance(value, jex.Primitive)}


def bind(name: str, **params: Any) -> Callable[..., Any]:
    """The primitive of a name, as a function."""
    return lambda *xs: _primitives()[name].bind(*xs, **params)


def _elementwise() -> dict[str, list[Case]]:
    x, y, z = (8, 3), (8, 3), (8, 3)
    found: dict[str, list[Case]] = {}
    one = """abs acos acosh asin asinh atan atanh bessel_i0e bessel_i1e ceil cosh digamma erf_inv erfc floor is_finite
        lgamma sign sinh neg erf""".split()
    for name in one:
        found[name] = [Case(bind(name), (floats(*x),))]
    for name in "cbrt cos exp exp2 expm1 log log1p logistic rsqrt sin sqrt tan tanh".split():
        found[name] = [Case(getattr(lax, name), (floats(*x),))]
    found["square"] = [Case(lax.square, (floats(*x),))]
    found["integer_pow"] = [Case(lambda a: lax.integer_pow(a, 3), (floats(*x),))]
    found["round"] = [Case(lambda a: lax.round(a * 8), (floats(*x),))]
    found["copy"] = [Case(bind("copy"), (floats(*x),))]
    found["stop_gradient"] = [Case(lambda a: jax.lax.stop_gradient(a), (floats(*x),))]
    found["reduce_precision"] = [Case(lambda a: lax.reduce_precision(a, 8, 3), (floats(*x),))]
    for name in "real imag conj".split():
        found[name] = [Case(getattr(lax, name), (complexes(*x),))]
    for name in "add sub mul div max min atan2 rem nextafter eq ne lt le gt ge".split():
        cases = [Case(getattr(lax, name), (floats(*x), floats(*y)))]
        if name in ("add", "sub", "mul", "div", "max", "lt"):
            cases.append(Case(getattr(lax, name), (ints(16, 3, below=99), ints(16, 3, below=9) + 1)))
        if name in ("add", "sub", "mul"):
            cases.append(Case(after(getattr(lax, name), np.float32(0.5)), (floats(8, 16),)))
        found[name] = cases
    found["pow"] = [Case(lax.pow, (floats(*x), floats(*y)))]
    found["add_any"] = [Case(bind("add_any"), (floats(*x), floats(*y)))]
    found["complex"] = [Case(lax.complex, (floats(*x), floats(*y)))]
    for name in "eq_to le_to lt_to".split():
        found[name] = [Case(bind(name), (floats(*x), floats(*y)))]
    for name in "and or xor".split():
        function = getattr(lax, f"bitwise_{name}")
        found[name] = [
            Case(function, (ints(*x, below=99), ints(*y, below=99))),
            Case(function, (bools(*x), bools(*y))),
        ]
    found["not"] = [Case(lax.bitwise_not, (ints(*x, below=99),))]
    found["clz"] = [Case(lax.clz, (ints(*x, below=99),))]
    found["population_count"] = [Case(lax.population_count, (ints(*x, below=99),))]
    for name in "shift_left shift_right_arithmetic shift_right_logical".split():
        found[name] = [Case(getattr(lax, name), (ints(*x, below=99), ints(*y, below=5)))]
    found["mulhi"] = [Case(lax.mulhi, (ints(*x, below=2**30), ints(*y, below=2**30)))] if hasattr(lax, "mulhi") else []
    found["clamp"] = [
        Case(lax.clamp, (np.float32(0.3), floats(*x), np.float32(0.6))),
        Case(lax.clamp, (floats(*x), floats(*y), floats(*z))),
    ]
    found["select_n"] = [
        Case(lax.select_n, (bools(*x), floats(*y), floats(*z))),
        Case(lax.select_n, (np.bool_(True), floats(*y), floats(*z))),
        Case(lax.select_n, (ints(8, 16, below=3), floats(8, 16), floats(8, 16), floats(8, 16))),
    ]
    found["convert_element_type"] = [
        Case(lambda a: a.astype(jnp.bfloat16).astype(jnp.float32), (floats(*x),), tolerance=5e-2),
        Case(lambda a: (a * 64).astype(jnp.int32), (floats(*x),)),
        Case(lambda a: a.astype(bool), (ints(*x, below=2),)),
    ]
    found["bitcast_convert_type"] = [
        Case(lambda a: lax.bitcast_convert_type(a, jnp.int32), (floats(*x),)),
        Case(lambda a: lax.bitcast_convert_type(a, jnp.int8), (floats(8, 16),)),
    ]
    words = [ints(8, 16, below=2**31, dtype=np.uint32) for _ in range(4)]
    found["threefry2x32"] = [Case(bind("threefry2x32"), tuple(words[:2] + words[2:]), long=True)]
    found["name"] = [Case(lambda a: checkpoint_name(a, "a"), (floats(*x),))]
    found["log2"] = [Case(lambda a: bind("log2", accuracy=None)(a), (floats(*x),))]
    found["one_minus_square"] = [Case(lambda a: bind("one_minus_square")(a), (floats(*x),))]
    found["polynomial"] = [Case(lambda a: bind("polynomial")(a, np.float32(1), np.float32(2)), (floats(*x),))]
    found["device_put"] = [Case(lambda a: jax.device_put(a, jax.memory.Space.Device), (floats(*x),))]
    found["tie"] = [Case(lambda a, b: bind("tie")(a, b), (floats(8), floats(*x)))]
    return found


def _special() -> dict[str, list[Case]]:
    """Elementwise too, and loops that compile long: in few states, and for `-m wide`."""
    names = "igamma igammac igamma_grad_a zeta polygamma".split()
    found = {name: [Case(bind(name), (floats(8) + 1, floats(8) + 1))] for name in names}
    return found | {"regularized_incomplete_beta": [Case(lax.betainc, (floats(8), floats(8), floats(8)))]}


def _shapes() -> dict[str, list[Case]]:
    x = floats(8, 3, 16)
    keys = lambda *shape: ints(*shape, 2, below=2**31, dtype=np.uint32)
    wrap = lambda data: jax.random.wrap_key_data(data, impl="threefry2x32")
    unwrap = jax.random.key_data
    reshape = lambda *shape: lambda a: lax.reshape(a, shape)
    return {
        "broadcast_in_dim": [
            Case(lambda a: lax.broadcast_in_dim(a, (4, 8, 16), (1, 2)), (floats(8, 16),)),
            Case(lambda a: lax.broadcast_in_dim(a, (8, 16), (0, 1)), (floats(8, 1),)),
        ],
        "reshape": [
            Case(lambda a: lax.reshape(a, (24, 16), (1, 0)), (floats(16, 24),)),
            Case(lambda a: lax.reshape(a, (8, 48), (1, 2, 0)), (floats(16, 8, 3),)),
            Case(reshape(24, 16), (x,)),
            Case(reshape(8, 48), (x,)),
            Case(reshape(384), (x,)),
            Case(reshape(2, 4, 48), (x,), sharded=False),
            Case(reshape(8, 3, 2, 8), (x,)),
            Case(reshape(2, 8, 3, 8), (floats(16, 24),), sharded=False),
            Case(reshape(4, 4, 8), (floats(16, 8),)),
            Case(reshape(16, 0, 3), (floats(16, 0),), sharded=False),
            Case(reshape(8, 0), (floats(16, 0, 8),), sharded=False),
        ],
        "transpose": [Case(lambda a: lax.transpose(a, (2, 0, 1)), (x,))],
        "squeeze": [Case(lambda a: lax.squeeze(a, (1,)), (floats(8, 1, 16),))],
        "stack": [Case(lambda a, b, k=k: jnp.stack([a, b], k), (floats(8, 16), floats(8, 16))) for k in (0, 1, 2)],
        "unstack": [Case(lambda a, k=k: jnp.unstack(a, axis=k), (floats(8, 2, 16),)) for k in (0, 1)],
        "tile": [
            Case(lambda a: jnp.tile(a, (1, 2)), (floats(8, 16),)),
            Case(lambda a: jnp.tile(a, (3, 1)), (floats(8, 16),)),
        ],
        "pad": [
            Case(lambda a, b: lax.pad(a, b, ((0, 0, 0), (1, 2, 1))), (floats(8, 16), np.float32(0.5))),
            Case(lambda a, b: lax.pad(a, b, ((8, 0, 0), (0, 0, 0))), (floats(8, 16), np.float32(0.5))),
            Case(lambda a, b: lax.pad(a, b, ((-3, 0, 0), (0, 0, 0))), (floats(8, 16), np.float32(0.5))),
        ],
        "slice": [
            Case(lambda a: a[:, 2:10], (floats(8, 16),)),
            Case(lambda a: a[::2, 3:4], (floats(16, 8),)),
            Case(lambda a: lax.slice(a, (3, 0), (4, 16)), (floats(8, 16),)),
            Case(lambda a: lax.slice(a, (3,), (7,)), (floats(8),), sharded=False),
            Case(lambda a: lax.slice(a, (3,), (4,)), (bools(8),), sharded=False),
        ],
        "random_wrap": [Case(lambda a: unwrap(wrap(a)), (keys(8, 16),))],
        "random_unwrap": [Case(lambda a: unwrap(wrap(a)), (keys(8, 16),))],
        "random_seed": [Case(lambda a: unwrap(jax.vmap(jax.random.key)(a)), (ints(16),))],
        "random_split": [Case(lambda a: unwrap(jax.vmap(lambda k: jax.random.split(k, 3))(wrap(a))), (keys(8),))],
        "random_fold_in": [
            Case(lambda a, b: unwrap(jax.vmap(jax.random.fold_in)(wrap(a), b)), (keys(8), ints(8))),
            Case(lambda a, b: unwrap(jax.vmap(jax.random.fold_in, (None, 0))(wrap(a), b)), (keys(), ints(8))),
        ],
        "random_bits": [Case(lambda a: jax.vmap(lambda k: jax.random.bits(k, (3,)))(wrap(a)), (keys(8),))],
        "random_clone": [Case(lambda a: unwrap(jax.random.clone(wrap(a))), (keys(8),))],
        "random_gamma": [
            Case(lambda a, b: jax.vmap(jax.random.gamma)(wrap(a), b), (keys(8), floats(8, 2) + 1), long=True),
            Case(lambda a, b: jax.random.gamma(wrap(a), b), (keys(), floats(8, 2) + 1), sharded=False, long=True),
        ],
    }


def _keys() -> list[Case]:
    """Typed keys through every operation on shapes."""
    data = ints(8, 16, 2, below=2**31, dtype=np.uint32)
    operations = {
        "reshape": lambda k: k.reshape(16, 8),
        "broadcast": lambda k: jnp.broadcast_to(k[None], (3, 8, 16)),
        "row": lambda k: k[3],
        "concatenate": lambda k: jnp.concatenate([k, k], 1),
        "along the split": lambda k: jnp.concatenate([k, k], 0),
        "gather": lambda k: k[jnp.arange(8)[::-1]],
        "flip": lambda k: jnp.flip(k, 0),
        "select": lambda k: jnp.where(jnp.arange(16)[None] > 3, k, jnp.flip(k, 1)),
        "at": lambda k: k.at[2].set(k[3]),
        "scan": lambda k: lax.scan(lambda c, r: (c, jnp.flip(r, 0)), 0, k.T)[1],
        "cond": lambda k: lax.cond(jax.random.key_data(k).sum() > 3, lambda k: jnp.flip(k, 1), lambda k: k, k),
    }
    wrap = lambda a: jax.random.wrap_key_data(a, impl="threefry2x32")
    run = lambda operation, a: jax.random.key_data(operation(wrap(a)))
    return [Case(functools.partial(run, operation), (data,), sharded=False) for operation in operations.values()]


KEYS = _keys()


def _keys_of_first() -> list[Case]:
    """Keys of which the first of a batch draws for all of them, as XLA's generator does under `vmap`."""
    bits = lambda k: jax.random.bits(k, (3,))
    split = lambda k: jax.random.key_data(jax.random.split(k, 3))
    run = lambda draw, impl, a: jax.vmap(draw)(jax.random.wrap_key_data(a, impl=impl))
    args = (ints(8, 4, below=2**31, dtype=np.uint32),)
    draws = (bits, "unsafe_rbg"), (split, "unsafe_rbg"), (bits, "rbg")
    return [Case(functools.partial(run, *draw), args, sharded=False) for draw in draws]


KEYS_OF_FIRST = _keys_of_first()


def _along() -> dict[str, list[Case]]:
    x, square = floats(8, 3, 16), floats(8, 16, 5, 5) + 5 * np.eye(5, dtype=np.float32)
    found: dict[str, list[Case]] = {}
    for name in "reduce_sum reduce_max reduce_min reduce_prod".split():
        found[name] = [
            Case(bind(name, axes=axes, **_out(name)), (x,), sharded=axes != (0, 2) or name == "reduce_sum")
            for axes in ((0,), (1,), (0, 2))
        ]
    found["reduce_sum"].append(Case(bind("reduce_sum", axes=(0,), **_out("reduce_sum")), (ints(8, 16, below=99),)))
    found["reduce_max"].append(Case(bind("reduce_max", axes=(0,), **_out("reduce_max")), (complexes(8, 16),)))
    holes = floats(8, 16)
    holes[[2, 5], [3, 9]] = np.nan, -np.inf
    for name in "reduce_max reduce_min".split():
        narrow = lambda a, name=name: bind(name, axes=(0,), **_out(name))(a.astype(jnp.bfloat16)).astype(jnp.float32)
        found[name] += [
            Case(bind(name, axes=(0,), **_out(name)), (v,)) for v in (holes, -holes, holes - np.float32(0.5))
        ]
        found[name].append(Case(narrow, (holes - np.float32(0.5),), tolerance=2e-2))
        found[name].append(Case(bind(name, axes=(0,), **_out(name)), (bools(8, 16),)))
    for name in "reduce_or reduce_and reduce_xor".split():
        found[name] = [Case(after(getattr(lax, name), (0,)), (v,)) for v in (ints(8, 16, below=99), bools(8, 16))]
    for name in "argmax argmin".split():
        found[name] = [Case(after(getattr(lax, name), k, np.int32), (x,)) for k in (0, 1, 2)]
    ties = Case(lambda a: lax.argmax(a, 0, np.int32), (ints(64, 8, below=3),))
    found["argmax"] += [ties, Case(after(lax.argmax, 0, np.int32), (floats(16),), sharded=False)]
    for name in "psum pmax pmin".split():  # over a dim: by a vmap that names its axis
        across = lambda a, name=name: a - getattr(lax, name)(a, "rows")
        found[name] = [Case(jax.vmap(across, in_axes=k, axis_name="rows"), (x,)) for k in (0, 1, 2)]
    weighted = lambda a, b: a + b * np.float32(1)
    found["reduce"] = [Case(lambda a: lax.reduce(a, np.float32(0), weighted, (1,)), (x,))]
    for name in "cumsum cumprod cummax cummin cumlogsumexp".split():
        found[name] = [Case(after(getattr(lax, name), k), (floats(8, 16),)) for k in (0, 1)]
    found["sort"] = [
        Case(lambda a: lax.sort(a, dimension=0), (floats(8, 16),)),
        Case(lambda a, b: lax.sort([a, b], dimension=1, num_keys=2), (ints(8, 16, below=3), floats(8, 16))),
        Case(lambda a: lax.sort(a), (floats(16),), sharded=False),
    ]
    found["split"] = [Case(lambda a, k=k: lax.split(a, (4, 12), k), (floats(16, 16),)) for k in (0, 1)]
    found["concatenate"] = [
        Case(lambda a, b, k=k: lax.concatenate([a, b], k), (floats(8, 16), floats(8, 16))) for k in (0, 1)
    ]
    found["top_k"] = [Case(lambda a: lax.top_k(a, 3), (floats(8, 16),))]
    found["approx_top_k"] = [Case(lambda a: lax.approx_max_k(a, 3), (floats(8, 16),))]
    found["rev"] = [Case(lambda a, k=k: lax.rev(a, (k,)), (floats(8, 16),)) for k in (0, 1)]
    found["fft"] = [Case(jnp.fft.fft, (floats(8, 16),)), Case(lambda a: jnp.fft.rfft2(a), (floats(8, 3, 16),))]
    found |= _windows() | _linalg(square)
    return found


def _out(name: str) -> dict[str, Any]:
    return {"out_sharding": None} if name in ("reduce_sum", "reduce_max", "reduce_min", "reduce_prod") else {}


def _windows() -> dict[str, list[Case]]:
    image = floats(8, 4, 6, 8)
    window = lambda add, start: lambda a: lax.reduce_window(a, start, add, (1, 2, 3, 1), (1, 2, 1, 1), "SAME")
    custom = lambda a, b: a + b * np.float32(1)
    pooled = lambda a: window(lax.max, -np.float32(np.inf))(a)
    return {
        "reduce_window_sum": [Case(window(lax.add, np.float32(0)), (image,))],
        "reduce_window_max": [Case(pooled, (image,))],
        "reduce_window_min": [Case(window(lax.min, np.float32(np.inf)), (image,))],
        "reduce_window": [Case(window(custom, np.float32(0)), (image,))],
        "select_and_scatter_add": [Case(lambda a: jax.grad(lambda a: (pooled(a) ** 2).sum())(a), (image,))],
        "select_and_gather_add": [
            Case(lambda a: jax.jvp(pooled, (a,), (jnp.cos(a),))[1], (image,)),
        ],
        "select_and_scatter": [
            Case(
                lambda a, b: bind(
                    "select_and_scatter",
                    select_jaxpr=_scalar_jaxpr(lax.ge),
                    select_consts=(),
                    scatter_jaxpr=_scalar_jaxpr(lax.add),
                    scatter_consts=(),
                    window_dimensions=(1, 2),
                    window_strides=(1, 2),
                    padding=((0, 0), (0, 0)),
                )(a, b, np.float32(0)),
                (floats(8, 16), floats(8, 8)),
            )
        ],
    }


def _scalar_jaxpr(function: Callable[..., Any]) -> Any:
    closed = jax.make_jaxpr(function)(np.float32(0), np.float32(0))
    return closed.jaxpr if hasattr(closed, "jaxpr") else closed


def _linalg(square: np.ndarray) -> dict[str, list[Case]]:
    linalg: Any = importlib.import_module("jax._src.lax.linalg")
    symmetric = square + np.swapaxes(square, -1, -2)
    vectors = lambda a: linalg.tridiagonal(a + jnp.swapaxes(a, -1, -2))
    householder = lambda a: linalg.householder_product(*linalg.geqrf(a))
    case = lambda function, *args, rare=True: [Case(function, args, tolerance=2e-4, rare=rare)]
    rank_one = lambda r, w: jnp.stack([bind("cholesky_update")(r[i, 0], w[i, 0]) for i in range(1)])
    found = {
        "cholesky": case(lambda a: linalg.cholesky(a + jnp.swapaxes(a, -1, -2)), square, rare=False),
        "eigh": case(lambda a: linalg.eigh(a + jnp.swapaxes(a, -1, -2))[1], square),
        "eig": case(lambda a: linalg.eig(a)[0], square),
        "qr": case(lambda a: linalg.qr(a, full_matrices=False), square),
        "geqrf": case(linalg.geqrf, square),
        "svd": case(lambda a: linalg.svd(a, compute_uv=False), square),
        "lu": case(linalg.lu, square),
        "triangular_solve": case(lambda a, b: linalg.triangular_solve(a, b, left_side=True), square, square),
        "householder_product": case(householder, square, rare=False),
        "tridiagonal_solve": case(
            lambda d, b: linalg.tridiagonal_solve(d * 0.1, d + 3, d * 0.1, b),
            floats(8, 5),
            floats(8, 5, 16),
            rare=False,
        ),
        "tridiagonal": case(vectors, square),
        "schur": case(lambda a: linalg.schur(a + jnp.swapaxes(a, -1, -2))[0], square),
        "hessenberg": case(linalg.hessenberg, square),
        "symmetric_product": case(lambda a, c: linalg.symmetric_product(a, c), floats(8, 5, 16), symmetric[:, 0]),
        "lu_pivots_to_permutation": case(
            lambda a: linalg.lu_pivots_to_permutation(a, 6),
            np.tile(np.asarray([1, 3, 2, 5], np.int32), (8, 1)),
            rare=False,
        ),
        "cholesky_update": [Case(rank_one, (square, square[..., 0]), sharded=False, long=True)],
    }
    ormqr = getattr(linalg, "ormqr", None)
    found["ormqr"] = case(lambda a: ormqr(*linalg.geqrf(a), a), square) if ormqr is not None else []
    geqp3 = getattr(linalg, "geqp3", None)
    pivots = np.zeros((8, 16, 5), np.int32)
    found["geqp3"] = case(lambda a: geqp3(a, pivots), square) if geqp3 is not None else []
    return found


def _contraction() -> dict[str, list[Case]]:
    dot = lambda numbers, **kwargs: lambda a, b: lax.dot_general(a, b, numbers, **kwargs)
    conv = lambda dims, **kwargs: (
        lambda a, k: lax.conv_general_dilated(a, k, (1, 1), "SAME", dimension_numbers=dims, **kwargs)
    )
    nhwc, image = ("NHWC", "HWIO", "NHWC"), floats(8, 4, 4, 8)
    kernel_gradient = lambda groups: (
        lambda a, g: jax.vjp(lambda k: conv(nhwc, feature_group_count=groups)(a, k), jnp.ones((3, 3, 8 // groups, 16)))[
            1
        ](g)[0]
    )
    rows, sizes = floats(32, 8), np.asarray([3, 0, 20, 5], np.int32)
    ragged_gradient = lambda a, w, s, g: jax.vjp(lambda w: lax.ragged_dot(a, w, s), w)[1](g)[0]
    return {
        "dot_general": [
            Case(dot((((1,), (0,)), ((), ()))), (floats(8, 16), floats(16, 24))),
            Case(dot((((0,), (0,)), ((), ()))), (floats(8, 16), floats(8, 24))),
            Case(dot((((3,), (1,)), ((1,), (0,)))), (floats(16, 8, 3, 8), floats(8, 8, 24))),
            Case(
                lambda a, b: dot((((1,), (0,)), ((), ())), preferred_element_type=np.float32)(
                    a.astype(jnp.bfloat16), b.astype(jnp.bfloat16)
                ),
                (floats(8, 16), floats(16, 8)),
                tolerance=1e-2,
            ),
            Case(dot((((1,), (0,)), ((), ()))), (bools(8, 16), bools(16, 8))),
        ],
        "conv_general_dilated": [
            Case(conv(nhwc), (image, floats(3, 3, 8, 16))),
            Case(conv(nhwc, feature_group_count=8), (image, floats(3, 3, 1, 16))),
            Case(kernel_gradient(1), (image, floats(8, 4, 4, 16))),
            Case(kernel_gradient(8), (image, floats(8, 4, 4, 16))),
        ],
        "ragged_dot_general": [
            Case(lax.ragged_dot, (rows, floats(4, 8, 16), sizes)),
            Case(ragged_gradient, (rows, floats(4, 8, 16), sizes, floats(32, 16))),
        ],
        "scaled_dot": _scaled_dot(),
    }


def _scaled_dot() -> list[Case]:
    def product(numbers: Any = None) -> Callable[..., jax.Array]:
        def run(a: Any, b: Any, *scales: Any) -> jax.Array:
            a, b = (x.astype(jnp.float8_e4m3fn) for x in (a, b))
            scales = tuple(x.astype(jnp.float8_e8m0fnu) for x in scales)
            named = dict(zip(("lhs_scale", "rhs_scale"), scales, strict=False))
            return lax.scaled_dot(a, b, dimension_numbers=numbers, preferred_element_type=jnp.float32, **named)

        return run

    # Powers of two: others are rounded in bfloat16, or not, as XLA fuses.
    scales = lambda *shape: 2.0 ** -ints(*shape, below=4, dtype=np.float32)
    rows_contracted = (((0,), (0,)), ((), ()))  # as in the gradient of a kernel
    return [
        Case(product(), (floats(8, 32), floats(32, 16), scales(8, 16), scales(16, 16))),
        Case(product(), (floats(8, 32), floats(32, 16), scales(8, 4), scales(8, 16))),  # blocks larger than a shard
        Case(product(), (floats(8, 4, 32), floats(8, 32, 16), scales(8, 4, 8), scales(8, 8, 16))),
        Case(product(), (floats(8, 16), floats(16, 8))),  # one scale of 1 for each row and column
        Case(product(), (floats(3, 8), floats(8, 5)), sharded=False),  # shards of one element have no block
        Case(product(rows_contracted), (floats(32, 8), floats(32, 16), scales(8, 8), scales(16, 16))),
    ]


def _indexing() -> dict[str, list[Case]]:
    table, picks = floats(16, 8), ints(8, 3, below=16)
    labels, rows = ints(16), np.arange(16)
    updates = lambda name: lambda a, i, u: getattr(a.at[i], name)(u)
    unique = lambda name: lambda a, u: getattr(a.at[np.asarray([3, 5, 1, 0, 2, 9, 8, 11])], name)(u)
    counted = lambda name: lambda a, i, u: getattr(a.at[jnp.arange(16), i], name)(u)
    batched = lambda a, i, u: jax.vmap(lambda a, i, u: a.at[i].add(u))(a, i, u)
    counted_window = lambda a: jax.vmap(lambda i: lax.dynamic_slice(a, (i, 0), (2, 8)))(jnp.arange(16))
    places = lambda: lax.concatenate([jnp.arange(16)[:, None], jnp.zeros((16, 1), int)], 1)
    numbers = lax.ScatterDimensionNumbers((1, 2), (), (0, 1))
    windows = lambda name: lambda a, u: getattr(a.at[:, np.asarray([1, 4])], name)(u)
    found = {
        "dynamic_slice": [
            Case(lambda a, i: lax.dynamic_slice(a, (0, i), (8, 4)), (floats(8, 16), np.int32(3))),
            Case(lambda a, i: lax.dynamic_slice(a, (i, 0), (1, 16)), (floats(8, 16), np.int32(5))),
            Case(lambda a, i: lax.dynamic_slice(a, (i, 0), (3, 16)), (floats(8, 16), np.int32(7))),
            Case(lambda a, i: lax.dynamic_slice(a, (i,), (1,)), (ints(16, below=99), np.int32(99))),
            Case(lambda a, i: lax.dynamic_slice(a, (i,), (1,)), (floats(256), np.int8(100))),
        ],
        "dynamic_update_slice": [
            Case(lambda a, u, i: lax.dynamic_update_slice(a, u, (0, i)), (floats(8, 16), floats(8, 8), np.int32(5))),
            Case(lambda a, u, i: lax.dynamic_update_slice(a, u, (i, 0)), (floats(16, 8), floats(8, 8), np.int32(5))),
        ],
        "gather": [
            Case(lambda a, i: a[i], (table, picks)),
            Case(lambda a, i: a[:, i], (table, ints(8))),
            Case(lambda a, i: a[jnp.arange(16), i], (table, labels)),
            Case(lambda a, i: a[jnp.arange(8)[:, None], jnp.arange(3), i], (floats(8, 3, 16), ints(8, 3, below=16))),
            Case(lambda a, i: a[rows, i], (table, labels)),
            Case(lambda a, i: jnp.take_along_axis(a, i, 1), (table, ints(16, 3))),
            Case(lambda a, i: a.at[i].get(mode="fill", fill_value=7.0), (floats(16), ints(8, below=32))),
            Case(lambda a, i: a.at[i].get(mode="fill"), (ints(16), ints(8, below=32))),
            Case(lambda a, i: a.at[i].get(mode="clip"), (table, ints(8, below=32))),
            Case(counted_window, (table,), sharded=False),
        ],
    }
    for name, method in {"add": "add", "sub": "subtract", "mul": "multiply", "min": "min", "max": "max"}.items():
        found[f"scatter-{name}"] = [Case(updates(method), (floats(4, 8), ints(16, below=4), floats(16, 8)))]
    for name in ("add", "max"):  # a sum, and what is none
        found[f"scatter-{name}"] += [
            Case(windows(name), (floats(8, 16), floats(8, 2))),
            Case(counted(name), (table, labels, floats(16))),
        ]
    found["scatter-add"] += [
        Case(batched, (floats(8, 16), ints(8, 3), floats(8, 3))),
        Case(lambda a, u: lax.scatter_add(a, places(), u, numbers), (table, floats(16, 2, 8))),
    ]
    found["scatter"] = [
        Case(unique("set"), (table, floats(8, 8))),
        Case(windows("set"), (floats(8, 16), floats(8, 2))),
        Case(counted("set"), (table, labels, floats(16))),
    ]
    return found


def _calls() -> dict[str, list[Case]]:
    x, w = floats(8, 16), floats(16, 8)
    half = jax.custom_vjp(lambda a: a * 0.5)
    half.defvjp(lambda a: (a * 0.5, None), lambda _, g: (g,))
    vmapped = jax.custom_batching.custom_vmap(lambda a: jnp.sin(a) + a.sum(-1, keepdims=True))
    vmapped.def_vmap(lambda size, batched, a: (vmapped(a), batched[0]))
    body = lambda a: jnp.tanh(a) + a.sum(0, keepdims=True)
    solve = lambda a, b: jnp.linalg.solve(a + 4 * jnp.eye(5)[None], b)
    linear = lambda a, b: jax.custom_derivatives.linear_call(lambda r, a: a * r, lambda r, g: g * r, b, a)
    optimised = jax.custom_vjp(lambda a: a * 2)
    optimised.defvjp(lambda a: (a * 2, (a,)), lambda r, g: (g * r[0],), optimize_remat=True)
    metadata = importlib.import_module("jax.experimental.xla_metadata")
    compute_on = importlib.import_module("jax.experimental.compute_on")
    host = getattr(compute_on, "compute_on2", compute_on.compute_on)  # the first until 0.11
    on_host = lambda a: host(body, compute_type="device_host", out_memory_spaces=jax.memory.Space.Device)(a)
    found = {
        "jit": [Case(jax.jit(body), (x,))],
        "remat2": [Case(jax.grad(lambda a: (jax.checkpoint(body)(a) ** 2).sum()), (x,))],
        "custom_jvp_call": [Case(jax.nn.relu, (x,))],
        "custom_vjp_call": [Case(half, (x,))],
        "custom_vmap_call": [Case(vmapped, (x,))],
        "composite": [Case(lambda a: lax.composite(body, "my.body")(a), (x,))],
        "custom_linear_solve": [Case(solve, (floats(8, 5, 5), floats(8, 5, 3)), tolerance=2e-4)],
        "linear_call": [Case(linear, (x, floats(8, 16)))],
        "remat_opt": [Case(jax.grad(lambda a: optimised(a).sum()), (x,))],
        "optimization_barrier": [Case(lambda a, b: lax.optimization_barrier((a, b)), (x, w))],
        "compute_on": [Case(on_host, (x,))],
        "xla_metadata_call": [Case(lambda a: metadata.xla_metadata_call(body, a="b")(a), (x,))]
        if hasattr(metadata, "xla_metadata_call")
        else [],
    }
    return found


FAMILIES: dict[str, dict[str, list[Case]]] = {
    "elementwise": _elementwise(),
    "special": _special(),
    "shapes": _shapes(),
    "along": _along(),
    "contraction": _contraction(),
    "indexing": _indexing(),
    "calls": _calls(),
}
CASES: dict[str, list[Case]] = {name: cases for family in FAMILIES.values() for name, cases in family.items()}
