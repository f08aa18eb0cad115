"""The supervisors of a cluster meet or say who is missing, and all of them name a lost process. Here on one machine."""

import contextlib
import dataclasses
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time

import jax
import pytest

import jshard as js
from jshard import launch
from jshard.errors import RunError
from jshard.launch import addresses, worker
from jshard.launch.link import Link, close_all
from jshard.launch.messages import sealed
from jshard.launch.peers import Peers
from jshard.launch.rendezvous import Rendezvous
from jshard.launch.restarts import History
from tests.processes.launching import HERE, children, fake, gone, killed, plain, until

HOST = socket.gethostname()
DEADLINES = launch.Deadlines(init_s=800.0)
SHORT = launch.Deadlines(init_s=1.0)


@pytest.fixture
def ports():
    """A port for JAX's coordinator, and one for the roll call."""
    with socket.create_server(("127.0.0.1", 0)) as one, socket.create_server(("127.0.0.1", 0)) as other:
        return one.getsockname()[1], other.getsockname()[1]


def variables(ports, process, number=2):
    """The environment of a process of a cluster on this machine."""
    return {
        "JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{ports[0]}",
        "JAX_NUM_PROCESSES": str(number),
        "JAX_PROCESS_ID": str(process),
        "JSHARD_ROLL_CALL_PORT": str(ports[1]),
    }


def place(ports, process, number=2):
    found = launch.detect(variables(ports, process, number))
    assert found is not None
    return found


def gather(*places, deadlines=DEADLINES, before=lambda: None):
    """Holds a roll call of these, each in a thread; returns what each got, peers or error."""
    results = [None] * len(places)

    def attend(index):
        try:
            with contextlib.closing(Rendezvous(places[index], deadlines)) as call:
                results[index] = call.meet(History(left=0)).peers
        except Exception as error:
            results[index] = error

    threads = [threading.Thread(target=attend, args=(index,)) for index in range(len(places))]
    for thread in threads:
        thread.start()
        before()
    for thread in threads:
        thread.join()
    return results


def close(results):
    threads = [threading.Thread(target=peers.close) for peers in results]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def test_all_meet_and_know_each_other(ports):
    results = gather(*(place(ports, process, 3) for process in (2, 0, 1)))
    assert all(isinstance(peers, Peers) for peers in results)
    assert [peers.process_id for peers in results] == [2, 0, 1]
    assert [peers.decides for peers in results] == [False, True, False]
    assert all(peers.poll({"step": 5}) == [] for peers in results)
    close(results)


MISSING = """\
2 of 4 processes did not come: 1, 3.
  where: came: 0 on H, 2 on H (jax variables)
         JAX_COORDINATOR_ADDRESS=127.0.0.1:PORT
         JAX_NUM_PROCESSES=4
         JAX_PROCESS_ID=0
         JSHARD_ROLL_CALL_PORT=ROLL
  why:   2 of 4 came to the roll call within 3 s.
  do:    check why process 1, 3 did not start, or cannot reach 127.0.0.1:ROLL;
         if they are only slow to start: --init-timeout 900"""


def test_a_peer_that_does_not_come_is_reported_to_all_that_came(ports):
    host, guest = gather(place(ports, 0, 4), place(ports, 2, 4), deadlines=launch.Deadlines(init_s=3.0))
    assert isinstance(host, RunError) and isinstance(guest, RunError)
    assert plain(str(guest), ports) == plain(str(host), ports) == MISSING


UNREACHABLE = """\
Process 0 cannot be reached.
  where: this is process 1 on H (jax variables)
         process 0 is looked for at 127.0.0.1:ROLL
         JAX_COORDINATOR_ADDRESS=127.0.0.1:PORT
         JAX_NUM_PROCESSES=2
         JAX_PROCESS_ID=1
         JSHARD_ROLL_CALL_PORT=ROLL
  why:   Connection refused, after 1 s.
  do:    check that process 0 runs on 127.0.0.1 and that its ports PORT and ROLL are open to H;
         or set another port, the same for all processes: JSHARD_ROLL_CALL_PORT=12345"""


def test_a_process_0_that_does_not_come_is_reported(ports):
    (guest,) = gather(place(ports, 1), deadlines=SHORT)
    assert isinstance(guest, RunError)
    assert plain(str(guest), ports) == UNREACHABLE


def test_two_processes_with_one_id_are_reported_to_all(ports):
    results = gather(place(ports, 0, 3), place(ports, 1, 3), place(ports, 1, 3))
    assert all(type(error) is js.ShardingError for error in results)
    for error in results:
        assert plain(str(error), ports).startswith("Two processes have the id 1.\n  where: on H and on H\n")


def test_two_processes_0_on_a_machine(ports):
    with socket.create_server(("127.0.0.1", ports[1])):
        (error,) = gather(place(ports, 0))
    assert plain(str(error), ports).startswith("The roll call cannot be opened.\n  where: port ROLL of H\n")


def test_a_process_of_another_run_is_reported_to_all(ports):
    host, guest = gather(place(ports, 0, 2), place(ports, 1, 3))
    for error in (host, guest):
        assert type(error) is js.ShardingError
        assert "process 0 has 2 processes at 127.0.0.1:PORT" in plain(str(error), ports)
        assert "process 1 has 3 processes at 127.0.0.1:PORT" in plain(str(error), ports)


def test_strangers_on_the_port_are_passed_over(ports):
    def intrude():
        for words in (
            b"GET / HTTP/1.1\r\n\r\n",
            b"[" * 10000 + b"\n",
            b"x" * 100000,
            b'{"hello": 1, "process": "1"}\n',
        ):
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", ports[1]), timeout=1) as stranger:
                stranger.sendall(words)

    def late():
        time.sleep(0.3)
        intrude()

    results = gather(place(ports, 0), place(ports, 1), before=late)
    assert all(isinstance(peers, Peers) for peers in results)
    close(results)


def test_a_stop_ends_the_waiting(ports):
    asked = []
    call = Rendezvous(place(ports, 0), DEADLINES)
    assert call.meet(History(left=0), stopped=lambda: len(asked) > 2 or asked.append(1)) is None
    call.close()


def test_the_port_under_slurm_is_not_that_of_the_next_job():
    slurm = launch.Cluster(kind="slurm", coordinator="a:62344", num_processes=2, process_id=0, variables={})
    assert addresses.roll_call_port(slurm) == 62344 - 4096  # the next job has 62345 for its coordinator


@pytest.mark.parametrize("data", [b"no json\n", b"[1]\n", b"x" * 20000, b"[" * 5000 + b"\n", b"\xff\n"])
def test_a_link_closes_on_what_is_no_message(data):
    ours, theirs = socket.socketpair()
    with theirs:
        link = Link(ours)
        theirs.sendall(data)
        until(lambda: link.receive() == [] and link.closed)
        assert link.closed
        theirs.close()
        close_all([link])


def test_closing_waits_until_the_last_message_is_read():
    # A connection that is closed with something unread is reset, and may lose what was on its way.
    ours, theirs = (Link(each) for each in socket.socketpair())
    theirs.send({"beat": 1})
    ours.send({"verdict": 1})
    closing = threading.Thread(target=close_all, args=([ours],))
    closing.start()
    time.sleep(0.2)
    assert closing.is_alive()
    assert theirs.receive() == [{"verdict": 1}]
    close_all([theirs])
    closing.join()


def start(ports, process, actions, **options):
    """A supervisor of a fake worker, in a process of its own, as on a machine of its own."""
    return subprocess.Popen(
        [
            *(sys.executable, str(HERE / "supervise.py"), json.dumps({"grace_s": 0.5, **options})),
            *fake(**actions),
        ],
        env={**os.environ, **variables(ports, process)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def read_until(process, text):
    while text not in (line := process.stdout.readline()):
        assert line, process.stderr.read()


def supervise_all(ports, actions, number):
    """Supervisors of a cluster, each in a thread; their exit codes."""
    codes = [None] * number

    def run(process):
        deadlines = launch.Deadlines(init_s=800.0, grace_s=0.5)
        codes[process] = launch.supervise(fake(**actions), cluster=place(ports, process, number), deadlines=deadlines)

    threads = [threading.Thread(target=run, args=(process,)) for process in range(number)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return codes


def test_all_supervisors_name_the_lost_process_and_not_its_echo(ports, capfd):
    assert supervise_all(ports, {"p0": "blames a peer", "p1": "killed", "p2": "wait"}, 3) == [75, 75, 75]
    reported = plain(capfd.readouterr().err, ports)
    line = "the run ends: process 1 (pid N, host H): it was killed by signal 9 (SIGKILL): often the kernel's "
    assert reported.count(killed(3)) == 1 and reported.count(line) == 2 == reported.count("Process 0 has the report")
    assert len(reported.splitlines()) == len(killed(3).splitlines()) + 2  # one reports, the others have a line


@pytest.mark.parametrize("behind", ["is behind", "frozen"])
def test_of_a_stall_the_process_that_is_behind_is_named(ports, capfd, behind):
    """Process 2 notices; process 1 is asked where it stands, by its own supervisor if it cannot say it."""
    assert supervise_all(ports, {"p0": "is on time", "p1": behind, "p2": "stalls"}, 3) == [75, 75, 75]
    reported = plain(capfd.readouterr().err, ports)
    named = {"is behind": "waiting for data", "frozen": "starting, T (stopped)"}[behind]
    assert reported.count(f"RunError: Process 1 of 3 is stalled: {named}.\n") == 1
    assert "why:   no progress for 8 s; allowed: 8 s (--stall-timeout).\n" in reported
    assert reported.count("the run ends: process 1 (pid N, host H): it is stalled") == 2


@pytest.mark.parametrize(("signum", "why"), [("KILL", "connection to it broke"), ("STOP", "gave no sign of life")])
def test_a_supervisor_that_is_gone_is_a_lost_process(ports, signum, why):
    actions = {"p0": "wait", "p1": "wait"}
    first, second = (start(ports, process, actions, peer_s=6.0) for process in range(2))
    for process, name in ((first, "0"), (second, "1")):
        read_until(process, f"process {name} is up")
    (orphan,) = children(second.pid)
    second.send_signal(getattr(signal, f"SIG{signum}"))
    _, err = first.communicate(timeout=800)
    assert first.returncode == 75
    assert "Process 1 of 2 was lost" in err and why in err and f"host {HOST}" in err
    second.kill()
    second.communicate()
    until(lambda: gone(orphan))


def test_a_stop_of_all_needs_no_report(ports):
    processes = [start(ports, process, {}) for process in range(2)]
    for number, process in enumerate(processes):
        read_until(process, f"process {number} is up")
    for process in processes:
        process.send_signal(signal.SIGTERM)
    ended = [process.communicate(timeout=800) for process in processes]
    assert [(process.returncode, err) for process, (_, err) in zip(processes, ended, strict=True)] == [(75, "")] * 2


# Who may come in.


def test_a_hello_with_another_token_is_refused_and_ends_no_run(ports, capfd, monkeypatch):
    monkeypatch.setenv("JSHARD_TOKEN", "theirs")
    stale = Rendezvous(place(ports, 1), SHORT)
    monkeypatch.setenv("JSHARD_TOKEN", "ours")

    refused = []

    def come():
        try:
            stale.meet(History(left=0))
        except RunError as error:
            refused.append(error)

    with contextlib.closing(Rendezvous(place(ports, 0), DEADLINES)) as call:
        threading.Thread(target=come).start()
        begun = time.monotonic()
        assert call.meet(History(left=0), stopped=lambda: bool(refused) or time.monotonic() - begun > 60) is None
        assert call.listener.refused
    assert "another token" in str(refused[0])
    assert capfd.readouterr().err.startswith(f"port {ports[1]}: a hello with another token refused, from 127.0.0.1\n")
    results = gather(place(ports, 0), place(ports, 1))
    assert all(isinstance(peers, Peers) for peers in results)
    close(results)


def test_a_hello_is_of_no_use_a_second_time(ports):
    """Who has heard one cannot say it again: the number that it proves is another one."""
    with contextlib.closing(Rendezvous(place(ports, 0), DEADLINES)) as call:
        hello = {"process": 1, "of": 2, "at": "x", "host": "h", "port": 0, "waited_s": 0.0, "nonce": "n"}
        message = {"hello": hello, "history": dataclasses.asdict(History(left=0))}
        with socket.create_connection(("127.0.0.1", ports[1])) as again:
            again.sendall(sealed(message, call.token, "an earlier number") + b"\n")
            assert call.meet(History(left=0), stopped=lambda: call.listener.refused == 1) is None


def test_the_token_is_a_secret_where_it_is_given():
    of = lambda **environ: addresses.token_of(dataclasses.replace(SLURM, variables=environ), environ)
    assert of(SLURM_JOB_ID="7") == of(SLURM_JOB_ID="7") != of(SLURM_JOB_ID="8")
    assert of(SLURM_JOB_ID="7", SLURM_STEP_ID="1") != of(SLURM_JOB_ID="7", SLURM_STEP_ID="2")
    assert of(JSHARD_TOKEN="x", SLURM_JOB_ID="7") == b"x"


SLURM = launch.Cluster(kind="slurm", coordinator="node1:62344", num_processes=2, process_id=0, variables={})


@pytest.mark.parametrize(
    ("address", "environ", "expected"),
    [
        ("10.1.2.3", {}, "10.1.2.3"),
        ("127.0.1.1", {}, ""),  # as Debian has it: other machines cannot reach that
        (None, {}, ""),  # the name of a service that leads elsewhere
        ("10.1.2.3", {"JAX_COORDINATOR_BIND_ADDRESS": "[::]:1234"}, ""),
        ("10.1.2.3", {"JAX_COORDINATOR_BIND_ADDRESS": "10.9.9.9:1234"}, "10.9.9.9"),
    ],
)
def test_ports_listen_on_the_address_of_process_0(monkeypatch, address, environ, expected):
    def resolve(*_, **__):
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address or "192.0.2.1", 0))]

    monkeypatch.setattr(addresses.socket, "getaddrinfo", resolve)
    if address is not None:
        monkeypatch.setattr(addresses.socket.socket, "bind", lambda self, at: None)
    assert addresses.bind_host(SLURM, environ) == expected


@pytest.mark.skipif("jax_mtls_cert_file" in jax.config.values, reason="this JAX has mutual TLS")
def test_mutual_tls_that_jax_would_pass_over_is_refused():
    environ = {"JAX_COORDINATOR_ADDRESS": "127.0.0.1:1", "JAX_MTLS_CERT_FILE": "cert.pem"}
    with pytest.raises(js.ShardingError, match="cannot secure its connections"):
        worker._connect(environ, DEADLINES)
