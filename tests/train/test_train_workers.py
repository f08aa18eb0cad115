"""Worker processes change where samples are read, and nothing else; one that dies ends the run with a report."""

import contextlib
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

from jshard.data import Data, Loader
from jshard.data.loader import Reader
from jshard.data.worker_pool import WorkerPool
from jshard.errors import RunError

MODEL_FILE = """
import dataclasses, sys, threading
import numpy as np
from jshard.data import Data

RECIPES = {"one": dict}
FACTOR = 3
def build(config, rngs): ...
def annotate(model, mesh): ...

class OddId(Exception):
    def __init__(self, number, reason):
        super().__init__(f"{number}: {reason}")
        self.lock = threading.Lock()

def scaled(index):
    return np.full((2,), FACTOR * index)

@dataclasses.dataclass
class Scaled:
    size: int
    bad: int = -1
    odd: bool = False
    def __len__(self):
        return self.size
    def __getitem__(self, index):
        if index == self.bad:
            raise (OddId if self.odd else OSError)(index, "no such image")
        return {"image": scaled(index), "jax": np.bool_("jax" in sys.modules)}

def data(recipe, **options):
    return Data(train=Scaled(30, **options), held_out=Scaled(9), description="", fingerprint="")
"""


class Deadly:
    """Samples of which one, read in a worker, does `act` to it."""

    def __init__(self, act, at=None):
        self.act = act
        self.at = at

    def __len__(self):
        return 100

    def __getitem__(self, index):
        if index == self.at and multiprocessing.parent_process():
            self.act()
        return {"id": np.int32(index)}


def kill_myself():
    os.kill(os.getpid(), signal.SIGKILL)


def leave():
    os._exit(0)


def wait_for_ever():
    threading.Event().wait()


def loader(source, workers=1):
    data = Data(train=source, held_out=source, description="", fingerprint="")
    return Loader(data=data, batch_size=4, seed=0, rows=range(4), workers=workers)


def deadly_in_step(step, act):
    return loader(Deadly(act, at=loader(Deadly(None)).sample_ids(step)[2]))


@pytest.fixture
def model_file(tmp_path):
    from jshard.train import load_model_file  # here: it brings jax, and workers import this file

    path = tmp_path / "images.py"
    path.write_text(MODEL_FILE)
    return load_model_file(path)


@pytest.fixture(autouse=True)
def no_worker_is_left():
    yield
    assert not multiprocessing.active_children()


def test_batches_are_the_same_with_workers(model_file):
    data = model_file.data(None)
    one, two = (Loader(data=data, batch_size=4, seed=5, rows=[1, 2], workers=workers) for workers in (0, 2))
    alone = [batch["image"].tolist() for batch in one.train(12, start_step=7)]
    read = list(two.train(12, start_step=7))
    assert [batch["image"].tolist() for batch in read] == alone
    assert len(alone) == 12 - 7
    assert not any(batch["jax"].any() for batch in read), "workers whose samples need no jax pay for it"


@pytest.mark.parametrize("odd", [False, True])
def test_error_of_a_users_source_comes_back_from_a_worker(model_file, odd):
    first = Loader(data=model_file.data(None), batch_size=4, seed=0, rows=range(4)).sample_ids(0)
    data = model_file.data(None, bad=first[1], odd=odd)
    batches = Loader(data=data, batch_size=4, seed=0, rows=range(4), workers=1).train(3)
    with pytest.raises(RunError, match=rf"data\.train\[{first[1]}\], of a Scaled\n(.|\n)*no such image") as caught:
        next(batches)
    cause = caught.value.__cause__
    assert "no such image" in str(cause)  # its text travels, and
    assert "__getitem__" in "".join(cause.__notes__)  # the place where it was raised


@pytest.mark.parametrize(
    ("act", "why"), [(kill_myself, r"killed by SIGKILL\. The system kills"), (leave, "ended with exit code 0")]
)
def test_dead_worker_ends_the_run(act, why):
    batches = deadly_in_step(2, act).train(10)
    assert [len(next(batches)["id"]) for _ in range(2)] == [4, 4]
    with pytest.raises(RunError, match=rf"A data worker died\.\n.*data worker 1 of 1 \(pid \d+\)(.|\n)*{why}"):
        next(batches)


def test_workers_leave_signals_to_the_run_from_their_first_moment():
    source = Deadly(None)
    reader = Reader(source=source, part="train", spec={"id": "() int32"}, error=RunError)
    with contextlib.closing(WorkerPool(reader, num_workers=1, ids=lambda step: [step], num_steps=3)) as pool:
        (worker,) = multiprocessing.active_children()
        for number in (signal.SIGINT, signal.SIGTERM):
            os.kill(worker.pid, number)  # while it imports
        assert [pool.batch(step)["id"].tolist() for step in range(3)] == [[0], [1], [2]]
    assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == set()


def test_closing_early_ends_a_worker_in_the_middle_of_a_sample():
    batches = deadly_in_step(1, wait_for_ever).train(10)
    next(batches)
    assert len(multiprocessing.active_children()) == 1
    batches.close()
    assert not multiprocessing.active_children()


SCRIPT = """
import multiprocessing, os, signal, sys
import numpy as np
from jshard.data import Data, Loader

class Numbers:
    def __len__(self): return 100
    def __getitem__(self, index): return {"id": np.int32(index)}

if __name__ == "__main__":
    data = Data(train=Numbers(), held_out=Numbers(), description="", fingerprint="")
    batches = Loader(data=data, batch_size=4, seed=0, rows=range(4), workers=1).train(10**6)
    next(batches)
    print(multiprocessing.active_children()[0].pid, flush=True)
    if sys.argv[1] == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize(("end", "code"), [("kill", -signal.SIGKILL), ("return", 0)])
def test_workers_end_with_the_run(tmp_path, end, code):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    run = subprocess.run([sys.executable, script, end], stdout=subprocess.PIPE, timeout=200, text=True, check=False)
    assert run.returncode == code
    worker = int(run.stdout)
    while True:  # until the test's own time limit
        try:
            os.kill(worker, 0)
        except ProcessLookupError:
            return
        time.sleep(0.1)
