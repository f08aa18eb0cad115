"""One end of a connection between two supervisors, which never waits and believes nothing that it reads."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Iterable, Mapping

from jshard.launch.messages import LINE_BYTES, Message, decoded, encoded

GOODBYE_S = 2.0
"""How long a closing connection waits for the other side to read its last message."""

_LINES = 1024  # per call, so that an endless sender cannot occupy the loop that reads
_PENDING_BYTES = 1 << 20


class Link:
    """One end of a connection. Nothing here waits, except `close_all`.

    Input is untrusted: a line that is too long, or is not a message, closes the link.

    Args:
        sock: a connected socket, which the link then owns.

    Attributes:
        peer: the address of the other side.
        closed: whether no more messages can arrive.
    """

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        with contextlib.suppress(OSError):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.socket = sock
        self.peer = _peer(sock)
        self.pending = b""
        self.closed = False
        self._received = b""
        self._sent_at_s = time.monotonic()
        self._heard_at_s = self._sent_at_s

    @property
    def silent_s(self) -> float:
        """Returns the time since the last data from the other side."""
        return time.monotonic() - self._heard_at_s

    def send(self, message: Mapping[str, object]) -> None:
        """Sends a message now or, if the other side is slow, with a later one."""
        self.send_line(encoded(message))

    def send_line(self, line: bytes) -> None:
        """Sends a line, such as a sealed message."""
        self.pending += line + b"\n"
        self._sent_at_s = time.monotonic()
        self._flush()

    def beat(self, every_s: float, state: Mapping[str, object] | None = None) -> None:
        """Sends a sign of life if the last message is older than `every_s`."""
        if time.monotonic() - self._sent_at_s >= every_s:
            self.send({"beat": state})
        else:
            self._flush()

    def line(self) -> bytes | None:
        """Returns the next line, undecoded; None if it has not arrived. Never reads more than the longest line."""
        line, end, rest = self._received.partition(b"\n")
        if not end:
            self._read()
            line, end, rest = self._received.partition(b"\n")
        # Also one whose end has not arrived: a sender cannot fill the memory with a single line.
        if len(line) > LINE_BYTES:
            self.closed = True
            self._received = b""
            return None
        if not end:
            return None
        self._received = rest
        return line

    def lines(self) -> list[bytes]:
        """Returns the lines received since the last call, undecoded."""
        lines: list[bytes] = []
        while len(lines) < _LINES:
            line = self.line()
            if line is None:
                break
            lines.append(line)
        return lines

    def receive(self) -> list[Message]:
        """Returns the messages received since the last call; closes the link at anything else."""
        messages = []
        for line in self.lines():
            message = decoded(line)
            if message is None:
                self.closed = True
                break
            messages.append(message)
        return messages

    def drop(self) -> None:
        """Closes at once, even with messages in transit."""
        self.socket.close()
        self.closed = True

    def _read(self) -> None:
        if self.closed:
            return
        try:
            data = self.socket.recv(LINE_BYTES + 1 - len(self._received))
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self.closed = True
            return
        # Any data is a sign of life, also a part of a line.
        self._heard_at_s = time.monotonic()
        self._received += data

    def _flush(self) -> None:
        """Sends what the socket accepts now."""
        try:
            while self.pending and not self.closed:
                sent_bytes = self.socket.send(self.pending)
                self.pending = self.pending[sent_bytes:]
        except BlockingIOError:
            # The other side does not read. Its messages would fill the memory of this one.
            self.closed = len(self.pending) > _PENDING_BYTES
        except OSError:
            # The last messages of the other side are still unread: `line` will find the end.
            self.pending = b""


def close_all(links: Iterable[Link]) -> None:
    """Closes links after the other sides have read all messages, within `GOODBYE_S` in total."""
    links = list(links)
    deadline_s = time.monotonic() + GOODBYE_S
    for link in links:
        with contextlib.suppress(OSError):
            link.socket.settimeout(max(deadline_s - time.monotonic(), 0.01))
            link.socket.sendall(link.pending)
            link.socket.shutdown(socket.SHUT_WR)
    for link in links:
        # Closing at once with unread data here would reset the connection and lose our last message there.
        _read_to_end(link.socket, deadline_s)
        link.drop()


def _read_to_end(sock: socket.socket, deadline_s: float) -> None:
    """Reads until the other side has closed, too."""
    with contextlib.suppress(OSError):
        left_s = deadline_s - time.monotonic()
        while left_s > 0:
            sock.settimeout(left_s)
            if not sock.recv(65536):
                return
            left_s = deadline_s - time.monotonic()


def _peer(sock: socket.socket) -> str:
    """Returns the address of the other side; an IPv4 address in its usual form."""
    try:
        name = sock.getpeername()
    except OSError:  # it has closed
        return "unknown"
    if not isinstance(name, tuple):
        return "local"
    # A socket for both kinds of addresses reports IPv4 ones with this prefix.
    return str(name[0]).removeprefix("::ffff:")
