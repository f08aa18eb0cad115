"""Model FLOPs utilisation: what share of its devices' peak a run turns into the model's arithmetic; and peak memory."""

from __future__ import annotations

import dataclasses
import functools
import time
import warnings
from collections.abc import Sequence

import jax
import numpy as np

from jshard.facts.devices import peak_of

_SIDE = 1024  # of the matrices that measure a CPU
_MEASURE_S = 0.2


@dataclasses.dataclass(frozen=True)
class Peak:
    """The arithmetic that the devices of a run could do together, and where that figure comes from."""

    flops_per_s: float
    source: str


def device_peak(devices: Sequence[jax.Device]) -> Peak | None:  # pyright: ignore[reportInvalidTypeForm]
    """The peak of some devices together; None, with a warning, where it is not known.

    Accelerators: dense bf16 from `jshard.facts.devices`, whatever dtype the model computes in. CPU: measured in a
    fifth of a second on one device of this process. Simulated devices share the cores of their host, and so do several
    processes on it: the figure counts once for all devices, as that of one host.
    """
    kinds = sorted({device.device_kind for device in devices})
    if devices[0].platform == "cpu":
        device = next(device for device in devices if device.process_index == jax.process_index())
        return Peak(_cpu_flops_per_s(device), f"measured: float32 matmul {_SIDE}^3 on this host's CPU")
    found = peak_of(kinds[0]) if len(kinds) == 1 else None
    if found is None:
        warnings.warn(f"The peak of {', '.join(kinds)} is not known, so no MFU is shown.", stacklevel=2)
        return None
    flops_per_s, source = found
    each = f"{len(devices)} x {flops_per_s / 1e12:g}e12 of {kinds[0]}"
    dtype = "fp16" if "V100" in kinds[0] else "bf16"
    return Peak(len(devices) * flops_per_s, f"{each}: dense {dtype}, {source}")


@functools.cache
def _cpu_flops_per_s(device: jax.Device) -> float:  # pyright: ignore[reportInvalidTypeForm]
    matmul = jax.jit(lambda x: x @ x)
    x = jax.device_put(np.ones((_SIDE, _SIDE), np.float32), device)
    matmul(x).block_until_ready()
    best_s, end_s = float("inf"), time.perf_counter() + _MEASURE_S
    while best_s == float("inf") or time.perf_counter() < end_s:
        start_s = time.perf_counter()
        matmul(x).block_until_ready()
        best_s = min(best_s, time.perf_counter() - start_s)
    return 2 * _SIDE**3 / best_s


def dense_flops(*, num_parameters: int, num_tokens: int, num_frozen: int = 0) -> tuple[float, str]:
    """Arithmetic of a step of a dense transformer, and its formula as text: 6 x parameters x tokens.

    Each parameter costs a multiplication and an addition per token, once forward and twice backward (Kaplan et al.
    2020, arXiv 2001.08361; PaLM, arXiv 2204.02311, appendix B). Attention over long sequences comes on top, and
    recomputation does not count. A frozen parameter costs once backward: 4 operations. A model file may give its own
    `flops` in the same form.

    Args:
        num_parameters: parameters of the model, tied ones once.
        num_tokens: tokens (or samples) of a global batch.
        num_frozen: of the parameters those that are not trained.

    Returns:
        Floating-point operations, and the formula.
    """
    if not num_frozen:
        return 6.0 * num_parameters * num_tokens, f"6 x {num_parameters:,} parameters x {num_tokens:,} tokens"
    trained = num_parameters - num_frozen
    formula = f"(6 x {trained:,} trained + 4 x {num_frozen:,} frozen parameters) x {num_tokens:,} tokens"
    return (6.0 * trained + 4.0 * num_frozen) * num_tokens, formula


@dataclasses.dataclass(frozen=True)
class Mfu:
    """Model FLOPs utilisation of a run.

    Attributes:
        flops_per_step: the model's arithmetic in a step, over all devices.
        formula: how that number comes about.
        peak: of all devices.

    Example:
        >>> peak = device_peak(jax.devices())
        >>> mfu = Mfu(*dense_flops(num_parameters=1_425_600, num_tokens=4096), peak)
        >>> mfu.of(step_s=0.131)
        0.231
    """

    flops_per_step: float
    formula: str
    peak: Peak

    def of(self, step_s: float) -> float:
        """The share of the peak, 0 to 1, at so many seconds per step."""
        return self.flops_per_step / step_s / self.peak.flops_per_s

    def describe(self) -> str:
        """One line: the formula and the figures that it uses."""
        return (
            "MFU = flops per step / step time / peak; "
            f"flops per step = {self.formula} = {self.flops_per_step:.2e}; "
            f"peak = {self.peak.flops_per_s:.2e} flops/s ({self.peak.source})"
        )


def peak_bytes(devices: Sequence[jax.Device], compiled_bytes: int) -> tuple[int, str]:  # pyright: ignore[reportInvalidTypeForm]
    """The most memory that a device of this process has held, and what kind of figure that is.

    Args:
        devices: devices of the run; those of other processes are passed over.
        compiled_bytes: peak bytes per device of the compiled step, for backends that do not count, as the CPU's.

    Returns:
        The bytes, and "measured" (by the backend, since the process began) or "compiled".
    """
    local = [device for device in devices if device.process_index == jax.process_index()]
    peaks = [(device.memory_stats() or {}).get("peak_bytes_in_use") for device in local]
    measured = [peak for peak in peaks if peak is not None]
    return (max(measured), "measured") if measured else (compiled_bytes, "compiled")
