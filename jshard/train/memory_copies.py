"""Copies of the state in the memory of the supervisors, from which restarted workers continue.

Every so many steps each process copies its part of the state to the host and continues to train. A thread sends the
part to the keeper of its own supervisor and to that of a process on another machine, so that it survives the loss of
either. A copy is valid once all of its parts are stored; the previous one is kept until then. At a restart the workers
report which parts their keepers have, and read from them the boxes that their devices need, on any mesh.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import os
import secrets
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from jshard import launch
from jshard._processes import all_or_none, exchange
from jshard._text import human_bytes
from jshard.checkpoint import leaves as _leaves
from jshard.checkpoint import manifest as _manifest
from jshard.checkpoint.errors import reason, unreadable
from jshard.checkpoint.host_snapshot import Packing
from jshard.checkpoint.packed_reader import opened_parts
from jshard.checkpoint.restore_operation import RestoreOperation
from jshard.checkpoint.saving import TIMEOUT_S, give_memory_back
from jshard.errors import FourPartError, RunError, ShardingError
from jshard.launch.keeper import KeeperClient, KeptPart
from jshard.launch.peers import hostname

_END_S = 60.0  # at the end of a run, for a copy in progress


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Seat:
    """A process, its machine and its keeper, as announced to all others."""

    host: str
    address: str
    token: str
    run: str
    free_bytes: int
    held_bytes: int
    parts: list[KeptPart]


class MemoryCopies:
    """The copies of a run; all processes create it, and call its methods in the same order.

    Args:
        every: steps from one copy to the next.
        like: the abstract state, to be restored into.
        say: prints a line.

    Raises:
        ShardingError: the interval is not valid, a process has no keeper, or a machine has no room for the copies.
        RunError: a keeper does not answer.
    """

    def __init__(self, every: int, like: Mapping[str, Any], say: Callable[[str], object]) -> None:
        _check_every(every)
        self.every, self._like, self._say = every, like, say
        self._seats = _meet()
        me = jax.process_index()
        partners = neighbours([(seat.host, seat.address) for seat in self._seats])
        part_bytes = _state_bytes(like) // len(self._seats) + 1
        _check_room(self._seats, partners, part_bytes, every)
        client = lambda process: KeeperClient(self._seats[process].address, self._seats[process].token)
        self._clients = {seat.address: client(process) for process, seat in enumerate(self._seats)}
        addresses = dict.fromkeys(self._seats[process].address for process in (me, partners[me]))
        self._targets = [self._clients[address] for address in addresses]
        self._run = self._seats[0].run
        self._kept: tuple[str, int] | None = None
        self._thread: threading.Thread | None = None
        self._problem = self._said = ""
        other, size = self._seats[partners[me]], human_bytes(part_bytes, 1)
        beside = "" if partners[me] == me else f" and of that of process {partners[me]} on {other.host}"
        say(f"copies in memory: every {every} steps, {size} a process, in the memory of its supervisor{beside}")

    def restore(self, *, newer_than: int | None) -> dict[str, Any] | None:
        """The state of the newest complete copy; None without one, or if none is newer than the step on disk."""
        for run, step in self._whole():
            if newer_than is None or step > newer_than:
                try:
                    restored = self._read(run, step)
                except FourPartError as error:
                    self._say(f"the copy in memory of step {step} is not used: {error.why}")
                else:
                    self._kept = run, step
                    launch.note(copy=step)
                    return restored
        return None

    def keep(self, state: Mapping[str, Any], step: int, *, before: Callable[[], None]) -> None:
        """Starts to copy a state; when it returns, the next step may overwrite it.

        Args:
            state: with the values.
            step: number of completed steps.
            before: called in the thread before the copy becomes valid.
        """
        self.wait()
        packing = Packing(state, step=step)
        self._thread = threading.Thread(
            target=self._send, args=(packing, step, before), daemon=True, name="jshard-copy"
        )
        self._thread.start()

    def wait(self, timeout_s: float | None = None) -> None:
        """Waits until no copy is in progress, and reports a problem with the copies once."""
        if self._thread is not None:
            self._thread.join(timeout_s)
        if self._problem != self._said:
            self._said = self._problem
            self._say(self._problem or "copies in memory work again")

    def close(self) -> None:
        """Closes the connections, once no copy is in progress."""
        self.wait(_END_S)
        for client in self._clients.values():
            client.close()

    def _send(self, packing: Packing, step: int, before: Callable[[], None]) -> None:
        """Sends the part of this process to its keepers, and learns the results of the others."""
        why = None
        try:
            part, pieces = self._name(step), packing.finish()
            for target in self._targets:
                target.put(part, pieces, beside=self._kept)
            before()
            del pieces
        except Exception as error:
            why = reason(error)
        del packing
        give_memory_back()
        try:
            heard = exchange("copy in memory", why, timeout_s=TIMEOUT_S)
            failures = [f"process {process}: {each}" for process, each in enumerate(heard) if each is not None]
            if not failures:
                self._kept = self._run, step
                launch.note(copy=step)
                for target in self._targets:
                    target.forget_before(*self._kept)
        except (OSError, RunError) as error:
            failures = [error.why if isinstance(error, RunError) else str(error)]
        kept = f"that of step {self._kept[1]} stays" if self._kept else "there is no earlier one"
        self._problem = f"a copy could not be kept in memory ({kept}): {'; '.join(failures)}" if failures else ""

    def _name(self, step: int) -> KeptPart:
        return KeptPart(self._run, step, jax.process_index(), len(self._seats))

    def _whole(self) -> list[tuple[str, int]]:
        """Run and step of the complete copies, newest first; the same in all processes."""
        found = collections.defaultdict(set)
        for part in (part for seat in self._seats for part in seat.parts):
            found[part.step, part.run, part.of].add(part.process)
        whole = [(step, run) for (step, run, of), there in found.items() if there >= set(range(of))]
        return [(run, step) for step, run in sorted(whole, reverse=True)]

    def _read(self, run: str, step: int) -> dict[str, Any]:
        opened, error = None, None
        name = Path(f"copy in memory of step {step}")
        try:
            opened = opened_parts(name, [self._reader(part) for part in self._parts(run, step)])
        except Exception as caught:
            error = caught if isinstance(caught, FourPartError) else unreadable(name, reason(caught))
        why = lambda failures: "\n".join(f"process {number}: {parts['why']}" for number, parts in failures.items())
        failed = lambda failures: unreadable(name, why(failures))
        all_or_none(str(name), None, error, failed=failed, timeout_s=TIMEOUT_S)
        assert opened is not None
        return RestoreOperation(opened, self._like).run(verify=True, timeout_s=TIMEOUT_S)

    def _parts(self, run: str, step: int) -> list[KeptPart]:
        return sorted({part for seat in self._seats for part in seat.parts if (part.run, part.step) == (run, step)})

    def _reader(self, part: KeptPart) -> Callable[[int, int], bytearray]:
        """Reads a part from the nearest keeper that has it."""
        me = self._seats[jax.process_index()]
        holders = [seat for seat in self._seats if part in seat.parts]
        nearest = min(holders, key=lambda seat: (seat.address != me.address, seat.host != me.host))
        return functools.partial(self._clients[nearest.address].read, part)


def neighbours(places: Sequence[tuple[str, str]]) -> list[int]:
    """The process whose keeper has the second copy of each process's part: on the next machine, in turn.

    If all are on one machine, each keeper is treated as one, as in tests; with one keeper each process is its own.

    Args:
        places: machine and address of the keeper of every process.
    """
    is_spread = len({host for host, _ in places}) > 1
    machines: dict[str, list[int]] = {}
    for process, (host, address) in enumerate(places):
        machines.setdefault(host if is_spread else address, []).append(process)
    members, found = list(machines.values()), {}
    for here, there in zip(members, members[1:] + members[:1], strict=True):
        found |= {process: there[rank % len(there)] for rank, process in enumerate(here)}
    return [found[process] for process in range(len(places))]


def _check_every(every: int) -> None:
    if every < 1:
        raise ShardingError(
            "The interval of the copies in memory is not valid.",
            where=f"--keep-in-memory {every}",
            why="it is the number of steps from one copy to the next, 1 or more.",
            do="--keep-in-memory 100",
        )


def _meet() -> list[_Seat]:
    """Every process announces the address and contents of its keeper."""
    keeper, error, seat = KeeperClient.of_supervisor(os.environ), None, None
    if keeper is not None:
        try:
            parts, held_bytes = keeper.parts()
            keeper.close()
            seat = _Seat(
                host=hostname(),
                address=keeper.address,
                token=keeper.token,
                run=secrets.token_hex(8),
                free_bytes=free_bytes(),
                held_bytes=held_bytes,
                parts=parts,
            )
        except (OSError, ValueError, KeyError) as caught:
            error = RunError(
                "The keeper of the copies in memory does not answer.",
                where=keeper.address,
                why=str(caught),
                do="start the run again; the keeper is part of the supervisor, which starts the workers.",
            )
    else:
        error = ShardingError(
            "Copies in memory need a supervisor.",
            where="--keep-in-memory",
            why="they are for workers that are restarted, and this process has no supervisor to restart it.",
            do="--keep-in-memory 100 --max-restarts 3",
        )
    given = None if seat is None else dataclasses.asdict(seat)
    heard = all_or_none("keepers", given, error, failed=_of_another)
    return [_Seat(**fields | {"parts": [KeptPart(**part) for part in fields["parts"]]}) for fields in heard]


def _of_another(failures: Mapping[int, Mapping[str, Any]]) -> FourPartError:
    number, parts = min(failures.items())
    kind = ShardingError if parts["is_request"] else RunError
    return kind(parts["what"], where=[*parts["where"], f"process {number}"], why=parts["why"], do=parts["do"])


def _state_bytes(like: Mapping[str, Any]) -> int:
    return sum(_manifest.describe(leaf).nbytes for leaf in _leaves.flatten(like).values())


def _check_room(seats: Sequence[_Seat], partners: Sequence[int], part_bytes: int, every: int) -> None:
    """Compares, for each machine, the free memory with that of the copies while a new one replaces an old one."""
    for host in dict.fromkeys(seat.host for seat in seats):
        here = [seat for seat in seats if seat.host == host]
        guests = sum(seats[p].host == host for process, p in enumerate(partners) if p != process)
        held_bytes = sum({seat.address: seat.held_bytes for seat in here}.values())
        free = min(seat.free_bytes for seat in here) + held_bytes
        needed = part_bytes * (3 * len(here) + 2 * guests)
        if needed > free:
            raise ShardingError(
                "There is no room for the copies in memory.",
                where=[f"--keep-in-memory {every}", f"{host}, with {len(here)} of {len(seats)} processes"],
                why=f"{human_bytes(needed, 1)} are needed: the part of a process has {human_bytes(part_bytes, 1)}; of "
                f"{len(here) + guests} the new one is kept beside the old, and {len(here)} are on their way; "
                f"{human_bytes(free, 1)} of memory are free.",
                do="leave out --keep-in-memory, and save more often: --set checkpoint_every=100",
            )


# Memory that is free.

_UNKNOWN_BYTES = 1 << 40


def free_bytes(root: Path = Path("/")) -> int:
    """Memory that could be allocated: that of the system, or less if a container or a job has a limit.

    A large number if it is not known; `root` is the root of the file system that reports it.
    """
    return max(0, min((_available(root), *_left_in_groups(root))))


def _available(root: Path) -> int:
    with contextlib.suppress(OSError, ValueError, StopIteration):
        lines = (root / "proc/meminfo").read_text().splitlines()
        return 1024 * int(next(line.split()[1] for line in lines if line.startswith("MemAvailable:")))
    return _UNKNOWN_BYTES


def _left_in_groups(root: Path) -> Iterator[int]:
    """The memory left within the limits of this process's control groups."""
    with contextlib.suppress(OSError):
        top = root / "sys/fs/cgroup"
        for line in (root / "proc/self/cgroup").read_text().splitlines():
            _, kinds, path = line.split(":", 2)
            if kinds in ("", "memory"):
                own = (top / kinds / path.lstrip("/")).resolve()
                groups = [group for group in (own, *own.parents) if group.is_relative_to((top / kinds).resolve())]
                for group in groups:
                    yield from _left(group, *(_V1 if kinds else _V2))


_V2 = ("memory.max", "memory.current", "inactive_file")
_V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")


def _left(group: Path, limit: str, used: str, cache: str) -> Iterator[int]:
    with contextlib.suppress(OSError, ValueError):  # a group may have no limit: "max"
        left = int((group / limit).read_text()) - int((group / used).read_text())
        for line in (group / "memory.stat").read_text().splitlines():
            name, _, size = line.partition(" ")
            left += int(size) if name == cache else 0  # freed on demand
        yield left
