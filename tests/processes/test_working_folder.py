"""No file of the working folder takes the place of a module: not in a command, and not in the processes it starts."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from jshard._children import forget_safe_path, module_command, safe_path
from jshard.data.worker_pool import _Worker
from tests.compiling import environment

# Modules that Python has not imported when a command begins, of the standard library and of others.
TAKEN = ("random", "json", "socket", "logging", "jax", "numpy", "flax", "models", "tests", "optax")


@pytest.fixture
def folder(tmp_path):
    """A folder whose files would end any program that imports them."""
    for name in TAKEN:
        (tmp_path / f"{name}.py").write_text(f"raise SystemExit('{name}.py of the working folder ran')\n")
    return tmp_path


def run(command, folder, **variables):
    env = environment() | {"PYTHONPATH": str(Path(__file__).parents[2]), **variables}
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=800, check=False)


def test_a_command_imports_nothing_from_the_working_folder(folder):
    done = run([sys.executable, "-m", "jshard", "train", "gpt", "--print-config"], folder)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["recipe"]


def test_a_process_of_a_command_imports_nothing_from_the_working_folder(folder):
    done = run(module_command("jshard", "train", "gpt", "--print-config"), folder)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["recipe"]


def test_a_process_of_a_command_finds_a_library_that_is_not_installed(tmp_path, monkeypatch):
    """As where Python has it only from the working folder of `python -m`."""
    monkeypatch.delenv("PYTHONPATH", raising=False)
    command = module_command("jshard", "--version")
    isolated = [command[0], "-S", *command[1:]]  # without the installed packages
    assert run(isolated, tmp_path, PYTHONPATH="").stdout.startswith("jshard ")


def test_a_data_worker_imports_nothing_from_the_working_folder(folder, monkeypatch):
    monkeypatch.chdir(folder)
    worker = _Worker(0, 1)
    worker.send(b"not a pickle")
    kind, _, _ = worker.receive("nothing")
    assert kind == "unpickled"
    worker._pipe.close()
    assert worker.joined() == 0


def test_the_children_of_a_data_worker_are_the_users_own(monkeypatch):
    monkeypatch.delenv("PYTHONSAFEPATH", raising=False)
    with safe_path():
        assert os.environ["PYTHONSAFEPATH"]
        forget_safe_path()
        assert "PYTHONSAFEPATH" not in os.environ
    assert "PYTHONSAFEPATH" not in os.environ
    monkeypatch.setenv("PYTHONSAFEPATH", "1")
    with safe_path():
        forget_safe_path()
        assert os.environ["PYTHONSAFEPATH"] == "1"


MODEL = """\
import beside

class Source:
    def __len__(self):
        return 4

    def __getitem__(self, number):
        import beside as again
        return {"x": again.VALUE}
"""


def test_a_data_worker_has_the_files_beside_a_model_and_its_own_libraries(folder):
    """A `random.py` beside the model: the command had Python's before it loaded the model, its workers had not."""
    (folder / "beside.py").write_text("VALUE = 7\n")
    (folder / "my_model.py").write_text(MODEL)
    code = """if True:
        import sys
        from pathlib import Path
        from jshard.data import worker_pool
        from jshard.recipes import model_file
        sys.path.insert(0, str(Path.cwd()))
        module = model_file._module(Path("my_model.py"))
        worker = worker_pool._Worker(0, 1)
        import pickle, cloudpickle
        cloudpickle.register_pickle_by_value(module)
        class Reader:
            def batch(self, ids):
                return [module.Source()[number] for number in ids]
        worker.send(cloudpickle.dumps(Reader()))
        worker.send(pickle.dumps([1, 2]))
        print(tuple(worker.receive("samples")))
        assert sys.path[0] == str(Path.cwd())
        worker._pipe.close()
        assert worker.joined() == 0
    """
    done = run([sys.executable, "-P", "-c", code], folder)
    assert done.stdout == "('batch', [{'x': 7}, {'x': 7}], None)\n", done.stderr
