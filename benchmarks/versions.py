"""Steps compiled for absent GPUs, one JSON row each, to compare one version of jshard with another.

    python -m benchmarks.versions --list
    python -m benchmarks.versions 'loop*' --out old.jsonl --hlo folder
    python -m benchmarks.versions --compare old.jsonl new.jsonl

It needs the extra `plan-gpu` and no GPU. All but the seconds are facts of the compiler or,
`estimate_s`, a replay of its schedule. Seconds to trace and lower are taken in turns with those of the same model as
plain Flax.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import dataclasses
import fnmatch
import json
import math
import os
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import FrameType
from typing import Any

os.environ["JAX_PLATFORMS"] = "cpu"

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import jshard as js
from benchmarks.tables import markdown_table
from benchmarks.version_cases import CASES, MODELS, Case
from jshard.api.optimizer import abstract_optimizer
from jshard.cluster.machine import PlannedCluster
from jshard.cluster.options import compile_nothing, options_for
from jshard.cluster.topology import parse_topology, topology_devices
from jshard.engine.context import plain_flax
from jshard.inspect.audit import Audit, audit
from jshard.recipes.building import abstract_model, batch_of, optimizer_of
from jshard.recipes.model_file import load_model_file
from jshard.recipes.overrides import override
from jshard.recipes.step import trace_step

_LARGE_BYTES = 2**20
_KINDS = "all-gather", "reduce-scatter", "all-reduce", "all-to-all", "collective-permute"
_ROUNDS = 2


def main() -> None:
    """Reads the command line; compiles and prints, or compares."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.versions", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", help="of cases; * stands for anything")
    parser.add_argument("--list", action="store_true", help="the cases, one a line")
    parser.add_argument("--out", type=Path, metavar="FILE", help="adds the rows to it")
    parser.add_argument("--hlo", type=Path, metavar="DIR", help="stores the compiled programs there")
    parser.add_argument("--no-seconds", action="store_true", help="only what the compiler makes of it: half the time")
    parser.add_argument("--compare", nargs=2, type=Path, metavar="FILE", help="rows of two versions side by side")
    args = parser.parse_args()
    chosen = [n for n in CASES if any(fnmatch.fnmatch(n, pattern) for pattern in args.names or "*")]
    if args.list:
        print("\n".join(chosen))
    elif args.compare:
        print("\n".join(compared(*map(_read, args.compare))))
    else:
        for name in chosen:
            jax.clear_caches()
            found = row_of(name, args.hlo, seconds=not args.no_seconds)
            text = json.dumps({"case": name, "jax": jax.__version__} | found)
            print(text, flush=True)
            if args.out:
                with args.out.open("a") as file:
                    file.write(text + "\n")


def row_of(name: str, hlo: Path | None = None, *, seconds: bool = True) -> dict[str, Any]:
    """Traces, lowers and compiles a case."""
    case = CASES[name]
    topology = parse_topology(case.topology)
    mesh = js.mesh(**case.mesh, devices=topology_devices(topology))
    assert isinstance(mesh, Mesh)
    calls: collections.Counter[str] = collections.Counter()
    with _counted(calls):
        model, traced = _traced(case, mesh)
    lowered = traced.lower()
    options = options_for(
        case.profile,
        platform=topology.device.name,
        overrides={},
        try_compile=compile_nothing(NamedSharding(mesh, PartitionSpec())),
    )
    begin_s = time.perf_counter()
    compiled = lowered.compile(compiler_options=options)
    compile_s = time.perf_counter() - begin_s
    if hlo:
        hlo.mkdir(parents=True, exist_ok=True)
        (hlo / f"{name}.{jax.__version__}.hlo").write_text(compiled.as_text() or "")
    found = audit(compiled, model=model)
    assert found.memory is not None
    return {
        **{kind: round(found.amount(kind), 4) for kind in _KINDS},
        "large": _large(found),
        "overlapped": _overlapped(found),
        "dtypes": {kind: sorted({d for w in _windows(found, kind) for d, _ in w.sizes}) for kind in _KINDS},
        "differences": len(found.differences),
        "peak_bytes": found.memory.peak_bytes,
        "temp_bytes": found.memory.temporaries_bytes,
        "argument_bytes": found.memory.arguments_bytes,
        "flops": found.schedule.flops,
        "estimate_s": PlannedCluster(topology).estimate(found.schedule).stated.step_s,
        "equations": dict(zip(("all", "distinct"), _equations(traced.jaxpr.jaxpr, set()), strict=True)),
        "stablehlo_bytes": len(lowered.as_text()),
        "calls": dict(calls),
        "compile_s": round(compile_s, 1),
        **(_seconds(case, mesh) if seconds else {}),
    }


def _traced(case: Case, mesh: Mesh) -> tuple[Any, jax.stages.Traced]:
    model_file = load_model_file(case.model).with_units(case.units)
    recipe = override(model_file.recipe(case.recipe)[1], case.settings)
    model = abstract_model(model_file, recipe, mesh)
    optimizer = abstract_optimizer(model, optimizer_of(recipe, model), wrt=model_file.wrt)
    batch = batch_of(model_file, recipe, recipe.batch_size, mesh)
    return model, trace_step(model_file.loss_fn, model, optimizer, batch, accumulate=recipe.accumulate)


@contextlib.contextmanager
def _counted(calls: collections.Counter[str]) -> Iterator[None]:
    """Counts how often Python runs each module's `__call__` in the model files, by name of the class."""

    def count(frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if event == "call" and code.co_name == "__call__" and code.co_filename.startswith(MODELS):
            calls[code.co_qualname.split(".")[0]] += 1

    sys.setprofile(count)
    try:
        yield
    finally:
        sys.setprofile(None)


def _seconds(case: Case, mesh: Mesh) -> dict[str, float]:
    """Seconds to trace and lower the step, beside the same model as plain Flax: the least of some rounds in turns."""
    taken: dict[str, list[float]] = {"plain_s": [], "trace_s": []}
    again = {text.partition("=")[0]: text for text in (*case.settings, *case.plain)}
    plain = dataclasses.replace(case, settings=tuple(again.values()))
    for _ in range(_ROUNDS):
        for name, seconds in taken.items():
            jax.clear_caches()
            is_plain = name == "plain_s"
            with plain_flax() if is_plain else contextlib.nullcontext():
                begin_s = time.perf_counter()
                _traced(plain if is_plain else case, mesh)[1].lower()
                seconds.append(time.perf_counter() - begin_s)
    found = {name: round(min(seconds), 3) for name, seconds in taken.items()}
    return found | {"over_plain": round(found["trace_s"] / found["plain_s"], 2)}


def _windows(found: Audit, kind: str) -> list[Any]:
    return [w for w in found.schedule.windows if w.kind == kind]


def _large(found: Audit) -> dict[str, list[int]]:
    """Large collectives of each kind in the text; how many are asynchronous, and overlap matrix products."""
    large = {kind: [w for w in _windows(found, kind) if w.full_bytes > _LARGE_BYTES] for kind in _KINDS}
    return {
        kind: [len(all_), sum(w.is_async for w in all_), sum(w.is_overlapped for w in all_)]
        for kind, all_ in large.items()
        if all_
    }


def _overlapped(found: Audit) -> float:
    """Share of the bytes of large collectives that overlap matrix products, including loops."""
    sent = [(w.full_bytes * w.executions, w) for w in found.schedule.windows if w.full_bytes > _LARGE_BYTES]
    total = sum(size for size, _ in sent)
    return round(sum(size for size, w in sent if w.is_overlapped) / total, 4) if total else 1.0


def _equations(jaxpr: Any, seen: set[int]) -> tuple[int, int]:
    """Number of equations with inner programs: all, and with each program counted once."""
    num_all = num_distinct = len(jaxpr.eqns)
    if id(jaxpr) in seen:
        num_distinct = 0
    seen.add(id(jaxpr))
    for equation in jaxpr.eqns:
        for inner in _inner(equation.params.values()):
            more = _equations(inner, seen)
            num_all, num_distinct = num_all + more[0], num_distinct + more[1]
    return num_all, num_distinct


def _inner(values: Any) -> Iterator[Any]:
    for value in values:
        value = getattr(value, "jaxpr", value)
        if hasattr(value, "eqns"):
            yield value
        elif isinstance(value, list | tuple):
            yield from _inner(value)


def _read(path: Path) -> dict[str, Mapping[str, Any]]:
    return {row["case"]: row for row in map(json.loads, path.read_text().splitlines())}


# What a comparison shows, and which way is worse: more, less, or neither.
_COLUMNS: dict[str, tuple[Any, int]] = {
    "all-gather, P": (lambda row: row["all-gather"], 1),
    "reduce-scatter": (lambda row: row["reduce-scatter"], 1),
    "all-reduce": (lambda row: row["all-reduce"], 1),
    "all-to-all": (lambda row: row["all-to-all"], 1),
    "overlapped": (lambda row: row["overlapped"], -1),
    "peak, MB": (lambda row: row["peak_bytes"] / 1e6, 1),
    "TFLOP": (lambda row: row["flops"] / 1e12, 1),
    "est., ms": (lambda row: row["estimate_s"] * 1e3, 1),
    "equations": (lambda row: row["equations"]["all"], 0),
    "StableHLO, MB": (lambda row: row["stablehlo_bytes"] / 1e6, 0),
    "calls": (lambda row: max(row["calls"].values(), default=0), 0),
    "trace / plain": (lambda row: row.get("over_plain", math.nan), 0),
}
_TOLERANCE, _LEAST_AMOUNT = 0.02, 0.002


def compared(before: Mapping[str, Mapping[str, Any]], after: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """The rows in both files, `before > after`; values worse by more than 2 % are in bold."""
    names = [name for name in before if name in after]
    cells = [[name, *(_cell(*column, before[name], after[name]) for column in _COLUMNS.values())] for name in names]
    return markdown_table(["case", *_COLUMNS], cells)


def _cell(value: Any, worse: int, before: Mapping[str, Any], after: Mapping[str, Any]) -> str:
    old, new = value(before), value(after)
    text = f"{old:.4g}" if f"{old:.4g}" == f"{new:.4g}" else f"{old:.4g} > {new:.4g}"
    is_worse = worse and worse * (new - old) > max(_TOLERANCE * abs(old), _LEAST_AMOUNT)
    return f"**{text}**" if is_worse else text


if __name__ == "__main__":
    main()
