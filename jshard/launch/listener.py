"""A listener that admits only peers that prove that they know the token of the run.

Anybody may connect, and may then say anything or nothing. So only so many connections without a proof are kept, each
for `HELLO_S`, and the oldest of them goes first: strangers displace each other. A peer is never among them, as it sends
a greeting with its first packet. The greeting proves the token but could have been recorded, so it only keeps the
connection open; the hello that follows answers a nonce of this listener, and admits.
"""

from __future__ import annotations

import dataclasses
import secrets
import socket
import sys
import time
from collections.abc import Mapping
from typing import NamedTuple

from jshard.launch.link import Link
from jshard.launch.messages import opened, parsed, sealed
from jshard.launch.restarts import History

HELLO_S = 10.0
"""A connection without a valid hello for this long is closed."""

_GREETING = "greeting"  # in place of a nonce
_STRANGERS = 64  # connections that have not sent a greeting
_EXPECTED = 4096  # with a greeting; bounded, too, as one that was recorded can be sent again
_ROUNDS = 64  # per call: so many times _STRANGERS connections are accepted


@dataclasses.dataclass(frozen=True, kw_only=True)
class Hello:
    """How a process introduces itself; answers are signed with `nonce`."""

    process: int
    of: int
    at: str
    host: str
    port: int
    waited_s: float
    nonce: str


class JoinRequest(NamedTuple):
    """A peer that knows the token: the connection, the hello, and what the sender knows of the run."""

    link: Link
    hello: Hello
    history: History


@dataclasses.dataclass(kw_only=True)
class _Visitor:
    """A connection that has not introduced itself yet, or is closed once its last message was read.

    Attributes:
        link: the connection.
        nonce: what its hello must answer; empty if it is being dismissed.
        since_s: its time of arrival.
        is_expected: whether it has sent a greeting of this run, or was admitted before.
    """

    link: Link
    nonce: str
    since_s: float
    is_expected: bool = False


def greeting(token: bytes, process: int) -> bytes:
    """Returns the first line of a peer."""
    return sealed({"greeting": process}, token, _GREETING)


class Listener:
    """A listening socket, which it owns, and its connections that have not introduced themselves yet.

    Attributes:
        refused: lines without a proof of this run's token.
    """

    def __init__(self, server: socket.socket, token: bytes) -> None:
        server.setblocking(False)
        self._server = server
        self._token = token
        self.refused = 0
        self._visitors: list[_Visitor] = []  # the oldest first
        self.port: int = server.getsockname()[1]

    def join_requests(self) -> list[JoinRequest]:
        """Returns the peers that have sent a valid hello since the last call. Nothing here waits."""
        requests: list[JoinRequest] = []
        for _ in range(_ROUNDS):
            # Each is heard before any is dropped: the greeting of a peer arrives with its connection. In the other
            # order a crowd of strangers would displace the peer before its greeting is read.
            is_drained = self._accept()
            requests += self._hear_all()
            self._drop_oldest()
            if is_drained:
                break
        return requests

    def answer(self, request: JoinRequest, message: Mapping[str, object]) -> None:
        """Sends a signed message."""
        request.link.send_line(sealed(message, self._token, request.hello.nonce))

    def dismiss(self, request: JoinRequest, message: Mapping[str, object]) -> None:
        """Sends an answer, and closes the connection once it was read."""
        self.answer(request, message)
        self._visitors.append(_Visitor(link=request.link, nonce="", since_s=time.monotonic(), is_expected=True))

    def close(self) -> None:
        """Closes the port."""
        self._server.close()
        for visitor in self._visitors:
            visitor.link.drop()

    def _accept(self) -> bool:
        """Accepts some of the waiting connections; returns whether none is left."""
        for _ in range(_STRANGERS):
            try:
                connection, _address = self._server.accept()
            except OSError:  # no connection is waiting, it has closed, or the process has too many files open
                return True
            visitor = _Visitor(link=Link(connection), nonce=secrets.token_hex(16), since_s=time.monotonic())
            visitor.link.send({"nonce": visitor.nonce})
            self._visitors.append(visitor)
        return False

    def _hear_all(self) -> list[JoinRequest]:
        """Reads from all visitors; those who have introduced themselves, or are over, are visitors no more."""
        requests = []
        staying = []
        for visitor in self._visitors:
            request = self._hear(visitor)
            if request is not None:
                requests.append(request)
            elif visitor.link.closed or time.monotonic() - visitor.since_s > HELLO_S:
                visitor.link.drop()
            else:
                staying.append(visitor)
        self._visitors = staying
        return requests

    def _hear(self, visitor: _Visitor) -> JoinRequest | None:
        """Reads from a visitor; returns its request to join, if that has arrived and is valid."""
        line = visitor.link.line()
        if line is None or not visitor.nonce:
            return None
        if not visitor.is_expected and opened(line, self._token, _GREETING) is not None:
            visitor.is_expected = True
            return self._hear(visitor)
        message = opened(line, self._token, visitor.nonce)
        if message is None:
            self._refuse(visitor)
            return None
        hello = parsed(Hello, message.get("hello"))
        history = parsed(History, message.get("history"))
        if hello is None or history is None:
            visitor.link.closed = True
            return None
        return JoinRequest(visitor.link, hello, history)

    def _drop_oldest(self) -> None:
        """Drops the oldest connections if there are too many; strangers displace each other, and never a peer."""
        strangers = [visitor for visitor in self._visitors if not visitor.is_expected]
        expected = [visitor for visitor in self._visitors if visitor.is_expected]
        surplus = strangers[:-_STRANGERS] + expected[:-_EXPECTED]
        if not surplus:
            return
        for visitor in surplus:
            visitor.link.drop()
        self._visitors = [visitor for visitor in self._visitors if not visitor.link.closed]

    def _refuse(self, visitor: _Visitor) -> None:
        """Answers a hello with another token, which may be that of another run at the same port."""
        self.refused += 1
        link = visitor.link
        # Ever more rarely: strangers could fill the log.
        if self.refused in (1, 10, 100, 1000):
            number = "a hello" if self.refused == 1 else f"{self.refused} hellos so far"
            sys.stderr.write(f"port {self.port}: {number} with another token refused, from {link.peer}\n")
            sys.stderr.flush()
        link.send({"refused": 1})
        # It stays for HELLO_S from now, to read the refusal.
        visitor.nonce = ""
        visitor.since_s = time.monotonic()
