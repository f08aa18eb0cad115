"""The addresses on which a run listens, and the token that admits its own processes there."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Mapping

from jshard.errors import RunError, ShardingError
from jshard.launch.cluster import Cluster

_BACKLOG = 4096  # all processes of a large run connect at once, and strangers may, too
_BIND = "JAX_COORDINATOR_BIND_ADDRESS"
# Equal in all processes of a run, and different in another run.
_JOB = ("SLURM_JOB_ID", "SLURM_STEP_ID", "OMPI_MCA_orte_hnp_uri")
_JOB_PORTS = 4096
"""Launchers that give no port let JAX's follow from the job number, in a range of so many."""


def token_of(cluster: Cluster, environ: Mapping[str, str] = os.environ) -> bytes:
    """Returns the token of the run: JSHARD_TOKEN, which is a secret.

    By default it follows from the job number, which is not secret: it protects against the processes of another
    run, but not against an attacker.
    """
    secret = environ.get("JSHARD_TOKEN")
    if secret:
        return secret.encode()
    job = [cluster.variables.get(name, "") for name in _JOB]
    return "|".join(["jshard", *job]).encode()


def bind_host(cluster: Cluster, environ: Mapping[str, str] = os.environ) -> str:
    """Returns the address on which process 0 listens: that of its host name; "" for all interfaces.

    It is all interfaces if JAX_COORDINATOR_BIND_ADDRESS says so, or if the name does not resolve to an address of this
    machine, as behind a Kubernetes service, or resolves to one that other machines cannot reach.
    """
    stated = environ.get(_BIND)
    if stated:
        # An IPv6 address is in brackets.
        host = stated.rpartition(":")[0].strip("[]")
        return "" if host in ("::", "0.0.0.0") else host
    try:
        family, _, _, _, resolved = socket.getaddrinfo(cluster.host, 0, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.bind(resolved)  # only an address of this machine can be bound
    except OSError:
        return ""
    host = str(resolved[0])
    if host.startswith("127.") and not cluster.is_local:
        return ""
    return host


def coordinator_bind(host: str, port: int, environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Returns the address on which JAX's coordinator listens, as an environment variable."""
    stated = environ.get(_BIND)
    if stated:
        return {_BIND: f"{stated.rpartition(':')[0]}:{port}"}
    if not host:
        return {}
    return {_BIND: address(host, port)}


def address(host: str, port: int) -> str:
    """Returns host and port in JAX's form."""
    if ":" in host:
        return f"[{host}]:{port}"
    return f"{host}:{port}"


def listen(cluster: Cluster, host: str) -> socket.socket:
    """Opens the port of the roll call.

    Raises:
        RunError: another process has the port.
    """
    port = roll_call_port(cluster)
    try:
        return open_port(host, port)
    except OSError as error:
        # Not 65534 below 65535: that is then the port of JAX's coordinator.
        other_port = port + 1 if port < 65535 else port - 2
        raise RunError(
            "The roll call cannot be opened.",
            where=[f"port {port} of {socket.gethostname()}", *cluster.seen()],
            why=f"{error.strerror or error}: another process 0, or another program, uses it.",
            do=f"set another port, the same for all processes: JSHARD_ROLL_CALL_PORT={other_port}",
        ) from error


def free_port(host: str, preferred: int) -> int:
    """Returns the preferred port, or another one if a process that has not ended yet holds it."""
    for port in (preferred, 0):
        # Closed again: JAX opens it next, in the worker.
        with contextlib.suppress(OSError), open_port(host, port) as server:
            return server.getsockname()[1]
    return preferred


def open_port(host: str, port: int = 0) -> socket.socket:
    """Opens a listening socket; on all interfaces for an empty host, at a free port for 0."""
    if host:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, port), family=family, backlog=_BACKLOG)
    if not socket.has_dualstack_ipv6():
        return socket.create_server(("", port), backlog=_BACKLOG)
    return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=_BACKLOG)


def roll_call_port(cluster: Cluster) -> int:
    """Returns JSHARD_ROLL_CALL_PORT, or the port after that of JAX's coordinator.

    Under Slurm and Open MPI it is 4096 below that.

    Raises:
        ShardingError: the variable is not a port.
    """
    default = _default_roll_call_port(cluster)
    port = cluster.variables.get("JSHARD_ROLL_CALL_PORT", str(default))
    if not (port.isascii() and port.isdecimal() and 0 < int(port) < 65536):
        raise ShardingError(
            "The port of the roll call cannot be read.",
            where=f"JSHARD_ROLL_CALL_PORT={port}",
            why="a port is a number from 1 to 65535.",
            do=f"JSHARD_ROLL_CALL_PORT={default}, or leave it unset.",
        )
    return int(port)


def _default_roll_call_port(cluster: Cluster) -> int:
    if cluster.kind in ("slurm", "open mpi") and cluster.port > _JOB_PORTS:
        # There JAX's port follows from the job number: the next port is that of the next job, maybe on this node.
        return cluster.port - _JOB_PORTS
    if cluster.port == 65535:
        return cluster.port - 1
    return cluster.port + 1
