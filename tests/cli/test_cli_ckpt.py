"""`jshard ckpt`: what it says of checkpoints, and that what it writes holds the same values."""

import json
import shutil
import signal
import sys
import threading
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as orbax_v0
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from safetensors.numpy import save_file

import jshard as js
from jshard import cli
from jshard.checkpoint import CheckpointError, manifest
from jshard.checkpoint.formats import SafetensorsSource

# As a user's file: a model of two stacked layers, whose names elsewhere are those of single ones.
MODEL = """\
import dataclasses
from flax import nnx
import jax
import jax.numpy as jnp
import jshard as js
from jshard.checkpoint.formats import Stored
from jshard.train import Recipe

@dataclasses.dataclass(frozen=True)
class Config:
    layers: int = 2

class Model(nnx.Module):
    def __init__(self, config, rngs):
        stack = lambda *shape: nnx.Param(jax.random.normal(rngs.params(), (config.layers, *shape)))
        self.blocks = nnx.Dict(kernel=stack(16, 8), bias=stack(8))
        self.tokens = nnx.Param(jax.random.normal(rngs.params(), (32, 8)))

def build(config, rngs):
    return Model(config, rngs)

def annotate(model, mesh):
    js.fully_shard(model, mesh=mesh, placement=js.PlacementPolicy(shard_dim=0))

def hf_names(config):
    names = {"tokens": "wte.weight"}
    for layer in range(config.layers):
        names[f"blocks/{layer}/kernel"] = Stored(f"h.{layer}.weight", transpose=True)
        names[f"blocks/{layer}/bias"] = f"h.{layer}.bias"
    return names

SIZES = {"sequence_length": 8, "batch_size": 8, "num_steps": 1, "learning_rate": 1.0, "warmup_steps": 0}
RECIPES = {"two": lambda: Recipe(model=Config(), **SIZES)}
"""


def state(step=100, seed=0):
    rows = NamedSharding(js.mesh(), PartitionSpec(None, "fsdp"))
    random = np.random.default_rng(seed)
    arrays = {
        "blocks": {"kernel": random.normal(size=(2, 16, 8)), "bias": random.normal(size=(2, 8))},
        "tokens": random.normal(size=(32, 8)),
    }
    model = jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), arrays)
    model["blocks"]["kernel"] = jax.device_put(model["blocks"]["kernel"], rows)
    return {"model": model, "optimizer": {"mu": [jnp.ones(4)]}, "key": jax.random.key(seed), "step": step}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run with two checkpoints, and what an interrupted save has left."""
    folder = tmp_path_factory.mktemp("runs") / "run"
    with js.checkpoint.Checkpointer(folder / "checkpoints") as checkpoints:
        checkpoints.save(100, state(100), metrics={"val_loss": 2.5})
        changed = state(200)
        changed["model"]["tokens"] *= 2
        changed["optimizer"] = {"nu": [jnp.ones((2, 2))]}
        checkpoints.save(200, changed)
    (folder / "checkpoints" / "300.orbax-checkpoint-tmp").mkdir()
    return folder


@pytest.fixture(autouse=True)
def there(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", sys.path[:])
    monkeypatch.delenv("JSHARD_DEBUG", raising=False)
    Path("model.py").write_text(MODEL)


@pytest.fixture
def ckpt(capsys):
    """Runs a command; its exit code, and what it printed, read as JSON where that was asked for."""

    def call(*arguments):
        code = cli.main(["ckpt", *map(str, arguments)])
        out = capsys.readouterr().out
        return code, json.loads(out) if "--json" in arguments else out

    return call


def equal(a, b):
    """The leaves of two checkpoints have the same values: their sums are equal."""
    first, second = manifest.read(Path(a)).leaves, manifest.read(Path(b)).leaves
    assert {name: (leaf.shape, leaf.dtype, leaf.key, leaf.sums) for name, leaf in first.items()} == {
        name: (leaf.shape, leaf.dtype, leaf.key, leaf.sums) for name, leaf in second.items()
    }


def test_ls(run, ckpt):
    code, text = ckpt("ls", run)
    assert code == 0
    left = "300.orbax-checkpoint-tmp: of a save that was interrupted"
    for part in ("100", "val_loss=2.5", "fsdp=8", "complete", "latest", left):
        assert part in text
    _, reported = ckpt("ls", run / "checkpoints", "--json")
    assert [(entry["step"], entry["is_latest"]) for entry in reported["checkpoints"]] == [(100, False), (200, True)]
    assert reported["unfinished"] == ["300.orbax-checkpoint-tmp"]
    _, reported = ckpt("ls", run / "checkpoints" / "100", "--json")
    assert [(entry["step"], entry["num_leaves"]) for entry in reported["checkpoints"]] == [(100, 6)]


def test_ls_names_what_is_damaged_and_takes_an_older_one_as_the_latest(run, ckpt):
    folder = Path(shutil.copytree(run, "run"))
    next(iter(folder.glob("checkpoints/200/arrays/*"))).unlink()
    code, reported = ckpt("ls", folder, "--json")
    assert code == 0
    assert [entry["is_latest"] for entry in reported["checkpoints"]] == [True, False]
    assert "is missing" in reported["checkpoints"][1]["damage"][0]
    assert "DAMAGED" in ckpt("ls", folder)[1]


def test_a_step_that_was_copied_by_half_is_listed_and_no_checkpoint(run, ckpt):
    folder = Path(shutil.copytree(run, "run")) / "checkpoints"
    (Path(shutil.copytree(folder / "200", folder / "300")) / "commit_success.txt").unlink()
    text = ckpt("ls", "run")[1]
    assert "INCOMPLETE" in text and "300: a folder without commit_success.txt: an incomplete copy" in text
    code, reported = ckpt("verify", "run", "--all", "--json")
    assert (code, [verdict["is_good"] for verdict in reported]) == (1, [True, True, False])
    assert ckpt("verify", "run")[0] == 0  # the newest is that of step 200


def test_inspect(run, ckpt):
    code, text = ckpt("inspect", run, "--step", "100")
    assert code == 0
    for part in ("step 100, saved", "by 1 process on fsdp=8", "jax " + jax.__version__, "val_loss 2.5"):
        assert part in text
    assert ["kernel", "(2,", "16,", "8)", "float32", "1.0", "KiB", "-,", "fsdp"] in [
        line.split()[:9] for line in text.splitlines()
    ]
    shallow = ckpt("inspect", run, "--depth", "1")[1]
    assert "kernel" not in shallow and "model/" in shallow
    _, reported = ckpt("inspect", run, "--below", "model/blocks", "--json")
    assert set(reported["leaves"]) == {"model/blocks/kernel", "model/blocks/bias"}
    assert reported["leaves"]["model/blocks/kernel"]["bytes"] == 1024


def test_inspect_shows_layers_that_are_alike_once(ckpt):
    blocks = {str(n): {"w": jnp.ones((3, 4 + (n == 11)))} for n in range(12)}
    js.checkpoint.save("c", {"blocks": blocks})
    text = ckpt("inspect", "c")[1]
    assert "0..10/" in text and "11/" in text
    assert text.count("(3, 4)") == text.count("(3, 5)") == 1


def test_verify(run, ckpt):
    code, text = ckpt("verify", run, "--all")
    assert code == 0
    assert text.count("good, all files are there and all sums are those of the save") == 2
    folder = Path(shutil.copytree(run / "checkpoints" / "100", "c"))
    file = folder / "arrays" / "00000-000.safetensors"
    content = bytearray(file.read_bytes())
    content[5000] ^= 1
    file.write_bytes(content)
    code, text = ckpt("verify", folder)
    assert code == 1
    assert "DAMAGED" in text and "model/tokens" in text and "arrays/00000-000.safetensors" in text
    code, reported = ckpt("verify", folder, "--json")
    assert (code, reported[0]["is_good"]) == (1, False)
    assert "model/tokens" in {finding["leaf"] for finding in reported[0]["findings"]}


def test_diff(run, ckpt):
    a, b = run / "checkpoints" / "100", run / "checkpoints" / "200"
    assert ckpt("diff", a, a)[0] == 0
    code, reported = ckpt("diff", a, b, "--json")
    assert code == 1
    leaves = {leaf["path"]: leaf for leaf in reported["leaves"]}
    kinds = {path: leaf["kind"] for path, leaf in leaves.items() if leaf["kind"] != "equal"}
    assert kinds == {
        "model/tokens": "values",
        "optimizer/mu/0": "only in a",
        "optimizer/nu/0": "only in b",
        "step": "values",
    }
    tokens = np.asarray(state()["model"]["tokens"], np.float64)
    norms = leaves["model/tokens"]["norms"]
    assert norms["a"] == pytest.approx(np.linalg.norm(tokens))
    assert norms["b"] == pytest.approx(2 * norms["a"])
    assert norms["relative"] == pytest.approx(1.0)
    assert norms["most"] == pytest.approx(np.abs(tokens).max())
    text = ckpt("diff", a, b)[1]
    assert "6 leaves" not in text and "7 leaves: 3 equal, 1 only in a, 1 only in b, 2 values" in text
    code, reported = ckpt("diff", a, b, "--no-values", "--json")
    assert {leaf["path"]: leaf["kind"] for leaf in reported["leaves"]}["model/tokens"] == "values"  # by its sums


def test_layers_that_differ_alike_are_one_row_of_a_diff(tmp_path, ckpt):
    places = tmp_path / "a", tmp_path / "b"
    for scale, place in enumerate(places):
        layers = [np.full(4, 1 + scale * (i + 1), np.float32) for i in range(12)]
        js.checkpoint.save(place, {"blocks": [{"w": w, "b": np.zeros(2, np.float32)} for w in layers]})
    code, text = ckpt("diff", *places)
    rows = [line.split() for line in text.splitlines() if " values " in line]
    assert code == 1 and [(row[0], row[-1]) for row in rows] == [("blocks/0..11/w", "float32[4]")]
    assert float(rows[0][4]) == 12  # of the last, which differs most
    assert len(ckpt("diff", *places, "--json")[1]["leaves"]) == 24


def test_what_differs_most_is_the_first_row_of_a_diff(tmp_path, ckpt):
    places = tmp_path / "a", tmp_path / "b"
    for place, apart in zip(places, (0, 1), strict=True):
        arrays = {"little": 8 + apart / 8, "nan": np.nan if apart else 1, "much": 8 + apart, "other": 2.0 + apart}
        js.checkpoint.save(place, {name: np.full(3, value, np.float32) for name, value in arrays.items()})
    rows = [line.split()[0] for line in ckpt("diff", *places)[1].splitlines() if " values " in line]
    assert rows == ["nan", "other", "much", "little"]


def test_reshard_cuts_pieces_for_another_mesh_and_keeps_everything_else(run, ckpt):
    code, reported = ckpt("reshard", run / "checkpoints" / "100", "out", "--mesh", "replica=2,fsdp=4", "--json")
    assert (code, reported["mesh"]["fsdp"], reported["leaves"]) == (0, 4, 6)
    equal(run / "checkpoints" / "100", "out")
    found = manifest.read(Path("out"))
    assert (found.step, found.metrics) == (100, {"val_loss": 2.5})
    assert found.leaves["model/blocks/kernel"].chunk == (2, 4, 8)  # as it was sharded, over fewer
    assert ckpt("verify", "out")[0] == 0
    like = jax.tree.map(lambda x: x, state(seed=9))
    restored = js.checkpoint.restore("out", like=like)
    np.testing.assert_array_equal(restored["model"]["tokens"], state()["model"]["tokens"])
    assert restored["step"] == 100
    assert jax.random.key_data(restored["key"]).tolist() == jax.random.key_data(jax.random.key(0)).tolist()


def test_verify_of_files_that_are_orbaxs_compares_the_sums_of_leaves(tmp_path, monkeypatch, ckpt):
    monkeypatch.chdir(tmp_path)
    js.checkpoint.save("c", {"rows": jnp.ones((8, 8))}, format="orbax")
    code, text = ckpt("verify", "c")
    assert code == 0
    assert text.endswith("c: good, all sums are those of the save (1 leaf, 256 B).\n")


def test_reshard_of_a_value_in_front_of_an_array(tmp_path, monkeypatch, ckpt):
    """Pieces have the numbers of their leaves in the manifest, whichever of them are arrays."""
    monkeypatch.chdir(tmp_path)
    rows = np.arange(64.0, dtype=np.float32).reshape(8, 8)
    js.checkpoint.save("c", {"a step": 7, "rows": jnp.asarray(rows)})
    assert ckpt("reshard", "c", "out", "--mesh", "fsdp=2")[0] == 0
    restored = js.checkpoint.restore("out", like={"a step": 0, "rows": jnp.zeros((8, 8))})
    np.testing.assert_array_equal(restored["rows"], rows)
    assert restored["a step"] == 7


def test_reshard_by_the_annotation_of_a_model(run, ckpt):
    source = run / "checkpoints" / "100"
    assert ckpt("reshard", source, "out", "--mesh", "fsdp=2", "--model", "model.py")[0] == 0
    equal(source, "out")
    chunks = {name: leaf.chunk for name, leaf in manifest.read(Path("out")).leaves.items()}
    assert (chunks["model/blocks/kernel"], chunks["model/tokens"]) == ((1, 16, 8), (16, 8))


def test_reshard_refuses_what_is_damaged_and_leaves_nothing(run, capsys):
    folder = Path(shutil.copytree(run / "checkpoints" / "100", "c"))
    file = folder / "arrays" / "00000-000.safetensors"
    content = bytearray(file.read_bytes())
    content[5000] ^= 1
    file.write_bytes(content)
    assert cli.main(["ckpt", "reshard", "c", "out"]) == 1
    assert "model/tokens  (32, 8) float32" in capsys.readouterr().err
    assert sorted(path.name for path in Path().iterdir()) == ["c", "model.py"]
    assert cli.main(["ckpt", "export", "c", "out"]) == 1
    assert "RunError: The checkpoint is damaged: 5 findings." in capsys.readouterr().err


def test_export_and_import_under_the_names_of_others(run, ckpt):
    source = run / "checkpoints" / "100"
    code, reported = ckpt("export", source, "hf", "--model", "model.py", "--json")
    assert (code, reported["leaves"], [Path(file).name for file in reported["files"]]) == (0, 5, ["model.safetensors"])
    there, ours = SafetensorsSource("hf"), state()["model"]
    assert set(there.leaves) == {"wte.weight", "h.0.weight", "h.0.bias", "h.1.weight", "h.1.bias"}
    np.testing.assert_array_equal(there.read("h.1.weight", (slice(None),) * 2), ours["blocks"]["kernel"][1].T)

    assert ckpt("import", "hf", "back", "--model", "model.py")[0] == 0
    assert ckpt("verify", "back")[0] == 0
    restored = js.checkpoint.restore("back", like={"model": state(seed=3)["model"]})["model"]  # stacked again
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(restored), strict=True):
        np.testing.assert_array_equal(a, b)


def test_export_of_what_the_model_lacks_is_refused_unless_it_is_said(run, ckpt, capsys):
    """A model of fewer layers: the layer of a stack, and the leaves of one by one, that no one wants."""
    source = run / "checkpoints" / "100"
    one_by_one = {"tokens": jnp.ones((32, 8)), "norm": jnp.ones(3)}
    one_by_one["blocks"] = {str(n): {"kernel": jnp.ones((16, 8)), "bias": jnp.ones(8)} for n in range(2)}
    js.checkpoint.save("c", {"model": one_by_one})
    fewer = "--model", "model.py", "--set", "model.layers=1"
    lines = {
        source: ("model/blocks/bias  (2, 8): layers 1", "model/blocks/kernel  (2, 16, 8): layers 1"),
        "c": ("model/norm  (3,)", "model/blocks/1/bias  (8,)", "model/blocks/1/kernel  (16, 8)"),
    }
    for path, left in lines.items():
        assert cli.main(["ckpt", "export", str(path), "hf", *fewer]) == 2
        reported = capsys.readouterr().err
        assert f"{len(left)} leaves are left over" in reported and all(line in reported for line in left), reported
        assert "--extra ignore" in reported and not Path("hf").exists()
    assert ckpt("export", source, "hf", *fewer, "--extra", "ignore")[0] == 0
    assert set(SafetensorsSource("hf").leaves) == {"wte.weight", "h.0.weight", "h.0.bias"}


def test_every_command_knows_all_trees_of_an_orbax_composite(ckpt):
    """Orbax by itself opens one of them, and the tools showed, verified and rewrote that one alone."""
    trees = {"params": {"w": jnp.arange(16.0)}, "ema_params": {"w": jnp.arange(16.0) + 4}}
    args = orbax_v0.args
    with orbax_v0.CheckpointManager(Path("a").absolute()) as manager:
        manager.save(1, args=args.Composite(**{key: args.StandardSave(tree) for key, tree in trees.items()}))
        manager.wait_until_finished()
    assert set(ckpt("inspect", "a", "--json")[1]["leaves"]) == {"params/w", "ema_params/w"}
    assert ckpt("ls", "a", "--json")[1]["checkpoints"][0]["num_leaves"] == 2
    assert ckpt("verify", "a", "--json")[1][0]["num_leaves"] == 2
    assert ckpt("import", "a/1", "imported")[0] == 0
    restored = js.checkpoint.restore("imported", jax.tree.map(jnp.zeros_like, trees))
    jax.tree.map(np.testing.assert_array_equal, restored, trees)
    assert ckpt("diff", "a", "imported")[0] == 0
    assert ckpt("export", "a/1", "out", "--part", "ema_params")[0] == 0
    np.testing.assert_array_equal(SafetensorsSource("out").read("w", (slice(None),)), trees["ema_params"]["w"])


def written_by_the_package(name, arrays):
    Path(name).mkdir()
    save_file(arrays, f"{name}/model.safetensors")


def test_an_imported_file_is_restored_as_the_file_itself(ckpt):
    """Dots and slashes are between the keys of a path in both: no one could ask for a leaf that was called `a.b`."""
    arrays = {"layer.w": np.arange(4, dtype=np.float32), "layer.0.b": np.ones(3, np.float32)}
    written_by_the_package("c", arrays)
    like = {"layer": {"w": jnp.zeros(4), "0": {"b": jnp.zeros(3)}}}
    assert ckpt("import", "c", "out")[0] == 0
    for name in ("c", "out"):
        restored = js.checkpoint.restore(name, like)
        np.testing.assert_array_equal(restored["layer"]["w"], arrays["layer.w"])
        np.testing.assert_array_equal(restored["layer"]["0"]["b"], arrays["layer.0.b"])
    js.checkpoint.save("dots", {"a.b": {"%/": jnp.ones(2), "\\": jnp.ones(3)}})
    assert ckpt("export", "dots", "plain", "--part", "")[0] == ckpt("import", "plain", "back")[0] == 0
    equal("dots", "back")


def test_an_import_of_two_names_of_one_path_names_them_and_leaves_nothing(capsys):
    """`a/b` and `a.b` were one folder: both had the values of the one that was written last."""
    written_by_the_package("c", {name: np.full(4, n, np.float32) for n, name in enumerate(["a/b", "a.b"])})
    assert cli.main(["ckpt", "import", "c", "new/out"]) == 2
    reported = capsys.readouterr().err
    assert "a.b  and a/b: a/b" in reported and "free some space" not in reported, reported
    assert sorted(path.name for path in Path().iterdir()) == ["c", "model.py"]


@pytest.mark.usefixtures("signals_as_usual")
def test_an_import_that_fails_half_way_leaves_nothing(capsys, monkeypatch):
    """Whatever ends it: an error of Orbax, or the user."""
    written_by_the_package("c", {"a": np.ones(4, np.float32), "b": np.ones(4, np.float32)})
    read = SafetensorsSource.read
    for error, code, why in ((TypeError("odd"), 1, "TypeError: odd"), (KeyboardInterrupt(), 130, "interrupted")):

        def fails(source, name, box, error=error):
            if name == "b" and isinstance(error, KeyboardInterrupt):
                signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)  # it waits
                time.sleep(0.5)
            elif name == "b":
                raise error
            return read(source, name, box)

        monkeypatch.setattr(SafetensorsSource, "read", fails)
        assert cli.main(["ckpt", "import", "c", "new/out"]) == code
        reported = capsys.readouterr().err
        assert why in reported and "free some space" not in reported, reported
        assert sorted(path.name for path in Path().iterdir()) == ["c", "model.py"]


CONTROLS = "\x1b[31mred\x1b[0m\n  do:    rm\r\x9b2J\u202e"


def test_control_characters_in_names_do_not_reach_the_terminal(ckpt, capsys):
    """A name is on one line, as Python writes it, wherever it is printed; as JSON it is what it is."""
    reported = []
    for name, value in (("c", 1.0), ("d", 0.0)):
        written_by_the_package(name, {f"m.{CONTROLS}": np.full(4, value, np.float32), "m.b": np.ones(4, np.float32)})
        assert cli.main(["ckpt", "import", name, f"{name}.out"]) == 0
        capsys.readouterr()
        assert f"m/{CONTROLS}" in ckpt("inspect", f"{name}.out", "--json")[1]["leaves"]
        reported.append(ckpt("inspect", f"{name}.out")[1])
    reported.append(ckpt("diff", "c.out", "d.out")[1])
    with pytest.raises(CheckpointError) as caught:
        js.checkpoint.restore("c.out", {"m": {"b": jnp.zeros(4)}})
    reported.append(str(caught.value))
    file = Path("c.out/arrays/00000-000.safetensors")
    content = bytearray(file.read_bytes())
    content[4096:4112] = bytes(16)
    file.write_bytes(content)
    assert cli.main(["ckpt", "verify", "c.out"]) == 1
    reported.append(capsys.readouterr().out)
    for text in reported:
        assert r"\x1b[31mred\x1b[0m\n  do:    rm\r\x9b2J\u202e" in " ".join(text.split("\n")), text
        assert not [c for c in text if not c.isprintable() and c != "\n"], text


def test_a_whole_state_goes_to_pytorch_and_back(ckpt):
    js.checkpoint.save("c", {"model": {"0": {"w": jnp.arange(8.0)}}, "step": 7, "note": "text"})
    assert ckpt("export", "c", "dcp", "--format", "dcp", "--part", "")[0] == 0
    assert ckpt("import", "dcp", "back")[0] == 0
    equal("c", "back")


WRONG = {
    ("inspect", "c", "--below", "modle"): """\
ShardingError: There are no such leaves.
  where: --below modle
  why:   paths in {here}/c begin with a, n.
  do:    jshard ckpt inspect c --depth 1
""",
    ("reshard", "c", "d", "--mesh", "fsdp=16"): """\
ShardingError: There are not as many devices as the mesh has.
  where: --mesh fsdp=16
  why:   16 are wanted, and 8 are simulated in this process.
  do:    JAX_NUM_CPU_DEVICES=16 jshard ckpt ...
""",
    ("export", "c", "d", "--part", "", "--model", "model.py"): """\
ShardingError: The checkpoint is not of this model: 5 leaves are missing.
  where: c
         tokens
         blocks/0/kernel
         blocks/0/bias
         blocks/1/kernel
         blocks/1/bias
  why:   hf_names of model.py lists 5 leaves.
  do:    choose the recipe that has its size: --recipe NAME, or --set model.n_layer=N.
""",
    ("export", "c", "d", "--recipe", "two"): """\
ShardingError: There is a recipe, and no model file.
  where: --recipe, --set
  why:   they are of the file that --model names.
  do:    --model gpt
""",
    ("import", "nowhere", "d"): """\
CheckpointError: There is no checkpoint to import.
  where: nowhere
  why:   no such file or folder.
  do:    give a .safetensors file, or a folder: of them, with .metadata, or one that DeepSpeed or Orbax wrote.
""",
}


@pytest.mark.parametrize("arguments", WRONG, ids=" ".join)
def test_what_is_refused(arguments, tmp_path, capsys):
    js.checkpoint.save("c", {"a": jnp.ones(4), "n": 3})
    assert cli.main(["ckpt", *arguments]) == 2
    assert capsys.readouterr().err == WRONG[arguments].format(here=tmp_path)
    assert sorted(path.name for path in Path().iterdir()) == ["c", "model.py"]
