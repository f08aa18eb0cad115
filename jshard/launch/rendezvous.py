"""The roll call: the supervisors of a cluster meet before the workers start, or each says who is missing.

Before the first attempt process 0 listens (`roll_call_port`) and the others connect; all have to come. Where the run
may be started again, each supervisor has a port of its own, and all know the addresses from the first meeting. After a
loss each tries those of the processes below its own, the lowest first, and the lowest that is there leads. It starts
the attempt when all have come, or after a time when enough have: more than half of the processes that were launched.

So there are never two runs of one: two parts of more than half have a process in common, its supervisor has one worker,
and neither a step nor a checkpoint is completed without every worker of its part. A supervisor that its launcher has
started anew knows process 0's address alone, comes there and learns the rest.

Messages are JSON lines; see `door` for what they prove. To the leader {"hello": 1, "process": i, "of": n, ...} with
what the sender knows of the run; from there {"rows": ...} and {"go": ...}; or {"busy": 1} during an attempt, or
{"elsewhere": 1} from one that follows another; or {"missing": ...}, {"duplicate": ...}, {"mismatch": ...}, which end
all.
"""

from __future__ import annotations

import dataclasses
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

from jshard.errors import FourPartError, RunError, ShardingError
from jshard.launch import door
from jshard.launch.cluster import TICK_S, Cluster, Deadlines
from jshard.launch.door import HELLO_S, Door, Knock, roll_call_port
from jshard.launch.peers import Link, Peers, close_all, hostname
from jshard.launch.restarts import History, Restarts

_ROWS = 64  # in one message
_CONNECT_S = 2.0
_AGAIN_S = 1.0  # between two rounds of looking for a leader


@dataclasses.dataclass(frozen=True, kw_only=True)
class Group:
    """The processes of one attempt, as one of them sees them.

    Attributes:
        peers: the links to the others.
        place: of this one among them.
        mesh: the mesh that they take, where it is not that of all.
        bind: what JAX's coordinator listens on, as an environment variable.
    """

    peers: Peers
    place: Cluster
    mesh: str | None
    bind: Mapping[str, str]


@dataclasses.dataclass(kw_only=True)
class _Row:
    """A process of the run, as the others find it: its supervisor's machine, address and port."""

    host: str
    ip: str
    port: int
    is_member: bool = True


class RollCall:
    """The meetings of one supervisor with the others: before the first attempt, and after each loss.

    Args:
        cluster: this process's place among all.
        deadlines: of the run.
        restarts: how the run goes on after a loss; None if it does not.
    """

    def __init__(self, cluster: Cluster, deadlines: Deadlines, restarts: Restarts | None = None) -> None:
        self.cluster, self.deadlines, self.restarts = cluster, deadlines, restarts
        self.token = door.token_of(cluster)
        self.bind = door.bind_host(cluster) if cluster.process_id == 0 else ""
        self.rows: dict[int, _Row] = {}
        self.door: Door | None = None
        if cluster.process_id == 0:
            self.door = Door(door.listen(cluster, self.bind), self.token)

    def meet(self, history: History, *, stopped: Callable[[], bool] = lambda: False) -> Group | None:
        """Waits until the supervisors of all processes are there, or of enough.

        Ends within `deadlines.init_s` of the start of the first of them, and a few seconds.

        Args:
            history: of the run, as this supervisor knows it; it learns the rest.
            stopped: asked again and again; when true, the waiting ends and the result is None.

        Raises:
            RunError: not enough have come, or process 0 cannot be reached, or cannot listen.
            ShardingError: two processes have one id, or take part in different runs.
        """
        meeting = _Meeting(self, history)
        try:
            while not stopped():
                group = meeting.look()
                if group is not None:
                    if self.restarts is None:
                        self.close()
                    return group
                time.sleep(TICK_S)
            return None
        finally:
            meeting.close()

    def attend(self) -> None:
        """Lets those that come during an attempt know that they have to wait. Nothing here waits."""
        for knock in self.door.knocks() if self.door is not None else ():
            self.door.dismiss(knock, {"busy": 1})  # type: ignore[union-attr]

    def close(self) -> None:
        """Closes the port."""
        if self.door is not None:
            self.door.close()
            self.door = None

    def open(self, host: str) -> None:
        """Opens the port of a process other than 0, at the address by which it reaches the others."""
        if self.door is None and self.restarts is not None:
            self.bind = "" if host.startswith("127.") and not self.cluster.is_local else host
            self.door = Door(door.open_port(self.bind), self.token)

    def address_of(self, process: int) -> tuple[str, int] | None:
        """Where the supervisor of a process listens; None if that is not known."""
        if process == 0:
            return self.cluster.host, roll_call_port(self.cluster)
        row = self.rows.get(process)
        return None if row is None else (row.ip, row.port)


class _Meeting:
    """One roll call of a supervisor: it leads, or follows the lowest process that is there."""

    def __init__(self, call: RollCall, history: History) -> None:
        self._call, self._history = call, history
        self._cluster, self._deadlines = call.cluster, call.deadlines
        self._me = call.cluster.process_id
        self._guests: dict[int, Knock] = {}
        self._began = time.monotonic()
        self._ends_at = self._began + call.deadlines.init_s
        self._is_again = history.attempt > 0
        # Before the first attempt process 0 leads, and no other.
        self._lower = list(range(self._me)) if call.rows else [0][: self._me]
        self._next, self._rounds, self._not_before = 0, 0, 0.0
        self._up: Link | None = None
        self._up_address = ("", 0)
        self._nonce = ""
        self._is_greeted = False
        self._rows: dict[int, _Row] = {}
        self._reason = ""

    def look(self) -> Group | None:
        self._admit()
        group = self._follow()
        if group is None and self._leads:
            group = self._lead()
        elif group is None and self._me and self._waited_s > self._limit_s and self._up is None:
            raise self._unreachable()
        return group

    def close(self) -> None:
        close_all([knock.link for knock in self._guests.values()] + ([] if self._up is None else [self._up]))

    @property
    def _waited_s(self) -> float:
        return time.monotonic() - self._began

    @property
    def _limit_s(self) -> float:
        wait_s = 0.0 if self._call.restarts is None else self._call.restarts.wait_s
        return max(self._deadlines.init_s, wait_s) if self._is_again else self._deadlines.init_s

    @property
    def _leads(self) -> bool:
        """Whether no lower process is there."""
        return self._me == 0 or (self._up is None and self._rounds > 0 and bool(self._call.rows))

    @property
    def _follows(self) -> bool:
        """Whether a lower process answers; that a connection was accepted says nothing, the kernel does that."""
        return self._up is not None and self._is_greeted

    # The one that leads.

    def _admit(self) -> None:
        for knock in self._call.door.knocks() if self._call.door is not None else ():
            process, theirs = knock.hello["process"], History.from_message(knock.hello["history"])
            if self._follows or process <= self._me or theirs is None:
                self._call.door.dismiss(knock, {"elsewhere": 1})  # type: ignore[union-attr]
                continue
            self._check(knock, theirs)
            if process in self._guests:  # its supervisor was started anew
                self._guests[process].link.drop()
            self._guests[process] = knock
            # One that has waited long already is not kept waiting for another whole time-out.
            left_s = max(self._limit_s - knock.hello["waited_s"], 0)
            self._ends_at = min(self._ends_at, time.monotonic() + left_s)

    def _check(self, knock: Knock, theirs: History) -> None:
        hello, cluster = knock.hello, self._cluster
        self._is_again |= theirs.attempt > 0
        if hello["of"] != cluster.num_processes or hello["process"] >= cluster.num_processes:
            said = f"{hello['of']} processes at {hello['at']}"
            ours = f"{cluster.num_processes} processes at {cluster.coordinator}"
            message = {"mismatch": hello["process"], "host": hello["host"], "theirs": said, "ours": ours}
            self._end(message, knock)
        if hello["process"] in self._guests and not self._is_again:
            hosts = [self._guests[hello["process"]].hello["host"], hello["host"]]
            self._end({"duplicate": hello["process"], "hosts": hosts}, knock)

    def _lead(self) -> Group | None:
        for process, knock in list(self._guests.items()):
            knock.link.receive()
            knock.link.beat(self._deadlines.beat_s)
            if knock.link.closed:  # it may come again
                del self._guests[process]
        came = sorted({self._me, *self._guests})
        number = self._number(len(came))
        if number:
            return self._go(came[:number])
        if time.monotonic() > max(self._ends_at, self._began + (self._limit_s if self._is_again else 0)):
            hosts = {self._me: hostname(), **{p: knock.hello["host"] for p, knock in self._guests.items()}}
            self._end({"missing": sorted(hosts.items()), "after_s": self._limit_s})
        return None

    def _number(self, came: int) -> int:
        """How many of those that came can begin; 0 as long as it is worth waiting for more."""
        of, restarts = self._cluster.num_processes, self._call.restarts
        if came == of:
            return of
        if not self._is_again or restarts is None or self._waited_s < restarts.wait_s:
            return 0
        return restarts.usable(came, of)

    def _go(self, members: list[int]) -> Group:
        number = len(members)
        self._history.merge([History.from_message(knock.hello["history"]) for knock in self._guests.values()])
        is_first = self._history.attempt == 1
        host = self._call.bind
        port = self._cluster.port if is_first else door.free_port(host, self._cluster.port)
        meshes = {} if self._call.restarts is None else self._call.restarts.meshes or {}
        mesh = meshes.get(number) if number < self._cluster.num_processes else None
        rows = {self._me: _Row(host=hostname(), ip="", port=0)} | {p: self._row(k) for p, k in self._guests.items()}
        for process, row in rows.items():
            row.is_member = process in members
        for process, knock in self._guests.items():
            if process in members:
                self._send_go(knock, rows, {"port": port, "mesh": mesh, "history": self._history.as_message()})
            else:
                self._call.door.dismiss(knock, {"busy": 1})  # type: ignore[union-attr]
        self._call.rows |= rows
        links = {members.index(p): knock.link for p, knock in self._guests.items() if p in members}
        self._guests = {}
        at = self._cluster.host if self._me == 0 else host or "127.0.0.1"
        bind = door.coordinator_bind(host, port)
        return self._group(members, rows, at, port, mesh=mesh, links=links, bind=bind)

    def _row(self, knock: Knock) -> _Row:
        ip = knock.link.peer
        # Through the loopback it came from this machine, which the others know by its name.
        ip = self._cluster.host if ip.startswith("127.") and not self._cluster.is_local else ip
        return _Row(host=knock.hello["host"], ip=ip, port=knock.hello["port"])

    def _send_go(self, knock: Knock, rows: Mapping[int, _Row], go: dict[str, Any]) -> None:
        listed = [[process, *dataclasses.astuple(row)] for process, row in sorted(rows.items())]
        for i in range(0, len(listed), _ROWS):
            knock.link.send(door.signed({"rows": listed[i : i + _ROWS]}, self._call.token, knock.nonce))
        knock.link.send(door.signed({"go": go}, self._call.token, knock.nonce))

    def _group(
        self,
        members: Sequence[int],
        rows: Mapping[int, _Row],
        host: str,
        port: int,
        *,
        mesh: str | None,
        links: Mapping[int, Link],
        bind: Mapping[str, str] | None = None,
    ) -> Group:
        me = members.index(self._me)
        hosts = {index: rows[process].host for index, process in enumerate(members)}
        place = dataclasses.replace(
            self._cluster, coordinator=door.address(host, port), num_processes=len(members), process_id=me
        )
        peers = Peers(process_id=me, links=links, hosts=hosts, deadlines=self._deadlines)
        return Group(peers=peers, place=place, mesh=mesh, bind=bind or {})

    def _end(self, message: dict[str, Any], last: Knock | None = None) -> NoReturn:
        for knock in [*self._guests.values(), *([] if last is None else [last])]:
            knock.link.send(door.signed(message, self._call.token, knock.nonce))
        close_all([] if last is None else [last.link])
        raise _end_of(self._cluster, message) or AssertionError(message)

    # The others.

    def _follow(self) -> Group | None:
        if self._up is not None:
            return self._hear(self._up)
        if self._lower and time.monotonic() >= self._not_before:
            self._connect(self._lower[self._next])
        return None

    def _connect(self, process: int) -> None:
        """Tries one of the lower processes; the next one comes next."""
        at = self._call.address_of(process)
        try:
            if at is None:
                raise OSError("its address is not known")
            connection = socket.create_connection(at, timeout=_CONNECT_S)
            self._call.open(connection.getsockname()[0])
        except OSError as error:
            self._failed(error.strerror or str(error))
            return
        self._up, self._up_address = Link(connection), at
        self._nonce, self._is_greeted, self._rows = door.new_nonce(), False, {}

    def _failed(self, reason: str) -> None:
        if self._up is not None:
            self._up.drop()
            self._up = None
        self._reason = reason
        self._next += 1
        if self._next >= len(self._lower):
            self._next, self._rounds, self._not_before = 0, self._rounds + 1, time.monotonic() + _AGAIN_S

    def _hear(self, link: Link) -> Group | None:
        if self._is_greeted:
            link.beat(self._deadlines.beat_s)
        for message in link.receive():
            if not self._is_greeted and isinstance(message.get("nonce"), str):
                self._greet(link, message["nonce"])
            elif message.get("refused") == 1:
                self._failed("It is of another run: it has another token (JSHARD_TOKEN, JSHARD_TOKEN_FILE, or the job)")
                return None
            elif door.is_signed(message, self._call.token, self._nonce):
                if self._take(message):
                    return self._joined(link, message["go"])
                if self._up is None:
                    return None
        silent_s = max(self._deadlines.peer_s, HELLO_S) if self._is_greeted else HELLO_S / 2
        if link.closed or link.silent_s > silent_s:
            self._failed("It left, or is no jshard run" if link.closed else "It answers nothing")
        return None

    def _greet(self, link: Link, nonce: str) -> None:
        cluster, opened = self._cluster, self._call.door
        hello = {"hello": 1, "process": self._me, "of": cluster.num_processes, "at": cluster.coordinator}
        hello |= {"host": hostname(), "waited_s": self._waited_s, "port": 0 if opened is None else opened.port}
        hello |= {"nonce": self._nonce, "history": self._history.as_message()}
        link.send(door.signed(hello, self._call.token, nonce))
        self._is_greeted = True
        self._dismiss_guests()

    def _dismiss_guests(self) -> None:
        """They look for the one that this process follows now."""
        for knock in self._guests.values():
            self._call.door.dismiss(knock, {"elsewhere": 1})  # type: ignore[union-attr]
        self._guests = {}

    def _take(self, message: dict[str, Any]) -> bool:
        """Takes what the leader says; whether it is that all begin."""
        if (error := _end_of(self._cluster, message)) is not None:
            raise error
        if "busy" in message or "elsewhere" in message:
            if "busy" in message:  # an attempt is at work, and this process waits for the next, however long
                self._began, self._next = time.monotonic(), len(self._lower)
            self._failed("It takes part in an attempt" if "busy" in message else "It follows another process")
        for process, host, ip, port, is_member in message.get("rows", ()):
            self._rows[int(process)] = _Row(host=host, ip=ip or self._up_address[0], port=port, is_member=is_member)
        return isinstance(message.get("go"), dict)

    def _joined(self, link: Link, go: dict[str, Any]) -> Group:
        members = sorted(process for process, row in self._rows.items() if row.is_member)
        leader = members[0]
        self._rows[leader].port = self._up_address[1]
        self._call.rows |= self._rows
        self._history.adopt(History.from_message(go["history"]))
        self._up = None
        return self._group(members, self._rows, self._up_address[0], int(go["port"]), mesh=go["mesh"], links={0: link})

    def _unreachable(self) -> RunError:
        cluster, here = self._cluster, socket.gethostname()
        port = roll_call_port(cluster)
        return RunError(
            "Process 0 cannot be reached.",
            where=[
                f"this is process {cluster.process_id} on {here} ({cluster.kind})",
                f"process 0 is looked for at {_address(cluster)}",
                *cluster.seen(),
            ],
            why=f"{self._reason}, after {self._waited_s:.0f} s.",
            do=f"see that process 0 runs on {cluster.host} and that its ports {cluster.port} and {port} are open to "
            f"{here};\n"
            "another port, the same for all processes: JSHARD_ROLL_CALL_PORT=12345",
        )


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
