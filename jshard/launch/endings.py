"""How a process of a run ended, which ending caused the others, and the errors in four parts."""

from __future__ import annotations

import dataclasses
import signal
import socket
from collections.abc import Mapping, Sequence
from typing import Any

from jshard._errors import FourPartError, RunError, ShardingError
from jshard.launch.cluster import Cluster

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


# The errors of a run in several processes, in four parts.


def lost(ending: Ending, *, num_processes: int, step: int | None, checkpoint: str | None, again: str) -> FourPartError:
    """One process ended, and the others cannot go on.

    Args:
        ending: which, and how.
        num_processes: of the run.
        step: the last step that any process reported.
        checkpoint: the last checkpoint that any process reported.
        again: the command line that goes on from there, or starts anew.
    """
    if ending.code == REQUEST:
        return ShardingError(
            f"Process {ending.process} of {num_processes} refused the request.",
            where=ending.who,
            why="it ended with exit code 2 and told the reason in its own output.",
            do=f"read what process {ending.process} wrote on {ending.host}.",
        )
    told = f"; it told why in its own output on {ending.host}" if ending.told else ""
    return RunError(
        f"Process {ending.process} of {num_processes} was lost.",
        where=[
            ending.who,
            "no step was reported yet" if step is None else f"last step reported: {step}",
            "no checkpoint was written yet" if checkpoint is None else f"last good checkpoint: {checkpoint}",
        ],
        why=f"{ending.how}{told}.\nThe others cannot go on without it and are stopped.",
        do=again,
    )


def missing(cluster: Cluster, came: Mapping[int, str], after_s: float) -> RunError:
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
        do=f"look why process {_some(ids)} did not start, or cannot reach {roll_call_address(cluster)};\n"
        "if they are only slow to start: --init-timeout 900",
    )


def unreachable(cluster: Cluster, reason: str, after_s: float) -> RunError:
    """Process 0 does not answer."""
    return RunError(
        "Process 0 cannot be reached.",
        where=[
            f"this is process {cluster.process_id} on {socket.gethostname()} ({cluster.kind})",
            f"process 0 is looked for at {roll_call_address(cluster)}",
            *cluster.seen(),
        ],
        why=f"{reason}, after {after_s:.0f} s.",
        do=f"see that process 0 runs on {cluster.host} and that its ports {cluster.port} and "
        f"{roll_call_port(cluster)} are open to {socket.gethostname()};\n"
        "another port, the same for all processes: JSHARD_ROLL_CALL_PORT=12345",
    )


def duplicate(cluster: Cluster, process: int, hosts: Sequence[str]) -> ShardingError:
    """Two processes say that they are the same one."""
    return ShardingError(
        f"Two processes have the id {process}.",
        where=[f"on {' and on '.join(hosts)}", *cluster.seen()],
        why=f"each of the {cluster.num_processes} processes has an id of its own.",
        do="give each another JAX_PROCESS_ID, or start them with srun, which does.",
    )


def mismatch(cluster: Cluster, process: int, host: str, theirs: str, ours: str) -> ShardingError:
    """A process that takes the run for another one; `theirs` and `ours` are what it and process 0 were told."""
    return ShardingError(
        f"Process {process} on {host} takes the run for another.",
        where=[f"process 0 has {ours}", f"process {process} has {theirs}", *cluster.seen()],
        why="all processes of a run are told the same address and number.",
        do="the same JAX_COORDINATOR_ADDRESS and JAX_NUM_PROCESSES for all of them.",
    )


def port_taken(cluster: Cluster, error: OSError) -> RunError:
    """Process 0 cannot listen."""
    port = roll_call_port(cluster)
    return RunError(
        "The roll call cannot be opened.",
        where=[f"port {port} of {socket.gethostname()}", *cluster.seen()],
        why=f"{error.strerror or error}: another process 0, or another program, has it.",
        do=f"another port, the same for all processes: JSHARD_ROLL_CALL_PORT={port + 1 if port < 65535 else port - 2}",
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


def roll_call_address(cluster: Cluster) -> str:
    """Where process 0 listens."""
    return f"{cluster.host}:{roll_call_port(cluster)}"


def _some(items: Sequence[object], limit: int = 10) -> str:
    shown = ", ".join(str(item) for item in items[:limit])
    return shown if len(items) <= limit else f"{shown} and {len(items) - limit} more"
