"""The errors of a run in several processes, in four parts."""

from __future__ import annotations

import socket
from collections.abc import Mapping, Sequence

from jshard._errors import FourPartError, RunError, ShardingError
from jshard.train.launch.cluster import Cluster
from jshard.train.launch.endings import REQUEST, Ending


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
