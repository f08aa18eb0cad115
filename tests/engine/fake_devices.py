"""Devices that are not here: what a mesh, and the choices that are made for a platform, read of one."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Device:
    """A device of some kind, by the names that JAX has for these facts."""

    device_kind: str
    platform: str = "gpu"
    id: int = 0
    process_index: int = 0
    slice_index: int = 0
