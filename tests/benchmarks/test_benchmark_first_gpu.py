"""The day a GPU is there, rehearsed on the CPU: every part writes its figures, and none takes the others with it."""

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
import types
from pathlib import Path

import pytest

from benchmarks import reports
from benchmarks.first_gpu import case, plan, session
from benchmarks.first_gpu.parts import CARD, PARTS, Part, shares
from benchmarks.first_gpu.session import Session, environment
from benchmarks.first_gpu.worker import Setup, Work
from jshard.cluster.compile import CompileRequest
from jshard.errors import MissingExtraError
from tests.compiling import XLA_FLAGS

ROOT = Path(__file__).parents[2]
SETUP = Setup(device="cpu", quick=True, batch=1, seconds=0.0)


@pytest.mark.wide
def test_a_dry_run_has_figures_of_every_part(tmp_path):
    minutes = "60"  # no share is short, also on a machine that is loaded
    run = subprocess.run(
        [sys.executable, "-m", "benchmarks.run", "first_gpu", "--quick", "--minutes", minutes, "--out", str(tmp_path)],
        env=os.environ | {"PYTHONPATH": str(ROOT), "XLA_FLAGS": XLA_FLAGS},
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr
    (figures,), (text,) = tmp_path.glob("*_first_gpu.json"), tmp_path.glob("*_first_gpu.md")
    report = json.loads(figures.read_text())
    assert {name: part["outcome"] for name, part in report["parts"].items()} == dict.fromkeys(PARTS, "done"), run.stdout
    of = {name: part["figures"] for name, part in report["parts"].items()}
    assert of["card"]["is_right"] and of["card"]["versions"].keys() >= {"jax", "jaxlib", "flax"}
    assert of["step"]["result"]["candidates"].keys() == {"jshard scan", "raw Flax scan", "JAX scan"}
    assert len(of["plan"]["step_s"]) == 3
    assert [figure["kind"] for figure in of["plan"]["memory"]] == ["estimated", "compiled"]
    (estimate,) = of["plan"]["times"]
    assert estimate["least_s"] <= estimate["stated_s"] <= estimate["most_s"]
    assert {row["kernel"].split(",")[0] for row in of["kernels"]["errors"]} == {
        "matmul", "mlp", "rms_norm", "layer_norm", "attention",
    }  # fmt: skip
    assert all(row["error"] < 1e-2 for row in of["kernels"]["errors"])
    assert of["kernels"]["times"] and not of["kernels"]["left_out"]
    assert of["train"]["restored_step"] >= of["train"]["saved_step"]
    assert 0 < of["train"]["compared_steps"] == of["train"]["equal_steps"]
    assert "needs a GPU" in of["overlap"]["left_out"]["all of it"]
    assert text.read_text() in run.stdout and "dry run" in text.read_text()
    assert str(ROOT) not in figures.read_text()


# Parts that go wrong: they are modules beside the others, and import nothing that takes long.

MADE_UP = {
    "crash": (
        "import os\ndef measure(work):\n    work.keep(sum=1)\n    print('a last word', flush=True)\n    os.abort()\n"
    ),
    "hang": (
        "import signal, subprocess, sys, time\n"
        "def measure(work):\n"
        "    signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "    child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(999)'], start_new_session=True)\n"
        "    work.keep(sum=2, child=child.pid)\n"
        "    time.sleep(999)\n"
    ),
    "good": "def measure(work):\n    work.keep(sum=3)\n",
}
TABLE = "def table(figures):\n    return [f\"the sum is {figures['sum']}\"]\n"


@pytest.fixture
def made_up(tmp_path, monkeypatch):
    """Parts that crash, hang and end well."""
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    for name, text in MADE_UP.items():
        (tmp_path / f"made_up_{name}.py").write_text(text + TABLE)
        monkeypatch.setitem(PARTS, name, Part(module=f"made_up_{name}", title=f"A part: {name}", weight=1))


def has_ended(pid: int) -> bool:
    """Whether a process ends within some seconds: a killed one takes a moment on a loaded machine."""
    for _ in range(200):
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            return True
        if state == "Z":
            return True
        time.sleep(0.05)
    return False


@pytest.mark.usefixtures("made_up")
def test_a_crash_and_a_hang_leave_the_others_and_the_report_in_order():
    *_, results = Session(names=["crash", "hang", "good"], seconds=15, setup=SETUP).run()
    assert {name: result.outcome for name, result in results.items()} == {
        "crash": "crashed: SIGABRT", "hang": "killed at the end of its share", "good": "done",
    }  # fmt: skip
    assert {name: result.figures["sum"] for name, result in results.items()} == {"crash": 1, "hang": 2, "good": 3}
    assert results["crash"].last_lines[0] == "a last word"
    assert has_ended(results["hang"].figures["child"])
    # What the crash did not use is there for the others.
    assert results["hang"].share_s > results["crash"].share_s

    text = "\n".join(case.table(case._result(SETUP, 1.0, {CARD: session.PartResult(outcome="done"), **results})))
    assert "| crash | crashed: SIGABRT |" in text and "a last word" in text
    assert all(f"the sum is {number}" in text for number in (1, 2, 3))


@pytest.mark.usefixtures("made_up")
def test_ctrl_c_keeps_what_there_is(monkeypatch):
    def interrupted(process, timeout=None):
        if timeout is None:
            return wait(process)
        time.sleep(3)  # its first figures are there
        raise KeyboardInterrupt

    wait = subprocess.Popen.wait
    with monkeypatch.context() as patched:
        patched.setattr(subprocess.Popen, "wait", interrupted)
        *_, results = Session(names=["hang", "good"], seconds=60, setup=SETUP).run()
    assert [result.outcome for result in results.values()] == ["interrupted", "not begun"]
    assert results["hang"].figures["sum"] == 2 and has_ended(results["hang"].figures["child"])


def test_the_report_is_written_after_each_part(monkeypatch):
    grown = iter([{"parts": {}}, {"parts": {"card": {}}}])
    monkeypatch.setattr(case, "run", lambda **_: grown)
    first, second = reports.measure("first_gpu", quick=True)
    assert first["date"] == second["date"] and first["parts"] != second["parts"]


def test_a_part_has_its_weights_share_of_what_is_left():
    names = list(PARTS)
    weights = [part.weight for part in PARTS.values()]
    assert shares(names, 600) == 600 * weights[0] / sum(weights)
    assert shares(names[-1:], 100) == 100


def test_a_part_sees_one_gpu():
    gpu = lambda **variables: environment(variables, device="gpu", folder=Path("/programs"))
    assert gpu(JAX_PLATFORMS="cpu").get("JAX_PLATFORMS") is None
    assert gpu()["CUDA_VISIBLE_DEVICES"] == "0"
    assert gpu(CUDA_VISIBLE_DEVICES="3,5")["CUDA_VISIBLE_DEVICES"] == "3"
    assert gpu(HIP_VISIBLE_DEVICES="2,4")["HIP_VISIBLE_DEVICES"] == "2"


def test_unknown_parts_and_no_gpu_are_refused(monkeypatch):
    refused = lambda **options: next(case.run(quick=False, batch=1, **options))
    with pytest.raises(SystemExit, match="no parts: kernel; there are: step,"):
        refused(minutes=1.0, device="cpu", parts="kernel")
    with pytest.raises(SystemExit, match="--minutes 0 must be more than 0"):
        refused(minutes=0.0, device="cpu", parts=None)
    card = session.PartResult(outcome="done", figures={"platform": "cpu", "kind": "cpu"})
    monkeypatch.setattr(Session, "run", lambda self: iter([{CARD: card}]))
    with pytest.raises(SystemExit, match="No GPU is here: JAX sees cpu"):
        refused(minutes=1.0, device=None, parts=None)


@pytest.mark.parametrize(("kind", "compiler"), [("NVIDIA A100-SXM4-80GB", "cuda"), ("AMD Instinct MI300X", "rocm")])
def test_the_plan_is_made_by_the_compiler_of_the_card(kind, compiler, monkeypatch, tmp_path):
    def not_installed(name):
        raise MissingExtraError(f"{name} is not installed.", where="here", why="so it is.", do="nothing.")

    monkeypatch.setattr(plan, "require_compiler", not_installed)
    monkeypatch.setattr(plan.jax, "devices", lambda: [types.SimpleNamespace(device_kind=kind)])
    work = Work(dataclasses.replace(SETUP, seconds=600.0), tmp_path / "figures.json")
    plan._plan_ahead(work, CompileRequest(model=plan.MODEL, recipe="tiny", topology=""))
    (why,) = json.loads((tmp_path / "figures.json").read_text())["left_out"].values()
    assert why.startswith(f"{compiler} is not installed.")


@pytest.mark.usefixtures("made_up")
def test_a_part_ends_with_the_process_that_started_it(tmp_path):
    command = "from benchmarks.first_gpu.worker import *; main(sys.argv[1:])"
    path = tmp_path / "figures.json"
    part = subprocess.Popen(
        [sys.executable, "-c", command, "made_up_hang", str(path), SETUP.text()],
        env=os.environ | {"PYTHONPATH": f"{ROOT}:{tmp_path}"},
        stdin=subprocess.PIPE,
        start_new_session=True,
    )
    while not path.exists():
        time.sleep(0.05)
    child = json.loads(path.read_text())["child"]
    part.communicate()  # closes its stdin, as the end of this process would
    os.kill(child, signal.SIGKILL)  # in a session of its own, it is out of reach
    assert part.returncode == -signal.SIGKILL
