"""How a process of a run ended, and which of several endings was the cause of the others."""

from __future__ import annotations

import dataclasses
import signal
from collections.abc import Mapping, Sequence
from typing import Any

REQUEST = 2
"""Exit code of a worker that refused what was asked of it."""
GOOD = (0, 128 + signal.SIGINT, 128 + signal.SIGTERM, 128 + signal.SIGHUP)
"""Exit codes of a worker that did its work, or stopped because it was asked to."""
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
        silent_s: how long it had given no sign of life, if that is the matter.
        told: it has told the reason itself, in plain words, on its stderr.
        blames_peer: it failed because another process did not answer.
        step: the last training step that it reported.
        checkpoint: the last checkpoint that it reported.
    """

    process: int
    host: str
    pid: int | None = None
    code: int | None = None
    silent_s: float | None = None
    told: bool = False
    blames_peer: bool = False
    step: int | None = None
    checkpoint: str | None = None

    @property
    def good(self) -> bool:
        """Whether the worker did its work, or stopped because it was asked to."""
        return self.code in GOOD

    @property
    def echo(self) -> bool:
        """Whether it looks like the consequence of another process's end."""
        return self.blames_peer or self.code in _ABORTED

    @property
    def who(self) -> str:
        """Id, number and machine."""
        return f"process {self.process} ({'' if self.pid is None else f'pid {self.pid}, '}host {self.host})"

    @property
    def how(self) -> str:
        """In words."""
        if self.silent_s is not None:
            return f"it gave no sign of life for {self.silent_s:.0f} s: stopped, frozen, or its machine is gone"
        if self.code is None:
            return "the connection to it broke: its machine or its supervisor is gone"
        if self.code >= 0:
            return f"it ended with exit code {self.code}"
        known = {int(each): each for each in signal.Signals}.get(-self.code)
        name, hint = (known.name, _HINTS.get(known)) if known else ("unknown", None)
        return f"it was killed by signal {-self.code} ({name})" + (f": {hint}" if hint else "")


def cause(endings: Sequence[Ending]) -> Ending:
    """The ending that brought about the others.

    A process that loses a peer aborts, or fails in a collective; one that was killed from outside, or refused the
    request, did not do so because of a peer. Among equals, that which was seen first; but where each has told the
    same reason, that of the lowest process.
    """

    def key(index: int) -> tuple[int, int]:
        ending = endings[index]
        return _rank(ending), ending.process if ending.told or ending.code == REQUEST else len(endings) + index

    return endings[min(range(len(endings)), key=key)]


def _rank(ending: Ending) -> int:
    if ending.code == REQUEST:
        return 0
    if ending.blames_peer:
        return 5
    if ending.code in _ABORTED:
        return 4
    if ending.code is None:
        return 2
    return 1 if ending.code < 0 else 3


def to_message(ending: Ending) -> dict[str, Any]:
    """For the network."""
    return dataclasses.asdict(ending)


def from_message(message: Any) -> Ending | None:
    """From the network, where anything may come from: None for what is not an ending."""
    if not isinstance(message, Mapping):
        return None
    fields = {field.name: message.get(field.name) for field in dataclasses.fields(Ending)}
    numbers = [fields[name] for name in ("pid", "code", "step", "silent_s")]
    texts = [fields["host"], fields["checkpoint"] or ""]
    is_one = (
        type(fields["process"]) is int
        and all(number is None or type(number) in (int, float) for number in numbers)
        and all(isinstance(text, str) and len(text) < 4096 for text in texts)
    )
    return (
        Ending(**{**fields, "told": fields["told"] is True, "blames_peer": fields["blames_peer"] is True})
        if is_one
        else None
    )
