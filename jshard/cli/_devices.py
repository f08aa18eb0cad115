"""The mesh of a command: the degrees of `--mesh`, and the devices that it needs. No jax until devices are opened."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, cast

from jshard._parsing import whole_number
from jshard.errors import MeshError

if TYPE_CHECKING:
    from jshard.plans.mesh import AnyMesh

_NUM_SIMULATED = 8


def parse_mesh(text: str) -> dict[str, int]:
    """Returns the degrees in `"replica=2,fsdp=4"`; none for an empty text."""
    sizes: dict[str, int] = {}
    for part in text.split(","):
        if not part:
            continue
        axis, _, degree = part.partition("=")
        number = None
        with contextlib.suppress(ValueError):
            number = whole_number(degree)
        if number is None or axis in sizes:
            raise MeshError(
                "The mesh cannot be read.",
                where=f"--mesh {text}",
                why=f"{part!r} is not axis=degree, or repeats an axis.",
                do="--mesh fsdp=-1  # all devices; several axes: replica=2,fsdp=4",
            )
        sizes[axis] = number
    return sizes


def as_option(sizes: Mapping[str, int]) -> str:
    """Returns degrees in the form of `--mesh`."""
    return ",".join(f"{axis}={degree}" for axis, degree in sizes.items())


def num_devices(sizes: Mapping[str, int]) -> int:
    """Returns how many devices a mesh of these degrees needs; at least 8 with an axis of -1 or an open `fsdp`."""
    named = math.prod(degree for degree in sizes.values() if degree > 0)
    is_open = -1 in sizes.values() or "fsdp" not in sizes
    if not is_open:
        return named
    # The open axis takes the rest, so the number must be a multiple of the degrees that are named.
    return named * math.ceil(_NUM_SIMULATED / named)


def open_mesh(sizes: Mapping[str, int], *, devices: int | None = None) -> AnyMesh:
    """Returns the mesh of these degrees: over all devices, or, for a number of them, an abstract one for a plan."""
    import jax

    import jshard as js
    from jshard.plans.make_mesh import nearest_degrees
    from jshard.plans.mesh import AXES

    try:
        return js.mesh(**{**sizes, "devices": cast(Any, devices)})
    except MeshError as error:  # in the words of the option
        count = len(jax.devices()) if devices is None else devices
        nearest = as_option(nearest_degrees(sizes, count))
        raise MeshError(
            error.what,
            where=f"--mesh {as_option(sizes)}",
            why=error.why,
            do=f"--mesh {nearest}  # the axes are {', '.join(AXES)}; one may be -1 for the rest",
        ) from error


def simulate_devices(sizes: Mapping[str, int], *, processes: int = 1) -> None:
    """Makes JAX simulate as many CPU devices as the mesh needs, shared by so many processes.

    Call it before JAX initialises its devices; it has no effect where there is an accelerator. A number set by the
    user is kept.
    """
    import jax

    # Both ways of JAX to set the number.
    is_set_by_user = "JAX_NUM_CPU_DEVICES" in os.environ or "device_count" in os.environ.get("XLA_FLAGS", "")
    is_unset = jax.config.values["jax_num_cpu_devices"] == -1
    if is_unset and not is_set_by_user:
        num_here = math.ceil(num_devices(sizes) / processes)  # JAX joins those of all processes
        jax.config.update("jax_num_cpu_devices", num_here)
