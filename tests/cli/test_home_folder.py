"""`~` at the beginning of a path is the home folder: in every command and wherever Python takes a path.

A shell expands it only at the beginning of a word: not in `--out=~/runs`, and not in a configuration.
"""

import json
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from jshard import checkpoint, cli
from jshard._paths import expanded
from jshard.checkpoint import Checkpointer
from jshard.checkpoint.formats import foreign_source, write_safetensors
from jshard.cli._arguments import TrainArgs, parse
from jshard.cli.ckpt.export import ExportArgs
from jshard.cli.plan import PlanArgs
from jshard.data import load_text
from jshard.errors import ShardingError
from jshard.inspect.profile import find_profile
from jshard.recipes.model_file import load_model_file
from jshard.train.records import Jsonl, read_metrics
from jshard.train.run_folder import RunFolder
from tests.checkpoint.checkpoint_states import Held


@pytest.fixture
def home(tmp_path, monkeypatch):
    """A home folder, and another, empty folder to work in; a folder named `~` must not appear there."""
    (tmp_path / "home").mkdir()
    (tmp_path / "work").mkdir()
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path / "work")
    yield tmp_path / "home"
    assert list((tmp_path / "work").iterdir()) == []


def test_python(home):
    state = {"w": jnp.ones(3)}
    checkpoint.save("~/c", state)
    assert (home / "c" / "jshard.json").is_file()
    assert checkpoint.restore(Path("~/c"), state)["w"].tolist() == [1, 1, 1]
    assert checkpoint.verify("~/c").is_good
    Checkpointer("~/series").save(1, state)
    assert (home / "series" / "1").is_dir()
    write_safetensors("~/s", Held({"w": np.ones(3, np.float32)}))
    assert foreign_source("~/s/model.safetensors").leaves.keys() == {"w"}
    assert checkpoint.restore("~/s/model.safetensors", state)["w"].tolist() == [1, 1, 1]
    metrics = Jsonl("~/metrics.jsonl")
    metrics.log(1, {"loss": 1.0})
    metrics.close()
    assert read_metrics("~/metrics.jsonl")[0]["loss"] == 1
    (home / "text.txt").write_text("abcdefgh" * 1000)
    assert "text" in load_text(["~/text.txt"], sequence_length=8).description
    (home / "run").mkdir()
    (home / "run" / "run.json").write_text("{}")
    assert RunFolder.holds_run("~/run") and RunFolder.free_name("~", "run") == home / "run-2"
    for read in (load_model_file, find_profile):
        with pytest.raises(ShardingError) as caught:
            read("~/nothing.py")
        assert str(home / "nothing.py") in str(caught.value)


def test_commands(home, capsys):
    words = "gpt --out=~/runs/a --data=~/a.txt --init-from=~/b --tokenizer=~/t.json --expect=~/p.json".split()
    args = parse(TrainArgs, words, command="jshard train")
    assert (args.out, args.init_from, args.data) == (home / "runs" / "a", home / "b", (home / "a.txt",))
    assert (args.tokenizer, args.expect, args.model) == (home / "t.json", home / "p.json", Path("gpt"))
    (home / "a.json").write_text(json.dumps({"out": "~/runs/b"}))
    args = parse(TrainArgs, ["gpt", "--config=~/a.json"], command="jshard train")
    assert args.out == home / "runs" / "b"
    assert parse(ExportArgs, ["~/c", "~/d"], command="jshard ckpt export").out == home / "d"
    assert parse(PlanArgs, ["~/m.py", "--html=~/p.html"], command="jshard plan").html == home / "p.html"
    checkpoint.save("~/c", {"w": jnp.ones(3)})
    assert cli.main(["ckpt", "ls", "~/c"]) == 0 and str(home / "c") in capsys.readouterr().out
    assert cli.main(["ckpt", "export", "~/c", "~/d", "--part="]) == 0
    assert (home / "d" / "model.safetensors").is_file()


def test_an_unknown_user_and_a_tilde_elsewhere_stay(home):
    here = Path.cwd()
    found = [expanded(expanded(path)) for path in ("~unknown-user/a", "a/~", "./~/b")]
    assert found == [here / "~unknown-user" / "a", Path("a/~"), here / "~" / "b"]
    for words in (["./~/b", "./~/c"], ["~/b", "--own-names", "./~/c"]):
        assert parse(ExportArgs, words, command="jshard ckpt export").out == here / "~" / "c"
    assert parse(TrainArgs, ["gpt", "--out=./~/c"], command="jshard train").out == here / "~" / "c"
