"""Whether this process is one of several, by the environment variables of its launcher.

N processes that each start a run of one are the worst result of a job script: N times the same training, or N - 1
errors about a locked folder. So any sign of several processes is understood, or refused. JAX's own detection is used
on TPUs only: it finds neither torchrun nor MPICH, reads `rack1` as the first host of `rack[1-2]n[01-04]`, and needs
rights at the API server of Kubernetes.
"""

from __future__ import annotations

import dataclasses
import os
import re
import shlex
import socket
from collections.abc import Callable, Mapping
from importlib.util import find_spec

from jshard.errors import ShardingError
from jshard.launch.cluster import Cluster

Environ = Mapping[str, str]

_JAX = ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID")
_FIRST_PORT, _PORTS = 61440, 4096  # if a launcher gives no port: one of the last 4096, by the job number
_STEP_PORTS = 89
_POD_PORT = "1234"
ONE_POD = """\
This pod is not part of an indexed job, so it is a run of one process. Several need completionMode: Indexed and
JAX_NUM_PROCESSES, as in launch/train.yaml; JAX_NUM_PROCESSES=1 confirms a single one."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Launcher:
    """A program that starts the processes of a run."""

    kind: str
    size: str  # the variable with the number of processes
    rank: str  # the variable with the id of this process
    local: tuple[str, str]  # the variables with its id among the processes of this machine, and with their number
    address: Callable[[Environ], str]  # "host:port" of process 0; "" if the launcher does not give it
    further: tuple[str, ...] = ()  # more variables to show in reports
    starts: str = ""  # its command, for the advice if it gives no address


def _of_torchrun(environ: Environ) -> str:
    if not (environ.get("MASTER_ADDR") and environ.get("MASTER_PORT")):
        return ""
    # torchrun's own agent may listen at that port; it is free if a script sets the variables by hand.
    taken = environ.get("TORCHELASTIC_USE_AGENT_STORE") in ("True", "1")
    port = _number("MASTER_PORT", environ["MASTER_PORT"], low=1) + taken
    return f"{environ['MASTER_ADDR']}:{environ.get('JAX_COORDINATOR_PORT', port)}"


def _of_open_mpi(environ: Environ) -> str:
    """The first address of mpirun's machine, as "4096000.0;tcp://10.96.0.1,10.148.0.1:34911"; not since Open MPI 5."""
    found = re.match(r"(\d+)\..*?(?:tcp://([^,:]+)|tcp6://\[([^,\]]+))", environ.get("OMPI_MCA_orte_hnp_uri", ""))
    if found is None:
        return ""
    host = found[2] or f"[{found[3]}]"
    return host + _port(environ, int(found[1]) // 4096)


def _of_slurm(environ: Environ) -> str:
    host = first_host(environ["SLURM_STEP_NODELIST"])
    # Several sruns of one allocation may share a first node.
    step = _number("SLURM_STEP_ID", environ.get("SLURM_STEP_ID", "0"), low=0)
    return host + _port(environ, _number("SLURM_JOB_ID", environ.get("SLURM_JOB_ID", ""), low=0) + _STEP_PORTS * step)


def first_host(nodes: str) -> str:
    """The first host of a list of Slurm's: "rack1n01" of "rack[1-2]n[01-04]-ib,gpu1".

    Equals `scontrol show hostnames`, but needs no process in every task.

    Raises:
        ShardingError: it is not such a list.
    """
    first = re.match(r"((?:[^,\[\]]|\[[^\[\]]*\])*)(?:,|$)", nodes)
    host = re.sub(r"\[(\w+)[^\]]*\]", r"\1", first[1] if first else "")
    if not re.fullmatch(r"[\w.-]+", host):
        raise _unreadable("SLURM_STEP_NODELIST", nodes, f"a list of hosts, and begins with {host!r}")
    return host


def _port(environ: Environ, job: int) -> str:
    return f":{environ.get('JAX_COORDINATOR_PORT', job % _PORTS + _FIRST_PORT)}"


def _of_pod(environ: Environ) -> str:
    """Pod 0 of an indexed job, by the name of this one: "train-3.train.default.svc.cluster.local"."""
    name, index = socket.getfqdn(), environ["JOB_COMPLETION_INDEX"]
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
    return f"{pod.removesuffix(index)}0.{domain}:{environ.get('JAX_COORDINATOR_PORT', _POD_PORT)}"


# The first one present is used: mpirun and torchrun may run in a step of Slurm, one in each node.
_LAUNCHERS = (
    _Launcher(
        kind="torchrun",
        size="WORLD_SIZE",
        rank="RANK",
        local=("LOCAL_RANK", "LOCAL_WORLD_SIZE"),
        address=_of_torchrun,
        further=("MASTER_ADDR", "MASTER_PORT"),
        starts="torchrun --nproc_per_node={n} --no_python",
    ),
    _Launcher(
        kind="open mpi",
        size="OMPI_COMM_WORLD_SIZE",
        rank="OMPI_COMM_WORLD_RANK",
        local=("OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
        address=_of_open_mpi,
        further=("OMPI_MCA_orte_hnp_uri",),
        starts="mpirun -n {n} -x JAX_COORDINATOR_ADDRESS",
    ),
    _Launcher(
        kind="mpich",  # and Intel MPI, and others that use PMI
        size="PMI_SIZE",
        rank="PMI_RANK",
        local=("MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
        address=lambda environ: "",
        starts="mpiexec -n {n}",
    ),
    _Launcher(
        kind="slurm",
        size="SLURM_NTASKS",
        rank="SLURM_PROCID",
        local=("SLURM_LOCALID", ""),
        address=_of_slurm,
        further=("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_STEP_NODELIST"),
    ),
    _Launcher(
        kind="kubernetes",
        size="JAX_NUM_PROCESSES",
        rank="JOB_COMPLETION_INDEX",
        local=("", ""),
        address=_of_pod,
    ),
)
_REPORTED = dict.fromkeys(
    (
        *(*_JAX, "JAX_COORDINATOR_PORT", "JSHARD_ROLL_CALL_PORT"),
        *(name for one in _LAUNCHERS for name in (*one.further, one.size, one.rank, one.local[0]) if name),
        *("SLURM_JOB_NUM_NODES", "PMIX_NAMESPACE", "PMIX_RANK"),
    )
)


def detect(environ: Environ = os.environ, *, command: str = "jshard train ...") -> Cluster | None:
    """The cluster that started this process; None for a run of a single process.

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
    given = {name: environ[name] for name in _JAX if environ.get(name)}
    if given.get("JAX_NUM_PROCESSES") == "1" and "JAX_PROCESS_ID" not in given:
        return None
    seen = {name: environ[name] for name in _REPORTED if name in environ}
    launcher = _launcher(environ)
    place = given if len(given) == len(_JAX) else _filled(given, launcher, environ, seen, command)
    if place is None:
        return None
    local_id, local_size = _local(launcher, environ)
    cluster = Cluster(
        kind="jax variables" if len(given) == len(_JAX) else launcher.kind if launcher else "cloud tpu",
        coordinator=_address(place["JAX_COORDINATOR_ADDRESS"]),
        num_processes=_number("JAX_NUM_PROCESSES", place["JAX_NUM_PROCESSES"], low=1),
        process_id=_number("JAX_PROCESS_ID", place["JAX_PROCESS_ID"], low=0),
        variables=seen,
        local_id=local_id,
        local_size=local_size,
    )
    if cluster.process_id >= cluster.num_processes:
        raise ShardingError(
            "The id of this process is not below the number of processes.",
            where=cluster.seen(),
            why=f"process {cluster.process_id} of {cluster.num_processes}; ids go from 0 to "
            f"{cluster.num_processes - 1}.",
            do="give each process its own id: JAX_PROCESS_ID=0 for the one at JAX_COORDINATOR_ADDRESS.",
        )
    return cluster if cluster.num_processes > 1 else None


def _launcher(environ: Environ) -> _Launcher | None:
    """The first that started several processes, or else the first that started one."""
    there = [one for one in _LAUNCHERS if _is_there(one, environ)]
    return next((one for one in there if environ.get(one.size) != "1"), there[0] if there else None)


def _is_there(launcher: _Launcher, environ: Environ) -> bool:
    if launcher.rank not in environ:
        return False
    if launcher.kind == "slurm":
        return _is_step(environ)
    if launcher.kind == "mpich":
        return launcher.size in environ and not _is_pmi_of_slurm(environ)
    if launcher.kind == "kubernetes":  # for pods with TPUs JAX knows more
        return not any(name in environ for name in ("TPU_WORKER_ID", "MEGASCALE_SLICE_ID"))
    return launcher.size in environ


def _is_step(environ: Environ) -> bool:
    # The shell of `salloc` is a step of one task on many clusters, while SLURM_NTASKS counts the whole allocation.
    is_shell = environ.get("SLURM_STEP_NUM_TASKS") == "1" != environ.get("SLURM_NTASKS", "1")
    return "SLURM_STEP_NODELIST" in environ and "SLURM_NTASKS" in environ and not is_shell


def _is_pmi_of_slurm(environ: Environ) -> bool:
    """Whether srun set MPICH's variables, too, as it does with --mpi=pmi2."""
    names = (("PMI_RANK", "SLURM_PROCID"), ("PMI_SIZE", "SLURM_NTASKS"))
    return _is_step(environ) and all(environ.get(pmi) == environ.get(slurm) for pmi, slurm in names)


def _filled(
    given: Environ, launcher: _Launcher | None, environ: Environ, seen: Environ, command: str
) -> dict[str, str] | None:
    """All three variables; None for a single process."""
    if launcher is None:
        found = _of_tpu(environ, seen)
        if found is None:
            _require_alone(given, environ, seen, command)
        return found and {**found, **given}
    number = given.get("JAX_NUM_PROCESSES") or environ.get(launcher.size)
    if not number and launcher.kind == "kubernetes":
        raise ShardingError(
            "Kubernetes does not report how many processes the job has.",
            where=[f"{name}={value}" for name, value in seen.items()],
            why="a pod of an indexed job only receives its own number.",
            do='in the container of the job, its completions: env: [{name: JAX_NUM_PROCESSES, value: "8"}]\n'
            'or "1", if each pod is a separate run.',
        )
    number = str(_number(launcher.size, number or "", low=1))
    if number == "1" and "JAX_PROCESS_ID" not in given:
        return None
    if not (address := given.get("JAX_COORDINATOR_ADDRESS") or launcher.address(environ)):
        raise ShardingError(
            f"{launcher.kind} does not say where its processes meet.",
            where=[f"{name}={value}" for name, value in seen.items()],
            why="the address of process 0 is in none of its variables.",
            do=f"export JAX_COORDINATOR_ADDRESS=$(hostname):12345; {launcher.starts.format(n=number)} {command}\n"
            "on the machine of process 0; elsewhere with the name of that machine.",
        )
    process = given.get("JAX_PROCESS_ID") or str(_number(launcher.rank, environ[launcher.rank], low=0))
    return dict(zip(_JAX, (address, number, process), strict=True))


def _of_tpu(environ: Environ, seen: Environ) -> dict[str, str] | None:
    """What JAX detects about a TPU pod."""
    if "TPU_LIBRARY_PATH" not in environ and find_spec("libtpu") is None:
        return None
    from jshard import _compat  # here: it imports jax

    # The other variables could be mistaken for a launcher: a shell of salloc, a pod outside an indexed job.
    others = ("SLURM_", "OMPI_", "KUBERNETES_")
    try:
        found = _compat.launcher_cluster({k: v for k, v in environ.items() if not k.startswith(others)})
    except Exception as error:  # any error of the metadata server
        raise ShardingError(
            "The processes of the TPU pod cannot be detected.",
            where=[f"{name}={value}" for name, value in seen.items()] or "a machine with TPUs",
            why=f"{type(error).__name__}: {error}",
            do="set the variables by hand: JAX_COORDINATOR_ADDRESS=HOST:PORT JAX_NUM_PROCESSES=N JAX_PROCESS_ID=I",
        ) from error
    return found and dict(zip(_JAX, map(str, found[1:]), strict=True))


def _local(launcher: _Launcher | None, environ: Environ) -> tuple[int | None, int | None]:
    """The id of this process among those of its machine, and their number, if the launcher gives them."""
    if launcher is None:
        return None, None
    id_name, size_name = launcher.local
    size = _tasks_of_node(environ) if launcher.kind == "slurm" else environ.get(size_name)
    return (
        _number(id_name, environ[id_name], low=0) if id_name in environ else None,
        None if size is None else _number(size_name, str(size), low=1),
    )


def _tasks_of_node(environ: Environ) -> int | None:
    """Slurm's list, such as "8(x3),2", at the position of this node."""
    found = re.findall(r"(\d+)(?:\(x(\d+)\))?", environ.get("SLURM_STEP_TASKS_PER_NODE", ""))
    tasks = [int(count) for count, times in found for _ in range(int(times or 1))]
    node = int(environ.get("SLURM_NODEID", "0"))
    return tasks[node] if node < len(tasks) else None


def _require_alone(given: Environ, environ: Environ, seen: Environ, command: str) -> None:
    """Refuses signs of several processes if no launcher started this process as one of them."""
    if given:
        raise ShardingError(
            "The variables that describe the cluster are half set.",
            where=[f"{name}={given[name]}" if name in given else f"{name} is not set" for name in _JAX],
            why=f"{len(given)} of 3 are set, and no launcher (srun, mpirun, Kubernetes) provides the rest.",
            do="set all: JAX_COORDINATOR_ADDRESS=HOST:PORT JAX_NUM_PROCESSES=N JAX_PROCESS_ID=I\n"
            f"or none, for one process: env {' '.join(f'-u {name}' for name in given)} {command}",
        )
    alone = f"JAX_NUM_PROCESSES=1 {command}"
    counts = {name: environ.get(name, "1") for name in ("SLURM_NTASKS", "SLURM_JOB_NUM_NODES")}
    if "SLURM_JOB_ID" in environ and any(count != "1" for count in counts.values()):
        raise ShardingError(
            "Slurm's job has several tasks, and this process is in none of its steps.",
            where=[f"{name}={value}" for name, value in seen.items()],
            why="srun starts one process per task; a batch script, and the shell of salloc, is one process.",
            do=f"srun {command}\nor, for one process: {alone}",
        )
    if "PMIX_RANK" in environ:
        raise ShardingError(
            "PMIx does not report how many processes there are.",
            where=[f"{name}={value}" for name, value in seen.items()],
            why="PMIX_RANK is the id of this process, and no variable has their number.",
            do="prterun -n 4 -x JAX_COORDINATOR_ADDRESS=$(hostname):12345 -x JAX_NUM_PROCESSES=4 bash -c "
            f"{shlex.quote(f'JAX_PROCESS_ID=$PMIX_RANK {command}')}\nor, for one process: {alone}",
        )


def _address(text: str) -> str:
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise _unreadable("JAX_COORDINATOR_ADDRESS", text, "a host name, a colon and a port from 1 to 65535")
    return text


def _number(name: str, text: str, *, low: int) -> int:
    if not (text.isascii() and text.isdecimal() and int(text) >= low):
        raise _unreadable(name, text, f"a whole number, {low} or more")
    return int(text)


def _unreadable(name: str, text: str, wanted: str) -> ShardingError:
    return ShardingError(
        f"{name} cannot be read.",
        where=f"{name}={text}",
        why=f"it is {wanted}.",
        do="JAX_COORDINATOR_ADDRESS=node001:12345 JAX_NUM_PROCESSES=N JAX_PROCESS_ID=I, with I from 0 to N - 1.",
    )
