"""The programs that start the processes of a run, and what their environment variables say."""

from __future__ import annotations

import dataclasses
import re
import socket
from collections.abc import Callable, Mapping

from jshard.errors import ShardingError

Environ = Mapping[str, str]

# If a launcher gives no port: one of the last 4096, by the job number, so that two jobs on a machine rarely meet.
_FIRST_PORT = 61440
_PORTS = 4096
# Between the ports of two steps of a job: by 1, a step would have the port of the next job.
_STEP_PORTS = 89
_POD_PORT = "1234"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Launcher:
    """A program that starts the processes of a run.

    Attributes:
        kind: its name.
        size: the variable with the number of processes.
        rank: the variable with the id of this process.
        local_rank: the variable with its id among the processes of this machine; "" if there is none.
        local_size: returns the number of processes of this machine; None if it is not known.
        address: returns "host:port" of process 0; "" if the launcher does not give it.
        is_present: returns whether it has started this process.
        further: more variables to show in reports.
        starts: its command, for the advice if it gives no address.
    """

    kind: str
    size: str
    rank: str
    local_rank: str
    local_size: Callable[[Environ], int | None]
    address: Callable[[Environ], str]
    is_present: Callable[[Environ], bool]
    further: tuple[str, ...] = ()
    starts: str = ""


def find_launcher(environ: Environ) -> Launcher | None:
    """Returns the first launcher that started several processes, or else the first that started one."""
    present = [launcher for launcher in LAUNCHERS if launcher.rank in environ and launcher.is_present(environ)]
    for launcher in present:
        if environ.get(launcher.size) != "1":
            return launcher
    return present[0] if present else None


def number_of(name: str, text: str, *, low: int) -> int:
    """Parses the whole number of a variable.

    Raises:
        ShardingError: it is not a whole number, or is below the lowest one.
    """
    if not (text.isascii() and text.isdecimal() and int(text) >= low):
        raise unreadable(name, text, f"a whole number, {low} or more")
    return int(text)


def unreadable(name: str, text: str, expected: str) -> ShardingError:
    """Creates the error for a variable with another value than it may have."""
    return ShardingError(
        f"{name} cannot be read.",
        where=f"{name}={text}",
        why=f"it is {expected}.",
        do="JAX_COORDINATOR_ADDRESS=node001:12345 JAX_NUM_PROCESSES=N JAX_PROCESS_ID=I, with I from 0 to N - 1.",
    )


def _port(environ: Environ, job: int) -> str:
    """Returns ":port" of process 0, which all processes of a job compute alike."""
    return f":{environ.get('JAX_COORDINATOR_PORT', job % _PORTS + _FIRST_PORT)}"


def _size_in(name: str) -> Callable[[Environ], int | None]:
    """Returns a function that reads the number of processes of this machine from a variable."""

    def local_size(environ: Environ) -> int | None:
        if name not in environ:
            return None
        return number_of(name, environ[name], low=1)

    return local_size


# torchrun.


def _torchrun_address(environ: Environ) -> str:
    if not (environ.get("MASTER_ADDR") and environ.get("MASTER_PORT")):
        return ""
    port = number_of("MASTER_PORT", environ["MASTER_PORT"], low=1)
    # torchrun's own agent may listen at that port; it is free if a script sets the variables by hand.
    if environ.get("TORCHELASTIC_USE_AGENT_STORE") in ("True", "1"):
        port += 1
    return f"{environ['MASTER_ADDR']}:{environ.get('JAX_COORDINATOR_PORT', port)}"


def _has_world_size(environ: Environ) -> bool:
    return "WORLD_SIZE" in environ


# MPI.


def _open_mpi_address(environ: Environ) -> str:
    """Returns the first address of mpirun's machine, as in "4096000.0;tcp://10.96.0.1,10.148.0.1:34911".

    Open MPI 5 has no such variable.
    """
    uri = environ.get("OMPI_MCA_orte_hnp_uri", "")
    match = re.match(r"(\d+)\..*?(?:tcp://([^,:]+)|tcp6://\[([^,\]]+))", uri)
    if match is None:
        return ""
    job, ipv4, ipv6 = match.groups()
    host = ipv4 or f"[{ipv6}]"
    # Open MPI counts jobs in steps of 4096: the remainder would be the same for all.
    return host + _port(environ, int(job) // 4096)


def _has_open_mpi_size(environ: Environ) -> bool:
    return "OMPI_COMM_WORLD_SIZE" in environ


def _no_address(environ: Environ) -> str:
    return ""


def _is_mpich(environ: Environ) -> bool:
    return "PMI_SIZE" in environ and not _is_pmi_of_slurm(environ)


def _is_pmi_of_slurm(environ: Environ) -> bool:
    """Returns whether srun set MPICH's variables, too, as it does with --mpi=pmi2."""
    if not is_slurm_step(environ):
        return False
    same_rank = environ.get("PMI_RANK") == environ.get("SLURM_PROCID")
    same_size = environ.get("PMI_SIZE") == environ.get("SLURM_NTASKS")
    return same_rank and same_size


# Slurm.


def is_slurm_step(environ: Environ) -> bool:
    """Returns whether srun started this process."""
    if "SLURM_STEP_NODELIST" not in environ or "SLURM_NTASKS" not in environ:
        return False
    # The shell of `salloc` is a step of one task on many clusters, while SLURM_NTASKS counts the whole allocation.
    is_shell = environ.get("SLURM_STEP_NUM_TASKS") == "1" and environ["SLURM_NTASKS"] != "1"
    return not is_shell


def _slurm_address(environ: Environ) -> str:
    host = first_host(environ["SLURM_STEP_NODELIST"])
    # Several sruns of one allocation may share a first node.
    step = number_of("SLURM_STEP_ID", environ.get("SLURM_STEP_ID", "0"), low=0)
    job = number_of("SLURM_JOB_ID", environ.get("SLURM_JOB_ID", ""), low=0)
    return host + _port(environ, job + _STEP_PORTS * step)


def first_host(nodes: str) -> str:
    """Returns the first host of a list of Slurm's: "rack1n01" of "rack[1-2]n[01-04]-ib,gpu1".

    Equals `scontrol show hostnames`, but needs no process in every task.

    Raises:
        ShardingError: it is not such a list.
    """
    first = re.match(r"((?:[^,\[\]]|\[[^\[\]]*\])*)(?:,|$)", nodes)
    host = ""
    if first is not None:
        host = re.sub(r"\[(\w+)[^\]]*\]", r"\1", first[1])
    if not re.fullmatch(r"[\w.-]+", host):
        raise unreadable("SLURM_STEP_NODELIST", nodes, f"a list of hosts, and begins with {host!r}")
    return host


def _slurm_tasks_of_node(environ: Environ) -> int | None:
    """Reads Slurm's list, such as "8(x3),2", at the position of this node."""
    tasks: list[int] = []
    for count, repeats in re.findall(r"(\d+)(?:\(x(\d+)\))?", environ.get("SLURM_STEP_TASKS_PER_NODE", "")):
        tasks += [int(count)] * int(repeats or 1)
    node = int(environ.get("SLURM_NODEID", "0"))
    if node >= len(tasks):
        return None
    return number_of("", str(tasks[node]), low=1)


# Kubernetes.


def _pod_address(environ: Environ) -> str:
    """Returns pod 0 of an indexed job, by the name of this one: "train-3.train.default.svc.cluster.local"."""
    name = socket.getfqdn()
    index = environ["JOB_COMPLETION_INDEX"]
    pod, dot, domain = name.partition(".")
    if not (dot and domain and pod.endswith(f"-{index}")):
        raise ShardingError(
            "The pods of this job cannot find each other.",
            where=[f"JOB_COMPLETION_INDEX={index}", f"the name of this pod is {name}"],
            why="in an indexed job with a subdomain it is JOB-INDEX.SUBDOMAIN.NAMESPACE..., and that of pod 0 follows "
            "from it.",
            do="launch/train.yaml shows a headless service and, in the template of the job, `subdomain: its name`;\n"
            "or name pod 0 in the environment: JAX_COORDINATOR_ADDRESS=HOST:1234",
        )
    port = environ.get("JAX_COORDINATOR_PORT", _POD_PORT)
    return f"{pod.removesuffix(index)}0.{domain}:{port}"


def _is_pod(environ: Environ) -> bool:
    # For pods with TPUs JAX knows more.
    return "TPU_WORKER_ID" not in environ and "MEGASCALE_SLICE_ID" not in environ


def _unknown_size(environ: Environ) -> None:
    return None


# In this order, see `find_launcher`: mpirun and torchrun may run in a step of Slurm, one in each node.
LAUNCHERS = (
    Launcher(
        kind="torchrun",
        size="WORLD_SIZE",
        rank="RANK",
        local_rank="LOCAL_RANK",
        local_size=_size_in("LOCAL_WORLD_SIZE"),
        address=_torchrun_address,
        is_present=_has_world_size,
        further=("MASTER_ADDR", "MASTER_PORT"),
        starts="torchrun --nproc_per_node={n} --no_python",
    ),
    Launcher(
        kind="open mpi",
        size="OMPI_COMM_WORLD_SIZE",
        rank="OMPI_COMM_WORLD_RANK",
        local_rank="OMPI_COMM_WORLD_LOCAL_RANK",
        local_size=_size_in("OMPI_COMM_WORLD_LOCAL_SIZE"),
        address=_open_mpi_address,
        is_present=_has_open_mpi_size,
        further=("OMPI_MCA_orte_hnp_uri",),
        starts="mpirun -n {n} -x JAX_COORDINATOR_ADDRESS",
    ),
    Launcher(
        kind="mpich",  # and Intel MPI, and others that use PMI
        size="PMI_SIZE",
        rank="PMI_RANK",
        local_rank="MPI_LOCALRANKID",
        local_size=_size_in("MPI_LOCALNRANKS"),
        address=_no_address,
        is_present=_is_mpich,
        starts="mpiexec -n {n}",
    ),
    Launcher(
        kind="slurm",
        size="SLURM_NTASKS",
        rank="SLURM_PROCID",
        local_rank="SLURM_LOCALID",
        local_size=_slurm_tasks_of_node,
        address=_slurm_address,
        is_present=is_slurm_step,
        further=("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_STEP_NODELIST"),
    ),
    Launcher(
        kind="kubernetes",
        size="JAX_NUM_PROCESSES",
        rank="JOB_COMPLETION_INDEX",
        local_rank="",
        local_size=_unknown_size,
        address=_pod_address,
        is_present=_is_pod,
    ),
)
