"""The ports that a run opens, who may come in, and the connections between supervisors: JSON objects, a line each.

Whoever connects to the roll call is sent a number that is used once, and answers with a hello whose sum proves that it
knows the token of the run; what comes back proves the same. The token itself is never sent.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import os
import socket
import stat
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar, get_type_hints

from jshard.errors import RunError, ShardingError
from jshard.launch.cluster import Cluster

GOODBYE_S = 2.0
"""A connection that is closed waits this long for the other side to have read its last message."""

_LINE_BYTES, _PENDING_BYTES = 16384, 1 << 20
_BIND = "JAX_COORDINATOR_BIND_ADDRESS"
_JOB = ("SLURM_JOB_ID", "SLURM_STEP_ID", "OMPI_MCA_orte_hnp_uri")

T = TypeVar("T")


class Link:
    """One end of a connection. Nothing here waits, but `close_all`.

    What comes in is data of strangers until it is checked: it is parsed as JSON and never executed, and a line that
    is too long or no JSON object closes the link.

    Args:
        sock: a connected socket, which the link owns from then on.

    Attributes:
        peer: the address of the other side.
        closed: whether nothing more will come.
    """

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        with contextlib.suppress(OSError):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.socket, self.peer = sock, _peer(sock)
        self._received = self.pending = b""
        self._sent_at = self._heard_at = time.monotonic()
        self.closed = False

    @property
    def silent_s(self) -> float:
        """Time since anything came from the other side."""
        return time.monotonic() - self._heard_at

    def send(self, message: Mapping[str, Any]) -> None:
        """Sends a message, now or, if the other side is slow, with a later one."""
        self.pending += json.dumps(message).encode() + b"\n"
        self._sent_at = time.monotonic()
        self._flush()

    def beat(self, every_s: float, said: Any = None) -> None:
        """Sends a sign of life if the last message is older than `every_s`."""
        if time.monotonic() - self._sent_at >= every_s:
            self.send({"beat": said})
        else:
            self._flush()

    def receive(self) -> list[dict[str, Any]]:
        """The messages that came since the last call."""
        # Bounded, lest a stranger who sends without end keeps us here.
        for _ in range(64):
            try:
                data = b"" if self.closed else self.socket.recv(65536)
            except BlockingIOError:
                break
            except OSError:
                data = b""
            if not data:
                self.closed = True
                break
            self._heard_at = time.monotonic()
            self._received += data
        *lines, self._received = self._received.split(b"\n")
        messages = [_parse(line) for line in lines]
        if len(self._received) > _LINE_BYTES or None in messages:
            self.closed = True
        return [message for message in messages if message is not None]

    def drop(self) -> None:
        """Closes at once, whatever is on its way."""
        self.socket.close()
        self.closed = True

    def _flush(self) -> None:
        try:
            while self.pending and not self.closed:
                self.pending = self.pending[self.socket.send(self.pending) :]
        except BlockingIOError:
            self.closed = len(self.pending) > _PENDING_BYTES
        except OSError:
            # What the other side said before it went is still to be read: `receive` will find the end.
            self.pending = b""


def close_all(links: Iterable[Link]) -> None:
    """Closes links when the other sides have read what was sent, all within `GOODBYE_S`."""
    links, deadline = list(links), time.monotonic() + GOODBYE_S
    for link in links:
        with contextlib.suppress(OSError):
            link.socket.settimeout(max(deadline - time.monotonic(), 0.01))
            link.socket.sendall(link.pending)
            link.socket.shutdown(socket.SHUT_WR)
    for link in links:
        # Closing at once would reset the connection if something is unread here, and lose our last message there.
        with contextlib.suppress(OSError):
            while (left_s := deadline - time.monotonic()) > 0:
                link.socket.settimeout(left_s)
                if not link.socket.recv(65536):
                    break
        link.drop()


def parsed(kind: type[T], message: Any) -> T | None:
    """A dataclass of plain values, from the network, where anything may come from; None for what is none."""
    types = get_type_hints(kind)
    if not isinstance(message, dict) or message.keys() != types.keys():
        return None
    return kind(**message) if all(isinstance(message[name], types[name]) for name in types) else None


def _parse(line: bytes) -> dict[str, Any] | None:
    try:
        message = json.loads(line) if len(line) <= _LINE_BYTES else None
    except (ValueError, RecursionError):
        return None
    return message if isinstance(message, dict) else None


def _peer(sock: socket.socket) -> str:
    try:
        name = sock.getpeername()
    except OSError:  # it has gone again
        return "unknown"
    return str(name[0]).removeprefix("::ffff:") if isinstance(name, tuple) else "local"


# The token of the run.


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


def coordinator_bind(host: str, port: int, environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """What JAX's coordinator is to listen on, as an environment variable."""
    if given := environ.get(_BIND):
        return {_BIND: f"{given.rpartition(':')[0]}:{port}"}
    return {_BIND: f"[{host}]:{port}" if ":" in host else f"{host}:{port}"} if host else {}


def listen(cluster: Cluster, host: str) -> socket.socket:
    """A socket at the port of the roll call.

    Raises:
        RunError: another process has the port.
    """
    port = roll_call_port(cluster)
    try:
        return _open_port(host, port)
    except OSError as error:
        raise RunError(
            "The roll call cannot be opened.",
            where=[f"port {port} of {socket.gethostname()}", *cluster.seen()],
            why=f"{error.strerror or error}: another process 0, or another program, has it.",
            do="another port, the same for all processes: "
            f"JSHARD_ROLL_CALL_PORT={port + 1 if port < 65535 else port - 2}",
        ) from error


def free_port(host: str, wanted: int) -> int:
    """The port that is wanted, or another one where a process that has not ended yet holds it."""
    for port in (wanted, 0):
        with contextlib.suppress(OSError), _open_port(host, port) as server:
            return server.getsockname()[1]
    return wanted


def _open_port(host: str, port: int) -> socket.socket:
    """A listening socket; on all interfaces for an empty host, at a free port for 0."""
    if host:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, port), family=family, backlog=1024)
    if not socket.has_dualstack_ipv6():
        return socket.create_server(("", port), backlog=1024)
    return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=1024)


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
