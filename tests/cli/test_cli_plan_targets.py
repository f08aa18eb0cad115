"""`jshard plan --target` and `--budget`: the answer first, a command that plans it, JSON, and an error if it is not
reached. The search is a function of this test; nothing is compiled."""

import dataclasses
import json
import shlex
import sys

import pytest

from jshard import cli
from jshard.cli._arguments import parse
from jshard.cli.plan import PlanArgs
from jshard.cluster import sizing
from jshard.cluster.compile import Variant
from jshard.cluster.search import Search
from tests.micro_gpt import USERS_FILE


@pytest.fixture
def plan(tmp_path, monkeypatch, capsys):
    """Runs the command on a model of one layer; its exit code, stdout and stderr."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", sys.path[:])
    monkeypatch.delenv("JSHARD_DEBUG", raising=False)
    (tmp_path / "my_model.py").write_text(USERS_FILE)

    def first(costs, mesh, *, free):
        cost = costs.of(Variant(name="first", mesh=mesh, units={"remat": "full"}))
        return Search(default=cost, ranked=(cost,), too_large=(), refused={})

    def nothing(costs, mesh, *, free):
        return dataclasses.replace(first(costs, mesh, free=free), ranked=())

    def run(*arguments, fits=True):
        monkeypatch.setattr(sizing, "search", first if fits else nothing)
        model = ["my_model.py", "--set", "model.n_layer=1", "--set", "batch_size=32"]
        code = cli.main(["plan", *model, *arguments])
        return code, *capsys.readouterr()

    return run


def test_a_target_that_is_reached(plan):
    code, text, _ = plan("--target", "tokens/s >= 1", "--topology", "h100:4x8", "--assume", "restart_s=60")
    assert code == 0
    first, *rest = text.splitlines()
    assert first.startswith("my_model, recipe micro: tokens/s >= 1 is reached by 8 x NVIDIA H100 SXM, 80 GB, 1 host")
    assert "restart_s 60\n" in text + "\n"
    # The command plans what the answer is about.
    begin = next(place for place, line in enumerate(rest) if line.startswith("jshard plan"))
    command = " ".join(rest[begin : rest.index("", begin)]).replace("\\", "")
    args = parse(PlanArgs, shlex.split(command)[2:], command="jshard plan")
    assert args.topology == "h100:1x8" and args.mesh == "replica=1,fsdp=8,tensor=1"
    assert set(args.set) == {"model.n_layer=1", "batch_size=32", "accumulate=1"} and args.unit == ("remat=full",)
    assert args.assume == () and not args.target


def test_a_budget_as_json(plan):
    code, text, _ = plan("--budget", "8xh100:2h", "--price", "3", "--tokens", "1e6", "--json")
    assert code == 0
    record = json.loads(text)
    assert record["question"] == {"budget": "8xh100:2h", "seconds": 7200.0} and record["reached"] is True
    estimate = record["estimate"]
    step_s, ettr = estimate["step_s"]["stated"], estimate["failures"]["ettr"]["stated"]
    assert estimate["bought_steps"]["stated"] == pytest.approx(7200 * ettr / step_s)
    assert estimate["num_steps"] == -(-1_000_000 // estimate["tokens_per_step"])
    assert estimate["price"]["stated"] == pytest.approx(3 * 8 * estimate["run_s"]["stated"] / 3600)
    assert estimate["step_s"]["best"] < step_s < estimate["step_s"]["worst"]
    assert "considered" not in record


def test_a_target_that_nothing_reaches(plan):
    code, text, error = plan("--target", "step <= 1us", "--topology", "h100:2x8", "--assume", "slow_bytes_per_s=1e9")
    assert code == 1
    assert "step <= 1us is not reached; the nearest is " in text
    lines = error.splitlines()
    begin = lines.index("RunError: No cluster reaches the target.")
    assert lines[begin + 1] == "  where: --target 'step <= 1us'"
    assert lines[begin + 2].endswith(": the nearest of 2 clusters up to h100:2x8.")
    assert lines[begin + 3].startswith('  do:    --target "step <= ')


@pytest.mark.parametrize("question", ["--target=days <= 1", "--budget=1h"])
def test_a_model_that_fits_nowhere(plan, question):
    code, text, error = plan(question, "--topology", "h100:1x8", fits=False)
    assert code == 1
    assert "no configuration fits by the estimate, for " in text
    assert "  why:   on h100:1x8: no configuration fits by the estimate.\n" in error
    assert "  do:    --topology h100:2x8  # or fewer sequences: --set batch_size=N\n" in error


def test_a_budget_of_less_than_a_step(plan):
    code, text, error = plan("--budget", "8xh100:1e-9h")
    assert code == 1 and " trains 0 tokens, 0 steps, estimated" in text
    assert "RunError: The budget is less than a step.\n  where: --budget 8xh100:1e-9h\n" in error
    assert "  do:    --topology h100:1x8 --budget 1h\n" in error
