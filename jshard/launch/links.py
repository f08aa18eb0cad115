"""The TCP connections between the supervisors of a run: JSON objects, a line each."""

from __future__ import annotations

import contextlib
import json
import socket
import time
from collections.abc import Iterable, Mapping
from typing import Any

from jshard.launch.cluster import GOODBYE_S, Deadlines
from jshard.launch.endings import Ending, from_message, to_message

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


# The links between the supervisors of a run while it runs.


class Peers:
    """The other supervisors, as one of them sees them: process 0 is linked to all, the others to process 0.

    Messages: {"beat": 1, "step": n}, {"ended": ending of the sender's worker}, and from process 0
    {"verdict": the ending that was the cause}.

    Args:
        process_id: whose view this is.
        links: by process id.
        hosts: the machines of those, by process id.
        deadlines: of the run.
    """

    def __init__(
        self, *, process_id: int, links: Mapping[int, Link], hosts: Mapping[int, str], deadlines: Deadlines
    ) -> None:
        self.process_id = process_id
        self.verdict: Ending | None = None
        self._links = dict(links)
        self._hosts = dict(hosts)
        self._deadlines = deadlines
        self._steps: dict[int, int] = {}
        self._over: set[int] = set()

    @property
    def decides(self) -> bool:
        """Whether it is for this supervisor to say which process was lost: for that of process 0, if it is there."""
        return self.process_id == 0 or not self._links

    def poll(self, step: int | None) -> list[Ending]:
        """Sends a sign of life, and returns the bad endings heard of since the last call.

        Args:
            step: the last one that our worker reported, for the others to know.
        """
        found = []
        for process, link in list(self._links.items()):
            ending = self._hear(process, link)
            if ending is not None and process not in self._over:
                self._over.add(process)
                if not ending.good:
                    found.append(ending)
            # The link of one whose worker has ended stays: it waits for the verdict.
            if link.closed or link.silent_s > self._deadlines.peer_s:
                del self._links[process]
                link.close()
            else:
                link.beat(self._deadlines.beat_s, step=step)
        return found

    def tell(self, ending: Ending) -> None:
        """Tells the others how our worker ended."""
        self._send({"ended": to_message(ending)})

    def announce(self, verdict: Ending) -> None:
        """Tells the others which process was lost; process 0 does."""
        self._send({"verdict": to_message(verdict)})

    def close(self) -> None:
        """Ends the links, when the others have read what was sent."""
        close_all(self._links.values())
        self._links.clear()

    def _send(self, message: dict) -> None:
        for link in self._links.values():
            link.send(message)

    def _hear(self, process: int, link: Link) -> Ending | None:
        ending = None
        for message in link.receive():
            if type(message.get("step")) is int:
                self._steps[process] = message["step"]
            if self.process_id != 0 and self.verdict is None:
                self.verdict = from_message(message.get("verdict"))
            told = from_message(message.get("ended"))
            if told is not None and told.process == process:
                ending = told
        if ending is not None:
            return ending
        silent_s = link.silent_s if link.silent_s > self._deadlines.peer_s else None
        if silent_s is None and not link.closed:
            return None
        host, step = self._hosts.get(process, "unknown"), self._steps.get(process)
        return Ending(process=process, host=host, silent_s=silent_s, step=step)


def hostname() -> str:
    """This machine's name, short enough for a message."""
    return socket.gethostname()[:255]
