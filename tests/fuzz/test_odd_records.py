"""Odd contents of the files that a run writes and reads again: run.json, metrics.jsonl, the history, saved plans."""

import json
import math
import warnings

import pytest

import jshard as js
from jshard.checkpoint.series import history, timeline
from jshard.cli import _request
from jshard.cli._arguments import TrainArgs
from jshard.cli.ckpt.timeline import run as run_timeline
from jshard.errors import RunError, ShardingError
from jshard.occupancy import measured
from jshard.plans.placement import Placement
from jshard.plans.plan import LeafPlan, UnitPlan
from jshard.train.attempts import begin_attempt, describe_attempts, end_attempt
from jshard.train.expected import ExpectedStep
from jshard.train.records import plot_loss, read_metrics
from jshard.train.run_folder import RunFolder, _batch_sizes
from jshard.train.run_record import RunRecord
from tests.fuzz.odd_inputs import NO_JSON, check, damaged, each_change, every_fifth, json_texts, some_changes

MOMENT = "2025-03-01T12:00:00.000+00:00"
RUN = {
    "name": "tiny",
    "recipe": {"class": "Recipe", "model": {"class": "Config", "width": 8}, "batch_size": 4, "seed": 0},
    "model_file": "gpt",
    "data": {"description": "text", "fingerprint": "text 0123"},
    "options": {"recipe": "tiny", "set": ["batch_size=4"], "data": ["text.txt"], "steps": 3, "tokenizer": None},
    "versions": {"jax": "0.10.2", "grain": None},
    "starts": [{"step": 0, "batch_size": 4, "mesh": {"fsdp": 8}, "processes": 1, "versions": {"jax": "0.10.2"}}],
    "attempts": [
        {"begin": MOMENT, "ready": MOMENT, "end": MOMENT, "first_step": 0, "last_step": 2, "cause": "done"}
        | {"productive_s": 1.5, "steps_lost": 0, "seconds_lost": 0.0}
    ],
    "ettr": 0.5,
}
METRIC = {"step": 2, "loss": 2.5, "grad_norm": 1.0, "val_loss": None, "time": 1740830400.5}
PROCESS = {"process": 0, "host": "one", "began_at": 1740830400.0, "bytes": 10, "phases": [["write", 0.0, 1.5]]}
OPERATION = {
    "kind": "save",
    "step": 2,
    "began_at": 1740830400.0,
    "blocked_s": 0.5,
    "error": None,
    "mesh": {"axes": {"fsdp": 2}, "processes": [0, 1]},
    "processes": [PROCESS, PROCESS | {"process": 1, "host": "two"}],
}
PLANNED = {
    "topology": "h100:1x8",
    "platform": "gpu",
    "mesh": {"fsdp": 8},
    "batch_size": 4,
    "accumulate": 1,
    "train_command": "jshard train gpt",
    "communication_per_step": [{"kind": "all-gather", "axes": ["fsdp"], "dtype": "float32", "full_bytes": 64}],
    "compiled": {
        "versions": {"jax": "0"},
        "audit": {
            "collectives": [{"kind": "all-gather", "executions": 2, "total_bytes": 64}],
            "mixing": [{"total_bytes": 3}],
            "memory_per_device": {"peak_bytes": 100},
        },
    },
}
KEY = {"kernel": "matmul", "shape": "8x8x8", "dtype": "bf16", "device": "h", "footprint": "f", "jax": "0"}
TUNED = {
    "format": measured.FORMAT,
    "entries": [
        {"key": KEY, "load_bytes": 3, "when": "now"}
        | {"timings": [{"setting": None, "alone_ns": 3, "both_ns": 4}]}
        | {"timings": [{"setting": {"tile_m": 256}, "alone_ns": 3, "both_ns": 4}, {"setting": None}]}
    ],
}
TUNED["entries"][0]["timings"][1] |= {"alone_ns": 3, "both_ns": 4}


def plan_text():
    placement = Placement((8, 8), "float32", ("fsdp", None), 0, 8, 8, "float32", "float32")
    leaf = LeafPlan("layers/0/kernel", "", placement, keys=(("layers", 0, "kernel"),))
    unit = UnitPlan("", "Model", reshard_after_forward=False, remat="none", mixed_precision="none")
    return js.ShardPlan(mesh=(("fsdp", 8),), units=(unit,), leaves=(leaf,)).to_json()


class Reads:
    """Each reader, from the bytes of its file to the last use of them."""

    def __init__(self, folder):
        self.folder = folder

    def run(self, raw):
        (self.folder / "run.json").write_bytes(raw)
        stored = RunFolder.record(self.folder)
        _request._with_stored(TrainArgs(self.folder / "model.py"), RunFolder.options(self.folder))
        math.prod(RunFolder.last_mesh(self.folder).values())
        _batch_sizes(stored)
        mine = RunRecord(name="tiny", recipe=RUN["recipe"], model_file="gpt", data=RUN["data"], options={})
        attempts = begin_attempt(stored.get("attempts", ()), self.folder / "gone.jsonl", step=1, known={})
        describe_attempts(end_attempt(attempts, self.folder / "gone.jsonl", cause="done"))
        json.dumps(stored, allow_nan=False).encode()
        mine.check_continues(stored, where="run.json")

    def metrics(self, raw):
        path = self.folder / "metrics.jsonl"
        path.write_bytes(json.dumps(METRIC).encode() + b"\n" + raw)
        read_metrics(path)
        begin_attempt(RUN["attempts"], path, step=1, known={})

    def plotted(self, raw):
        self.metrics(raw)
        plot_loss(self.folder / "metrics.jsonl", self.folder / "loss.png")

    def history(self, raw):
        path = self.folder / "checkpoints" / history.NAME
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(json.dumps(OPERATION).encode() + b"\n" + raw)
        for each in timeline.timelines(path.parent, lambda text: text.encode()):
            assert math.isfinite(each.total_s)
            str((each.slowest, each.num_bytes, each.phases))

    def planned(self, raw):
        path = self.folder / "plan.json"
        path.write_bytes(raw)
        plan = ExpectedStep.read(path, within=0.1)
        plan.check_request(_Recipe(), _Mesh())

    def plan(self, raw):
        plan = js.ShardPlan.from_json(raw.decode(errors="surrogateescape"))
        assert js.ShardPlan.from_json(plan.to_json()) == plan

    def tuned(self, raw):
        path = self.folder / "tuning.json"
        path.write_bytes(raw)
        entries = measured.load(path)
        assert measured.parsed(measured.text_of(entries), path) == entries


class _Recipe:
    batch_size, sequence_length, accumulate, sync = 4, 8, 1, "each"


class _Mesh:
    def __init__(self):
        self.shape = {"fsdp": 8}


GOOD = {
    "run": RUN,
    "metrics": METRIC,
    "history": OPERATION,
    "planned": PLANNED,
    "plan": json.loads(plan_text()),
    "tuned": TUNED,
}


@pytest.mark.parametrize("kind", GOOD)
def test_a_file_with_one_odd_value(tmp_path, kind):
    read = getattr(Reads(tmp_path), kind)
    good = GOOD[kind] if kind != "planned" else PLANNED | {"sequence_length": 8}
    read(json.dumps(good).encode())
    check([*NO_JSON, *json_texts(every_fifth(each_change(good)))], read)


@pytest.mark.wide
@pytest.mark.parametrize("kind", GOOD)
def test_a_file_with_every_odd_value_with_several_and_with_damage(tmp_path, kind):
    read, good = getattr(Reads(tmp_path), kind), GOOD[kind]
    check(json_texts(each_change(good)), read)
    check(json_texts(some_changes(good, seed=11, count=150)), read)
    check(damaged(json.dumps(good).encode(), seed=12, count=150), read)


@pytest.mark.wide
def test_odd_histories_and_metrics_are_shown(tmp_path, capsys):
    reads = Reads(tmp_path)

    def shown(raw):
        reads.history(raw)
        run_timeline([str(tmp_path), "--json"])
        capsys.readouterr()

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # damaged lines are left out with one
        check(json_texts(some_changes(OPERATION, seed=13, count=20)), shown)
    check(json_texts(some_changes(METRIC, seed=14, count=5)), reads.plotted)


# What failed first, by name.

FIRST = {
    "no table": [],
    "starts of texts": RUN | {"starts": ["text"]},
    "a mesh that is a list": RUN | {"starts": [RUN["starts"][0] | {"mesh": [8]}]},
    "data without a fingerprint": RUN | {"data": {"description": "text"}},
    "options that are null": RUN | {"options": None},
    "settings that are numbers": RUN | {"options": {"set": [3]}},
    "half a surrogate": RUN | {"model_file": "\ud800"},
    "a time that is none": RUN | {"attempts": [RUN["attempts"][0] | {"begin": "yesterday"}]},
    "a step beyond 64 bits": RUN | {"starts": [RUN["starts"][0] | {"step": 10**400}]},
}


@pytest.mark.parametrize("name", FIRST)
def test_a_run_json_of_another_form_says_where(tmp_path, name):
    with pytest.raises(ShardingError, match="record of the run cannot be read"):
        Reads(tmp_path).run(json.dumps(FIRST[name]).encode())


def test_the_place_of_an_odd_value_is_said(tmp_path):
    odd = RUN | {"starts": [RUN["starts"][0] | {"mesh": {"fsdp": "8"}}]}
    with pytest.raises(ShardingError, match=r"starts\[0\]\.mesh\.fsdp is '8', not a whole number"):
        Reads(tmp_path).run(json.dumps(odd).encode())


def test_a_metric_that_is_no_number_is_damage(tmp_path):
    lines = json.dumps(METRIC | {"loss": "low"}).encode() + b"\n" + json.dumps(METRIC).encode() + b"\n"
    with pytest.raises(RunError, match="The record of the run is damaged"):
        Reads(tmp_path).metrics(lines)
