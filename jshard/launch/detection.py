"""Whether this process is one of several, by the environment variables of its launcher.

N processes that each start a run of one are the worst result of a job script: N times the same training, or N - 1
errors about a locked folder. So any sign of several processes is understood, or refused. JAX's own detection is used
on TPUs only: it finds neither torchrun nor MPICH, reads `rack1` as the first host of `rack[1-2]n[01-04]`, and needs
rights at the API server of Kubernetes.
"""

from __future__ import annotations

import os
import shlex
from importlib.util import find_spec

from jshard.errors import ShardingError
from jshard.launch.cluster import Cluster
from jshard.launch.launchers import LAUNCHERS, Environ, Launcher, find_launcher, number_of, unreadable

_ADDRESS = "JAX_COORDINATOR_ADDRESS"
_SIZE = "JAX_NUM_PROCESSES"
_RANK = "JAX_PROCESS_ID"
_JAX = (_ADDRESS, _SIZE, _RANK)
ONE_POD = """\
This pod is not part of an indexed job, so it is a run of one process. Several need completionMode: Indexed and
JAX_NUM_PROCESSES, as in launch/train.yaml; JAX_NUM_PROCESSES=1 confirms a single one."""


def _reported_variables() -> list[str]:
    """Returns the variables that are shown in reports, in this order and each once."""
    names = [*_JAX, "JAX_COORDINATOR_PORT", "JSHARD_ROLL_CALL_PORT"]
    for launcher in LAUNCHERS:
        names += [*launcher.further, launcher.size, launcher.rank]
        if launcher.local_rank:
            names.append(launcher.local_rank)
    names += ["SLURM_JOB_NUM_NODES", "PMIX_NAMESPACE", "PMIX_RANK"]
    return list(dict.fromkeys(names))


_REPORTED = _reported_variables()


def detect(environ: Environ = os.environ, *, command: str = "jshard train ...") -> Cluster | None:
    """Returns the cluster that started this process; None for a run of a single process.

    JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID come first. Missing values are taken from the
    variables of torchrun, Open MPI, MPICH and Intel MPI, Slurm (in a step of srun) or an indexed job of Kubernetes,
    and on TPU pods from JAX. JAX_NUM_PROCESSES=1 alone makes this process a run by itself.

    Args:
        environ: the environment variables.
        command: the command of this process, for the advice of errors.

    Raises:
        ShardingError: there are several processes, and the variables do not determine all three values; or they are
            not numbers, or contradict each other.
    """
    detection = _Detection(environ, command)
    if detection.is_confirmed_single():
        return None
    variables = detection.jax_variables()
    if variables is None:
        return None
    cluster = detection.cluster(variables)
    if cluster.process_id >= cluster.num_processes:
        raise ShardingError(
            "The id of this process is not below the number of processes.",
            where=cluster.seen(),
            why=f"process {cluster.process_id} of {cluster.num_processes}; ids go from 0 to "
            f"{cluster.num_processes - 1}.",
            do="give each process its own id: JAX_PROCESS_ID=0 for the one at JAX_COORDINATOR_ADDRESS.",
        )
    if cluster.num_processes == 1:
        return None
    return cluster


class _Detection:
    """One look at the environment variables.

    Attributes:
        stated: those of JAX's three variables that are set.
        seen: the variables that are shown in reports.
        launcher: the program that started this process, if one is recognised.
    """

    def __init__(self, environ: Environ, command: str) -> None:
        self.environ = environ
        self.command = command
        # An empty variable counts as unset.
        self.stated = {name: environ[name] for name in _JAX if environ.get(name)}
        self.seen = {name: environ[name] for name in _REPORTED if name in environ}
        self.launcher: Launcher | None = find_launcher(environ)

    def is_confirmed_single(self) -> bool:
        """Returns whether the user has said that this process is a run by itself."""
        return self.stated.get(_SIZE) == "1" and _RANK not in self.stated

    def jax_variables(self) -> dict[str, str] | None:
        """Returns all three variables of JAX; None for a single process."""
        if len(self.stated) == len(_JAX):  # the user knows better than any launcher
            return self.stated
        if self.launcher is not None:
            return self._from_launcher(self.launcher)
        of_tpu = self._from_tpu_pod()
        if of_tpu is None:
            self._require_alone()
            return None
        # What the user has set takes precedence.
        return of_tpu | self.stated

    def cluster(self, variables: Environ) -> Cluster:
        """Returns the place of this process, from all three variables of JAX."""
        if len(self.stated) == len(_JAX):
            kind = "jax variables"
        elif self.launcher is not None:
            kind = self.launcher.kind
        else:
            kind = "cloud tpu"
        # From the launcher in any case: JAX has no variables for the place on a machine.
        local_id = None
        local_size = None
        if self.launcher is not None:
            local_rank = self.launcher.local_rank
            if local_rank in self.environ:
                local_id = number_of(local_rank, self.environ[local_rank], low=0)
            local_size = self.launcher.local_size(self.environ)
        return Cluster(
            kind=kind,
            coordinator=_checked_address(variables[_ADDRESS]),
            num_processes=number_of(_SIZE, variables[_SIZE], low=1),
            process_id=number_of(_RANK, variables[_RANK], low=0),
            variables=self.seen,
            local_id=local_id,
            local_size=local_size,
        )

    def _from_launcher(self, launcher: Launcher) -> dict[str, str] | None:
        """Fills the missing ones of JAX's variables; None for a single process."""
        size = self._size(launcher)
        # A launcher of one process is common, such as the shell of a job.
        if size == 1 and _RANK not in self.stated:
            return None
        address = self.stated.get(_ADDRESS) or launcher.address(self.environ)
        if not address:
            raise ShardingError(
                f"{launcher.kind} does not say where its processes meet.",
                where=self._seen_lines(),
                why="the address of process 0 is in none of its variables.",
                do=f"export JAX_COORDINATOR_ADDRESS=$(hostname):12345; {launcher.starts.format(n=size)} "
                f"{self.command}\non the machine of process 0; elsewhere with the name of that machine.",
            )
        rank = self.stated.get(_RANK)
        if rank is None:
            rank = str(number_of(launcher.rank, self.environ[launcher.rank], low=0))
        return {_ADDRESS: address, _SIZE: str(size), _RANK: rank}

    def _size(self, launcher: Launcher) -> int:
        """Returns the number of processes."""
        text = self.stated.get(_SIZE) or self.environ.get(launcher.size)
        if not text and launcher.kind == "kubernetes":
            raise ShardingError(
                "Kubernetes does not report how many processes the job has.",
                where=self._seen_lines(),
                why="a pod of an indexed job only receives its own number.",
                do='in the container of the job, its completions: env: [{name: JAX_NUM_PROCESSES, value: "8"}]\n'
                'or "1", if each pod is a separate run.',
            )
        return number_of(launcher.size, text or "", low=1)

    def _from_tpu_pod(self) -> dict[str, str] | None:
        """Returns what JAX detects about a TPU pod."""
        if "TPU_LIBRARY_PATH" not in self.environ and find_spec("libtpu") is None:
            return None
        from jshard import _compat  # here: it imports jax

        # These variables could be mistaken for a launcher: a shell of salloc, a pod outside an indexed job.
        misleading = ("SLURM_", "OMPI_", "KUBERNETES_")
        environ = {name: value for name, value in self.environ.items() if not name.startswith(misleading)}
        try:
            pod = _compat.launcher_cluster(environ)
        except Exception as error:  # any error of the metadata server
            raise ShardingError(
                "The processes of the TPU pod cannot be detected.",
                where=self._seen_lines() or "a machine with TPUs",
                why=f"{type(error).__name__}: {error}",
                do="set the variables by hand: JAX_COORDINATOR_ADDRESS=HOST:PORT JAX_NUM_PROCESSES=N JAX_PROCESS_ID=I",
            ) from error
        if pod is None:
            return None
        _, address, size, rank = pod
        return {_ADDRESS: str(address), _SIZE: str(size), _RANK: str(rank)}

    def _require_alone(self) -> None:
        """Refuses signs of several processes if no launcher started this process as one of them."""
        if self.stated:
            where = [f"{name}={self.stated[name]}" if name in self.stated else f"{name} is not set" for name in _JAX]
            unset = " ".join(f"-u {name}" for name in self.stated)
            raise ShardingError(
                "The variables that describe the cluster are half set.",
                where=where,
                why=f"{len(self.stated)} of 3 are set, and no launcher (srun, mpirun, Kubernetes) provides the rest.",
                do="set all: JAX_COORDINATOR_ADDRESS=HOST:PORT JAX_NUM_PROCESSES=N JAX_PROCESS_ID=I\n"
                f"or none, for one process: env {unset} {self.command}",
            )
        # A way out in any case: these signs may be those of a shell in which a single process is meant.
        single = f"JAX_NUM_PROCESSES=1 {self.command}"
        # An unset number is no sign of several tasks.
        counts = [self.environ.get(name, "1") for name in ("SLURM_NTASKS", "SLURM_JOB_NUM_NODES")]
        if "SLURM_JOB_ID" in self.environ and counts != ["1", "1"]:
            raise ShardingError(
                "Slurm's job has several tasks, and this process is in none of its steps.",
                where=self._seen_lines(),
                why="srun starts one process per task; a batch script, and the shell of salloc, is one process.",
                do=f"srun {self.command}\nor, for one process: {single}",
            )
        if "PMIX_RANK" in self.environ:
            ranked_command = shlex.quote(f"JAX_PROCESS_ID=$PMIX_RANK {self.command}")
            raise ShardingError(
                "PMIx does not report how many processes there are.",
                where=self._seen_lines(),
                why="PMIX_RANK is the id of this process, and no variable has their number.",
                do="prterun -n 4 -x JAX_COORDINATOR_ADDRESS=$(hostname):12345 -x JAX_NUM_PROCESSES=4 bash -c "
                f"{ranked_command}\nor, for one process: {single}",
            )

    def _seen_lines(self) -> list[str]:
        return [f"{name}={value}" for name, value in self.seen.items()]


def _checked_address(text: str) -> str:
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise unreadable(_ADDRESS, text, "a host name, a colon and a port from 1 to 65535")
    return text
