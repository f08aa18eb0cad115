"""An open port that admits only peers that prove that they know the token of the run."""

from __future__ import annotations

import dataclasses
import secrets
import socket
import sys
import time
from collections.abc import Mapping
from typing import Any, NamedTuple

from jshard.launch.cluster import is_signed, signed
from jshard.launch.peers import Link, parsed
from jshard.launch.restarts import History

HELLO_S = 10.0
"""A connection without a valid hello for this long is closed."""
_STRANGERS = 64


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


class Knock(NamedTuple):
    """A peer that knows the token: the connection, the hello, and what the sender knows of the run."""

    link: Link
    hello: Hello
    history: History


class Door:
    """A listening socket, which it owns, and its connections that have not introduced themselves yet.

    Attributes:
        refused: hellos with another token.
    """

    def __init__(self, server: socket.socket, token: bytes) -> None:
        server.setblocking(False)
        self._server, self._token, self.refused = server, token, 0
        # The nonce, which is empty for dismissed connections, and the time of arrival.
        self._strangers: dict[Link, tuple[str, float]] = {}
        self.port: int = server.getsockname()[1]

    def knocks(self) -> list[Knock]:
        """The peers that have sent a valid hello since the last call. Nothing here waits."""
        self._accept()
        found = []
        for link, (nonce, since_s) in list(self._strangers.items()):
            message = next(iter(link.receive()), None)
            if message is not None and nonce:
                del self._strangers[link]
                hello, history = parsed(Hello, message.get("hello")), parsed(History, message.get("history"))
                if hello is None or history is None:
                    link.drop()
                elif is_signed(message, self._token, nonce):
                    found.append(Knock(link, hello, history))
                else:
                    self._refuse(link)
            elif link.closed or time.monotonic() - since_s > HELLO_S:
                del self._strangers[link]
                link.drop()
        return found

    def answer(self, knock: Knock, message: Mapping[str, Any]) -> None:
        """Sends a signed message."""
        knock.link.send(signed(message, self._token, knock.hello.nonce))

    def dismiss(self, knock: Knock, message: Mapping[str, Any]) -> None:
        """Sends an answer, and closes the connection once it was read."""
        self.answer(knock, message)
        self._strangers[knock.link] = "", time.monotonic()

    def close(self) -> None:
        """Closes the port."""
        self._server.close()
        for link in self._strangers:
            link.drop()

    def _accept(self) -> None:
        while len(self._strangers) < _STRANGERS:
            try:
                connection, _ = self._server.accept()
            except OSError:  # no connection is waiting, or it has closed
                return
            link, nonce = Link(connection), secrets.token_hex(16)
            link.send({"nonce": nonce})
            self._strangers[link] = nonce, time.monotonic()

    def _refuse(self, link: Link) -> None:
        self.refused += 1
        if self.refused in (1, 10, 100, 1000):
            number = "a hello" if self.refused == 1 else f"{self.refused} hellos so far"
            sys.stderr.write(f"port {self.port}: {number} with another token refused, from {link.peer}\n")
            sys.stderr.flush()
        link.send({"refused": 1})
        self._strangers[link] = "", time.monotonic()
