"""`jshard plan --compare`, its suggestions and `--auto`, with the real compiler of GPUs that are not there.

It needs the extra `plan-gpu`, and no GPU. What needs no compiler is in tests/cluster.
"""

import json
import shlex

import pytest

from jshard import cli
from tests.cli.test_cli_plan import folder, plan  # noqa: F401
from tests.gpu_compiler import needs_gpu_compiler

pytestmark = [needs_gpu_compiler, pytest.mark.usefixtures("folder")]


def reported(capsys, *arguments, code=0):
    assert plan(*arguments, "--json") == code
    return json.loads(capsys.readouterr().out)


def amounts_of(audit):
    """Elements of the collectives of each kind, by the number of parameters."""
    return {total["kind"]: total["elements"] / audit["num_parameters"] for total in audit["totals"]}


def test_strategies_side_by_side(capsys, tmp_path):
    html = tmp_path / "page.html"
    found = reported(capsys, "--topology", "h100:1x4", "--compare", "zero2,hsdp,gspmd", "--html", str(html))
    trace = json.loads((tmp_path / "page.trace.json").read_text())["traceEvents"]
    lanes = {event["args"]["name"] for event in trace if event["ph"] == "M"}
    for name in ("as asked", "zero2", "hsdp", "gspmd"):  # a pair of lanes for each
        assert {f"{name}: computation", f"{name}: communication"} < lanes
        assert f"<h2>{name}</h2>" in html.read_text()
    rows = {row["name"]: row for row in found["comparison"]}
    assert list(rows) == ["as asked", "zero2", "hsdp", "gspmd"]
    rows["zero3"] = rows.pop("as asked")
    assert rows["zero3"]["compiled"] == found["compiled"]
    assert (rows["hsdp"]["mesh"]["replica"], rows["hsdp"]["mesh"]["fsdp"]) == (2, 2)
    audits = {name: row["compiled"]["audit"] for name, row in rows.items()}
    amounts = {name: amounts_of(audit) for name, audit in audits.items()}
    assert amounts["zero2"]["all-gather"] < amounts["zero3"]["all-gather"]
    assert amounts["hsdp"]["all-reduce"] >= 0.5 > 0.1 > amounts["zero3"]["all-reduce"]
    held = {name: audit["memory_per_device"]["arguments_bytes"] for name, audit in audits.items()}
    assert held["hsdp"] > held["zero3"] and held["gspmd"] == held["zero3"]


def test_what_does_not_fit_is_answered_with_a_line_to_paste_that_fits(capsys):
    assert plan("--topology", "h100:1x2", "--set", f"batch_size={2**20}", "--unit", "prefetch=2") == 1
    said = capsys.readouterr().out
    assert "\ndoes not fit: " in said and "\ntry this, which compiles and fits: " in said
    line = said.partition("\njshard plan ")[2].replace("\\\n", "")
    words = shlex.split(line.splitlines()[0])
    assert f"batch_size={2**20}" in words and "prefetch=2" in words
    assert cli.main(["plan", *words]) == 0
    assert "\nfits: " in capsys.readouterr().out


def test_what_is_chosen_is_quicker_than_what_was_asked_for(capsys):
    """Two slow nodes, by the schedules as they were compiled."""
    slow = "--topology", "h100:2x8", "--assume", "slow_bytes_per_s=1e9"
    found = reported(capsys, *slow, "--auto")["chosen"]
    asked, *others = found["compiled"]
    assert asked["name"] == "as asked" and len(others) == 3
    (best,) = [row for row in others if row["command"] == found["best"]]
    assert best["estimate"]["stated"]["step_s"] < 0.8 * asked["estimate"]["stated"]["step_s"]
    assert best["mesh"]["replica"] > 1 and "--assume slow_bytes_per_s=1e+09" in found["best"]
    assert {way["lost"].partition(": ")[2] for way in found["considered"]} >= {"waits more"}
