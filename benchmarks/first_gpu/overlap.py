"""Matrix products beside a collective's load: the benchmark `overlap`, as much of it as there is time for."""

from __future__ import annotations

import dataclasses
import datetime
import os

# The loads of CuPy need memory, too; jax reads it when it starts a backend.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import jax

from benchmarks.first_gpu.kernels import reason
from benchmarks.first_gpu.worker import Figures, Work
from benchmarks.overlap import report
from benchmarks.overlap.bench import ROUNDS
from benchmarks.overlap.command import LINK_GB_S, QUICK_ROUNDS, tasks
from benchmarks.overlap.conclusion import sentences
from benchmarks.overlap.grid import Group
from benchmarks.overlap.machine import conditions
from benchmarks.overlap.records import Record, parsed
from benchmarks.overlap.session import PLACEMENT, Session, Task
from benchmarks.overlap.target import Comm, Gpu, collective, gpu_of, why_no_kernels
from jshard.errors import FourPartError
from jshard.occupancy import ASSUMED_CTAS

_MARGIN_S = 10.0  # to write what there is, before the part is killed


def measure(work: Work) -> None:
    """Measures the placement of blocks and then groups of products, those first that answer most."""
    device = jax.devices()[0]
    if device.platform != "gpu":
        work.leave_out("all of it", f"it needs a GPU; on an H200 it would be {', '.join(_names_on_an_h200())}.")
        return
    try:
        facts = gpu_of(device.device_kind)
    except FourPartError as error:
        work.leave_out("all of it", reason(error))
        return
    without_kernels = why_no_kernels(facts)
    if without_kernels:
        work.leave_out("jshard's kernels", f"{without_kernels}.")
    comm = _load(facts)
    quick = work.setup.quick
    rounds = QUICK_ROUNDS if quick else ROUNDS
    session = Session(facts, comm, bytes_per_s=LINK_GB_S * 1e9, rounds=rounds)
    described = conditions(device, comm, load=session.how, link_gb_s=LINK_GB_S, rounds=rounds, quick=quick)
    record = Record(date=f"{datetime.datetime.now(datetime.UTC):%Y-%m-%d %H:%M} UTC", conditions=described)
    wanted = _tasks(facts, comm, quick=quick)
    for known in session.run(wanted, record, seconds=work.left_s - _MARGIN_S):
        record = known
        work.keep(gpu=facts.name, record=dataclasses.asdict(record))
    _leave_out(work, record, wanted)


def _load(facts: Gpu) -> Comm:
    return collective(facts, nccl=None, ctas=ASSUMED_CTAS)


def _tasks(facts: Gpu, comm: Comm, *, quick: bool) -> list[Task]:
    """Returns all but the kernels alone, which are another part."""
    everything = tasks(facts, comm, quick=quick)
    return [task for task in everything if task.what == PLACEMENT or isinstance(task.what, Group)]


def _names_on_an_h200() -> list[str]:
    facts = gpu_of("h200")
    return [task.name for task in _tasks(facts, _load(facts), quick=False)]


def _leave_out(work: Work, record: Record, wanted: list[Task]) -> None:
    for name, why in record.failed.items():
        work.leave_out(name, why)
    for task in wanted:
        if not record.has(task.name):
            work.leave_out(task.name, "no time was left.")


def table(figures: Figures) -> list[str]:
    """Returns the lines of the report."""
    if "record" not in figures:
        return ["Nothing was measured."]
    record = parsed(figures["record"])
    facts = gpu_of(figures["gpu"])
    return [
        f"Measured; the load is {record.conditions['load']}. What the columns are, and the rules of the sentences:"
        " benchmarks/README.md, *Kernels beside a collective*.",
        "",
        *(f"- {sentence}" for sentence in sentences(record, facts)),
        "",
        *report.grid_table(record),
    ]
