"""Whether all processes see one and the same folder: found out before the first save, and not by it."""

from __future__ import annotations

import json
import secrets
import socket
import time
from pathlib import Path

import jax

from jshard._errors import RunError
from jshard._processes import is_primary
from jshard.checkpoint.errors import CheckpointError
from jshard.checkpoint.failures import reason
from jshard.checkpoint.meeting import exchange

_SHOWN_S = 60.0  # within it a network file system shows all processes what one of them wrote


def check_shared(folder: Path, *, timeout_s: float) -> None:
    """The first process writes a file, and the others look for it; every process calls it.

    Args:
        folder: made if it is not there.
        timeout_s: how long to wait for the other processes.

    Raises:
        CheckpointError: some process does not see the file.
        RunError: it cannot be written, or a process did not come.
    """
    if jax.process_count() == 1:
        return
    name, error = f".shared-{secrets.token_hex(8)}", ""
    if is_primary():
        try:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / name).touch()
        except OSError as caught:
            error = reason(caught)
    name, error = json.loads(exchange("folder", json.dumps([name, error]), timeout_s=timeout_s)[0])
    if error:
        raise RunError(
            "The folder for checkpoints cannot be written.", where=str(folder), why=error, do="name another."
        )
    sees = _sees(folder / name)
    here = json.dumps([sees, socket.gethostname(), str(folder)])
    told = exchange("folder seen", here, timeout_s=timeout_s + _SHOWN_S)  # others may be looking still
    if is_primary():
        (folder / name).unlink(missing_ok=True)
    heard = [json.loads(text) for text in told]
    blind = [f"process {number} on {host}: {path}" for number, (seen, host, path) in enumerate(heard) if not seen]
    if blind:
        raise CheckpointError(
            "The folder for checkpoints is not shared between the processes.",
            where=blind,
            why=f"process 0 on {heard[0][1]} wrote a file into {heard[0][2]}, and these did not see it in "
            f"{_SHOWN_S:.0f} s.",
            do="name a folder on a file system that all hosts have, by the same path.",
        )


def _sees(path: Path) -> bool:
    until = time.monotonic() + _SHOWN_S
    while not path.exists():
        if time.monotonic() > until:
            return False
        time.sleep(0.1)
    return True
