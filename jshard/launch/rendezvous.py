"""The roll call: the supervisors of a cluster meet before any worker starts, or each says who is missing.

The supervisor of process 0 listens beside JAX's coordinator (`roll_call_port`), the others connect. Messages
are JSON lines: {"hello": 1, "process": i, "of": n, "at": address, "host": name, "waited_s": t} to process 0, and from
there {"go": hosts}, or {"missing": ...}, {"duplicate": ...}, {"mismatch": ...}, after which all end. Like JAX's own
service, it trusts the network of the cluster.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

from jshard.errors import FourPartError, RunError, ShardingError
from jshard.launch.cluster import TICK_S, Cluster, Deadlines
from jshard.launch.peers import Link, Peers, close_all, hostname

_STRANGERS = 64
_HELLO_S = 10.0


def meet(cluster: Cluster, deadlines: Deadlines, *, stopped: Callable[[], bool] = lambda: False) -> Peers | None:
    """Waits until the supervisors of all processes are there.

    Ends within `deadlines.init_s` of the start of the first of them, and a few seconds.

    Args:
        cluster: this process's place.
        deadlines: of the run.
        stopped: asked again and again; when true, the waiting ends and the result is None.

    Raises:
        RunError: not all have come, or process 0 cannot be reached, or cannot listen.
        ShardingError: two processes have one id, or take part in different runs.
    """
    meeting = _Host(cluster, deadlines) if cluster.process_id == 0 else _Guest(cluster, deadlines)
    try:
        while not stopped():
            peers = meeting.look()
            if peers is not None:
                return peers
            time.sleep(TICK_S)
        return None
    finally:
        meeting.close()


class _Host:
    def __init__(self, cluster: Cluster, deadlines: Deadlines) -> None:
        self._cluster, self._deadlines = cluster, deadlines
        self._server = _listen(cluster)
        self._strangers: list[tuple[Link, float]] = []
        self._links: dict[int, Link] = {}
        self._hosts = {0: hostname()}
        self._ends_at = time.monotonic() + deadlines.init_s

    def look(self) -> Peers | None:
        self._accept()
        self._greet()
        for process, link in list(self._links.items()):
            link.receive()
            link.beat(self._deadlines.beat_s)
            if link.closed:  # it may come again
                del self._links[process], self._hosts[process]
        if len(self._hosts) == self._cluster.num_processes:
            self._send({"go": list(self._hosts.items())})
            links, self._links = self._links, {}
            return Peers(process_id=0, links=links, hosts=self._hosts, deadlines=self._deadlines)
        if time.monotonic() > self._ends_at:
            self._end({"missing": list(self._hosts.items()), "after_s": self._deadlines.init_s})
        return None

    def close(self) -> None:
        self._server.close()
        close_all([*self._links.values(), *(link for link, _ in self._strangers)])

    def _accept(self) -> None:
        while len(self._strangers) < _STRANGERS:
            try:
                connection, _ = self._server.accept()
            except OSError:  # nobody is waiting, or has gone again
                return
            self._strangers.append((Link(connection), time.monotonic()))

    def _greet(self) -> None:
        for stranger in list(self._strangers):
            link, since = stranger
            hello = next(iter(link.receive()), None)
            if hello is not None and _is_hello(hello):
                self._strangers.remove(stranger)
                self._admit(link, hello)
            elif link.closed or hello is not None or time.monotonic() - since > _HELLO_S:
                self._strangers.remove(stranger)
                link.close()

    def _admit(self, link: Link, hello: dict[str, Any]) -> None:
        process, host = hello["process"], hello["host"]
        theirs = f"{hello['of']} processes at {hello['at']}"
        ours = f"{self._cluster.num_processes} processes at {self._cluster.coordinator}"
        self._strangers.append((link, time.monotonic()))  # to hear of it, if this is the end
        if hello["of"] != self._cluster.num_processes or not 0 <= process < self._cluster.num_processes:
            self._end({"mismatch": process, "host": host, "theirs": theirs, "ours": ours})
        if process in self._hosts:
            self._end({"duplicate": process, "hosts": [self._hosts[process], host]})
        self._strangers.pop()
        self._links[process], self._hosts[process] = link, host
        # One that has waited long already is not kept waiting for another whole time-out.
        self._ends_at = min(self._ends_at, time.monotonic() + max(self._deadlines.init_s - hello["waited_s"], 0))

    def _send(self, message: dict[str, Any]) -> None:
        for link in [*self._links.values(), *(link for link, _ in self._strangers)]:
            link.send(message)

    def _end(self, message: dict[str, Any]) -> NoReturn:
        self._send(message)
        raise _end_of(self._cluster, message) or AssertionError(message)


class _Guest:
    def __init__(self, cluster: Cluster, deadlines: Deadlines) -> None:
        self._cluster, self._deadlines = cluster, deadlines
        self._address = (cluster.host, roll_call_port(cluster))
        self._began = time.monotonic()
        self._link: Link | None = None
        self._reason = ""

    def look(self) -> Peers | None:
        if self._link is None:
            self._connect()
        elif (peers := self._hear(self._link)) is not None:
            return peers
        if self._link is None and self._waited_s > self._deadlines.init_s:
            raise self._unreachable()
        return None

    def close(self) -> None:
        if self._link is not None:
            self._link.close()

    @property
    def _waited_s(self) -> float:
        return time.monotonic() - self._began

    def _unreachable(self) -> RunError:
        cluster, here = self._cluster, socket.gethostname()
        return RunError(
            "Process 0 cannot be reached.",
            where=[
                f"this is process {cluster.process_id} on {here} ({cluster.kind})",
                f"process 0 is looked for at {_address(cluster)}",
                *cluster.seen(),
            ],
            why=f"{self._reason}, after {self._waited_s:.0f} s.",
            do=f"see that process 0 runs on {cluster.host} and that its ports {cluster.port} and "
            f"{roll_call_port(cluster)} are open to {here};\n"
            "another port, the same for all processes: JSHARD_ROLL_CALL_PORT=12345",
        )

    def _connect(self) -> None:
        try:
            link = Link(socket.create_connection(self._address, timeout=5))
        except OSError as error:
            self._reason = error.strerror or str(error)
            return
        place = self._cluster
        hello = {"hello": 1, "process": place.process_id, "of": place.num_processes, "at": place.coordinator}
        link.send({**hello, "host": hostname(), "waited_s": self._waited_s})
        self._link = link

    def _hear(self, link: Link) -> Peers | None:
        link.beat(self._deadlines.beat_s)
        for message in link.receive():
            if isinstance(message.get("go"), list):
                hosts, self._link = _hosts(message["go"]), None
                me = self._cluster.process_id
                return Peers(process_id=me, links={0: link}, hosts=hosts, deadlines=self._deadlines)
            if (error := _end_of(self._cluster, message)) is not None:
                raise error
        if link.closed or link.silent_s > max(self._deadlines.peer_s, _HELLO_S):
            self._reason = "It left, or is no jshard run" if link.closed else "It answers nothing"
            link.close()
            self._link = None
        return None


def _listen(cluster: Cluster) -> socket.socket:
    port = roll_call_port(cluster)
    is_local = cluster.host in ("localhost", "127.0.0.1")
    try:
        if is_local or not socket.has_dualstack_ipv6():
            server = socket.create_server(("127.0.0.1" if is_local else "", port), backlog=1024)
        else:
            server = socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=1024)
    except OSError as error:
        raise RunError(
            "The roll call cannot be opened.",
            where=[f"port {port} of {socket.gethostname()}", *cluster.seen()],
            why=f"{error.strerror or error}: another process 0, or another program, has it.",
            do="another port, the same for all processes: "
            f"JSHARD_ROLL_CALL_PORT={port + 1 if port < 65535 else port - 2}",
        ) from error
    server.setblocking(False)
    return server


def _is_hello(message: dict[str, Any]) -> bool:
    numbers, texts = (message.get("process"), message.get("of")), (message.get("host"), message.get("at"))
    return (
        message.get("hello") == 1
        and all(type(number) is int for number in numbers)
        and all(isinstance(text, str) and len(text) < 1024 for text in texts)
        and type(message.get("waited_s")) in (int, float)
    )


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


def _address(cluster: Cluster) -> str:
    """Where process 0 listens."""
    return f"{cluster.host}:{roll_call_port(cluster)}"


def _hosts(pairs: Any) -> dict[int, str]:
    return {int(process): str(host) for process, host in pairs}


def _end_of(cluster: Cluster, message: dict[str, Any]) -> FourPartError | None:
    """The error that a message of process 0 stands for; each process words it with the variables it has seen itself."""
    try:
        if "missing" in message:
            return _missing(cluster, _hosts(message["missing"]), float(message["after_s"]))
        if "duplicate" in message:
            return ShardingError(
                f"Two processes have the id {int(message['duplicate'])}.",
                where=[f"on {' and on '.join(map(str, message['hosts']))}", *cluster.seen()],
                why=f"each of the {cluster.num_processes} processes has an id of its own.",
                do="give each another JAX_PROCESS_ID, or start them with srun, which does.",
            )
        if "mismatch" in message:
            process, ours, theirs = int(message["mismatch"]), message["ours"], message["theirs"]
            return ShardingError(
                f"Process {process} on {message['host']} takes the run for another.",
                where=[f"process 0 has {ours}", f"process {process} has {theirs}", *cluster.seen()],
                why="all processes of a run are given the same address and number.",
                do="the same JAX_COORDINATOR_ADDRESS and JAX_NUM_PROCESSES for all of them.",
            )
    except (AttributeError, KeyError, TypeError, ValueError):
        return None  # not from a supervisor
    return None


def _missing(cluster: Cluster, came: Mapping[int, str], after_s: float) -> RunError:
    """The time of the roll call is over, and not all have come."""
    ids = [process for process in range(cluster.num_processes) if process not in came]
    return RunError(
        f"{len(ids)} of {cluster.num_processes} processes did not come: {_some(ids)}.",
        where=[
            f"this is process {cluster.process_id} on {socket.gethostname()} ({cluster.kind})",
            f"came: {_some([f'{process} on {host}' for process, host in sorted(came.items())])}",
            *cluster.seen(),
        ],
        why=f"{len(came)} of {cluster.num_processes} came to the roll call within {after_s:.0f} s.",
        do=f"look why process {_some(ids)} did not start, or cannot reach {_address(cluster)};\n"
        "if they are only slow to start: --init-timeout 900",
    )


def _some(items: Sequence[object], limit: int = 10) -> str:
    shown = ", ".join(str(item) for item in items[:limit])
    return shown if len(items) <= limit else f"{shown} and {len(items) - limit} more"
