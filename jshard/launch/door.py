"""The ports that a run opens, and who may come in: addresses, the token of the run, hellos that prove it.

Whoever connects is sent a number that is used once, and answers with a hello whose sum proves that it knows the token;
what comes back proves the same. The token itself is never sent. What follows on the connection is plain JSON.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import secrets
import socket
import stat
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from jshard.errors import RunError, ShardingError
from jshard.launch.cluster import Cluster
from jshard.launch.peers import Link

_STRANGERS = 64
HELLO_S = 10.0
"""A connection that has said nothing of use for so long is closed."""
_PARTING_S = 2.0
_BIND = "JAX_COORDINATOR_BIND_ADDRESS"
_JOB = ("SLURM_JOB_ID", "SLURM_STEP_ID", "OMPI_MCA_orte_hnp_uri")


def token_of(cluster: Cluster, environ: Mapping[str, str] = os.environ) -> bytes:
    """The token of the run: JSHARD_TOKEN, or what the file JSHARD_TOKEN_FILE holds, both of which are secrets.

    Without them it follows from the number of the job, which is no secret: it guards against the processes of another
    run, and not against an attacker.

    Raises:
        ShardingError: the file cannot be read, or others may read it.
    """
    if given := environ.get("JSHARD_TOKEN"):
        return given.encode()
    if path := environ.get("JSHARD_TOKEN_FILE"):
        return _read_token(Path(path))
    return "|".join(["jshard", *(cluster.variables.get(name, "") for name in _JOB)]).encode()


def _read_token(path: Path) -> bytes:
    try:
        mode, token = path.stat().st_mode, path.read_bytes().strip()
        why = f"others may read it: its mode is {stat.S_IMODE(mode):04o}." if mode & 0o077 else "it is empty."
    except OSError as error:
        token, mode, why = b"", 0, f"{error.strerror}."
    if not token or mode & 0o077:
        raise ShardingError(
            "The token of the run cannot be used.",
            where=f"JSHARD_TOKEN_FILE={path}",
            why=why,
            do=f"(umask 077; openssl rand -hex 32 > {path})  # where all processes see it",
        )
    return token


def signed(message: Mapping[str, Any], token: bytes, nonce: str) -> dict[str, Any]:
    """The message with a sum that proves, to whoever has made the nonce, that the sender knows the token."""
    return {**message, "proof": _proof(message, token, nonce)}


def is_signed(message: Mapping[str, Any], token: bytes, nonce: str) -> bool:
    """Whether a message has the right sum."""
    body = {name: value for name, value in message.items() if name != "proof"}
    return hmac.compare_digest(str(message.get("proof", "")).encode(), _proof(body, token, nonce).encode())


def _proof(message: Mapping[str, Any], token: bytes, nonce: str) -> str:
    text = json.dumps(message, sort_keys=True)
    return hmac.new(token, f"{nonce}|{text}".encode(), hashlib.sha256).hexdigest()


def new_nonce() -> str:
    """A text that is used once."""
    return secrets.token_hex(16)


class Knock(NamedTuple):
    """Somebody who knows the token: the connection, the hello, and the nonce that answers are signed with."""

    link: Link
    hello: dict[str, Any]
    nonce: str


class Door:
    """A port that is open, and the connections there that have not yet said who they are.

    Args:
        server: the listening socket, which the door owns from then on.
        token: of the run.
    """

    def __init__(self, server: socket.socket, token: bytes) -> None:
        server.setblocking(False)
        self._server, self._token = server, token
        self._strangers: list[tuple[Link, str, float]] = []
        self._parting: list[tuple[Link, float]] = []
        self.refused = 0
        self.port: int = server.getsockname()[1]

    def knocks(self) -> list[Knock]:
        """Those that have said hello, and proved it, since the last call. Nothing here waits."""
        self._accept()
        found = []
        for stranger in list(self._strangers):
            link, nonce, since = stranger
            hello = next(iter(link.receive()), None)
            if hello is not None and _is_hello(hello) and is_signed(hello, self._token, nonce):
                self._strangers.remove(stranger)
                found.append(Knock(link, hello, hello["nonce"]))
            elif link.closed or hello is not None or time.monotonic() - since > HELLO_S:
                self._strangers.remove(stranger)
                if hello is not None and _is_hello(hello):
                    self._refuse(link)
                else:
                    link.drop()
        for parting in list(self._parting):
            link, since = parting
            link.receive()
            if link.closed or time.monotonic() - since > _PARTING_S:
                self._parting.remove(parting)
                link.drop()
        return found

    def dismiss(self, knock: Knock, message: Mapping[str, Any]) -> None:
        """Gives an answer, and closes the connection once it was read."""
        knock.link.send(signed(message, self._token, knock.nonce))
        self._parting.append((knock.link, time.monotonic()))

    def close(self) -> None:
        """Closes the port."""
        self._server.close()
        for link, *_ in [*self._strangers, *self._parting]:
            link.drop()
        self._strangers, self._parting = [], []

    def _accept(self) -> None:
        while len(self._strangers) < _STRANGERS:
            try:
                connection, _ = self._server.accept()
            except OSError:  # nobody is waiting, or has gone again
                return
            link, nonce = Link(connection), new_nonce()
            link.send({"nonce": nonce})
            self._strangers.append((link, nonce, time.monotonic()))

    def _refuse(self, link: Link) -> None:
        self.refused += 1
        if self.refused in (1, 10, 100, 1000):
            number = "a hello" if self.refused == 1 else f"{self.refused} hellos so far"
            sys.stderr.write(f"port {self.port}: {number} with another token refused, from {link.peer}\n")
            sys.stderr.flush()
        link.send({"refused": 1})
        self._parting.append((link, time.monotonic()))


def _is_hello(message: dict[str, Any]) -> bool:
    numbers, texts = [message.get(name) for name in ("process", "of", "port")], (message.get("host"), message.get("at"))
    return (
        message.get("hello") == 1
        and all(type(number) is int for number in numbers)
        and all(isinstance(text, str) and len(text) < 1024 for text in (*texts, message.get("nonce")))
        and type(message.get("waited_s")) in (int, float)
        and isinstance(message.get("history"), dict)
    )


# Where a run listens.


def bind_host(cluster: Cluster, environ: Mapping[str, str] = os.environ) -> str:
    """The address that process 0 listens on: that of its host name; "" for all interfaces.

    All of them where JAX_COORDINATOR_BIND_ADDRESS says so, and where the name leads to no address of this machine, as
    behind a Kubernetes service, or to one that other machines cannot reach.
    """
    if given := environ.get(_BIND):
        host = given.rpartition(":")[0].strip("[]")
        return "" if host in ("::", "0.0.0.0") else host
    try:
        family, _, _, _, address = socket.getaddrinfo(cluster.host, 0, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.bind(address)
    except OSError:
        return ""
    host = str(address[0])
    return "" if host.startswith("127.") and not cluster.is_local else host


def listen(cluster: Cluster, host: str) -> socket.socket:
    """A socket at the port of the roll call.

    Raises:
        RunError: another process has the port.
    """
    port = roll_call_port(cluster)
    try:
        return open_port(host, port)
    except OSError as error:
        raise RunError(
            "The roll call cannot be opened.",
            where=[f"port {port} of {socket.gethostname()}", *cluster.seen()],
            why=f"{error.strerror or error}: another process 0, or another program, has it.",
            do="another port, the same for all processes: "
            f"JSHARD_ROLL_CALL_PORT={port + 1 if port < 65535 else port - 2}",
        ) from error


def open_port(host: str, port: int = 0) -> socket.socket:
    """A listening socket; on all interfaces for an empty host, at a free port for 0."""
    if host:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, port), family=family, backlog=1024)
    if not socket.has_dualstack_ipv6():
        return socket.create_server(("", port), backlog=1024)
    return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=1024)


def free_port(host: str, wanted: int) -> int:
    """The port that is wanted, or another one where a process that has not ended yet holds it."""
    for port in (wanted, 0):
        try:
            with open_port(host, port) as server:
                return server.getsockname()[1]
        except OSError:
            continue
    return wanted


def coordinator_bind(host: str, port: int, environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """What JAX's coordinator is to listen on, as an environment variable."""
    if given := environ.get(_BIND):
        return {_BIND: f"{given.rpartition(':')[0]}:{port}"}
    return {_BIND: address(host, port)} if host else {}


def address(host: str, port: int) -> str:
    """Host and port as JAX takes them."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def roll_call_port(cluster: Cluster) -> int:
    """JSHARD_ROLL_CALL_PORT, or the port after that of JAX's coordinator; under Slurm and Open MPI 4096 below that.

    Raises:
        ShardingError: the variable is not a port.
    """
    if cluster.kind in ("slurm", "open mpi") and cluster.port > 4096:
        # There JAX's port follows from the number of the job: the next one is that of the next job, maybe on this node.
        default = cluster.port - 4096
    else:
        default = cluster.port + 1 if cluster.port < 65535 else cluster.port - 1
    given = cluster.variables.get("JSHARD_ROLL_CALL_PORT", str(default))
    if not (given.isascii() and given.isdecimal() and 0 < int(given) < 65536):
        raise ShardingError(
            "The port of the roll call cannot be read.",
            where=f"JSHARD_ROLL_CALL_PORT={given}",
            why="a port is a number from 1 to 65535.",
            do=f"JSHARD_ROLL_CALL_PORT={default}, or leave it unset.",
        )
    return int(given)
