"""The benchmark of published step times: its errors, its simple predictors, and its rows."""

import json

import pytest

from benchmarks import published
from jshard.cluster.machine import parse_known
from jshard.cluster.topology import parse_topology
from jshard.recipes.model_file import load_model_file
from jshard.recipes.overrides import override

ROWS = json.loads(published._ROWS.read_text())["rows"]


def row(name, published_s, stated_s, *, device="h100", model_s=1.0):
    times = {"published_step_s": published_s, "low_s": 0.9 * stated_s, "stated_s": stated_s, "high_s": 1.1 * stated_s}
    facts = {"id": name, "source": name, "topology": f"{device}:1x8", "device": device, "fits": True, "peak_gib": 1.0}
    return times | facts | {"model_s": model_s, "compiled_s": model_s, "hidden": 0.5, "published_peak_gib": None}


def test_every_row_names_its_source_and_is_a_configuration_of_ours():
    assert len({one["id"] for one in ROWS}) == len(ROWS)
    for one in ROWS:
        assert one["source"] and one["published_step_s"] > 0
        topology = parse_topology(one["topology"])
        parse_known([f"{name}={value}" for name, value in one["assume"].items()])
        model_file = load_model_file(str(published._MODELS / one["model"]))
        recipe = override(model_file.recipe(one["recipe"])[1], one["settings"])
        assert recipe.batch_size % (topology.num_devices * recipe.accumulate) == 0


def test_constants_are_fitted_to_the_rows_of_the_other_sources():
    rows = [row("a_1", 2.0, 2.1), row("a_2", 2.0, 1.8), row("b_1", 4.0, 4.0)]
    assert published.errors(rows, published.stated) == pytest.approx([0.05, 0.1, 0.0])
    everywhere = published.fitted(rows, "model_s", published._ALL)
    assert [everywhere(one) for one in rows] == pytest.approx([2.0, 2.0, 2.0])
    assert published.left_out(rows, "model_s", published._ALL) == pytest.approx([1.0, 1.0, 0.5])
    assert published.percentile([4.0, 1.0, 3.0, 2.0], 0.5) == 2.0


def test_the_report_counts_what_is_inside_and_ranks_predictors(tmp_path):
    rows = [row("a_1", 2.0, 2.1), row("a_2", 2.0, 1.6), row("b_1", 4.0, 4.0, device="a100-80")]
    said = "\n".join(published.table({"rows": rows}))
    assert "3 rows: median error 5.0%, 90th percentile 20.0%; 2 of 3 published times are inside" in said
    assert "| model FLOPs / (c by device x peak) | 2 | 0.0% | 0.0% |" in said
    (picture,) = published.pictures({"rows": rows}, tmp_path, "published")
    assert picture.read_text().count("a100-80:1x8") == 1


def test_rows_of_tpus_stand_apart_and_are_left_out_without_their_compiler(monkeypatch, capsys):
    rows = [row("a_1", 2.0, 2.1), row("b_1", 4.0, 3.0) | {"topology": "v5e:4x4"}]
    said = "\n".join(published.table({"rows": rows}))
    assert (
        said.index("1 rows: median error 5.0%") < said.index("TPUs, apart") < said.index("1 rows: median error 25.0%")
    )
    assert "| a | 1 | 5.0% |" in said and "| b | 1 |" not in said
    monkeypatch.setattr(published.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(published, "require", lambda platform: None)
    monkeypatch.setattr(published, "_planned", lambda row: row["id"])
    planned = published.run(quick=False)["rows"]
    assert set(planned) == {one["id"] for one in ROWS if not one["topology"].startswith("v5")}
    assert "rows of TPUs are left out" in capsys.readouterr().out
