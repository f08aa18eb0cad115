"""The runs of experts that are searched for: what the file says, and what the report says of one of them."""

import json

import pytest

import jshard as js
from benchmarks import experts
from jshard.cluster.topology import parse_topology
from jshard.recipes.model_file import load_model_file
from jshard.recipes.overrides import override
from jshard.recipes.recipe import check_batch

RUNS = json.loads(experts._RUNS.read_text())["runs"]


@pytest.mark.parametrize("published", RUNS, ids=[each["id"] for each in RUNS])
def test_a_run_fits_its_cluster(published):
    _, recipe = load_model_file(experts._MODELS / published["model"]).recipe(published["recipe"])
    topology = parse_topology(published["topology"])
    mesh = js.mesh(**published["mesh"], devices=topology.num_devices)
    check_batch(override(recipe, published["settings"]), mesh)
    assert published["source"]


@pytest.mark.wide
def test_a_report_has_both_choices():
    *_, result = experts.run(quick=True)
    (row,) = result["runs"]
    assert row["auto"]["step_s"] <= 1.002 * row["experts"]["step_s"]
    text = "\n".join(experts.table(result))
    assert "titan_8b_8" in text and "The search's choice is slower in 0 of 1 runs." in text


def test_reports_of_some_runs_are_merged():
    first = {"runs": [{"id": "a", "cpu_s": 1}, {"id": "b", "cpu_s": 2}], "load_per_core_before": 3.0}
    second = {
        "runs": [{"id": "c", "cpu_s": 3}, {"id": "a", "cpu_s": 4}],
        "load_per_core_before": 1.0,
        "case": "experts",
    }
    whole = experts.merged([first, second])
    assert [(each["id"], each["cpu_s"]) for each in whole["runs"]] == [("a", 4), ("b", 2), ("c", 3)]
    assert whole["load_per_core_before"] == 3.0 and whole["case"] == "experts"
