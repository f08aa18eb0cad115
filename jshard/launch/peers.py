"""How a process of a run ended, and how the supervisors of a run inform each other."""

from __future__ import annotations

import dataclasses
import signal
import socket
from collections.abc import Mapping, Sequence

from jshard.launch.cluster import GOOD, REQUEST, RESUME, Deadlines
from jshard.launch.link import Link, close_all
from jshard.launch.messages import Message, parsed
from jshard.launch.process_status import ProcessStatus, WorkerState

# As Popen reports it, or a shell around the worker.
_ABORTED = (-signal.SIGABRT, 128 + signal.SIGABRT)
_HINTS: dict[int, str] = {
    signal.SIGKILL: "often the kernel's out-of-memory killer",
    signal.SIGSEGV: "a fault in native code",
    signal.SIGBUS: "a fault in native code, or a full disk under a mapped file",
    signal.SIGABRT: "native code gave up",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ending:
    """The end of a worker, or of the connection to its supervisor.

    Args:
        process: its id.
        host: its machine.
        pid: its number there; None if not known.
        code: its exit code, negative for the signal that killed it; None if it was not seen to end.
        silent_s: how long it had given no sign of life, if it was lost for that.
        explained: whether it has written the reason to its stderr itself.
        blames_peer: whether it failed because another process did not answer.
        step: the last training step that it reported.
        checkpoint: the last checkpoint that it reported.
        status: its status, if the run is stalled or it was silent.
    """

    process: int
    host: str
    pid: int | None = None
    code: int | None = None
    silent_s: float | None = None
    explained: bool = False
    blames_peer: bool = False
    step: int | None = None
    checkpoint: str | None = None
    status: ProcessStatus | None = None

    @property
    def stalled(self) -> bool:
        """Returns whether it was ended because the run made no progress."""
        return self.status is not None and self.silent_s is None

    @property
    def good(self) -> bool:
        """Returns whether the worker did its work, or stopped because it was asked to."""
        return self.code in GOOD and not self.explained

    @property
    def echo(self) -> bool:
        """Returns whether it may be the consequence of another process's end."""
        return self.blames_peer or self.code in _ABORTED

    @property
    def run_code(self) -> int:
        """Returns the exit code of the run that it ends: a lost process is not a failure of the run."""
        if self.code in (REQUEST, RESUME):
            return self.code
        if self.code is None or self.code < 0 or self.echo:
            return RESUME
        return 1

    @property
    def who(self) -> str:
        """Returns id, number and machine."""
        pid = "" if self.pid is None else f"pid {self.pid}, "
        return f"process {self.process} ({pid}host {self.host})"

    @property
    def how(self) -> str:
        """Returns the description of the end."""
        if self.silent_s is not None:
            return f"it gave no sign of life for {self.silent_s:.0f} s: {self._silent_reason()}"
        if self.status is not None:
            return f"it is stalled, {self.status.phase}"
        if self.code is None:
            return "the connection to it broke: its machine or its supervisor is gone"
        if self.code >= 0:
            return f"it ended with exit code {self.code}"
        return _killed_by(-self.code)

    def _silent_reason(self) -> str:
        if self.status is None or not self.status.state:
            return "stopped, frozen, or its machine is gone"
        return f"{self.status.state}, {self.status.phase}"


def _killed_by(number: int) -> str:
    """Describes the end by a signal, which may have a number without a name."""
    try:
        name = signal.Signals(number).name
    except ValueError:
        name = "unknown"
    text = f"it was killed by signal {number} ({name})"
    if number in _HINTS:
        text += f": {_HINTS[number]}"
    return text


def cause(endings: Sequence[Ending]) -> Ending:
    """Returns the ending that caused the others.

    A process that loses a peer aborts, or fails in a collective; one that was killed from outside, or refused the
    request, did not end because of a peer. For a stall it is the one that is behind. Among equals it is the first one
    seen; or, if all have the same reason, that of the lowest process.
    """

    def order(index: int) -> tuple[int, ...]:
        ending = endings[index]
        if ending.stalled and ending.status is not None:
            return _rank(ending), *ending.status.order, ending.process
        if ending.explained or ending.code == REQUEST:
            return _rank(ending), ending.process
        # After those with a reason, in the order in which they were seen.
        return _rank(ending), len(endings) + index

    return endings[min(range(len(endings)), key=order)]


def _rank(ending: Ending) -> int:
    """Orders endings: the lower, the less it can be the consequence of another one."""
    if ending.code == REQUEST:
        return 0  # it refused the request, which no other process can bring about
    if ending.blames_peer:
        return 6  # it says itself that another one was first
    if ending.code in _ABORTED:
        return 5  # as JAX does when it loses a peer
    if ending.stalled:
        return 4  # it may wait for one that is lost
    if ending.code is None:
        return 2  # its machine or its supervisor is gone
    if ending.code < 0:
        return 1  # it was killed from outside
    return 3  # it failed, maybe in a collective


def message_of(ending: Ending) -> Message:
    """Returns an ending in the form that is sent to other supervisors."""
    message = dataclasses.asdict(ending)
    message["stand"] = message.pop("status")  # its name on the wire
    return message


def ending_of(message: object) -> Ending | None:
    """Parses an ending from the network; None for invalid data."""
    if not isinstance(message, dict) or "stand" not in message or "status" in message:
        return None
    fields = dict(message)
    status = fields.pop("stand")
    if status is not None:
        status = parsed(ProcessStatus, status)
        if status is None:
            return None
    return parsed(Ending, {**fields, "status": status})


def hostname() -> str:
    """Returns this machine's name, short enough for a message."""
    return socket.gethostname()[:255]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Beat:
    """The state of a worker that its supervisor sends repeatedly."""

    step: int | None = None
    marks: int | None = None
    phase: str | None = None
    idle_s: float | None = None
    warn_s: float | None = None


def beat_of(state: WorkerState) -> Beat:
    """Returns the part of a worker's state that the other supervisors need."""
    return Beat(
        step=state.get("step"),
        marks=state.get("marks"),
        phase=state.get("phase"),
        idle_s=state.get("idle_s"),
        warn_s=state.get("warn_s"),
    )


class Peers:
    """The other supervisors, as one of them sees them: process 0 is linked to all, the others to process 0.

    Messages: {"beat": state of the worker}, {"ended": ending of the sender's worker}, and from process 0
    {"stalled": 1}, which requests the status of all, and {"verdict": the ending that was the cause}.

    Attributes:
        process_id: that of this process.
        verdict: the ending that was the cause, once process 0 has named it.
        beats: the last state of each worker of others.
        stalled: whether the run is stalled, so that all report their status.
    """

    def __init__(
        self, *, process_id: int, links: Mapping[int, Link], hosts: Mapping[int, str], deadlines: Deadlines
    ) -> None:
        self.process_id = process_id
        self.verdict: Ending | None = None
        self.beats: dict[int, Beat] = {}
        self.stalled = False
        self._links = dict(links)
        self._hosts = hosts
        self._deadlines = deadlines
        self._ended: set[int] = set()

    @property
    def decides(self) -> bool:
        """Returns whether this supervisor decides which process was lost: that of process 0 does, if present."""
        # One without links is alone: no other supervisor can decide for it.
        return self.process_id == 0 or not self._links

    @property
    def alone(self) -> bool:
        """Returns whether there are no other supervisors."""
        return not self._links

    def poll(self, state: WorkerState) -> list[Ending]:
        """Sends a sign of life with our worker's state; returns the bad endings reported since the last call."""
        beat = vars(beat_of(state))
        bad = []
        for process, link in list(self._links.items()):  # a copy: links that are over are removed
            # First: a link that was closed may have messages that are still unread.
            ending = self._hear(process, link)
            if ending is not None and process not in self._ended:
                self._ended.add(process)
                if not ending.good:
                    bad.append(ending)
            # The link of a supervisor whose worker has ended stays: it waits for the verdict.
            if link.closed or link.silent_s > self._deadlines.peer_s:
                del self._links[process]
                close_all([link])
            else:
                link.beat(self._deadlines.beat_s, beat)
        return bad

    def report(self, ending: Ending) -> None:
        """Reports to the others how our worker ended."""
        self._send({"ended": message_of(ending)})

    def announce(self, verdict: Ending) -> None:
        """Reports to the others which process was lost; only process 0 does."""
        self._send({"verdict": message_of(verdict)})

    def ask_all(self) -> None:
        """Requests the status of the others, as the run is stalled; only process 0 does."""
        self.stalled = True
        if self.process_id == 0:
            self._send({"stalled": 1})

    def silent(self) -> list[Ending]:
        """Returns the processes that have not reported their status, as if they were lost."""
        silent = []
        for process, link in self._links.items():
            # Two beats: one may be on its way.
            if process not in self._ended and link.silent_s > 2 * self._deadlines.beat_s:
                silent.append(Ending(process=process, host=self._host(process), silent_s=link.silent_s))
        return silent

    def close(self) -> None:
        """Closes the links after the others have read all messages."""
        close_all(self._links.values())
        self._links.clear()

    def _send(self, message: Message) -> None:
        for link in self._links.values():
            link.send(message)

    def _host(self, process: int) -> str:
        return self._hosts.get(process, "unknown")

    def _hear(self, process: int, link: Link) -> Ending | None:
        """Reads the messages of another supervisor; returns how its worker ended, or that it is lost itself."""
        ending = None
        for message in link.receive():
            beat = parsed(Beat, message.get("beat"))
            if beat is not None:
                self.beats[process] = beat
            # Once set, it stays: the run ends with it.
            self.stalled |= message.get("stalled") == 1
            # Only process 0 decides, and only once.
            if self.process_id != 0 and self.verdict is None:
                self.verdict = ending_of(message.get("verdict"))
            ended = ending_of(message.get("ended"))
            if ended is not None and ended.process == process:  # each reports only its own
                ending = ended
        if ending is not None:
            return ending
        silent_s = link.silent_s if link.silent_s > self._deadlines.peer_s else None
        if silent_s is None and not link.closed:
            return None
        # It is lost: its last beat is all that is known of it.
        step = self.beats.get(process, Beat()).step
        return Ending(process=process, host=self._host(process), silent_s=silent_s, step=step)
