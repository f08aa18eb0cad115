"""Whatever is wrong with a request: reported in four parts, with an exit code, and nothing on the disk changes.

The texts are in tests/golden/bad_input.txt. `UPDATE_GOLDEN=1 pytest` of this file writes it again; then
read its diff.
"""

import hashlib
import os
import pathlib
import re
import shlex
import shutil
import sys

import pytest
import tokenizers

from jshard import cli
from jshard.cli import _data, _training
from jshard.cli import train as cli_train
from jshard.data.text import load_text
from jshard.train import run
from jshard.train.run import Finished
from jshard.train.run_lock import RunLock

GOLDEN = pathlib.Path(__file__).parents[1] / "golden" / "bad_input.txt"
HEAD = "=== "
TEXT = "abc defg" * 2000

MODEL = """\
from tests.micro_gpt import RECIPES, annotate, build, loss_fn
"""
# The same settings, and other layers.
WIDER = """\
import dataclasses
from tests import micro_gpt
from tests.micro_gpt import RECIPES, annotate, loss_fn
def build(config, rngs):
    return micro_gpt.build(dataclasses.replace(config, d_model=32, d_ff=192), rngs)
"""
OWN_DATA = """\
def data(recipe):
    return [1, 2, 3]
"""

SAMPLES = """\
import numpy as np
from jshard.data import Data
from tests.micro_gpt import RECIPES, annotate, build
def data(recipe):
    return Data(train=[SAMPLE] * 64, held_out=[SAMPLE] * 64, description="made up", fingerprint="made up")
"""

FILES = {
    "model.py": MODEL,
    "wider.py": WIDER,
    "own_data.py": MODEL + OWN_DATA,
    "arrays.py": SAMPLES + "SAMPLE = np.zeros(32, np.int32)\n",
    "other_keys.py": SAMPLES + "SAMPLE = {'x': np.zeros(32, np.int32), 'y': np.zeros(32, np.int32)}\n",
    "typo.py": "RECIPES = {\nbuild = None\n",
    "empty.py": "",
    "wrong_kinds.py": "RECIPES = ['tiny']\nbuild = 3\nannotate = print\n",
    "import.py": "import os\nimport flux_capacitor\n",
    "raises.py": "import os\nos.environ['NOT_THERE']\n",
    "build_raises.py": MODEL + "def build(config, rngs):\n    return {}['layers']\n",
    "losses.py": MODEL + "def loss_fn(model, batch):\n    return model(batch['inputs']).mean((1, 2))\n",
    "no_loss.py": MODEL + "def loss_fn(model, batch):\n    model(batch['inputs'])\n",
    "no_optimizer.py": MODEL
    + """
import dataclasses
from tests import micro_gpt
first = next(iter(micro_gpt.RECIPES))
class NoOptimizer(type(micro_gpt.RECIPES[first]())):
    def optimizer(self):
        return None
def recipe():
    known = micro_gpt.RECIPES[first]()
    return NoOptimizer(**{f.name: getattr(known, f.name) for f in dataclasses.fields(known)})
RECIPES = {first: recipe}
""",
    "ends.py": "raise SystemExit(0)\n",
    "bad_recipe.py": MODEL + "RECIPES = {'micro': lambda: 1 / 0}\n",
    "linen.py": "from tests.micro_linen import RECIPES, build\ndef annotate(model, mesh): ...\n",
    "not_a_recipe.py": MODEL + "RECIPES = {'micro': lambda: None}\n",
    "notes.txt": "no Python\n",
    "text.txt": TEXT,
    "empty.txt": "",
    "short.txt": "too short",
    "photo.jpg": b"\xff\xd8\xff\xe0\x00\x10JFIF",
    "secret.txt": "not to be read",
    "pictures/photo.jpg": b"\xff\xd8\xff\xe0\x00\x10JFIF",
    "tokenizer.json": '{"version": "1.0"}',
    "thesis/chapter1.tex": "years of work",
    "damaged/run.json": '{"recipe": ',
}

# Name: command line, and the exit code where it is not 2.
CASES: dict[str, str | tuple[str, int]] = {
    "command: unknown": "trian model.py",
    "init: no such model": "init gtp my.py",
    "init: no folder to write in": "init gpt text.txt/my.py",
    "init: a file that is there": "init gpt model.py",
    "option: nearly one": "train model.py --recip micro",
    "option: unknown": "train model.py --xyz=3",
    "option: no value": "train model.py --out",
    "option: one file too many": "train model.py wider.py",
    "option: no such choice": "plan model.py --options fast",
    "option: no such choice, or none": "train model.py --dtype int3",
    "option: no number": "train model.py --steps 1e3",
    "option: no number, and has a default": "plan model.py --timeout soon",
    "option: no model": "train --steps 3",
    "option: twice": "train model.py --steps 3 --recipe micro --steps=4",
    "model: missing": "train gone.py",
    "model: a name of none": "train gtp",
    "model: not Python": "train notes.txt",
    "model: syntax error": "train typo.py",
    "model: without the names": "train empty.py",
    "model: names of another kind": "train wrong_kinds.py",
    "model: imports what is not there": "train import.py",
    "model: raises an error": "train raises.py",
    "model: ends the program": "train ends.py",
    "model: a folder": "train pictures",
    "model: build raises an error": ("train build_raises.py --data text.txt", 1),
    "model: a loss for every example": "train losses.py --data text.txt",
    "model: no loss": "train no_loss.py --data text.txt",
    "model: no optimizer": "train no_optimizer.py --data text.txt",
    "model: a recipe that fails": "train bad_recipe.py",
    "model: a recipe that is none": "train not_a_recipe.py",
    "model: a Linen module, not annotated": "train linen.py --dry-run",
    "model: data that are none": "train own_data.py",
    "model: samples that are arrays": "train arrays.py",
    "model: samples of other keys, without a loss": "train other_keys.py",
    "model: data of its own, and --data": "train own_data.py --data text.txt",
    "model: refuses the length": "train model.py --data text.txt --set sequence_length=40",
    "recipe: unknown": "train model.py --recipe mikro",
    "key: unknown": "train model.py --set learning_rat=1e-3",
    "key: wrong type": "train model.py --set model.tied=maybe",
    "key: no value": "train model.py --set batch_size",
    "key: twice": "train model.py --set batch_size=8 --set batch_size=16",
    "key: twice, as an option": "train model.py --steps 5 --set num_steps=6",
    "key: refused by the model": "train model.py --set model.n_head=3",
    "steps: 0": "train model.py --steps 0",
    "recipe: numbers out of range": "train model.py --seed -1 --set learning_rate=-1 --set checkpoint_every=0",
    "recipe: average out of range": "train model.py --set ema_decay=1 --set ema_dtype=int8 --set ema_start_step=-1",
    "recipe: early stopping out of range": "train model.py --set patience=0 --set min_delta=-1 --set keep_best=-1",
    "recipe: no such metric": "train model.py --data text.txt --set monitor=val_acuracy",
    "recipe: microbatches": "train model.py --set accumulate=3",
    "mesh: not readable": "train model.py --mesh fsdp:8",
    "mesh: no such axis": "train model.py --mesh data=8",
    "mesh: an axis twice": "train model.py --mesh fsdp=4,fsdp=2",
    "mesh: degree 0": "train model.py --mesh fsdp=0",
    "mesh: too few devices": "train model.py --mesh fsdp=4",
    "mesh: does not divide": "train model.py --mesh replica=3",
    "mesh: two open axes": "train model.py --mesh replica=-1,fsdp=-1",
    "batch: does not divide": "train model.py --data text.txt --set batch_size=12",
    "batch: microbatches do not divide": "train model.py --data text.txt --set accumulate=4",
    "data: unreadable": "train model.py --data secret.txt",
    "data: a folder without text": "train model.py --data pictures",
    "data: several": "train model.py --data nowhere empty.txt photo.jpg text.txt",
    "data: shorter than a sequence": "train model.py --data short.txt",
    "tokenizer: missing": "train model.py --data text.txt --tokenizer gone.json",
    "tokenizer: garbled": "train model.py --data text.txt --tokenizer tokenizer.json",
    "tokenizer: larger than the model": "train model.py --data text.txt --tokenizer words.json",
    "tokenizer: bytes, and fewer in the model": "train model.py --data text.txt --set model.vocab_size=100",
    "out: a file": "train model.py --data text.txt --out text.txt",
    "out: another run": "train model.py --data text.txt --out run",
    "out: files of somebody else": "train model.py --data text.txt --out thesis",
    "out: files of somebody else, resumed": "train model.py --data text.txt --out thesis --resume",
    "out: a live run": ("train model.py --data text.txt --out live", 1),
    "resume: a live run": ("train model.py --data text.txt --out live --resume", 1),
    "resume: damaged record": "train model.py --out damaged --resume",
    "resume: another model": "train model.py --out run --resume --set model.n_layer=3 --set model.d_model=32",
    "resume: other data": "train model.py --out run --resume --data other.txt",
    "resume: other layers in the file": "train wider.py --out run --resume --steps 4",
    "workers: fewer than none": "train model.py --data text.txt --workers -1",
    "tracker: unknown": "train model.py --data text.txt --track tensorbord",
    "profile: not readable": "train model.py --profile ten --steps 20",
    "profile: no step between": "train model.py --profile 3:3",
    "profile: beyond the end": "train model.py --profile 2:9 --steps 8",
    "trace: a page that is a folder": "trace run --html pictures",
    "plan: a page without a cluster": "plan model.py --html plan.html",
    "plan: no such device": "plan model.py --topology h10:1x8",
    "plan: another number of devices": "plan model.py --topology h100:1x8 --mesh fsdp=4",
    "plan: batch does not divide": "plan model.py --topology h100:4x8",
    "plan: estimates without a cluster": "plan model.py --auto --assume latency_s=1e-5",
    "plan: no such strategy": "plan model.py --topology h100:1x8 --compare zero3,ddp",
    "plan: no such assumption": "plan model.py --topology h100:1x8 --assume matmul_efficiency=70",
    "plan: no target": "plan model.py --target fast --topology h100:1x8",
    "plan: a figure that is none": "plan model.py --target 'samples/s >= 5' --topology h100:1x8",
    "plan: a rate that is the most": "plan model.py --target 'tokens/s <= 2e6' --topology h100:1x8",
    "plan: a unit that is none": "plan model.py --target 'step <= 2 weeks' --topology h100:1x8",
    "plan: a limit that is none": "plan model.py --target 'step <= 0' --topology h100:1x8",
    "plan: a target without a cluster": "plan model.py --target 'step <= 2'",
    "plan: a target and a budget": "plan model.py --target 'step <= 2' --budget 24h --topology h100:1x8",
    "plan: a target, compiled": "plan model.py --target 'step <= 2' --auto --topology h100:1x8",
    "plan: no budget": "plan model.py --budget 512xh100",
    "plan: a budget without devices": "plan model.py --budget 24h",
    "plan: a budget with two clusters": "plan model.py --budget 8xh100:24h --topology h100:1x8",
    "plan: a budget of a part of a host": "plan model.py --budget 12xh100:24h",
    "plan: a budget of TPU chips": "plan model.py --budget 64xv5p:24h",
    "plan: a budget of no such device": "plan model.py --budget 8xh10:24h",
    "plan: a price of nothing in particular": "plan model.py --price 2",
    "plan: a price that is none": "plan model.py --price 0 --budget 8xh100:24h",
    "plan: the length twice": "plan model.py --tokens 1e9 --steps 3 --budget 8xh100:24h",
    "plan: no assumption about failures": "plan model.py --budget 8xh100:24h --assume mtbf=3",
    "plan: a unit's setting twice": "plan model.py --unit remat=full --unit remat=dots",
    "processes: do not divide": "train model.py --processes 3",
    "processes: no time to meet": "train model.py --processes 2 --init-timeout 0",
    "sample: no run": "sample thesis",
    "eval: a file": "eval text.txt",
    "config: a folder": "plan model.py --config pictures",
    "sample: no prompt": "sample run --prompt ''",
    "sample: no such draw": "sample run --temperature -1",
    "eval: not the data of the run": "eval run --tokenizer words.json",
    "eval: no average of the weights": "eval run --weights ema",
    "export: no average of the weights": "ckpt export run hf --weights ema",
    "export: an average of no weights": "ckpt export run hf --weights ema --part optimizer",
    "export: two kinds of names": "ckpt export run hf --model model.py --own-names",
}


def write_tokenizer(path, words=300):
    """A tokenizer file with so many words."""
    vocabulary = {"[UNK]": 0} | {f"word{number}": number for number in range(1, words)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.save(str(path))


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """A working folder with good and bad files."""
    for name, content in FILES.items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    (tmp_path / "other.txt").write_text(TEXT.upper())
    write_tokenizer(tmp_path / "words.json")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", sys.path[:])
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    monkeypatch.delenv("JSHARD_DEBUG", raising=False)
    monkeypatch.setattr(pathlib.Path, "read_bytes", _readable(pathlib.Path.read_bytes))  # chmod does not stop root
    return tmp_path


def _readable(read_bytes):
    def read(path):
        if path.name == "secret.txt":
            raise PermissionError(13, "Permission denied", str(path))
        return read_bytes(path)

    return read


@pytest.fixture(scope="module")
def finished_run(tmp_path_factory):
    """A run of two steps of a model with one layer, which compiles sooner."""
    folder = tmp_path_factory.mktemp("begun")
    (folder / "model.py").write_text(MODEL)
    (folder / "text.txt").write_text(TEXT)
    arguments = [*"--steps 2 --set model.n_layer=1 --track --data".split(), str(folder / "text.txt")]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "path", sys.path[:])
        assert cli.main(["train", str(folder / "model.py"), *arguments, "--out", str(folder / "run")]) == 0
    return folder / "run"


@pytest.fixture
def end(folder, capsys, request):
    """Runs a command line; its exit code and what it says on stderr."""

    def run(line):
        if "run" in shlex.split(line):
            shutil.copytree(request.getfixturevalue("finished_run"), folder / "run")
            capsys.readouterr()
        if "live" in shlex.split(line):
            (folder / "live").mkdir()
            request.addfinalizer(RunLock(folder / "live" / ".lock").release)
        before = contents(folder)
        code = cli.main(shlex.split(line))
        end.changed = {path for path, content in (contents(folder).items() ^ before.items())}
        return code, capsys.readouterr().err

    end = run
    return run


def contents(folder):
    """Every path in a folder, and for files a hash of what is in it; a lock says who asked last."""
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() if _is_read(path) else ""
        for path in folder.rglob("*")
    }


def _is_read(path):
    return path.is_file() and path.name not in ("secret.txt", ".lock")


def normalised(text, folder):
    """The text without what differs from machine to machine."""
    begun = re.escape(str(folder.parent)) + r"/begun\d+"
    text = re.sub(begun, "BEGUN", text.replace(str(folder), "FOLDER"))
    text = re.sub(r"process \d+ on \S+", "process PID on HOST", text)
    text = re.sub(r"`tokenizers` cannot read it: .*", "`tokenizers` cannot read it: ITS WORDS", text)
    return re.sub(r"words\.json \w{8}", "words.json CRC", text).rstrip("\n")


def golden(path=GOLDEN):
    parts = path.read_text().split(HEAD)[1:]
    return {name: text.rstrip("\n") for name, _, text in (part.partition("\n") for part in parts)}


@pytest.mark.parametrize("name", CASES)
def test_text(name, end, folder):
    line, code = CASES[name] if isinstance(CASES[name], tuple) else (CASES[name], 2)
    found_code, error = end(line)
    found = f"$ jshard {line}\nexit code {found_code}\n{normalised(error, folder)}"
    if "UPDATE_GOLDEN" in os.environ:
        texts = (golden() if GOLDEN.exists() else {}) | {name: found}
        GOLDEN.write_text("".join(f"{HEAD}{n}\n{texts[n]}\n\n" for n in CASES if n in texts))
    assert found_code == code
    assert end.changed == set()
    assert found == golden()[name]


def test_the_texts_have_their_form():
    """What in one sentence; where, why and do, none of them empty; and nothing else. No text is left over."""
    assert list(golden()) == list(CASES)
    for text in golden().values():
        lines = text.splitlines()
        assert re.fullmatch(r"\w+Error: [^.]+\.", lines[2])
        heads = [line[:9].strip() for line in lines[3:]]
        assert [head for head in heads if head] == ["where:", "why:", "do:"]
        assert all(len(line) > 9 for line in lines[3:])


def test_a_finished_run_that_is_resumed_says_so(folder, finished_run, capsys):
    shutil.copytree(finished_run, folder / "run")
    capsys.readouterr()
    before = contents(folder)
    assert cli.main(["train", "model.py", "--out", "run", "--resume", "--track", "--steps", "1"]) == 0
    reported = "nothing is left to train: 2 steps are done, and 1 were requested; --steps 4 continues it."
    assert reported in capsys.readouterr().out.splitlines()
    changed = {path for path, _ in contents(folder).items() ^ before.items()}
    assert changed <= {"run/loss.png"}


def groups(words):
    """Options, each with the values that follow it; the command and its files come first."""
    found = [[]]
    for word in words:
        if word.startswith("--"):
            found.append(word.split("=", 1))
        else:
            found[-1].append(word)
    return found


def replaces(option, other):
    """Whether a command line has place for only one of them."""
    keys = [
        (name, *(value.partition("=")[0] for value in values[:1] if name in ("--set", "--unit")))
        for name, *values in (option, other)
    ]
    return keys[0] == keys[1]


def pasted(text):
    """The command lines that come of pasting what a golden text says to do: options into its own, commands as such."""
    line = text.splitlines()[0].removeprefix("$ jshard ")
    places, do = (
        re.search(rf"^  {head}:  ?(.*\n(?: {{9}}.*\n)*)", text + "\n", re.MULTILINE)[1] for head in ("where", "do")
    )
    lines = [one.partition(" > ")[0] for one in do.splitlines()]  # without the file that a shell writes
    said = [shlex.split(one, comments=True) for one in lines if one.strip().startswith(("--", "jshard "))]
    options = [group for words in said if words[0] != "jshard" for group in groups(words)[1:]]
    wrong = [group for place in places.splitlines() if "--" in place for group in groups(shlex.split(place))[1:]]
    begin, *given = groups(shlex.split(line))
    kept = [
        group
        for group in given
        if group not in wrong and [group[0]] not in wrong and not any(replaces(group, option) for option in options)
    ]
    mended = [[*begin, *(word for group in (*kept, *options) for word in group)]] if options else []
    return [*mended, *(words[1:] for words in said if words[0] == "jshard")]


def all_pasted():
    texts = golden() | {
        f"occupancy, {name}": text
        for name, text in golden(GOLDEN.with_name("occupancy_errors.txt")).items()
        if text[:8] == "$ jshard"
    }
    del texts["occupancy, command: much at once"]  # what it says is prose
    del texts["trace: a page that is a folder"]  # its run has no profile
    return [
        pytest.param(words, id=f"{name}: {shlex.join(words)}")
        for name, text in texts.items()
        for words in pasted(text)
        # --topology needs the compiler of GPUs, --budget a search, and BEGUN is a folder of another test's.
        if not any(word.startswith(("--topology", "--budget", "BEGUN")) for word in words)
    ]


class Unbegun:
    """A run that was accepted, and is not trained."""

    def __init__(self, *, folder, **rest):
        self.out = folder.path

    def run(self, *how):
        return Finished(step=0, out=self.out, checkpoint=None, sample=None)


@pytest.mark.parametrize("words", all_pasted())
def test_what_an_error_says_to_do_is_accepted_when_it_is_pasted(words, end, monkeypatch):
    monkeypatch.setattr(run, "TrainingRun", Unbegun)
    monkeypatch.setattr(_training, "explained", lambda *request: "")
    monkeypatch.setattr(_training, "summary", lambda *run: [])
    monkeypatch.setattr(_data, "load_text", lambda paths, **how: load_text(paths or [pathlib.Path("text.txt")], **how))
    monkeypatch.setattr(cli_train.launch, "supervise", lambda *command, **how: 0)
    try:
        code, error = end(shlex.join(words))
    except SystemExit as stop:  # the help
        code, error = stop.code, ""
    assert code == 0, error
