"""The keeper: a store in the memory of a supervisor, for copies that outlive the workers.

A *part* is the state of one process after a step: bytes, which the keeper does not interpret. It exists once all of it
has arrived, so that a worker that dies in the middle leaves nothing. Workers, also of other machines, write and read
over TCP: a line with the keeper's token and one request as JSON, and after a put its bytes.

    {"put": part, "bytes": n, "beside": [run, step]}, n bytes   of its process, only that part stays beside the new one
    {"read": part, "begin": i, "bytes": n}                      -> {"bytes": n}, n bytes
    {"list": 1}                                                 -> {"parts": [part, ...], "held_bytes": n}
    {"forget": [run, step]}                                     drops the parts of other runs, and of steps before it

Input is untrusted: `messages` reads the lines, and never executes anything. Connections that have not given the token
are few, and the oldest of them goes first, so that no number of strangers keeps a worker out.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import mmap
import secrets
import socket
import socketserver
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

from jshard.launch.cluster import Cluster
from jshard.launch.messages import LINE_BYTES, Message, with_token, without_token

ADDRESS = "JSHARD_KEEPER"
TOKEN = "JSHARD_KEEPER_TOKEN"
"""The environment variables that lead a worker to the keeper of its supervisor."""

_ANSWER_BYTES = 1 << 20  # the longest line of an answer: the list of all parts
_HELLO_S = 10.0  # from a connection to its token
_IDLE_S = 600.0  # between two requests of a worker
_STRANGERS = 256  # connections without the token
_ANSWER_S = 60.0
_TRIES = 3  # connections, if strangers displace a new one


@dataclasses.dataclass(frozen=True, order=True)
class KeptPart:
    """The name of a part.

    Attributes:
        run: the name of one start of the workers: all parts of a copy have the same.
        step: the step of the state.
        process: the process of the part.
        of: the number of processes with a part.
    """

    run: str
    step: int
    process: int
    of: int

    @classmethod
    def parse(cls, value: object) -> KeptPart:
        """Parses a name from the network; a ValueError if it is not valid."""
        # The exact types: True is an int for `isinstance`.
        if not isinstance(value, list) or [type(field) for field in value] != [str, int, int, int]:
            raise ValueError("not the name of a part")
        return cls(*value)


class Keeper:
    """A store that listens in its own threads until it is closed, which deletes all parts.

    Args:
        place: that of this process; None if all processes are on this machine.

    Attributes:
        environ: the environment variables for a worker.
    """

    def __init__(self, place: Cluster | None = None) -> None:
        bind_host, reached_at = _hosts(place)
        self._server = _Server(bind_host, secrets.token_hex(16))
        port = self._server.server_address[1]
        self.environ = {ADDRESS: f"{reached_at}:{port}", TOKEN: self._server.token}
        # A daemon: it does not keep a supervisor alive that ends without `close`.
        threading.Thread(target=self._server.serve_forever, daemon=True, name="jshard-keeper").start()

    def close(self) -> None:
        """Frees everything."""
        self._server.shutdown()
        self._server.server_close()
        self._server.forget_all()

    def __enter__(self) -> Keeper:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class KeeperClient:
    """The client of a keeper; connects when needed. Threads may share it.

    All methods raise an OSError if the keeper is gone, or refuses.

    Args:
        address: host:port.
        token: the token of that keeper.
    """

    def __init__(self, address: str, token: str) -> None:
        self.address = address
        self.token = token
        self._connection: _Connection | None = None
        self._lock = threading.Lock()  # a request and its answer belong together

    @classmethod
    def of_supervisor(cls, environ: Mapping[str, str]) -> KeeperClient | None:
        """Returns the client of the keeper of this process's supervisor; None without one."""
        if ADDRESS not in environ or TOKEN not in environ:
            return None
        return cls(environ[ADDRESS], environ[TOKEN])

    def put(self, part: KeptPart, pieces: Sequence[memoryview], *, beside: tuple[str, int] | None) -> None:
        """Stores a part.

        Args:
            part: its name.
            pieces: its bytes.
            beside: run and step of the one part of the same process that is kept, too.
        """
        size = sum(piece.nbytes for piece in pieces)
        self._request({"put": dataclasses.astuple(part), "bytes": size, "beside": beside}, pieces)

    def read(self, part: KeptPart, begin: int, size: int) -> bytearray:
        """Returns some of the bytes of a part."""
        _, data = self._request({"read": dataclasses.astuple(part), "begin": begin, "bytes": size})
        return data

    def parts(self) -> tuple[list[KeptPart], int]:
        """Returns the stored parts, and their total bytes."""
        answer, _ = self._request({"list": 1})
        return [KeptPart.parse(part) for part in answer["parts"]], answer["held_bytes"]

    def forget_before(self, run: str, step: int) -> None:
        """Deletes the parts of other runs, and of steps before this one."""
        self._request({"forget": [run, step]})

    def close(self) -> None:
        """Closes the connection."""
        with self._lock:
            self._disconnect()

    def _request(self, request: Message, pieces: Sequence[memoryview] = ()) -> tuple[Message, bytearray]:
        """Sends a request, and the bytes of a put; returns the answer, and the bytes of a read."""
        with self._lock:
            for attempt in range(1, _TRIES + 1):
                is_new = self._connection is None
                try:
                    if self._connection is None:
                        self._connection = _Connection(self.address, self.token)
                    return self._connection.request(request, pieces)
                # ValueError and RecursionError: the answer is not JSON, so this is no keeper.
                except (OSError, ValueError, RecursionError) as error:
                    self._disconnect()
                    # Many strangers at once can displace a new connection, before its first line is read.
                    was_displaced = is_new and isinstance(error, (ConnectionResetError, BrokenPipeError))
                    if was_displaced and attempt < _TRIES:
                        continue
                    reason = getattr(error, "strerror", None) or str(error)
                    raise ConnectionError(f"the keeper at {self.address}: {reason}") from error
            raise AssertionError("the last attempt returns or raises")

    def _disconnect(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None


class _Connection:
    """A connection of a client."""

    def __init__(self, address: str, token: str) -> None:
        host, _, port = address.rpartition(":")
        self._token = token
        self._socket = socket.create_connection((host, int(port)), timeout=_ANSWER_S)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._file = self._socket.makefile("rb")

    def request(self, request: Message, pieces: Sequence[memoryview]) -> tuple[Message, bytearray]:
        """Sends a request with its bytes; returns the answer with its bytes."""
        self._socket.sendall(with_token(request, self._token) + b"\n")
        for piece in pieces:
            self._socket.sendall(piece)
        answer = json.loads(self._file.readline(_ANSWER_BYTES) or b"{}")
        if not answer:
            raise ConnectionResetError("it has gone")
        if not isinstance(answer, dict) or "error" in answer:
            raise ConnectionError(str(answer["error"]))
        data = bytearray(request["bytes"] if "read" in request else 0)
        if self._file.readinto(data) != len(data):
            raise ConnectionResetError("it has gone")
        return answer, data

    def close(self) -> None:
        """Closes it."""
        self._file.close()
        self._socket.close()


class _Server(socketserver.ThreadingTCPServer):
    """The parts, and the threads that receive and send them."""

    daemon_threads = True
    allow_reuse_address = True
    request_queue_size = 1024

    def __init__(self, host: str, token: str) -> None:
        self.token = token
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self.parts: dict[KeptPart, mmap.mmap] = {}
        self.lock = threading.Lock()
        self._strangers: dict[socket.socket, float] = {}  # the oldest first, with their time of arrival
        super().__init__((host, 0), _Visit)

    def allocate(self, part: KeptPart, size: int, beside: object) -> mmap.mmap:
        """Allocates a part; one other of its process is kept."""

        def is_replaced(old: KeptPart) -> bool:
            # `beside` was JSON: it is a list, or None.
            return old.process == part.process and [old.run, old.step] != beside

        # Before the new part arrives: there is memory for two of each process.
        self._forget(is_replaced)
        # An empty mapping is not possible.
        return mmap.mmap(-1, max(size, 1))  # its own memory: freed as soon as it is dropped

    def store(self, part: KeptPart, data: mmap.mmap) -> None:
        """Stores a part, all of which has arrived."""
        with self.lock:
            self.parts[part] = data

    def view(self, part: KeptPart) -> memoryview:
        """Returns the bytes of a part."""
        with self.lock:
            # It keeps the memory, even if the part is dropped while it is sent.
            return memoryview(self.parts[part])

    def sizes(self) -> dict[KeptPart, int]:
        """Returns the stored parts with their bytes."""
        with self.lock:
            return {part: len(data) for part, data in self.parts.items()}

    def forget(self, run: str, step: int) -> None:
        """Drops the parts of other runs, and of steps before this one."""

        def is_old(old: KeptPart) -> bool:
            return old.run != run or old.step < step

        self._forget(is_old)

    def forget_all(self) -> None:
        """Drops all parts."""
        with self.lock:
            self.parts = {}

    def process_request(self, request: socket.socket, client_address: object) -> None:
        """Starts the thread of a new connection, which is a stranger until it gives the token."""
        with self.lock:
            self._strangers[request] = time.monotonic()
            surplus = list(self._strangers)[:-_STRANGERS]
        self._drop(surplus)
        super().process_request(request, client_address)

    def service_actions(self) -> None:
        """Drops those who drip their first line, byte after byte; the server calls it twice a second."""
        with self.lock:
            since_s = time.monotonic() - _HELLO_S
            late = [connection for connection, arrived_s in self._strangers.items() if arrived_s < since_s]
        self._drop(late)

    def shutdown_request(self, request: socket.socket) -> None:
        """Closes a connection that is over."""
        self.admit(request)
        super().shutdown_request(request)

    def admit(self, connection: socket.socket) -> None:
        """Removes a connection from the strangers: it has given the token, or it is over."""
        with self.lock:
            self._strangers.pop(connection, None)

    def _drop(self, strangers: Sequence[socket.socket]) -> None:
        for stranger in strangers:
            self.admit(stranger)
            with contextlib.suppress(OSError):  # it has closed
                stranger.shutdown(socket.SHUT_RDWR)  # its thread reads the end, and closes it

    def handle_error(self, request: object, client_address: object) -> None:
        """Ignores connections that break, or send invalid data."""

    def _forget(self, is_dropped: Callable[[KeptPart], bool]) -> None:
        with self.lock:
            # A reader may still use a part: the memory is freed with the last reference.
            self.parts = {part: data for part, data in self.parts.items() if not is_dropped(part)}


class _Answer(NamedTuple):
    """The answer to a request, and the bytes that follow it."""

    message: Message
    data: memoryview | None = None


class _Visit(socketserver.StreamRequestHandler):
    """One connection."""

    # Of each read, so a stranger may still send a byte at a time: `service_actions` ends that.
    timeout = _HELLO_S
    disable_nagle_algorithm = True
    server: _Server
    _is_over = False

    def handle(self) -> None:
        """Answers the requests of a connection, until it ends or gives a wrong token."""
        for request in self._requests():
            self._reply(*self._answer_or_error(request))  # unnamed: a name would keep the data until the next request

    def _requests(self) -> Iterator[Message]:
        while not self._is_over and (line := self.rfile.readline(LINE_BYTES)):
            request = without_token(line, self.server.token)
            if request is None:
                return
            self.server.admit(self.connection)
            # A worker may compute for long between two copies.
            self.connection.settimeout(_IDLE_S)
            yield request

    def _answer_or_error(self, request: Message) -> _Answer:
        try:
            return self._answer(request)
        except (KeyError, TypeError, ValueError, OverflowError, MemoryError) as error:
            self._is_over = True  # the rest of this request would be read as the next one
            return _Answer({"error": f"{type(error).__name__}: {error}"})

    def _answer(self, request: Message) -> _Answer:
        if "put" in request:
            return self._put(KeptPart.parse(request["put"]), int(request["bytes"]), request["beside"])
        if "read" in request:
            return self._read(request)
        if "forget" in request:
            run, step = request["forget"]
            self.server.forget(run, int(step))
            return _Answer({"kept": len(self.server.parts)})
        # Anything else is a request for the list.
        sizes = self.server.sizes()
        parts = [dataclasses.astuple(part) for part in sizes]
        return _Answer({"parts": parts, "held_bytes": sum(sizes.values())})

    def _put(self, part: KeptPart, size: int, beside: object) -> _Answer:
        try:
            data = self.server.allocate(part, size, beside)
        except OSError as error:
            raise MemoryError(f"no room for {size} bytes: {error.strerror}") from error
        if self.rfile.readinto(memoryview(data)[:size]) != size:
            raise ValueError("the part is truncated")
        # Only now: a worker that dies in the middle leaves nothing.
        self.server.store(part, data)
        return _Answer({"kept": size})

    def _read(self, request: Message) -> _Answer:
        begin = int(request["begin"])
        size = int(request["bytes"])
        view = self.server.view(KeptPart.parse(request["read"]))
        if not 0 <= begin <= begin + size <= len(view):
            raise ValueError("beyond the end of the part")
        return _Answer({"bytes": size}, view[begin : begin + size])

    def _reply(self, message: Message, data: memoryview | None) -> None:
        with contextlib.suppress(OSError):
            self.wfile.write(json.dumps(message).encode() + b"\n")
            if data is not None:
                self.wfile.write(data)


def _hosts(place: Cluster | None) -> tuple[str, str]:
    """Returns the address on which a keeper listens, and the one at which workers reach it."""
    if place is None:
        return "127.0.0.1", "127.0.0.1"
    host = _own_address(place)
    if _is_loopback(host) and not _is_loopback(place.host):
        # The name of process 0's machine resolves to the loopback on that machine, and to an address elsewhere.
        return "", place.host
    return host, host


def _own_address(place: Cluster) -> str:
    """Returns the address of this machine as seen from that of process 0; sends no packet."""
    family = socket.getaddrinfo(place.host, place.port, type=socket.SOCK_DGRAM)[0][0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((place.host, place.port))
        return probe.getsockname()[0]


def _is_loopback(host: str) -> bool:
    return host in ("localhost", "::1") or host.startswith("127.")
