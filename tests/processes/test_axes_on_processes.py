"""Axes beside `fsdp`, and half the wire, on two processes of four devices: the losses of one process of eight."""

import json
import shlex

import pytest

from tests.test_docs_commands import SMALL, run

pytestmark = [pytest.mark.wide, pytest.mark.timeout(600)]


@pytest.mark.parametrize(
    ("options", "within"),
    [
        ("gpt --mesh fsdp=4,context=2", 1e-5),
        ("moe --mesh fsdp=4,expert=2", 1e-5),
        # Within each host first: a sum is rounded once more.
        ("gpt --set model.gather_dtype=float8_e4m3fn --set model.wire_dtype=bfloat16", 1e-3),
    ],
)
def test_losses_are_those_of_one_process(tmp_path, options, within):
    losses = []
    for processes in (1, 2):
        folder = tmp_path / str(processes)
        folder.mkdir()
        words = ["train", *shlex.split(options), *SMALL, "--steps", "3", "--processes", str(processes), "--out", "run"]
        code, shown = run(words, folder)
        assert code == 0, shown
        records = map(json.loads, (folder / "run" / "metrics.jsonl").read_text().splitlines())
        losses.append([record["loss"] for record in records if "loss" in record])
    assert len(losses[0]) == 3 and losses[1] == pytest.approx(losses[0], rel=within)
