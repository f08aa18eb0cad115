"""Checkpoints under faults: changed bits are found, and a kill leaves the last complete checkpoint.

    python -m benchmarks.checkpoint_faults flips --times 50     # one bit, anywhere in any file
    python -m benchmarks.checkpoint_faults pairs --times 50     # two changes that cancel in a sum of words
    python -m benchmarks.checkpoint_faults kills --times 30     # kill -9 at a random moment of a save
    python -m benchmarks.checkpoint_faults kills --place s3     # the same in a bucket: an emulator on this machine

A change is found if `verify` names it, or a restore refuses. Changes that are not found are listed with the file, the
place, and whether a restore still returns the saved values, including changes of unused bytes. Exit code 1 if values
changed undetected, a kill cost a complete checkpoint, or the next run did not continue from the newest one.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import socket
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

_LEAVES = {"kernel": (512, 1024), "bias": (1024,), "table": (333, 40), "small": (8,), "half": (64, 96)}


def main() -> None:
    """Reads the command line and runs the request."""
    if sys.argv[1:2] == ["save"]:  # a process that is to be killed
        _save_on(*sys.argv[2:])
        return
    import jax

    jax.config.update("jax_num_cpu_devices", 8)
    warnings.simplefilter("ignore")
    parser = argparse.ArgumentParser(prog="python -m benchmarks.checkpoint_faults")
    parser.add_argument("what", choices=("flips", "pairs", "kills"))
    parser.add_argument("--times", type=int, default=30)
    parser.add_argument("--place", choices=("disk", "s3", "gs"), default="disk", help="of kills; extra `emulators`")
    parser.add_argument("--processes", type=lambda text: [int(n) for n in text.split(",")], default=[1, 2])
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    rng = random.Random(args.seed)
    with tempfile.TemporaryDirectory(dir=Path.home(), prefix=".jshard-faults-") as folder:
        if args.what == "kills":
            with _place(args.place, folder) as place:
                found = [_kills(f"{place}/{n}", n, args.times, rng) for n in args.processes]
            good = all(found)
        else:
            good = _changes(Path(folder) / "c", _one_bit if args.what == "flips" else _pair, args.times, rng)
    sys.exit(0 if good else 1)


def _state(step: int) -> dict[str, Any]:
    """Arrays on all devices, sharded along the first dim if it divides, and numbers."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax.sharding import Mesh, NamedSharding
    from jax.sharding import PartitionSpec as P

    mesh, draw = Mesh(np.array(jax.devices()), ("fsdp",)), np.random.default_rng(step)
    state: dict[str, Any] = {"step": step, "note": "text"}
    for name, shape in _LEAVES.items():
        array = draw.standard_normal(shape, dtype=np.float32)
        array = array.astype(jnp.bfloat16) if name == "half" else array
        sharding = NamedSharding(mesh, P("fsdp" if shape[0] % len(jax.devices()) == 0 else None))
        state[name] = jax.make_array_from_callback(shape, sharding, lambda box, array=array: array[box])
    return state


def _is_equal(found: Any, wanted: Any) -> bool:
    import jax
    import numpy as np

    alike = lambda a, b: np.asarray(a).tobytes() == np.asarray(b).tobytes()
    return all(jax.tree.leaves(jax.tree.map(alike, found, wanted)))


# Changed bytes.

_Change = Callable[[bytearray, random.Random], str]


def _one_bit(raw: bytearray, rng: random.Random) -> str:
    at, bit = rng.randrange(len(raw)), rng.randrange(8)
    raw[at] ^= 1 << bit
    return f"bit {bit} of byte {at} of {len(raw)}"


def _pair(raw: bytearray, rng: random.Random) -> str:
    """The same bit set in one word and cleared in another, or two words swapped: the sum of words stays the same."""
    while True:
        first, second = (8 * rng.randrange(len(raw) // 8) for _ in range(2))
        byte, bit = rng.randrange(8), rng.randrange(8)
        a, b = raw[first + byte] >> bit & 1, raw[second + byte] >> bit & 1
        if a != b:
            for at in (first, second):
                raw[at + byte] ^= 1 << bit
            return f"bit {bit} of bytes {first + byte} and {second + byte} of {len(raw)}"


def _changes(path: Path, change: _Change, times: int, rng: random.Random) -> bool:
    import jshard as js

    state = _state(1)
    js.checkpoint.save(path, state)
    files = sorted(file for file in path.rglob("*") if file.is_file() and file.stat().st_size >= 64)
    if change is _pair:  # within what large files hold: values, and what describes them
        files = [file for file in files if file.stat().st_size >= 4096]
    sizes = [file.stat().st_size for file in files]
    found, harmless, unseen = 0, [], []
    for number in range(times):
        file = rng.choice(files) if number % 2 else rng.choices(files, sizes)[0]  # small ones, too
        before = file.read_bytes()
        raw = bytearray(before)
        line = f"{file.relative_to(path)}: {change(raw, rng)}"
        file.write_bytes(raw)
        seen, is_equal = _look(path, state)
        if seen:
            found += 1
        else:
            (harmless if is_equal else unseen).append(line)
        file.write_bytes(before)
    print(f"found {found} of {times} in {len(files)} files", flush=True)
    for what, lines in (("not found, values equal", harmless), ("NOT FOUND, VALUES DIFFER", unseen)):
        for line in lines:
            print(f"{what}: {line}")
    assert _look(path, state) == (False, True)  # whole again
    return not unseen


def _look(path: Path, state: Any) -> tuple[bool, bool]:
    """Whether the change is found at all, and whether a restore returns the saved values."""
    import jshard as js
    from jshard.checkpoint.verifying import verify
    from jshard.errors import FourPartError

    try:
        if not verify(path).is_good:
            return True, False
        return False, _is_equal(js.checkpoint.restore(path, state), state)
    except FourPartError:
        return True, False


# Kills.


@contextlib.contextmanager
def _place(kind: str, folder: str) -> Iterator[str]:
    """The place of the checkpoints, which processes started inside the context can reach."""
    if kind == "disk":
        yield folder
    else:
        from tests.checkpoint.bucket_servers import serve

        with serve(kind) as server:
            yield server.url


def _save_on(folder: str, process: str, processes: str, coordinator: str) -> None:
    """Saves step after step, and prints when each begins."""
    import jax

    jax.config.update("jax_num_cpu_devices", 8 // int(processes))
    if int(processes) > 1:
        jax.distributed.initialize(coordinator, int(processes), int(process))
    from jshard.checkpoint import Checkpointer

    checkpoints = Checkpointer(folder, keep=2)
    step = (checkpoints.latest() or 0) + 1
    while True:
        state = _state(step)
        print("saving", step, flush=True)
        checkpoints.save(step, state)
        print("saved", step, flush=True)
        step += 1


def _kills(folder: str, processes: int, times: int, rng: random.Random) -> bool:
    """Each process continues the series of the previous one."""
    lost, hit, newest = [], 0, 0
    for number in range(times):
        first, latest, begun, save_s = _killed(folder, processes, rng)
        found = _after_a_kill(folder)
        hit += latest < begun  # it was in the middle of a save, not after it
        if first != newest + 1:
            lost.append(f"kill {number}: step {newest} was complete, and the next run began with step {first}")
        if found is None or found < latest:
            lost.append(f"kill {number}: complete was {latest}, and {found} is left")
        newest = found or 0
        steps = f"{latest} was saved, {begun} had begun, {found} is the newest"
        print(f"kill {number}: {steps}; a save takes {save_s:.2f} s", flush=True)
    print(f"{processes} processes: {times - len(lost)} of {times} kills left a good checkpoint; {hit} hit a save")
    print("\n".join(lost), flush=True)
    return not lost


def _killed(folder: str, processes: int, rng: random.Random) -> tuple[int, int, int, float]:
    """The first step, the last one known to be complete, the last one that had begun, and the seconds of a save."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        coordinator = f"localhost:{free.getsockname()[1]}"
    command = [sys.executable, "-W", "ignore", "-m", "benchmarks.checkpoint_faults", "save", folder]
    pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL, "text": True}
    running = [subprocess.Popen([*command, str(n), str(processes), coordinator], **pipes) for n in range(processes)]
    out = running[0].stdout
    assert out is not None
    try:
        first = _step_that_is(out, "saving")
        began_s = [time.monotonic() for _ in range(2) if _step_that_is(out, "saving")]
        time.sleep(rng.uniform(0.0, began_s[1] - began_s[0]))
        for process in rng.sample(running, rng.randint(1, processes)):
            process.kill()
        time.sleep(rng.choice((0.0, 1.0, 4.0)) if processes > 1 else 0.0)  # the other one works on for a while
    finally:
        for process in running:
            process.kill()
        for process in running:
            process.wait()
    left = [line.split()[:2] for line in out if line.startswith(("saving ", "saved "))]
    begun = max([first + 2, *(int(step) for what, step in left if what == "saving")])
    latest = max([first + 1, *(int(step) for what, step in left if what == "saved")])
    return first, latest, begun, began_s[1] - began_s[0]


def _step_that_is(out: Any, what: str) -> int:
    """The next step that a process reports; libraries print there, too."""
    return next(int(line.split()[1]) for line in out if line.startswith(f"{what} "))


def _after_a_kill(folder: str) -> int | None:
    """The newest step, if all existing ones are valid and have the saved values."""
    from jshard.checkpoint import Checkpointer
    from jshard.checkpoint.verifying import verify

    checkpoints = Checkpointer(folder, keep=2)
    for step in checkpoints.steps():
        state = _state(step)
        if not verify(checkpoints.path(step)).is_good or not _is_equal(checkpoints.restore(state, step), state):
            return None
    return checkpoints.latest()


if __name__ == "__main__":
    main()
