"""Batches of the host as sharded arrays, read and copied to the devices ahead of the step that needs them."""

from __future__ import annotations

import contextlib
import dataclasses
import queue
import threading
import time
from collections.abc import Generator, Iterable

from jax.sharding import Mesh

from jshard._types import PyTree
from jshard.plans.batch import shard_batch

BATCHES_AHEAD = 2
"""So many batches are on their way to the devices."""

_END_S = 5.0  # for the reading thread, when a run stops early


@dataclasses.dataclass(frozen=True)
class _End:
    """Follows the last batch.

    Attributes:
        error: why there are no more; None if all were read.
    """

    error: BaseException | None


def to_devices(batches: Iterable[PyTree], mesh: Mesh, *, ahead: int = BATCHES_AHEAD) -> Generator[PyTree, None, None]:
    """Yields batches of the host as sharded arrays, read and copied ahead in a separate thread.

    Args:
        batches: this process's rows of each batch.
        mesh: the mesh of the model.
        ahead: number of batches to keep on the devices in advance.

    Returns:
        An iterator of global batches, sharded over the data axes on the leading dim.
    """
    ready: queue.Queue[PyTree] = queue.Queue(ahead)
    stop = threading.Event()

    def read() -> None:
        error: BaseException | None = None
        try:
            for batch in batches:
                ready.put(shard_batch(batch, mesh))
                if stop.is_set():
                    return
        except BaseException as raised:  # the main thread raises it, whatever it is
            error = raised
        ready.put(_End(error))

    # A daemon: a thread that waits for data which never arrive must not keep the process alive.
    thread = threading.Thread(target=read, name="to_devices", daemon=True)
    thread.start()
    try:
        while not isinstance(item := ready.get(), _End):
            yield item
        if item.error is not None:
            raise item.error
    finally:
        # The thread looks at this after each batch, and may be waiting for space to put it.
        stop.set()
        _end(thread, ready)


def _end(thread: threading.Thread, ready: queue.Queue[PyTree]) -> None:
    """Waits for the thread, which may be waiting for space, but not for data that never arrive."""
    deadline_s = time.monotonic() + _END_S
    while thread.is_alive() and time.monotonic() < deadline_s:
        with contextlib.suppress(queue.Empty):
            ready.get_nowait()
        thread.join(0.01)
