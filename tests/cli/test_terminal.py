"""What a terminal shows: tables of its width, in its colours; what is at work and for how long; no noise of CUDA."""

import fcntl
import io
import os
import pty
import re
import struct
import subprocess
import sys
import termios
import time

import pytest
from rich.console import Console

import jshard as js
from jshard import _compat, cli
from jshard._live import at_work, took
from jshard.cli import plan as plan_command
from jshard.inspect.tables import FittedTable, printed, show, width
from tests.cli.test_cli import read_terminal
from tests.cli.test_cli_plan import folder  # noqa: F401
from tests.cluster.fake_compiler import Compiler, step_of
from tests.compiling import environment
from tests.helpers import Config, abstract
from tests.train.test_train_progress import Terminal


def rendered(thing, columns):
    """Its lines on a console of some width."""
    console = Console(file=io.StringIO(), width=columns)
    console.print(thing, crop=False)
    return [line.rstrip() for line in console.file.getvalue().splitlines()]


def words(lines):
    return {word for line in lines for word in line.split() if "─" not in word}


# ---- tables -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("columns", [80, 140])
def test_a_table_takes_the_width_of_the_terminal_and_breaks_no_word_and_no_number(columns):
    found = js.explain(abstract(Config(layers=12), js.mesh(replica=2)), leaves=True)
    lines = rendered(found, columns)
    assert max(map(len, lines)) <= columns
    assert words(lines) - set("Left out at this width: kind.".split()) <= words(rendered(found, 400))
    numbers = re.findall(r"[\d.]+ [KMG]iB", "\n".join(rendered(found, 400)))
    assert re.findall(r"[\d.]+ [KMG]iB", "\n".join(lines)) == numbers  # each in one line with its unit


def test_where_room_is_short_columns_are_left_out_by_their_marks_and_named():
    table = FittedTable("", ["name", "kind?", "where??", "bytes>"], "A caption.")
    table.add_row("attention_of_layer", "float32", "x" * 20, "12,345,678 B")
    assert "A caption." in rendered(table, 80) and "float32" in words(rendered(table, 80))
    assert rendered(table, 50)[-1] == "A caption. Left out at this width: where."
    narrow = rendered(table, 36)
    assert " ".join(narrow[-2:]) == "A caption. Left out at this width: kind, where."
    assert any("attention_of_layer  12,345,678 B" in line for line in narrow)


def test_elsewhere_than_on_a_terminal_it_is_plain_text_of_one_width(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "50")
    monkeypatch.setenv("TERM", "xterm-256color")
    assert width() == 110
    show("word " * 60, FittedTable("title", ["a"]))
    said = capsys.readouterr().out
    assert said.startswith("word " * 60 + "\n") and "\x1b" not in said


@pytest.mark.parametrize(
    ("variables", "code"), [({}, "\x1b[1;31m"), ({"NO_COLOR": "1"}, "\x1b[1m"), ({"TERM": "dumb"}, "")]
)
def test_a_terminal_has_colours_where_it_and_its_user_want_them(monkeypatch, variables, code):
    for name, value in ({"COLUMNS": "50", "TERM": "xterm-256color"} | variables).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "stdout", terminal := Terminal())
    table = FittedTable("", ["a"])
    table.add_row("cell", style="bold red")
    show(table, "some words " * 9)
    said = terminal.getvalue()
    assert f"{code}cell" in said and ("\x1b" in said) == bool(code)
    assert max(len(re.sub(r"\x1b\[[\d;]*m", "", line)) for line in said.splitlines()) <= 80  # a dumb one has no width
    assert "\x1b" not in printed(table)  # for a file or a page


@pytest.mark.wide
def test_a_command_on_a_terminal_of_80_columns(folder):  # noqa: F811
    mine, its = pty.openpty()
    fcntl.ioctl(its, termios.TIOCSWINSZ, struct.pack("HHHH", 50, 80, 0, 0))
    variables = {name: value for name, value in environment().items() if name not in ("COLUMNS", "NO_COLOR")}
    process = subprocess.Popen(
        [sys.executable, "-m", "jshard", "plan", "my_model.py"],
        cwd=folder,
        env=variables | {"TERM": "xterm-256color"},
        stdin=its,
        stdout=its,
        stderr=its,
    )
    os.close(its)
    said, code = read_terminal(mine), process.wait()
    os.close(mine)
    assert code == 0, said
    assert "\x1b[1m" in said  # bold
    shown = re.sub(r"\x1b\[[\d;]*[mK]", "", said).replace("\n", "\r").split("\r")
    assert "Memory of one device" in {line.strip() for line in shown}
    assert max(map(len, shown)) == 80  # a rule of a table


def test_the_sentences_of_an_error_end_their_lines_between_words_and_what_is_to_be_pasted_stays_whole(monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.setattr(sys, "stderr", terminal := Terminal())
    assert (
        cli.main(["plan", "my_model.py", "--html", "a_folder/that_is_not_there/plan.html", "--topology=h100:1x8"]) == 2
    )
    assert terminal.shown[:-1] == [
        "ShardingError: The file cannot be",
        "written.",
        "  where: --html a_folder/that_is_not_there/plan.html",
        "  why:   there is no folder",
        f"         {os.getcwd()}/a_folder/that_is_not_there.",
        "  do:    mkdir -p a_folder/that_is_not_there",
    ]


# ---- what is at work --------------------------------------------------------------------------------------------


def test_a_terminal_shows_what_is_at_work_and_for_how_long_and_then_what_it_took(monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    terminal, said = Terminal(), []

    def shows(form):
        while not re.fullmatch(form, terminal.shown[-1]):
            time.sleep(0.01)

    with at_work("compiling the step", say=said.append, stream=terminal, every_s=0.01) as work:
        shows(r"compiling the step \.\.\. \d+ s")
        shows(r"compiling the step \.\.\. [1-9]\d* s")  # a second later
        work.what = "compiling " + 9 * "a long name "
        shows(r"compiling a long name a long \w+… \.\.\. \d+ s")
        assert max(map(len, terminal.shown)) == 39 and said == []
        work.result = "fits"
    assert terminal.shown == [""]  # it is said by a line that stays
    assert len(said) == 1 and re.fullmatch(r"compiling (a long name ){9}: .* s, fits", said[0])


def test_elsewhere_a_line_at_the_begin_and_one_at_the_end_and_work_that_is_interrupted_says_so():
    said = []
    with at_work("compiling the step", say=said.append, stream=io.StringIO(), every_s=0.01):
        time.sleep(0.05)
    with pytest.raises(KeyboardInterrupt), at_work("compiling", say=said.append, stream=None):
        raise KeyboardInterrupt
    assert said[0] == "compiling the step ..." and re.fullmatch(r"compiling the step: .* s", said[1])
    assert len(said) == 4 and re.fullmatch(r"compiling: stopped after .* s", said[3])


def test_long_work_in_a_log_is_mentioned_again_and_again_but_ever_more_rarely():
    said = []
    with at_work("compiling", say=said.append, stream=io.StringIO(), plain_first_s=0.02):
        while len(said) < 4:
            time.sleep(0.01)
    assert said[0] == "compiling ..." and said[1:4] == ["compiling ... 0 s so far"] * 3
    assert re.fullmatch(r"compiling: .* s", said[-1])


def test_short_work_that_need_not_be_mentioned_is_not():
    said = []
    with at_work("planning", say=said.append, stream=io.StringIO(), quiet_s=60.0):
        pass
    assert said == []


@pytest.mark.parametrize("arguments", [[], ["ckpt"]])
@pytest.mark.parametrize("columns", [40, 60, 80, 100, 120])
def test_the_list_of_commands_fits_the_terminal_with_whole_words(columns, arguments, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", str(columns))
    assert cli.main(arguments) == 2
    lines = capsys.readouterr().err.splitlines()
    assert max(map(len, lines)) <= columns
    monkeypatch.setenv("COLUMNS", "1000")
    cli.main(arguments)
    assert " ".join(lines).split() == capsys.readouterr().err.split()


def test_times_in_words():
    assert [took(s) for s in (0, 0.0, 1.26, 9.96, 12, 185.4)] == ["0 s", "0.0 s", "1.3 s", "10 s", "12 s", "3 min 05 s"]


def test_a_comparison_that_is_interrupted_shows_what_is_done(folder, monkeypatch, capsys):  # noqa: F811
    """After one of three strategies."""

    def compiled(asked, **_):
        if len(compiler.asked) > 1:
            raise KeyboardInterrupt
        return step_of(asked, peak_bytes=2**33)

    compiler = Compiler(monkeypatch, compiled)
    monkeypatch.setattr(plan_command, "compile_step", lambda asked, **_: step_of(asked, peak_bytes=2**33))
    monkeypatch.setattr(plan_command, "require_compiler", lambda platform: None)
    asked = ["plan", "my_model.py", "--topology", "h100:1x8", "--compare", "zero3,zero2,replicate"]
    assert cli.main(asked) == 130
    said = capsys.readouterr()
    assert "\nfits: 8.0 GiB of 79.1\n" in said.out  # what was asked for
    assert "Side by side" in said.out and said.out.count("\n as asked* ") == said.out.count("\n zero3 ") == 1
    assert "\n zero2 " not in said.out
    assert "\n[2 of 3] " in said.err and ": stopped after " in said.err and "interrupted" in said.err


# ---- a CUDA plugin, and no GPU ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("devices", "platforms", "useless"),
    [
        (["null", "dri"], None, True),
        ([], "tpu,cpu", True),
        ([], "cpu, gpu", False),
        (["nvidia3"], None, False),
        (["dxg"], None, False),
    ],
)
def test_cuda_is_useless_where_no_gpu_is_visible_and_none_is_asked_for(tmp_path, devices, platforms, useless):
    for name in devices:
        (tmp_path / name).touch()
    variables = {} if platforms is None else {"JAX_PLATFORMS": platforms}
    assert _compat.CUDA.are_useless(variables, devices=str(tmp_path)) is useless


def test_rocm_is_useless_without_a_device_of_amds_driver(tmp_path):
    assert _compat.ROCM.are_useless({}, devices=str(tmp_path))
    assert not _compat.ROCM.are_useless({"JAX_PLATFORMS": "rocm"}, devices=str(tmp_path))
    (tmp_path / "kfd").touch()
    assert not _compat.ROCM.are_useless({}, devices=str(tmp_path)) and _compat.CUDA.are_useless(
        {}, devices=str(tmp_path)
    )


NOISE = "print('Could not find cuda drivers', file=__import__('sys').stderr)\n"


@pytest.fixture
def loud_plugin(tmp_path):
    """Variables of a process that finds plugins for CUDA and ROCm which do what JAX's do without a GPU."""
    for name, code in {
        "jax_cuda12_plugin/__init__.py": NOISE,
        "jax_plugins/xla_cuda12/__init__.py": NOISE + "def initialize(): raise RuntimeError('Unable to load CUDA.')\n",
        "jax_plugins/xla_rocm7/__init__.py": "def initialize(): raise ValueError('No AMD GPUs were found')\n",
    }.items():
        path = tmp_path / "plugin" / name
        path.parent.mkdir(parents=True)
        path.write_text(code)
    variables = {name: value for name, value in environment().items() if name != "JAX_PLATFORMS"}
    return variables | {"PYTHONPATH": os.pathsep.join([str(tmp_path / "plugin"), *filter(None, sys.path)])}


@pytest.mark.skipif(not all(vendor.are_useless({}) for vendor in (_compat.CUDA, _compat.ROCM)), reason="a GPU is here")
def test_plugins_without_a_gpu_are_not_loaded_by_a_command(folder, loud_plugin):  # noqa: F811
    command = [sys.executable, "-m", "jshard", "train", "my_model.py", "--dry-run"]
    done = subprocess.run(command, env=loud_plugin, cwd=folder, capture_output=True, text=True, timeout=600)
    assert (done.returncode, done.stderr) == (0, "")
