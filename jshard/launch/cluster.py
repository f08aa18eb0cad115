"""Whether this process is one of several, by the launcher's environment variables; every deadline of such a run."""

from __future__ import annotations

import dataclasses
import os
import signal
from collections.abc import Mapping
from importlib.util import find_spec

from jshard.errors import ShardingError

TICK_S = 0.1
"""A supervisor looks at its workers and peers this often."""
REQUEST = 2
"""Exit code of a run that refused what was asked of it: the same command again would be refused again."""
RESUME = 75
"""Exit code of a run that stopped, or lost a peer: the same command with --resume goes on. (EX_TEMPFAIL.)"""
GOOD = (0, 128 + signal.SIGINT, RESUME)
"""Exit codes of a worker that did its work, or stopped because it was asked to."""


def stopped_code(signum: int) -> int:
    """The exit code of a run that was stopped by a signal: 130 after Ctrl-C, else that of a run to be resumed."""
    return 128 + signum if signum == signal.SIGINT else RESUME


@dataclasses.dataclass(frozen=True, kw_only=True)
class Deadlines:
    """How long the processes of a run wait for each other.

    A process that ends is reported within `settle_s` and a second, in a cluster within `settle_s` and four; one that
    is frozen, or whose machine is gone, within `peer_s` more. The others are stopped `grace_s` after the report.

    Args:
        init_s: from the start of the first process until all have come, and then until each worker is up.
        peer_s: a process without a sign of life for so long is lost.
        grace_s: what the others have, to end by themselves, after one is lost.
        settle_s: after a process ends badly, how long to hear of others: one that dies takes its peers along within
            milliseconds, and the report shall name the first.
    """

    init_s: float = 300.0
    peer_s: float = 60.0
    grace_s: float = 5.0
    settle_s: float = 1.0

    def __post_init__(self) -> None:
        for name, option in (("init_s", "--init-timeout"), ("peer_s", "--peer-timeout")):
            # Not `<= 0`: a NaN is refused as well.
            if not 0 < getattr(self, name) < 1e7:
                raise ShardingError(
                    "The time-out is not a positive number of seconds.",
                    where=f"{option} {getattr(self, name)}",
                    why="a process waits some time for its peers, and not for ever.",
                    do=f"{option} {getattr(Deadlines, name):.0f}",
                )

    @property
    def beat_s(self) -> float:
        """Time between two signs of life."""
        return min(2.0, self.peer_s / 4)


_JAX = ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID")
_REPORTED = (
    *_JAX,
    "JAX_COORDINATOR_PORT",
    "JSHARD_ROLL_CALL_PORT",
    *("SLURM_JOB_ID", "SLURM_STEP_NODELIST", "SLURM_NTASKS", "SLURM_PROCID", "SLURM_LOCALID"),
    *("OMPI_MCA_orte_hnp_uri", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK"),
    "JOB_COMPLETION_INDEX",
)
# Without one of these, and without TPU's library, JAX's own detection finds nothing.
_OF_LAUNCHERS = ("SLURM_", "OMPI_", "KUBERNETES_", "TPU_LIBRARY_PATH")
_KINDS = {"ompi": "open mpi", "k8s": "kubernetes", "gcetpu": "cloud tpu", "gketpu": "cloud tpu"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cluster:
    """The place of this process among those of a run.

    Args:
        kind: where it is known from: "jax variables", "slurm", "open mpi", "kubernetes", "cloud tpu"; "local" for
            processes that jshard starts on one machine.
        coordinator: "host:port" where JAX's service of process 0 listens.
        num_processes: two or more.
        process_id: from 0.
        variables: the environment variables that were seen, for reports.
    """

    kind: str
    coordinator: str
    num_processes: int
    process_id: int
    variables: Mapping[str, str]

    @property
    def host(self) -> str:
        """The machine of process 0."""
        return self.coordinator.rpartition(":")[0].strip("[]")

    @property
    def is_local(self) -> bool:
        """Whether only processes of this machine can take part."""
        return self.host in ("localhost", "::1") or self.host.startswith("127.")

    @property
    def port(self) -> int:
        """The port of JAX's service."""
        return int(self.coordinator.rpartition(":")[2])

    def seen(self) -> list[str]:
        """The variables as lines NAME=value."""
        return [f"{name}={value}" for name, value in self.variables.items()]


def detect(environ: Mapping[str, str] = os.environ) -> Cluster | None:
    """The cluster that started this process; None for a run of a single process.

    JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID come first. What they leave open is filled in by
    JAX's own detection of launchers: Slurm (in a step of srun), Open MPI before 5, Kubernetes indexed jobs, TPU pods.

    Args:
        environ: the environment variables.

    Raises:
        ShardingError: the variables are half set, or are no numbers, or contradict each other.
    """
    given = {name: environ[name] for name in _JAX if environ.get(name)}
    seen = {name: environ[name] for name in _REPORTED if name in environ}
    kind, coordinator, num_processes, process_id = "jax variables", *(given.get(name, "") for name in _JAX)
    if len(given) < len(_JAX):
        launcher = _launcher(environ, seen)
        if launcher is None:
            _require_none(given)
            return None
        kind = launcher[0]
        coordinator, num_processes, process_id = (
            own or str(other) for own, other in zip((coordinator, num_processes, process_id), launcher[1:], strict=True)
        )
    cluster = Cluster(
        kind=kind,
        coordinator=_address(coordinator),
        num_processes=_number("JAX_NUM_PROCESSES", num_processes, low=1),
        process_id=_number("JAX_PROCESS_ID", process_id, low=0),
        variables=seen,
    )
    if cluster.process_id >= cluster.num_processes:
        raise ShardingError(
            "The id of this process is not below the number of processes.",
            where=cluster.seen(),
            why=f"process {cluster.process_id} of {cluster.num_processes}; ids go from 0 to "
            f"{cluster.num_processes - 1}.",
            do="give each process an id of its own: JAX_PROCESS_ID=0 for the one at JAX_COORDINATOR_ADDRESS.",
        )
    return cluster if cluster.num_processes > 1 else None


def _launcher(environ: Mapping[str, str], seen: Mapping[str, str]) -> tuple[str, str, int, int] | None:
    if environ.get("OMPI_COMM_WORLD_SIZE", "1") != "1" and "OMPI_MCA_orte_hnp_uri" not in environ:
        raise ShardingError(
            "Open MPI 5 does not say where its processes meet.",
            where=[f"{name}={value}" for name, value in seen.items()],
            why="the address of process 0 is in none of its variables.",
            do="mpirun -x JAX_COORDINATOR_ADDRESS=HOST:PORT bash -c 'JAX_NUM_PROCESSES=$OMPI_COMM_WORLD_SIZE "
            "JAX_PROCESS_ID=$OMPI_COMM_WORLD_RANK JAX_LOCAL_DEVICE_IDS=$OMPI_COMM_WORLD_LOCAL_RANK jshard train ...'",
        )
    asked = _without_traps(environ)
    if not any(name.startswith(_OF_LAUNCHERS) for name in asked) and find_spec("libtpu") is None:
        return None
    from jshard import _compat  # here: it brings jax, and a run that jshard starts itself has no launcher to ask

    try:
        found = _compat.launcher_cluster(asked)
    except Exception as error:  # whatever the launcher's parsers and Kubernetes' client raise
        raise ShardingError(
            "What the cluster's launcher says cannot be read.",
            where=[f"{name}={value}" for name, value in seen.items()],
            why=f"{type(error).__name__}: {error}",
            do="set the variables by hand: JAX_COORDINATOR_ADDRESS=HOST:PORT JAX_NUM_PROCESSES=N JAX_PROCESS_ID=I",
        ) from error
    return found and (_KINDS.get(found[0], found[0]), *found[1:])


def _without_traps(environ: Mapping[str, str]) -> dict[str, str]:
    """The variables less those that look like a launcher where there is none."""
    # The shell of `salloc` is a step of one task on many clusters, while SLURM_NTASKS counts the whole allocation.
    slurm = {"SLURM_STEP_NODELIST"} if environ.get("SLURM_STEP_NUM_TASKS") == "1" else set()
    # A pod that is not of an indexed job, for example a notebook.
    pod = set() if "JOB_COMPLETION_INDEX" in environ else {"KUBERNETES_SERVICE_HOST"}
    return {name: value for name, value in environ.items() if name not in slurm | pod}


def _require_none(given: Mapping[str, str]) -> None:
    if given and given.get("JAX_NUM_PROCESSES") != "1":
        raise ShardingError(
            "The variables that describe the cluster are half set.",
            where=[f"{name}={given[name]}" if name in given else f"{name} is not set" for name in _JAX],
            why=f"{len(given)} of 3 are set, and there is no launcher (srun, mpirun, Kubernetes) to give the rest.",
            do="set all: JAX_COORDINATOR_ADDRESS=HOST:PORT JAX_NUM_PROCESSES=N JAX_PROCESS_ID=I\n"
            f"or none, for one process: env {' '.join(f'-u {name}' for name in given)} jshard train ...",
        )


def _address(text: str) -> str:
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise ShardingError(
            "The address of process 0 cannot be read.",
            where=f"JAX_COORDINATOR_ADDRESS={text}",
            why="it is a host name, a colon and a port from 1 to 65535.",
            do="JAX_COORDINATOR_ADDRESS=node001:12345",
        )
    return text


def _number(name: str, text: str, *, low: int) -> int:
    if not (text.isascii() and text.isdecimal() and int(text) >= low):
        raise ShardingError(
            f"{name} is not a number of use.",
            where=f"{name}={text}",
            why=f"it is a whole number, {low} or more.",
            do="JAX_NUM_PROCESSES=N JAX_PROCESS_ID=I, with I from 0 to N - 1.",
        )
    return int(text)
