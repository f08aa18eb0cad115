"""The roll call: the supervisors of a cluster meet before the workers start, or each reports who is missing.

Before the first attempt process 0 listens (`roll_call_port`) and the others connect; all have to come. If the run may
be restarted, each supervisor has its own port, and all learn the addresses at the first meeting. After a loss each
tries the processes below its own, the lowest first, and the lowest one present leads. It starts the attempt when all
have come, or after some time when enough have: more than half of the launched processes.

So a run never continues twice: two parts of more than half have a process in common, its supervisor has one worker, and
neither a step nor a checkpoint completes without every worker of its part. A supervisor that was restarted by its
launcher knows only the address of process 0, connects there and learns the rest.

Messages are JSON lines; `messages` describes their proofs. The leader sends a nonce, the other side a greeting and a
hello with what it knows of the run, and the leader {"rows": ...} and {"go": ...} to all; or {"busy": 1} during an
attempt, or {"elsewhere": 1} from a process that follows another; or {"error": ...}, which ends all.
"""

from __future__ import annotations

import contextlib
import dataclasses
import secrets
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn, TypeVar

from jshard.errors import FourPartError, RunError, ShardingError, is_request
from jshard.launch.cluster import (
    TICK_S,
    Cluster,
    Deadlines,
    address,
    bind_host,
    coordinator_bind,
    free_port,
    listen,
    open_port,
    roll_call_port,
    token_of,
)
from jshard.launch.door import HELLO_S, Door, Hello, Knock, greeting
from jshard.launch.link import Link, close_all
from jshard.launch.messages import decoded, opened, parsed, sealed
from jshard.launch.peers import Peers, hostname
from jshard.launch.restarts import History, Restarts

T = TypeVar("T")

_ROWS = 32  # per message, which has to fit into a line
_CONNECT_S = 2.0
_AGAIN_S = 1.0  # between two rounds of the search for a leader


@dataclasses.dataclass(frozen=True, kw_only=True)
class Group:
    """The processes of one attempt, as seen by one of them.

    Attributes:
        peers: the links to the others.
        place: the place of this one among them.
        mesh: their mesh, if it is not that of all processes.
        bind: the address on which JAX's coordinator listens, as an environment variable.
    """

    peers: Peers
    place: Cluster
    mesh: str | None
    bind: Mapping[str, str]


@dataclasses.dataclass(kw_only=True)
class _Row:
    """How the others reach a process of the run: its supervisor's machine, address and port."""

    process: int
    host: str
    ip: str
    port: int
    is_member: bool


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Go:
    """The start of an attempt: the port of JAX's coordinator, the mesh, and a `History`."""

    port: int
    mesh: str | None
    history: dict


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Failure:
    """The error that ends the roll call for all."""

    what: str
    where: list
    why: str
    do: str
    is_request: bool


class _BadMessageError(Exception):
    """A message of another version of jshard: its proof is right and its contents are not."""


class RollCall:
    """The meetings of one supervisor with the others: before the first attempt, and after each loss."""

    def __init__(self, cluster: Cluster, deadlines: Deadlines, restarts: Restarts | None = None) -> None:
        self.cluster, self.deadlines, self.restarts = cluster, deadlines, restarts
        self.token = token_of(cluster)
        self.bind = bind_host(cluster) if cluster.process_id == 0 else ""
        self.rows: dict[int, _Row] = {}
        self.door = Door(listen(cluster, self.bind), self.token) if cluster.process_id == 0 else None

    def meet(self, history: History, *, stopped: Callable[[], bool] = lambda: False) -> Group | None:
        """Waits until the supervisors of all processes have come, or enough of them.

        Ends within `deadlines.init_s`, plus a few seconds, of the start of the first of them.

        Args:
            history: the run as known to this supervisor, which learns the rest.
            stopped: called repeatedly; when true, the waiting ends and the result is None.

        Raises:
            RunError: too few have come, or process 0 cannot be reached.
            ShardingError: two processes have one id, or take part in different runs.
        """
        with contextlib.closing(_Meeting(self, history)) as meeting:
            while not stopped():
                group = meeting.look()
                if group is not None:
                    if self.restarts is None:
                        self.close()
                    return group
                time.sleep(TICK_S)
        return None

    def attend(self) -> None:
        """Asks supervisors that come during an attempt to wait. Nothing here waits."""
        if self.door is not None:
            for knock in self.door.knocks():
                self.door.dismiss(knock, {"busy": 1})

    def close(self) -> None:
        """Closes the port."""
        if self.door is not None:
            self.door.close()
            self.door = None

    def open(self, host: str) -> None:
        """Opens the port of a process other than 0, at the address with which it reaches the others."""
        if self.door is None and self.restarts is not None:
            self.bind = "" if host.startswith("127.") and not self.cluster.is_local else host
            self.door = Door(open_port(self.bind), self.token)

    def address_of(self, process: int) -> tuple[str, int] | None:
        """The address of the supervisor of a process; None if it is not known."""
        if process == 0:
            return self.cluster.host, roll_call_port(self.cluster)
        row = self.rows.get(process)
        return None if row is None else (row.ip, row.port)


class _Meeting:
    """One roll call of a supervisor: it leads, or follows the lowest process that is present."""

    def __init__(self, call: RollCall, history: History) -> None:
        self._call, self._history = call, history
        self._cluster, self._deadlines = call.cluster, call.deadlines
        self._me = call.cluster.process_id
        self._guests: dict[int, Knock] = {}
        self._began_s = time.monotonic()
        self._ends_at = self._began_s + call.deadlines.init_s
        self._is_again = history.attempt > 0
        # Before the first attempt only process 0 leads.
        self._lower = list(range(self._me)) if call.rows else [0][: self._me]
        self._next, self._rounds, self._not_before_s = 0, 0, 0.0
        self._up: Link | None = None
        self._up_address = ("", 0)
        self._nonce, self._is_greeted, self._reason = "", False, ""
        self._rows: dict[int, _Row] = {}

    def look(self) -> Group | None:
        self._admit()
        group = self._follow()
        # It leads if no lower process is present.
        if group is None and (self._me == 0 or (self._up is None and self._rounds and self._call.rows)):
            return self._lead()
        # The leader's own limit ends its roll call. Whoever is silent about it for twice that long is no leader.
        is_over = self._waited_s > self._limit_s and self._up is None
        if group is None and (is_over or self._waited_s > 2 * self._limit_s + 2 * HELLO_S):
            raise self._unreachable()
        return group

    def close(self) -> None:
        close_all([knock.link for knock in self._guests.values()] + ([] if self._up is None else [self._up]))

    @property
    def _waited_s(self) -> float:
        return time.monotonic() - self._began_s

    @property
    def _limit_s(self) -> float:
        wait_s = self._call.restarts.wait_s if self._call.restarts is not None and self._is_again else 0.0
        return max(self._deadlines.init_s, wait_s)

    # The leader.

    def _admit(self) -> None:
        if (door := self._call.door) is None:
            return
        for knock in door.knocks():
            # An accepted connection to a lower process proves nothing: the kernel accepts it.
            follows, process = self._up is not None and self._is_greeted, knock.hello.process
            if follows or 0 <= process <= self._me:
                door.dismiss(knock, {"elsewhere": 1})
                continue
            self._check(knock)
            if process in self._guests:  # its supervisor was restarted
                self._guests[process].link.drop()
            self._guests[process] = knock
            # A process that has waited long does not wait for another whole time-out.
            left_s = max(self._limit_s - knock.hello.waited_s, 0)
            self._ends_at = min(self._ends_at, time.monotonic() + left_s)

    def _check(self, knock: Knock) -> None:
        hello, cluster = knock.hello, self._cluster
        self._is_again |= knock.history.attempt > 0
        if hello.of != cluster.num_processes or not 0 <= hello.process < cluster.num_processes:
            ours = f"process {self._me} has {cluster.num_processes} processes at {cluster.coordinator}"
            theirs = f"process {hello.process} has {hello.of} processes at {hello.at}"
            error = ShardingError(
                f"Process {hello.process} on {hello.host} has other settings of the run.",
                where=[ours, theirs, *cluster.seen()],
                why="all processes of a run need the same address and number.",
                do="the same JAX_COORDINATOR_ADDRESS and JAX_NUM_PROCESSES for all of them.",
            )
            self._end(error, knock)
        if hello.process in self._guests and not self._is_again:
            other = self._guests[hello.process].hello
            error = ShardingError(
                f"Two processes have the id {hello.process}.",
                where=[f"on {other.host} and on {hello.host}", *cluster.seen()],
                why=f"each of the {cluster.num_processes} processes needs its own id.",
                do="give each another JAX_PROCESS_ID, or start them with srun, which sets it.",
            )
            self._end(error, knock)

    def _lead(self) -> Group | None:
        for process, knock in list(self._guests.items()):
            knock.link.receive()
            knock.link.beat(self._deadlines.beat_s)
            if knock.link.closed:  # it may return
                del self._guests[process]
        came = sorted({self._me, *self._guests})
        if number := self._number(len(came)):
            return self._go(came[:number])
        if time.monotonic() > max(self._ends_at, self._began_s + (self._limit_s if self._is_again else 0)):
            self._end(self._missing())
        return None

    def _number(self, came: int) -> int:
        """How many of the processes that came can begin; 0 while waiting for more is useful."""
        of, restarts = self._cluster.num_processes, self._call.restarts
        if came == of:
            return of
        if not self._is_again or restarts is None or self._waited_s < restarts.wait_s:
            return 0
        return restarts.usable(came, of)

    def _go(self, members: list[int]) -> Group:
        door, number = self._call.door, len(members)
        self._history.begin(knock.history for knock in self._guests.values())
        bind, wanted = self._call.bind, self._cluster.port
        port = wanted if self._history.attempt == 1 else free_port(bind, wanted)
        meshes = {} if self._call.restarts is None else self._call.restarts.meshes or {}
        mesh = meshes.get(number) if number < self._cluster.num_processes else None
        rows = {self._me: _Row(process=self._me, host=hostname(), ip="", port=0, is_member=True)}
        rows |= {process: self._row(knock, process in members) for process, knock in self._guests.items()}
        listed = [dataclasses.asdict(row) for _, row in sorted(rows.items())]
        messages: list[dict[str, Any]] = [{"rows": listed[i : i + _ROWS]} for i in range(0, len(listed), _ROWS)]
        messages.append({"go": {"port": port, "mesh": mesh, "history": dataclasses.asdict(self._history)}})
        for process, knock in self._guests.items():
            if process in members:
                for message in messages:
                    knock.link.send_line(sealed(message, self._call.token, knock.hello.nonce))
            elif door is not None:
                door.dismiss(knock, {"busy": 1})
        self._call.rows |= rows
        links = {members.index(p): knock.link for p, knock in self._guests.items() if p in members}
        self._guests = {}
        host = self._cluster.host if self._me == 0 else bind or "127.0.0.1"
        return self._group(members, rows, host, port, mesh, links, coordinator_bind(bind, port))

    def _row(self, knock: Knock, is_member: bool) -> _Row:
        ip = knock.link.peer
        # A loopback connection is from this machine, which the others know by its name.
        ip = self._cluster.host if ip.startswith("127.") and not self._cluster.is_local else ip
        return _Row(
            process=knock.hello.process, host=knock.hello.host, ip=ip, port=knock.hello.port, is_member=is_member
        )

    def _group(
        self,
        members: Sequence[int],
        rows: Mapping[int, _Row],
        host: str,
        port: int,
        mesh: str | None,
        links: Mapping[int, Link],
        bind: Mapping[str, str],
    ) -> Group:
        """Starts the attempt, as all are present; its processes are numbered from 0."""
        me, hosts = members.index(self._me), {index: rows[p].host for index, p in enumerate(members)}
        where = {"coordinator": address(host, port), "num_processes": len(members), "process_id": me}
        peers = Peers(process_id=me, links=links, hosts=hosts, deadlines=self._deadlines)
        return Group(peers=peers, place=dataclasses.replace(self._cluster, **where), mesh=mesh, bind=bind)

    def _end(self, error: FourPartError, last: Knock | None = None) -> NoReturn:
        """Ends the roll call for all that came, with the same text."""
        ended = [*self._guests.values(), *([] if last is None else [last])]
        failure = _Failure(
            what=error.what,
            where=list(error.where),
            why=error.why,
            do=error.do,
            is_request=is_request(error),
        )
        message = {"error": dataclasses.asdict(failure)}
        for knock in ended:
            knock.link.send_line(sealed(message, self._call.token, knock.hello.nonce))
        close_all(knock.link for knock in ended)
        self._guests = {}
        raise error

    def _missing(self) -> RunError:
        cluster = self._cluster
        hosts = {self._me: hostname()} | {process: knock.hello.host for process, knock in self._guests.items()}
        ids = [process for process in range(cluster.num_processes) if process not in hosts]
        return self._history.not_met(
            f"{len(ids)} of {cluster.num_processes} processes did not come: {_some(ids)}.",
            where=[
                f"came: {_some([f'{process} on {host}' for process, host in sorted(hosts.items())])} ({cluster.kind})",
                *cluster.seen(),
            ],
            why=f"{len(hosts)} of {cluster.num_processes} came to the roll call within {self._limit_s:.0f} s.",
            do=f"check why process {_some(ids)} did not start, or cannot reach {cluster.host}:"
            f"{roll_call_port(cluster)};\nif they are only slow to start: --init-timeout 900",
        )

    # The others.

    def _follow(self) -> Group | None:
        if self._up is not None:
            return self._hear(self._up)
        if self._lower and time.monotonic() >= self._not_before_s:
            self._connect(self._lower[self._next])
        return None

    def _connect(self, process: int) -> None:
        """Tries one of the lower processes; the next call tries the next one."""
        at = self._call.address_of(process)
        try:
            if at is None:
                raise OSError("its address is not known")
            connection = socket.create_connection(at, timeout=_CONNECT_S)
            self._call.open(connection.getsockname()[0])
        except OSError as error:
            self._failed(error.strerror or str(error))
            return
        self._up = Link(connection)
        self._up_address = at
        self._nonce = secrets.token_hex(16)
        self._is_greeted = False
        self._rows = {}
        # At once, before the nonce arrives: without it this connection is one of many that strangers may open.
        self._up.send_line(greeting(self._call.token, self._me))

    def _failed(self, reason: str) -> None:
        if self._up is not None:
            self._up.drop()
        self._up, self._reason = None, reason
        self._next += 1
        if self._next >= len(self._lower):
            self._next, self._rounds, self._not_before_s = 0, self._rounds + 1, time.monotonic() + _AGAIN_S

    def _hear(self, link: Link) -> Group | None:
        if self._is_greeted:
            link.beat(self._deadlines.beat_s)
        for line in link.lines():
            message = opened(line, self._call.token, self._nonce)
            if message is None:
                self._hear_stranger(link, line)
            else:
                group = self._hear_leader(link, message)
                if group is not None:
                    return group
            if self._up is None:
                return None
        silent_s = max(self._deadlines.peer_s, HELLO_S) if self._is_greeted else HELLO_S / 2
        if link.closed or link.silent_s > silent_s:
            self._failed("It left, or is not a jshard run" if link.closed else "It does not answer")
        return None

    def _hear_stranger(self, link: Link, line: bytes) -> None:
        """Handles a line without a proof: the nonce, a refusal, a sign of life, or anything at all."""
        message = decoded(line)
        if message is None:
            link.closed = True
        elif not self._is_greeted and isinstance(message.get("nonce"), str):
            self._greet(link, message["nonce"])
        elif message.get("refused") == 1:
            self._failed("It belongs to another run: it has another token (JSHARD_TOKEN, or the job)")

    def _hear_leader(self, link: Link, message: dict[str, Any]) -> Group | None:
        try:
            if "go" in message:
                return self._joined(link, message["go"])
            self._take(message)
        except _BadMessageError:
            self._failed("It has another version of jshard")
        return None

    def _greet(self, link: Link, nonce: str) -> None:
        cluster, door = self._cluster, self._call.door
        hello = Hello(
            process=self._me,
            of=cluster.num_processes,
            at=cluster.coordinator,
            host=hostname(),
            port=0 if door is None else door.port,
            waited_s=self._waited_s,
            nonce=self._nonce,
        )
        message = {"hello": dataclasses.asdict(hello), "history": dataclasses.asdict(self._history)}
        link.send_line(sealed(message, self._call.token, nonce))
        self._is_greeted = True
        for knock in self._guests.values():  # they look for the leader that this process follows now
            if door is not None:
                door.dismiss(knock, {"elsewhere": 1})
        self._guests = {}

    def _take(self, message: dict[str, Any]) -> None:
        """Handles the leader's messages before all begin."""
        if "error" in message:
            failure = _understood(_Failure, message["error"])
            kind = ShardingError if failure.is_request else self._history.not_met
            raise kind(failure.what, where=list(map(str, failure.where)), why=failure.why, do=failure.do)
        if "busy" in message:  # an attempt is in progress, and this process waits for the next, however long
            self._began_s, self._next = time.monotonic(), len(self._lower)
            self._failed("It takes part in an attempt")
        elif "elsewhere" in message:
            self._failed("It follows another process")
        rows = message.get("rows", [])
        if not isinstance(rows, list):
            raise _BadMessageError
        for each in rows:
            row = _understood(_Row, each)
            row.ip = row.ip or self._up_address[0]
            self._rows[row.process] = row

    def _joined(self, link: Link, message: Any) -> Group:
        go = _understood(_Go, message)
        history = _understood(History, go.history)
        members = sorted(process for process, row in self._rows.items() if row.is_member)
        if self._me not in members:
            raise _BadMessageError
        self._rows[members[0]].port = self._up_address[1]
        self._call.rows |= self._rows
        vars(self._history).update(vars(history))
        self._up = None
        return self._group(members, self._rows, self._up_address[0], go.port, go.mesh, {0: link}, {})

    def _unreachable(self) -> RunError:
        cluster, here = self._cluster, socket.gethostname()
        port = roll_call_port(cluster)
        return self._history.not_met(
            "Process 0 cannot be reached.",
            where=[
                f"this is process {cluster.process_id} on {here} ({cluster.kind})",
                f"process 0 is looked for at {cluster.host}:{port}",
                *cluster.seen(),
            ],
            why=f"{self._reason or 'It sends no message of the run'}, after {self._waited_s:.0f} s.",
            do=f"check that process 0 runs on {cluster.host} and that its ports {cluster.port} and {port} are open to "
            f"{here};\n"
            "or set another port, the same for all processes: JSHARD_ROLL_CALL_PORT=12345",
        )


def _understood(kind: type[T], message: Any) -> T:
    """Parses a message whose sender knows the token."""
    value = parsed(kind, message)
    if value is None:
        raise _BadMessageError
    return value


def _some(items: Sequence[object], limit: int = 10) -> str:
    shown = ", ".join(str(item) for item in items[:limit])
    return shown if len(items) <= limit else f"{shown} and {len(items) - limit} more"
