"""The command line: what to measure, as much as there is time for, and the report of all that was measured so far."""

from __future__ import annotations

import argparse
import datetime
import fnmatch
import math
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # the loads of CuPy need memory as well

import jax

from benchmarks.overlap import paper, report
from benchmarks.overlap.bench import ROUNDS
from benchmarks.overlap.grid import QUICK_SIZES, SIZES, groups
from benchmarks.overlap.kernel_times import cases
from benchmarks.overlap.machine import conditions
from benchmarks.overlap.records import BenchmarkError, Record, continued, newest, save
from benchmarks.overlap.session import PLACEMENT, Session, Task
from benchmarks.overlap.target import Comm, Gpu, collective, collective_of, gpu_of, has_kernels, why_no_kernels
from jshard.errors import FourPartError, RunError
from jshard.occupancy import ASSUMED_CTAS, AmdGpuFacts

_SECONDS = 540.0  # within ten minutes, with what Python and JAX take to begin and to end
LINK_GB_S = 300.0  # an assumption: about two thirds of NVLink's 450 GB/s one way
QUICK_ROUNDS = 2


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line.

    Returns:
        The exit code: 1 if it could not run, 2 if it was asked for what there is not.
    """
    args = _parser().parse_args(argv)
    try:
        _check(args)
        if args.model:
            print("\n".join(paper.markdown()))
            return 0
        if args.list:
            return _list(args)
        return _report(args) if args.report else _measure(args)
    except FourPartError as error:
        print(error, file=sys.stderr)
        return 1 if isinstance(error, RunError) else 2


def tasks(facts: Gpu, comm: Comm, *, quick: bool) -> tuple[Task, ...]:
    """All there is to measure on a GPU, by name, in the order of its worth."""
    cube, wide = QUICK_SIZES if quick else SIZES
    # What sees the placement of blocks is a kernel for NVIDIA's GPUs.
    first = () if isinstance(facts, AmdGpuFacts) else (PLACEMENT,)
    alone = cases(quick=quick) if has_kernels(facts) else ()
    order = (*first, *groups(facts, comm, (cube,)), *alone, *groups(facts, comm, (wide,)))
    return tuple(Task(what if isinstance(what, str) else what.name, what) for what in order)


def chosen(names: Sequence[str], patterns: Sequence[str]) -> list[str]:
    """The names that a pattern fits, or that begin with it as a part's name; all if there are no patterns.

    Raises:
        BenchmarkError: a pattern fits none.
    """
    fits = lambda name, pattern: fnmatch.fnmatchcase(name, pattern) or name.startswith(f"{pattern}/")
    useless = [pattern for pattern in patterns if not any(fits(name, pattern) for name in names)]
    if useless:
        raise BenchmarkError(
            "There is nothing of that name to measure.",
            where=[f"--only {pattern}" for pattern in useless],
            why=f"there are {', '.join(names)}.",
            do=f"--only {names[0]}, or without it.",
        )
    return [name for name in names if not patterns or any(fits(name, pattern) for pattern in patterns)]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.overlap", description=__doc__)
    add = parser.add_argument
    add("--seconds", type=float, default=_SECONDS, help="begin nothing that would take longer (%(default)g)")
    add("--only", nargs="+", default=[], metavar="NAME", help="placement, kernels, cube, wide, or names as --list has")
    add("--again", action="store_true", help="measure what is chosen also where it is done")
    add("--out", type=Path, default=Path(__file__).parents[1] / "results", metavar="DIR")
    add("--rounds", type=int, default=None, help=f"times of each setting ({ROUNDS})")
    add("--ctas", type=int, default=ASSUMED_CTAS, help="blocks of the collective (%(default)s)")
    add("--nccl", default=None, metavar="VERSION", help="whose blocks the load has; by default the one installed")
    add("--link-gb-s", type=float, default=LINK_GB_S, help="rate of a load that is no collective (%(default)g)")
    add("--list", action="store_true", help="print what there is to measure; needs no GPU with --gpu")
    add("--gpu", default=None, help="for --list: h200, a100, mi250x, ...")
    add("--model", action="store_true", help="print what the occupancy model says of the grid of arXiv 2606.09200")
    add("--report", action="store_true", help="write the report again from the figures; needs no GPU")
    add("--quick", action="store_true", help="small products and few rounds: only to see that it works")
    return parser


def _check(args: argparse.Namespace) -> None:
    """Refuses what cannot be, all at once.

    Raises:
        BenchmarkError: an argument is out of range.
    """
    positive = {"--seconds": args.seconds, "--link-gb-s": args.link_gb_s}
    wrong = {f"{name} {value:g}": "more than 0" for name, value in positive.items() if not 0 < value < math.inf}
    if args.rounds is not None and args.rounds < 1:
        wrong[f"--rounds {args.rounds}"] = "1 or more"
    if args.gpu is not None and not args.list:
        wrong[f"--gpu {args.gpu}"] = "only for --list: what is measured is the GPU that is here"
    if wrong:
        raise BenchmarkError(
            "The benchmark cannot run like this.",
            where=list(wrong),
            why="\n".join(f"{place.split()[0]} is {what}." for place, what in wrong.items()),
            do=f"python -m benchmarks.overlap --seconds {_SECONDS:g} --rounds {ROUNDS}",
        )


def _list(args: argparse.Namespace) -> int:
    kind = args.gpu
    if kind is None:
        device = _gpu_here()
        if device is None:
            return 1
        kind = device.device_kind
    facts = gpu_of(kind)
    _tell_of_kernels(facts)
    comm = collective(facts, nccl=args.nccl, ctas=args.ctas)
    found = tasks(facts, comm, quick=args.quick)
    for name in chosen([task.name for task in found], args.only):
        print(name)
    return 0


def _report(args: argparse.Namespace) -> int:
    record = newest(args.out)
    if record is None:
        raise BenchmarkError(
            "There are no figures to report.",
            where=f"--out {args.out.name}",
            why="nothing was measured into it.",
            do="python -m benchmarks.overlap",
        )
    facts = gpu_of(record.conditions["device"])
    comm = collective_of(record.conditions)
    names = [task.name for task in tasks(facts, comm, quick=record.conditions["quick"])]
    _tell(record, facts, args.out, [name for name in names if not record.has(name)])
    return 0


def _measure(args: argparse.Namespace) -> int:
    device = _gpu_here()
    if device is None:
        return 1
    facts = gpu_of(device.device_kind)
    _tell_of_kernels(facts)
    comm = collective(facts, nccl=args.nccl, ctas=args.ctas)
    found = {task.name: task for task in tasks(facts, comm, quick=args.quick)}
    names = chosen(list(found), args.only)
    rounds = args.rounds or (QUICK_ROUNDS if args.quick else ROUNDS)
    session = Session(facts, comm, bytes_per_s=args.link_gb_s * 1e9, rounds=rounds)
    described = conditions(device, comm, load=session.how, link_gb_s=args.link_gb_s, rounds=rounds, quick=args.quick)
    record = continued(args.out, f"{datetime.datetime.now(datetime.UTC):%Y-%m-%d %H:%M} UTC", described)
    wanted = [found[name] for name in names if args.again or not record.has(name)]
    save(record, args.out)
    for known in session.run(wanted, record, seconds=args.seconds):
        record = known
        save(record, args.out)
    left = [name for name in found if not record.has(name)]
    _tell(record, facts, args.out, left)
    if left:
        print(f"Not measured yet: {', '.join(left)}. Run it again, with the same --out.")
    return 0


def _gpu_here() -> Any:
    """The first GPU; None without one, and that is said."""
    device = jax.devices()[0]
    if device.platform == "gpu":
        return device
    here = f"JAX sees {jax.device_count()} x {device.device_kind}"
    print(f"No GPU is here ({here}): run it where one is, or see --list --gpu h200.", file=sys.stderr)
    return None


def _tell_of_kernels(facts: Gpu) -> None:
    """Says why jshard's kernels are not measured, if they are not."""
    why = why_no_kernels(facts)
    if why:
        print(f"Without jshard's kernels: {why}.", file=sys.stderr)


def _tell(record: Record, facts: Gpu, folder: Path, left: Sequence[str]) -> None:
    for path in report.write(record, facts, folder, left):
        print(path)
    print("\n" + report.markdown(record, facts, left))
