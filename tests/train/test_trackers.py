"""TensorBoard files read back, W&B against a stand-in of its package, and the choice between them."""

import json
import math
import resource
import struct
import sys
import textwrap
import types

import pytest

import jshard as js
from jshard.errors import RunError, ShardingError
from jshard.recipes.model_file import load_model_file
from jshard.train import register_tracker, trackers
from jshard.train.records import Trackers
from jshard.train.run import run_recipe
from jshard.train.run_options import RunOptions

# A stand-in for the package: it notes its calls as lines of JSON.
WANDB = """
    import json, os, types

    def note(**call):
        with open(os.environ["WANDB_CALLS"], "a") as file:
            file.write(json.dumps(call) + chr(10))

    def Image(path):
        return "image " + path

    def Html(text):
        return text

    class Run:
        starting_step = int(os.environ.get("WANDB_STARTING_STEP", "0"))

        def log(self, scalars, step=None):
            note(log=scalars, step=step)

        def finish(self):
            note(finish=True)

    def Settings(**settings):
        return settings

    def login(**asked):
        note(login=asked)
        if os.environ.get("WANDB_NO_KEY"):
            raise RuntimeError("No API key configured.")

    def init(**asked):
        if os.environ.get("WANDB_FAILS"):
            raise RuntimeError("No API key configured.")
        note(init=asked)
        return Run()
"""


@pytest.fixture
def wandb_calls(tmp_path, monkeypatch):
    """The calls of the stand-in."""
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "wandb.py").write_text(textwrap.dedent(WANDB))
    calls = tmp_path / "calls.jsonl"
    calls.touch()
    monkeypatch.syspath_prepend(tmp_path / "lib")
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    monkeypatch.setenv("WANDB_CALLS", str(calls))
    monkeypatch.delenv("WANDB_PROJECT", raising=False)
    monkeypatch.delenv("WANDB_NAME", raising=False)
    yield lambda: [json.loads(line) for line in calls.read_text().splitlines()]
    sys.modules.pop("wandb", None)


@pytest.fixture
def nothing_installed(monkeypatch):
    monkeypatch.setattr(trackers.importlib.util, "find_spec", lambda name: None)


@pytest.fixture
def out(tmp_path):
    (tmp_path / "gpt-tiny").mkdir()
    return tmp_path / "gpt-tiny"


def events(folder):
    """The events of each file, in the order in which TensorBoard reads them."""
    event_pb2 = pytest.importorskip("tensorboardX.proto.event_pb2", reason="the extra tensorboard is missing")
    files = []
    for path in sorted(folder.iterdir()):
        data, found = path.read_bytes(), []
        while data:  # length, its checksum, the event, its checksum
            (length,) = struct.unpack("<Q", data[:8])
            found.append(event_pb2.Event.FromString(data[12 : 12 + length]))
            data = data[16 + length :]
        files.append(found)
    return files


def tensorboard(folder, **options):
    pytest.importorskip("tensorboardX", reason="the extra tensorboard is missing")
    return trackers.TensorBoard(folder, **options)


def test_tensorboard_has_every_scalar_of_every_step(tmp_path):
    board = tensorboard(tmp_path / "tensorboard")
    board.log(1, {"loss": 2.5, "grad_norm": 0.5})
    board.log(2, {"val_loss": math.nan})
    board.close()
    (start, one, two), *others = events(tmp_path / "tensorboard")
    assert others == []
    assert start.file_version == "brain.Event:2"
    assert (one.step, {value.tag: value.simple_value for value in one.summary.value}) == (
        1,
        {"loss": 2.5, "grad_norm": 0.5},
    )
    assert two.step == 2 and math.isnan(two.summary.value[0].simple_value)
    assert one.wall_time > 1.7e9


def test_a_resumed_run_hides_later_steps_and_overwrites_no_file(tmp_path, monkeypatch):
    for now_s, resume_after in ((2000.0, None), (1000.0, 5), (1000.0, 5)):  # the clock is set back
        monkeypatch.setattr(trackers.time, "time", lambda now_s=now_s: now_s)
        board = tensorboard(tmp_path, resume_after=resume_after)
        board.log(6, {"loss": 1.0})
        board.close()
    first, second, third = events(tmp_path)
    assert [event.step for event in first] == [0, 6]
    assert [event.step for event in second] == [event.step for event in third] == [0, 6, 6]
    assert second[1].session_log.status == 1  # START: events of that step on in earlier files are hidden


def test_tensorboard_on_a_full_disk_is_left_out_and_the_run_continues(tmp_path):
    board = tensorboard(tmp_path)
    said = []
    both = Trackers(optional=[board], warn=said.append)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, hard))
    try:
        for step in range(1000):  # more than its buffer holds
            both.log(step, {"loss": 1.0})
        both.close()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert len(said) == 1
    assert "TensorBoard failed (OSError" in said[0]


def test_wandb_receives_the_run(out, wandb_calls):
    (tracker,) = trackers.open_trackers(["wandb"], out=out, config={"seed": 0})
    tracker.log(1, {"loss": 2.5})
    tracker.close()
    init, log, finish = wandb_calls()
    assert init["init"] == {
        "project": "jshard",
        "name": "gpt-tiny",
        "config": {"seed": 0},
        "dir": str(out),
        "id": (out / "wandb" / "run_id").read_text().strip(),
        "resume": "allow",
        "settings": {"console": "off", "finish_timeout": 15.0},
    }
    assert log == {"log": {"loss": 2.5}, "step": 1}
    assert finish == {"finish": True}


def test_wandb_takes_its_own_names_and_what_the_run_has_drawn_and_written(out, wandb_calls, monkeypatch):
    monkeypatch.setenv("WANDB_PROJECT", "words")
    monkeypatch.setenv("WANDB_NAME", "first")
    (tracker,) = trackers.open_trackers(["wandb"], out=out, config={})
    (out / "loss.png").write_bytes(b"")
    (out / "sample.txt").write_text("a < b\n")
    tracker.close()
    init, log, finish = wandb_calls()
    assert (init["init"]["project"], init["init"]["name"]) == ("words", "first")
    assert log["log"] == {"loss_plot": f"image {out / 'loss.png'}", "sample": "<pre>a &lt; b\n</pre>"}
    assert finish == {"finish": True}


def test_a_resumed_run_continues_at_wandb_and_sends_no_step_twice(out, wandb_calls, monkeypatch):
    trackers.open_trackers(["wandb"], out=out, config={})
    monkeypatch.setenv("WANDB_STARTING_STEP", "8")  # it has steps up to 7
    del sys.modules["wandb"]
    (tracker,) = trackers.open_trackers(["wandb"], out=out, config={}, resume_after=5)
    for step in (6, 7, 8):
        tracker.log(step, {"loss": 1.0})
    first, second, *logs = wandb_calls()
    assert first["init"]["id"] == second["init"]["id"]
    assert [log["step"] for log in logs] == [8]


def test_a_run_that_wandb_does_not_take_is_reported_at_the_start(out, wandb_calls, monkeypatch):
    monkeypatch.setenv("WANDB_FAILS", "1")
    with pytest.raises(RunError, match="refuses the run") as error:
        trackers.open_trackers(["wandb"], out=out, config={})
    assert "No API key configured." in error.value.why
    assert "WANDB_MODE=offline" in error.value.do


def test_a_missing_login_is_refused_before_anything_is_read_or_compiled(tmp_path, wandb_calls, monkeypatch):
    monkeypatch.setenv("WANDB_NO_KEY", "1")
    monkeypatch.delenv("WANDB_MODE", raising=False)
    model_file = load_model_file("gpt")
    _, recipe = model_file.recipe("tiny")
    unread = types.SimpleNamespace()  # every look at the data fails
    with pytest.raises(ShardingError, match="does not know who you are") as error:
        run_recipe(model_file, recipe, RunOptions(mesh=js.mesh(), data=unread, out=tmp_path / "run", track=["wandb"]))
    assert "No API key configured." in error.value.why
    assert [*wandb_calls()] == [{"login": {"verify": True}}]
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("mode", ["offline", "disabled"])
def test_what_stays_here_needs_no_login(wandb_calls, monkeypatch, mode):
    monkeypatch.setenv("WANDB_NO_KEY", "1")
    monkeypatch.setenv("WANDB_MODE", mode)
    trackers.check_login(["wandb", "tensorboard"])
    assert not wandb_calls()


def test_an_unknown_tracker_is_refused_with_the_nearest_name(out):
    with pytest.raises(ShardingError, match="no tracker 'tensorbord'") as error:
        trackers.open_trackers(["tensorbord"], out=out, config={})
    assert error.value.do == "--track tensorboard"
    with pytest.raises(ShardingError, match="--track tensorboard"):
        trackers.open_trackers(["mlflow"], out=out, config={})


class Lines:
    """A tracker that keeps what it receives."""

    def __init__(self):
        self.steps, self.is_closed = [], False

    def log(self, step, scalars):
        self.steps.append(step)

    def close(self):
        self.is_closed = True


@pytest.fixture
def registry(monkeypatch):
    monkeypatch.setattr(trackers, "_trackers", dict(trackers._trackers))


def test_a_registered_tracker_is_opened_by_its_name(out, registry):
    opened = []

    @register_tracker("lines")
    def open_lines(run):
        opened.append(run)
        return Lines()

    assert "lines" in trackers.available()
    (tracker,) = trackers.open_trackers(["lines"], out=out, config={"seed": 0}, resume_after=5)
    assert isinstance(tracker, Lines)
    assert opened == [trackers.TrackedRun(folder=out, config={"seed": 0}, resume_after=5)]


def test_a_registered_tracker_is_refused_without_its_package_or_by_its_check(out, registry):
    def refuse():
        raise ShardingError("No.", where="here", why="no reason.", do="nothing")

    register_tracker("far", package="no_such_package")(lambda run: Lines())
    register_tracker("shy", check=refuse)(lambda run: Lines())
    with pytest.raises(ShardingError, match="no_such_package is not installed") as error:
        trackers.open_trackers(["far"], out=out, config={})
    assert error.value.do == "pip install no_such_package"
    with pytest.raises(ShardingError, match="No"):
        trackers.check_login(["shy"])


def test_an_object_is_a_tracker_if_it_has_the_methods(out):
    lines = Lines()
    assert trackers.open_trackers([lines], out=out, config={}) == [lines]
    with pytest.raises(ShardingError, match="not a tracker") as error:
        trackers.check_trackers([lines, types.SimpleNamespace(log=print)])
    assert "no method close" in error.value.why


@pytest.mark.parametrize("name", ["tensorboard", "wandb"])
def test_a_missing_package_is_reported_with_its_extra(out, nothing_installed, name):
    with pytest.raises(ShardingError, match="not installed") as error:
        trackers.open_trackers([name], out=out, config={})
    assert error.value.do == f"pip install 'jshard[{name}]'"


def test_a_folder_that_wandb_left_behind_is_not_the_package(tmp_path, monkeypatch):
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    (tmp_path / "wandb").mkdir()
    trackers.importlib.invalidate_caches()
    assert "wandb" not in trackers.available()
