"""The part of a process that follows: it looks for the leader among the processes below it, and listens to it."""

from __future__ import annotations

import dataclasses
import secrets
import socket
import time

from jshard.launch.endpoint import Endpoint
from jshard.launch.link import Link
from jshard.launch.listener import HELLO_S, Hello, greeting
from jshard.launch.messages import Message, decoded, opened, sealed
from jshard.launch.peers import hostname
from jshard.launch.rendezvous_messages import (
    AttemptStart,
    BadMessageError,
    PeerAddress,
    addresses_in,
    error_in,
    understood,
)
from jshard.launch.restarts import History

_CONNECT_S = 2.0
_NEXT_ROUND_S = 1.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class JoinedAttempt:
    """An attempt that the leader has started.

    Attributes:
        link: the connection to the leader.
        leader_host: its address.
        members: the processes of the attempt, the leader first.
        addresses: of all processes that came.
        start: the message of the leader.
        history: the run as known to the leader.
    """

    link: Link
    leader_host: str
    members: list[int]
    addresses: dict[int, PeerAddress]
    start: AttemptStart
    history: History


@dataclasses.dataclass
class _Leader:
    """A process that may lead, and this one is connected to.

    Attributes:
        link: the connection.
        address: of its supervisor.
        nonce: what its messages must answer.
        is_greeted: whether it was sent the hello, after which it knows this process. An accepted connection alone
            proves nothing: the kernel accepts it.
        addresses: what it has sent so far.
    """

    link: Link
    address: tuple[str, int]
    nonce: str
    is_greeted: bool = False
    addresses: dict[int, PeerAddress] = dataclasses.field(default_factory=dict)


class LeaderSearch:
    """Tries the processes below this one, the lowest first, again and again, and follows the first that answers.

    Attributes:
        rounds: how many times all were tried.
        reason: why the last one that was tried does not lead.
        busy_since_s: when one of them took part in an attempt, by `time.monotonic`; minus infinity if none did.
    """

    def __init__(self, endpoint: Endpoint, history: History) -> None:
        self.rounds = 0
        self.reason = ""
        self.busy_since_s = float("-inf")
        self._endpoint = endpoint
        self._history = history
        self._me = endpoint.cluster.process_id
        self._candidates = list(range(self._me))
        if not endpoint.addresses:
            # Before the first attempt only process 0 leads: no other address is known.
            self._candidates = self._candidates[:1]
        self._next = 0
        self._next_round_s = 0.0
        self._leader: _Leader | None = None

    @property
    def has_connection(self) -> bool:
        """Returns whether a lower process has accepted a connection, whatever it is."""
        return self._leader is not None

    @property
    def is_following(self) -> bool:
        """Returns whether a lower process has learned that this one follows it."""
        return self._leader is not None and self._leader.is_greeted

    @property
    def links(self) -> list[Link]:
        """Returns the connection to the leader, if there is one."""
        return [] if self._leader is None else [self._leader.link]

    def look(self, waited_s: float) -> JoinedAttempt | None:
        """Goes on with the search; returns the attempt that the leader has started, if it has.

        Args:
            waited_s: how long this process has waited.

        Raises:
            FourPartError: the leader has ended the roll call.
        """
        if self._leader is not None:
            return self._hear(self._leader, waited_s)
        if self._candidates and time.monotonic() >= self._next_round_s:
            self._connect(self._candidates[self._next])
        return None

    def _connect(self, process: int) -> None:
        """Tries one of the lower processes; the next call tries the next one."""
        address = self._endpoint.address_of(process)
        try:
            if address is None:
                raise OSError("its address is not known")
            # The only wait of a search: the caller does nothing else meanwhile, for up to _CONNECT_S.
            connection = socket.create_connection(address, timeout=_CONNECT_S)
            self._endpoint.open_listener(connection.getsockname()[0])
        except OSError as error:
            self._give_up(error.strerror or str(error))
            return
        self._leader = _Leader(Link(connection), address, nonce=secrets.token_hex(16))
        # At once, before the nonce arrives: without it this connection is one of many that strangers may open.
        self._leader.link.send_line(greeting(self._endpoint.token, self._me))

    def _give_up(self, reason: str) -> None:
        """Turns to the next process, or to the next round."""
        if self._leader is not None:
            self._leader.link.drop()
        self._leader = None
        self.reason = reason
        self._next += 1
        if self._next >= len(self._candidates):
            self._begin_round()

    def _begin_round(self) -> None:
        self._next = 0
        self.rounds += 1
        self._next_round_s = time.monotonic() + _NEXT_ROUND_S

    def _hear(self, leader: _Leader, waited_s: float) -> JoinedAttempt | None:
        link = leader.link
        if leader.is_greeted:
            link.beat(self._endpoint.deadlines.beat_s)
        for line in link.lines():
            message = opened(line, self._endpoint.token, leader.nonce)
            if message is None:
                self._hear_unproven(leader, line, waited_s)
            else:
                attempt = self._hear_leader(leader, message)
                if attempt is not None:
                    return attempt
            if self._leader is None:  # given up
                return None
        # Whoever knows the token answers at once; a leader may have to wait for a slow network.
        silent_s = HELLO_S / 2
        if leader.is_greeted:
            silent_s = max(self._endpoint.deadlines.peer_s, HELLO_S)
        if link.closed:
            self._give_up("It left, or is not a jshard run")
        elif link.silent_s > silent_s:
            self._give_up("It does not answer")
        return None

    def _hear_unproven(self, leader: _Leader, line: bytes, waited_s: float) -> None:
        """Handles a line without a proof: the nonce, a refusal, a sign of life, or anything at all."""
        message = decoded(line)
        if message is None:
            leader.link.closed = True
        elif not leader.is_greeted and isinstance(message.get("nonce"), str):
            self._greet(leader, message["nonce"], waited_s)
        elif message.get("refused") == 1:
            self._give_up("It belongs to another run: it has another token (JSHARD_TOKEN, or the job)")

    def _greet(self, leader: _Leader, nonce: str, waited_s: float) -> None:
        """Asks to join, with a proof of the token for this nonce."""
        cluster = self._endpoint.cluster
        listener = self._endpoint.listener
        hello = Hello(
            process=self._me,
            of=cluster.num_processes,
            at=cluster.coordinator,
            host=hostname(),
            port=0 if listener is None else listener.port,
            waited_s=waited_s,
            nonce=leader.nonce,
        )
        message = {"hello": dataclasses.asdict(hello), "history": dataclasses.asdict(self._history)}
        leader.link.send_line(sealed(message, self._endpoint.token, nonce))
        leader.is_greeted = True

    def _hear_leader(self, leader: _Leader, message: Message) -> JoinedAttempt | None:
        """Handles a message with a proof."""
        try:
            if "go" in message:
                return self._join(leader, message["go"])
            if "error" in message:
                raise error_in(message["error"], self._history)
            if "busy" in message:  # an attempt is in progress, and this process waits for the next, however long
                self.busy_since_s = time.monotonic()
                self._next = len(self._candidates)  # the others take part in it, too
                self._give_up("It takes part in an attempt")
            elif "elsewhere" in message:
                self._give_up("It follows another process")
            for address in addresses_in(message):
                if not address.ip:  # that of the leader itself, which does not know how others reach it
                    address = dataclasses.replace(address, ip=leader.address[0])
                leader.addresses[address.process] = address
        except BadMessageError:
            self._give_up("It has another version of jshard")
        return None

    def _join(self, leader: _Leader, message: object) -> JoinedAttempt:
        start = understood(AttemptStart, message)
        history = understood(History, start.history)
        # Sorted, as the leader numbers them: the position of a process is its number in the attempt.
        members = sorted(address.process for address in leader.addresses.values() if address.is_member)
        if self._me not in members:
            # A leader sends a start only to its members.
            raise BadMessageError
        # It has sent port 0 for itself: its port is the one to which this process has connected.
        host, port = leader.address
        leader.addresses[members[0]] = dataclasses.replace(leader.addresses[members[0]], port=port)
        self._leader = None  # the link belongs to the attempt now
        return JoinedAttempt(
            link=leader.link,
            leader_host=host,
            members=members,
            addresses=leader.addresses,
            start=start,
            history=history,
        )
