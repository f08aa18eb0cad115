"""The device that a step is shaped for, and what XLA and NCCL offer on it: channels, priority, copy engines."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax

from jshard.cluster.estimate import assumptions_of
from jshard.cluster.options import IN_FLIGHT
from jshard.cluster.replay import Assumptions
from jshard.cluster.topology import parse_topology
from jshard.facts.devices import DEVICES, DeviceFacts, device_of
from jshard.occupancy import COPY_ENGINE, GPUS, CommFootprint, GpuFacts, OccupancyError, footprint, gpu, resident
from jshard.occupancy.footprints import parsed_version
from jshard.occupancy.result import Reason


@dataclasses.dataclass(frozen=True)
class Device:
    """A device, as far as it is known."""

    title: str  # in words
    platform: str  # "gpu", "tpu" or "cpu"
    gpu: GpuFacts | None = None  # what one of its multiprocessors holds; None where that is not known, or it has none
    facts: DeviceFacts | None = None  # its rates and links; None where they are not known
    topology: str = ""  # the cluster it was named with, e.g. "h200:64x8"; empty where it was not.
    kind: str = ""  # as the driver of the one that is here names it; empty where it is only named

    def is_of(self, kind: str) -> bool:
        """Whether what was measured on a kind of device, as a driver names it, holds for this one."""
        if self.kind:
            return self.kind == kind
        try:
            return self.gpu is not None and gpu(kind).name == self.gpu.name
        except OccupancyError:
            return False

    @property
    def why_unshaped(self) -> str:
        """Why nothing is chosen for the kernels of jshard on it; empty where it is."""
        if self.gpu is not None and self.gpu.arch == "sm_90":
            return ""
        if self.gpu is None and self.platform == "gpu":
            return f"the multiprocessors of {self.title} are not known: nothing can be computed for it."
        return f"not a Hopper GPU ({self.title}): the plain forms run, which have no knobs."

    def assumptions(self, num_devices: int) -> Assumptions | None:
        """What an estimate takes for granted of so many of them; None where nothing is known.

        Links at the slowest that they are assumed to be: what hides then, hides on quicker ones.
        """
        topology = self._cluster(num_devices)
        if self.facts is None or not topology:
            return None
        slow = {"fast_bytes_per_s": self.facts.fast.range[0], "slow_bytes_per_s": self.facts.slow.range[0]}
        return dataclasses.replace(assumptions_of(parse_topology(topology)), **slow)

    def _cluster(self, num_devices: int) -> str:
        """A topology of so many devices, if none was named."""
        if self.topology or self.facts is None or self.platform != "gpu":  # of a TPU slice nobody knows the shape
            return self.topology
        together = self.facts.fast_group if self.facts.hosts_share_links else min(8, self.facts.fast_group)
        each = next(n for n in range(min(num_devices, together), 0, -1) if num_devices % n == 0)
        return f"{self.facts.name}:{num_devices // each}x{each}"


def device_named(name: str | None) -> Device:
    """A device by its name in a topology or in `jshard occupancy`, or with its topology, or the first that is here.

    Raises:
        OccupancyError: the device is not known; the error names those that there are.

    Example:
        >>> device_named("h200").gpu.num_sms
        132
    """
    if name is None:
        return _running()
    short, _, shape = name.strip().lower().partition(":")
    topology = name.strip().lower() if shape else ""
    if short in DEVICES and DEVICES[short].platform != "gpu":
        return Device(DEVICES[short].title, DEVICES[short].platform, None, DEVICES[short], topology)
    if short not in DEVICES and short not in GPUS:
        raise _unknown(name)
    found = gpu(short)
    facts = device_of(short)
    return Device(found.title, "gpu", found, facts, topology if facts else "")


def _running() -> Device:
    here = jax.devices()[0]
    if here.platform not in ("gpu", "cuda", "rocm"):
        return Device(here.device_kind, here.platform)
    try:
        found = gpu(here.device_kind)
    except OccupancyError:  # of the model: the kernels may run there, and nobody knows how full it is
        return Device(here.device_kind, "gpu", kind=here.device_kind)
    return Device(found.title, "gpu", found, device_of(here.device_kind), kind=here.device_kind)


def _unknown(name: str) -> OccupancyError:
    known = dict.fromkeys([*DEVICES, *GPUS])
    return OccupancyError(
        f"There is no device {name!r}.",
        where=f"device={name!r}",
        why=f"the devices are {', '.join(known)}; or one with its cluster, as in h200:64x8.",
        do='js.overlap(model, device="h200")',
    )


# The side of XLA and NCCL: channels, priority, copy engines, and which version of NCCL knows which variable.

_LIMIT = "xla_gpu_experimental_parallel_collective_overlap_limit"
_PRIORITY = "xla_gpu_enable_highest_priority_async_stream"
_SYMMETRIC = "xla_gpu_experimental_enable_nccl_symmetric_buffers"
_POLICY_SINCE = (2, 28)  # NCCL_CTA_POLICY=ZERO: the copy engines
_RING_THREADS = 544
_FEWER = 256  # NCCL_NTHREADS: with its synchronising warp 288 threads

_CAUTION = (
    "XLA held symmetric kernels back for illegal-memory errors (openxla/xla#33613, #36462): try them before a long run."
)
_ASSUMED = "ctas: an assumption"  # in the source of a footprint


@dataclasses.dataclass(frozen=True)
class Side:
    """What is asked of XLA and of NCCL."""

    options: Mapping[str, Any]  # for the compiler, to be checked against its table
    environment: Mapping[str, str]  # variables of NCCL
    reasons: tuple[Reason, ...]  # for each of both
    notes: tuple[str, ...] = ()  # what else to know


def side_of(comm: CommFootprint | None, gpu: GpuFacts | None, *, ctas: int | None, version: str | None) -> Side:
    """What is asked of XLA and NCCL beside the kernels."""
    common = [
        Reason(_LIMIT, str(IN_FLIGHT), "fact", "1 by default: a window closes when the next collective begins."),
        Reason(_PRIORITY, "True", "fact", "the default, stated: with it a collective has the next block's place."),
    ]
    options: dict[str, Any] = {_LIMIT: IN_FLIGHT, _PRIORITY: True}
    if comm is None or gpu is None:
        return Side(options, {}, tuple(common))
    if comm.name == COPY_ENGINE.name:
        return _copy_engines(options, common, version)
    if comm.name == "symmetric":
        options[_SYMMETRIC] = True
        common.append(Reason(_SYMMETRIC, "True", "fact", "symmetric kernels need NCCL's symmetric memory."))
    if ctas is not None:
        name = "xla_gpu_nccl_p2p_max_nchannels" if comm.name == "p2p" else "xla_gpu_nccl_collective_max_nchannels"
        options[name] = ctas
        common.append(Reason(name, str(ctas), "model", "no more blocks than there is room for; XLA hands it to NCCL."))
    environment, notes = _threads(comm, gpu, common)
    if _ASSUMED in comm.source:
        line = f"That a collective has {comm.ctas} blocks is an assumption, as NCCL chooses by the links:"
        notes = (f"{line} comm=footprint(..., ctas=N) says it.", *notes)
    if _SYMMETRIC in options:
        notes = (*notes, _CAUTION)
    return Side(options, environment, tuple(common), notes)


def _copy_engines(options: dict[str, Any], reasons: list[Reason], version: str | None) -> Side:
    if version is not None and parsed_version(version) < _POLICY_SINCE:
        raise OccupancyError(
            "This NCCL moves nothing by the copy engines.",
            where=f'comm="{COPY_ENGINE.name}", nccl="{version}"',
            why="NCCL_CTA_POLICY=ZERO is known since 2.28.",
            do='comm="ring", or NCCL 2.28 or newer.',
        )
    why = "NCCL 2.28 and newer: gathers and all-to-alls move by the copy engines. It may cost bandwidth."
    reasons += [
        Reason(_SYMMETRIC, "True", "fact", "the copy engines need NCCL's symmetric memory."),
        Reason("NCCL_CTA_POLICY", "ZERO", "fact", why),
    ]
    notes = (
        "Reduce-scatters and all-reduces compute: copy engines cannot do them, and they still take multiprocessors.",
        _CAUTION,
    )
    return Side(options | {_SYMMETRIC: True}, {"NCCL_CTA_POLICY": "ZERO"}, tuple(reasons), notes)


def _threads(comm: CommFootprint, gpu: GpuFacts, reasons: list[Reason]) -> tuple[dict[str, str], tuple[str, ...]]:
    """NCCL_NTHREADS, where the footprint has other threads than NCCL's own; else what they would change."""
    beside = comm.block
    if comm.name != "ring" or beside is None:
        return {}, ()
    if comm.threads != _RING_THREADS:
        asked = str(comm.threads - 32)
        why = f"the footprint has {comm.threads} threads, of which one warp synchronises; NCCL's own is 512."
        reasons.append(Reason("NCCL_NTHREADS", asked, "fact", why))
        return {"NCCL_NTHREADS": asked}, ()
    fewer = footprint("ring", gpu=gpu, version=comm.version, ctas=comm.ctas, nccl_nthreads=_FEWER).block
    assert fewer is not None
    now, then = resident(gpu, beside), resident(gpu, fewer)
    if then <= now:
        return {}, ()
    line = f"Not chosen, as nobody measured it: with NCCL_NTHREADS={_FEWER} a multiprocessor holds {then} of its"
    return {}, (f"{line} blocks for {now}, and fewer are to be left: comm=footprint(..., nccl_nthreads={_FEWER}).",)
