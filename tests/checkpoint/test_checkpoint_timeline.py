"""The timeline of a save names the process and the phase that the others waited for, and says what was measured."""

import json
import re
import time
from pathlib import Path

import numpy as np
import pytest

from jshard import cli
from jshard.checkpoint import Checkpointer, saving
from jshard.checkpoint.series import history
from jshard.checkpoint.series.timeline import timelines

MIB = 1 << 20


def process(number, at, *, write_s=0.4, late_s=0.0):
    phases = [["plan", 0, 0.01], ["device_to_host", 0.01, 0.06], ["write", 0.06, 0.06 + write_s]]
    phases += [["commit", 0.06 + write_s, 1.5], ["sums", 1.5, 1.501]]
    return {"process": number, "host": f"h{number}", "began_at": at + late_s, "bytes": 100 * MIB, "phases": phases}


def save(step, *processes, devices=(0, 0, 1, 1, 2, 2, 3, 3)):
    mesh = {"axes": {"replica": 2, "fsdp": 4}, "processes": list(devices)}
    at = processes[0]["began_at"]
    return {"kind": "save", "step": step, "began_at": at, "error": None, "blocked_s": 0.06, "mesh": mesh} | {
        "processes": list(processes)
    }


def restore(step, at):
    phases = [["plan", 0, 0.1], ["read", 0.1, 2.0], ["verify", 2.0, 2.2], ["finish", 2.2, 2.5]]
    row = {"process": 0, "host": "h", "began_at": at, "bytes": 400 * MIB, "phases": phases}
    return {"kind": "restore", "step": step, "began_at": at, "error": None, "mesh": {}, "processes": [row]}


RECORDS = [
    save(10, *(process(n, 1000.0) for n in range(4))),
    save(20, *(process(n, 1060.0, write_s=1.0 if n == 2 else 0.4) for n in range(4))),
    save(30, *(process(n, 1120.0, late_s=5.0 if n == 3 else 0.0) for n in range(4))),
    {"kind": "save", "step": 40, "began_at": 1180.0, "error": "No space left on device (ENOSPC)."},
    restore(30, 2000.0),
]


@pytest.fixture
def run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "run" / "checkpoints"
    folder.mkdir(parents=True)
    lines = [json.dumps(record) for record in RECORDS]
    # A crash cuts the last line off; a line of another version may lack what is asked for.
    (folder / "history.jsonl").write_text("\n".join([*lines[:2], '{"kind": "?"}', *lines[2:], '{"kind": "sa']))
    return tmp_path / "run"


def test_a_save_takes_until_it_counts(tmp_path, monkeypatch):
    """Also the manifest, and all that has to be on the disk before the folder has its name."""
    seal = saving.seal
    monkeypatch.setattr(saving, "seal", lambda *args: (time.sleep(0.5), seal(*args)))
    with Checkpointer(tmp_path, keep=1) as series:
        series.save(1, {"x": np.zeros(3)})
    (found,) = timelines(tmp_path)
    assert found.phases[-1] == "finish" and found.total_s > found.rows[0].phase_s("finish") > 0.5


def verdict(run, *options, capsys):
    assert cli.main(["ckpt", "timeline", str(run), "--json", *options]) == 0
    return json.loads(capsys.readouterr().out)


def test_the_slowest_process_is_named_with_its_phase(run, capsys):
    assert verdict(run, "--step", "10", capsys=capsys)["verdict"].startswith("even: no process takes 1.5 times")
    slow = verdict(run, "--step", "20", capsys=capsys)
    assert slow["slowest"] == {"process": 2, "phase": "write", "time_s": 1.0, "median_s": pytest.approx(0.4)}
    assert slow["verdict"] == "slowest: process 2 on h2: write took 1.00 s, 2.5 times the median of the others, 400 ms"
    late = verdict(run, "--step", "30", "--kind", "save", capsys=capsys)
    assert late["verdict"] == "slowest: process 3 on h3 began 5.00 s after the first one"
    assert verdict(run, "--step", "40", capsys=capsys)["verdict"] == "it failed: No space left on device (ENOSPC)."
    one = verdict(run, "--kind", "restore", capsys=capsys)
    assert one["verdict"] == "one process: most of it is read, 1.90 s (76%)"


def test_waiting_for_others_makes_no_one_slow(tmp_path):
    """Who waits in plan or commit is not who is slow there."""
    first, second = process(0, 0.0), process(1, 0.0)
    first["phases"][0] = ["plan", -3.0, 0.01]
    (tmp_path / "history.jsonl").write_text(json.dumps(save(1, first, second, devices=(0, 1))) + "\n")
    assert timelines(tmp_path)[0].slowest is None


def test_a_line_that_a_crash_cut_off_costs_no_other(tmp_path):
    history.append(tmp_path, RECORDS[0])
    with (tmp_path / history.NAME).open("a") as file:
        file.write('{"kind": "sa')
    history.append(tmp_path, RECORDS[1])
    history.append(tmp_path, RECORDS[2])
    with (tmp_path / history.NAME).open("ab") as file:
        file.write(b'\xff\xfe\n["no record"]\n{"kind": "save"}\n')
    said: list[str] = []
    assert [timeline.step for timeline in timelines(tmp_path, said.append)] == [10, 20, 30]
    assert [line.split(": ", 1)[1] for line in said] == [
        "damaged lines are left out: 2, 5, 6",
        "1 lines that are not of a save or a restore are left out",
    ]


def test_what_all_of_them_took(run, capsys):
    reported = verdict(run, capsys=capsys)
    assert reported["shown"]["step"] == 40  # the last save
    assert reported["stall_s"] == [0.06] * 3
    assert reported["save_s"] == pytest.approx([1.501, 1.501, 6.501])
    assert (reported["load_s"], reported["failed"]) == ([2.5], 1)
    ettr = reported["ettr"]
    assert ettr["interval_s"] == pytest.approx(59.94)  # from one begin to the next, without the stall
    # I / (I + B) * (1 - (L + S + (I + B) / 2) / M)
    assert ettr["value"] == pytest.approx(59.94 / 60 * (1 - (2.5 + 1.501 + 30) / 14400))
    reported = verdict(run, "--mtbf", "100", "--interval", "600", capsys=capsys)
    assert reported["ettr"]["value"] == 0.0


def test_as_text_and_as_pictures(run, capsys):
    assert cli.main(["ckpt", "timeline", "run", "--step", "20", "--out", "t.png", "t.html", "t.json"]) == 0
    reported = capsys.readouterr()
    assert reported.err.endswith("written: t.png\nwritten: t.html\nwritten: t.json\n")
    assert "history.jsonl: damaged lines are left out: 7\n" in reported.err
    assert reported.out.startswith("Save of step 20: 4 processes, 1.50 s, 400.0 MiB\nslowest: process 2 on h2: write")
    assert "(measured), B = 60.0 ms stall (measured)" in reported.out
    assert "between failures (assumed, --mtbf)" in reported.out
    assert Path("t.png").read_bytes().startswith(b"\x89PNG")
    page = Path("t.html").read_text()
    assert page.startswith("<!DOCTYPE html>")
    assert not re.findall(r"(?:src|href)=", page)  # it needs nothing else
    assert "process 2 on h2: write, 1.00 s from 60.0 ms on" in page
    events = [event for event in json.loads(Path("t.json").read_text())["traceEvents"] if event["ph"] == "X"]
    (slow,) = (event for event in events if (event["tid"], event["cat"]) == (2, "write"))
    assert (slow["ts"], slow["dur"]) == (pytest.approx(60_000), pytest.approx(1e6))


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (["--step", "99"], "no record of such a save or restore(.|\\n)*the steps 10, 20, 30, 40"),
        (["--out", "t.svg"], "The picture cannot be drawn"),
        (["--mtbf", "0"], "The ETTR cannot be computed"),
    ],
)
def test_what_cannot_be_shown(run, options, text, capsys):
    assert cli.main(["ckpt", "timeline", "run", *options]) == 2
    assert re.search(text, capsys.readouterr().err)
