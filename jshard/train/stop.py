"""Stopping between two steps: SIGTERM, Ctrl-C and SIGHUP end a run after it has saved.

A signal reaches the processes of a run at different times, or only one of them. They must leave after the same step,
as the save is the work of all. So each adds, to every step it starts, whether it was asked to stop; one small
collective makes it known to all, and is read with that step's loss.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from types import FrameType

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jshard.launch.worker import is_worker

_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)  # the last one: the terminal is gone
_REPEAT_S = 1.0  # a launcher and a terminal may each send the same one


class StopSignal:
    """Catches SIGTERM, SIGINT and SIGHUP while the context is open.

    A second one, a second later or more, ends the program. A worker of several processes only notes them, however
    many: its supervisor decides when to end it. Python hands signals to the main thread only; used in another one this
    catches nothing.

    Example:
        >>> with StopSignal() as stop:
        ...     while stop.received is None:
        ...         step()
    """

    def __init__(self) -> None:
        self.received: signal.Signals | None = None
        self._since_s = 0.0
        self._asked_s: float | None = None
        self._before: dict[signal.Signals, object] = {}

    def __enter__(self) -> StopSignal:
        if threading.current_thread() is threading.main_thread():
            # What is ignored stays so, as SIGHUP under nohup.
            heard = [number for number in _SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
            self._before = {number: signal.signal(number, self._catch) for number in heard}
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    def report(self) -> None:
        """Notes that the run is asked to stop, by whichever process: its deadline counts from the first time."""
        if self._asked_s is None:
            self._asked_s = time.monotonic()

    def left_s(self, deadline_s: float | None) -> float | None:
        """What is left of a deadline that counts from the signal; None if there is no deadline, or no signal yet."""
        if deadline_s is None or self._asked_s is None:
            return None
        return max(0.0, self._asked_s + deadline_s - time.monotonic())

    def _catch(self, number: int, frame: FrameType | None) -> None:
        now_s = time.monotonic()
        if self.received is None:
            self.received, self._since_s = signal.Signals(number), now_s
            self.report()
            _say(f"\n{self.received.name}: the run saves after this step and stops; a second one ends it unsaved.\n")
        elif now_s - self._since_s > _REPEAT_S and not is_worker():
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)


def _say(text: str) -> None:
    # Not print: the signal may have come in the middle of one.
    with contextlib.suppress(OSError):
        os.write(2, text.encode())


class Agreement:
    """What any process was asked, known to all of them: the larger of the numbers that they give.

    Args:
        mesh: the devices of all processes.

    Attributes:
        alone: whether there is one process, which has nobody to ask.
    """

    def __init__(self, mesh: Mesh) -> None:
        self.alone = len({device.process_index for device in mesh.devices.flat}) == 1
        self._sharding = NamedSharding(mesh, PartitionSpec(mesh.axis_names))
        self._num_devices = mesh.size
        self._flags: dict[int, jax.Array] = {}
        self._largest = jax.jit(jnp.max, out_shardings=NamedSharding(mesh, PartitionSpec()))

    def start(self, number: int) -> jax.Array | int:
        """Gives this process's number; all processes must call it equally often. Does not wait."""
        if self.alone:
            return number
        if number not in self._flags:
            flags = np.full(self._num_devices, number, np.int32)
            self._flags[number] = jax.make_array_from_callback(flags.shape, self._sharding, lambda index: flags[index])
        return self._largest(self._flags[number])
