"""The grid of models and clusters: its cells, stored rows and ratios, and its layers with float32 gradients."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.extend.core import jaxprs_in_params

from benchmarks.grid import case, float32_layers
from benchmarks.grid import rows as grid_rows
from benchmarks.grid.cells import (
    BFLOAT16,
    DESCRIBED,
    FASTEST,
    FLOAT32,
    GPUS,
    GSPMD,
    JSHARD,
    NONE,
    TPUS,
    as_key,
    cells_of,
)
from benchmarks.grid.earlier import EarlierReport
from benchmarks.grid.float32_layers import with_float32_gradients
from benchmarks.grid.report import HEAD, pairs_of, report_lines
from benchmarks.grid.rows import Stored, append, compiled_row, read
from jshard.cluster.compile import TooLargeError, flags_of
from jshard.recipes.model_file import load_model_file
from jshard.recipes.overrides import override
from jshard.recipes.recipe import versions
from tests.gpu_compiler import needs_gpu_compiler

EACH = {"hidden": 0.9, "collectives": 8, "exposed_s": 0.0, "fits": True, "cpu_s": 1.0, "versions": {"jax": "1"}}
NOTHING_SAID = {"exposed_by_kind_s": {}, "notes": []}
SPLIT = dict.fromkeys(("products", "attention", "elementwise", "update"), 0.0)


def row(system, step_s, peak_bytes, *, profile="fastest", reduce_dtype=BFLOAT16, model="GPT", **changed):
    names = {"model": model, "cluster": GPUS[0], "system": system, "reduce_dtype": reduce_dtype, "profile": profile}
    figures = {"step_s": step_s, "peak_bytes": peak_bytes, "split_s": SPLIT, "date": "2026-01-02 03:04"}
    return EACH | NOTHING_SAID | names | figures | {"as_planned": True} | changed


# ---- what is compiled


def test_every_cell_is_a_recipe_that_its_cluster_can_run():
    cells = cells_of(quick=False, clusters=(GPUS[1], TPUS[0])) + cells_of(quick=True, clusters=())
    for cell in cells:
        request = cell.request
        recipe = override(load_model_file(request.model).recipe(request.recipe)[1], request.settings)
        assert recipe.batch_size % request.mesh["fsdp"] == 0 and recipe.accumulate == 1
        if cell.system == JSHARD:
            assert recipe.model.reduce_dtype == cell.reduce_dtype
        assert request.plain_flax == (cell.system == GSPMD)


def test_cells_of_plain_flax_come_first_and_patterns_choose():
    systems = [cell.system for cell in cells_of(quick=False, clusters=GPUS)]
    assert systems == sorted(systems, key=lambda system: system != GSPMD)
    chosen = cells_of(quick=False, clusters=GPUS, only=["*124M h100:1x8*", "Mixtral* gspmd *"])
    assert {(cell.model, cell.cluster) for cell in chosen if cell.system == JSHARD} == {("GPT 124M", GPUS[0])}
    # No layers of Flax are in its experts, so plain Flax has no form of it that reduces in float32.
    assert {cell.reduce_dtype for cell in chosen if "Mixtral" in cell.model} == {BFLOAT16}


def test_between_hosts_the_compiler_is_also_told_of_the_cluster(monkeypatch):
    options = lambda cluster: {cell.options for cell in cells_of(quick=False, clusters=[cluster])}
    assert options("h100:8x8") == {NONE, FASTEST, DESCRIBED}
    assert options("h100:1x8") == options(TPUS[0]) == {NONE, FASTEST}
    (cell,) = cells_of(quick=False, clusters=["h100:8x8"], only=["GPT 350M h100:8x8 gspmd bfloat16 described"])
    asked = []
    monkeypatch.setattr(grid_rows, "compile_step", lambda request, timeout_s: asked.append(request) or refuse())
    assert "error" in compiled_row(cell)
    # The 12 d^2 numbers of a layer of width 1024, with its norms and biases, in 16 bits.
    assert asked[0].unit_bytes == pytest.approx(2 * 12 * 1024**2, rel=0.01)
    assert "nccl_op_launch_us" in flags_of(asked[0])


def refuse():
    raise TooLargeError("does not fit.", where="here", why="a test.", do="nothing.")


# ---- stored rows


def test_stored_rows_are_those_of_the_same_request_and_versions(tmp_path):
    first, second, *_ = cells_of(quick=True, clusters=())
    key = as_key(first.request, versions()) | {"model": first.model}
    lines = tmp_path / "folder" / "rows.jsonl"
    append(lines, key | {"step_s": 1.0})
    append(lines, key | {"step_s": 2.0})
    append(lines, as_key(second.request, versions() | {"jax": "0.0"}) | {"step_s": 3.0})
    stored = Stored(read([lines]))
    # As JSON: a line has no tuples.
    assert stored.row(first) == json.loads(json.dumps(key)) | {"step_s": 2.0}
    assert stored.row(second) is None
    other = dataclasses.replace(first, request=dataclasses.replace(first.request, profile=None))
    assert stored.row(other) is None
    append(lines, key | {"error": "The compiler failed."})
    assert Stored(read([lines])).row(first)["step_s"] == 2.0  # an error is no result
    assert key["request"]["model"] == "models/gpt.py"  # in any checkout


def test_a_program_of_plain_flax_on_tpus_serves_both_forms_of_attention():
    cells = cells_of(quick=False, clusters=[TPUS[0]], only=["GPT XL *float32 fastest"])
    by_name = {(cell.model, cell.system): cell for cell in cells}
    name, plain_name = "GPT XL", "GPT XL plain attention"
    theirs = by_name[name, GSPMD]
    stored = Stored([as_key(theirs.request, versions()) | {"model": name, "step_s": 1.0}])
    for model in (name, plain_name):
        row = stored.row(by_name[model, GSPMD])
        assert row is not None and row["model"] == model
    assert "model.attention=xla" in by_name[plain_name, JSHARD].request.settings
    assert stored.row(by_name[plain_name, JSHARD]) is None


def test_a_run_compiles_what_is_not_stored_and_jshard_always(tmp_path, monkeypatch):
    compiled = []

    def compile_row(cell, programs):
        compiled.append(cell.label)
        return row(cell.system, 1.0, 1, model=cell.model) | as_key(cell.request, versions())

    monkeypatch.setattr(case, "compiled_row", compile_row)
    monkeypatch.setattr(case, "require", lambda compiler: None)
    lines = tmp_path / "rows.jsonl"
    *_, result = case.run(quick=True, lines=lines)
    assert len(result["rows"]) == len(compiled) == len(lines.read_text().splitlines()) == 4
    compiled.clear()
    *_, again = case.run(quick=True, reuse=[lines])
    assert again == json.loads(json.dumps(result)) and {label.split()[3] for label in compiled} == {JSHARD}
    compiled.clear()
    *_, again = case.run(quick=True, reuse=[lines], reuse_all=True)
    assert again == json.loads(json.dumps(result)) and not compiled
    lines.write_text("".join(lines.read_text().splitlines(keepends=True)[:3]))
    *_, first = case.run(quick=True, reuse=[lines], stored_only=True)
    assert first["rows"] == again["rows"][:3] and not compiled
    assert first["missing"] == ["GPT 350M h100:1x8 jshard bfloat16 fastest"]


def test_a_report_of_stored_rows_has_those_of_other_versions(tmp_path):
    for_gpus, for_tpus = cells_of(quick=False, clusters=[GPUS[0], TPUS[0]], only=["GPT XL [hv]* jshard bfloat16 *"])
    key = as_key(for_tpus.request, versions() | {"jax": "0.0"})
    tpu_row = row(JSHARD, 1.0, 1, model=for_tpus.model, cluster=for_tpus.cluster) | key
    lines = tmp_path / "rows.jsonl"
    append(lines, tpu_row)
    options = {"quick": False, "clusters": f"{GPUS[0]},{TPUS[0]}", "only": "GPT XL [hv]* jshard bfloat16 *"}
    *_, result = case.run(**options, reuse=[lines], stored_only=True)
    assert result == {"rows": [json.loads(json.dumps(tpu_row))], "missing": [for_gpus.label]}


# ---- the report


def test_ratios_are_to_the_faster_program_of_plain_flax_that_fits_and_reduces_alike():
    rows = [
        row(GSPMD, 2.0, 100, profile=None),
        row(GSPMD, 1.0, 50),
        row(GSPMD, 0.5, 10**12, profile=None, fits=False),
        row(GSPMD, 0.1, 1, reduce_dtype=FLOAT32, profile=None),
        row(JSHARD, 1.1, 60),
        row(JSHARD, 0.2, 2, reduce_dtype=FLOAT32),
    ]
    of_float32, of_bfloat16 = pairs_of(rows)
    assert of_bfloat16.time_ratio == pytest.approx(1.1) and of_bfloat16.peak_ratio == pytest.approx(1.2)
    assert of_float32.time_ratio == pytest.approx(2.0) and of_float32.peak_ratio == pytest.approx(2.0)
    said = "\n".join(report_lines(rows))
    assert "Its worst time is **2.000** of GSPMD's (GPT on h100:1x8, reduced in float32)" in said
    assert "Every pair is compared" in said and "no row" not in said


def test_the_least_ratio_is_that_of_a_program_that_waits_for_nothing():
    waiting = row(GSPMD, 2.0, 60, exposed_s=0.1)
    (pair,) = pairs_of([waiting, row(JSHARD, 1.9, 60)])
    # Of the 5 % that it waits, communication beside computation would cost what it slows that: 19 of 119 %.
    assert pair.least_ratio == pytest.approx(1 - 0.05 / 1.19)
    assert "| 1900.0 | 2000.0 | 0.950 | 0.958 |" in "\n".join(report_lines([waiting, row(JSHARD, 1.9, 60)]))
    (alone,) = pairs_of([row(JSHARD, 1.9, 60)])
    assert alone.least_ratio is None


def test_the_report_says_what_is_missing_and_what_differs_from_the_plan():
    rows = [
        row(JSHARD, 1.0, 60, as_planned=False, differences=["an all-gather of 1 MB"]),
        row(GSPMD, 1.0, 60),
        row(JSHARD, 1.0, 60, model="Llama"),
        row(JSHARD, 1.0, 2**40, model="MoE", fits=False),
        row(GSPMD, 1.0, 60, model="MoE"),
        {**row(JSHARD, 1.0, 60, model="T5"), "error": "The compiler failed."},
        row(GSPMD, 1.0, 60, model="T5"),
    ]
    said = "\n".join(report_lines(rows, ["Llama h100:1x8 gspmd bfloat16 none", "Llama h100:1x8 gspmd float32 none"]))
    assert "Of 1 pairs" in said
    assert "2 programs have no row:\n\n- Llama h100:1x8 gspmd: bfloat16 none, float32 none\n" in said
    for words in (
        "GPT on h100:1x8, reduced in bfloat16: jshard's program differs from its plan: an all-gather of 1 MB",
        "Llama on h100:1x8, reduced in bfloat16: no row of GSPMD",
        "MoE on h100:1x8, reduced in bfloat16: jshard does not fit: 1024.0 GiB",
        "T5 on h100:1x8, reduced in bfloat16: jshard did not compile: The compiler failed.",
    ):
        assert words in said


def test_the_report_says_what_each_system_waits_for_and_where_attention_is_not_alike():
    waits = {"all-reduce": 0.01, "all-gather": 0.0225, "all-to-all": 1e-5}
    plain = {"notes": ["attention runs in plain form, which makes arrays"], "exposed_by_kind_s": waits}
    said = "\n".join(report_lines([row(JSHARD, 1.0, 60), row(GSPMD, 1.0, 60, **plain)]))
    assert "| GPT | h100:1x8 | bfloat16 | nothing | all-gather 22.5, all-reduce 10.0 |" in said
    assert "On h100:1x8, attention of GSPMD runs in plain form" in said
    assert "plain form" not in "\n".join(report_lines([row(JSHARD, 1.0, 60, **plain), row(GSPMD, 1.0, 60)]))


def test_an_earlier_report_has_the_programs_without_a_stored_row(tmp_path):
    named = {"model": "GPT 124M"}
    stated = [row(JSHARD, 0.0441, 2**30, **named), row(GSPMD, 0.0425, 3 * 2**30, profile=None, **named)]
    earlier = tmp_path / "earlier.md"
    earlier.write_text("\n".join(report_lines(stated)))
    (mine,) = cells_of(quick=False, clusters=[GPUS[0]], only=["GPT 124M * jshard bfloat16 *"])
    lines = tmp_path / "rows.jsonl"
    append(lines, row(JSHARD, 0.04, 2**30, **named) | as_key(mine.request, versions()))

    only = "GPT 124M * bfloat16 *"
    *_, result = case.run(quick=False, only=only, reuse=[lines], stored_only=True, earlier=[earlier])
    (pair,) = pairs_of(result["rows"])
    assert pair.time_ratio == pytest.approx(0.04 / 0.0425) and pair.peak_ratio == pytest.approx(1 / 3)
    assert pair.least_ratio is None  # an earlier report does not state what a program waits for
    said = report_lines(result["rows"])
    in_table, waits = (line for line in said if line.startswith("| GPT 124M"))  # its parts of the time are not stated
    assert waits.endswith("| nothing | - |")
    assert "| 42.5* |" in in_table and "XLA's own" in in_table
    assert "* As stated by an earlier report, whose programs were compiled until 2026-01-02 03:04 UTC." in said

    again = tmp_path / "again.md"  # a report of such a report
    again.write_text("\n".join(said))
    label = "GPT 124M h100:1x8 gspmd bfloat16 none"
    assert EarlierReport.read([again]).rows[label] == EarlierReport.read([earlier]).rows[label]
    *_, both = case.run(quick=False, only=only, stored_only=True, earlier=[earlier])
    assert [(row["system"], row["step_s"]) for row in both["rows"]] == [(GSPMD, 0.0425), (JSHARD, 0.0441)]


# ---- plain Flax with gradients in float32


class Layers(nnx.Module):
    """All kinds of layers that the models of the grid have."""

    def __init__(self, rngs):
        self.tokens = nnx.Embed(11, 8, rngs=rngs)
        self.norm = nnx.RMSNorm(8, rngs=rngs)
        self.heads = nnx.LinearGeneral(8, (2, 4), rngs=rngs)
        self.out = nnx.LinearGeneral((2, 4), 8, axis=(-2, -1), rngs=rngs)
        self.up = nnx.Linear(8, 8, rngs=rngs)

    def __call__(self, ids):
        x = self.out(self.heads(self.norm(self.tokens(ids))))
        return self.tokens.attend(jnp.tanh(self.up(x)))


def traced_gradients(model):
    """The traced program of its gradients, and the model's state, which it takes."""
    ids = jnp.arange(12).reshape(3, 4) % 11
    graph, state = nnx.split(model)
    loss = lambda state: jnp.square(nnx.merge(graph, state)(ids).astype(jnp.float32)).mean()
    return jax.jit(jax.grad(loss)).trace(state), state


def dtypes_of(jaxpr, primitives):
    """The dtypes of the results of some primitives."""
    dtypes = []
    for equation in jaxpr.eqns:
        if equation.primitive.name in primitives:
            dtypes.append(str(equation.outvars[0].aval.dtype))
        for inner in jaxprs_in_params(equation.params):
            dtypes += dtypes_of(inner, primitives)
    return dtypes


def test_layers_with_float32_gradients_compute_what_the_plain_ones_do(monkeypatch):
    monkeypatch.setattr(float32_layers, "_LOW", jnp.float32)  # so that nothing is rounded
    layers = Layers(nnx.Rngs(0)), with_float32_gradients(Layers(nnx.Rngs(0)))
    plain, changed = (traced.lower().compile()(state) for traced, state in map(traced_gradients, layers))
    for expected, found in zip(*map(jax.tree.leaves, (plain, changed)), strict=True):
        np.testing.assert_allclose(found, expected, atol=1e-6)


def test_only_the_gradients_of_weights_are_in_float32():
    traced, _ = traced_gradients(with_float32_gradients(Layers(nnx.Rngs(0))))
    jaxpr = traced.jaxpr.jaxpr
    # Four products forward, and four for the gradients of what they read; four weights, the table among them.
    assert sorted(dtypes_of(jaxpr, ["dot_general"])) == ["bfloat16"] * 8 + ["float32"] * 4
    assert dtypes_of(jaxpr, ["scatter-add"]) == ["float32"]  # of the rows of the table


# ---- compiled


@needs_gpu_compiler
@pytest.mark.wide
def test_small_models_communicate_as_planned_and_take_about_as_long_as_under_gspmd():
    *_, result = case.run(quick=True)
    assert [row.get("error") for row in result["rows"]] == [None] * 4
    assert all(row["as_planned"] for row in result["rows"] if row["system"] == JSHARD)
    for pair in pairs_of(result["rows"]):
        assert pair.time_ratio < MOST_TIME and pair.peak_ratio < MOST_PEAK


# Two layers: the root, which overlaps with little, is most of the model.
MOST_TIME, MOST_PEAK = 1.15, 1.02


def test_an_earlier_report_may_lack_columns(tmp_path):
    stated = [row(JSHARD, 0.0441, 2**30), row(GSPMD, 0.0425, 3 * 2**30, profile=None)]
    newer, older = [], []
    for line in report_lines(stated):
        cells = line.split("|")
        newer.append(line)
        # The columns that came later: the least ratio, and jshard's options.
        older.append("|".join(cells[:6] + cells[7:14] + cells[15:]) if len(cells) == len(HEAD) + 2 else line)
    reports = []
    for name, lines in {"newer": newer, "older": older}.items():
        path = tmp_path / f"{name}.md"
        path.write_text("\n".join(lines))
        reports.append(EarlierReport.read([path]).rows)
    assert reports[0] == reports[1] and len(reports[0]) == 2
