"""A Slurm cluster on this machine: Debian's packages, each node a set of namespaces with a network of its own.

    python -m tests.processes.slurm_cluster --install     # apt; says why not where it cannot
    python -m tests.processes.slurm_cluster --nodes 4     # a shell in which sbatch and squeue speak to it

A node has its own host name, network, processes and mounts (for /etc/hosts), so that one can be cut off and die as a
machine does. The controller is outside of them, at the bridge that joins them.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

PACKAGES = ("slurm-wlm", "munge")
TOOLS = ("slurmctld", "slurmd", "munged", "ip", "nsenter", "unshare", "setpriv")
NETWORK = "10.231.77"
BRIDGE = "jshard0"
PARTITIONS = """\
PartitionName=low Nodes=ALL Default=YES PriorityTier=1 PreemptMode=REQUEUE GraceTime=60 MaxTime=60
PartitionName=high Nodes=ALL PriorityTier=10 PreemptMode=OFF MaxTime=60
"""


def missing() -> str:
    """Why there can be no cluster here; empty if there can."""
    if os.geteuid() != 0:
        return "it needs root, for namespaces and Slurm's daemons"
    absent = [tool for tool in TOOLS if shutil.which(tool) is None]
    if absent:
        return f"{', '.join(absent)} not installed; python -m tests.processes.slurm_cluster --install"
    name = f"{BRIDGE}t"
    for command in (["ip", "netns", "add", name], ["nsenter", f"--net=/run/netns/{name}", *UNSHARE, "true"]):
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            subprocess.run(["ip", "netns", "del", name], capture_output=True)
            return f"namespaces cannot be made here: {done.stderr.strip()}"
    subprocess.run(["ip", "netns", "del", name], check=True)
    done = subprocess.run(["ip", "link", "add", name, "type", "bridge"], capture_output=True, text=True)
    subprocess.run(["ip", "link", "del", name], capture_output=True)
    return f"no bridge can be made here: {done.stderr.strip()}" if done.returncode else ""


UNSHARE = ("unshare", "--uts", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc")


def install() -> str:
    """Installs Slurm from Debian's archive; the reason where that cannot be done."""
    if os.geteuid() != 0 or shutil.which("apt-get") is None:
        return "" if not missing() else "it needs root and apt"
    environ = os.environ | {"DEBIAN_FRONTEND": "noninteractive"}
    apt = ["apt-get", "--quiet", "--yes", "--no-install-recommends"]
    for command in ([*apt, "update"], [*apt, "install", *PACKAGES]):
        done = subprocess.run(command, env=environ, capture_output=True, text=True)
        if done.returncode:
            return f"{' '.join(command)}: {(done.stderr.strip().splitlines() or ['failed'])[-1]}"
    return missing()


@dataclasses.dataclass(kw_only=True)
class SlurmCluster:
    """A controller and nodes jsn1, jsn2, ... with two CPUs each.

    Args:
        folder: for the configuration, logs and state; short, as a path of a socket is.
        nodes: how many.
        node_timeout_s: SlurmdTimeout; 300 where nothing is set.
        kill_wait_s: KillWait, from SIGTERM to SIGKILL; 30 where nothing is set. (Of a preemption and a time limit
            the end is the grace time.)
    """

    folder: Path
    nodes: int = 2
    node_timeout_s: int = 300
    kill_wait_s: int = 5
    _daemons: dict[str, subprocess.Popen] = dataclasses.field(default_factory=dict)

    def __enter__(self) -> SlurmCluster:
        try:
            self._configure()
            self._run("ip", "link", "add", BRIDGE, "type", "bridge")
            self._run("ip", "addr", "add", f"{NETWORK}.254/24", "dev", BRIDGE)
            self._run("ip", "link", "set", BRIDGE, "up")
            self._start("munged", "munged", "--foreground", "--force", *self._munge())
            self._start("slurmctld", "slurmctld", "-D", "-i", "-f", str(self.folder / "slurm.conf"))
            for node in range(1, self.nodes + 1):
                self._make(node)
                self.boot(node)
            self.wait_until(lambda: self.idle() == self.nodes, limit_s=120, what="all nodes idle")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for name in reversed(list(self._daemons)):
            self._kill(name)
        for node in range(1, self.nodes + 1):
            # The link by itself: that of a namespace goes some time after it.
            subprocess.run(["ip", "link", "del", f"jsv{node}"], capture_output=True)
            subprocess.run(["ip", "netns", "del", f"jsn{node}"], capture_output=True)
        subprocess.run(["ip", "link", "del", BRIDGE], capture_output=True)

    @property
    def environ(self) -> dict[str, str]:
        """For sbatch and its like."""
        return {**os.environ, "SLURM_CONF": str(self.folder / "slurm.conf")}

    def call(self, *command: str) -> str:
        """The output of a command of Slurm's."""
        done = subprocess.run(command, env=self.environ, capture_output=True, text=True)
        assert done.returncode == 0, f"{' '.join(command)}: {done.stdout}{done.stderr}"
        return done.stdout.strip()

    def submit(self, *arguments: str, **variables: str) -> int:
        """sbatch: the number of the job."""
        environ = self.environ | variables
        done = subprocess.run(["sbatch", "--parsable", *arguments], env=environ, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return int(done.stdout)

    def job(self, number: int) -> dict[str, str]:
        """What Slurm knows of a job: JobState, Restarts, ExitCode, Reason, ..."""
        fields = self.call("scontrol", "--oneliner", "show", "job", str(number)).split(" ")
        return dict(field.split("=", 1) for field in fields if "=" in field)

    def idle(self) -> int:
        """How many nodes have nothing to do."""
        return int(self.call("sinfo", "--noheader", "--partition=low", "--states=idle", "--format=%D") or 0)

    def wait_until(self, condition, *, limit_s: float, what: str) -> float:
        """Seconds until it holds."""
        began = time.monotonic()
        while not condition():
            assert time.monotonic() - began < limit_s, f"not within {limit_s} s: {what}\n{self._state()}"
            time.sleep(0.2)
        return time.monotonic() - began

    def set_node_timeout(self, seconds: int) -> None:
        """After how long the controller takes a silent node for down."""
        self.node_timeout_s = seconds
        self._write_conf()
        self.call("scontrol", "reconfigure")

    def boot(self, node: int) -> None:
        """Starts a node, also after `power_off`."""
        self._run("ip", "link", "set", f"jsv{node}", "up")
        name = f"jsn{node}"
        script = (
            f"hostname {name} && mount --make-rprivate / && mount --bind {self.folder}/hosts /etc/hosts && "
            f"exec slurmd -D -c -f {self.folder}/slurm.conf"
        )
        self._start(name, "nsenter", f"--net=/run/netns/{name}", *UNSHARE, "sh", "-c", script)

    def power_off(self, node: int) -> None:
        """As a power cut: the network is silent, then all processes are gone."""
        self.cut_off(node)
        self._kill(f"jsn{node}")

    def cut_off(self, node: int) -> None:
        """The network of a node, without the node."""
        self._run("ip", "link", "set", f"jsv{node}", "down")

    def _configure(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        for name in ("state", "spool"):
            (self.folder / name).mkdir(exist_ok=True)
        (self.folder / "key").write_bytes(os.urandom(1024))
        (self.folder / "key").chmod(0o400)
        nodes = range(1, self.nodes + 1)
        hosts = [f"{NETWORK}.{node} jsn{node}" for node in nodes] + [f"{NETWORK}.254 jsctl"]
        (self.folder / "hosts").write_text("\n".join(["127.0.0.1 localhost", *hosts, ""]))
        self._write_conf()

    def _write_conf(self) -> None:
        nodes = range(1, self.nodes + 1)
        lines = [f"NodeName=jsn{node} NodeAddr={NETWORK}.{node} CPUs=2 RealMemory=1000 State=UNKNOWN" for node in nodes]
        (self.folder / "slurm.conf").write_text(self._conf() + "\n".join([*lines, PARTITIONS]))

    def _conf(self) -> str:
        host = os.uname().nodename
        return f"""\
ClusterName=jshard
SlurmctldHost={host}({NETWORK}.254)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={self.folder}/munge.sock
CryptoType=crypto/munge
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SlurmdParameters=config_overrides
SlurmctldPort=26817
SlurmdPort=26818
StateSaveLocation={self.folder}/state
SlurmdSpoolDir={self.folder}/spool/%n
SlurmctldPidFile={self.folder}/slurmctld.pid
SlurmdPidFile={self.folder}/slurmd-%n.pid
SlurmctldLogFile={self.folder}/slurmctld.log
SlurmdLogFile={self.folder}/slurmd-%n.log
SlurmdTimeout={self.node_timeout_s}
KillWait={self.kill_wait_s}
ReturnToService=2
SchedulerParameters=sched_interval=5,bf_interval=5
"""

    def _munge(self) -> list[str]:
        paths = {"socket": "munge.sock", "key-file": "key", "log-file": "munge.log", "pid-file": "munge.pid"}
        paths["seed-file"] = "munge.seed"
        return [f"--{option}={self.folder / name}" for option, name in paths.items()]

    def _make(self, node: int) -> None:
        name, outside = f"jsn{node}", f"jsv{node}"
        self._run("ip", "netns", "add", name)
        self._run("ip", "link", "add", outside, "type", "veth", "peer", "name", "eth0", "netns", name)
        self._run("ip", "link", "set", outside, "master", BRIDGE)
        self._run("ip", "-n", name, "addr", "add", f"{NETWORK}.{node}/24", "dev", "eth0")
        for link in ("lo", "eth0"):
            self._run("ip", "-n", name, "link", "set", link, "up")

    def _run(self, *command: str) -> None:
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, f"{' '.join(command)}: {done.stderr}"

    def _start(self, name: str, *command: str) -> None:
        command = ("setpriv", "--pdeathsig", "KILL", *command)  # nothing stays, whatever ends this process
        with (self.folder / f"{name}.out").open("ab") as log:
            self._daemons[name] = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )

    def _kill(self, name: str) -> None:
        daemon = self._daemons.pop(name)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(daemon.pid, signal.SIGKILL)  # with that of `unshare`, its namespace of processes ends
        daemon.wait()

    def _state(self) -> str:
        shown = [subprocess.run(["sinfo", "-N"], env=self.environ, capture_output=True, text=True).stdout]
        shown += [subprocess.run(["scontrol", "show", "job"], env=self.environ, capture_output=True, text=True).stdout]
        shown += [f"-- {path.name}\n{path.read_text()[-1500:]}" for path in sorted(self.folder.glob("*.out"))]
        return "\n".join(shown)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--install", action="store_true", help="install Debian's packages, and end")
    parser.add_argument("--nodes", type=int, default=2)
    options = parser.parse_args()
    reason = install() if options.install else missing()
    if reason:
        print(f"skipped: no Slurm cluster on this machine: {reason}")
        return 1
    if not options.install:
        with (
            tempfile.TemporaryDirectory(prefix="jsl") as folder,
            SlurmCluster(folder=Path(folder), nodes=options.nodes) as it,
        ):
            subprocess.run([os.environ.get("SHELL", "bash")], env=it.environ)
    return 0


if __name__ == "__main__":
    sys.exit(main())
