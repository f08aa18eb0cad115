"""Every rule of the partitioner's table equals one device: each split of each operand, whole and partial ones."""

import dataclasses
import functools
import itertools
import re
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec

from jshard.engine.partitioner import Partitioner
from jshard.engine.rules import IN_ALL, PARTIAL, PRIMITIVES, State, Value
from tests.engine.partition_cases import CASES, FAMILIES, KEYS, KEYS_OF_FIRST, SINCE_0_12, UNTIL_0_11, Case
from tests.helpers import equations_run
from tests.wide import wide

MESHES = {"8": {"fsdp": 8}, "2x4": {"replica": 2, "fsdp": 4}}
OWN_TESTS = ("inner", "loops", "opaque_calls", "shard_maps", "collectives", "effects", "ring")
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
    """States of all operands, of which some are not whole; of three or more at most two.

    Unless it is to be every one: of cases that compile long, those in which all operands are alike, as far as may be.
    """
    each = [states_of(arg) for arg in case.args]
    if case.long and not every:
        yield from (tuple(s if s in of else None for of in each) for s in {s: None for of in each for s in of})
    else:
        some = lambda states: sum(s is not None for s in states) in (1, 2)
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
        return Value(p.local_slice(arg, state), state)
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
                    name = f"{k}: result {number} along {dim}"
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


def in_groups(family: str, check: Callable[[list[Case]], list[str]], every: bool = True) -> list[str]:
    """What a check says of a family's cases, under their names: ten of them in a program, as XLA is slow with many."""
    here = {name: x for name, x in FAMILIES[family].items() if is_here(name) and name not in NOT_COMPILED}
    named = [(f"{name} {n}", case) for name, x in here.items() for n, case in enumerate(x) if every or not case.rare]
    found = []
    for first in range(0, len(named), 10):
        names, cases = zip(*named[first : first + 10], strict=True)
        for text in check(list(cases)):
            in_group = re.match(r"\d+", text).group()
            found.append(names[int(in_group)] + text.removeprefix(in_group))
    return found


@pytest.mark.every_set  # each family has rules of its own: a wrong one must fail here
@pytest.mark.parametrize(("mesh", "every"), [("8", False), wide("2x4", True)])
@pytest.mark.parametrize("family", FAMILY)
def test_every_rule_equals_one_device(family: str, mesh: str, every: bool) -> None:
    assert in_groups(family, lambda cases: failures(cases, mesh, every), every) == []


@pytest.mark.parametrize("family", [name if name in ("shapes", "indexing") else wide(name) for name in FAMILIES])
def test_shards_of_constants_equal_one_device(family: str) -> None:
    assert in_groups(family, failures_of_constants) == []


def test_typed_keys_pass_every_operation_on_shapes() -> None:
    assert failures(KEYS) == []


def test_a_batch_of_rbg_keys_draws_as_on_one_device() -> None:
    assert failures(KEYS_OF_FIRST) + failures_of_constants(KEYS_OF_FIRST) == []


def test_bits_of_one_key_of_any_kind_equal_one_device() -> None:
    cases = []
    for impl in ("threefry2x32", "rbg", *(["threefry4x32"] if NEW else [])):
        key = functools.partial(jax.random.key, 3, impl=impl)
        noise = lambda a, key=key: a + jax.random.uniform(key(), a.shape)
        rows = lambda a, key=key: jax.vmap(jax.random.key_data)(jax.random.split(key(), 8))[:, :1] + a
        cases += [Case(one, (np.ones((8, 16), np.float32),), sharded=False) for one in (noise, rows)]
    assert failures(cases) == []


def test_no_rule_is_without_a_case() -> None:
    rules = {name: record.rule for name, record in PRIMITIVES.items() if record.rule is not None}
    elsewhere = {name for name, rule in rules.items() if rule.__module__.endswith(OWN_TESTS)}
    made_by_jax = {"closed_call", "eval_jaxpr"}  # of other programs: test_linen_composition has them
    assert set(rules) - elsewhere - set(CASES) == made_by_jax | {"ragged_dot"}
    assert {name for name in CASES if is_here(name) and not CASES[name]} <= {"compute_on", "xla_metadata_call"}


def test_every_case_has_its_primitive() -> None:
    for name, cases in CASES.items():
        for number, case in enumerate(cases if is_here(name) else []):
            found = {eqn.primitive.name for eqn in equations_run(jax.make_jaxpr(case.function)(*case.args).jaxpr)}
            assert name in found, f"{name} {number}"


def test_a_broken_rule_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    double = lambda p, eqn, values: [Value(x, values[0].state) for x in p.bind(eqn, [v.x * 2 for v in values])]
    whole = lambda p, eqn, values: [Value(x) for x in p.bind(eqn, [v.x for v in values])]
    for name, rule in (("cos", double), ("cos", whole), ("reduce_max", whole)):
        monkeypatch.setitem(PRIMITIVES, name, dataclasses.replace(PRIMITIVES[name], rule=rule))
        assert failures(CASES[name][:1]) != []
    monkeypatch.setitem(PRIMITIVES, "tanh", dataclasses.replace(PRIMITIVES["tanh"], linear=IN_ALL))
    assert any("('partial',)" in failure for failure in failures(CASES["tanh"]))
