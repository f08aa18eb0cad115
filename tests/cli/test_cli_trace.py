"""`jshard train --profile` records steps of a run, and `jshard trace` reads them."""

import dataclasses
import json
import re
import sys
import warnings
from pathlib import Path

import pytest

import jshard as js
from jshard import cli
from jshard.cli.trace import TraceArgs
from jshard.train.progress import StepProfile
from tests.inspect.made_up_profiles import event, plane, thunk, write
from tests.micro_gpt import MODELS, USERS_FILE

SMALL = ["--set", "model.n_layer=1", "--set", "eval_every=3", "--sample-tokens", "0", "--track"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("profiled")
    (folder / "text.txt").write_text("abcdefgh" * 2000)
    (folder / "my_model.py").write_text(USERS_FILE)
    return folder


@pytest.fixture(autouse=True)
def there(folder, monkeypatch):
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", sys.path[:])
    monkeypatch.delenv("JSHARD_DEBUG", raising=False)


def train(*options):
    return cli.main(["train", "my_model.py", "--data", "text.txt", *SMALL, *options])


@pytest.fixture(scope="module")
def run(folder):
    """A run of four steps, of which the last three are profiled; an evaluation is between them."""
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        patch.chdir(folder)
        patch.setattr(sys, "path", sys.path[:])
        said = []
        patch.setattr("builtins.print", lambda *text, **_: said.append(" ".join(map(str, text))))
        assert train("--steps", "4", "--profile", "1:4", "--out", "run") == 0
    return folder / "run", said


def test_the_steps_are_recorded_whole_and_by_their_numbers(run):
    out, _ = run
    found = js.read_profile(out)
    assert (found.platform, len(found.devices), found.program) == ("cpu", 8, "jit_step")
    assert [step.number for step in found.steps] == [2, 3, 4]
    assert not [note for note in found.notes if "Left out" in note or "counted from 1" in note]
    shares = found.shares
    four = shares.computing_s, shares.communicating_s, shares.both_s, shares.idle_s
    assert sum(four) == pytest.approx(shares.step_s, rel=1e-9)


def test_units_come_from_the_program_beside_the_profile(run):
    out, _ = run
    audit = js.audit((out / "profile" / "steps-2-4" / "program.txt").read_text())
    rows = js.read_profile(out).by_instruction
    assert {(r.name, r.kind, r.phase) for r in rows} == {(w.name, w.kind, w.phase) for w in audit.schedule.windows}
    assert {"blocks/0", "(root)"} <= {r.unit for r in rows}


def test_shown_as_tables_and_as_json(run, capsys):
    assert cli.main(["trace", "run"]) == 0
    text = capsys.readouterr().out
    assert re.match(r"Measured: 3 steps \(2\.\.4\) of jit_step on 8 CPU devices, [\d,.]+ ms a step", text)
    for part in ("communicating, nothing computes: exposed", "Devices", "blocks/0 backward", "CPU devices are threads"):
        assert part in text
    assert cli.main(["trace", "run/profile", "--json"]) == 0
    reported = json.loads(capsys.readouterr().out)
    assert [step["number"] for step in reported["steps"]] == [2, 3, 4]
    for step in reported["steps"]:
        four = [step[name] for name in ("computing_s", "communicating_s", "both_s", "idle_s")]
        assert sum(four) == pytest.approx(step["step_s"], rel=1e-9)


def test_one_page_beside_it(run, capsys):
    assert cli.main(["trace", "run", "--html", "step.html"]) == 0
    reported = capsys.readouterr()
    assert reported.out.startswith("Measured: 3 steps")
    assert reported.err == "written: step.html\nwritten: step.trace.json\n"
    page = Path("step.html").read_text()
    assert page.startswith("<!DOCTYPE html>")
    assert "Step 3 of jit_step on cpu:" in page
    assert cli.main(["trace", "run", "--html", "nowhere/step.html"]) == 2
    assert capsys.readouterr().err == (
        "ShardingError: The file cannot be written.\n"
        "  where: --html nowhere/step.html\n"
        f"  why:   there is no folder {Path('nowhere').absolute()}.\n"
        "  do:    mkdir -p nowhere\n"
    )


def test_the_page_about_it_reports_every_option():
    page = (MODELS.parent / "docs" / "profiling.md").read_text()
    for field in dataclasses.fields(TraceArgs):
        assert field.name == "path" or f"| `--{field.name}" in page


@pytest.mark.wide
def test_steps_that_were_done_before_are_not_profiled(run, capfd):
    assert train("--out", "run", "--resume", "--steps", "5", "--profile", "1:3") == 0
    assert "not profiled: steps 2..3 were done before this start." in capfd.readouterr().out


def test_exit_codes(tmp_path, capfd):
    assert cli.main(["trace", str(tmp_path / "nowhere")]) == 2
    assert capfd.readouterr().err.startswith("ShardingError: There is no profile.")
    empty = write(tmp_path / "a.xplane.pb", plane("/host:CPU", {"python": [event("sleep", 0, 9)]}))
    assert cli.main(["trace", str(empty)]) == 1
    assert capfd.readouterr().err.startswith("RunError: The profile has no events of devices.")
    write(empty, plane("/host:CPU", {"worker": [thunk("dot.1", 0, 9, run=1)]}))
    assert cli.main(["trace", str(empty)]) == 0


def test_a_profile_that_cannot_be_recorded_does_not_end_the_run(tmp_path):
    (tmp_path / "profile").write_text("in the way")
    profile = StepProfile(tmp_path, range(2, 4), program=lambda: "", say=lambda line: None)
    with pytest.warns(UserWarning, match=r"The steps are not profiled, and the run continues: .*profile"):
        profile.begin()
    assert (profile.is_recording, len(profile.steps)) == (False, 0)
    profile.end()
