"""Settings of XLA and NCCL for collectives beside kernels, each with its reason."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from jshard.cluster.options import IN_FLIGHT, Options, compiler_options
from jshard.occupancy import COPY_ENGINE, CommFootprint, OccupancyError, resident
from jshard.occupancy.device import Device
from jshard.occupancy.footprints import RING_THREADS, SYNC_THREADS, parsed_version
from jshard.occupancy.kernel_choice import KernelChoice, Reason

_LIMIT = "xla_gpu_experimental_parallel_collective_overlap_limit"
_PRIORITY = "xla_gpu_enable_highest_priority_async_stream"
_SYMMETRIC = "xla_gpu_experimental_enable_nccl_symmetric_buffers"
_CHANNELS = "xla_gpu_nccl_collective_max_nchannels"
_P2P_CHANNELS = "xla_gpu_nccl_p2p_max_nchannels"

_COPIES = "Reduce-scatters and all-reduces compute: copy engines cannot do them, so they still use multiprocessors."
_CAUTION = (
    "XLA held symmetric kernels back for illegal-memory errors (openxla/xla#33613, #36462): try them before a long run."
)
_WHY_OF_PROFILE = 'of the profile "fastest": docs/schedules.md has what was tried.'


@dataclasses.dataclass(frozen=True)
class CommSettings:
    """Compiler options and NCCL's variables."""

    options: Options = dataclasses.field(default_factory=dict)
    environment: dict[str, str] = dataclasses.field(default_factory=dict)
    reasons: tuple[Reason, ...] = ()
    notes: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class _Option:
    """A compiler option that the kernels need."""

    value: bool | int
    why: str


def settings_beside(
    target: Device, comm: CommFootprint | None, kernels: Mapping[str, KernelChoice], nccl: str | None
) -> CommSettings:
    """Returns the settings for a device and the kernels' choices.

    Args:
        target: the device.
        comm: the collective; None if its footprint is unknown.
        kernels: the decision for each kernel.
        nccl: the version of NCCL; None for the newest that is known.

    Raises:
        OccupancyError: copy engines were requested, and this NCCL cannot use them.
    """
    platform = target.platform if target.facts is None else target.facts.name
    if target.platform != "gpu":  # it has neither NCCL nor multiprocessors to share
        return CommSettings(compiler_options(platform=platform))
    nccl_settings = CommSettings() if comm is None else _nccl_settings(comm, nccl)
    requested = _requested_options(target, comm, kernels)
    values: dict[str, Any] = {name: option.value for name, option in requested.items()}
    # An option that the installed compiler does not have is omitted, with a warning.
    options = compiler_options(platform=platform, **values)
    return CommSettings(
        options=options,
        environment=nccl_settings.environment,
        reasons=(*nccl_settings.reasons, *_option_reasons(options, requested)),
        notes=(*nccl_settings.notes, *_option_notes(options, comm)),
    )


# ---- NCCL


def _nccl_settings(comm: CommFootprint, nccl: str | None) -> CommSettings:
    """Returns the variables that make NCCL run as the footprint says."""
    if comm is COPY_ENGINE:
        if nccl is not None and parsed_version(nccl) < (2, 28):
            raise OccupancyError(
                "This NCCL cannot use the copy engines.",
                where=f'comm="{COPY_ENGINE.name}", nccl="{nccl}"',
                why="NCCL_CTA_POLICY=ZERO needs 2.28 or newer.",
                do='comm="ring"  # or NCCL 2.28 or newer',
            )
        why = "NCCL 2.28 and newer: gathers and all-to-alls use the copy engines. This may cost bandwidth."
        return _variable("NCCL_CTA_POLICY", "ZERO", why, notes=(_COPIES,))
    if comm.name == "ring" and comm.threads != RING_THREADS:
        why = "the footprint has fewer threads than NCCL's default; one warp of them synchronises."
        return _variable("NCCL_NTHREADS", str(comm.threads - SYNC_THREADS), why)
    return CommSettings()


def _variable(name: str, value: str, why: str, notes: tuple[str, ...] = ()) -> CommSettings:
    return CommSettings(environment={name: value}, reasons=(Reason(name, value, "fact", why),), notes=notes)


# ---- XLA


def _option_reasons(options: Options, requested: Mapping[str, _Option]) -> Iterator[Reason]:
    """Yields the reason of each option, in their order."""
    for name, value in options.items():
        why = requested[name].why if name in requested else _WHY_OF_PROFILE
        # How many blocks there is room for follows from the model; the other values do not depend on it.
        origin = "model" if name in (_CHANNELS, _P2P_CHANNELS) else "fact"
        yield Reason(name, str(value), origin, why)


def _option_notes(options: Options, comm: CommFootprint | None) -> Iterator[str]:
    """Yields remarks on options that rest on an assumption, or are a risk."""
    # `footprint` adds these words to the source if no number of blocks was given.
    limits_channels = _CHANNELS in options or _P2P_CHANNELS in options
    if limits_channels and comm is not None and "ctas: an assumption" in comm.source:
        yield (
            f"The {comm.ctas} blocks of a collective are an assumption, because NCCL chooses by the links:"
            " comm=footprint(..., ctas=N) sets it."
        )
    if _SYMMETRIC in options:
        yield _CAUTION


def _requested_options(
    target: Device, comm: CommFootprint | None, kernels: Mapping[str, KernelChoice]
) -> dict[str, _Option]:
    """Returns compiler options beside the kernels, each with its reason."""
    requested = {
        _LIMIT: _Option(IN_FLIGHT, "1 by default: a window closes when the next collective starts."),
        _PRIORITY: _Option(True, "the default, set explicitly: it gives a collective the next block's place."),
    }
    if comm is None:
        return requested
    if comm.name in ("symmetric", COPY_ENGINE.name):
        why = "symmetric kernels and copy engines need NCCL's symmetric memory."
        requested[_SYMMETRIC] = _Option(True, why)
    channels = _most_channels(target, comm, kernels)
    if channels is not None:
        name = _P2P_CHANNELS if comm.name == "p2p" else _CHANNELS
        why = "no more blocks than there is room for; XLA passes it to NCCL."
        requested[name] = _Option(channels, why)
    return requested


def _most_channels(target: Device, comm: CommFootprint, kernels: Mapping[str, KernelChoice]) -> int | None:
    """Returns how many blocks of a collective have room beside every kernel; None if no kernel leaves any for them."""
    leaving = [choice for choice in kernels.values() if choice.knobs.reserved_sms]
    if not leaving or comm.block is None or target.gpu is None:
        return None
    if any(choice.reason.origin == "measured" for choice in leaving):
        return comm.ctas  # it was measured beside all of them
    blocks_per_sm = resident(target.gpu, comm.block)
    # The option holds for the whole program, so the kernel that leaves least decides.
    places = [choice.knobs.reserved_sms * blocks_per_sm for choice in leaving]
    return min(comm.ctas, *places)
