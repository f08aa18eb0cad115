"""A TCP connection between two supervisors that carries JSON objects, a line each."""

from __future__ import annotations

import contextlib
import json
import socket
import time
from collections.abc import Iterable
from typing import Any

from jshard.train.launch.deadlines import GOODBYE_S

_LINE_BYTES = 16384
_PENDING_BYTES = 1 << 20


class Link:
    """One end of a connection. Nothing here waits, but its closing.

    What comes in is data of strangers until it is checked: it is parsed as JSON and never executed, and a line that
    is too long or no JSON object closes the link.

    Args:
        sock: a connected socket, which the link owns from then on.
    """

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        with contextlib.suppress(OSError):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket = sock
        self._received = b""
        self._pending = b""
        self._sent_at = self.heard_at = time.monotonic()
        self.closed = False

    @property
    def silent_s(self) -> float:
        """Time since anything came from the other side."""
        return time.monotonic() - self.heard_at

    def send(self, message: dict[str, Any]) -> None:
        """Sends a message, now or, if the other side is slow, with a later one."""
        self._pending += json.dumps(message).encode() + b"\n"
        self._sent_at = time.monotonic()
        self._flush()

    def beat(self, every_s: float, **message: Any) -> None:
        """Sends a sign of life if the last message is older than `every_s`."""
        if time.monotonic() - self._sent_at >= every_s:
            self.send({"beat": 1, **message})
        else:
            self._flush()

    def receive(self) -> list[dict[str, Any]]:
        """The messages that came since the last call."""
        # Bounded, lest a stranger who sends without end keeps us here.
        for _ in range(64):
            try:
                data = b"" if self.closed else self._socket.recv(65536)
            except BlockingIOError:
                break
            except OSError:
                data = b""
            if not data:
                self.closed = True
                break
            self.heard_at = time.monotonic()
            self._received += data
        *lines, self._received = self._received.split(b"\n")
        messages = [_parse(line) for line in lines]
        if len(self._received) > _LINE_BYTES or None in messages:
            self.closed = True
        return [message for message in messages if message is not None]

    def close(self) -> None:
        """Closes when the other side has read what was sent, or after `GOODBYE_S`."""
        close_all([self])

    def finish(self, deadline: float) -> None:
        """Says that nothing more will come; `close_all` does the rest."""
        with contextlib.suppress(OSError):
            self._socket.settimeout(max(deadline - time.monotonic(), 0.01))
            self._socket.sendall(self._pending)
            self._socket.shutdown(socket.SHUT_WR)

    def drain(self, deadline: float) -> None:
        """Waits for the other side's end of it, and closes."""
        # Closing at once would reset the connection if something unread lies here, and lose our last message there.
        with contextlib.suppress(OSError):
            while (left_s := deadline - time.monotonic()) > 0:
                self._socket.settimeout(left_s)
                if not self._socket.recv(65536):
                    break
        self._socket.close()
        self.closed = True

    def _flush(self) -> None:
        try:
            while self._pending and not self.closed:
                self._pending = self._pending[self._socket.send(self._pending) :]
        except BlockingIOError:
            self.closed = len(self._pending) > _PENDING_BYTES
        except OSError:
            # What the other side said before it went is still to be read: `receive` will find the end.
            self._pending = b""


def close_all(links: Iterable[Link]) -> None:
    """Closes them when the other sides have read what was sent, all within `GOODBYE_S`."""
    links = list(links)
    deadline = time.monotonic() + GOODBYE_S
    for link in links:
        link.finish(deadline)
    for link in links:
        link.drain(deadline)


def _parse(line: bytes) -> dict[str, Any] | None:
    try:
        message = json.loads(line) if len(line) <= _LINE_BYTES else None
    except (ValueError, RecursionError):
        return None
    return message if isinstance(message, dict) else None
