"""The roll call: the supervisors of a cluster meet before any worker starts, or each tells who is missing.

The supervisor of process 0 listens beside JAX's coordinator (`reports.roll_call_port`), the others connect. Messages
are JSON lines: {"hello": 1, "process": i, "of": n, "at": address, "host": name, "waited_s": t} to process 0, and from
there {"go": hosts}, or {"missing": ...}, {"duplicate": ...}, {"mismatch": ...}, after which all end. Like JAX's own
service, it trusts the network of the cluster.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from typing import Any, NoReturn

from jshard._errors import FourPartError
from jshard.launch import endings
from jshard.launch.cluster import TICK_S, Cluster, Deadlines
from jshard.launch.links import Link, Peers, close_all, hostname

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
            self._tell({"go": _by_text(self._hosts)})
            links, self._links = self._links, {}
            return Peers(process_id=0, links=links, hosts=self._hosts, deadlines=self._deadlines)
        if time.monotonic() > self._ends_at:
            self._end({"missing": _by_text(self._hosts), "after_s": self._deadlines.init_s})
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
        self._strangers.append((link, time.monotonic()))  # to be told, if this is the end
        if hello["of"] != self._cluster.num_processes or not 0 <= process < self._cluster.num_processes:
            self._end({"mismatch": process, "host": host, "theirs": theirs, "ours": ours})
        if process in self._hosts:
            self._end({"duplicate": process, "hosts": [self._hosts[process], host]})
        self._strangers.pop()
        self._links[process], self._hosts[process] = link, host
        # One that has waited long already is not kept waiting for another whole time-out.
        self._ends_at = min(self._ends_at, time.monotonic() + max(self._deadlines.init_s - hello["waited_s"], 0))

    def _tell(self, message: dict[str, Any]) -> None:
        for link in [*self._links.values(), *(link for link, _ in self._strangers)]:
            link.send(message)

    def _end(self, message: dict[str, Any]) -> NoReturn:
        self._tell(message)
        error = _end_of(self._cluster, message)
        assert error is not None
        raise error


class _Guest:
    def __init__(self, cluster: Cluster, deadlines: Deadlines) -> None:
        self._cluster, self._deadlines = cluster, deadlines
        self._address = (cluster.host, endings.roll_call_port(cluster))
        self._began = time.monotonic()
        self._link: Link | None = None
        self._reason = ""

    def look(self) -> Peers | None:
        if self._link is None:
            self._connect()
        elif (peers := self._hear(self._link)) is not None:
            return peers
        if self._link is None and self._waited_s > self._deadlines.init_s:
            raise endings.unreachable(self._cluster, self._reason, self._waited_s)
        return None

    def close(self) -> None:
        if self._link is not None:
            self._link.close()

    @property
    def _waited_s(self) -> float:
        return time.monotonic() - self._began

    def _connect(self) -> None:
        try:
            link = Link(socket.create_connection(self._address, timeout=5))
        except OSError as error:
            self._reason = error.strerror or str(error)
            return
        cluster, waited_s = self._cluster, self._waited_s
        hello = {"hello": 1, "process": cluster.process_id, "of": cluster.num_processes, "at": cluster.coordinator}
        link.send({**hello, "host": hostname(), "waited_s": waited_s})
        self._link = link

    def _hear(self, link: Link) -> Peers | None:
        link.beat(self._deadlines.beat_s)
        for message in link.receive():
            if isinstance(message.get("go"), dict):
                hosts = {int(process): str(host) for process, host in message["go"].items() if process.isdecimal()}
                self._link = None
                return Peers(
                    process_id=self._cluster.process_id, links={0: link}, hosts=hosts, deadlines=self._deadlines
                )
            if (error := _end_of(self._cluster, message)) is not None:
                raise error
        if link.closed or link.silent_s > max(self._deadlines.peer_s, _HELLO_S):
            self._reason = "It left, or is no jshard run" if link.closed else "It answers nothing"
            link.close()
            self._link = None
        return None


def _listen(cluster: Cluster) -> socket.socket:
    port = endings.roll_call_port(cluster)
    is_local = cluster.host in ("localhost", "127.0.0.1")
    try:
        if is_local or not socket.has_dualstack_ipv6():
            server = socket.create_server(("127.0.0.1" if is_local else "", port), backlog=1024)
        else:
            server = socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=1024)
    except OSError as error:
        raise endings.port_taken(cluster, error) from error
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


def _by_text(hosts: dict[int, str]) -> dict[str, str]:
    return {str(process): host for process, host in hosts.items()}


def _end_of(cluster: Cluster, message: dict[str, Any]) -> FourPartError | None:
    """The error that a message of process 0 stands for; each process words it with the variables it has seen itself."""
    try:
        if "missing" in message:
            came = {int(process): str(host) for process, host in message["missing"].items()}
            return endings.missing(cluster, came, float(message["after_s"]))
        if "duplicate" in message:
            return endings.duplicate(cluster, int(message["duplicate"]), [str(host) for host in message["hosts"]])
        if "mismatch" in message:
            texts = (str(message[key]) for key in ("host", "theirs", "ours"))
            return endings.mismatch(cluster, int(message["mismatch"]), *texts)
    except (AttributeError, KeyError, TypeError, ValueError):
        return None  # not from a supervisor
    return None
