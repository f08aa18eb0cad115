"""The place of a process among those of a run: its deadlines, its token, the ports that it opens, and its signals."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import socket
import threading
import time
from collections.abc import Mapping
from types import FrameType
from typing import Self

from jshard.errors import RunError, ShardingError

TICK_S = 0.1
"""The interval at which a supervisor checks its workers and peers."""
REQUEST = 2
"""Exit code of a run that refused the request: the same command would be refused again."""
RESUME = 75
"""Exit code of a run that stopped, or lost a peer: the same command with --resume continues the run. (EX_TEMPFAIL.)"""
GOOD = (0, 128 + signal.SIGINT, RESUME)
"""Exit codes of a worker that did its work, or stopped because it was asked to."""

_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)  # the last one: the terminal was closed
_REPEAT_S = 1.0
_BACKLOG = 4096  # all processes of a large run connect at once, and strangers may, too
_BIND = "JAX_COORDINATOR_BIND_ADDRESS"
_JOB = ("SLURM_JOB_ID", "SLURM_STEP_ID", "OMPI_MCA_orte_hnp_uri")


def stopped_code(signum: int) -> int:
    """The exit code of a run that was stopped by a signal: 130 after Ctrl-C, else that of a run that can be resumed."""
    return 128 + signum if signum == signal.SIGINT else RESUME


def is_worker(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether this process was started by a supervisor."""
    return environ.get("JSHARD_WORKER") == "1"


def check_seconds(option: str, seconds: float, *, usual: float) -> None:
    """Refuses a time-out that is not a positive number of seconds."""
    if not 0 < seconds < 1e7:  # not `<= 0`: this refuses NaN, too
        raise ShardingError(
            "The time-out is not a positive number of seconds.",
            where=f"{option} {seconds}",
            why="it is how long a run waits before it ends, and not for ever.",
            do=f"{option} {usual:.0f}",
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Deadlines:
    """How long the processes of a run wait for each other.

    A process that ends is reported within `settle_s` plus one second, in a cluster `settle_s` plus four; one that is
    frozen, or whose machine is gone, within `peer_s` more. The others are stopped `grace_s` after the report, or at
    once if they only wait for it.

    Args:
        init_s: from the start of the first process until all have come, and then until each worker is up.
        peer_s: a process without a sign of life for this long is lost.
        grace_s: how long the others have to end by themselves after one is lost.
        settle_s: how long to wait for other failures after one: a process that dies brings down its peers within
            milliseconds, and the report must name the first.
    """

    init_s: float = 300.0
    peer_s: float = 60.0
    grace_s: float = 5.0
    settle_s: float = 1.0

    def __post_init__(self) -> None:
        check_seconds("--init-timeout", self.init_s, usual=Deadlines.init_s)
        check_seconds("--peer-timeout", self.peer_s, usual=Deadlines.peer_s)

    @property
    def beat_s(self) -> float:
        """Interval between two signs of life."""
        return min(2.0, self.peer_s / 4)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cluster:
    """The place of this process among those of a run.

    Args:
        kind: its source: "jax variables", "slurm", "torchrun" and others of `launchers`; "local" for
            processes that jshard starts on one machine.
        coordinator: "host:port" of JAX's service in process 0.
        num_processes: two or more.
        process_id: from 0.
        variables: the environment variables that were read, for reports.
        local_id: from 0, among the processes that the launcher started on this machine; None if unknown.
        local_size: the number of these processes.
    """

    kind: str
    coordinator: str
    num_processes: int
    process_id: int
    variables: Mapping[str, str]
    local_id: int | None = None
    local_size: int | None = None

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
        """The variables as lines of NAME=value."""
        return [f"{name}={value}" for name, value in self.variables.items()]


# The token of the run.


def token_of(cluster: Cluster, environ: Mapping[str, str] = os.environ) -> bytes:
    """The token of the run: JSHARD_TOKEN, which is a secret.

    By default it follows from the job number, which is not secret: it protects against the processes of another
    run, but not against an attacker.
    """
    given = environ.get("JSHARD_TOKEN")
    return (given or "|".join(["jshard", *(cluster.variables.get(name, "") for name in _JOB)])).encode()


# The addresses on which a run listens.


def bind_host(cluster: Cluster, environ: Mapping[str, str] = os.environ) -> str:
    """The address on which process 0 listens: that of its host name; "" for all interfaces.

    It is all interfaces if JAX_COORDINATOR_BIND_ADDRESS says so, or if the name does not resolve to an address of this
    machine, as behind a Kubernetes service, or resolves to one that other machines cannot reach.
    """
    if given := environ.get(_BIND):
        host = given.rpartition(":")[0].strip("[]")
        return "" if host in ("::", "0.0.0.0") else host
    try:
        family, _, _, _, found = socket.getaddrinfo(cluster.host, 0, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.bind(found)
    except OSError:
        return ""
    host = str(found[0])
    return "" if host.startswith("127.") and not cluster.is_local else host


def coordinator_bind(host: str, port: int, environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The address on which JAX's coordinator listens, as an environment variable."""
    if given := environ.get(_BIND):
        return {_BIND: f"{given.rpartition(':')[0]}:{port}"}
    return {_BIND: address(host, port)} if host else {}


def address(host: str, port: int) -> str:
    """Host and port in JAX's form."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def listen(cluster: Cluster, host: str) -> socket.socket:
    """A socket at the port of the roll call.

    Raises:
        RunError: another process has the port.
    """
    port = roll_call_port(cluster)
    try:
        return open_port(host, port)
    except OSError as error:
        raise RunError(
            "The roll call cannot be opened.",
            where=[f"port {port} of {socket.gethostname()}", *cluster.seen()],
            why=f"{error.strerror or error}: another process 0, or another program, uses it.",
            do="set another port, the same for all processes: "
            f"JSHARD_ROLL_CALL_PORT={port + 1 if port < 65535 else port - 2}",
        ) from error


def free_port(host: str, wanted: int) -> int:
    """The wanted port, or another one if a process that has not ended yet holds it."""
    for port in (wanted, 0):
        with contextlib.suppress(OSError), open_port(host, port) as server:
            return server.getsockname()[1]
    return wanted


def open_port(host: str, port: int = 0) -> socket.socket:
    """A listening socket; on all interfaces for an empty host, at a free port for 0."""
    if host:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, port), family=family, backlog=_BACKLOG)
    if not socket.has_dualstack_ipv6():
        return socket.create_server(("", port), backlog=_BACKLOG)
    return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=_BACKLOG)


def roll_call_port(cluster: Cluster) -> int:
    """JSHARD_ROLL_CALL_PORT, or the port after that of JAX's coordinator; under Slurm and Open MPI 4096 below that.

    Raises:
        ShardingError: the variable is not a port.
    """
    if cluster.kind in ("slurm", "open mpi") and cluster.port > 4096:
        # There JAX's port follows from the job number: the next port is that of the next job, maybe on this node.
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


# The signals that end a run.


def unsaved_text(number: int) -> str:
    """The last line of a run that a second signal ends."""
    return f"\n{signal.Signals(number).name} again: the run ends now, unsaved.\n"


class Signals:
    """Records SIGINT, SIGTERM and SIGHUP inside the context, instead of their usual effects.

    Python delivers signals to the main thread only; in another thread this records nothing.

    Attributes:
        received: the first one.
        repeated: whether another came a second or more after it. Closer ones are treated as one: a launcher and a
            terminal may each send it.
    """

    def __init__(self) -> None:
        self.received: signal.Signals | None = None
        self.repeated = False
        self._since_s = 0.0
        self._before: dict[signal.Signals, object] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            # An ignored signal stays ignored, as SIGHUP under nohup.
            heard = [number for number in _SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
            self._before = {number: signal.signal(number, self._note) for number in heard}
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.received is None:
            self.received, self._since_s = signal.Signals(number), time.monotonic()
        elif time.monotonic() - self._since_s >= _REPEAT_S:
            self.repeated = True


class StopSignal(Signals):
    """Catches SIGTERM, SIGINT and SIGHUP while the context is open; ignored ones stay ignored, as under `nohup`.

    A second one, at least a second later, ends the program. A worker of several processes only records them, however
    many: its supervisor decides when to end it. Python delivers signals to the main thread only; in another thread
    this catches nothing.

    Example:
        >>> with StopSignal() as stop:
        ...     while stop.received is None:
        ...         step()

    Attributes:
        asked_by: the first signal, known to `asked_s` before the main thread handles it.
        is_insisted: whether another came a second or more after it, in the same way.
    """

    asked_by: signal.Signals | None = None
    is_insisted = False
    _asked_s: float | None = None
    _wakeup: tuple[int, int] | None = None  # the ends of a pipe, which receives the number of a signal at once
    _old_wakeup: int = -1
    _heard_s: float = 0.0
    _lock = threading.Lock()  # for the pipe: a thread may still read it while it is closed

    def report(self) -> None:
        """Records that any process requested a stop: the deadline runs from the first request."""
        self._asked_s = self._asked_s or time.monotonic()

    def asked_s(self) -> float | None:
        """When a stop was first requested, by `time.monotonic`; None if it was not. Any thread may call it.

        This includes a signal not yet delivered to the main thread, which may be deep in native code.
        """
        with self._lock, contextlib.suppress(OSError):  # no pipe
            if self._wakeup is not None:
                for number in os.read(self._wakeup[0], 4096):
                    self._hear(number)
        return self._asked_s

    def __enter__(self) -> Self:
        super().__enter__()
        if self._before:
            self._wakeup = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
            self._old_wakeup = signal.set_wakeup_fd(self._wakeup[1], warn_on_full_buffer=False)
        return self

    def __exit__(self, *error: object) -> None:
        if self._wakeup is not None:
            signal.set_wakeup_fd(self._old_wakeup)
            with self._lock:
                wakeup, self._wakeup = self._wakeup, None
                for fd in wakeup:
                    os.close(fd)
        super().__exit__(*error)

    def _hear(self, number: int) -> None:
        if number not in self._before:
            return
        if self.asked_by is None:
            self.asked_by = signal.Signals(number)
            self._heard_s = time.monotonic()
            self.report()
        elif time.monotonic() - self._heard_s >= _REPEAT_S:
            self.is_insisted = True

    def _note(self, number: int, frame: FrameType | None) -> None:
        is_first = self.received is None
        super()._note(number, frame)
        if is_first:
            self.report()
            name = signal.Signals(number).name
            text = f"\n{name}: the run saves after this step and stops; a second one ends it unsaved.\n"
            with contextlib.suppress(OSError):  # not print: the signal may have interrupted one
                os.write(2, text.encode())
        elif self.repeated and not is_worker():
            with contextlib.suppress(OSError):
                os.write(2, unsaved_text(number).encode())
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
