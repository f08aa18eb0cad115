"""A training step beside raw Flax and PyTorch's FSDP2: time, sharding overhead, memory, losses.

The same GPT from the same weights over the same tokens in every framework, the same processes and threads, in turns of
one interleaved run. On the CPU gloo carries the collectives of all, on GPUs NCCL. PyTorch takes part where it is
installed (extra `peers`), in this interpreter or in `--torch-python`.
"""

from __future__ import annotations

import argparse
import dataclasses
from types import SimpleNamespace
from typing import Any

from benchmarks.step import candidates, merging, report
from benchmarks.step.place import place_of
from benchmarks.step.session import Session
from benchmarks.step.sizes import SIZES
from jshard.recipes.step import device_peak

TITLE = "A training step, side by side"
MEASURES_TIME = True
table, pictures, merged = report.table, report.pictures, merging.merged


def arguments(parser: argparse.ArgumentParser) -> None:
    """The options of this case."""
    parser.add_argument("--device", choices=("cpu", "gpu"), default="cpu")
    parser.add_argument(
        "--processes", type=int, help="on this machine; default: as Slurm, Kubernetes or MPI say, else 2, 1 on a GPU"
    )
    parser.add_argument("--size", choices=SIZES, help="default: 15m on the CPU, gpt2_xl on GPUs")
    parser.add_argument("--batch", type=int, help="sequences of a process")
    parser.add_argument("--rounds", type=int, help="default: 5 on the CPU, 3 on GPUs")
    parser.add_argument("--steps", type=int, help="of a turn; default: 3 on the CPU, 10 on GPUs")
    parser.add_argument("--only", metavar="NAMES", help=f"of: {', '.join(candidates.BY_NAME)}")
    parser.add_argument("--wait", type=float, default=0, metavar="S", help="seconds at most, for a quiet machine")
    parser.add_argument("--torch-python", metavar="PYTHON", help="an interpreter that has PyTorch")


def run(
    *,
    quick: bool,
    device: str,
    processes: int | None,
    size: str | None,
    batch: int | None,
    rounds: int | None,
    steps: int | None,
    only: str | None,
    wait: float,
    torch_python: str | None,
) -> dict[str, Any]:
    """Measures all candidates; see `arguments`."""
    on_cpu = device == "cpu"
    sizes = SIZES[size or ("quick" if quick else "15m" if on_cpu else "gpt2_xl")]
    sizes = dataclasses.replace(sizes, batch=batch or sizes.batch)
    place = place_of(processes)
    if processes is None and place.first_port is None and on_cpu:
        place = place_of(2)
    session = Session(
        sizes=sizes,
        place=place,
        device=device,
        rounds=rounds or (2 if quick else 5 if on_cpu else 3),
        steps=steps or (2 if quick else 3 if on_cpu else 10),
        alive=on_cpu,  # on a GPU one state after another has the memory
        wait_s=wait,
        torch_python=torch_python,
    )
    return result_of(session, session.measure(candidates.chosen(only, deep=sizes.n_layer > 24)))


def result_of(session: Session, measured: dict[str, Any]) -> dict[str, Any]:
    """The result of a session, from the figures that it has so far."""
    measured = dict(measured)
    others = measured.pop("others_share")
    return {
        "sizes": dataclasses.asdict(session.sizes),
        "device": session.device,
        "devices": sorted({row["facts"]["device"] for row in measured["candidates"].values()}),
        "peak_flops_per_s": None if session.device == "cpu" else _peak(measured["candidates"]),
        "processes": session.place.processes,
        "measured_processes": list(session.place.mine),
        "rounds": session.rounds,
        "steps": session.steps,
        "alive": session.alive,
        "worker_versions": _versions(measured["candidates"]),
        **measured,
        **({} if others is None else {"load_per_core_before": others}),
    }


def _peak(found: dict[str, Any]) -> float | None:
    """Dense bf16 operations a second of a GPU, from jshard's table of data sheets."""
    kinds = {row["facts"]["device"] for row in found.values()}
    if len(kinds) != 1:
        return None
    peak = device_peak([SimpleNamespace(platform="gpu", device_kind=kinds.pop())])
    return peak and peak.flops_per_s


def _versions(found: dict[str, Any]) -> dict[str, str]:
    return {name: version for row in found.values() for name, version in row["facts"]["versions"].items()}
