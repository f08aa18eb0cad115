"""A signal ends a command promptly and with a line, also one that compiles; and one that is ignored stays ignored."""

import signal
import subprocess
import sys

import pytest

from tests.compiling import environment

# Of native code, minutes long, as compiling is: no handler of Python's runs meanwhile.
BUSY = (
    "import hashlib, threading; threading.Timer(0.3, lambda: print('up', flush=True)).start(); "
    "hashlib.pbkdf2_hmac('sha512', b'', b'', 10**9)"
)
IDLE = "print('up', flush=True); import time; time.sleep(600)"
COMMAND = (
    "import sys; sys.argv[:] = ['jshard', {name!r}]; from jshard.cli._signals import end_promptly; end_promptly()\n"
)
RUN = """\
from pathlib import Path
from jshard.launch import StallWatch, StopSignal, set_phase
with StopSignal() as stop:
    watch = StallWatch(again="jshard train gpt --resume")
    with watch.over(Path("stalls"), stop=stop, describe_saved=lambda: "nothing is saved", say=print):
        set_phase({phase!r})
        BUSY
"""

pytestmark = pytest.mark.usefixtures("signals_as_usual")


def start(code):
    command = [sys.executable, "-c", code]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    process = subprocess.Popen(command, env=environment(), **pipes)
    assert process.stdout.readline() == "up\n", process.stderr.read()
    return process


def ended(process, *numbers):
    """Exit code and stderr of a process that gets signals, more than a second apart."""
    for place, number in enumerate(numbers):
        if place:
            with pytest.raises(subprocess.TimeoutExpired):
                process.wait(1.1)
        process.send_signal(number)
    _, errors = process.communicate(timeout=20)
    return process.returncode, errors


@pytest.mark.parametrize("work", [BUSY, IDLE], ids=["compiling", "Python"])
@pytest.mark.parametrize(
    ("name", "number", "code"),
    [("train", signal.SIGTERM, 75), ("plan", signal.SIGTERM, 143), ("train", signal.SIGHUP, 75)],
)
def test_a_stop_before_the_work_begins_has_a_line_and_an_exit_code(name, number, code, work):
    process = start(COMMAND.format(name=name) + work)
    assert ended(process, number) == (code, f"\n{number.name}: jshard {name} is stopped.\n")


def test_one_ctrl_c_ends_a_command_that_compiles():
    process = start(COMMAND.format(name="plan") + BUSY)
    assert ended(process, signal.SIGINT) == (130, "\ninterrupted\n")


def test_a_handler_that_comes_later_is_left_to_its_work():
    """A supervisor only notes a signal, and takes as long as its workers do."""
    later = "import signal; signal.signal(signal.SIGTERM, lambda *_: print('noted', flush=True))\n"
    process = start(COMMAND.format(name="train") + later + IDLE)
    process.send_signal(signal.SIGTERM)
    assert process.stdout.readline() == "noted\n"
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(1.5)
    process.kill()
    process.communicate()


def test_one_ctrl_c_ends_a_run_that_compiles():
    process = start(RUN.format(phase="compiling the step").replace("BUSY", BUSY))
    code, said = ended(process, signal.SIGINT)
    assert code == 130
    assert "SIGINT while compiling the step: nothing is trained yet, and the run ends at once.\n" in said
    assert said.endswith("continue it with: jshard train gpt --resume\n")


def test_a_run_that_hears_it_while_it_prepares_does_not_promise_to_save():
    process = start(RUN.format(phase="starting").replace("BUSY", IDLE))
    code, said = ended(process, signal.SIGINT)
    assert code == 130
    assert said.startswith("\nSIGINT while starting: nothing is trained yet, and the run ends at once.\n")


@pytest.mark.parametrize("work", [BUSY, IDLE], ids=["native", "Python"])
def test_a_second_signal_ends_a_step_with_a_line_on_what_remains(work):
    process = start(RUN.format(phase="in a step").replace("BUSY", work))
    code, said = ended(process, signal.SIGTERM, signal.SIGTERM)
    assert code in (143, -signal.SIGTERM)
    assert said.endswith("SIGTERM again: the run ends now, unsaved.\nnothing is saved\n")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
def test_an_ignored_signal_stays_ignored(number, monkeypatch):
    """`nohup jshard train ... &` ignores both: the run is to survive its terminal."""
    ignored = f"import signal; signal.signal(signal.{number.name}, signal.SIG_IGN)\n"
    show = f"print(signal.getsignal(signal.{number.name}) is signal.SIG_IGN, flush=True)\n"
    inside = f"from jshard.launch import StopSignal\nwith StopSignal():\n    {show}"
    code = ignored + COMMAND.format(name="train") + show + inside
    done = subprocess.run([sys.executable, "-c", code], env=environment(), capture_output=True, text=True, check=True)
    assert done.stdout == "True\nTrue\n"
