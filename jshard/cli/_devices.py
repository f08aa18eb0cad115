"""The devices of a command: the mesh over them, and those that are simulated where there is no accelerator."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping

import jax

import jshard as js
from jshard.cli._arguments import as_option, num_devices
from jshard.errors import MeshError
from jshard.plans.mesh import AXES, AnyMesh, nearest_degrees


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
            where=f"--mesh {as_option(sizes)}",
            why=error.why,
            do=f"--mesh {as_option(nearest_degrees(sizes, len(jax.devices()) if devices is None else devices))}"
            f"  # the axes are {', '.join(AXES)}; one may be -1 for the rest",
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
