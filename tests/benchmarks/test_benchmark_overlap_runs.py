"""The experiment about overlap as a command: resumed, with its files and mistakes. All times are made up."""

import csv
import itertools
import re
from pathlib import Path
from types import SimpleNamespace

import pytest

from benchmarks.overlap import (
    bench,
    command,
    conclusion,
    kernel_times,
    report,
    session,
)
from benchmarks.overlap.grid import DOT, TRITON, Size, groups
from benchmarks.overlap.records import BenchmarkError, Placement, Record, continued, load, newest, save
from jshard.errors import RunError
from tests.benchmarks.made_up_overlap import CONDITIONS, H200, RING, MadeUp, kernel, record

ROOT = Path(__file__).parents[2]

# Measuring, with a made-up machine.


def test_a_group_is_measured_in_turn():
    machine = MadeUp()
    group = groups(H200, RING)[0]
    rows, failed = bench.measure(machine, group, rounds=4)
    assert failed == {
        "cube/persistent 256x128x64/4, 8 SMs reserved": "The GPU cannot run it.",
        "cube/persistent 256x128x64/4, 32 SMs reserved": "The result is wrong: its relative error is nan.",
    }
    assert {(one.form, one.reserved_sms, one.mode) for one in rows} == {
        *itertools.product([DOT, group.form], [0], ["sequential", "baseline", "baseline + priority"]),
        *((group.form, 16, mode) for mode in ("shaped", "shaped + priority")),
    }
    half = [one for one in rows if one.load == "copies half"]
    assert {one.load_bytes for one in half} == {100_000_000} and len(half) == len(rows) / 2
    assert {one.load_bytes for one in rows} - {100_000_000} == {896_000_000}
    assert {round(one.ratio, 3) for one in half if one.mode in ("baseline", "sequential")} == {1.0}
    assert {round(one.ratio, 3) for one in half if one.mode == "shaped"} == {0.667}
    assert half[1].span_ms == 0.25 and half[1].comm_sms == 16 and half[0].mode == "sequential"
    # Each round asks for every setting once, after three for the size of the load.
    able = [DOT, group.form, f"{group.form}, 16 SMs reserved"]
    assert machine.asked == [DOT] * 3 + able * 4


def run_session(tasks, seconds, times, before=None):
    """What is known after each task within some seconds, if tasks end at those times."""
    here = session.Session(H200, RING, bytes_per_s=3e11, rounds=1)
    here._bench = MadeUp()
    clock = iter(times)
    return list(here.run(tasks, before or record(), seconds=seconds, clock=lambda: next(clock)))[1::2]


def test_a_session_ends_before_its_time_is_over_and_is_resumed(tmp_path, capsys):
    tasks = [task for task in command.tasks(H200, RING, quick=True) if task.name.startswith(("cube/", "wide/"))]
    # begin, before and after each: 0 to 100, 100 to 130; the next could take 100 s, and 90 are left.
    (first, second) = run_session(tasks, 220, [0, 0, 100, 100, 130, 130])
    assert list(first.rows) == [tasks[0].name] and list(second.rows) == [tasks[0].name, tasks[1].name]
    save(second, tmp_path)
    again = continued(tmp_path, "2026-12-02 10:00 UTC", CONDITIONS)
    assert again == second
    left = [task for task in tasks if not again.has(task.name)]
    assert [task.name for task in left] == [task.name for task in tasks[2:]]
    last = run_session(left, 1e9, itertools.repeat(0), again)[-1]
    assert list(last.rows) == [task.name for task in tasks]
    assert "cube/tiled 64x64x64/2 ..." in capsys.readouterr().out


def test_a_task_that_fails_is_kept_as_such_and_forgotten_when_it_succeeds():
    tiny = kernel_times.Case(kernel="rms_norm", shape="8 x 128", arrays={"x": (8, 128), "scale": (128,)})
    (found,) = run_session([session.Task(tiny.name, tiny)], 1e9, itertools.repeat(0))
    assert found.failed == {tiny.name: "rms_norm cannot run on Mosaic GPU here."}  # on a CPU
    assert found.has(tiny.name) and not found.has("placement")
    group = groups(H200, RING)[0]
    before = record(failed={group.name: "out of memory", "wide/other": "stays"})
    (found,) = run_session([session.Task(group.name, group)], 1e9, itertools.repeat(0), before)
    assert group.name not in found.failed and "wide/other" in found.failed and found.has(group.name)


# Files.


@pytest.fixture(scope="module")
def measured():
    rows = {}
    for group in groups(H200, RING)[:4]:
        rows[group.name], _ = bench.measure(MadeUp(), group, rounds=2)
    began = dict.fromkeys(conclusion.PROBE_REGISTERS[:1], True) | dict.fromkeys(conclusion.PROBE_REGISTERS[1:], False)
    return record(
        placement=Placement(began=began, long_sms=132, long_ms=20.0),
        kernels={"kernels/matmul 8192 x 8192 x 8192": (kernel(1.02), kernel(1.1, direction="both"))},
        rows=rows,
        failed={"wide/tiled 128x128x64/4": "out of memory"},
    )


def test_figures_come_back_as_they_were(measured, tmp_path):
    path = save(measured, tmp_path)
    assert path.name == "2026-12-01_overlap.json" and load(path) == measured == newest(tmp_path)
    assert [each.name for each in tmp_path.iterdir()] == [path.name]
    assert newest(tmp_path / "none") is None


def test_report_table_and_pictures(measured, tmp_path):
    written = report.write(measured, H200, tmp_path, left=["wide/tiled 64x64x64/2"])
    assert [path.name.removeprefix("2026-12-01_overlap") for path in written] == [
        *(".csv", ".md", "_cube_copies-half.svg", "_cube_copies-full.svg", "_kernels.svg")
    ]
    with written[0].open() as file:
        table = list(csv.DictReader(file))
    half = [line for line in table if line["load"].startswith("copies half") and line["mode"] == "shaped"]
    assert len(table) == len(measured.all_rows) and {line["of XLA's dot"] for line in half} == {"0.667"}
    text = written[1].read_text()
    for words in (
        "Measured 2026-12-01 10:00 UTC.",
        "- device: NVIDIA H200",
        "- jax 0.12",
        "**Not complete. Not measured yet: wide/tiled 64x64x64/2.**",
        "- Placement: as assumed",
        "- cube, copies half: beside XLA's dot the load starves (ratio 1.000",
        "- cube, copies half: kill rule: padding is needless here",
        "Goal of 25.5% below a baseline that starves: reached.",
        "goal 1.05: missed",
        "| P3a | cube | tiled 64x64x64/2 | baseline | drain 5: >= 0.95 | 1.000 | yes |",
        "Kill rule: if the 64x64 kernel as it is",
        "Of those that claim something 5 of 8 hold.",
        "- P2, cube: with 16 SMs reserved the product alone takes 1.000 times as long; predicted is 132 / 116 = 1.138.",
        "![2026-12-01_overlap_kernels.svg]",
        "| 58 | waited | waited |",
        "- wide/tiled 128x128x64/4: out of memory",
    ):
        assert words in text, words
    tables = [line for line in text.splitlines() if line.startswith("| cube |")]
    assert {line.count("|") for line in tables} == {19}


def test_other_conditions_begin_again_and_write_over_nothing(measured, tmp_path):
    save(measured, tmp_path)
    other = CONDITIONS | {"devices": 8}
    assert continued(tmp_path, "2026-12-02 09:00 UTC", other) == Record(date="2026-12-02 09:00 UTC", conditions=other)
    with pytest.raises(BenchmarkError, match="devices: 1 there, 8 now"):
        continued(tmp_path, "2026-12-01 23:00 UTC", other)


def test_figures_that_cannot_be_read_are_left_alone(tmp_path):
    path = tmp_path / "2026-12-01_overlap.json"
    path.write_text('{"format": 0}')
    with pytest.raises(RunError, match="The figures cannot be read"):
        continued(tmp_path, "2026-12-01 23:00 UTC", CONDITIONS)
    assert path.read_text() == '{"format": 0}'


# The command line.


def test_without_a_gpu_it_says_so_in_one_line(capsys):
    assert command.main([]) == 1
    assert re.fullmatch(r"No GPU is here \(JAX sees \d+ x cpu\): run it where one is, .*\n", capsys.readouterr().err)


def test_mistakes(capsys):
    assert command.main("--seconds 0 --rounds 0 --gpu h200 --link-gb-s nan".split()) == 2
    assert "  where: --seconds 0\n         --link-gb-s nan\n         --rounds 0\n" in capsys.readouterr().err
    assert command.main("--list --gpu a100 --nccl 2.28.9 --only cub cube".split()) == 2
    assert "There is nothing of that name to measure.\n  where: --only cub\n" in capsys.readouterr().err


def test_report_from_figures(measured, tmp_path, capsys):
    assert command.main(["--report", "--out", str(tmp_path)]) == 2
    assert capsys.readouterr().err.startswith("There are no figures to report.")
    save(measured, tmp_path)
    assert command.main(["--report", "--out", str(tmp_path)]) == 0
    assert "## Conclusion" in capsys.readouterr().out
    text = (tmp_path / "2026-12-01_overlap.md").read_text()
    assert "**Not complete. " in text and "wide/tiled 64x64x64/2" in text


@pytest.fixture
def tiny_command(monkeypatch):
    """The command with tiny products and loads, on CPU devices that pass for GPUs of a kind."""

    def pass_for(kind):
        device = SimpleNamespace(platform="gpu", device_kind=kind, core_count=108)
        monkeypatch.setattr(command, "_gpu_here", lambda: device)

    tiny = tuple(Size(name=name, m=64, n=64, k=64) for name in ("cube", "wide"))
    monkeypatch.setattr(command, "QUICK_SIZES", tiny)
    monkeypatch.setattr(bench, "COLLECTIVE_BYTES", 2**16)
    monkeypatch.setattr(bench, "_SIZING", 1)
    monkeypatch.setattr(session, "has_cupy", lambda: False)
    return pass_for


def check_rows(record):
    """Both products of XLA ran beside both collectives, in every mode."""
    modes = {(row.form, row.load, row.mode) for row in record.all_rows}
    loads = [f"{kind} {name}" for kind in ("all-reduce", "all-gather") for name in ("half", "full")]
    assert modes == set(itertools.product([DOT, TRITON], loads, ["sequential", "baseline", "baseline + priority"]))
    assert all(row.relative_error == 0 and row.span_ms is None for row in record.all_rows)


@pytest.mark.wide
def test_the_whole_command_on_devices_that_pass_for_gpus(tmp_path, tiny_command, capsys):
    """The programs of several GPUs, which CPU devices can run as well: XLA's products beside two collectives."""
    tiny_command("NVIDIA A100-SXM4-80GB")
    arguments = ["--quick", "--rounds", "1", "--nccl", "2.28.9", "--out", str(tmp_path)]
    assert command.main([*arguments, "--only", "placement", "cube"]) == 0
    said = capsys.readouterr().out
    assert f"Not measured yet: wide/{TRITON}. Run it again, with the same --out." in said
    found = newest(tmp_path)
    assert found.failed == {"placement": "CuPy is not installed."}
    (text,) = tmp_path.glob("*.md")
    assert "**Quick run: shows that the benchmark works" in text.read_text()
    check_rows(found)
    assert {"device": "NVIDIA A100-SXM4-80GB", "SMs": 108, "rounds": 1}.items() <= found.conditions.items()
    before = found.rows
    assert command.main(["--rounds", "1", *arguments[:1], *arguments[3:], "--seconds", "1"]) == 0
    assert newest(tmp_path).rows.keys() == {f"cube/{TRITON}", f"wide/{TRITON}"}
    assert newest(tmp_path).rows[f"cube/{TRITON}"] == before[f"cube/{TRITON}"]
    assert "yet:" not in capsys.readouterr().out
    assert command.main([*arguments, "--only", "placement"]) == 0
    assert "placement ..." not in capsys.readouterr().out
    assert command.main([*arguments, "--only", "placement", "--again"]) == 0
    assert "placement ..." in capsys.readouterr().out


@pytest.mark.wide
def test_the_whole_command_on_devices_that_pass_for_amd_gpus(tmp_path, tiny_command, capsys):
    tiny_command("AMD Instinct MI250X")
    arguments = ["--quick", "--rounds", "1", "--out", str(tmp_path)]
    assert command.main([*arguments, "--only", "cube"]) == 0
    record = newest(tmp_path)
    check_rows(record)
    expected = {"compute units": 108, "load": "RCCL; priority by XLA's option"}
    assert expected.items() <= record.conditions.items() and "SMs" not in record.conditions
    assert not record.failed
    # The report of the figures alone is the same, and in the words of AMD.
    (path,) = tmp_path.glob("*.md")
    text = path.read_text()
    path.unlink()
    assert command.main(["--report", "--out", str(tmp_path)]) == 0
    assert path.read_text() == text
    assert "| workgroups/CU |" in text and "| CUs |" in text
    assert not re.findall(r"\bSMs?\b|NCCL \d|Placement|Predictions", text)
