"""Whoever does not know the token of a run cannot end it, delay it or take its memory: no bytes, no number of them."""

import contextlib
import dataclasses
import functools
import json
import os
import socket
import threading
import time

import pytest

from jshard import launch
from jshard.errors import RunError
from jshard.launch.addresses import open_port
from jshard.launch.keeper import ADDRESS, Keeper, KeeperClient
from jshard.launch.link import Link
from jshard.launch.listener import Hello, Listener
from jshard.launch.messages import LINE_BYTES, decoded, opened, parsed, sealed
from jshard.launch.rendezvous import Rendezvous
from jshard.launch.restarts import History
from tests.processes import launching

until = functools.partial(launching.until, limit_s=20)
TOKEN = b"secret"
HELLO = {"process": 1, "of": 2, "at": "x", "host": "h", "port": 1, "waited_s": 0.0, "nonce": "n"}
HISTORY = dataclasses.asdict(History(left=0))


def said(**changes):
    return json.dumps({"hello": HELLO, "history": HISTORY, "proof": "0" * 64, **changes}).encode()


HOSTILE = {
    "half a character in the proof": said(proof="\ud800"),
    "half a character in the hello": said(hello={**HELLO, "host": "\udfff"}),
    "half a character as bytes": b'{"proof": "\xed\xa0\x80"}',
    "a proof that is no text": said(proof={"a": [1]}),
    "not a number": said(hello={**HELLO, "waited_s": float("nan")}),
    "an infinity by its exponent": b'{"hello": 1e999999}',
    "a huge integer": b'{"hello": ' + b"9" * 4000 + b"}",
    "an integer that Python refuses": b'{"hello": ' + b"9" * 9000 + b"}",
    "a key twice": b'{"proof": "a", "proof": "b"}',
    "deep lists": b"[" * 16000,
    "deep objects": b'{"a":' * 3000,
    "deep and complete": b"[" * 8000 + b"]" * 8000,
    "UTF-16": '{"hello": 1}'.encode("utf-16"),
    "a byte order mark": b'\xef\xbb\xbf{"hello": 1}',
    "zero bytes": b"\0" * 100,
    "no text at all": bytes(range(128, 256)),
    "a proof of other characters": "\N{GREEK SMALL LETTER ALPHA}".encode() * 32 + b" {}",
    "a proof and nothing": b"0" * 64,
    "a list": b"[1, 2]",
    "nothing": b"",
    "a request of the web": b"GET / HTTP/1.1\r",
}
hostile = pytest.mark.parametrize("line", HOSTILE.values(), ids=HOSTILE)


@contextlib.contextmanager
def open_listener():
    with contextlib.closing(Listener(open_port("127.0.0.1"), TOKEN)) as listener:
        yield listener


def connected(listener):
    return socket.create_connection(("127.0.0.1", listener.port), timeout=20)


def admitted(listener):
    """Whether a peer that waits for the nonce, and answers it, is let in."""
    with connected(listener) as peer:
        lines = peer.makefile("rb")
        until(lambda: listener.join_requests() == [] and peer.recv(1, socket.MSG_PEEK))
        nonce = json.loads(lines.readline())["nonce"]
        message = {"hello": HELLO, "history": HISTORY}
        peer.sendall(sealed(message, TOKEN, nonce) + b"\n")
        requests = []
        until(lambda: requests.extend(listener.join_requests()) or requests)
        for request in requests:
            request.link.drop()
        return [request.hello.process for request in requests] == [1]


@hostile
def test_no_line_of_a_stranger_ends_a_roll_call(line):
    with open_listener() as listener, connected(listener) as stranger:
        stranger.sendall(line + b"\n")
        until(lambda: listener.join_requests() == [] and listener.refused == 1)
        assert admitted(listener)


@hostile
def test_no_line_of_a_stranger_in_place_of_process_0_ends_a_worker(line):
    """Another program has the port: the process looks on until its time is over, and says why."""
    nonce = b'{"nonce": "\\ud800"}' if not line else b'{"nonce": "n"}'
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer():
            with contextlib.suppress(OSError):
                while True:
                    connection, _ = server.accept()
                    with connection:
                        connection.sendall(nonce + b"\n" + line + b"\n")

        thread = threading.Thread(target=answer)
        thread.start()
        variables = {"JSHARD_ROLL_CALL_PORT": str(server.getsockname()[1])}
        place = launch.Cluster(
            kind="test", coordinator="127.0.0.1:1", num_processes=2, process_id=1, variables=variables
        )
        call = Rendezvous(place, launch.Deadlines(init_s=0.3))
        with contextlib.closing(call), pytest.raises(RunError, match="Process 0 cannot be reached"):
            call.meet(History(left=0))
        server.shutdown(socket.SHUT_RDWR)
        thread.join()


@hostile
def test_no_line_ends_a_link_with_an_error(line):
    ours, theirs = socket.socketpair()
    with theirs:
        link = Link(ours)
        theirs.sendall(line + b"\n")
        messages = []
        until(lambda: messages.extend(link.receive()) or messages or link.closed)
        assert messages == [] or messages == [decoded(line)]
        link.drop()


@hostile
def test_no_line_is_decoded_to_what_cannot_be_used(line):
    assert decoded(line) is None or "hello" in decoded(line)
    assert opened(line, TOKEN, "n") is None


@pytest.mark.parametrize(
    "hello",
    [
        {**HELLO, "process": True},
        {**HELLO, "process": "1"},
        {**HELLO, "waited_s": None},
        {**HELLO, "nonce": 1},
        {**HELLO, "more": 1},
        {},
        [],
        None,
    ],
)
def test_a_peer_whose_hello_has_other_fields_is_not_admitted(hello):
    with open_listener() as listener, connected(listener) as peer:
        until(lambda: listener.join_requests() == [] and peer.recv(1, socket.MSG_PEEK))
        nonce = json.loads(peer.makefile("rb").readline())["nonce"]
        peer.sendall(sealed({"hello": hello, "history": HISTORY}, TOKEN, nonce) + b"\n")
        until(lambda: listener.join_requests() == [] and peer.recv(1) == b"")
        assert listener.join_requests() == []


def test_a_flag_is_no_number():
    assert parsed(Hello, HELLO) is not None
    assert parsed(Hello, {**HELLO, "of": True}) is None


def test_a_line_without_end_takes_no_memory():
    """An endless sender is closed after the longest line, however much has arrived."""
    ours, theirs = socket.socketpair()
    theirs.setblocking(False)
    link = Link(ours)
    with theirs, contextlib.suppress(BlockingIOError):
        while True:
            theirs.send(b"x" * LINE_BYTES)
    assert link.lines() == []
    assert link.lines() == []
    assert link.closed
    assert len(link._received) <= LINE_BYTES
    link.drop()


class Crowd:
    """Connections that say nothing, in their own thread; a new one in place of each that is closed."""

    def __init__(self, port, size):
        self._port, self._size = port, size
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._hold, daemon=True)
        self.opened = 0

    def __enter__(self):
        self._thread.start()
        until(lambda: self.opened >= self._size)
        return self

    def __exit__(self, *error):
        self._ended.set()
        self._thread.join()

    def _hold(self):
        with contextlib.ExitStack() as stack:
            held = []
            while not self._ended.wait(0.02):
                held = [each for each in held if not self._is_over(each)]
                while len(held) < self._size:
                    try:
                        held.append(socket.create_connection(("127.0.0.1", self._port), timeout=0.3))
                    except OSError:
                        break
                    self.opened += 1
            for each in held:
                stack.callback(each.close)

    def _is_over(self, each):
        try:
            each.setblocking(False)
            if each.recv(1000):
                return False
            each.close()
            return True
        except BlockingIOError:
            return False
        except OSError:
            each.close()
            return True


def test_idle_connections_do_not_keep_a_run_from_starting():
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    variables = {"JSHARD_ROLL_CALL_PORT": str(port), "JSHARD_TOKEN": "t"}
    deadlines = launch.Deadlines(init_s=60.0)

    def call(process):
        place = launch.Cluster(
            kind="test", coordinator="127.0.0.1:1", num_processes=2, process_id=process, variables=variables
        )
        return Rendezvous(place, deadlines)

    with contextlib.closing(call(0)) as first, contextlib.closing(call(1)) as second, Crowd(port, 300):
        groups = []
        threads = [
            threading.Thread(target=lambda each=each: groups.append(each.meet(History(left=0))))
            for each in (first, second)
        ]
        began_s = time.monotonic()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert time.monotonic() - began_s < 8.0  # strangers had ten seconds each
        for group in groups:
            group.peers.close()


def test_a_listener_keeps_few_strangers_and_the_newest():
    with open_listener() as listener, contextlib.ExitStack() as stack:
        strangers = [stack.enter_context(connected(listener)) for _ in range(200)]
        assert listener.join_requests() == []
        assert len(listener._visitors) <= 64
        strangers[0].makefile("rb").readline()  # the nonce
        assert strangers[0].recv(1000) == b""
        assert admitted(listener)


def test_idle_connections_do_not_keep_a_worker_from_the_keeper():
    with Keeper() as keeper, contextlib.ExitStack() as stack:
        port = int(keeper.environ[ADDRESS].rpartition(":")[2])
        crowd = [stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=5)) for _ in range(300)]
        with contextlib.closing(KeeperClient.of_supervisor(keeper.environ)) as client:
            assert client.parts() == ([], 0)
            assert crowd[0].recv(1) == b""
            assert client.parts() == ([], 0)  # it is no stranger any more


def test_a_report_of_any_bytes_does_not_end_a_supervisor(tmp_path):
    """A worker's file descriptor belongs to it, and what runs in it may write there."""
    reader, writer = os.pipe()
    from jshard.launch.worker_process import WorkerProcess

    os.set_blocking(reader, False)
    worker = object.__new__(WorkerProcess)
    worker._reports, worker._partial, worker.state = reader, b"", {}
    for line in (b"[1]", b"1", *HOSTILE.values(), b'{"step": 3}'):
        os.write(writer, line + b"\n")
        worker._read_reports()
    os.close(writer)
    os.close(reader)
    assert worker.state["step"] == 3
