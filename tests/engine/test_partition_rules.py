"""Every rule of the partitioner's table equals one device: each split of each operand, whole and partial ones."""

import itertools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec

from jshard.engine.partitioner import Partitioner
from jshard.engine.rules import PARTIAL, RULES, State, Value, linear
from tests.engine.partition_cases import CASES, FAMILIES, KEYS, KEYS_OF_FIRST, SINCE_0_12, UNTIL_0_11, Case
from tests.wide import wide

MESHES = {"8": {"fsdp": 8}, "2x4": {"replica": 2, "fsdp": 4}}
OWN_TESTS = ("partitioner", "loops", "opaque")
"""Modules of rules that have files of tests of their own, beside the cases here."""
NOT_COMPILED = ("mulhi",)
"""Primitives that XLA of jax 0.12 cannot compile in any `jax.shard_map` on CPU."""
NEW = tuple(int(n) for n in jax.__version__.split(".")[:2]) >= (0, 12)


def is_here(name: str) -> bool:
    """Whether the installed jax has a primitive."""
    return name not in (UNTIL_0_11 if NEW else SINCE_0_12)


def states_of(arg: Any) -> list[State]:
    """The states in which an operand is tried."""
    dims: list[State] = [d for d, n in enumerate(arg.shape) if n and n % 8 == 0]
    return [None, *dims, *([PARTIAL] if np.issubdtype(arg.dtype, np.number) else [])]


def combinations(case: Case, every: bool = True) -> Iterator[tuple[State, ...]]:
    """States of all operands; of three or more operands at most two are not whole.

    Unless it is to be every one: of cases that compile long, those in which all operands are alike, as far as may be.
    """
    each = [states_of(arg) for arg in case.args]
    if case.long and not every:
        yield from (tuple(s if s in of else None for of in each) for s in {s: None for of in each for s in of})
    else:
        some = lambda states: len(states) < 3 or sum(s is not None for s in states) <= 2
        yield from filter(some, itertools.product(*each))


def parts_of(arg: Any) -> np.ndarray:
    """Eight arrays of which the argument is the sum, exactly."""
    random = np.random.default_rng(arg.size)
    if not np.issubdtype(arg.dtype, np.number):
        return np.stack([arg] * 8)
    parts = random.integers(-99, 99, (7, *arg.shape)) / (1 if np.issubdtype(arg.dtype, np.integer) else 256)
    parts = parts.astype(arg.dtype)
    return np.concatenate([parts, (arg - parts.sum(0, dtype=arg.dtype))[None].astype(arg.dtype)])


def given(p: Partitioner, arg: Any, part: Any, state: State) -> Value:
    """An operand in a state."""
    if isinstance(state, int):
        return Value(p.cut(arg, state), state)
    return Value(arg) if state is None else Value(part[0], PARTIAL)


def failures(cases: list[Case], mesh: str = "8", every: bool = True) -> list[str]:
    """What differs from one device, for cases in all states, in one program."""
    axes = tuple(MESHES[mesh])
    programs = [jax.make_jaxpr(case.function)(*case.args) for case in cases]
    found: list[str] = []
    tried: list[tuple[str, int]] = []
    sharded = [False] * len(cases)

    def body(args: list[Any], parts: list[Any]) -> list[Any]:
        results = []
        for number, case in enumerate(cases):
            for states in combinations(case, every):
                p = Partitioner(axes, 8)
                values = [given(p, *each) for each in zip(args[number], parts[number], states, strict=True)]
                try:
                    outs = p.run(programs[number].jaxpr, programs[number].consts, values)
                except Exception as error:  # a rule may fail in any of its steps
                    found.append(f"{number} {states}: {type(error).__name__}: {str(error)[:300]}")
                    continue
                alone = any(isinstance(s, int) for s in states) and "whole" not in {moved.kind for moved in p.moved}
                sharded[number] |= alone and any(v.state is not None for v in outs)
                tried.append((f"{number} {states} -> {[v.state for v in outs]}", number))
                results.append([p.whole(v).x[None] for v in outs])
        return results

    lined = jax.make_mesh(tuple(MESHES[mesh].values()), axes, axis_types=(AxisType.Auto,) * len(axes))
    over = PartitionSpec(axes)
    parts = [[parts_of(arg) for arg in case.args] for case in cases]
    specs: Any = {"in_specs": (PartitionSpec(), over), "out_specs": over, "check_vma": False}
    results = jax.jit(jax.shard_map(body, mesh=lined, **specs))([list(case.args) for case in cases], parts)
    wanted = alone(cases)
    for (name, number), result in zip(tried, results, strict=True):
        for want, got in zip(wanted[number], result, strict=True):
            if (worst := difference(np.asarray(want), np.asarray(got))) > cases[number].tolerance:
                found.append(f"{name}: differs by {worst:.1e}")
    return found + [f"{k}: is never computed on shards" for k, case in enumerate(cases) if case.sharded > sharded[k]]


def alone(cases: list[Case]) -> list[list[jax.Array]]:
    """What one device gives, of all cases in one program."""
    run = jax.jit(lambda args: [jax.tree.leaves(case.function(*xs)) for case, xs in zip(cases, args, strict=True)])
    return run([case.args for case in cases])


def failures_of_constants(cases: list[Case]) -> list[str]:
    """What differs from one device, where all operands are known without data and a shard of a result is asked for."""
    programs = [jax.make_jaxpr(lambda c=case: c.function(*map(constant, c.args)))() for case in cases]
    wanted = alone(cases)
    found: list[str] = []
    tried: list[tuple[str, Any, float]] = []

    def body() -> list[Any]:
        results = []
        for k, (case, program, wants) in enumerate(zip(cases, programs, wanted, strict=True)):
            for number, want in enumerate(wants):
                for dim in (d for d, n in enumerate(want.shape) if n and n % 8 == 0):
                    p = Partitioner(("fsdp",), 8)
                    name = f"result {number} of {k} along {dim}"
                    try:
                        out = p.run(program.jaxpr, program.consts, [])[number]
                        results.append(p.split(out, dim).x)
                    except Exception as error:
                        found.append(f"{name}: {type(error).__name__}: {str(error)[:300]}")
                        continue
                    tried.append((name, want, case.tolerance))
                    specs.append(PartitionSpec(*[None] * dim, "fsdp"))
        return results

    specs: list[PartitionSpec] = []
    lined = jax.make_mesh((8,), ("fsdp",), axis_types=(AxisType.Auto,))
    results = jax.jit(jax.shard_map(body, mesh=lined, in_specs=(), out_specs=specs, check_vma=False))()
    for (name, want, tolerance), result in zip(tried, results, strict=True):
        if (worst := difference(np.asarray(want), np.asarray(result))) > tolerance:
            found.append(f"{name}: differs by {worst:.1e}")
    return found


def constant(arg: Any) -> jax.Array:
    """The array, looked up by positions: what the partitioner knows without data."""
    arg = np.asarray(arg)
    strides = [int(np.prod(arg.shape[d + 1 :])) for d in range(arg.ndim)]
    places = sum(jax.lax.broadcasted_iota(int, arg.shape, d) * stride for d, stride in enumerate(strides))
    return jnp.asarray(arg.reshape(-1))[places]


def difference(want: np.ndarray, got: np.ndarray) -> float:
    """The largest difference of any device's copy, relative to the largest number; NaN equals NaN."""
    if want.dtype != got.dtype:
        return np.inf
    if want.dtype.kind not in "fc" and want.dtype != jnp.bfloat16:
        return float((want != got).any())
    wide_type = np.complex128 if want.dtype.kind == "c" else np.float64
    want, got = np.broadcast_to(want, got.shape).astype(wide_type), got.astype(wide_type)
    if (np.isnan(want) != np.isnan(got)).any():
        return np.inf
    scale = np.abs(want[np.isfinite(want)]).max(initial=1e-30)
    with np.errstate(invalid="ignore"):
        return float(np.nan_to_num(np.where(want == got, 0, np.abs(want - got))).max(initial=0) / scale)


FAMILY = [wide(name) if name == "special" else name for name in FAMILIES]


def of_family(family: str) -> dict[str, list[Case]]:
    """The cases of a family. Each primitive is a program of its own: XLA takes longer for a dozen in one."""
    return {name: x for name, x in FAMILIES[family].items() if is_here(name) and x and name not in NOT_COMPILED}


@pytest.mark.parametrize(("mesh", "every"), [("8", False), wide("8", True), wide("2x4", True)])
@pytest.mark.parametrize("family", FAMILY)
def test_every_rule_equals_one_device(family: str, mesh: str, every: bool) -> None:
    found = {name: failures(cases, mesh, every) for name, cases in of_family(family).items()}
    assert not any(found.values()), {name: x for name, x in found.items() if x}


@pytest.mark.parametrize("family", [wide(name) if name in ("special", "elementwise") else name for name in FAMILIES])
def test_shards_of_constants_equal_one_device(family: str) -> None:
    found = {name: failures_of_constants(cases) for name, cases in of_family(family).items()}
    assert not any(found.values()), {name: x for name, x in found.items() if x}


@pytest.mark.parametrize("mesh", ["8", wide("2x4")])
def test_typed_keys_pass_every_operation_on_shapes(mesh: str) -> None:
    assert failures(KEYS, mesh) == []


def test_a_batch_of_rbg_keys_draws_as_on_one_device() -> None:
    assert [failures([case]) + failures_of_constants([case]) for case in KEYS_OF_FIRST] == [[]] * len(KEYS_OF_FIRST)


@pytest.mark.parametrize("impl", ["threefry2x32", "rbg", *(["threefry4x32"] if NEW else [])])
def test_bits_of_one_key_of_any_kind_equal_one_device(impl: str) -> None:
    noise = lambda a: a + jax.random.uniform(jax.random.key(3, impl=impl), a.shape)
    rows = lambda a: jax.vmap(jax.random.key_data)(jax.random.split(jax.random.key(3, impl=impl), 8))[:, :1] + a
    args = (np.ones((8, 16), np.float32),)
    assert failures([Case(noise, args, sharded=False), Case(rows, args, sharded=False)]) == []


def test_no_rule_is_without_a_case() -> None:
    elsewhere = {name for name, rule in RULES.items() if rule.__module__.endswith(OWN_TESTS)}
    made_by_jax = {"closed_call", "eval_jaxpr"}  # of other programs: test_linen_composition has them
    assert set(RULES) - elsewhere - set(CASES) == made_by_jax | {"ragged_dot"}
    assert {name for name in CASES if is_here(name) and not CASES[name]} <= {"compute_on", "xla_metadata_call"}


def test_every_case_has_its_primitive() -> None:
    for name, cases in CASES.items():
        for number, case in enumerate(cases if is_here(name) else []):
            assert name in primitives_in(jax.make_jaxpr(case.function)(*case.args)), f"{name} {number}"


def primitives_in(jaxpr: Any) -> set[str]:
    found = set()
    for eqn in jaxpr.eqns:
        found.add(eqn.primitive.name)
        for inner in jax.tree.leaves(list(eqn.params.values()), is_leaf=lambda x: hasattr(x, "eqns")):
            if hasattr(inner, "eqns"):
                found |= primitives_in(inner)
    return found


def wrong_result(p: Any, eqn: Any, values: list[Value]) -> list[Value]:
    return [Value(x, values[0].state) for x in p.bind(eqn, [v.x * 2 for v in values])]


def wrong_state(p: Any, eqn: Any, values: list[Value]) -> list[Value]:
    return [Value(x) for x in p.bind(eqn, [v.x for v in values])]


@pytest.mark.parametrize("rule", [wrong_result, wrong_state])
def test_a_broken_rule_is_seen(rule: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(RULES, "cos", rule)
    assert failures(CASES["cos"]) != []


def test_a_wrong_entry_for_partial_values_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear, "SUMS", linear.SUMS | {"tanh"})
    found = failures(CASES["tanh"])
    assert len(found) == 1 and "('partial',)" in found[0]


def test_a_maximum_that_is_not_taken_over_the_shards_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(RULES, "reduce_max", lambda p, e, vs: [Value(x) for x in p.bind(e, [v.x for v in vs])])
    assert any("differs" in failure for failure in failures(CASES["reduce_max"][:1]))
