"""The roll call: the supervisors of a cluster meet before the workers start, or each says who is missing.

Process 0 listens (`roll_call_port`), the others connect to it, and all have to come. Where the run may be started again
after a loss the port stays open, and all meet there once more; a supervisor that its launcher has started anew comes
there, too, and learns from the others what it cannot know.

Messages are JSON lines; see `cluster` for what they prove. From process 0 a nonce, to it a hello with what the sender
knows of the run, and from it {"go": ...} to all, or {"error": ...}, which ends all.
"""

from __future__ import annotations

import contextlib
import dataclasses
import secrets
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

from jshard.errors import FourPartError, RunError, ShardingError
from jshard.launch.cluster import (
    RESUME,
    TICK_S,
    Cluster,
    Deadlines,
    bind_host,
    coordinator_bind,
    free_port,
    is_signed,
    listen,
    roll_call_port,
    signed,
    token_of,
)
from jshard.launch.peers import Ending, Link, Peers, close_all, hostname, parsed

_STRANGERS = 64
_HELLO_S = 10.0  # a connection that has said nothing of use for so long is closed
_CONNECT_S, _AGAIN_S = 2.0, 1.0
_PAUSE_S, _LONGEST_PAUSE_S = 1.0, 30.0
_MOST_FRUITLESS = 3


class NotRestarted(RunError):
    """The run has lost a process, and not all came for it to go on now."""


@dataclasses.dataclass(kw_only=True)
class History:
    """What the attempts at a run have come to, as one supervisor knows it.

    Attributes:
        left: losses that the run may still have.
        attempt: number of the attempt, from 1; 0 for a supervisor that knows of none yet.
        fruitless: attempts in a row that ended with no step and no checkpoint that was not there before.
        step: the highest step that was reported.
        checkpoint: the last one that was reported.
        folder: of the run.
        lost: what ended the attempt before.
    """

    left: int
    attempt: int = 0
    fruitless: int = 0
    step: int | None = None
    checkpoint: str | None = None
    folder: str | None = None
    lost: str | None = None

    def note(self, lost: Ending, *, step: int | None, checkpoint: str | None, folder: str | None) -> None:
        """Notes how an attempt has ended, and what its workers reported last."""
        step = max((each for each in (lost.step, step) if each is not None), default=None)
        checkpoint = checkpoint or lost.checkpoint
        is_new = step is not None and step > (-1 if self.step is None else self.step)
        is_new |= checkpoint is not None and checkpoint != self.checkpoint
        self.fruitless = 0 if is_new else self.fruitless + 1
        self.step = max((each for each in (self.step, step) if each is not None), default=None)
        self.checkpoint, self.folder = checkpoint or self.checkpoint, folder or self.folder
        self.lost = f"{lost.who}: {lost.how}"
        self.left -= 1

    def allows(self, lost: Ending) -> bool:
        """Whether the run is to be started again after a loss. A failure that has a reason would have it again."""
        return self.left > 0 and lost.run_code == RESUME

    def check_worth(self) -> None:
        """Checks that another attempt may come further than those before.

        Raises:
            RunError: too many of them came nowhere.
        """
        if self.fruitless >= _MOST_FRUITLESS:
            raise RunError(
                f"The last {self.fruitless} attempts came nowhere: the run is not started again.",
                where=[self.lost or "no process", f"attempt {self.attempt}, {self.left} were left"],
                why=f"none of them did a step after {self.step or 0}, or saved a checkpoint that was not there before.",
                do="see what ended them; then the same command with --resume goes on.",
            )

    @property
    def not_met(self) -> type[RunError]:
        """The error of a meeting to which not all came."""
        return RunError if self.lost is None else NotRestarted

    @property
    def pause_s(self) -> float:
        """How long to wait before the next attempt: longer after each that came nowhere."""
        return min(_PAUSE_S * 2**self.fruitless, _LONGEST_PAUSE_S) if self.fruitless < _MOST_FRUITLESS else 0.0

    def line(self, *, num_processes: int) -> str:
        """What is printed when the run is started again."""
        origin = f"from {self.checkpoint}" if self.checkpoint else "(no checkpoint was reported yet)"
        number = f"{num_processes} process{'es' if num_processes > 1 else ''}"
        return f"lost {self.lost}. It goes on {origin} with {number}; restarts left: {self.left}."


@dataclasses.dataclass(frozen=True, kw_only=True)
class Group:
    """The processes of one attempt, as one of them sees them."""

    peers: Peers
    place: Cluster
    bind: Mapping[str, str]  # what JAX's coordinator listens on, as an environment variable


class RollCall:
    """The meetings of one supervisor with the others: before the first attempt, and after each loss.

    Its port stays open if the run may be started again; `refused` counts hellos with another token.
    """

    def __init__(self, cluster: Cluster, deadlines: Deadlines, *, stays_open: bool = False) -> None:
        self.cluster, self.deadlines, self._stays_open = cluster, deadlines, stays_open
        self.token, self.refused = token_of(cluster), 0
        self.bind = bind_host(cluster) if cluster.process_id == 0 else ""
        self.server = listen(cluster, self.bind) if cluster.process_id == 0 else None

    def meet(self, history: History, *, stopped: Callable[[], bool] = lambda: False) -> Group | None:
        """Waits until the supervisors of all processes are there.

        Ends within `deadlines.init_s` of the start of the first of them, and a few seconds.

        Args:
            history: of the run, as this supervisor knows it; it learns the rest.
            stopped: asked again and again; when true, the waiting ends and the result is None.

        Raises:
            RunError: not all have come, or process 0 cannot be reached.
            ShardingError: two processes have one id, or take part in different runs.
        """
        meeting = _Guest(self, history) if self.server is None else _Host(self, history, self.server)
        with contextlib.closing(meeting):
            while not stopped():
                group = meeting.look()
                if group is not None:
                    if not self._stays_open:
                        self.close()
                    return group
                time.sleep(TICK_S)
        return None

    def close(self) -> None:
        """Closes the port."""
        if self.server is not None:
            self.server.close()

    def group(self, history: History, links: Mapping[int, Link], hosts: Mapping[int, str], port: int) -> Group:
        """All are there: the attempt may begin."""
        host = self.cluster.coordinator.rpartition(":")[0]
        place = dataclasses.replace(self.cluster, coordinator=f"{host}:{port}")
        peers = Peers(process_id=place.process_id, links=links, hosts=hosts, deadlines=self.deadlines)
        bind = coordinator_bind(self.bind, port) if place.process_id == 0 else {}
        return Group(peers=peers, place=place, bind=bind)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Hello:
    """What a process says of itself when it comes; `nonce` is for the answers to prove something with."""

    process: int
    of: int
    at: str
    host: str
    waited_s: float
    nonce: str


class _Host:
    """A roll call as process 0 holds it."""

    def __init__(self, call: RollCall, history: History, server: socket.socket) -> None:
        server.setblocking(False)
        self._call, self._history, self._server = call, history, server
        self._strangers: dict[
            Link, tuple[str, float]
        ] = {}  # nonce, which is empty for one that was refused; since when
        self._guests: dict[int, tuple[Link, _Hello]] = {}
        self._known: list[History] = [history]
        self._ends_at = time.monotonic() + call.deadlines.init_s

    def look(self) -> Group | None:
        self._accept()
        for link, (nonce, since_s) in list(self._strangers.items()):
            if message := next(iter(link.receive()), None):
                self._hear(link, message, nonce)
            elif link.closed or time.monotonic() - since_s > _HELLO_S:
                del self._strangers[link]
                link.drop()
        for process, (link, _) in list(self._guests.items()):
            link.receive()
            link.beat(self._call.deadlines.beat_s)
            if link.closed:  # it may come again
                del self._guests[process]
        if len(self._guests) == self._call.cluster.num_processes - 1:
            return self._go()
        if time.monotonic() > self._ends_at:
            self._end(self._missing())
        return None

    def close(self) -> None:
        for link in self._strangers:
            link.drop()
        close_all(link for link, _ in self._guests.values())

    def _accept(self) -> None:
        while len(self._strangers) < _STRANGERS:
            try:
                connection, _ = self._server.accept()
            except OSError:  # nobody is waiting, or has gone again
                return
            link, nonce = Link(connection), secrets.token_hex(16)
            link.send({"nonce": nonce})
            self._strangers[link] = nonce, time.monotonic()

    def _hear(self, link: Link, message: dict[str, Any], nonce: str) -> None:
        hello, theirs = parsed(_Hello, message.get("hello")), parsed(History, message.get("history"))
        if hello is None or theirs is None or not nonce:
            del self._strangers[link]
            link.drop()
        elif is_signed(message, self._call.token, nonce):
            del self._strangers[link]
            self._admit(link, hello, theirs)
        else:
            self._strangers[link] = "", time.monotonic()  # it is closed once it has read this
            link.send({"refused": 1})
            self._call.refused += 1
            if self._call.refused in (1, 10, 100, 1000):
                number = "a hello" if self._call.refused == 1 else f"{self._call.refused} hellos so far"
                port = self._server.getsockname()[1]
                sys.stderr.write(f"port {port}: {number} with another token refused, from {link.peer}\n")
                sys.stderr.flush()

    def _admit(self, link: Link, hello: _Hello, theirs: History) -> None:
        cluster = self._call.cluster
        self._known.append(theirs)
        is_again = any(one.attempt for one in self._known)
        if hello.of != cluster.num_processes or not 0 < hello.process < cluster.num_processes:
            ours = f"process 0 has {cluster.num_processes} processes at {cluster.coordinator}"
            theirs = f"process {hello.process} has {hello.of} processes at {hello.at}"
            error = ShardingError(
                f"Process {hello.process} on {hello.host} takes the run for another.",
                where=[ours, theirs, *cluster.seen()],
                why="all processes of a run are given the same address and number.",
                do="the same JAX_COORDINATOR_ADDRESS and JAX_NUM_PROCESSES for all of them.",
            )
            self._end(error, (link, hello))
        if hello.process in self._guests:
            before, other = self._guests[hello.process]
            if not is_again:
                error = ShardingError(
                    f"Two processes have the id {hello.process}.",
                    where=[f"on {other.host} and on {hello.host}", *cluster.seen()],
                    why=f"each of the {cluster.num_processes} processes has an id of its own.",
                    do="give each another JAX_PROCESS_ID, or start them with srun, which does.",
                )
                self._end(error, (link, hello))
            before.drop()  # its supervisor was started anew
        self._guests[hello.process] = link, hello
        if not is_again:  # one that has waited long already is not kept waiting for another whole time-out
            left_s = max(self._call.deadlines.init_s - hello.waited_s, 0)
            self._ends_at = min(self._ends_at, time.monotonic() + left_s)

    def _go(self) -> Group:
        if not self._history.attempt:  # started anew: the others know more
            vars(self._history).update(vars(max(self._known, key=lambda one: one.attempt)))
        self._history.attempt += 1
        wanted = self._call.cluster.port
        port = wanted if self._history.attempt == 1 else free_port(self._call.bind, wanted)
        for link, hello in self._guests.values():
            go = {"go": dataclasses.asdict(self._history), "port": port}
            link.send(signed(go, self._call.token, hello.nonce))
        links = {process: link for process, (link, _) in self._guests.items()}
        hosts = {process: hello.host for process, (_, hello) in self._guests.items()}
        self._guests = {}
        return self._call.group(self._history, links, hosts, port)

    def _end(self, error: FourPartError, last: tuple[Link, _Hello] | None = None) -> NoReturn:
        """Ends the roll call for all that came, with the same words."""
        ended = [*self._guests.values(), *([] if last is None else [last])]
        said = {"what": error.what, "where": list(error.where), "why": error.why, "do": error.do}
        for link, hello in ended:
            message = {"error": said, "is_request": isinstance(error, ShardingError)}
            link.send(signed(message, self._call.token, hello.nonce))
        close_all(link for link, _ in ended)
        self._guests = {}
        raise error

    def _missing(self) -> RunError:
        cluster, after_s = self._call.cluster, self._call.deadlines.init_s
        hosts = {0: hostname()} | {process: hello.host for process, (_, hello) in self._guests.items()}
        ids = [process for process in range(cluster.num_processes) if process not in hosts]
        return self._history.not_met(
            f"{len(ids)} of {cluster.num_processes} processes did not come: {_some(ids)}.",
            where=[
                f"came: {_some([f'{process} on {host}' for process, host in sorted(hosts.items())])} ({cluster.kind})",
                *cluster.seen(),
            ],
            why=f"{len(hosts)} of {cluster.num_processes} came to the roll call within {after_s:.0f} s.",
            do=f"look why process {_some(ids)} did not start, or cannot reach {cluster.host}:"
            f"{roll_call_port(cluster)};\nif they are only slow to start: --init-timeout 900",
        )


class _Guest:
    """A roll call as the other processes come to it."""

    def __init__(self, call: RollCall, history: History) -> None:
        self._call, self._history = call, history
        self._began_s, self._not_before_s = time.monotonic(), 0.0
        self._link: Link | None = None
        self._nonce, self._is_greeted, self._reason = "", False, ""

    def look(self) -> Group | None:
        if self._link is not None:
            return self._hear(self._link)
        if self._waited_s > self._call.deadlines.init_s:
            raise self._unreachable()
        if time.monotonic() >= self._not_before_s:
            cluster = self._call.cluster
            try:
                at = cluster.host, roll_call_port(cluster)
                self._link = Link(socket.create_connection(at, timeout=_CONNECT_S))
                self._nonce, self._is_greeted = secrets.token_hex(16), False
            except OSError as error:
                self._failed(error.strerror or str(error))
        return None

    def close(self) -> None:
        close_all([] if self._link is None else [self._link])

    @property
    def _waited_s(self) -> float:
        return time.monotonic() - self._began_s

    def _hear(self, link: Link) -> Group | None:
        if self._is_greeted:
            link.beat(self._call.deadlines.beat_s)
        for message in link.receive():
            if not self._is_greeted and isinstance(message.get("nonce"), str):
                self._greet(link, message["nonce"])
            elif message.get("refused") == 1:
                self._failed("It is of another run: it has another token (JSHARD_TOKEN, or the job)")
                return None
            elif is_signed(message, self._call.token, self._nonce):
                return self._joined(link, message)
        silent_s = max(self._call.deadlines.peer_s, _HELLO_S) if self._is_greeted else _HELLO_S / 2
        if link.closed or link.silent_s > silent_s:
            self._failed("It left, or is no jshard run" if link.closed else "It answers nothing")
        return None

    def _greet(self, link: Link, nonce: str) -> None:
        cluster = self._call.cluster
        hello = _Hello(
            process=cluster.process_id,
            of=cluster.num_processes,
            at=cluster.coordinator,
            host=hostname(),
            waited_s=self._waited_s,
            nonce=self._nonce,
        )
        message = {"hello": dataclasses.asdict(hello), "history": dataclasses.asdict(self._history)}
        link.send(signed(message, self._call.token, nonce))
        self._is_greeted = True

    def _joined(self, link: Link, message: dict[str, Any]) -> Group:
        cluster = self._call.cluster
        if "error" in message:
            raise (ShardingError if message["is_request"] else self._history.not_met)(**message["error"])
        vars(self._history).update(message["go"])
        self._link = None
        return self._call.group(self._history, {0: link}, {0: cluster.host}, int(message["port"]))

    def _failed(self, reason: str) -> None:
        if self._link is not None:
            self._link.drop()
        self._link, self._reason, self._not_before_s = None, reason, time.monotonic() + _AGAIN_S

    def _unreachable(self) -> RunError:
        cluster, here = self._call.cluster, socket.gethostname()
        port = roll_call_port(cluster)
        return self._history.not_met(
            "Process 0 cannot be reached.",
            where=[
                f"this is process {cluster.process_id} on {here} ({cluster.kind})",
                f"process 0 is looked for at {cluster.host}:{port}",
                *cluster.seen(),
            ],
            why=f"{self._reason}, after {self._waited_s:.0f} s.",
            do=f"see that process 0 runs on {cluster.host} and that its ports {cluster.port} and {port} are open to "
            f"{here};\n"
            "another port, the same for all processes: JSHARD_ROLL_CALL_PORT=12345",
        )


def _some(items: Sequence[object], limit: int = 10) -> str:
    shown = ", ".join(str(item) for item in items[:limit])
    return shown if len(items) <= limit else f"{shown} and {len(items) - limit} more"
