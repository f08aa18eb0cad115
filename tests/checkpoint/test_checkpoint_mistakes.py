"""The mistakes that are made most: reported in four parts, before anything is read, with a line to paste.

The texts are in tests/golden/checkpoint_mistakes.txt. `UPDATE_GOLDEN=1 pytest` of this file
writes it again; then read its diff.
"""

import json
import os
import pathlib
import shutil
import zlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from orbax.checkpoint import v1 as orbax

import jshard as js
from jshard import checkpoint
from jshard.checkpoint import Checkpointer, CheckpointError
from jshard.errors import FourPartError, RunError

GOLDEN = pathlib.Path(__file__).parents[1] / "golden" / "checkpoint_mistakes.txt"
HEAD = "=== "
ADAMW = optax.adamw(1e-3)
CHAIN = optax.chain(optax.clip_by_global_norm(1.0), ADAMW)


class ResizableLayers(nnx.Module):
    def __init__(self, width=16, *, bias=True, tail=False):
        rngs = nnx.Rngs(0)
        self.up = nnx.Linear(8, width, use_bias=bias, rngs=rngs)
        self.down = nnx.Linear(width, 8, rngs=rngs)
        if tail:
            self.norm = nnx.LayerNorm(8, rngs=rngs)


def state(model=None, tx=CHAIN):
    model = model or ResizableLayers()
    return {"model": model, "optimizer": nnx.Optimizer(model, tx, wrt=nnx.Param), "step": 0}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The folder of a run, with checkpoints of steps 100 and 200."""
    folder = tmp_path_factory.mktemp("mistakes") / "run"
    checkpoints = Checkpointer(folder / "checkpoints")
    for step in (100, 200):
        checkpoints.save(step, state())
    return folder


def copied(run, name):
    return pathlib.Path(shutil.copytree(run / "checkpoints" / "200", run.parent / name, dirs_exist_ok=True))


def restore(run, like=None, path="checkpoints/200", **options):
    checkpoint.restore(run / path, like=state() if like is None else like, **options)


def newer(run):
    path = copied(run, "newer") / "jshard.json"
    manifest = json.loads(json.loads(path.read_text())["seal"])
    manifest = json.dumps(manifest | {"format": 9, "versions": {"jshard": "7.0.0"}})
    path.write_text(json.dumps({"seal": manifest, "crc32": zlib.crc32(manifest.encode())}))
    restore(run, path="../newer")


def half_copied(run):
    folder = copied(run, "half")
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    for path in files[len(files) // 2 :]:
        path.unlink()
    restore(run, path="../half")


def without_the_seal(run):
    (copied(run, "unsealed") / "jshard.json").unlink()
    restore(run, path="../unsealed")


def half_copied_in_the_way(run):
    (run.parent / "series" / "7").mkdir(parents=True, exist_ok=True)
    Checkpointer(run.parent / "series").save(7, state())


def several_trees(run):
    path = run.parent / "several"
    if not path.exists():
        weights = {"w": jnp.ones((2, 4))}
        orbax.save_checkpointables(str(path), {"params": weights, "ema_params": weights, "opt": {"mu": weights}})
    checkpoint.restore(path, {"w": jnp.zeros((2, 4))})


def a_folder_of_runs(run):
    folder = run.parent / "runs"
    if not folder.exists():
        (folder / "notes").mkdir(parents=True)
        shutil.copytree(run, folder / "gpt-tiny")
    restore(folder, path=".")


def not_one(run):
    (run.parent / "photos").mkdir(exist_ok=True)
    (run.parent / "photos" / "a.jpg").write_text("a photo")
    restore(run, path="../photos")


def indivisible(run):
    sharding = NamedSharding(js.mesh(fsdp=3, devices=jax.devices()[:3]), P("fsdp"))
    shapes = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), nnx.state(ResizableLayers())
    )
    restore(run, {"model": shapes})


def other_dtype(run):
    model = ResizableLayers()
    model.up.kernel = nnx.Param(model.up.kernel[...].astype(jnp.int32))
    restore(run, {"model": model})


MISTAKES = {
    "path: no such folder": lambda run: restore(run, path="../ran/checkpoints/200"),
    "path: no such step": lambda run: restore(run, path="checkpoints/300"),
    "path: of a folder of runs": a_folder_of_runs,
    "path: inside of a checkpoint": lambda run: restore(run, path="checkpoints/200/arrays"),
    "path: of one checkpoint, for a series": lambda run: Checkpointer(run / "checkpoints" / "200").restore(state()),
    "path: of the run, for a series": lambda run: Checkpointer(run).restore(state()),
    "path: after the state": lambda run: checkpoint.save(state(), run / "checkpoints" / "300"),
    "path: in the place of the state": lambda run: checkpoint.restore(run / "checkpoints" / "200", like="/run"),
    "step: there is none": lambda run: Checkpointer(run / "checkpoints").restore(state(), step=150),
    "model: another width": lambda run: restore(run, state(ResizableLayers(width=32))),
    "model: under another name": lambda run: restore(run, {"net": ResizableLayers()}),
    "model: a leaf is missing": lambda run: restore(run, state(ResizableLayers(tail=True))),
    "model: a leaf is left over": lambda run: restore(run, state(ResizableLayers(bias=False))),
    "optimizer: another": lambda run: restore(run, state(tx=optax.sgd(1e-3, momentum=0.9))),
    "optimizer: one more link in the chain": lambda run: restore(run, state(tx=optax.chain(optax.identity(), CHAIN))),
    "target: indivisible": indivisible,
    "target: another dtype": other_dtype,
    "target: only what is not there": lambda run: restore(run, only="encoder"),
    "checkpoint: of several trees": several_trees,
    "checkpoint: of a newer jshard": newer,
    "checkpoint: it is none": not_one,
    "checkpoint: copied by half": half_copied,
    "checkpoint: copied without its manifest": without_the_seal,
    "save: nothing is overwritten": lambda run: checkpoint.save(run / "checkpoints" / "200", state()),
    "save: a folder that was copied by half is in the way": half_copied_in_the_way,
    "save: what is no data": lambda run: checkpoint.save(
        run / "new", {"f": print, "t": np.array(["a"]), "n": 2**70, "z": 1j, "u": jnp.ones(2, jnp.uint4)}
    ),
    "save: two leaves of one path": lambda run: checkpoint.save(
        run / "new", {1: jnp.ones(1), "1": jnp.ones(2), "'1'": jnp.ones(3)}
    ),
}


def provoke(name, run):
    with pytest.raises(FourPartError) as caught:
        MISTAKES[name](run)
    assert isinstance(caught.value, CheckpointError | RunError)
    text = f"{type(caught.value).__name__}: {caught.value}".replace(str(run.parent), "/somewhere")
    assert not (run / "new").exists()
    return text


def golden():
    texts = GOLDEN.read_text().split(HEAD)[1:]
    return {text.partition("\n")[0]: text.partition("\n")[2].strip() for text in texts}


@pytest.mark.parametrize("name", MISTAKES)
def test_text(name, run):
    found = provoke(name, run)
    if "UPDATE_GOLDEN" in os.environ:
        texts = (golden() if GOLDEN.exists() else {}) | {name: found}
        GOLDEN.write_text("".join(f"{HEAD}{n}\n{texts[n]}\n\n" for n in MISTAKES if n in texts))
    assert found == golden()[name]


def test_no_golden_text_is_left_over():
    assert list(golden()) == list(MISTAKES)


def test_lines_to_paste_work(run):
    """What the texts above advise, done."""
    path = run / "checkpoints" / "200"
    with pytest.raises(RunError):
        without_the_seal(run)
    chain = state(tx=optax.chain(optax.identity(), CHAIN))
    rename = {"optimizer/opt_state/1": "optimizer/opt_state"}
    assert f"rename={json.dumps(rename)}" in golden()["optimizer: one more link in the chain"]
    restored = checkpoint.restore(path, chain, rename=rename)
    assert jax.tree.structure(nnx.state(restored["optimizer"])) == jax.tree.structure(nnx.state(chain["optimizer"]))
    model = checkpoint.restore(path, {"net": ResizableLayers()}, rename={"net": "model"})["net"]
    np.testing.assert_array_equal(model.up.kernel, ResizableLayers().up.kernel)
    with pytest.warns(checkpoint.CheckpointWarning, match="6 leaves keep their values in `like`"):
        checkpoint.restore(path, state(ResizableLayers(tail=True)), missing="init")
    with pytest.warns(checkpoint.CheckpointWarning, match="3 stored leaves are skipped"):
        checkpoint.restore(path, state(ResizableLayers(bias=False)), extra="ignore")
    assert Checkpointer(run / "checkpoints").restore(state(), step=200)["step"] == 0
    assert checkpoint.restore(run / "checkpoints" / "100", state(), verify=False)["step"] == 0
