"""Layers that are called one after another become a loop, which computes the same."""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.extend.core import Jaxpr, JaxprEqn, jaxprs_in_params

import jshard as js
from jshard._compat import scan_arguments, user_place
from jshard.engine import region
from jshard.engine.program import Program, abstract, evaluate_jaxpr
from jshard.engine.region_call import region_p
from jshard.engine.unit_call import unit_p
from jshard.engine.unrolled_layers import as_loops
from tests.helpers import Config, Decoder, Scanning, annotator, equations_run, loss_fn, placed, token_batch
from tests.parity import GRADIENT_TOLERANCE, flat, worst
from tests.toy_models import Residual, ResidualLinear

WIDTH = 8
ROWS = 8
X = np.random.default_rng(0).normal(size=(ROWS, WIDTH)).astype(np.float32)


class Layers(nnx.Module):
    """Layers, which are units, and how they are called."""

    def __init__(self, layers: Sequence[Any], run: Callable[..., Any]) -> None:
        self.layers = nnx.List(layers)
        self.run = run

    def __call__(self, *args: jax.Array) -> Any:
        return self.run(self.layers, *args)


class Attentive(nnx.Module):
    """A layer that takes a mask, and returns a score of its own beside its result."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.linear = nnx.Linear(WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x: jax.Array, mask: jax.Array) -> tuple[jax.Array, jax.Array]:
        hidden = jnp.tanh(self.linear(x)) * mask[None]
        return x + hidden, hidden.sum(-1)


class Noisy(nnx.Module):
    """A layer with dropout."""

    def __init__(self, rngs: nnx.Rngs, shares_rngs: bool = False) -> None:
        self.linear = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=None if shares_rngs else rngs)

    def __call__(self, x: jax.Array, rngs: nnx.Rngs | None = None) -> jax.Array:
        return x + self.dropout(self.linear(x), rngs=rngs)


class Scaled(nnx.Module):
    """A layer that takes a number, or a key."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.linear = nnx.Linear(WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x: jax.Array, scale: jax.Array) -> jax.Array:
        if jnp.issubdtype(scale.dtype, jax.dtypes.prng_key):
            scale = jax.random.normal(scale, ())
        return x + self.linear(x) * scale.astype(jnp.float32)


class Paired(nnx.Module):
    """A layer that carries two arrays."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.linear = nnx.Linear(WIDTH, WIDTH, rngs=rngs)

    def __call__(self, carry: dict[str, jax.Array]) -> dict[str, jax.Array]:
        hidden = jnp.tanh(self.linear(carry["x"]))
        return {"x": carry["x"] + hidden, "memory": carry["memory"] * 0.9 + hidden}


class Printing(nnx.Module):
    """A layer that prints."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.linear = nnx.Linear(WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        jax.debug.print("mean {}", x.mean())
        return x + self.linear(x)


class Nested(nnx.Module):
    """A layer with a unit inside."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.inner = Residual(WIDTH, 2 * WIDTH, rngs)
        self.outer = nnx.Linear(WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.outer(self.inner(x))


def linear(rngs: nnx.Rngs) -> ResidualLinear:
    return ResidualLinear(WIDTH, rngs)


def residual(rngs: nnx.Rngs) -> Residual:
    return Residual(WIDTH, 2 * WIDTH, rngs)


def made(number: int, make: Callable[[nnx.Rngs], Any] = linear, seed: int = 0) -> list[Any]:
    rngs = nnx.Rngs(seed)
    return [make(rngs) for _ in range(number)]


def one_after_another(layers: Any, x: jax.Array) -> jax.Array:
    for layer in layers:
        x = layer(x)
    return x


def traced(model: Any, *args: Any, units: Any = None) -> Program:
    """The program of a model's region, whose layers are units."""
    mesh = js.mesh()
    for unit in model.layers if units is None else units:
        js.fully_shard(unit, mesh=mesh)
    js.fully_shard(model, mesh=mesh)
    graph, state = nnx.split(model)
    closed = jax.make_jaxpr(lambda state, *args: nnx.merge(graph, state)(*args))(state, *args)
    (program,) = [eqn.params["call"].program for eqn in closed.jaxpr.eqns if eqn.primitive is region_p]
    return program


def of_layers(layers: Sequence[nnx.Module], run: Callable[..., Any], *args: Any) -> Program:
    return traced(Layers(layers, run), *(args or (X,)))


@dataclasses.dataclass(frozen=True)
class Shape:
    """The loops of a program: the length of each and its number of units; and the number of units outside."""

    loops: list[tuple[int, int]]
    outside: int = 0

    @classmethod
    def of(cls, program: Program) -> "Shape":
        jaxpr = program.jaxpr.jaxpr
        scans = [eqn for eqn in jaxpr.eqns if eqn.primitive.name == "scan"]
        loops = [(scan.params["length"], len(units_in(scan.params["jaxpr"].jaxpr))) for scan in scans]
        return cls(loops, len(units_in(jaxpr)) - sum(number for _, number in loops))


def units_in(jaxpr: Jaxpr) -> list[JaxprEqn]:
    """The units of a program, without those inside of units."""
    units = []
    for eqn in jaxpr.eqns:
        if eqn.primitive is unit_p:
            units.append(eqn)
            continue
        for inner in jaxprs_in_params(eqn.params):
            units += units_in(inner)
    return units


def operands_of(program: Program) -> Iterator[Any]:
    """Operands of a program, all different, so that none can stand for another."""
    rng = np.random.default_rng(1)
    for number, variable in enumerate(program.jaxpr.jaxpr.invars):
        aval = abstract(variable)
        if jnp.issubdtype(aval.dtype, jax.dtypes.prng_key):
            yield jax.random.key(number)
        elif jnp.issubdtype(aval.dtype, jnp.integer):
            yield jnp.full(aval.shape, number, aval.dtype)
        else:
            yield jnp.asarray(rng.normal(size=aval.shape), aval.dtype) / 2


def are_floats(arrays: Sequence[Any]) -> list[bool]:
    return [jnp.issubdtype(x.dtype, jnp.floating) for x in arrays]


def weighted_sum(outs: Sequence[jax.Array]) -> jax.Array:
    """A number that depends on each element of the results in its own way."""
    total = jnp.zeros(())
    for number, x in enumerate(outs):
        if jnp.issubdtype(x.dtype, jnp.floating):
            weights = np.random.default_rng(number).normal(size=x.shape).astype(x.dtype)
            total += (x * weights).sum()
    return total


def gradients(program: Program, operands: Sequence[Any]) -> list[jax.Array]:
    floats = [number for number, is_float in enumerate(are_floats(operands)) if is_float]

    def loss(values: list[jax.Array]) -> jax.Array:
        every = list(operands)
        for number, x in zip(floats, values, strict=True):
            every[number] = x
        return weighted_sum(evaluate_jaxpr(program.jaxpr, every))

    return jax.jit(jax.grad(loss))([operands[number] for number in floats])


def assert_equal_arrays(arrays: Sequence[Any], expected: Sequence[Any], tolerance: float) -> None:
    for x, y in zip(arrays, expected, strict=True):
        assert (x.dtype, x.shape) == (y.dtype, y.shape)
        if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            x, y = jax.random.key_data(x), jax.random.key_data(y)
        scale = max(float(jnp.abs(jnp.asarray(y, jnp.float32)).max()), 1e-3)
        np.testing.assert_allclose(np.float32(x), np.float32(y), rtol=0, atol=tolerance * scale)


def assert_same(loops: Program, program: Program, tolerance: float = 2e-6) -> None:
    """The results and the gradients of two programs are equal."""
    assert loops.num_params == program.num_params and loops.remat == program.remat
    assert loops.jaxpr.in_avals == program.jaxpr.in_avals
    assert loops.jaxpr.out_avals == program.jaxpr.out_avals
    operands = list(operands_of(program))
    run = lambda program: jax.jit(functools.partial(evaluate_jaxpr, program.jaxpr))(operands)
    assert_equal_arrays(run(loops), run(program), tolerance)
    assert_equal_arrays(gradients(loops, operands), gradients(program, operands), tolerance)


def assert_loops(program: Program, *loops: tuple[int, int], outside: int = 0) -> Program:
    """The program has these loops, each a length and a number of units, and computes the same."""
    result = as_loops(program)
    assert Shape.of(result) == Shape([*loops], outside)
    assert_same(result, program)
    return result


def assert_left(program: Program) -> None:
    assert as_loops(program) is program


# ---- a run


def test_layers_become_a_loop():
    result = assert_loops(of_layers(made(3), one_after_another), (3, 1))
    assert [eqn.primitive.name for eqn in result.jaxpr.jaxpr.eqns] == ["stack", "stack", "scan"]


def test_what_is_no_run_is_left():
    assert_left(of_layers(made(1), one_after_another))
    assert_left(of_layers([*made(1), *made(1, residual)], one_after_another))
    assert_left(traced(Layers(made(3), one_after_another), X, units=[]))


def test_units_with_other_settings_are_other_units():
    model: Any = Layers(made(4), one_after_another)
    for layer in model.layers[2:]:
        js.fully_shard(layer, mesh=js.mesh(), reshard_after_forward=False)
    assert_loops(traced(model, X, units=model.layers[:2]), (2, 1), (2, 1))


def test_names_of_attributes_do_not_matter():
    class Named(nnx.Module):
        def __init__(self) -> None:
            self.first, self.second = made(2)

        def __call__(self, x: jax.Array) -> jax.Array:
            return self.second(self.first(x))

    model = Named()
    assert_loops(traced(model, X, units=[model.first, model.second]), (2, 1))


def test_the_derivative_is_that_of_the_layers():
    program = of_layers(made(3), one_after_another)
    loops = as_loops(program)
    wrt = (True,) * len(program.jaxpr.in_avals)
    operands = list(operands_of(program))
    results = []
    for gradient in (program.gradient(wrt), loops.gradient(wrt)):
        out, *kept = evaluate_jaxpr(gradient.forward, operands)
        params = operands[: program.num_params]
        results.append(evaluate_jaxpr(gradient.backward((True,)), [*params, *kept, jnp.ones_like(out)]))
    assert_equal_arrays(results[1], results[0], 2e-6)


# ---- more than one run


def test_two_towers():
    def run(layers: Any, x: jax.Array) -> jax.Array:
        memory = one_after_another(layers[:3], x)
        x = jnp.tanh(memory.mean(-1, keepdims=True)) * x
        return one_after_another(layers[3:], x) + memory

    assert_loops(of_layers([*made(3), *made(2, residual)], run), (3, 1), (2, 1))
    assert_loops(of_layers(made(5), run), (3, 1), (2, 1))


def test_towers_of_equal_layers_on_different_inputs():
    def run(layers: Any, x: jax.Array, y: jax.Array) -> jax.Array:
        return one_after_another(layers[:2], x) * one_after_another(layers[2:], y)

    assert_loops(of_layers(made(5), run, X, 2 * X), (2, 1), (3, 1))


def test_towers_layer_by_layer_are_one_loop():
    def run(layers: Any, x: jax.Array, y: jax.Array) -> jax.Array:
        for left, right in zip(layers[::2], layers[1::2], strict=True):
            x = left(x)
            y = right(y)
        return x * y

    assert_loops(of_layers(made(6), run, X, 2 * X), (3, 2))


def test_a_tower_that_reads_the_layers_of_another_in_reverse():
    def run(layers: Any, x: jax.Array) -> jax.Array:
        skipped = []
        for layer in layers[:3]:
            x = layer(x)
            skipped.append(x)
        for layer in layers[3:]:
            x = layer(x + skipped.pop())
        return x

    program = of_layers(made(6), run)
    result = as_loops(program)
    assert sum(length for length, _ in Shape.of(result).loops) == 6
    assert_same(result, program)


# ---- rows of several units


@pytest.mark.parametrize(
    ("pattern", "loops", "outside"),
    [
        ("lglglg", [(3, 2)], 0),
        ("llgllg", [(2, 3)], 0),
        ("glllll", [(5, 1)], 1),
        ("lglgl", [(2, 2)], 1),
        ("llgg", [(2, 1), (2, 1)], 0),
    ],
)
def test_a_repeated_group_is_a_row(pattern: str, loops: list[tuple[int, int]], outside: int):
    rngs = nnx.Rngs(0)
    make = {"l": linear, "g": residual}
    layers = [make[kind](rngs) for kind in pattern]
    assert_loops(of_layers(layers, one_after_another), *loops, outside=outside)


def test_units_inside_of_layers_with_equations_between_them():
    class Block(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            self.norm = nnx.RMSNorm(WIDTH, rngs=rngs)
            self.mixer = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
            self.mlp = residual(rngs)

        def __call__(self, x: jax.Array) -> jax.Array:
            x = x + self.mixer(self.norm(x))
            return x + self.mlp(self.norm(x))

    model: Any = Layers(made(3, Block), one_after_another)
    units = [unit for layer in model.layers for unit in (layer.mixer, layer.mlp)]
    assert_loops(traced(model, X, units=units), (3, 2))


def test_layers_with_a_unit_inside():
    model: Any = Layers(made(3, Nested), one_after_another)
    inner = [layer.inner for layer in model.layers]
    result = assert_loops(traced(model, X, units=[*inner, *model.layers]), (3, 1))
    assert names_of_units(result) == ["layers/*", "layers/*/inner"]


# ---- operands and results


def test_results_beside_the_carry_are_stacked():
    def run(layers: Any, x: jax.Array, mask: jax.Array) -> Any:
        total = 0.0
        for layer in layers:
            x, score = layer(x, mask)
            total = total + score
        return x, total, score

    assert_loops(of_layers(made(3, Attentive), run, X, np.linspace(0, 1, WIDTH, dtype=np.float32)), (3, 1))


def test_results_that_nothing_reads_are_not_stacked():
    def run(layers: Any, x: jax.Array) -> jax.Array:
        for layer in layers:
            x, _ = layer(x, jnp.ones(WIDTH))
        return x

    result = assert_loops(of_layers(made(3, Attentive), run), (3, 1))
    (scan,) = [eqn for eqn in result.jaxpr.jaxpr.eqns if eqn.primitive.name == "scan"]
    assert len(scan.outvars) == 1


def test_carries_that_something_else_reads():
    def run(layers: Any, x: jax.Array) -> Any:
        hidden = [x]
        means = []
        for layer in layers:
            x = layer(x)
            hidden.append(x)
            means.append(x.mean(0))
        return hidden, jnp.stack(means)

    assert_loops(of_layers(made(3), run), (3, 1))


def test_a_mask_is_shared():
    def run(layers: Any, x: jax.Array, mask: jax.Array) -> jax.Array:
        for layer in layers:
            x, _ = layer(x, mask)
        return x

    result = assert_loops(of_layers(made(3, Attentive), run, X, np.ones(WIDTH, np.float32)), (3, 1))
    stacked = [eqn for eqn in result.jaxpr.jaxpr.eqns if eqn.primitive.name == "stack"]
    assert len(stacked) == 2  # the parameters


@pytest.mark.parametrize("tail", ["once", "each"])
def test_a_key_for_each_layer(tail: str):
    def run(layers: Any, x: jax.Array, data: jax.Array) -> jax.Array:
        key = jax.random.wrap_key_data(data)
        keys = jax.random.split(key, len(layers))
        for number, layer in enumerate(layers):
            x = layer(x, keys[number] if tail == "once" else jax.random.fold_in(key, number))
        return x

    assert_loops(of_layers(made(3, Scaled), run, X, np.arange(2, dtype=np.uint32)), (3, 1))


def test_numbers_of_layers_are_stacked():
    def run(layers: Any, x: jax.Array) -> jax.Array:
        for number, layer in enumerate(layers):
            x = layer(x, jnp.int32(number + 1))
        return x

    def once_other(layers: Any, x: jax.Array) -> jax.Array:
        return run(layers, x) + layers[0](x, jnp.bfloat16(2))

    assert_loops(of_layers(made(3, Scaled), run), (3, 1))
    assert_loops(of_layers(made(3, Scaled), once_other), (3, 1), outside=1)


def test_dropout():
    assert_loops(of_layers(made(3, Noisy), one_after_another), (3, 1))


def test_dropout_with_one_count_for_all_layers():
    class Counting(Layers):
        def __init__(self) -> None:
            super().__init__(made(3, functools.partial(Noisy, shares_rngs=True)), lambda *_: None)
            self.rngs = nnx.Rngs(0)

        def __call__(self, x: jax.Array) -> jax.Array:
            for layer in self.layers:
                x = layer(x, self.rngs)
            return x

    assert_loops(traced(Counting(), X), (3, 1))


def test_a_carry_of_several_arrays():
    def run(layers: Any, x: jax.Array) -> Any:
        carry = {"x": x, "memory": jnp.zeros_like(x)}
        for layer in layers:
            carry = layer(carry)
        return carry["x"], carry["memory"]

    result = assert_loops(of_layers(made(3, Paired), run), (3, 1))
    (scan,) = [eqn for eqn in result.jaxpr.jaxpr.eqns if eqn.primitive.name == "scan"]
    assert scan_arguments(scan) == (0, 2)  # constants, carry


# ---- equations between layers


def before_each(layers: Any, x: jax.Array) -> jax.Array:
    for layer in layers:
        x = layer(jnp.sin(x) * 0.5)
    return x


def after_each(layers: Any, x: jax.Array) -> jax.Array:
    for layer in layers:
        x = jnp.sin(layer(x)) * 0.5
    return x


def around_each(layers: Any, x: jax.Array) -> jax.Array:
    for layer in layers:
        x = jnp.sin(layer(jnp.tanh(x)))
    return x


def residual_around_each(layers: Any, x: jax.Array) -> jax.Array:
    for layer in layers:
        x = x + layer(jnp.tanh(x))
    return x


def cast_for_each(layers: Any, x: jax.Array) -> jax.Array:
    for layer in layers:
        x = layer(x.astype(jnp.bfloat16)).astype(jnp.float32)
    return x


def after_all_but_the_last(layers: Any, x: jax.Array) -> jax.Array:
    for number, layer in enumerate(layers):
        x = layer(x)
        if number + 1 < len(layers):
            x = jnp.sin(x)
    return x


@pytest.mark.parametrize("run", [before_each, after_each, around_each, residual_around_each])
def test_equations_between_layers_belong_to_the_rows(run: Callable[..., Any]):
    assert_loops(of_layers(made(4), run), (4, 1))


def test_what_is_read_twice_is_carried_and_stacked_once():
    def run(layers: Any, x: jax.Array, scales: jax.Array) -> jax.Array:
        for layer, scale in zip(layers, scales, strict=True):
            x = x * scale + layer(x) * scale
        return x

    result = assert_loops(of_layers(made(3), run, X, np.linspace(1, 2, 3, dtype=np.float32)), (3, 1))
    (scan,) = [eqn for eqn in result.jaxpr.jaxpr.eqns if eqn.primitive.name == "scan"]
    assert scan_arguments(scan) == (0, 1)  # constants, carry
    assert len(scan.invars) == 1 + 3  # two parameters, and the scales


def test_casts_between_layers():
    program = of_layers(made(4), cast_for_each)
    result = as_loops(program)
    assert Shape.of(result) == Shape([(4, 1)])
    assert_same(result, program, tolerance=1e-2)  # bfloat16, whose products XLA rounds once more or less


def test_an_equation_that_the_last_layer_lacks():
    assert_loops(of_layers(made(4), after_all_but_the_last), (3, 1), outside=1)


def test_operands_of_equations_between_layers():
    def run(layers: Any, x: jax.Array, scales: jax.Array) -> jax.Array:
        for layer, scale in zip(layers, scales, strict=True):
            x = layer(x) * scale
        return x

    assert_loops(of_layers(made(4), run, X, np.linspace(1, 2, 4, dtype=np.float32)), (4, 1))


def test_literals_of_equations_between_layers():
    def run(layers: Any, x: jax.Array) -> jax.Array:
        for number, layer in enumerate(layers):
            x = layer(x) * (1.0 / (number + 1))
        return x

    assert_loops(of_layers(made(4), run), (4, 1))


def test_another_equation_ends_the_run():
    def run(layers: Any, x: jax.Array) -> jax.Array:
        for number, layer in enumerate(layers):
            x = jnp.sin(x) if number == 2 else x
            x = layer(x)
        return x

    assert_loops(of_layers(made(5), run), (2, 1), (3, 1))


# ---- dependencies that a loop does not have


def test_a_layer_that_reads_an_earlier_one_than_the_last():
    def run(layers: Any, x: jax.Array) -> jax.Array:
        outputs = [x, x]
        for layer in layers:
            outputs.append(layer(outputs[-1] + outputs[-2]))
        return outputs[-1]

    assert_loops(of_layers(made(6), run), (3, 2))  # rows of two, which carry both
    assert_loops(of_layers(made(3), run), (2, 1), outside=1)  # what the two read is there before them


def test_layers_that_read_all_earlier_ones():
    def run(layers: Any, x: jax.Array) -> jax.Array:
        outputs = [x]
        for layer in layers:
            outputs.append(layer(functools.reduce(jnp.add, outputs)))
        return outputs[-1]

    assert_left(of_layers(made(3), run))


def test_layers_that_read_the_first_one():
    def run(layers: Any, x: jax.Array) -> jax.Array:
        first = x = layers[0](x)
        for layer in layers[1:]:
            x = layer(x * first)
        return x

    assert_loops(of_layers(made(4), run), (3, 1), outside=1)


def test_an_operand_that_depends_on_the_run_ends_it():
    def run(layers: Any, x: jax.Array) -> jax.Array:
        mask = jnp.ones(WIDTH)
        for number, layer in enumerate(layers):
            x, _ = layer(x, mask)
            mask = jnp.tanh(x[0]) if number == 1 else mask
        return x

    assert_loops(of_layers(made(4, Attentive), run), (2, 1), (2, 1))


def test_layers_beside_each_other_are_no_run():
    assert_left(of_layers(made(3), lambda layers, x: sum(layer(x) for layer in layers)))


@pytest.mark.parametrize("order", [[0, 0, 0], [0, 1, 0, 1], [0, 1, 1, 2]], ids=str)
def test_tied_layers(order: list[int]):
    def run(layers: Any, x: jax.Array) -> jax.Array:
        return one_after_another([layers[number] for number in order], x)

    result = assert_loops(of_layers(made(3), run), (len(order), 1))
    num_stacks = [eqn.primitive.name for eqn in result.jaxpr.jaxpr.eqns].count("stack")
    assert num_stacks == (0 if len(set(order)) == 1 else 2)


# ---- effects


def test_layers_that_print_are_left():
    assert_left(of_layers(made(3, Printing), one_after_another))


def test_prints_between_layers_end_a_run(capfd: pytest.CaptureFixture[str]):
    def run(layers: Any, x: jax.Array) -> jax.Array:
        x = one_after_another(layers[:2], x)
        jax.debug.print("middle {}", x.mean())
        return one_after_another(layers[2:], x)

    program = of_layers(made(5), run)
    result = as_loops(program)
    assert Shape.of(result) == Shape([(2, 1), (3, 1)])
    evaluate_jaxpr(result.jaxpr, list(operands_of(program)))
    jax.effects_barrier()
    assert capfd.readouterr().out.count("middle") == 1


# ---- calls around layers


def call(layer: Any, x: jax.Array) -> jax.Array:
    return layer(x)


@pytest.mark.parametrize("wrap", [nnx.remat, nnx.jit])
@pytest.mark.parametrize("make", [residual, Noisy])
def test_each_layer_in_a_call(wrap: Callable[..., Any], make: Callable[[nnx.Rngs], nnx.Module]):
    def run(layers: Any, x: jax.Array) -> jax.Array:
        for layer in layers:
            x = wrap(call)(layer, x)
        return x

    assert_loops(of_layers(made(3, make), run), (3, 1))


def test_each_layer_in_a_checkpoint_of_jax():
    def run(layers: Any, x: jax.Array) -> jax.Array:
        for layer in layers:
            x = jax.checkpoint(lambda x, layer=layer: layer(x))(x)
        return x

    result = assert_loops(of_layers(made(3, residual), run), (3, 1))
    assert names_of_units(result) == ["layers/*"]


# ---- lines and names


def names_of_units(program: Program) -> list[str]:
    return [eqn.params["call"].settings.name for eqn in equations_run(program.jaxpr.jaxpr) if eqn.primitive is unit_p]


def test_equations_keep_their_line_and_names():
    def run(layers: Any, x: jax.Array) -> jax.Array:
        for layer in layers:
            with jax.named_scope("tower"):
                x = layer(jnp.sin(x))
        return x

    result = assert_loops(of_layers(made(3), run), (3, 1))
    (scan,) = [eqn for eqn in result.jaxpr.jaxpr.eqns if eqn.primitive.name == "scan"]
    sine, unit = scan.params["jaxpr"].jaxpr.eqns
    assert [str(eqn.source_info.name_stack) for eqn in (scan, sine, unit)] == ["", "tower", "tower"]
    lines = [user_place(eqn) for eqn in (*result.jaxpr.jaxpr.eqns, sine, unit)]
    assert all(line.startswith("test_unrolled_layers.py") and line.endswith(".run)") for line in lines), lines
    assert names_of_units(result) == ["layers/*"]


# ---- in a region


def region_gradients(model: nnx.Module, batch: Any) -> tuple[dict[str, np.ndarray], list[tuple[int, ...]]]:
    """Gradients of a model, and the shapes of what its program gathers."""
    graph, state = nnx.split(model)
    grad = lambda state: nnx.grad(loss_fn)(nnx.merge(graph, state), *batch)
    gathers = [eqn for eqn in equations_run(jax.make_jaxpr(grad)(state).jaxpr) if eqn.primitive.name == "all_gather"]
    return flat(jax.jit(grad)(state)), sorted(eqn.invars[0].aval.shape for eqn in gathers)


def test_parameters_stay_shards_until_their_row_is_gathered(monkeypatch: pytest.MonkeyPatch):
    """As in `js.scan_layers`: the same arrays are gathered, none of which is a stack."""
    config = Config(layers=4, attends=False)
    batch = token_batch(config, batch=16, length=8)
    scanned = placed(lambda: Scanning(config, nnx.Rngs(0)), annotator(js.mesh()))
    expected, gathered_by_scan = region_gradients(scanned, batch)

    trace = region._trace

    def trace_loops(*args: Any) -> tuple[Program, list[jax.Array]]:
        program, consts = trace(*args)
        return as_loops(program), consts

    monkeypatch.setattr(region, "_trace", trace_loops)
    found, gathered = region_gradients(placed(lambda: Decoder(config, nnx.Rngs(0)), annotator(js.mesh())), batch)
    assert gathered == gathered_by_scan
    assert max(worst(found[name], expected[name]) for name in expected) <= GRADIENT_TOLERANCE
