"""Whatever the files of a checkpoint hold, reading them ends soon and in little memory: a value, or a clear error."""

import contextlib
import dataclasses
import json
import os
import pickle
import random
import resource
import shutil
import signal
import statistics
import struct
import time
import warnings
import zipfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import save_file

from jshard import checkpoint
from jshard.checkpoint.formats import DcpSource
from jshard.checkpoint.formats.torch_pickle import PLAIN, load
from jshard.checkpoint.lookup import steps_in
from jshard.checkpoint.readers import open_checkpoint
from jshard.checkpoint.series import history, timeline
from jshard.checkpoint.series.store import store_of
from jshard.cli import main
from jshard.cli.ckpt import inspect as inspect_command
from jshard.cli.ckpt import timeline as cli_timeline
from jshard.errors import FourPartError, RunError
from tests.checkpoint import torch_fixture
from tests.checkpoint.dcp_fixture import split, write_dcp
from tests.checkpoint.test_checkpoint_zero import write as write_zero

MOST_BYTES = 1 << 30  # of address space, in addition to what the process has
MOST_S = 10.0


class TooLongError(BaseException):
    """Reading did not end. Not an `Exception`, which a reader may catch."""


@contextlib.contextmanager
def bounded() -> Iterator[None]:
    """Ends what takes more memory or time than a small checkpoint can need."""

    def ring(*_: object) -> None:
        raise TooLongError

    before = resource.getrlimit(resource.RLIMIT_AS)
    held = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    old = signal.signal(signal.SIGALRM, ring)
    resource.setrlimit(resource.RLIMIT_AS, (held + MOST_BYTES, before[1]))
    signal.setitimer(signal.ITIMER_REAL, MOST_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        resource.setrlimit(resource.RLIMIT_AS, before)
        signal.signal(signal.SIGALRM, old)


# The kinds of checkpoints.


def read_all(folder: Path) -> Any:
    opened = open_checkpoint(folder)
    arrays = {}
    for name, leaf in opened.arrays.items():
        array = opened.read(name, tuple(slice(0, size) for size in leaf.shape))
        arrays[name] = array.shape, array.dtype.name, array.tobytes()
    return arrays, opened.values()


def write_own(folder: Path) -> None:
    state = {"w": jnp.arange(600.0).reshape(20, 30), "b": jnp.ones(7, jnp.bfloat16), "step": 7, "text": "a position"}
    checkpoint.save(folder, state)


def write_safetensors(folder: Path) -> None:
    folder.mkdir()
    save_file({"a": np.ones((3, 4), np.float32)}, folder / "model-00001-of-00002.safetensors")
    save_file({"b": np.arange(5)}, folder / "model-00002-of-00002.safetensors")
    files = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    index = {"metadata": {"total_size": 88}, "weight_map": files}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def write_torch(folder: Path) -> None:
    write_dcp(folder, {"w": split(np.arange(60.0).reshape(12, 5), 2), "b": split(np.ones(3), 1)}, {"step": 3})


def write_torch_file(folder: Path) -> None:
    folder.mkdir()
    torch_fixture.save(folder / "pytorch_model.bin", {"model": {"w": np.ones((3, 4), np.float32)}, "step": 3})


def write_torch_legacy(folder: Path) -> None:
    folder.mkdir()
    torch_fixture.save_legacy(folder / "pytorch_model.bin", {"model": {"w": np.ones((3, 4), np.float32)}, "step": 3})


def write_torch_ranks(folder: Path) -> None:
    folder.mkdir()
    rows = torch_fixture.placed("Shard", dim=0)
    for rank in range(2):
        local = np.ones((2, 3), np.float32) * rank
        state = {"w": torch_fixture.dtensor(local, (4, 3), [rows], (2,), (rank,)), "step": 3}
        torch_fixture.save(folder / f"rank_{rank}.pt", state)


def write_orbax(folder: Path) -> None:
    from orbax.checkpoint import v1 as ocp

    ocp.save(folder, {"w": np.arange(6.0), "step": 3})


def write_series(folder: Path) -> None:
    with checkpoint.Checkpointer(folder) as series:
        series.save(3, {"w": np.arange(4.0)})


def read_series(folder: Path) -> Any:
    store = store_of(folder)
    steps = steps_in(folder)
    damage = [store.damage(step) for step in steps]
    metrics = [dict(store.metrics(step)) for step in steps]
    return steps, damage, metrics, store.begun(), [line.step for line in timeline.timelines(folder)]


@dataclasses.dataclass(frozen=True)
class Kind:
    """A kind of checkpoint.

    `is_sealed`: whether any change by accident is found, so that a value that is read is the one that was written.
    """

    write: Callable[[Path], None]
    read: Callable[[Path], Any] = read_all
    is_sealed: bool = False


KINDS = {
    "own": Kind(write_own, is_sealed=True),
    "safetensors": Kind(write_safetensors),
    "torch": Kind(write_torch),
    "torch file": Kind(write_torch_file),
    "torch legacy": Kind(write_torch_legacy),
    "torch ranks": Kind(write_torch_ranks),
    "deepspeed": Kind(write_zero),
    "orbax": Kind(write_orbax),
    "series": Kind(write_series, read_series),
}


# Damage. Each takes the files and a random generator, and changes one of them.


def flip(files: list[Path], draw: random.Random) -> None:
    path = draw.choice(files)
    content = bytearray(path.read_bytes())
    for _ in range(draw.choice([1, 1, 3])):
        if content:
            # Most of a file is numbers; what describes them is at its ends.
            near = draw.choice([len(content), min(len(content), 300)])
            place = draw.choice([draw.randrange(near), -1 - draw.randrange(near)])
            content[place] = draw.choice([content[place] ^ 1 << draw.randrange(8), 0, 255, draw.randrange(256)])
    path.write_bytes(content)


def truncate(files: list[Path], draw: random.Random) -> None:
    path = draw.choice(files)
    os.truncate(path, draw.randrange(path.stat().st_size + 1))


def grow(files: list[Path], draw: random.Random) -> None:
    path = draw.choice(files)
    os.truncate(path, draw.choice([path.stat().st_size + 1, 1 << 40]))


def delete(files: list[Path], draw: random.Random) -> None:
    draw.choice(files).unlink()


def swap(files: list[Path], draw: random.Random) -> None:
    one, other = draw.choice(files), draw.choice(files)
    content = one.read_bytes()
    one.write_bytes(other.read_bytes())
    other.write_bytes(content)


def no_file(files: list[Path], draw: random.Random) -> None:
    path = draw.choice(files)
    path.unlink()
    make = draw.choice([os.mkfifo, Path.mkdir, lambda path: path.symlink_to("/dev/zero")])
    make(path)


ACCIDENTS = (flip, truncate, grow, delete, swap)

ODD = (
    None,
    True,
    -1,
    0,
    1,
    2**40,
    2**62,
    2**70,
    1.5,
    1e308,
    float("nan"),
    "",
    "..",
    "../../x",
    "/etc/passwd",
    "\x1b[2J",
)
ODD_MORE = ("x" * 1000, [], {}, [[]], [-1], [2**40, 2**40], {"a": {"b": []}}, "int4", "float32", "object", "V100000000")


def edited(value: Any, draw: random.Random) -> Any:
    """A JSON value with one of its nodes replaced or removed."""
    if isinstance(value, str) and value.startswith("{"):
        return json.dumps(edited(json.loads(value), draw))
    if isinstance(value, dict | list) and value and draw.random() < 0.85:
        key = draw.choice(sorted(value) if isinstance(value, dict) else range(len(value)))
        changed = value.copy()
        if draw.random() < 0.1:
            del changed[key]
        elif isinstance(value, dict) and draw.random() < 0.1:
            changed[str(draw.choice(ODD))] = changed.pop(key)
        else:
            changed[key] = edited(value[key], draw)
        return changed
    return draw.choice(ODD + ODD_MORE)


def edit_json(files: list[Path], draw: random.Random) -> None:
    """Another value somewhere, under a right checksum: somebody wrote it on purpose."""
    texts = [path for path in files if path.read_bytes()[:1] == b"{"]
    headers = [path for path in files if path.suffix == ".safetensors" and path.parent.name != "arrays"]
    if not texts and not headers:
        return flip(files, draw)
    path = draw.choice([*texts, *headers])
    if path in headers:
        content = path.read_bytes()
        size = int.from_bytes(content[:8], "little")
        text = json.dumps(edited(json.loads(content[8 : 8 + size]), draw)).encode()
        path.write_bytes(len(text).to_bytes(8, "little") + text + content[8 + size :])
        return None
    value = edited(json.loads(path.read_text()), draw)
    if isinstance(value, dict) and isinstance(value.get("seal"), str):
        value["crc32"] = zlib.crc32(value["seal"].encode())
    path.write_text(json.dumps(value))
    return None


HOSTILE = (*ACCIDENTS, no_file, edit_json, edit_json)


@dataclasses.dataclass
class Outcome:
    """What became of the damaged copies of a kind."""

    values: int = 0
    errors: int = 0
    longest_s: float = 0.0


def fuzz(kind: Kind, base: Path, *, seed: int, count: int) -> Outcome:
    """Reads damaged copies of a checkpoint; the folder may not be used afterwards."""
    outcome = Outcome()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        right = kind.read(base)
        for number in range(count):
            draw = random.Random(f"{seed} {number}")
            copy = base.with_name("damaged")
            shutil.copytree(base, copy)
            files = sorted(path for path in copy.rglob("*") if path.is_file())
            damage = draw.choice(HOSTILE)
            damage(files, draw)
            begin_s = time.perf_counter()
            try:
                with bounded():
                    value = kind.read(copy)
            except FourPartError:
                outcome.errors += 1
            except BaseException as error:
                error.add_note(f"seed {seed}, number {number}: {damage.__name__}")
                raise
            else:
                outcome.values += 1
                if kind.is_sealed and damage in ACCIDENTS:
                    assert value == right, (seed, number, damage.__name__)
            outcome.longest_s = max(outcome.longest_s, time.perf_counter() - begin_s)
            shutil.rmtree(copy)
    return outcome


@pytest.mark.parametrize("name", KINDS)
def test_a_damaged_checkpoint_is_an_error_in_four_parts_or_reads_alike(name, tmp_path):
    kind = KINDS[name]
    kind.write(tmp_path / "c")
    count = 6 if name == "orbax" else 30
    outcome = fuzz(kind, tmp_path / "c", seed=0, count=count)
    assert outcome.values + outcome.errors == count


@pytest.mark.wide
@pytest.mark.parametrize("name", KINDS)
def test_hundreds_of_damaged_checkpoints(name, tmp_path):
    kind = KINDS[name]
    kind.write(tmp_path / "c")
    count = 30 if name == "orbax" else 250
    outcome = fuzz(kind, tmp_path / "c", seed=1, count=count)
    assert outcome.values + outcome.errors == count


# Pickles that are made to take memory or time.


def doubled(count: int) -> bytes:
    """A tuple of a tuple of a tuple, each twice in the next, by the memo."""
    steps = b"K\x01\x85q\x000"
    for number in range(count):
        steps += b"h" + bytes([number]) + b"h" + bytes([number]) + b"\x86q" + bytes([number + 1]) + b"0"
    return steps + b"h" + bytes([count])


DEEP = b"K\x01" + b"\x85" * 200_000
LONG_LIST = b"](" + b"N" * 100_000 + b"eq\x000"
SIZE = b"ctorch\nSize\nq\x010"
ENCODE = b"c_codecs\nencode\nq\x010"
BOMBS = {
    "memo of gigabytes": b"\x80\x02K\x01r" + struct.pack("<I", 2**30) + b".",
    "hash of nested tuples": b"\x80\x02}" + doubled(60) + b"K\x01s.",
    "hash of a deep tuple": b"\x80\x02}" + DEEP + b"K\x01s.",
    "set of nested tuples": b"\x80\x04\x8f(" + doubled(60) + b"\x90.",
    "frozen set of nested tuples": b"\x80\x04(" + doubled(60) + b"\x91.",
    "dict of nested tuples": b"\x80\x02(" + doubled(60) + b"K\x01d.",
    "call of set": b"\x80\x02cbuiltins\nset\n](" + doubled(60) + b"e\x85R.",
    "text of nested tuples as a size": b"\x80\x02ctorch\ndevice\n" + doubled(60) + b"R.",
    "copies of a long list": b"\x80\x02" + LONG_LIST + SIZE + b"(" + b"h\x01h\x00\x85R" * 30_000 + b"t.",
    "copies of a long text": b"\x80\x02X"
    + struct.pack("<I", 10**6)
    + b"a" * 10**6
    + b"q\x000"
    + ENCODE
    + b"("
    + b"h\x01h\x00X\x06\x00\x00\x00latin1\x86R" * 100_000
    + b"t.",
    "bytes of gigabytes": b"\x80\x04\x8e" + struct.pack("<Q", 2**40) + b".",
    "bytearray of gigabytes": b"\x80\x05\x96" + struct.pack("<Q", 2**40) + b".",
    "frame of gigabytes": b"\x80\x04\x95" + struct.pack("<Q", 2**40) + b"N.",
    "a dict of itself": b"\x80\x02}q\x00K\x01h\x00s.",
    "an integer of a million digits as a key": b"\x80\x02}\x8b" + struct.pack("<i", 10**6) + b"\x7f" * 10**6 + b"Ns.",
    "a decimal of a million digits": b"\x80\x02L" + b"7" * 10**6 + b"L\n.",
    "many marks": b"\x80\x02" + b"(" * 200_000 + b".",
    "nothing": b"",
}


@pytest.mark.parametrize("name", BOMBS)
def test_a_pickle_takes_memory_and_time_in_proportion_to_its_size(name, tmp_path):
    with bounded(), contextlib.suppress(RunError):
        load(BOMBS[name], PLAIN, tmp_path)
    (tmp_path / ".metadata").write_bytes(BOMBS[name])
    with bounded(), pytest.raises(FourPartError):
        DcpSource(tmp_path)


def test_values_that_pickles_of_pytorch_hold_are_read(tmp_path):
    value = {
        "a": [1, 2.5, None, True, "x" * 300, b"y", bytearray(b"z"), 2**100],
        3: ({"k"}, frozenset([1, "b"])),
        (1, "a"): {},
    }
    for protocol in range(6):
        plain = value if protocol == 5 else {"a": value["a"][:5], 3: ({"k"},)}
        assert load(pickle.dumps(plain, protocol), PLAIN, tmp_path) == plain


# Values under a right checksum, which somebody wrote on purpose.

TOO_DEEP = "a/" * 20_000 + "x"
FIELDS = {
    "dtype": lambda body: body["leaves"]["w"].update(dtype="," * 1000),
    "structure": lambda body: body["leaves"]["w"].update(dtype="i4,f4"),
    "objects": lambda body: body["leaves"]["w"].update(dtype="object"),
    "mesh": lambda body: body.update(mesh=[1, 2]),
    "degree": lambda body: body.update(mesh={"fsdp": "two"}),
    "moment": lambda body: body.update(saved_at=1e300),
    "moment as text": lambda body: body.update(saved_at="now"),
    "no moment": lambda body: body.update(saved_at=float("nan")),
    "processes": lambda body: body.update(processes="two"),
    "versions": lambda body: body.update(versions=["jshard"]),
    "metric": lambda body: body.update(metrics={"loss": 10**400}),
    "step": lambda body: body.update(step=10**400),
    "surrogates": lambda body: body.update(files={"\ud800": [10, 3]}),
    "depth": lambda body: body["leaves"].update({TOO_DEEP: body["leaves"].pop("b")}),
}


def write_changed(folder: Path, change: Callable[[Any], object]) -> None:
    """Writes a checkpoint whose manifest was edited, with the checksum of the edited one."""
    write_own(folder)
    manifest = json.loads((folder / "jshard.json").read_text())
    body = json.loads(manifest["seal"])
    change(body)
    seal = json.dumps(body)
    (folder / "jshard.json").write_text(json.dumps({"crc32": zlib.crc32(seal.encode()), "seal": seal}))


@pytest.mark.parametrize("name", FIELDS)
def test_a_field_of_a_manifest_of_any_type_is_an_error_in_four_parts(name, tmp_path, capsys):
    write_changed(tmp_path / "c", FIELDS[name])
    assert main(["ckpt", "inspect", str(tmp_path / "c")]) == 1
    assert main(["ckpt", "ls", str(tmp_path / "c")]) in (0, 1)
    with pytest.raises(FourPartError):
        checkpoint.restore(tmp_path / "c", like={"w": jnp.zeros((20, 30))}, extra="ignore")
    assert "Traceback" not in capsys.readouterr().err


def test_a_metric_may_be_nan(tmp_path, capsys):
    write_changed(tmp_path / "c", lambda body: body.update(metrics={"loss": float("nan")}))
    assert main(["ckpt", "inspect", str(tmp_path / "c")]) == 0
    assert "loss nan" in capsys.readouterr().out


def test_inspect_shows_names_of_any_form(tmp_path, capsys):
    deep = "a." * 500 + "x"
    digits = "h." + "9" * 5000
    names = [deep, digits, "h.2", "b", "b.c", "b.c.d", ""]
    save_file({name: np.ones(2, np.float32) for name in names}, tmp_path / "m.safetensors")
    assert main(["ckpt", "inspect", str(tmp_path / "m.safetensors")]) == 0
    assert f"{len(names)} leaves" in capsys.readouterr().out


def test_a_name_of_thousands_of_keys_is_an_error_in_four_parts(tmp_path):
    save_file({"a." * 20_000 + "x": np.ones(2, np.float32)}, tmp_path / "m.safetensors")
    with pytest.raises(RunError, match="thousands of keys"):
        open_checkpoint(tmp_path / "m.safetensors")


def test_inspect_shows_thousands_of_rows_and_counts_the_others(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(inspect_command, "_MOST_ROWS", 3)
    save_file({f"{letter}.w": np.ones(2, np.float32) for letter in "abc"}, tmp_path / "m.safetensors")
    assert main(["ckpt", "inspect", str(tmp_path / "m.safetensors")]) == 0
    shown = capsys.readouterr().out
    assert "3 rows more" in shown and "3 leaves" in shown


def itself() -> Any:
    content: dict[str, Any] = {"a": [1]}
    content["a"].append(content)
    return content


def twice_in_the_next() -> Any:
    content: Any = [1]
    for _ in range(60):
        content = [content, content]
    return {"a": content}


def in_many_lists() -> Any:
    content: Any = [1]
    for _ in range(200):
        content = [content]
    return {"a": content}


@pytest.mark.parametrize("make", [itself, twice_in_the_next, in_many_lists])
def test_values_in_a_pytorch_file_are_counted_before_they_are_named(make, tmp_path):
    path = tmp_path / "m.pt"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("m/data.pkl", pickle.dumps(make(), protocol=2))
    with bounded(), pytest.raises(RunError, match="damaged"):
        open_checkpoint(path)


def test_values_in_many_places_of_a_pytorch_file_are_read(tmp_path):
    betas = [0.9, 0.999]
    path = tmp_path / "m.pt"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("m/data.pkl", pickle.dumps({"groups": [{"betas": betas} for _ in range(100)]}, protocol=2))
    assert open_checkpoint(path).values()["groups/99/betas/1"] == 0.999


def test_a_path_that_cannot_be_looked_at_is_an_error_in_four_parts(tmp_path):
    with pytest.raises(FourPartError, match="ENAMETOOLONG"):
        checkpoint.restore(tmp_path / ("x" * 300), like={"a": 0})


def test_a_link_that_leads_nowhere_is_an_error_in_four_parts(tmp_path):
    (tmp_path / "model.safetensors").symlink_to("model.safetensors")
    with pytest.raises(RunError, match="ELOOP"):
        checkpoint.restore(tmp_path, like={"a": 0})


def test_a_line_of_hundreds_of_phases_is_left_out_of_the_timeline(tmp_path):
    process = {"process": 0, "host": "a", "began_at": 1.0, "bytes": 1}
    process["phases"] = [[f"phase {number}", 0, 1] for number in range(300)]
    line = {"kind": "save", "step": 1, "began_at": 1.0, "processes": [process]}
    (tmp_path / "history.jsonl").write_text(json.dumps(line) + "\n")
    said: list[str] = []
    assert timeline.timelines(tmp_path, said.append) == []
    assert "1 lines" in said[0]


def test_the_slowest_of_thousands_of_processes_is_named_soon(tmp_path):
    def row(number: int, begin: float, end: float) -> Any:
        phases = [["write", begin, end]]
        return {"process": number, "host": "a", "began_at": 1.0, "bytes": 1, "phases": phases}

    rows = [row(number, 0.0, 1.0) for number in range(20_000)]
    rows[7] = row(7, 0.0, 5.0)
    line = {"kind": "save", "step": 1, "began_at": 1.0, "processes": rows}
    (tmp_path / "history.jsonl").write_text(json.dumps(line) + "\n")
    with bounded():
        slowest = timeline.timelines(tmp_path)[0].slowest
    assert slowest is not None
    assert (slowest.process, slowest.phase, slowest.median_s) == (7, "write", 1.0)


@pytest.mark.parametrize("values", [[3.0, 1.0], [3.0, 1.0, 2.0], [1.0, 1.0, 5.0, 2.0]])
def test_the_median_of_the_others_is_that_of_statistics(values):
    for number, value in enumerate(values):
        others = values[:number] + values[number + 1 :]
        assert timeline._median_without(sorted(values), value) == statistics.median(others)


def test_the_timeline_of_many_processes_counts_those_that_it_leaves_out(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(cli_timeline, "_MOST_ROWS", 2)
    row = {"host": "a", "began_at": 1.0, "bytes": 1, "phases": [["write", 0, 1]]}
    rows = [row | {"process": number} for number in range(5)]
    line = {"kind": "save", "step": 1, "began_at": 1.0, "processes": rows}
    (tmp_path / "history.jsonl").write_text(json.dumps(line) + "\n")
    assert main(["ckpt", "timeline", str(tmp_path)]) == 0
    assert "3 processes more" in capsys.readouterr().out


def test_a_history_of_millions_of_lines_is_read_soon(tmp_path):
    (tmp_path / "history.jsonl").write_bytes(b"\r" * 3_000_000 + b"\n" * 3_000_000 + b'{"step": 1}\n')
    said: list[str] = []
    with bounded():
        assert history.read(tmp_path, said.append) == [{"step": 1}]
    assert "oldest" in said[0]


def test_a_config_of_huge_numbers_is_shown(tmp_path, capsys):
    save_file({"w": np.ones(2, np.float32)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "rms_norm_eps": 10**400}))
    assert main(["ckpt", "inspect", str(tmp_path)]) == 0
    assert "Traceback" not in capsys.readouterr().err
