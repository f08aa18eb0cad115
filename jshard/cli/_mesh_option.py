"""The `--mesh` option, and the devices that are simulated where there is no accelerator."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping

import jax

import jshard as js
from jshard._errors import MeshError
from jshard._mesh import AXES, AnyMesh

_SIMULATED = 8


def parse_mesh(text: str) -> dict[str, int]:
    """The degrees in `"replica=2,fsdp=4"`; none for an empty text.

    Raises:
        MeshError: the text is not a list of axis=degree.
    """
    sizes: dict[str, int] = {}
    for part in filter(None, text.split(",")):
        axis, _, degree = part.partition("=")
        if not degree.removeprefix("-").isdecimal() or axis in sizes:
            raise MeshError(
                "The mesh cannot be read.",
                where=f"--mesh {text}",
                why=f"{part!r} is not axis=degree, or its axis was named before.",
                do="--mesh replica=2,fsdp=4, or --mesh fsdp=-1 for all devices.",
            )
        sizes[axis] = int(degree)
    return sizes


def num_devices(sizes: Mapping[str, int]) -> int:
    """Devices that a mesh of these degrees asks for; an axis of -1, or an open `fsdp`, makes it at least 8."""
    fixed = math.prod(degree for degree in sizes.values() if degree > 0)
    is_open = -1 in sizes.values() or "fsdp" not in sizes
    return fixed * math.ceil(_SIMULATED / fixed) if is_open else fixed


def open_mesh(sizes: Mapping[str, int], *, devices: int | None = None) -> AnyMesh:
    """The mesh of these degrees: over all devices, or with a number of them one without devices, for a plan.

    Raises:
        MeshError: as of `js.mesh`, in the words of the option.
    """
    try:
        return js.mesh(**sizes, devices=devices)
    except MeshError as error:
        raise MeshError(
            error.what,
            where=f"--mesh {','.join(f'{axis}={degree}' for axis, degree in sizes.items())}",
            why=error.why,
            do=f"--mesh fsdp=-1 for all devices; the axes are {', '.join(AXES)}, and one may be -1 for the rest.",
        ) from error


def simulate_devices(sizes: Mapping[str, int], *, processes: int = 1) -> None:
    """Lets JAX show as many CPU devices as the mesh asks for. Changes nothing where there is an accelerator.

    To be called before JAX is asked for its devices, and so without knowing them. A number that the user has set
    himself stays.

    Args:
        sizes: degrees of the mesh axes.
        processes: processes of the run; each shows its share.
    """
    by_user = "JAX_NUM_CPU_DEVICES" in os.environ or "device_count" in os.environ.get("XLA_FLAGS", "")
    if not by_user and jax.config.values["jax_num_cpu_devices"] == -1:
        jax.config.update("jax_num_cpu_devices", math.ceil(num_devices(sizes) / processes))


def describe_devices() -> str:
    """One line: how many devices of which kind, and whether they are simulated."""
    devices = jax.devices()
    line = f"{len(devices)} x {devices[0].device_kind}"
    if devices[0].platform == "cpu" and len(devices) > jax.process_count():
        line += f" (simulated on {os.cpu_count()} cores: for learning and tests, not for speed)"
    return line if jax.process_count() == 1 else f"{line}, {jax.process_count()} processes"
