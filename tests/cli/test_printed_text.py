"""Text from elsewhere is printed, and never obeyed: no control character of it reaches a terminal or a log."""

import ast
import io
import re
import sys
from pathlib import Path

import jax.numpy as jnp
import pytest
from rich.console import Group
from rich.text import Text

import jshard as js
from jshard import cli
from jshard._live import LiveLine
from jshard.cli._output import remark
from jshard.inspect.tables import made_table, printed, show, whole_line

CONTROLS = "\x1b[31mred\x1b]0;title\x07\x9b2J\u202e\r\b"
SHOWN = r"\x1b[31mred\x1b]0;title\x07\x9b2J\u202e\r\x08"


def is_plain(text):
    return not [c for c in text if not c.isprintable() and c != "\n"]


def test_no_report_has_control_characters():
    table = made_table(CONTROLS, CONTROLS)
    table.add_row(CONTROLS)
    report = printed(Group(whole_line(CONTROLS), Text(f"a {CONTROLS}"), table))
    assert is_plain(report), report
    assert r"\x1b[31mred" in report


@pytest.mark.parametrize("is_terminal", [False, True])
def test_no_line_that_is_shown_has_control_characters(is_terminal, capsys, monkeypatch):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: is_terminal, raising=False)
    show(f"a {CONTROLS}", Text(f"b {CONTROLS}"))
    said = capsys.readouterr().out
    assert is_plain(said), said
    assert r"\x1b[31mred" in said


def test_no_remark_and_no_live_line_has_control_characters(capsys):
    remark(CONTROLS)
    assert capsys.readouterr().err == f"{SHOWN}\n"
    stream = io.StringIO()
    line = LiveLine(stream)
    line.rewrite(CONTROLS)
    line.leave(CONTROLS)
    assert stream.getvalue().count("\x1b") == 0
    assert stream.getvalue().count(SHOWN) == 2


def test_no_traceback_has_control_characters(capsys, monkeypatch):
    def fails(argv):
        error = ValueError(CONTROLS)
        error.add_note(CONTROLS)
        raise error

    monkeypatch.setattr(cli, "_run", fails)
    assert cli.main(["eval"]) == 1
    said = capsys.readouterr().err
    assert is_plain(said), said
    assert said.count(SHOWN) == 2


def test_no_name_in_a_folder_of_checkpoints_is_obeyed(tmp_path, capsys):
    folder = tmp_path / f"run {CONTROLS}"
    with js.checkpoint.Checkpointer(folder) as series:
        series.save(1, {"a": jnp.ones(4)})
    (folder / f"2.{CONTROLS}.tmp").mkdir()
    (folder / f"3{CONTROLS}").mkdir()
    history = Path(folder, "history.jsonl")
    written = history.read_text()
    assert '"host": "' in written
    history.write_text(written.replace('"host": "', r'"host": "\u001b[31m\u0007'))
    for command in ("ls", "timeline", "inspect", "verify"):
        cli.main(["ckpt", command, str(folder)])
        said = "".join(capsys.readouterr())
        assert said
        assert is_plain(said), (command, said)


def test_commands_print_text_by_one_function():
    """What `print` is left with: JSON, which escapes by itself, and the command's own words."""
    own = re.compile(
        r"as_json|to_json|json\.dumps|printable|_wrapped|shlex|_USAGE|usage|ONE_POD|__version__|'after a loss|copies"
    )
    for file in sorted(Path(cli.__file__).parent.rglob("*.py")):
        for call in ast.walk(ast.parse(file.read_text())):
            is_print = isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id == "print"
            if is_print and not all(isinstance(argument, ast.Constant) for argument in call.args):
                assert own.search(ast.unparse(call)), f"{file.name}, line {call.lineno}: use `show`"
