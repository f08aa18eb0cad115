"""What a run shows: the live line on a terminal, plain lines elsewhere, and the speed behind them."""

import io
import os
import subprocess
import sys
import textwrap

import pytest

from jshard.train.progress import Meter, Progress


class Clock:
    def __init__(self):
        self.now_s = 100.0

    def __call__(self):
        return self.now_s


class Terminal(io.StringIO):
    """A terminal, with the lines that it shows."""

    def isatty(self):
        return True

    @property
    def shown(self) -> list[str]:
        lines, column = [""], 0
        for char in self.getvalue():
            if char == "\n":
                lines.append("")
                column = 0
            elif char == "\r":
                column = 0
            else:
                lines[-1] = lines[-1][:column].ljust(column) + char + lines[-1][column + 1 :]
                column += 1
        return [line.rstrip() for line in lines]


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def columns(monkeypatch):
    def resize(count):
        monkeypatch.setenv("COLUMNS", str(count))

    resize(200)
    return resize


SCALARS = {
    "loss": 2.34561,
    "grad_norm": 0.5,
    "learning_rate": 3e-4,
    "tokens_per_s": 31234.2,
    "step_s": 0.131,
    "mfu": 0.2312,
    "peak_bytes": 11_744_051,
}
LINE = "step 120/500  loss 2.3456  31,234 tokens/s  131 ms/step  ETA 0:50  MFU 23.1%  grad 0.500  lr 3.0e-04  peak"
LINE += " 11.20 MiB/device"


@pytest.mark.parametrize(
    ("scalars", "part"),
    [
        ({"samples_per_s": 42.35}, "42.4 samples/s"),
        ({"samples_per_s": 0.5}, "0.5 samples/s"),
        ({"tokens_per_s": 1_234_567.0}, "1,234,567 tokens/s"),
        ({"step_s": 0.00431}, "4.31 ms/step  ETA 0:00"),
        ({"step_s": 12.34}, "12.3 s/step  ETA 19:45"),
        ({"step_s": 60.0}, "60.0 s/step  ETA 1:36:00"),
        ({"step_s": 3600.0}, "3600 s/step  ETA 4d 00:00:00"),
        ({"loss": float("nan")}, "loss nan"),
        ({"mfu": 0.004}, "MFU 0.4%"),
        ({"grad_norm": 12.345, "learning_rate": 0.0}, "grad 12.3  lr 0"),
        ({"grad_norm": 1e-4}, "grad 1.0e-04"),
        ({"grad_norm": 0.0}, "grad 0"),
        ({"peak_bytes": 11_744_051}, "peak 11.20 MiB/device (compiled)"),
    ],
)
def test_units(columns, clock, scalars, part):
    terminal = Terminal()
    Progress(100, peak_label="compiled", stream=terminal, clock=clock).log(4, {"loss": 1.0} | scalars)
    assert part in terminal.shown[0] and terminal.shown[0].startswith("step   4/100  loss")


@pytest.mark.parametrize(
    ("width", "line"),
    [
        (200, LINE),
        (len(LINE) + 1, LINE),
        (len(LINE), LINE.rsplit("  ", 1)[0]),  # the last column stays free
        (50, "step 120/500  loss 2.3456  31,234 tokens/s"),
        (20, "step 120/500"),
        (8, "step 12"),
    ],
)
def test_the_line_fits_the_terminal(columns, clock, width, line):
    columns(width)
    terminal = Terminal()
    Progress(500, stream=terminal, clock=clock).log(120, SCALARS)
    assert terminal.getvalue() == "\r" + line


def test_a_terminal_is_written_at_most_ten_times_a_second(columns, clock):
    terminal = Terminal()
    progress = Progress(2000, stream=terminal, clock=clock)
    for step in range(1, 1001):
        progress.log(step, {"loss": 1.0})
        clock.now_s += 0.001
    assert 9 <= terminal.getvalue().count("\r") <= 11


@pytest.mark.parametrize(("loss", "text"), [(2.34567, "2.3457"), (1.23456e-5, "1.235e-05"), (0.0, "0.0000")])
def test_a_loss_has_as_many_digits_as_say_something(columns, clock, loss, text):
    stream = io.StringIO()
    progress = Progress(1, stream=stream, clock=clock)
    progress.log(1, {"loss": loss})
    progress.log(1, {"val_loss": loss})
    assert stream.getvalue() == f"step 1/1  loss {text}\nstep 1: validation loss {text}\n"


def test_a_notebook_has_one_line_too(clock, columns):
    cell = type("OutStream", (Terminal,), {"__module__": "ipykernel.iostream", "isatty": lambda self: False})()
    progress = Progress(3, stream=cell, clock=clock)
    for step in 1, 2, 3:
        clock.now_s += 1
        progress.log(step, {"loss": 4.0 - step})
    progress.close()
    assert cell.shown == ["step 3/3  loss 1.0000", ""]


def test_an_evaluation_stays_above_the_live_line(columns, clock):
    terminal = Terminal()
    progress = Progress(500, stream=terminal, clock=clock)
    progress.log(120, {"loss": 2.0})
    progress.log(120, {"val_loss": 2.125})
    progress.note("saved")
    assert terminal.shown == ["step 120: validation loss 2.1250", "saved", "step 120/500  loss 2.0000"]
    clock.now_s += 1
    progress.log(121, {"loss": 1.5})
    progress.close()
    print("after", file=terminal)
    assert terminal.shown == [
        "step 120: validation loss 2.1250",
        "saved",
        "step 121/500  loss 1.5000",
        "after",
        "",
    ]


def test_a_log_file_has_a_plain_line_every_ten_seconds_and_the_last(columns, clock):
    columns(20)  # a file has no width
    stream = io.StringIO()
    progress = Progress(500, stream=stream, clock=clock)
    for step in range(471, 501):
        progress.log(step, {"loss": 1.0, "step_s": 1.0})
        clock.now_s += 1.0
    progress.close()
    assert stream.getvalue().splitlines() == [
        "step 471/500  loss 1.0000  1.00 s/step  ETA 0:29",
        "step 481/500  loss 1.0000  1.00 s/step  ETA 0:19",
        "step 491/500  loss 1.0000  1.00 s/step  ETA 0:09",
        "step 500/500  loss 1.0000  1.00 s/step  ETA 0:00",
    ]


def test_a_reader_that_is_gone_does_not_end_the_run():
    script = """
        import sys
        from jshard.train.progress import Progress
        progress = Progress(3)
        sys.stdin.readline()  # the reader is gone now
        for step in (1, 2, 3):
            progress.log(step, {"loss": 1.0, "val_loss": 2.0})
        progress.close()
        print("and so may others print")
        print("done", file=sys.stderr)
    """
    reader, writer = os.pipe()
    with os.fdopen(writer, "wb") as out:
        process = subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(script)],
            stdin=subprocess.PIPE,
            stdout=out,
            stderr=subprocess.PIPE,
            text=True,
        )
    os.close(reader)
    _, errors = process.communicate("go\n", timeout=800)
    assert (process.returncode, errors) == (0, "done\n")


@pytest.mark.parametrize(
    ("window", "steps", "step_s", "last_s"),
    [
        # Seconds before the end of each step, of which some were no step; the first one compiled.
        (50, {1: (30.0, 0), 2: (2.0, 0), 3: (4.0, 500.0)}, 3.0, 4.0),
        (2, {1: (9.0, 0), 2: (8.0, 0), 3: (1.0, 0), 4: (3.0, 0)}, 2.0, 3.0),
        (50, {105: (10.0, 0), 110: (10.0, 0), 115: (10.0, 0)}, 2.0, None),  # of a resumed run, every fifth
        (50, {1: (1.0, 7.0), 2: (2.0, 0)}, 2.0, 2.0),
    ],
)
def test_times_leave_out_the_first_step_and_pauses(clock, window, steps, step_s, last_s):
    first = min(steps) - 1
    meter = Meter(tokens_per_step=6, start_step=first, seen=100, window=window, clock=clock)
    for number, (step, (took_s, pause_s)) in enumerate(steps.items()):
        clock.now_s += pause_s
        meter.pause()
        clock.now_s += took_s
        scalars = meter.done(step)
        assert scalars["host_bytes"] > 1 << 20
        assert number or scalars.keys() == {"elapsed_s", "tokens_seen", "host_bytes"}
        assert number or (scalars["elapsed_s"], scalars["tokens_seen"]) == (took_s + pause_s, 106)
    assert (scalars["step_s"], scalars.get("last_step_s"), scalars["tokens_per_s"]) == (step_s, last_s, 6 / step_s)
    assert scalars["tokens_seen"] == 100 + 6 * (max(steps) - first)
