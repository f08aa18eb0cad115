"""A series in a bucket: what is killed, fails, is slow or somebody else's never costs a good checkpoint.

`KILLS=30 pytest -m wide tests/checkpoint/test_series_in_bucket.py -k killed` kills at thirty requests.
"""

import json
import os
import random
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jshard as js
from jshard.checkpoint import Checkpointer, CheckpointError, CheckpointWarning
from jshard.checkpoint.buckets import BucketError, BucketPath
from jshard.checkpoint.series import lease as series_lease
from jshard.checkpoint.series.lease import SeriesLease
from jshard.cli import main
from jshard.errors import RunError
from tests.checkpoint.bucket_servers import SCHEMES, Server, folder_of_a_test, serve
from tests.compiling import python
from tests.micro_gpt import USERS_FILE
from tests.processes.test_checkpoint_processes import end, read, start_two

pytestmark = pytest.mark.wide

KILLS = int(os.environ.get("KILLS", "6"))


@pytest.fixture(scope="module", params=SCHEMES)
def server(request: pytest.FixtureRequest) -> Iterator[Server]:
    with serve(request.param, request_s=10.0) as server:
        yield server


@pytest.fixture
def series(server: Server, request: pytest.FixtureRequest) -> Iterator[BucketPath]:
    yield from folder_of_a_test(server, request)


def state(step: int, rows: int = 16):
    """Some MiB, of which every number says of which step it is."""
    sharding = NamedSharding(js.mesh(), P("fsdp"))
    values = np.arange(rows * (1 << 17), dtype=np.float32).reshape(rows, -1) + step
    return {"w": jax.device_put(values, sharding), "step": step, "note": f"step {step}"}


def check(found, step: int) -> None:
    wanted = state(step)
    np.testing.assert_array_equal(found["w"], wanted["w"])
    assert (found["step"], found["note"]) == (step, f"step {step}")


def test_checkpoints_are_kept_and_found_by_the_commands(server: Server, series: BucketPath, capsys):
    with Checkpointer(str(series), keep=js.checkpoint.Keep(last=1, best=1)) as ckpt:
        for step, loss in ((1, 3.0), (2, 1.0), (3, 2.0)):
            ckpt.save_async(step, state(step), metrics={"val_loss": loss})
        ckpt.wait()
        assert ckpt.steps() == [2, 3] and ckpt.latest() == 3 and str(ckpt.path(2)) == f"{series}/2"
        check(ckpt.restore(state(0)), 3)
        check(ckpt.restore(state(0), 2), 2)
        gone = [path for method, path, _ in server.log if "/1/" in path and (method == "DELETE" or "delete" in path)]
        assert series.scheme == "s3" or gone[0].endswith("/1/jshard.json")  # S3 names them in the body
    assert "owner.json" not in series.objects()
    for command in ("ls", "inspect", "verify", "timeline"):
        assert main(["ckpt", command, str(series)]) == 0
    assert main(["ckpt", "diff", f"{series}/2", f"{series}/3"]) == 1
    assert "good, all files are there" in capsys.readouterr().out
    assert main(["ckpt", "verify", str(series / "7")]) == 2


def test_a_run_has_its_checkpoints_there(series: BucketPath, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", sys.path[:])
    Path("model.py").write_text(USERS_FILE)
    Path("text.txt").write_text("the quick brown fox jumps over the lazy dog. " * 400)
    how = ["--data", "text.txt", "--out", "run", "--track", "--sample-tokens", "0", "--set", "model.n_layer=1"]
    assert main(["train", "model.py", "--steps", "1", "--checkpoints", str(series), *how]) == 0
    assert main(["train", "model.py", "--steps", "2", "--resume", *how]) == 0
    assert f"resumed from {series}/1\n" in capsys.readouterr().out
    assert Checkpointer(str(series)).steps() == [1, 2] and not Path("run/checkpoints").exists()
    assert main(["train", "model.py", "--resume", "--checkpoints", f"{series}-2", *how]) == 2
    assert f"has its checkpoints in {series}" in capsys.readouterr().err


def test_a_copy_on_a_disk_is_a_checkpoint(series: BucketPath, tmp_path: Path):
    js.checkpoint.save(f"{series}/5", state(5))
    for name in series.objects():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes((series / name).read_bytes())
    check(js.checkpoint.restore(tmp_path / "5", state(0)), 5)
    check(Checkpointer(tmp_path).restore(state(0)), 5)
    with pytest.raises(CheckpointError, match="that path already exists"):
        js.checkpoint.save(f"{series}/5", state(6))


def test_saves_and_restores_get_through_a_bad_service(server: Server, series: BucketPath):
    dice = random.Random(7)
    kinds = ("500", "503", "reset", "reset after", "slow 0.5")
    server.fault = lambda method, path: dice.choice(kinds) if dice.random() < 0.15 else None
    with Checkpointer(str(series), keep=2) as ckpt:
        for step in (1, 2, 3):
            ckpt.save(step, state(step))
        check(ckpt.restore(state(0)), 3)
    assert ckpt.steps() == [2, 3]


def test_a_service_that_is_down_costs_no_checkpoint(server: Server, series: BucketPath):
    with Checkpointer(str(series), keep=2) as ckpt:
        ckpt.save(1, state(1))
        server.fault = lambda method, path: "503" if "/2/" in path and method in ("PUT", "POST") else None
        ckpt.save_async(2, state(2))
        with pytest.raises(RunError, match=r"(?s)step 2 could not be written.*503 Service Unavailable"):
            ckpt.wait()
        server.fault = lambda method, path: "503"
        for call in (ckpt.latest, lambda: ckpt.restore(state(0), fall_back=True)):
            with pytest.raises(BucketError, match=f"(?s){series}.*503 Service Unavailable.*4 attempts"):
                call()
        server.fault = lambda method, path: "503" if "arrays" in path and method == "GET" else None
        with pytest.raises(RunError, match="503 Service Unavailable"):
            ckpt.restore(state(0), fall_back=True)
        server.fault = lambda method, path: None
        assert ckpt.latest() == 1 and not any(name.startswith("2/") for name in series.objects())
        check(ckpt.restore(state(0)), 1)
        ckpt.save(2, state(2))
        check(ckpt.restore(state(0)), 2)


def test_what_was_left_is_removed_and_what_is_damaged_does_not_count(server: Server, series: BucketPath):
    with Checkpointer(str(series), keep=3) as ckpt:
        ckpt.save(1, state(1))
        ckpt.save(2, state(2))
        server.fault = lambda method, path: "403" if "/jshard.json" in path and method == "PUT" else None
        with pytest.raises(RunError, match="403 Forbidden"):
            ckpt.save(3, state(3))
        server.fault = lambda method, path: None
        (series / "3/arrays/x.safetensors").write(b"of a process that died")
        (file,) = [name for name in series.objects() if name.startswith("2/arrays/")]
        (series / file).write(b"cut off")
        with pytest.warns(CheckpointWarning, match="damaged and ignored"):
            assert ckpt.latest() == 1
        with pytest.warns(CheckpointWarning, match="its manifest is now named"):
            ckpt.save(2, state(2))
        assert ckpt.steps() == [1, 2] and not any(name.startswith("3/") for name in series.objects())
        check(ckpt.restore(state(0)), 2)
    (series / "9/mine.txt").write(b"of somebody")
    with pytest.raises(CheckpointError, match=r"that path already exists, without jshard\.json"):
        Checkpointer(str(series)).save(9, state(9))
    assert series.objects()["9/mine.txt"] == 11


def test_two_runs_cannot_write_one_series(series: BucketPath, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(series_lease, "RENEWED_S", 0.5)
    first, second = Checkpointer(str(series)), Checkpointer(str(series))
    first.save(1, state(1))
    with (
        pytest.warns(CheckpointWarning, match="may still write to it; waiting up to"),
        pytest.raises(CheckpointError, match=rf"(?s)belongs to another run.*process {os.getpid()} on .* just renewed"),
    ):
        second.save(2, state(2))
    check(second.restore(state(0)), 1)  # to read is free
    first._store.release()
    second.save(2, state(2))
    assert second.steps() == [1, 2]
    second._store.release()


def test_of_many_that_take_a_series_whose_run_is_silent_one_gets_it(
    series: BucketPath, monkeypatch: pytest.MonkeyPatch
):
    """The one before completes nothing any more, however far it was."""
    monkeypatch.setattr(series_lease, "LEASE_S", 2.0)
    slow = Checkpointer(str(series))
    slow.save(1, state(1))
    slow._store._lease._ended.set()  # its thread does not run any more: the process hangs
    time.sleep(0.1)
    leases = [SeriesLease(series) for _ in range(4)]
    taken: list[SeriesLease] = []

    def take(lease: SeriesLease) -> None:
        try:
            lease.take()
            taken.append(lease)
        except CheckpointError:
            pass

    with pytest.warns(CheckpointWarning, match="may still write to it; waiting"), ThreadPoolExecutor(4) as pool:
        list(pool.map(take, leases))
    # Others may come to it once more, as the winner is as silent: no one has it who was not the last.
    assert taken
    holders = []
    for lease in taken:
        try:
            lease.check()
            holders.append(lease)
        except RunError:
            pass
    assert len(holders) == 1
    with pytest.raises(RunError, match=r"(?s)another run took the series"):
        slow.save(2, state(2))
    assert slow.steps() == [1]
    holders[0].release()


def test_two_processes_save_their_parts_or_none(
    server: Server, series: BucketPath, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("SERIES", str(series))
    server.fault = lambda method, path: (
        "403" if "/3/arrays/" in path and "-00001-" in path and method != "GET" else None
    )
    assert end(start_two(tmp_path, "bucket")) == [0, 0]
    for process in range(2):
        found = read(tmp_path, "bucket", process)
        assert (found["differences"] == [] and "process 1" in found["error"]["text"]) or process == 1
        assert "403 Forbidden" in found["error"]["text"]
    assert Checkpointer(str(series)).steps() == [1, 2]
    assert {name.split("-")[1] for name in series.objects() if name.startswith("2/arrays/")} == {"00000", "00001"}


ZYGOTE = """
    import os, sys, json
    os.environ["JAX_PLATFORMS"] = "cpu"
    import jax
    jax.config.update("jax_num_cpu_devices", 8)
    from tests.checkpoint.test_series_in_bucket import *
    from orbax.checkpoint import v1
    for line in sys.stdin:
        if (number := os.fork()) == 0:
            ckpt = Checkpointer(line.strip(), keep=2)
            latest = ckpt.latest()
            print(json.dumps(["begins", os.getpid(), latest]), flush=True)
            if latest is not None:
                check(ckpt.restore(state(0)), latest)
            for step in range((latest or 0) + 1, 10**6):
                ckpt.save_async(step, state(step))
                ckpt.wait()
                print(json.dumps(["saved", os.getpid(), step]), flush=True)
        os.waitpid(number, 0)
        print(json.dumps(["ended", number, None]), flush=True)
"""


def test_a_run_that_is_killed_at_any_request_leaves_its_newest_checkpoint(server: Server, series: BucketPath):
    """At each of them the request arrives, or it does not."""
    dice = random.Random(0)
    environment = os.environ | server.environment
    zygote = subprocess.Popen(
        python(textwrap.dedent(ZYGOTE)),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[2],
        env=environment,
    )
    assert zygote.stdin is not None and zygote.stdout is not None
    newest = 0
    try:
        for _ in range(KILLS):
            victim, left = list[int](), dice.randrange(1, 60)

            def fault(method: str, path: str, victim: list[int] = victim) -> str | None:
                nonlocal left
                left -= bool(victim)
                if left == 0:
                    os.kill(victim[0], signal.SIGKILL)
                    return dice.choice([None, "reset"])
                return None

            server.fault = fault
            print(series, file=zygote.stdin, flush=True)
            while (said := json.loads(zygote.stdout.readline()))[0] != "ended":
                if said[0] == "begins":
                    victim.append(said[1])
                newest = max(newest, said[2] or 0)
            server.fault = lambda method, path: None
            reader = Checkpointer(str(series))
            assert reader.latest() is None if newest == 0 else (reader.latest() or 0) >= newest
            for step in reader.steps():
                check(reader.restore(state(0), step), step)
            newest = max([newest, *reader.steps()])
    finally:
        zygote.kill()
        zygote.communicate()
    assert newest
