"""No command executes a file because the folder of a run names it, unless the user made that run, or says so."""

import json
import os
import shlex
import subprocess
import sys

import pytest

from jshard import cli
from jshard.recipes.recipe import tree
from jshard.train import trust
from jshard.train.run_record import RunRecord
from tests.compiling import environment
from tests.micro_gpt import USERS_FILE

COMMANDS = {
    "eval": ["eval", "RUN"],
    "sample": ["sample", "RUN"],
    "ckpt export": ["ckpt", "export", "RUN", "out"],
    "ckpt export of a checkpoint": ["ckpt", "export", "RUN/checkpoints/1", "out"],
}
# Does not end quietly, no matter who executes it.
EVIL = "import pathlib; pathlib.Path(__file__).with_name('it-ran').touch(); raise SystemExit(3)\n"


@pytest.fixture
def state(tmp_path, monkeypatch):
    """A user without a key, in a folder of their own."""
    folder = tmp_path / "state"
    monkeypatch.setenv("XDG_STATE_HOME", str(folder))
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    monkeypatch.setattr(sys, "path", sys.path[:])
    monkeypatch.delenv("JSHARD_DEBUG", raising=False)
    return folder


def run_folder(folder, model_file, **more):
    """The folder of a run, as far as it is read before its model file is."""
    (folder / "checkpoints" / "1").mkdir(parents=True)
    record = {"name": "tiny", "recipe": {}, "model_file": model_file, "options": {}}
    record |= {"data": {"description": "text", "fingerprint": "text 0"}, "versions": {}, "starts": [], **more}
    (folder / "run.json").write_text(json.dumps(record))


def words(command, folder):
    return [word.replace("RUN", str(folder)) for word in command]


@pytest.mark.parametrize("seal", [None, "", "0" * 64, "\xe9", 7, ["0" * 64]])
@pytest.mark.parametrize("command", COMMANDS.values(), ids=COMMANDS)
def test_a_model_file_that_a_run_from_elsewhere_names_is_not_executed(command, seal, state, tmp_path, capfd):
    trust.sealed("mine.py")  # the user has a key
    evil = tmp_path / "run" / "evil.py"
    run_folder(tmp_path / "run", str(evil), **{trust.SEAL: seal})
    evil.write_text(EVIL)
    assert cli.main(words(command, tmp_path / "run")) == 2
    assert not evil.with_name("it-ran").exists()
    said = capfd.readouterr().err
    assert "UntrustedError: The run names a model file, and was not made by you on this machine." in said
    assert f"model_file  {evil}" in said


def test_the_advice_can_be_pasted(state, tmp_path, capsys):
    folder = tmp_path / "a run"
    run_folder(folder, str(folder / "evil.py"))
    (folder / "evil.py").write_text(EVIL)
    assert cli.main(["eval", str(folder)]) == 2
    named, trusting = (line.strip() for line in capsys.readouterr().err.splitlines()[-2:])
    for line in (named, trusting):
        program, *arguments = shlex.split(line)
        assert program == "jshard"
        assert cli.main(arguments) == 2  # the file ends with an error, which is reported
        (folder / "it-ran").unlink()


def test_a_seal_is_of_one_file_and_one_user(state, tmp_path, monkeypatch):
    seal = trust.sealed("mine.py")
    where = {"where": tmp_path, "command": ["jshard", "eval"]}

    def is_executed(name, record_seal=seal):
        try:
            trust.model_of_run({"model_file": name, trust.SEAL: record_seal}, is_trusted=False, **where)
        except trust.UntrustedError:
            return False
        return True

    assert is_executed("mine.py")
    assert is_executed(os.path.abspath("mine.py"))
    assert not is_executed("other.py")
    assert not is_executed("mine.py", None)
    (tmp_path / "elsewhere").mkdir()
    with monkeypatch.context() as patch:
        patch.chdir(tmp_path / "elsewhere")
        assert not is_executed("mine.py")  # another file
    (state / "jshard" / "key").write_bytes(b"k" * 32)
    assert not is_executed("mine.py")


def test_a_key_that_others_can_read_is_none(state):
    assert trust.sealed("mine.py") is not None
    file = state / "jshard" / "key"
    assert file.stat().st_mode & 0o777 == 0o600
    file.chmod(0o644)
    assert trust.sealed("mine.py") is None


def test_a_user_who_can_keep_no_key_trains(state, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", "/proc/none")
    assert trust.sealed("mine.py") is None


def test_an_included_model_needs_no_seal_and_no_file_takes_its_place(state, tmp_path):
    for name in ("gpt", "gpt.py"):
        (tmp_path / "work" / name).write_text(EVIL)
    assert trust.sealed("gpt") is None
    path = trust.model_of_run({"model_file": "gpt"}, is_trusted=False, where=tmp_path, command=["jshard"])
    assert path == trust.shipped_models()["gpt"]


def test_a_run_of_this_user_is_sealed(state, tmp_path):
    (tmp_path / "work" / "my_model.py").write_text(USERS_FILE)

    record = RunRecord(name="a", recipe=tree({}), model_file="my_model.py", data={}, options={}).as_json()
    assert trust.model_of_run(record, is_trusted=False, where=tmp_path, command=["jshard"]).name == "my_model.py"


def test_processes_that_make_the_key_at_once_have_the_same(state):
    code = "from jshard.train import trust; print(trust.sealed('mine.py'))"
    command = [sys.executable, "-c", code]
    env = environment() | {"XDG_STATE_HOME": str(state)}
    processes = [subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    seals = {process.communicate(timeout=800)[0] for process in processes}
    assert len(seals) == 1
    assert [file.name for file in (state / "jshard").iterdir()] == ["key"]
