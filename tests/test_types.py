"""What a type checker knows of a user's file."""

import importlib.util
import json
import subprocess
import sys

import pytest

USERS_FILE = """
from typing import reveal_type

import jax
import numpy as np
import optax
from flax import nnx

import jshard as js

mesh = js.mesh(fsdp=-1)
reveal_type(mesh)  # Mesh
reveal_type(js.mesh(fsdp=8, devices=8))  # AbstractMesh


class Model(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.out = nnx.Linear(64, 64, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.out(x)


def annotate(model: Model) -> None:
    js.fully_shard(model, mesh=mesh, remat="full", mixed_precision=js.MixedPrecision(param_dtype="bfloat16"))


model = js.shard_init(lambda: Model(nnx.Rngs(0)), annotate)
reveal_type(model)  # Model
optimizer = js.shard_optimizer(model, optax.adamw(1e-3))
reveal_type(optimizer)  # Optimizer[Model]
batch = js.shard_batch({"x": np.zeros((8, 64))}, mesh)
y = model(batch["x"])
loss, grads = js.value_and_grad(lambda model, x: (model(x) ** 2).mean(), accumulate=2)(model, batch["x"])
optimizer.update(model, grads)
js.checkpoint.save("run/1", {"model": model})
reveal_type(js.checkpoint.restore("run/1", like={"model": model}))  # dict[str, Model]
reveal_type(js.plan(model))  # ShardPlan
print(js.explain(model, optimizer=optimizer))
"""

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("pyright") is None, reason="pyright is not installed: the extra dev has it"
)


def diagnostics(text, folder):
    path = folder / "train.py"
    path.write_text(text)
    command = [sys.executable, "-m", "pyright", "--outputjson", "--pythonpath", sys.executable, str(path)]
    found = json.loads(subprocess.run(command, capture_output=True, text=True, cwd=folder).stdout)
    return found["generalDiagnostics"]


def test_a_users_file_has_no_errors_and_the_types_that_one_expects(tmp_path):
    said = diagnostics(USERS_FILE, tmp_path)
    assert [d["message"] for d in said if d["severity"] == "error"] == []
    lines = USERS_FILE.splitlines()
    wanted = [line.split("# ")[1] for line in lines if line.startswith("reveal_type")]
    assert [d["message"].split('is "')[1].removesuffix('"') for d in said if "Type of" in d["message"]] == wanted


WRONG_CHOICES = """
from flax import nnx

import jshard as js

mesh = js.mesh()
model = nnx.Linear(64, 64, rngs=nnx.Rngs(0))
js.mesh(fdsp=8)
js.fully_shard(model, mesh=mesh, fallback="raise")
js.PlacementPolicy(offload="optimiser")
js.compiler_options("fast")
js.checkpoint.save("run/1", model, format="zip")
"""


@pytest.mark.wide
def test_a_choice_that_does_not_exist_is_seen_before_the_run(tmp_path):
    wrong = [n for n, line in enumerate(WRONG_CHOICES.splitlines()) if line.startswith("js.")]
    found = [d for d in diagnostics(WRONG_CHOICES, tmp_path) if d["severity"] == "error"]
    assert [d["range"]["start"]["line"] for d in found] == wrong
