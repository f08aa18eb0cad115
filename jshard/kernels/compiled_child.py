"""The process that compiles kernels: `python -m jshard.kernels.compiled_child REQUEST FOLDER`, for `compiled`."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import json
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jshard import kernels
from jshard._errors import FourPartError
from jshard.cluster.compile import ERROR, RESULT, as_json
from jshard.cluster.topology import parse_topology, topology_devices
from jshard.kernels.compiled import said_file
from jshard.kernels.knobs import Occupancy
from jshard.kernels.launch import launches


def main(argv: Sequence[str]) -> int:
    """Compiles, and leaves what the kernels ask for and what the compiler says, or the error."""
    request, folder = json.loads(argv[0]), Path(argv[1])
    try:
        devices = topology_devices(parse_topology(f"{request['device']}:1x1"))
        mesh = jax.sharding.Mesh(np.array(devices), ("device",))
        result = [_compiled(call, mesh, folder / said_file(i)) for i, call in enumerate(request["calls"])]
    except FourPartError as error:
        (folder / ERROR).write_text(json.dumps(as_json(error)))
        return 1
    (folder / RESULT).write_text(json.dumps(result))
    return 0


def _compiled(call: dict[str, Any], mesh: jax.sharding.Mesh, said: Path) -> list[dict[str, Any]]:
    """What the kernels of a call ask for; the compiler's words are left in a file."""
    settings = {**call["settings"], "backend": "mosaic"}
    settings |= {"occupancy": Occupancy(**call["occupancy"])} if call["occupancy"] else {}
    whole = jax.NamedSharding(mesh, jax.P())
    arrays = {
        name: jax.ShapeDtypeStruct(shape, call["dtype"], sharding=whole) for name, shape in call["shapes"].items()
    }

    def both_ways(arrays: dict[str, jax.Array]) -> Any:
        y, back = jax.vjp(lambda arrays: getattr(kernels, call["kernel"])(**arrays, **settings), arrays)
        return y, back(jax.tree.map(jnp.ones_like, y))

    run = jax.shard_map(both_ways, mesh=mesh, in_specs=jax.P(), out_specs=jax.P())
    lowered = jax.jit(run).trace(arrays).lower()
    with _stdout_to(said):
        lowered.compile()
    return [dataclasses.asdict(launch) for launch in launches(lowered)]


@contextlib.contextmanager
def _stdout_to(path: Path) -> Iterator[None]:
    """Inside, what C code prints goes to a file."""
    flush = ctypes.CDLL(None).fflush
    flush(None)
    kept = os.dup(1)
    with path.open("wb") as file:
        os.dup2(file.fileno(), 1)
        try:
            yield
        finally:
            flush(None)
            os.dup2(kept, 1)
            os.close(kept)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
