"""The scripts of docs/from_fsdp2.md: jshard's resumes bit for bit, and PyTorch's has the same losses."""

import json
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.compiling import environment, python

PAGE = Path(__file__).parent.parent / "docs" / "from_fsdp2.md"
RUN = "import json, sys, train; print(json.dumps(train.train(sys.argv[1], until=int(sys.argv[2]))))"
TIMEOUT_S = 600


def script(language: str) -> str:
    blocks = re.findall(rf"^```{language}\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    return "\n\n".join(blocks)


def losses_of(command: Sequence[str], folder: Path) -> dict[str, float]:
    """Runs a command whose last line is the losses by step."""
    variables = environment(programs=folder / "programs") | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=folder, env=variables, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.wide
@pytest.mark.timeout(TIMEOUT_S)
def test_a_second_process_resumes_bit_for_bit(tmp_path):
    (tmp_path / "train.py").write_text(script("python"))
    whole = losses_of(python(RUN, "whole", 20), tmp_path)
    first = losses_of(python(RUN, "stopped", 10), tmp_path)
    rest = losses_of(python(RUN, "stopped", 20), tmp_path)
    assert [*first, *rest] == [str(step) for step in range(20)]
    assert {**first, **rest} == whole
    assert list((tmp_path / "stopped" / "tensorboard").iterdir())


ON_CPUS = {
    'device = "cuda"': 'device = "cpu"',
    'torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))\n': "",
    '"cpu:gloo,cuda:nccl"': '"gloo"',
    "torch.utils.tensorboard": "tensorboardX",
    'SummaryWriter(folder / "tensorboard")': 'SummaryWriter(str(folder / "tensorboard"))',
}

RUN_TORCH = """
import json
weights = {name: weight.full_tensor().numpy(force=True) for name, weight in build().state_dict().items()}
if rank == 0:
    np.savez("weights.npz", **weights)

plain_evaluate, of_average = evaluate, []


def evaluate(model):
    of_average.append(plain_evaluate(model))
    return of_average[-1]


whole = train("whole")
of_whole = dict(enumerate(of_average, 100))
first = train("stopped", until=10)
rest = train("stopped")
assert {**first, **rest} == whole
if rank == 0:
    print(json.dumps(whole | of_whole))
"""

RUN_FROM_WEIGHTS = """
import json
import jshard as js
import numpy as np
import train

weights = np.load("weights.npz")


def linear(name):
    return {"kernel": weights[f"{name}.weight"].T, "bias": weights[f"{name}.bias"]}


def block(name):
    norm = {"scale": weights[f"{name}.norm.weight"], "bias": weights[f"{name}.norm.bias"]}
    return {"norm": norm, "up": linear(f"{name}.up"), "down": linear(f"{name}.down")}


blocks = {number: block(f"blocks.{number}") for number in range(2)}
values = {"embed": linear("embed"), "blocks": blocks, "head": linear("head")}
build, evaluate, of_average = train.build, train.evaluate, []


def evaluated(model):
    of_average.append(evaluate(model))
    return of_average[-1]


train.build = lambda: js.load(build(), values)
train.evaluate = evaluated
print(json.dumps(train.train("same weights") | dict(enumerate(of_average, 100))))
"""


@pytest.mark.slow
@pytest.mark.timeout(2 * TIMEOUT_S)
def test_both_scripts_have_the_same_losses_and_that_of_pytorch_resumes(tmp_path):
    pytest.importorskip("torch")
    original = script("py")
    for on_gpus, on_cpus in ON_CPUS.items():
        assert on_gpus in original
        original = original.replace(on_gpus, on_cpus)
    (tmp_path / "original.py").write_text(original + RUN_TORCH)
    (tmp_path / "train.py").write_text(script("python"))
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "original.py"]
    expected = losses_of(torchrun, tmp_path)
    losses = losses_of(python(RUN_FROM_WEIGHTS), tmp_path)
    # 20 losses of steps, and 2 of the averaged weights on held-out data.
    assert losses.keys() == expected.keys() and len(losses) == 22
    assert max(abs(losses[step] - expected[step]) for step in losses) < 0.01
    assert expected["0"] - expected["19"] > 0.5
