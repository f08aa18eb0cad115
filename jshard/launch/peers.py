"""How a process of a run ended, and how the supervisors of a run inform each other."""

from __future__ import annotations

import dataclasses
import signal
import socket
from collections.abc import Mapping, Sequence
from typing import Any

from jshard.launch.cluster import GOOD, REQUEST, RESUME, Deadlines
from jshard.launch.link import Link, close_all
from jshard.launch.messages import parsed
from jshard.launch.stall import Stand

_ABORTED = (-signal.SIGABRT, 128 + signal.SIGABRT)
_HINTS = {
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
        stand: its position, if the run is stalled or it was silent.
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
    stand: Stand | None = None

    @property
    def stalled(self) -> bool:
        """Whether it was ended because the run made no progress."""
        return self.stand is not None and self.silent_s is None

    @property
    def good(self) -> bool:
        """Whether the worker did its work, or stopped because it was asked to."""
        return self.code in GOOD and not self.explained

    @property
    def echo(self) -> bool:
        """Whether it may be the consequence of another process's end."""
        return self.blames_peer or self.code in _ABORTED

    @property
    def run_code(self) -> int:
        """The exit code of the run that it ends: a lost process is not a failure of the run."""
        if self.code in (REQUEST, RESUME):
            return self.code
        return RESUME if self.code is None or self.code < 0 or self.echo else 1

    @property
    def who(self) -> str:
        """Id, number and machine."""
        return f"process {self.process} ({'' if self.pid is None else f'pid {self.pid}, '}host {self.host})"

    @property
    def how(self) -> str:
        """The description of the end."""
        if self.silent_s is not None:
            state = self.stand.state if self.stand is not None else ""
            seen = f"{state}, {self.stand.phase}" if self.stand is not None and state else ""
            return (
                f"it gave no sign of life for {self.silent_s:.0f} s: "
                f"{seen or 'stopped, frozen, or its machine is gone'}"
            )
        if self.stand is not None and self.stalled:
            return f"it is stalled, {self.stand.phase}"
        if self.code is None:
            return "the connection to it broke: its machine or its supervisor is gone"
        if self.code >= 0:
            return f"it ended with exit code {self.code}"
        known = {int(each): each for each in signal.Signals}.get(-self.code)
        name, hint = (known.name, _HINTS.get(known)) if known else ("unknown", None)
        return f"it was killed by signal {-self.code} ({name})" + (f": {hint}" if hint else "")


def cause(endings: Sequence[Ending]) -> Ending:
    """The ending that caused the others.

    A process that loses a peer aborts, or fails in a collective; one that was killed from outside, or refused the
    request, did not end because of a peer. For a stall it is the one that is behind. Among equals it is the first one
    seen; or, if all have the same reason, that of the lowest process.
    """

    def key(index: int) -> tuple[Any, ...]:
        ending = endings[index]
        if ending.stalled and ending.stand is not None:
            return _rank(ending), *ending.stand.order, ending.process
        return _rank(ending), ending.process if ending.explained or ending.code == REQUEST else len(endings) + index

    return endings[min(range(len(endings)), key=key)]


def _rank(ending: Ending) -> int:
    if ending.code == REQUEST:
        return 0
    if ending.blames_peer:
        return 6
    if ending.code in _ABORTED:
        return 5
    if ending.stalled:
        return 4
    if ending.code is None:
        return 2
    return 1 if ending.code < 0 else 3


def ending_of(message: Any) -> Ending | None:
    """Parses an ending from the network; None for invalid data."""
    if isinstance(message, Mapping) and message.get("stand") is not None:
        message = {**message, "stand": parsed(Stand, message["stand"]) or "none"}
    return parsed(Ending, message)


def hostname() -> str:
    """This machine's name, short enough for a message."""
    return socket.gethostname()[:255]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Beat:
    """The state of a worker that its supervisor sends repeatedly."""

    step: int | None = None
    marks: int | None = None
    phase: str | None = None
    idle_s: float | None = None
    warn_s: float | None = None


class Peers:
    """The other supervisors, as one of them sees them: process 0 is linked to all, the others to process 0.

    Messages: {"beat": state of the worker}, {"ended": ending of the sender's worker}, and from process 0
    {"stalled": 1}, which requests the positions of all, and {"verdict": the ending that was the cause}.
    """

    def __init__(
        self, *, process_id: int, links: Mapping[int, Link], hosts: Mapping[int, str], deadlines: Deadlines
    ) -> None:
        self.process_id = process_id
        self.verdict: Ending | None = None
        self.beats: dict[int, Beat] = {}
        self.stalled = False
        self._links, self._hosts, self._deadlines = dict(links), hosts, deadlines
        self._over: set[int] = set()

    @property
    def decides(self) -> bool:
        """Whether this supervisor decides which process was lost: that of process 0 does, if present."""
        return self.process_id == 0 or not self._links

    @property
    def alone(self) -> bool:
        """Whether there are no other supervisors."""
        return not self._links

    def poll(self, noted: Mapping[str, Any]) -> list[Ending]:
        """Sends a sign of life with our worker's notes; returns the bad endings reported since the last call."""
        ours = {field.name: noted.get(field.name) for field in dataclasses.fields(Beat)}
        found = []
        for process, link in list(self._links.items()):
            ending = self._hear(process, link)
            if ending is not None and process not in self._over:
                self._over.add(process)
                if not ending.good:
                    found.append(ending)
            # The link of a supervisor whose worker has ended stays: it waits for the verdict.
            if link.closed or link.silent_s > self._deadlines.peer_s:
                del self._links[process]
                close_all([link])
            else:
                link.beat(self._deadlines.beat_s, ours)
        return found

    def report(self, ending: Ending) -> None:
        """Reports to the others how our worker ended."""
        self._send({"ended": dataclasses.asdict(ending)})

    def announce(self, verdict: Ending) -> None:
        """Reports to the others which process was lost; only process 0 does."""
        self._send({"verdict": dataclasses.asdict(verdict)})

    def ask_all(self) -> None:
        """Requests the positions of the others, as the run is stalled; only process 0 does."""
        self.stalled = True
        if self.process_id == 0:
            self._send({"stalled": 1})

    def silent(self) -> list[Ending]:
        """The processes that have not reported their positions, as if they were lost."""
        return [
            Ending(process=process, host=self._hosts.get(process, "unknown"), silent_s=link.silent_s)
            for process, link in self._links.items()
            if process not in self._over and link.silent_s > 2 * self._deadlines.beat_s
        ]

    def close(self) -> None:
        """Closes the links after the others have read all messages."""
        close_all(self._links.values())
        self._links.clear()

    def _send(self, message: dict) -> None:
        for link in self._links.values():
            link.send(message)

    def _hear(self, process: int, link: Link) -> Ending | None:
        ending = None
        for message in link.receive():
            if (beat := parsed(Beat, message.get("beat"))) is not None:
                self.beats[process] = beat
            self.stalled |= message.get("stalled") == 1
            if self.process_id != 0 and self.verdict is None:
                self.verdict = ending_of(message.get("verdict"))
            ended = ending_of(message.get("ended"))
            if ended is not None and ended.process == process:
                ending = ended
        silent_s = link.silent_s if link.silent_s > self._deadlines.peer_s else None
        if ending is not None or (silent_s is None and not link.closed):
            return ending
        host, step = self._hosts.get(process, "unknown"), self.beats.get(process, Beat()).step
        return Ending(process=process, host=host, silent_s=silent_s, step=step)
