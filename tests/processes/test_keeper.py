"""The keeper holds whole parts alone, gives any bytes of them, and talks to no one without its token."""

import contextlib
import socket

import numpy as np
import pytest

from jshard.errors import ShardingError
from jshard.launch.keeper import ADDRESS, TOKEN, Keeper, KeeperClient, KeptPart
from jshard.launch.messages import with_token
from jshard.train import memory_copies
from jshard.train.memory_copies import MemoryCopies, neighbours


@pytest.fixture
def keeper():
    with Keeper() as keeper:
        yield keeper


@pytest.fixture
def client(keeper):
    client = KeeperClient.of_supervisor(keeper.environ)
    yield client
    client.close()


def names(client):
    return [(part.run, part.step, part.process) for part in client.parts()[0]]


def put(client, run, step, process=0, beside=None):
    client.put(
        KeptPart(run, step, process, 2), [memoryview(b"head"), memoryview(bytes(range(256)) * 4096)], beside=beside
    )


def test_parts_are_kept_until_a_newer_copy_is_whole(client):
    put(client, "a", 5)
    put(client, "a", 5, process=1)
    put(client, "a", 10, beside=("a", 5))
    assert names(client) == [("a", 5, 0), ("a", 5, 1), ("a", 10, 0)]
    put(client, "b", 10, beside=("a", 5))  # started again: of the copy that was not whole nothing stays
    assert names(client) == [("a", 5, 0), ("a", 5, 1), ("b", 10, 0)]
    put(client, "b", 15, process=1)  # another process may be ahead
    client.forget_before("b", 10)
    assert names(client) == [("b", 10, 0), ("b", 15, 1)]
    assert client.read(KeptPart("b", 10, 0, 2), 2, 6) == b"ad\x00\x01\x02\x03"
    with pytest.raises(ConnectionError, match="beyond the end"):
        client.read(KeptPart("b", 10, 0, 2), 1 << 20, 6)
    with pytest.raises(ConnectionError, match="KeyError"):
        client.read(KeptPart("a", 5, 0, 2), 0, 6)


def test_a_worker_that_dies_in_the_middle_leaves_nothing(keeper, client):
    put(client, "a", 5)
    host, _, port = keeper.environ[ADDRESS].rpartition(":")
    with socket.create_connection((host, int(port))) as dying:
        request = {"put": ["a", 10, 0, 2], "bytes": 1000, "beside": ["a", 5]}
        dying.sendall(with_token(request, keeper.environ[TOKEN]) + b"\n" + b"x" * 999)
        dying.shutdown(socket.SHUT_WR)
        assert b"truncated" in dying.recv(1000)
    assert names(client) == [("a", 5, 0)]


@pytest.mark.parametrize(
    "line", [b'{"token": "guess", "list": 1}\n', b"GET / HTTP/1.1\r\n\r\n", b"[1]\n", b"\xff" * 99999]
)
def test_strangers_hear_nothing(keeper, client, line):
    host, _, port = keeper.environ[ADDRESS].rpartition(":")
    with socket.create_connection((host, int(port)), timeout=20) as stranger:
        stranger.sendall(line)
        with contextlib.suppress(ConnectionResetError):
            assert stranger.recv(1000) == b""
    assert names(client) == []


def test_the_second_copy_is_on_another_machine():
    four = [("a", "a:1"), ("a", "a:2"), ("b", "b:1"), ("b", "b:2"), ("c", "c:1")]
    assert neighbours(four) == [2, 3, 4, 4, 0]
    assert neighbours([("a", "a:1"), ("a", "a:2"), ("a", "a:3")]) == [1, 2, 0]
    assert neighbours([("a", "a:1"), ("a", "a:1")]) == [0, 1]


def test_copies_that_no_one_keeps_or_that_have_no_room_are_refused(keeper, monkeypatch):
    """Before anything is trained: parameters of 3 MiB are a part, and three of it have no room in 8."""
    state = {"x": np.zeros((3, 1 << 18), np.float32)}
    with pytest.raises(ShardingError, match="--keep-in-memory 100 --max-restarts 3"):
        MemoryCopies(5, state, print)
    for name, value in keeper.environ.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(memory_copies, "free_bytes", lambda: 8 << 20)
    with pytest.raises(ShardingError, match=r"9\.0 MiB are needed: .* 3\.0 MiB.* 8\.0 MiB of memory"):
        MemoryCopies(5, state, print)
    monkeypatch.setattr(memory_copies, "free_bytes", lambda: 10 << 20)
    MemoryCopies(5, state, print)


def told_memory(root, *, available, limit, used, cache, group):
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/meminfo").write_text(f"MemTotal: 1 kB\nMemAvailable:  {available // 1024} kB\n")
    (root / "proc/self/cgroup").write_text(f"9:cpu:/\n{group}:/job/step\n")
    folder, names = root / "sys/fs/cgroup/memory/job", ("limit_in_bytes", "usage_in_bytes", "total_inactive_file")
    if group == "0:":
        folder, names = root / "sys/fs/cgroup/job", ("max", "current", "inactive_file")
        (folder / "step").mkdir(parents=True)
        (folder / "step" / "memory.max").write_text("max\n")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"memory.{names[0]}").write_text(f"{limit}\n")
    (folder / f"memory.{names[1]}").write_text(f"{used}\n")
    (folder / "memory.stat").write_text(f"anon 5\n{names[2]} {cache}\n")
    return root


@pytest.mark.parametrize("group", ["0:", "4:memory"])
def test_free_memory_is_what_the_system_or_the_job_has_left(tmp_path, group):
    gib = 1 << 30
    job = told_memory(tmp_path / "a", available=9 * gib, limit=4 * gib, used=3 * gib, cache=gib, group=group)
    host = told_memory(tmp_path / "b", available=gib, limit=4 * gib, used=gib, cache=0, group=group)
    assert memory_copies.free_bytes(job) == 2 * gib
    assert memory_copies.free_bytes(host) == gib
    assert memory_copies.free_bytes(tmp_path / "nothing") > 100 * gib
