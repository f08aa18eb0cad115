"""`tune_overlap`: chooses the room that kernels leave to collectives, and settings of XLA and NCCL, for a plan."""

from __future__ import annotations

import dataclasses
import json
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import flax.linen as nn
from flax import nnx
from rich.console import Group, RenderableType
from rich.text import Text

from jshard._paths import expanded
from jshard._types import PyTree
from jshard.errors import RunError
from jshard.inspect.tables import FittedTable, Printed, add_row, made_table
from jshard.kernels.backend import Backend, Occupancy
from jshard.occupancy import COPY_ENGINE, CommFootprint, footprint
from jshard.occupancy.comm_settings import settings_beside
from jshard.occupancy.device import Device, device_named
from jshard.occupancy.footprints import check_kind
from jshard.occupancy.kernel_choice import Reason, choices_by_measurement, choices_by_model
from jshard.occupancy.measured import (
    CacheError,
    Measured,
    default_path,
    footprint_text,
    load,
    of_first,
    parsed,
    text_of,
)
from jshard.occupancy.products import products_of
from jshard.plans.plan import ShardPlan
from jshard.plans.plan import plan as plan_of

_LEGEND = (
    'from: "measured" on this kind of device; "model" computed from facts about the device, its kernels and NCCL;'
    ' "estimate" compares times under stated assumptions. Only a measurement shows the fastest: jshard tune'
)
_PRODUCTS_UNKNOWN = (
    "The model's products are unknown, so no measurement was used: pass the nnx model, loss_fn= and batch=."
)


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class Overlap(Printed):
    """The result of `js.tune_overlap`. `print` it; a notebook displays it; `to_json` is for programs.

    Attributes:
        device: as text.
        comm: the collective beside the kernels; None if its footprint on this device is unknown.
        occupancy: the occupancy argument for each kernel: "matmul", "mlp", "rms_norm" and "layer_norm".
        backends: the `backend` of each kernel: "auto", or "xla" where XLA's own was measured to be faster.
        compiler_options: for `jax.jit(compiler_options=...)`.
        environment: variables for NCCL. Nothing is set: `exports` has the lines for a shell.
        reasons: the basis of each decision.
        notes: further remarks.
    """

    device: str
    comm: CommFootprint | None
    occupancy: Mapping[str, Occupancy]
    backends: Mapping[str, Backend]
    compiler_options: Mapping[str, Any]
    environment: Mapping[str, str]
    reasons: tuple[Reason, ...]
    notes: tuple[str, ...] = ()

    @property
    def exports(self) -> tuple[str, ...]:
        """Returns lines for the shell that starts the run."""
        return tuple(f"export {name}={value}" for name, value in self.environment.items())

    def __rich__(self) -> Group:
        # The other reasons are named after options and variables.
        kernels = [reason for reason in self.reasons if reason.what in self.occupancy]
        settings = [reason for reason in self.reasons if reason.what not in self.occupancy]
        parts: list[RenderableType] = [Text(self._headline())]
        parts += [Text(), _reasons_table("Kernels: how much they leave", "kernel", kernels)]
        if settings:
            parts += [Text(), _reasons_table("Compiler (xla_gpu_...) and NCCL", "option", settings)]
        parts.append(Text())
        if self.exports:
            parts.append(Text("For the shell, nothing is set:"))
            parts += [Text(f"  {line}") for line in self.exports]
        parts += [Text(note) for note in self.notes]
        return Group(*parts, Text(_LEGEND))

    def to_json(self) -> str:
        """Returns everything as text."""
        return json.dumps(dataclasses.asdict(self), indent=1)

    def _headline(self) -> str:
        if self.comm is None:
            return f"{self.device}: nothing is left free for a collective"
        if not self.comm.ctas:
            return f"{self.device}, collectives by {self.comm}: they use no multiprocessor"
        block = f"{self.comm.threads} threads x {self.comm.registers} registers, {self.comm.smem_bytes:,} B"
        return f"{self.device}, beside {self.comm}: {self.comm.ctas} blocks of {block}"


def _reasons_table(title: str, column: str, reasons: Sequence[Reason]) -> FittedTable:
    table = made_table(title, column, "chosen", "from", "why")
    for reason in reasons:
        add_row(table, reason.what.removeprefix("xla_gpu_"), reason.chosen, reason.origin, reason.why)
    return table


def tune_overlap(
    model_or_plan: nnx.Module | nn.Module | ShardPlan,
    *,
    device: str | None = None,
    comm: str | CommFootprint = "ring",
    nccl: str | None = None,
    loss_fn: Callable[..., PyTree] | None = None,
    batch: PyTree = None,
    cache: str | Path | None = None,
) -> Overlap:
    """Chooses how much of a GPU a step's kernels leave to its collectives, and the settings of XLA and NCCL.

    Nothing is set or run: the result has the arguments for `js.kernels`, the compiler options and the variables
    to export, each with its reason. Persistent kernels leave free the multiprocessors that a collective fills, as
    long as that costs less than waiting. Measurements of `jshard tune` on the same kind of device take precedence
    over models. Where the kernels do not run, nothing is left free. With several processes, all of them must call it,
    and the measurements of the first one are used.

    Args:
        model_or_plan: an annotated model, nnx or Linen, concrete or abstract, or its plan.
        device: a name as in a topology, "h200", or with a cluster, "h200:64x8"; the present one by default.
        comm: the collective beside the kernels: "ring", "tree", "nvls", "pat", "p2p", "symmetric", "copy-engine", or a
            `jshard.occupancy.CommFootprint`.
        nccl: version of NCCL, e.g. "2.30.7"; by default the newest whose kernels were read.
        loss_fn: function of an nnx model and the batch. With it and `batch` the model's products are known, and with
            them each unit's computation and the measurements that apply to it.
        batch: the global batch, abstract or real; a tuple is passed as several arguments of `loss_fn`.
        cache: file of `jshard tune`; the user's by default.

    Returns:
        An `Overlap`: print it to see the choices and the reasons.

    Raises:
        AnnotationError: the root of the model is not annotated.
        OccupancyError: the device or footprint is unknown, or the collective would fill every multiprocessor.
        CacheError: the given `cache` cannot be read.

    Examples:
        >>> shaped = js.tune_overlap(model, device="h200")
        >>> shaped.occupancy["matmul"].reserved_sms
        16
        >>> step = jax.jit(lambda x: x + 1, compiler_options=dict(shaped.compiler_options))
    """
    target = device_named(device)
    plan = model_or_plan if isinstance(model_or_plan, ShardPlan) else plan_of(model_or_plan)
    products = None  # they are found in nnx models only
    if loss_fn is not None and batch is not None and isinstance(model_or_plan, nnx.Module):
        products = products_of(model_or_plan, loss_fn, batch)
    beside = _footprint(comm, target, nccl)
    kernels = choices_by_model(target, beside, plan, products)
    # Read in any case: all processes take part in it, and they may have different devices.
    measured, notes = _measurements(cache)
    if beside is not None and not target.why_unshaped:
        if products is None:
            notes.append(_PRODUCTS_UNKNOWN)
        # A measurement replaces what the model says of the same kernel.
        kernels |= choices_by_measurement(_valid_for(target, beside, measured), products or ())
    settings = settings_beside(target, beside, kernels, nccl)
    kernel_reasons = [choice.reason for choice in kernels.values()]
    return Overlap(
        device=target.title,
        comm=beside,
        occupancy={name: choice.knobs for name, choice in kernels.items()},
        backends={name: choice.backend for name, choice in kernels.items()},
        compiler_options=settings.options,
        environment=settings.environment,
        reasons=(*kernel_reasons, *settings.reasons),
        notes=(*notes, *settings.notes),
    )


def _footprint(comm: str | CommFootprint, target: Device, nccl: str | None) -> CommFootprint | None:
    """Returns the collective beside the kernels; None on a device for which its footprint is unknown."""
    # It has its own numbers, whatever is known of the device.
    if isinstance(comm, CommFootprint):
        return comm
    check_kind(comm)
    if target.gpu is not None:
        return footprint(comm, gpu=target.gpu, version=nccl)
    # Copy engines use no multiprocessor of any device.
    return COPY_ENGINE if comm == COPY_ENGINE.name else None


def _valid_for(target: Device, comm: CommFootprint, measured: Measured) -> Measured:
    """Returns the measurements that were made on this kind of device, beside this collective."""
    footprint_key = footprint_text(comm)
    valid = {}
    for key, entry in measured.items():
        if key.holds_for(target.is_of, footprint_key):
            valid[key] = entry
    return valid


def _measurements(cache: str | Path | None) -> tuple[Measured, list[str]]:
    """Returns the measurements of the first process, and a note if the user's own file cannot be read."""
    path = default_path() if cache is None else expanded(cache)

    def read() -> str:
        return text_of(load(path))

    try:
        return parsed(of_first(read, where="js.tune_overlap"), path), []
    except (CacheError, RunError) as error:
        if cache is not None:
            raise
        # Nobody named the default file: without it the choices are by the model, as they were before any measurement.
        note = f"The measurements in {path} were not used: {error.why}"
        warnings.warn(note, stacklevel=3)  # of the caller of `tune_overlap`
        return {}, [note]
