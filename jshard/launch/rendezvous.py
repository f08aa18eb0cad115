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
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from typing import NoReturn

from jshard.errors import FourPartError, RunError, ShardingError
from jshard.launch.addresses import address, coordinator_bind, free_port, roll_call_port
from jshard.launch.cluster import TICK_S, Cluster
from jshard.launch.endpoint import Endpoint
from jshard.launch.leader_search import JoinedAttempt, LeaderSearch
from jshard.launch.link import Link, close_all
from jshard.launch.listener import HELLO_S, JoinRequest
from jshard.launch.messages import sealed
from jshard.launch.peers import Peers, hostname
from jshard.launch.rendezvous_messages import PeerAddress, address_messages, failure_message, start_message
from jshard.launch.restarts import History


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


class Rendezvous(Endpoint):
    """The meetings of one supervisor with the others: before the first attempt, and after each loss."""

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
                    if self.restarts is None:  # it is the only meeting, and the port is free for the next run
                        self.close()
                    return group
                time.sleep(TICK_S)
        return None

    def attend(self) -> None:
        """Asks supervisors that come during an attempt to wait. Nothing here waits."""
        if self.listener is not None:
            for request in self.listener.join_requests():
                self.listener.dismiss(request, {"busy": 1})


class _Meeting:
    """One roll call of a supervisor: it leads, or follows the lowest process that is present.

    Attributes:
        joined: the processes that want to follow this one.
        start_s: when it began, by `time.monotonic`.
        ends_at_s: when too few have come, if it leads. Earlier than by its own limit if another has waited longer.
        is_restart: whether there was an attempt before, as far as any of the processes knows.
    """

    def __init__(self, endpoint: Endpoint, history: History) -> None:
        self._endpoint = endpoint
        self._history = history
        self._cluster = endpoint.cluster
        self._deadlines = endpoint.deadlines
        self._me = endpoint.cluster.process_id
        self._search = LeaderSearch(endpoint, history)
        self._joined: dict[int, JoinRequest] = {}
        self._start_s = time.monotonic()
        self._ends_at_s = self._start_s + endpoint.deadlines.init_s
        self._is_restart = history.attempt > 0

    def look(self) -> Group | None:
        """Goes on with the meeting; returns the processes of the attempt once it starts."""
        self._admit()
        attempt = self._search.look(self._waited_s)
        if self._search.is_following or attempt is not None:
            self._send_away_joined()
        if attempt is not None:
            return self._join(attempt)
        if self._leads:
            return self._lead()
        # The leader's own limit ends its roll call. Whoever is silent about it for twice that long is no leader.
        is_over = self._waited_s > self._limit_s and not self._search.has_connection
        if is_over or self._waited_s > 2 * self._limit_s + 2 * HELLO_S:
            raise self._unreachable()
        return None

    def close(self) -> None:
        """Closes all connections."""
        close_all([*(request.link for request in self._joined.values()), *self._search.links])

    @property
    def _leads(self) -> bool:
        """Returns whether no lower process is present."""
        # No process is below it.
        if self._me == 0:
            return True
        if not self._endpoint.addresses:  # before the first attempt
            return False
        # Only after a round in which no lower process has answered.
        return not self._search.has_connection and self._search.rounds > 0

    @property
    def _began_s(self) -> float:
        """Returns the time from which it waits: later than the start if an attempt was in progress meanwhile."""
        return max(self._start_s, self._search.busy_since_s)

    @property
    def _waited_s(self) -> float:
        return time.monotonic() - self._began_s

    @property
    def _limit_s(self) -> float:
        restarts = self._endpoint.restarts
        if restarts is None or not self._is_restart:
            return self._deadlines.init_s
        return max(self._deadlines.init_s, restarts.wait_s)

    # The processes that want to follow this one.

    def _admit(self) -> None:
        listener = self._endpoint.listener
        if listener is None:
            return
        for request in listener.join_requests():
            process = request.hello.process
            # A lower process has no reason to follow this one, which follows it as soon as it answers.
            if self._search.is_following or 0 <= process <= self._me:
                listener.dismiss(request, {"elsewhere": 1})
                continue
            # An id that is not valid comes this far, too, and is reported.
            self._check(request)
            if process in self._joined:  # its supervisor was restarted
                self._joined[process].link.drop()
            self._joined[process] = request
            # A process that has waited long does not wait for another whole time-out.
            left_s = max(self._limit_s - request.hello.waited_s, 0)
            self._ends_at_s = min(self._ends_at_s, time.monotonic() + left_s)

    def _check(self, request: JoinRequest) -> None:
        """Ends the roll call if the process belongs to another run, or has the id of another one."""
        hello = request.hello
        cluster = self._cluster
        # Before the check of the ids: after a loss a process may come twice.
        self._is_restart |= request.history.attempt > 0
        if hello.of != cluster.num_processes or not 0 <= hello.process < cluster.num_processes:
            ours = f"process {self._me} has {cluster.num_processes} processes at {cluster.coordinator}"
            theirs = f"process {hello.process} has {hello.of} processes at {hello.at}"
            error = ShardingError(
                f"Process {hello.process} on {hello.host} has other settings of the run.",
                where=[ours, theirs, *cluster.seen()],
                why="all processes of a run need the same address and number.",
                do="the same JAX_COORDINATOR_ADDRESS and JAX_NUM_PROCESSES for all of them.",
            )
            self._end(error, request)
        if hello.process in self._joined and not self._is_restart:
            first = self._joined[hello.process].hello
            error = ShardingError(
                f"Two processes have the id {hello.process}.",
                where=[f"on {first.host} and on {hello.host}", *cluster.seen()],
                why=f"each of the {cluster.num_processes} processes needs its own id.",
                do="give each another JAX_PROCESS_ID, or start them with srun, which sets it.",
            )
            self._end(error, request)

    def _send_away_joined(self) -> None:
        """Lets the processes that have joined look for the leader that this one follows now."""
        listener = self._endpoint.listener
        for request in self._joined.values():
            if listener is not None:
                listener.dismiss(request, {"elsewhere": 1})
        self._joined = {}

    # The leader.

    def _lead(self) -> Group | None:
        """Starts the attempt once enough have come; ends the roll call if they do not come in time."""
        self._drop_those_who_left()
        came = sorted({self._me, *self._joined})
        number = self._number_to_start(len(came))
        if number > 0:
            # The lowest ones: this process is among them, as all that joined have higher ids.
            return self._start(came[:number])
        ends_at_s = self._ends_at_s
        if self._is_restart:
            # Not earlier, though another has waited longer: the lost process may be about to return.
            ends_at_s = max(ends_at_s, self._began_s + self._limit_s)
        if time.monotonic() > ends_at_s:
            self._end(self._missing())
        return None

    def _drop_those_who_left(self) -> None:
        for process, request in list(self._joined.items()):
            # The content does not matter: reading finds out whether the link is closed.
            request.link.receive()
            request.link.beat(self._deadlines.beat_s)
            if request.link.closed:  # it may return
                del self._joined[process]

    def _number_to_start(self, came: int) -> int:
        """Returns how many of the processes that came can begin; 0 while waiting for more is useful."""
        launched = self._cluster.num_processes
        restarts = self._endpoint.restarts
        if came == launched:
            return launched
        if not self._is_restart or restarts is None or self._waited_s < restarts.wait_s:
            return 0
        return restarts.usable(came, launched)

    def _start(self, members: Sequence[int]) -> Group:
        """Starts the attempt with these processes; the others wait for the next one."""
        self._history.begin(request.history for request in self._joined.values())
        bind = self._endpoint.bind
        port = self._cluster.port
        if self._history.attempt > 1:
            # A worker of the attempt before may not have ended yet, and still have the port.
            port = free_port(bind, port)
        mesh = self._mesh_of(len(members))
        addresses = self._addresses(members)
        # The start is the last message: all addresses have arrived before it.
        messages = [*address_messages(addresses), start_message(port, mesh, self._history)]
        links = {}
        for process, request in self._joined.items():
            if process in members:
                # By their numbers in the attempt, which differ from the ids once a process is missing.
                links[members.index(process)] = request.link
                for message in messages:
                    self._send(request, message)
            elif self._endpoint.listener is not None:
                self._endpoint.listener.dismiss(request, {"busy": 1})
        self._endpoint.addresses |= addresses
        self._joined = {}  # the links belong to the attempt now
        host = self._cluster.host if self._me == 0 else bind or "127.0.0.1"
        place = self._place(members, address(host, port))
        peers = self._peers(members, addresses, links)
        return Group(peers=peers, place=place, mesh=mesh, bind=coordinator_bind(bind, port))

    def _mesh_of(self, number: int) -> str | None:
        """Returns the mesh of so many processes; None if it is that of all."""
        restarts = self._endpoint.restarts
        if restarts is None or restarts.meshes is None or number == self._cluster.num_processes:
            return None
        return restarts.meshes.get(number)

    def _addresses(self, members: Sequence[int]) -> dict[int, PeerAddress]:
        """Returns how to reach the processes that came."""
        # Of itself it states no address: the others know how they reached it, see `LeaderSearch`.
        addresses = {self._me: PeerAddress(process=self._me, host=hostname(), ip="", port=0, is_member=True)}
        for process, request in self._joined.items():
            ip = request.link.peer
            # A loopback connection is from this machine, which the others know by its name.
            if ip.startswith("127.") and not self._cluster.is_local:
                ip = self._cluster.host
            hello = request.hello
            addresses[process] = PeerAddress(
                process=process, host=hello.host, ip=ip, port=hello.port, is_member=process in members
            )
        return addresses

    def _send(self, request: JoinRequest, message: Mapping[str, object]) -> None:
        request.link.send_line(sealed(message, self._endpoint.token, request.hello.nonce))

    def _end(self, error: FourPartError, last: JoinRequest | None = None) -> NoReturn:
        """Ends the roll call for all that came, with the same text."""
        requests = list(self._joined.values())
        if last is not None:
            requests.append(last)
        message = failure_message(error)
        for request in requests:
            self._send(request, message)
        close_all(request.link for request in requests)
        self._joined = {}
        raise error

    def _missing(self) -> RunError:
        cluster = self._cluster
        hosts = {self._me: hostname()}
        for process, request in self._joined.items():
            hosts[process] = request.hello.host
        missing = [process for process in range(cluster.num_processes) if process not in hosts]
        came = [f"{process} on {hosts[process]}" for process in sorted(hosts)]
        return self._history.not_met(
            f"{len(missing)} of {cluster.num_processes} processes did not come: {_listed(missing)}.",
            where=[f"came: {_listed(came)} ({cluster.kind})", *cluster.seen()],
            why=f"{len(hosts)} of {cluster.num_processes} came to the roll call within {self._limit_s:.0f} s.",
            do=f"check why process {_listed(missing)} did not start, or cannot reach {cluster.host}:"
            f"{roll_call_port(cluster)};\nif they are only slow to start: --init-timeout 900",
        )

    # The others.

    def _join(self, attempt: JoinedAttempt) -> Group:
        """Takes part in the attempt that the leader has started, and takes over what it knows."""
        self._endpoint.addresses |= attempt.addresses
        # In place: the supervisor has the same object.
        vars(self._history).update(vars(attempt.history))
        place = self._place(attempt.members, address(attempt.leader_host, attempt.start.port))
        peers = self._peers(attempt.members, attempt.addresses, {0: attempt.link})
        return Group(peers=peers, place=place, mesh=attempt.start.mesh, bind={})

    def _place(self, members: Sequence[int], coordinator: str) -> Cluster:
        """Returns the place of this process in the attempt, whose processes are numbered from 0."""
        # JAX needs numbers without gaps, and a lost process leaves one.
        return dataclasses.replace(
            self._cluster,
            coordinator=coordinator,
            num_processes=len(members),
            process_id=members.index(self._me),
        )

    def _peers(self, members: Sequence[int], addresses: Mapping[int, PeerAddress], links: Mapping[int, Link]) -> Peers:
        hosts = {index: addresses[process].host for index, process in enumerate(members)}
        return Peers(process_id=members.index(self._me), links=links, hosts=hosts, deadlines=self._deadlines)

    def _unreachable(self) -> RunError:
        cluster = self._cluster
        here = socket.gethostname()
        port = roll_call_port(cluster)
        return self._history.not_met(
            "Process 0 cannot be reached.",
            where=[
                f"this is process {cluster.process_id} on {here} ({cluster.kind})",
                f"process 0 is looked for at {cluster.host}:{port}",
                *cluster.seen(),
            ],
            why=f"{self._search.reason or 'It sends no message of the run'}, after {self._waited_s:.0f} s.",
            do=f"check that process 0 runs on {cluster.host} and that its ports {cluster.port} and {port} are open to "
            f"{here};\n"
            "or set another port, the same for all processes: JSHARD_ROLL_CALL_PORT=12345",
        )


def _listed(items: Sequence[object], limit: int = 10) -> str:
    """Returns the items as a list in a sentence; of many only the first."""
    text = ", ".join(str(item) for item in items[:limit])
    if len(items) <= limit:
        return text
    return f"{text} and {len(items) - limit} more"
