"""Who started this process as one of several is known from its variables, or the run is refused."""

import os
import random
import shutil
import socket
import subprocess
import sys

import pytest

import jshard as js
from jshard import launch
from jshard.launch import gpu_share
from jshard.launch.launchers import first_host
from tests.processes.launching import HERE, fake

JAX = {"JAX_COORDINATOR_ADDRESS": "node1:1234", "JAX_NUM_PROCESSES": "3", "JAX_PROCESS_ID": "2"}
SLURM = {
    "SLURM_JOB_ID": "5000",
    "SLURM_JOB_NUM_NODES": "3",
    "SLURM_NTASKS": "4",
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "2",
    "SLURM_STEP_NODELIST": "node[007-008],gpu1",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_TASKS_PER_NODE": "2,1(x2)",
}
BATCH = {name: SLURM[name] for name in ("SLURM_JOB_ID", "SLURM_JOB_NUM_NODES", "SLURM_NTASKS")}
OPEN_MPI = {
    "OMPI_MCA_orte_hnp_uri": "4096000.0;tcp://10.96.0.1,10.148.0.1:34911",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
}
SIX = "8192.0;tcp6://[fe80::b9b,2620:10d::2]:43370"
BOTH = "8192.0;tcp://192.0.2.2:55697;tcp6://[fd00::2]:59251"
OPEN_MPI_5 = {name: value for name, value in OPEN_MPI.items() if "orte" not in name}
MPICH = {"PMI_SIZE": "2", "PMI_RANK": "1", "MPI_LOCALNRANKS": "2", "MPI_LOCALRANKID": "1"}
TORCHRUN = {"WORLD_SIZE": "4", "RANK": "3", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
MASTER = {"MASTER_ADDR": "node1", "MASTER_PORT": "29500"}
AGENT = {"TORCHELASTIC_USE_AGENT_STORE": "True"}
POD = {"KUBERNETES_SERVICE_HOST": "10.0.0.1"}
INDEXED = {**POD, "JOB_COMPLETION_INDEX": "12", "JAX_NUM_PROCESSES": "16"}


@pytest.fixture(autouse=True)
def _pod(monkeypatch):
    monkeypatch.setattr(socket, "getfqdn", lambda: "train-workers-0-12.train.team.svc.cluster.local")


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, None),
        (JAX, ("jax variables", "node1:1234", 3, 2, None, None)),
        ({**JAX, "JAX_NUM_PROCESSES": "1", "JAX_PROCESS_ID": "0"}, None),
        ({**SLURM, **JAX}, ("jax variables", "node1:1234", 3, 2, 0, 1)),
        (SLURM, ("slurm", "node007:62344", 4, 3, 0, 1)),
        ({**SLURM, "SLURM_STEP_ID": "0"}, ("slurm", "node007:62344", 4, 3, 0, 1)),
        ({**SLURM, "SLURM_STEP_ID": "2"}, ("slurm", "node007:62522", 4, 3, 0, 1)),  # another srun of the allocation
        ({**SLURM, "SLURM_NODEID": "0"}, ("slurm", "node007:62344", 4, 3, 0, 2)),
        ({**SLURM, "JAX_COORDINATOR_PORT": "999"}, ("slurm", "node007:999", 4, 3, 0, 1)),
        ({**SLURM, "JAX_COORDINATOR_ADDRESS": "ib0:77"}, ("slurm", "ib0:77", 4, 3, 0, 1)),
        ({**SLURM, "SLURM_NTASKS": "1", "SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"}, None),
        ({**SLURM, "JAX_NUM_PROCESSES": "1"}, None),
        ({**BATCH, "SLURM_NTASKS": "1", "SLURM_JOB_NUM_NODES": "1"}, None),
        ({**BATCH, "JAX_NUM_PROCESSES": "1"}, None),
        (OPEN_MPI, ("open mpi", "10.96.0.1:62440", 2, 1, 1, 2)),
        ({**OPEN_MPI, "OMPI_MCA_orte_hnp_uri": SIX}, ("open mpi", "[fe80::b9b]:61442", 2, 1, 1, 2)),
        ({**OPEN_MPI, "OMPI_MCA_orte_hnp_uri": BOTH}, ("open mpi", "192.0.2.2:61442", 2, 1, 1, 2)),
        ({**SLURM, **OPEN_MPI}, ("open mpi", "10.96.0.1:62440", 2, 1, 1, 2)),
        ({**OPEN_MPI_5, "OMPI_COMM_WORLD_SIZE": "1", "OMPI_COMM_WORLD_RANK": "0"}, None),
        ({**OPEN_MPI_5, "JAX_COORDINATOR_ADDRESS": "n:77"}, ("open mpi", "n:77", 2, 1, 1, 2)),
        ({**MPICH, "JAX_COORDINATOR_ADDRESS": "n:77"}, ("mpich", "n:77", 2, 1, 1, 2)),
        # srun --mpi=pmi2 does as MPICH does, and mpiexec may run within a step of srun.
        ({**SLURM, "PMI_SIZE": "4", "PMI_RANK": "3"}, ("slurm", "node007:62344", 4, 3, 0, 1)),
        ({**SLURM, **MPICH, "JAX_COORDINATOR_ADDRESS": "n:77"}, ("mpich", "n:77", 2, 1, 1, 2)),
        ({**TORCHRUN, **MASTER}, ("torchrun", "node1:29500", 4, 3, 1, 2)),
        ({**SLURM, **TORCHRUN, **MASTER, **AGENT}, ("torchrun", "node1:29501", 4, 3, 1, 2)),
        # A script that made itself one process, in a step of four.
        ({**SLURM, **MASTER, "WORLD_SIZE": "1", "RANK": "0"}, ("slurm", "node007:62344", 4, 3, 0, 1)),
        (POD, None),
        (INDEXED, ("kubernetes", "train-workers-0-0.train.team.svc.cluster.local:1234", 16, 12, None, None)),
        ({**INDEXED, "JAX_NUM_PROCESSES": "1"}, None),
    ],
)  # fmt: skip
def test_clusters_are_detected(environ, expected):
    before = dict(os.environ)
    found = launch.detect(environ)
    assert dict(os.environ) == before
    if expected is None:
        assert found is None
    else:
        assert found is not None
        place = (found.kind, found.coordinator, found.num_processes, found.process_id, found.local_id, found.local_size)
        assert place == expected
        assert found.variables.items() <= environ.items() and found.variables


HALF_SET = """\
The variables that describe the cluster are half set.
  where: JAX_COORDINATOR_ADDRESS=node1:1234
         JAX_NUM_PROCESSES=3
         JAX_PROCESS_ID is not set
  why:   2 of 3 are set, and no launcher (srun, mpirun, Kubernetes) provides the rest.
  do:    set all: JAX_COORDINATOR_ADDRESS=HOST:PORT JAX_NUM_PROCESSES=N JAX_PROCESS_ID=I
         or none, for one process: env -u JAX_COORDINATOR_ADDRESS -u JAX_NUM_PROCESSES jshard train gpt"""
NO_STEP = """\
Slurm's job has several tasks, and this process is in none of its steps.
  where: SLURM_JOB_ID=5000
         SLURM_NTASKS=4
         SLURM_JOB_NUM_NODES=3
  why:   srun starts one process per task; a batch script, and the shell of salloc, is one process.
  do:    srun jshard train gpt
         or, for one process: JAX_NUM_PROCESSES=1 jshard train gpt"""
NO_ADDRESS = """\
open mpi does not say where its processes meet.
  where: OMPI_COMM_WORLD_SIZE=2
         OMPI_COMM_WORLD_RANK=1
         OMPI_COMM_WORLD_LOCAL_RANK=1
  why:   the address of process 0 is in none of its variables.
  do:    export JAX_COORDINATOR_ADDRESS=$(hostname):12345; mpirun -n 2 -x JAX_COORDINATOR_ADDRESS jshard train gpt
         on the machine of process 0; elsewhere with the name of that machine."""


@pytest.mark.parametrize(
    ("environ", "reported"),
    [
        ({**JAX, "JAX_PROCESS_ID": ""}, HALF_SET),
        ({**JAX, "JAX_PROCESS_ID": "3"}, "process 3 of 3; ids go from 0 to 2."),
        ({**JAX, "JAX_PROCESS_ID": "-1"}, "JAX_PROCESS_ID cannot be read."),
        ({**JAX, "JAX_NUM_PROCESSES": "two"}, "JAX_NUM_PROCESSES cannot be read."),
        ({**JAX, "JAX_NUM_PROCESSES": "0"}, "it is a whole number, 1 or more."),
        ({**JAX, "JAX_COORDINATOR_ADDRESS": "node1"}, "JAX_COORDINATOR_ADDRESS cannot be read."),
        ({**JAX, "JAX_COORDINATOR_ADDRESS": "node1:99999"}, "a port from 1 to 65535"),
        ({**SLURM, "SLURM_NTASKS": "four"}, "SLURM_NTASKS cannot be read."),
        ({**SLURM, "SLURM_STEP_NODELIST": "rack[1-"}, "SLURM_STEP_NODELIST cannot be read."),
        (BATCH, NO_STEP),
        ({**BATCH, "SLURM_NTASKS": "1"}, "SLURM_JOB_NUM_NODES=3"),
        # The shell of salloc, as a step of one task.
        ({**SLURM, "SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"}, "in none of its steps"),
        (OPEN_MPI_5, NO_ADDRESS),
        (MPICH, "12345; mpiexec -n 2 jshard train gpt"),
        (TORCHRUN, "12345; torchrun --nproc_per_node=4 --no_python jshard train gpt"),
        ({"PMIX_RANK": "0", "PMIX_NAMESPACE": "prterun-1"}, "PMIx does not report how many processes there are."),
        ({**INDEXED, "JAX_NUM_PROCESSES": ""}, "Kubernetes does not report how many processes the job has."),
        # The name of this pod ends with another index: there is no subdomain that the index belongs to.
        ({**INDEXED, "JOB_COMPLETION_INDEX": "3"}, "The pods of this job cannot find each other."),
    ],
)  # fmt: skip
def test_variables_that_make_no_sense_are_refused(environ, reported):
    with pytest.raises(js.ShardingError) as info:
        launch.detect(environ, command="jshard train gpt")
    assert reported in str(info.value)


NODES = ["gpu1", "gpu1,gpu2", "node[007-008],gpu1", "node[1,007-015],host2", "rack[1-2]n[01-04]", "a-[01,05-09]-ib,b"]


@pytest.mark.parametrize(
    ("nodes", "first"), list(zip(NODES, ["gpu1", "gpu1", "node007", "node1", "rack1n01", "a-01-ib"], strict=True))
)
def test_the_first_node_of_a_list(nodes, first):
    assert first_host(nodes) == first


@pytest.mark.skipif(shutil.which("scontrol") is None, reason="scontrol is Slurm's")
def test_the_first_node_is_that_of_scontrol(tmp_path):
    generator = random.Random(0)
    (tmp_path / "slurm.conf").write_text("ClusterName=none\nSlurmctldHost=none\nNodeName=none\n")
    environ = os.environ | {"SLURM_CONF": str(tmp_path / "slurm.conf")}

    def bracket():
        low, width = generator.randint(0, 20), generator.randint(1, 3)
        return generator.choice(["", f"[{low:0{width}}-{low + 5:0{width}}]", f"[{low:0{width}},{low + 7:0{width}}]"])

    # Not a name that continues after its last bracket: Slurm 22.05 refuses that, newer ones may not.
    lists = [f"n{bracket()}x-[{generator.randint(0, 9):03},077-080],m{bracket()}" for _ in range(20)] + NODES[:-1]
    for nodes in lists:
        command = ["scontrol", "show", "hostnames", nodes]
        hosts = subprocess.run(command, env=environ, capture_output=True, text=True, check=True).stdout.split()
        assert first_host(nodes) == hosts[0], nodes


@pytest.mark.parametrize(
    ("place", "gpus", "ids"),
    [
        ({"local_id": 1, "local_size": 2}, "0,1,2,3", "2,3"),
        ({"local_id": 1, "local_size": 4}, "0,1,2,3", "1"),
        ({"local_id": 0, "local_size": 1}, "0,1,2,3", None),  # alone on its machine: all
        ({"local_id": 1, "local_size": 2}, "3", None),  # the launcher has shared them out
        ({"local_id": 1}, "0,1,2,3", "1"),
        ({"local_id": 1, "local_size": 3}, "0,1,2,3", "1"),
        ({}, "0,1", None),
    ],
)
def test_the_process_of_a_launcher_takes_its_share_of_the_gpus(monkeypatch, place, gpus, ids):
    monkeypatch.setattr(gpu_share, "has_plugin", lambda name: name == "xla_cuda")
    cluster = launch.Cluster(kind="slurm", coordinator="a:1", num_processes=8, process_id=1, variables={}, **place)
    found = gpu_share.device_ids_of(cluster, {"CUDA_VISIBLE_DEVICES": gpus})
    assert found == ({} if ids is None else {"JAX_LOCAL_DEVICE_IDS": ids})
    assert gpu_share.device_ids_of(cluster, {"JAX_LOCAL_DEVICE_IDS": "7"}) == {}


def run_by(*launcher, **variables):
    program = [sys.executable, str(HERE / "supervise.py"), "{}", *fake(p0="done", p1="done")]
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "JAX_"))}
    done = subprocess.run([*launcher, *program], env=environ | variables, capture_output=True, text=True, timeout=800)
    return done.returncode, done.stdout + done.stderr


@pytest.mark.skipif(shutil.which("mpirun.openmpi") is None, reason="Open MPI is not installed")
def test_processes_of_open_mpi_meet():
    code, text = run_by("mpirun.openmpi", "-n", "2", "--allow-run-as-root", "--oversubscribe")
    assert code == 0 and all(f"process {i} is up" in text for i in (0, 1)), text


@pytest.mark.skipif(shutil.which("mpiexec.hydra") is None, reason="MPICH is not installed")
def test_processes_of_mpich_are_refused_and_meet_as_advised():
    code, text = run_by("mpiexec.hydra", "-n", "2")
    assert code != 0 and "mpich does not say where its processes meet." in text and "is up" not in text, text
    with socket.create_server(("127.0.0.1", 0)) as one, socket.create_server(("127.0.0.1", 0)) as other:
        address, roll_call = f"127.0.0.1:{one.getsockname()[1]}", str(other.getsockname()[1])
    code, text = run_by("mpiexec.hydra", "-n", "2", JAX_COORDINATOR_ADDRESS=address, JSHARD_ROLL_CALL_PORT=roll_call)
    assert code == 0 and all(f"process {i} is up" in text for i in (0, 1)), text
