"""`jshard train --expect`: a run stops before its first step if its step is not the one that was planned."""

import dataclasses
import json
import os
import re
import subprocess
import sys

import jax
import pytest
from jax.sharding import Mesh

import jshard as js
from jshard import cli
from jshard.cluster.compile_process import lowered_step
from jshard.engine.layer_stacks import as_traced
from jshard.inspect.audit import audit
from jshard.inspect.communication import traffic_of
from jshard.train import load_model_file
from jshard.train.expected import ExpectedStep, compiler_of
from tests.gpu_compiler import needs_gpu_compiler
from tests.micro_gpt import USERS_FILE

ARGUMENTS = "train my_model.py --steps 1 --data text.txt --sample-tokens 0 --out run".split()


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A working folder with a model file, text, and plans of the model's step: for CPUs, and as if for GPUs."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", sys.path[:])
    monkeypatch.delenv("JSHARD_DEBUG", raising=False)
    (tmp_path / "my_model.py").write_text(USERS_FILE)
    (tmp_path / "text.txt").write_text("the quick brown fox jumps over the lazy dog. " * 400)
    model_file = load_model_file("my_model.py")
    _, recipe = model_file.recipe(None)
    mesh = js.mesh(fsdp=8)
    assert isinstance(mesh, Mesh)
    model, lowered = lowered_step(model_file, recipe, mesh)
    planned = as_traced(js.plan(model))
    found = audit(lowered.compile(), plan=planned)
    plan = {
        "topology": "cpu:1x8",
        "platform": "cpu",
        "mesh": dict(mesh.shape),
        "train_command": "jshard train my_model.py --mesh fsdp=8",
        "communication_per_step": [dataclasses.asdict(one) for one in traffic_of(planned)],
        "compiled": {"audit": json.loads(found.to_json()), "versions": {"jax": "0"}},
    } | {name: getattr(recipe, name) for name in ("batch_size", "sequence_length", "accumulate")}
    (tmp_path / "cpu.json").write_text(json.dumps(plan))
    (tmp_path / "gpu.json").write_text(json.dumps(plan | {"platform": "gpu"}))
    return tmp_path


def change(name, at, value):
    """Writes another value into a plan."""
    with open(name) as file:
        plan = json.load(file)
    place = plan
    for key in at[:-1]:
        place = place[key]
    place[at[-1]] = value(place[at[-1]])
    with open(name, "w") as file:
        json.dump(plan, file)


@pytest.mark.wide
@pytest.mark.parametrize("name", ["cpu.json", "gpu.json"])
def test_a_run_as_planned_says_so_and_trains(folder, capsys, name):
    assert cli.main([*ARGUMENTS, "--expect", name]) == 0
    said = capsys.readouterr().out
    assert f"as in {name}, within 5.0%: " in said
    assert ("peak bytes" in said) == (name == "cpu.json")
    assert (folder / "run" / "checkpoints" / "1").is_dir()


OTHERS = {
    "settings of units": ("gpu.json", ["--unit", "reshard_after_forward=false"], "bytes of all-gather over fsdp in"),
    "number": ("cpu.json", [], r"all-gathers: \d+, planned \d+"),
    "peak": ("cpu.json", [], "peak bytes: [0-9.]+ .iB, planned"),
    "mesh": (
        "cpu.json",
        ["--mesh", "replica=2,fsdp=4"],
        "mesh replica=2,fsdp=4,tensor=1, planned replica=1,fsdp=8,tensor=1",
    ),
    "batch": ("gpu.json", ["--set", "batch_size=32"], "batch_size 32, planned 16"),
}
CHANGES = {
    "number": (("compiled", "audit", "collectives"), lambda rows: [row | {"executions": 40} for row in rows]),
    "peak": (("compiled", "audit", "memory_per_device", "peak_bytes"), lambda peak: int(peak * 1.1)),
}


@pytest.mark.parametrize("case", OTHERS)
def test_another_step_stops_before_it_trains(folder, capsys, case):
    name, options, text = OTHERS[case]
    if case in CHANGES:
        change(name, *CHANGES[case])
    assert cli.main([*ARGUMENTS, *options, "--expect", name]) == 2
    said = capsys.readouterr().err
    assert re.search(text, said)
    assert f"jshard train my_model.py --mesh fsdp=8 --expect {name}" in said
    assert not list((folder / "run").glob("checkpoints/*")) if (folder / "run").exists() else True
    if case == "peak":
        assert cli.main([*ARGUMENTS, "--resume", "--expect", name, "--expect-within", "0.2"]) == 0


class Client:
    platform_version = "rocm 70014"


class AmdGpu:
    platform = "gpu"
    client = Client()


def test_a_plan_for_another_vendors_gpus_is_compared_by_what_the_annotations_need(folder):
    """Their compilers combine collectives differently, as those of different platforms do."""
    assert compiler_of(AmdGpu()) == "rocm" and compiler_of(jax.devices()[0]) == "cpu"
    plan = json.loads((folder / "gpu.json").read_text())
    (folder / "h100.json").write_text(json.dumps(plan | {"compiler": "cuda", "device": "NVIDIA H100 SXM, 80 GB"}))
    expected = ExpectedStep.read(folder / "h100.json", within=0.05)
    model_file = load_model_file("my_model.py")
    _, recipe = model_file.recipe(None)
    model, lowered = lowered_step(model_file, recipe, js.mesh(fsdp=8))
    compiled = audit(lowered.compile(), plan=as_traced(js.plan(model)))
    other = expected.check(compiled, platform="gpu", compiler="rocm")
    assert "peak bytes" not in other
    assert other.endswith("; of the step for a NVIDIA H100 SXM, 80 GB, not of the program compiled here")
    same = expected.check(compiled, platform="gpu", compiler="cuda")
    assert "peak bytes" in same and "not of the program" not in same


def test_a_plan_that_sums_on_arrival_is_compared_by_its_reduce_scatters(folder):
    """Within a host of GPUs all-to-alls take the place of reduce-scatters, and elsewhere they do not."""
    plan = json.loads((folder / "gpu.json").read_text())
    on_arrival = []
    for traffic in plan["communication_per_step"]:
        is_summed = traffic["kind"] == "reduce-scatter"
        on_arrival.append(traffic | {"kind": "all-to-all", "dtype": "bfloat16"} if is_summed else traffic)
    of_host = plan | {"communication_per_step": on_arrival}
    (folder / "earlier.json").write_text(json.dumps(of_host))
    of_host["communication_by_reduce_scatters"] = plan["communication_per_step"]
    (folder / "host.json").write_text(json.dumps(of_host))

    model_file = load_model_file("my_model.py")
    _, recipe = model_file.recipe(None)
    model, lowered = lowered_step(model_file, recipe, js.mesh(fsdp=8))
    compiled = audit(lowered.compile(), plan=as_traced(js.plan(model)))
    said = ExpectedStep.read(folder / "host.json", within=0.05).check(compiled, platform="cpu")
    assert "bytes of reduce-scatter over fsdp" in said
    with pytest.raises(js.ShardingError, match="bytes of all-to-all over fsdp in bfloat16"):
        ExpectedStep.read(folder / "earlier.json", within=0.05).check(compiled, platform="cpu")


def test_what_is_no_plan_is_refused(folder, capsys):
    (folder / "other.json").write_text('{"plan": {}}')
    (folder / "broken.json").write_text("{")
    for name, text in (
        ("other.json", "not a plan of a compiled step"),
        ("broken.json", "Expecting"),
        ("none.json", "no such file"),
    ):
        assert cli.main([*ARGUMENTS, "--expect", name]) == 2
        assert text in capsys.readouterr().err
    assert cli.main([*ARGUMENTS, "--expect", "cpu.json", "--expect-within", "-1"]) == 2
    assert not (folder / "run").exists()


@pytest.mark.wide
@pytest.mark.parametrize("name", ["cpu.json", "gpu.json"])
def test_two_processes_stop_together(folder, name):
    command = [sys.executable, "-m", "jshard", *ARGUMENTS, "--processes", "2", "--mesh", "fsdp=8"]
    environ = {name: value for name, value in os.environ.items() if name not in ("XLA_FLAGS", "JAX_NUM_CPU_DEVICES")}
    done = subprocess.run([*command, "--expect", name], env=environ, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and f"as in {name}, within" in done.stdout, done.stderr
    again = [*command, "--unit", "reshard_after_forward=false", "--expect", name]
    again[again.index("run")] = "other"
    done = subprocess.run(again, env=environ, capture_output=True, text=True, timeout=300)
    assert done.returncode == 2 and "not the one that was planned" in done.stderr


@needs_gpu_compiler
def test_a_plan_of_the_command_is_what_the_run_takes(folder, capsys):
    assert cli.main(["plan", "my_model.py", "--topology", "h100:1x8", "--json"]) == 0
    (folder / "plan.json").write_text(capsys.readouterr().out)
    assert cli.main([*ARGUMENTS, "--expect", "plan.json"]) == 0
    assert "as in plan.json, within" in capsys.readouterr().out
