"""`jshard plan`: the plan without a cluster, the request for one, its process, and a report that says what fits."""

import json
import pickle
import re
import sys

import pytest

import jshard as js
from jshard import cli
from jshard.cli._arguments import TrainArgs, parse
from jshard.cli._recipe_request import recipe_request_of
from jshard.cli._request import request_of
from jshard.cli.plan import PlanArgs
from jshard.cluster.child_process import CompileError, child_environment, portable
from jshard.cluster.compile import CompileRequest, TooLargeError, compile_step, latency_flag, unused_flags
from jshard.cluster.compile_process import compiler_error, lowered_step
from jshard.cluster.options import OptionError
from jshard.cluster.topology import parse_topology
from jshard.data import load_text
from jshard.errors import RunError
from jshard.recipes.building import batch_like, create
from jshard.recipes.recipe import tree
from jshard.train import TrainStep, load_model_file
from tests.cluster.fake_compiler import step_of
from tests.gpu_compiler import needs_gpu_compiler, without_gpu_compiler
from tests.micro_gpt import MODELS, USERS_FILE, micro


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A working folder with a model file."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", sys.path[:])
    monkeypatch.delenv("JSHARD_DEBUG", raising=False)
    (tmp_path / "my_model.py").write_text(USERS_FILE)
    return tmp_path


def plan(*arguments):
    return cli.main(["plan", "my_model.py", *arguments])


def test_without_a_cluster_it_is_the_plan_of_the_annotation_and_its_memory(folder, capsys):
    assert plan("--mesh", "replica=2,fsdp=4", "--set", "batch_size=32") == 0
    said = capsys.readouterr().out
    assert "8 devices (replica=2, fsdp=4, tensor=1)" in said
    for title in ("Units: what is gathered together", "Memory of one device", "Communication of one forward"):
        assert title in said
    assert list(folder.iterdir()) == [folder / "my_model.py"]


def test_without_a_cluster_as_json_and_nothing_else(folder, capsys):
    assert plan("--json") == 0
    said = capsys.readouterr()
    found = json.loads(said.out)
    assert found["plan"]["mesh"] and found["memory_per_device"]["activations_bytes"] > 0
    assert said.err == ""


def test_it_takes_the_configuration_of_a_run(folder, capsys):
    cli.main(["train", "my_model.py", "--set", "batch_size=32", "--steps", "7", "--mesh", "fsdp=4", "--print-config"])
    (folder / "run.json").write_text(capsys.readouterr().out)
    assert cli.main(["plan", "--config", "run.json", "--set", "model.d_model=32", "--seed", "3"]) == 0
    assert "4 devices (replica=1, fsdp=4, tensor=1)" in capsys.readouterr().out


def test_what_a_configuration_changes_is_compiled_and_in_the_command_that_trains_it(folder, capsys, monkeypatch):
    (folder / "run.json").write_text('{"recipe": {"batch_size": 32}, "data": ["text.txt"], "out": "there"}')
    asked = []

    def compiles(request, *, timeout_s):
        asked.append(request)
        raise CompileError("Stop.", where="here", why="a test.", do="nothing.")

    monkeypatch.setattr("jshard.cli.plan.compile_step", compiles)
    monkeypatch.setattr("jshard.cli.plan.require_compiler", lambda platform: None)
    assert plan("--config", "run.json", "--steps", "7", "--topology", "h100:1x8") == 1
    assert asked[0].settings == ("batch_size=32", "num_steps=7")


def test_plan_and_train_read_a_recipe_alike(folder):
    (folder / "run.json").write_text('{"recipe": {"batch_size": 32, "num_steps": 5}, "mesh": {"fsdp": 4}}')
    words = "my_model.py --config run.json --steps 7 --set learning_rate=0.1 --unit remat=full".split()
    planned = recipe_request_of(parse(PlanArgs, words, command="jshard plan"))
    trained = request_of(parse(TrainArgs, [*words, "--dry-run"], command="jshard train"))
    assert planned.settings == trained.settings == ("batch_size=32", "learning_rate=0.1", "num_steps=7")
    assert planned.name == trained.name and tree(planned.recipe) == tree(trained.recipe)
    assert planned.sizes == trained.sizes == {"fsdp": 4}
    assert planned.model_file.units == trained.model_file.units


def test_a_key_that_no_command_knows_is_refused(folder, capsys):
    (folder / "run.json").write_text('{"topologie": "h100:1x8"}')
    assert plan("--config", "run.json") == 2
    assert "topology instead of topologie" in capsys.readouterr().err


@without_gpu_compiler
def test_a_missing_compiler_is_one_line_to_install(folder, capsys):
    assert plan("--topology", "h100:1x8") == 2
    assert "do:    pip install 'jshard[plan-gpu]'\n" in capsys.readouterr().err


# ---- the process that compiles ----------------------------------------------------------------------------------


def request(**changes):
    return CompileRequest(**{"model": "my_model.py", "topology": "h100:1x2", **changes})


def interpreter(folder, monkeypatch, script):
    """Puts a script of the shell in place of the Python that is started."""
    path = folder / "interpreter"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(path))


def test_a_crash_is_reported_with_the_last_lines(folder, monkeypatch):
    interpreter(folder, monkeypatch, "seq 1 20; echo 'F0000 check failed' >&2; kill -6 $$")
    with pytest.raises(CompileError) as error:
        compile_step(request())
    assert isinstance(error.value, RunError)
    assert str(error.value) == (
        "The compiling process failed.\n"
        "  where: my_model.py for h100:1x2\n"
        "  why:   signal 6; its last lines:\n"
        + "".join(f"         {n}\n" for n in range(14, 21))
        + "         F0000 check failed\n"
        "  do:    --debug shows all its output; correct errors in the model file there."
    )


def test_a_killed_process_is_reported_as_one_without_memory(folder, monkeypatch):
    interpreter(folder, monkeypatch, "kill -9 $$")
    with pytest.raises(CompileError, match="signal 9, without output") as error:
        compile_step(request())
    assert error.value.do.startswith("give it more memory")


def test_a_compiler_that_takes_too_long_is_stopped(folder, monkeypatch):
    interpreter(folder, monkeypatch, "exec sleep 600")
    with pytest.raises(CompileError) as error:
        compile_step(request(), timeout_s=0.05)
    assert error.value.what == "Compiling took too long."
    assert "stopped after 0.05 s" in error.value.why


def test_errors_of_the_child_come_over_as_they_are():
    class OfTheModelFile(RunError):
        pass

    for cls, found in ((OptionError, OptionError), (OfTheModelFile, RunError)):
        reported = cls("No.", where=["a", "b"], why="1", do="2")
        again = pickle.loads(pickle.dumps(portable(reported)))
        assert type(again) is found and str(again) == str(reported)


def test_the_child_touches_no_accelerator_and_gets_no_flags():
    given = {"PATH": "/bin", "XLA_FLAGS": "--xla_gpu_x=1 --xla_cpu_y=2", "JAX_PLATFORMS": "cuda", "HOME": "h"}
    found = child_environment(given)
    assert (found["JAX_PLATFORMS"], found["TPU_SKIP_MDS_QUERY"]) == ("cpu", "1")
    assert "XLA_FLAGS" not in found and found["PATH"] == "/bin"
    assert unused_flags(given) == (
        "not used: --xla_gpu_x=1 of the environment; a plan is compiled only with --options."
    )
    assert unused_flags({"XLA_FLAGS": "--xla_cpu_y=2 --xla_force_host_platform_device_count=8"}) is None


def test_the_flag_that_describes_a_cluster_has_the_time_of_a_unit():
    flag = lambda text, mesh, unit_bytes: latency_flag(parse_topology(text), mesh, unit_bytes)
    alone = {"replica": 1, "fsdp": 64}
    # The gathers of a unit share the eight adapters of a host, each of 42 GB/s.
    assert flag("h100:8x8", alone, 336_000_000).endswith("=nccl_op_launch_us=1000")
    assert flag("h100:8x8", alone, 1).endswith("=nccl_op_launch_us=100")
    assert flag("h100:1x8", {"replica": 1, "fsdp": 8}, 336_000_000) is None
    assert flag("v5p:4x4x4", alone, 336_000_000) is None
    in_groups = flag("h100:8x8", {"replica": 4, "fsdp": 16}, 336_000_000)
    assert in_groups.endswith("=nccl_op_launch_us=1000,gpus_per_node=4,nic_speed_gbps=336,rtt_us=1")


@pytest.mark.wide
def test_the_program_is_that_of_a_run(folder):
    """The child's program, which is made without arrays, is the one that training compiles."""
    model_file, recipe, mesh = load_model_file(MODELS / "gpt.py"), micro(), js.mesh()
    data = load_text([_text(folder)], sequence_length=recipe.sequence_length)
    run = TrainStep(model_file.loss_fn, *create(model_file, recipe, mesh), batch_like(data, recipe.batch_size, mesh))
    _, lowered = lowered_step(model_file, recipe, mesh)
    compiled = lowered.compile()
    assert len(instructions(compiled)) > 500
    assert instructions(compiled) == instructions(run.compiled)
    assert compiled.input_shardings == run.compiled.input_shardings


def instructions(compiled):
    """The instructions of a program, without the lines of Python that they come from."""
    lines = (line for line in compiled.as_text().splitlines() if " = " in line)
    return [re.sub(r", metadata=\{[^}]*\}", "", line) for line in lines]


def _text(folder):
    path = folder / "text.txt"
    path.write_text("abcdefgh" * 2000)
    return path


def test_a_tpu_compiler_that_refuses_what_does_not_fit():
    said = "RESOURCE_EXHAUSTED: Ran out of memory in memory space hbm. Used 20.25G of 15.75G hbm. Exceeded ..."
    reported = compiler_error(RuntimeError(f"{said}\nmore lines"), parse_topology("v5e:2x2"))
    assert type(reported) is TooLargeError and isinstance(reported, RunError)
    assert reported.what == "does not fit: 20.2 GiB of 15.8 in each Cloud TPU v5e."
    assert type(compiler_error(RuntimeError("INTERNAL: no"), parse_topology("v5e:2x2"))) is CompileError


# ---- compiled for a cluster -------------------------------------------------------------------------------------


def test_strategies_are_compared_also_where_the_requested_step_is_refused_for_its_size(folder, capsys, monkeypatch):
    def refuses(request, *, timeout_s):
        raise TooLargeError("does not fit: 16.0 GiB of 15.8", where="v5e:2x4", why="HBM", do="use more.")

    monkeypatch.setattr("jshard.cli.plan.compile_step", refuses)
    monkeypatch.setattr("jshard.cli.plan.require_compiler", lambda compiler: None)
    monkeypatch.setattr(
        "jshard.cluster.comparison.compile_step", lambda request, *, timeout_s: step_of(request, peak_bytes=2**30)
    )
    arguments = ("--topology", "v5e:2x4", "--compare", "zero2,hpz")
    assert plan(*arguments) == 1
    said = capsys.readouterr().out
    assert "zero2*" in said and "as asked: does not fit: 16.0 GiB of 15.8" in said
    assert plan(*arguments, "--json") == 1
    rows = json.loads(capsys.readouterr().out)["comparison"]
    assert [("error" in row, row["name"]) for row in rows] == [(True, "as asked"), (False, "zero2"), (False, "hpz")]
    assert plan("--topology", "v5e:2x4") == 1  # nothing to compare with
    assert "does not fit" in capsys.readouterr().err


@needs_gpu_compiler
def test_a_cluster_that_fits_and_one_that_does_not(folder, capsys):
    assert plan("--topology", "h100:1x2", "--html", "plan.html", "--json") == 0
    said = capsys.readouterr()
    found = json.loads(said.out)
    assert found["compiled"]["fits"] is True and found["compiled"]["capacity_bytes"] == 84_942_979_072
    assert found["estimate"]["low"]["step_s"] <= found["estimate"]["high"]["step_s"]
    page = (folder / "plan.html").read_text()
    assert 'class="lane">communication<' in page and "backward and update" in page.lower()
    assert "fits: a device has 79.1 GiB" in page and "http:" not in page and "src=" not in page
    assert json.loads((folder / "plan.trace.json").read_text())["traceEvents"]

    assert plan("--topology", "h100:1x2", "--set", f"batch_size={2**20}") == 1
    said = capsys.readouterr().out
    assert "does not fit: " in said and " GiB of 79.1" in said
    assert said.index("Compiled") < said.index("Estimate")


@needs_gpu_compiler
def test_an_error_of_the_model_is_reported_in_four_parts(folder, capsys):
    assert plan("--topology", "h100:1x2", "--set", "sequence_length=64") == 2
    said = capsys.readouterr().err
    assert "ModelFileError: The model refuses the batches of the recipe." in said
    assert "64 tokens are more than block_size=32" in said
    assert "Traceback" not in said
