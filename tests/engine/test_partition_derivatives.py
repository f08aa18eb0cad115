"""Every primitive as the body of a model: forward mode, gradients of gradients, and maps equal one device."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jshard as js
from tests.engine.on_shards import is_float
from tests.engine.partition_cases import FAMILIES, Case
from tests.engine.test_partition_rules import NOT_COMPILED, is_here
from tests.parity import numbers_of
from tests.wide import wide

UNCOMPILED = (*NOT_COMPILED, "mulhi")


class Body(nnx.Module):
    """A primitive on arguments that a parameter scales by one."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        self.scale = nnx.Param(jnp.ones(8))

    def __call__(self, *args: jax.Array) -> Any:
        scale = (self.scale[...] * jnp.arange(1, 9)).sum() / 36
        return self.function(*(x * scale.astype(x.dtype) if is_float(x) else x for x in args))


def numbers_like(x: Any, phase: float) -> jax.Array:
    return jnp.asarray(np.sin(np.arange(x.size) * 1.3 + phase).reshape(x.shape), x.dtype)


@dataclasses.dataclass(frozen=True)
class Problem:
    """A model and its arguments: a function of what can be differentiated."""

    model: Body
    args: Sequence[jax.Array]

    def __post_init__(self) -> None:
        graph, params = nnx.split(self.model)
        object.__setattr__(self, "graph", graph)
        object.__setattr__(self, "params", params)

    @property
    def operands(self) -> tuple[Any, ...]:
        return self.params, *(x for x in self.args if is_float(x))

    def results(self, params: Any, *floats: jax.Array) -> list[jax.Array]:
        given = iter(floats)
        args = [next(given) if is_float(x) else x for x in self.args]
        return jax.tree.leaves(nnx.merge(self.graph, params, copy=True)(*args))

    def float_results(self, params: Any, *floats: jax.Array) -> list[jax.Array]:
        return [y for y in self.results(params, *floats) if is_float(y)]

    def number(self, params: Any, *floats: jax.Array) -> jax.Array:
        wide = lambda y: y.astype(jnp.promote_types(y.dtype, jnp.float32))
        results = self.float_results(params, *floats)
        return sum((jnp.sin(wide(y)) * numbers_like(wide(y), 0.3)).real.sum() for y in results)


def forward(problem: Problem) -> Any:
    tangents = jax.tree.map(lambda x: numbers_like(x, 0.1), problem.operands)
    return jax.jvp(problem.float_results, problem.operands, tangents)[1]


def gradient_of_a_gradient(problem: Problem) -> Any:
    every = tuple(range(len(problem.operands)))

    def of_gradient(*operands: Any) -> jax.Array:
        gradients = jax.tree.leaves(jax.grad(problem.number, every)(*operands))
        return sum((g.real * numbers_like(g.real, 0.2)).sum() + (g.real**2).sum() for g in gradients)

    return jax.grad(of_gradient, every)(*problem.operands)


def mapped(problem: Problem) -> Any:
    """Eight sets of arguments, which differ by a percent."""
    steps = 1 + 0.01 * jnp.arange(8)

    def rows(x: jax.Array) -> jax.Array:
        if not is_float(x):
            return jnp.stack([x] * 8)
        return jnp.stack([x * step.astype(x.dtype) for step in steps])

    return jax.vmap(lambda *args: jax.tree.leaves(problem.model(*args)))(*map(rows, problem.args))


MODES: dict[str, Callable[[Problem], Any]] = {
    "forward": forward,
    "gradient of a gradient": gradient_of_a_gradient,
    "mapped": mapped,
}


def cases_of(family: str, mode: str) -> dict[str, Case]:
    """The first case of each primitive that JAX can differentiate, or map, in this mode."""
    chosen = {}
    for name, cases in FAMILIES[family].items():
        if not cases or not is_here(name) or name in UNCOMPILED or not cases[0].args:
            continue
        args = [jnp.asarray(x) for x in cases[0].args]
        if mode != "mapped" and not any(map(is_float, args)):
            continue
        try:
            run = jax.jit(lambda args, case=cases[0]: MODES[mode](Problem(Body(case.function), args)))
            results = run.lower(args).out_info
        except (AssertionError, KeyError, NotImplementedError, TypeError, ValueError):
            continue  # as without jshard
        if jax.tree.leaves(results):
            chosen[name] = cases[0]
    return chosen


def difference(ours: Any, wanted: Any) -> float:
    """The largest difference, in units of the largest number of all leaves; not a number where only one side is."""
    largest = 1e-3
    worst = 0.0
    for mine, reference in zip(jax.tree.leaves(ours), jax.tree.leaves(wanted), strict=True):
        mine, reference = _numbers(mine), _numbers(reference)
        # Outside of a function's domain both are NaN, as in plain JAX: such elements are equal.
        defined = ~(np.isnan(mine) & np.isnan(reference))
        largest = np.fmax(largest, np.abs(reference[defined]).max(initial=0))
        worst = np.maximum(worst, np.abs(mine - reference)[defined].max(initial=0))
    return float(worst / largest)


def _numbers(x: jax.Array) -> np.ndarray:
    return np.asarray(numbers_of(x)).astype(np.complex128)


@pytest.mark.filterwarnings("ignore:.*mixes the examples:UserWarning")
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("family", [name if name == "along" else wide(name) for name in FAMILIES])
def test_every_primitive_is_differentiated_and_mapped_as_on_one_device(family: str, mode: str) -> None:
    if (family, mode) == ("special", "gradient of a gradient"):
        pytest.skip("JAX has no second derivative of any of these")
    cases = cases_of(family, mode)
    assert len(cases) > len(FAMILIES[family]) / 4
    mesh = js.mesh()

    def run(args: dict[str, Sequence[jax.Array]], *, annotate: bool) -> dict[str, Any]:
        results = {}
        for name, case in cases.items():
            model = Body(case.function)
            if annotate:
                js.fully_shard(model, mesh=mesh, placement=js.PlacementPolicy(min_size=1))
            results[name] = MODES[mode](Problem(model, args[name]))
        return results

    args = {name: [jnp.asarray(x) for x in case.args] for name, case in cases.items()}
    wanted = jax.jit(lambda args: run(args, annotate=False))(args)
    got = jax.jit(lambda args: run(args, annotate=True))(args)
    apart = {name: difference(got[name], wanted[name]) for name in cases}
    # A derivative that is zero but for rounding has no digits that two orders of a sum could share.
    assert not {name: d for name, d in apart.items() if not d <= max(2e-4, 5 * cases[name].tolerance)}, apart
