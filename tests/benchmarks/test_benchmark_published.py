"""The benchmark of published step times: its errors, its simple predictors, and its rows."""

import json

import pytest

from benchmarks import published, reports
from jshard.cluster.machine import parse_known
from jshard.cluster.topology import parse_topology
from jshard.recipes.model_file import load_model_file
from jshard.recipes.overrides import override

ROWS = json.loads(published._ROWS.read_text())["rows"]


def row(name, published_s, stated_s, *, device="h100", model_s=1.0):
    times = {"published_step_s": published_s, "low_s": 0.9 * stated_s, "stated_s": stated_s, "high_s": 1.1 * stated_s}
    facts = {"id": name, "source": name, "topology": f"{device}:1x8", "device": device, "fits": True, "peak_gib": 1.0}
    times |= {f"own_{name}": time for name, time in times.items() if name != "published_step_s"}
    times["own_s"] = times.pop("own_stated_s")
    facts |= {"ran": "as planned", "model_s": model_s, "compiled_s": model_s}
    return times | facts | {"hidden": 0.5, "published_peak_gib": None}


def test_every_row_names_its_source_and_is_a_configuration_of_ours():
    assert len({one["id"] for one in ROWS}) == len(ROWS)
    for one in ROWS:
        assert one["source"] and one["published_step_s"] > 0
        topology = parse_topology(published._topology(one))
        parse_known([f"{name}={value}" for name, value in one["assume"].items()])
        model_file = load_model_file(str(published._MODELS / one["model"]))
        recipe = override(model_file.recipe(one["recipe"])[1], one["settings"])
        data_devices = topology.num_devices // one["mesh"].get("tensor", 1)
        assert recipe.batch_size % (data_devices * recipe.accumulate) == 0


def test_rows_of_amd_gpus_say_what_is_assumed_and_what_differs():
    of_amd = [one for one in ROWS if published._compiler(one) == "rocm"]
    assert len(of_amd) >= 4
    for one in of_amd:
        assert one["assumed"] and one["differs"]
        # Where the row is printed, in a cell of a table.
        assert "|" not in one["framework"] + one["assumed"] + one["differs"]


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
    assert "What ran, 3 rows: median error 5.0%, 90th percentile 20.0%; 2 of 3 published times are inside" in said
    assert "| model FLOPs / (c by device x peak) | 2 | 0.0% | 0.0% |" in said
    (picture,) = published.pictures({"rows": rows}, tmp_path, "published")
    assert picture.read_text().count("a100-80:1x8") == 1


def test_the_report_has_jshards_own_program_beside_what_ran():
    changed = {"own_low_s": 1.0, "own_s": 1.5, "own_high_s": 1.8, "ran": "eager"}
    rows = [row("a_1", 2.0, 2.1) | changed, row("b_1", 4.0, 4.0)]
    said = "\n".join(published.table({"rows": rows}))
    assert "| a_1 | h100:1x8 | 2.000 | 1.500 | 0.75 | eager | 1.890 | 2.100 | 2.310 | 1.05 | yes |" in said
    assert "jshard's own program, 2 rows: median error 12.5%, 90th percentile 25.0%; 1 of 2 published times" in said
    assert "What ran, 2 rows: median error 2.5%, 90th percentile 5.0%; 2 of 2 published times" in said
    assert "| a | 1 | 25.0% | 5.0% | 5.0% | 1.05 |" in said


def test_rows_of_tpus_and_amd_gpus_stand_apart():
    of_amd = row("c_1", 4.0, 4.4, device="mi300x") | {"framework": "a run", "assumed": "its links", "differs": "plain"}
    rows = [of_amd, row("b_1", 4.0, 3.0) | {"topology": "v5e:4x4"}, row("a_1", 2.0, 2.1)]
    said = "\n".join(published.table({"rows": rows}))
    parts = [
        "1 rows: median error 5.0%",
        "AMD GPUs, apart",
        "1 rows: median error 10.0%",
        "| c_1 | a run | its links | plain |",
    ]
    parts += ["TPUs, apart", "1 rows: median error 25.0%"]
    assert sorted(parts, key=said.index) == parts
    assert "| a | 1 | 5.0% | 5.0% |" in said and "| b | 1 |" not in said and "| c | 1 |" not in said


def test_rows_whose_compiler_is_missing_are_left_out(monkeypatch, capsys):
    monkeypatch.setattr(published, "_is_installed", lambda compiler: compiler == "cuda")
    monkeypatch.setattr(published, "require", lambda compiler: None)
    monkeypatch.setattr(published, "_planned", lambda row: row["id"])
    planned = published.run(quick=False)["rows"]
    assert set(planned) == {line["id"] for line in ROWS if published._compiler(line) == "cuda"}
    said = capsys.readouterr().out
    assert "rows of TPUs are left out: they need the extra plan-tpu, too" in said
    assert "rows of AMD GPUs are left out: they need the extra plan-rocm, too" in said
    # Those of AMD GPUs alone need no compiler of NVIDIA's.
    monkeypatch.setattr(published, "_is_installed", lambda compiler: compiler == "rocm")
    amd_ids = [line["id"] for line in ROWS if published._compiler(line) == "rocm"]
    assert published.run(quick=False, only=amd_ids[0])["rows"] == amd_ids[:1]


def test_the_note_of_a_report_without_times_is_in_it(monkeypatch):
    monkeypatch.setattr(published, "run", lambda **options: {"rows": [row("a_1", 2.0, 2.1)]})
    (report,) = reports.measure("published", quick=False, note="On another compiler.")
    assert "No time is measured.\nOn another compiler.\n" in reports.markdown(report)
