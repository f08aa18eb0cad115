"""How long a kernel takes, as XLA's scheduler is told.

A custom call that says nothing counts as free: the collectives around it become synchronous, or all move to the
front of the program. With an estimate it is scheduled as the matrix products of XLA are (compiled for 8 H200: see
`tests/test_kernel_schedule.py`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from jax.experimental.xla_metadata import set_xla_metadata

from jshard.cluster.devices import DEVICES, DeviceFacts

_REACHED = 0.6  # of the peak, of flops and of bandwidth alike: an assumption where nothing was measured
_LAUNCH_NS = 2000


def product_ns(m: int, n: int, k: int, *, kind: str, products: int = 1) -> int:
    """An estimate for matrix products of (m, k) and (k, n) in 16 bits on a kind of device."""
    return _LAUNCH_NS + int(1e9 * products * 2 * m * n * k / (_REACHED * _facts(kind).flops_per_s["bf16"]))


def traffic_ns(num_bytes: int, *, kind: str) -> int:
    """An estimate for a kernel that reads and writes so many bytes of device memory, and computes little."""
    return _LAUNCH_NS + int(1e9 * num_bytes / (_REACHED * _facts(kind).hbm_bytes_per_s))


@contextlib.contextmanager
def stated(latency_ns: int) -> Iterator[None]:
    """Inside, every operation that is traced carries this latency."""
    with set_xla_metadata(latency_metadata=str(max(1, latency_ns))):
        yield


def _facts(kind: str) -> DeviceFacts:
    """Facts of the device that the driver names so; of an H100 where it is none of the table."""
    words = kind.lower().replace("-", " ").split()
    found = (facts for name, facts in DEVICES.items() if facts.platform == "gpu" and name.split("-")[0] in words)
    return next(found, DEVICES["h100"])
