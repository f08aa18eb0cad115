"""What `jshard train --auto` chooses: by estimates that measured steps correct."""

import dataclasses
import json
import math
import sys
from pathlib import Path

import pytest

import jshard as js
from jshard import cli
from jshard.cli._arguments import TrainArgs
from jshard.cli._request import request_of
from jshard.cluster.compile import Variant
from jshard.cluster.costs import Cost, StepWork
from jshard.cluster.machine import machine_here
from jshard.cluster.search import Search
from jshard.inspect.memory import memory_of
from jshard.inspect.tables import printed
from jshard.recipes.building import abstract_model
from jshard.train import auto
from jshard.train.auto import Factors, fitted, with_feedback
from tests.helpers import Config, abstract
from tests.micro_gpt import USERS_FILE

MESH = {"replica": 1, "fsdp": 8, "tensor": 1}
MEMORY = memory_of(js.plan(abstract(Config(), js.mesh())))


# ---- measured steps correct the estimates -----------------------------------------------------------------------


def way(name: str, compute_s: float, exposed_s: float) -> Cost:
    held = dataclasses.replace(MEMORY, parameters_bytes=len(name))  # ways differ in what they hold
    work = StepWork(products_s=compute_s, small_products_s=0.0, traffic_s=0.0, bubble_s=0.0, update_s=0.0)
    return Cost(Variant(name=name, mesh=MESH), held, work, exposed_s, exposed_s)


def searched(*ways: Cost, default: Cost) -> Search:
    ranked = tuple(sorted(ways, key=lambda cost: cost.step_s))
    return Search(default=default, ranked=ranked, too_large=(), refused={})


KEEPS, AGAIN, WAITS = way("keeps", 1.0, 0.9), way("again", 1.3, 0.5), way("waits", 0.95, 1.2)
FOUND = searched(KEEPS, AGAIN, WAITS, default=WAITS)


def machine(compute: float, wait: float):
    """Devices on which each part of an estimate is off by a factor."""
    return lambda cost: compute * cost.compute_s + wait * cost.exposed_s


def test_a_wrong_first_choice_is_corrected_by_what_was_measured():
    """The devices compute four times as slowly as was thought: to compute again does not pay."""
    assert [cost.variant.name for cost in FOUND.ranked] == ["again", "keeps", "waits"]
    found = with_feedback(FOUND, machine(4.0, 1.0))
    assert [one.cost.variant.name for one in found.tried] == ["again", "waits", "keeps"]
    assert found.best is not None and found.best.cost.variant.name == "keeps"
    slow_links = with_feedback(FOUND, machine(1.0, 4.0))
    assert slow_links.best is not None and slow_links.best.cost.variant.name == "again"


def test_the_factors_are_those_of_the_machine():
    tried = with_feedback(FOUND, machine(4.0, 0.5), tries=3).tried
    found = fitted(tried)
    assert (found.compute, found.wait) == pytest.approx((4.0, 0.5), rel=0.15)
    assert fitted(()) == Factors()
    alone = fitted(tried[:1])  # one measurement says how much slower the machine is, and not by what
    assert alone.compute == pytest.approx(alone.wait, rel=0.1)


def test_no_more_is_tried_than_could_win_or_than_was_allowed():
    exact = with_feedback(FOUND, machine(1.0, 1.0))
    assert [one.cost.variant.name for one in exact.tried] == ["again", "waits"]  # the best, and what was asked for
    assert len(with_feedback(FOUND, machine(4.0, 1.0), tries=1).tried) == 1
    odd = {"again": 5.0, "waits": 6.0, "keeps": 1.0}  # as no factor could say
    found = with_feedback(FOUND, lambda cost: odd[cost.variant.name])
    assert found.best is not None and len(found.tried) <= 3


def test_what_does_not_run_is_not_chosen():
    found = with_feedback(FOUND, lambda cost: math.inf if cost is AGAIN else 2.0)
    assert found.best is not None and found.best.cost is not AGAIN
    assert "does not run" in printed(auto.tried_table(found)) and printed(auto.tried_table(found)).count("chosen") == 1
    assert with_feedback(FOUND, lambda cost: math.inf).best is None


# ---- `jshard train --auto` --------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A working folder with a model file, and a machine that computes slowly."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", sys.path[:])
    (tmp_path / "my_model.py").write_text(USERS_FILE)
    (tmp_path / "text.txt").write_text("the quick brown fox jumps over the lazy dog. " * 400)
    tried = []

    def steps_s(model_file, recipe, mesh, data, compiler_options):
        model = abstract_model(model_file, recipe, mesh)
        unit = js.plan(model).units[1]
        tried.append((mesh.shape["fsdp"], unit.reshard_after_forward, unit.remat, recipe.accumulate))
        return [1.0 if mesh.shape["fsdp"] == 4 and unit.remat == "none" else 5.0 + len(tried)]

    monkeypatch.setattr(auto, "_step_times_s", steps_s)
    return tmp_path, tried


def train(*arguments):
    return cli.main(["train", "my_model.py", "--data", "text.txt", "--sample-tokens", "0", "--track", *arguments])


@pytest.mark.wide
def test_a_run_that_chooses(folder, capsys):
    path, tried = folder
    small = "--set", "eval_sequences=16", "--set", "model.n_layer=1"
    assert train("--auto", "--steps", "2", "--out", "run", *small) == 0
    said = capsys.readouterr().out
    assert 2 <= len(tried) <= 4 and len(set(tried)) == len(tried)
    assert "Configurations tried" in said
    best = min(range(len(tried)), key=lambda i: (tried[i][0] != 4 or tried[i][2] != "none", i))
    fsdp, reshard, remat, accumulate = tried[best]
    stored = json.loads((path / "run" / "run.json").read_text())["options"]
    assert f"remat={remat}" in stored["unit"] and f"reshard_after_forward={str(reshard).lower()}" in stored["unit"]
    assert f"--auto: chosen --mesh replica={8 // fsdp},fsdp={fsdp},tensor=1" in said

    tried.clear()
    again = "--auto", "--resume", "--out", "run", "--unit", "prefetch=2", "--set", "accumulate=2"
    assert train(*again, "--steps", "3") == 0  # what was chosen stays, whatever it was chosen in place of
    said = capsys.readouterr().out
    assert not tried and "--auto: a resumed run keeps its configuration" in said and "resumed from" in said
    record = json.loads((path / "run" / "run.json").read_text())
    assert record["options"]["unit"] == stored["unit"]
    assert record["starts"][0]["mesh"] == record["starts"][1]["mesh"]
    assert record["recipe"]["accumulate"] == accumulate


def test_what_was_chosen_takes_the_place_of_what_was_asked_for(folder):
    unit, settings = ("remat=dots", "prefetch=2"), ("accumulate=4", "seed=1")
    asked = TrainArgs(model=Path("my_model.py"), auto=True, mesh="fsdp=4", track=(), unit=unit, set=settings)
    request = request_of(asked)
    found = request.with_variant(Variant(name="x", mesh={"fsdp": 8}, units={"remat": "full"}, accumulate=2))
    assert found.given.again(Path("run")) == (
        "jshard train my_model.py --set seed=1 --set accumulate=2 --unit prefetch=2 --unit remat=full --mesh fsdp=8"
        " --out run --track --resume"
    )
    assert found.recipe.accumulate == 2 and dict(found.sizes) == {"fsdp": 8}
    assert found.options["set"] == ("seed=1", "accumulate=2") and found.options["unit"] == ("prefetch=2", "remat=full")


def test_processes_see_one_machine(monkeypatch):
    mine = machine_here(js.mesh())
    assert auto._agreed(mine) == mine
    others: list[list[int | None]] = [[4, 100], [8, 50]]
    monkeypatch.setattr(auto, "exchange", lambda topic, mine: others)
    assert auto._agreed(mine) == dataclasses.replace(mine, near=4, capacity_bytes=50)
    others.append([8, None])
    assert auto._agreed(mine).capacity_bytes is None


def test_nothing_is_chosen_where_nothing_runs(folder, capsys):
    assert train("--auto", "--dry-run") == 2
    assert "--auto measures steps, and --dry-run runs none" in capsys.readouterr().err
