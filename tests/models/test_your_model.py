"""docs/your_model.md and the two pages after it, followed to the letter in one folder: files are written, commands run.

The first line of a Python block names its file. In a console block a line after `$` is a command, `...` stands for
whatever is shown there, and `^C` is pressed when the lines before it are shown. Numbers may differ from those on the
page, the rest may not.
"""

import dataclasses
import json
import os
import pathlib
import re
import signal
import subprocess
import sys

import pytest

from tests import compiling

PAGES = [
    pathlib.Path(__file__).parents[2] / "docs" / name for name in ("your_model.md", "loss_and_data.md", "own_loop.md")
]
NUMBER = r"\d+(?:[.,:]\d+)*(?:e[+-]?\d+)?"


@dataclasses.dataclass
class Done:
    """A command of the pages after it was run, and the folder's files at that time."""

    command: str
    shown: str
    code: int
    files: set[str]


def steps_of(text):
    """(file name, whether it continues, content) and (command, lines shown), in the order of the page."""
    for kind, block in re.findall(r"^```(python|console)\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
        if kind == "python":
            name, continued = re.match(r"# (\w+\.py)(, continued)?\n", block).groups()
            yield name, bool(continued), block
        else:
            for part in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
                command, _, shown = part.partition("\n")
                yield command, shown.splitlines()


def pattern(lines):
    """A regular expression for what a command shows."""
    return "".join(r"(?:.*\n)*?" if line == "..." else line_pattern(line) + r"\s*\n" for line in lines)


def line_pattern(line):
    found = re.split(rf"(\.\.\.|{NUMBER}|\s+)", line)
    kinds = {"...": ".*"}
    return "".join(
        kinds.get(part) or (NUMBER if part[:1].isdigit() else r"\s+" if part.isspace() else re.escape(part))
        for part in found
    )


def run(command, lines, *, cwd, env):
    """Runs a command as a terminal does, with Ctrl-C where the page says so."""
    before = lines[: lines.index("^C")] if "^C" in lines else None
    with subprocess.Popen(
        ["sh", "-c", f"exec {command}"],
        cwd=cwd,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as process:
        shown = ""
        try:
            for line in process.stdout:
                shown += line
                if before is not None and re.match(pattern(before), shown):
                    os.killpg(process.pid, signal.SIGINT)
                    before = None
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)
            raise
    files = {path.relative_to(cwd).as_posix() for path in cwd.rglob("*")}
    return Done(command, shown, process.returncode, files)


def follow(folder, env):
    """Everything on the pages, in order."""
    for step in steps_of("\n".join(page.read_text() for page in PAGES)):
        if len(step) == 3:
            name, continued, content = step
            assert (folder / name).exists() == continued, f"{name}: a file is written once, and then continued"
            with (folder / name).open("a") as file:
                file.write("\n\n" * continued + content)
        else:
            done = run(*step, cwd=folder, env=env)
            lines = [line for line in step[1] if line != "^C"]
            wanted = pattern(lines) or r"(?:.*\n)*"
            assert re.fullmatch(wanted, done.shown), f"$ {done.command}\n{done.shown}\n--- the page says\n{step[1]}"
            yield done


def environment(folder):
    """That of a user with `jshard` and `python` on the path, who sets nothing.

    Programs are soon compiled, and equal ones once.
    """
    bin_folder = folder / "bin"
    bin_folder.mkdir()
    for name, program in {"jshard": "-m jshard ", "python": ""}.items():
        (bin_folder / name).write_text(f'#!/bin/sh\nexec {sys.executable} {program}"$@"\n')
        (bin_folder / name).chmod(0o755)
    found = compiling.environment(programs=folder / "compiled")
    kept = {k: v for k, v in found.items() if not k.startswith(("JSHARD_", "COLUMNS"))}
    return kept | {"PATH": f"{bin_folder}{os.pathsep}{os.environ['PATH']}"}


@pytest.mark.wide
@pytest.mark.timeout(1200)  # a dozen commands; about a minute on two idle cores
@pytest.mark.usefixtures("signals_as_usual")  # what the test starts inherits an ignored signal
def test_the_pages_are_true(tmp_path):
    folder = tmp_path / "empty"
    folder.mkdir()
    done = list(follow(folder, environment(tmp_path)))

    codes = {each.command: each.code for each in done if each.code}
    assert list(codes.values()) == [130, 2]
    assert codes["jshard train my_model.py --set model.num_layer=2"] == 2

    # A dry run writes nothing; a run what the page lists.
    dry_run = next(each for each in done if "--dry-run" in each.command)
    assert not {name for name in dry_run.files if name.startswith("runs")}
    out = folder / "runs" / "my_model-small"
    names = {path.name for path in out.iterdir() if path.name[0] != "."}
    assert names - {"tensorboard"} == {"checkpoints", "loss.png", "metrics.jsonl", "run.json", "sample.txt"}
    assert numbers_in(out / "checkpoints") == {20, 30, 40}

    # Ctrl-C saves the step at work, and the next run begins there.
    stopped = next(each for each in done if each.code == 130)
    step = int(re.search(r"stopped by SIGINT after step (\d+):", stopped.shown)[1])
    assert 1 <= step < 40
    resumed = next(each for each in done if "--resume" in each.command)
    assert f"resumed from runs/my_model-small-2/checkpoints/{step}\n" in resumed.shown

    # Equal losses: to the last bit after a stop and with workers, to rounding in two processes.
    compared = [each.shown.split() for each in done if "compare.py" in each.command]
    assert [int(words[0]) for words in compared] == [40, 30, 30]
    differences = [float(words[-1]) for words in compared]
    assert differences[:2] == [0.0, 0.0]
    assert differences[2] < 1e-5

    # --print-config is JSON, with the settings in it.
    config = json.loads(next(each.shown for each in done if "--print-config" in each.command))
    assert config["recipe"]["model"]["num_layers"] == 2
    assert config["recipe"]["learning_rate"] == 0.003

    # The script's own loops: the second continues where the first ended.
    (script,) = [each.shown for each in done if each.command == "python fit.py" and "after step 20" in each.shown]
    assert "began after step 20, ended after step 30\n" in script
    assert numbers_in(folder / "checkpoints") == {20, 30}
    rows = [line.split(",") for line in (folder / "losses.csv").read_text().splitlines()]
    assert [int(step) for step, _ in rows] == list(range(21, 31))
    assert float(rows[-1][1]) < 0.6  # a guess at random has 2.3


def numbers_in(folder):
    return {int(path.name) for path in folder.iterdir() if path.name.isdecimal()}


@pytest.mark.parametrize(
    ("lines", "shown", "fits"),
    [
        (["a 1.5", "..."], "a 2,000\nb\nc\n", True),
        (["a 1.5"], "a 2,000\nb\n", False),
        (["a ... ms"], "a b c ms\n", True),
        (["a", "...", "d"], "a\nd\n", True),
        (["loss 1.0"], "loss nan\n", False),
        (["a.b"], "axb\n", False),
    ],
)
def test_what_fits_the_page(lines, shown, fits):
    """The test above can fail: only numbers and what stands for `...` are free."""
    assert bool(re.fullmatch(pattern(lines), shown)) is fits
