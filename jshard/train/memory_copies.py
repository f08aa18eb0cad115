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
from typing import NamedTuple

import jax

from jshard import launch
from jshard._processes import all_or_none, exchange
from jshard._text import human_bytes
from jshard._types import PyTree
from jshard.checkpoint import manifest as _manifest
from jshard.checkpoint.errors import reason, unreadable
from jshard.checkpoint.packed.host_snapshot import Packing
from jshard.checkpoint.packed_reader import opened_parts
from jshard.checkpoint.restore_operation import RestoreOperation
from jshard.checkpoint.saving import TIMEOUT_S, give_memory_back
from jshard.checkpoint.state import leaves as _leaves
from jshard.errors import FourPartError, RunError, ShardingError
from jshard.launch.keeper import KeeperClient, KeptPart
from jshard.launch.peers import hostname
from jshard.train.run_folder import Failures

_END_S = 60.0  # at the end of a run, for a copy in progress


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Seat:
    """A process, its machine and its keeper, as announced to all others.

    Attributes:
        host: the machine of the process.
        address: of its keeper.
        token: of its keeper.
        run: the name of the parts of this start of the workers, if it is that of the first process.
        free_bytes: the memory that its machine has left.
        held_bytes: the memory that the parts in its keeper take.
        parts: the parts in its keeper.
    """

    host: str
    address: str
    token: str
    run: str
    free_bytes: int
    held_bytes: int
    parts: list[KeptPart]


class _MemoryCopy(NamedTuple):
    """A copy of the state: the start of the workers that made it, and the number of completed steps."""

    run: str
    step: int


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

    def __init__(self, every: int, like: Mapping[str, object], say: Callable[[str], object]) -> None:
        _check_every(every)
        self.every = every
        self._like = like
        self._say = say
        self._seats = _announce_seats()
        process = jax.process_index()
        partners = neighbours([(seat.host, seat.address) for seat in self._seats])
        # Rounded up. An estimate: each process has its share of the state.
        part_bytes = _state_bytes(like) // len(self._seats) + 1
        _check_room(self._seats, partners, part_bytes, every)
        # One for each keeper: several processes may have the same one.
        self._clients = {seat.address: KeeperClient(seat.address, seat.token) for seat in self._seats}
        self._seat = self._seats[process]
        partner = self._seats[partners[process]]
        # Each once: the partner of a process that is alone is the process itself.
        targets = dict.fromkeys([self._seat.address, partner.address])
        self._targets = [self._clients[address] for address in targets]
        self._run = self._seats[0].run  # the same word for all parts of a copy
        self._newest: _MemoryCopy | None = None
        self._thread: threading.Thread | None = None
        # Written by the thread; `wait` reports it.
        self._problem = ""
        self._reported_problem = ""
        places = "its supervisor"
        if partners[process] != process:
            places += f" and of that of process {partners[process]} on {partner.host}"
        say(f"copies in memory: every {every} steps, {human_bytes(part_bytes, 1)} a process, in the memory of {places}")

    def restore(self, *, newer_than: int | None) -> dict[str, PyTree] | None:
        """Returns the state of the newest complete copy; None if there is none that is newer than the step on disk."""
        # All processes try the same copies in the same order: reading one needs all of them.
        for copy in self._complete_copies():
            if newer_than is not None and copy.step <= newer_than:
                continue
            try:
                state = self._read(copy)
            except FourPartError as error:
                self._say(f"the copy in memory of step {copy.step} is not used: {error.why}")
                continue
            # The next copy is stored beside this one, which stays valid until then.
            self._newest = copy
            launch.note(copy=copy.step)
            return state
        return None

    def keep(self, state: Mapping[str, object], step: int, *, before: Callable[[], None]) -> None:
        """Starts to copy a state; when it returns, the next step may overwrite it.

        Args:
            state: with the values.
            step: number of completed steps.
            before: called in the thread before the copy becomes valid.
        """
        # One at a time: beside the newest copy a keeper has room for one that arrives.
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
        if self._problem != self._reported_problem:
            self._reported_problem = self._problem
            self._say(self._problem or "copies in memory work again")

    def close(self) -> None:
        """Closes the connections, once no copy is in progress."""
        self.wait(_END_S)
        for client in self._clients.values():
            client.close()

    def _send(self, packing: Packing, step: int, before: Callable[[], None]) -> None:
        """Sends the part of this process to its keepers, and learns the results of the others."""
        failure = self._send_part(packing, step, before)
        # Before the others are waited for, which may take long: the copies on the host are as large as the part.
        del packing
        give_memory_back()
        try:
            failures = self._agree(_MemoryCopy(self._run, step), failure)
        except (OSError, RunError) as error:
            failures = [error.why if isinstance(error, RunError) else str(error)]
        self._problem = ""
        if failures:
            fallback = "there is no earlier one"
            if self._newest is not None:
                fallback = f"that of step {self._newest.step} stays"
            self._problem = f"a copy could not be kept in memory ({fallback}): {'; '.join(failures)}"

    def _send_part(self, packing: Packing, step: int, before: Callable[[], None]) -> str | None:
        """Sends the part of this process; returns why that failed, None if it did not."""
        try:
            # In this thread: the checksums of all bytes take some time.
            pieces = packing.finish()
            part = KeptPart(self._run, step, jax.process_index(), len(self._seats))
            for target in self._targets:
                target.put(part, pieces, beside=self._newest)
            before()
        except Exception as error:
            # Any: the others wait for the result of this process.
            return reason(error)
        return None

    def _agree(self, copy: _MemoryCopy, failure: str | None) -> list[str]:
        """Makes the copy valid if all processes have stored their parts; returns the failures."""
        # By messages of the service, not by the devices, which are training meanwhile.
        results = exchange("copy in memory", failure, timeout_s=TIMEOUT_S)
        failures = [f"process {process}: {result}" for process, result in enumerate(results) if result is not None]
        if failures:
            return failures
        self._newest = copy
        launch.note(copy=copy.step)
        # Not before: until all parts are stored the previous copy is the only one.
        for target in self._targets:
            target.forget_before(copy.run, copy.step)
        return []

    def _complete_copies(self) -> list[_MemoryCopy]:
        """Returns the copies of which every part is stored, newest first; the same in all processes."""
        processes = collections.defaultdict(set)
        for seat in self._seats:
            for part in seat.parts:
                processes[part.step, part.run, part.of].add(part.process)
        copies = []
        # `of` may differ from the number of processes now: a run may continue with fewer.
        for (step, run, of), stored in processes.items():
            if stored >= set(range(of)):
                copies.append((step, run))
        return [_MemoryCopy(run, step) for step, run in sorted(copies, reverse=True)]

    def _read(self, copy: _MemoryCopy) -> dict[str, PyTree]:
        """Restores a copy; all processes, or none."""
        name = Path(f"copy in memory of step {copy.step}")

        def failed(failures: Failures) -> FourPartError:
            why = "\n".join(f"process {number}: {parts['why']}" for number, parts in failures.items())
            return unreadable(name, why)

        opened = None
        error = None
        try:
            opened = opened_parts(name, [self._reader(part) for part in self._parts_of(copy)])
        except Exception as caught:
            error = caught if isinstance(caught, FourPartError) else unreadable(name, reason(caught))
        all_or_none(str(name), None, error, failed=failed, timeout_s=TIMEOUT_S)
        assert opened is not None
        return RestoreOperation(opened, self._like).run(verify=True, timeout_s=TIMEOUT_S)

    def _parts_of(self, copy: _MemoryCopy) -> list[KeptPart]:
        """Returns the parts of a copy, each once, in the order of the processes."""
        parts = set()
        for seat in self._seats:
            parts |= {part for part in seat.parts if (part.run, part.step) == copy}
        # By their process: run and step are the same for all.
        return sorted(parts)

    def _reader(self, part: KeptPart) -> Callable[[int, int], bytearray]:
        """Returns a function that reads a part from the nearest keeper that has it."""

        def distance(seat: _Seat) -> tuple[bool, bool]:
            return seat.address != self._seat.address, seat.host != self._seat.host

        nearest = min((seat for seat in self._seats if part in seat.parts), key=distance)
        return functools.partial(self._clients[nearest.address].read, part)


def neighbours(places: Sequence[tuple[str, str]]) -> list[int]:
    """Returns the process whose keeper has the second copy of each process's part: on the next machine, in turn.

    If all are on one machine, each keeper is treated as one, as in tests; with one keeper each process is its own.

    Args:
        places: machine and address of the keeper of every process.
    """
    # On several machines the keepers of one are lost together, so it counts as one place.
    is_spread = len({host for host, _ in places}) > 1
    machines: dict[str, list[int]] = {}
    for process, (host, address) in enumerate(places):
        machine = host if is_spread else address
        machines.setdefault(machine, []).append(process)
    processes = list(machines.values())
    partners = {}
    # Each machine with the one after it, and the last with the first.
    for here, there in zip(processes, processes[1:] + processes[:1], strict=True):
        for rank, process in enumerate(here):
            partners[process] = there[rank % len(there)]  # it may have fewer processes
    return [partners[process] for process in range(len(places))]


def _check_every(every: int) -> None:
    if every < 1:
        raise ShardingError(
            "The interval of the copies in memory is not valid.",
            where=f"--keep-in-memory {every}",
            why="it is the number of steps from one copy to the next, 1 or more.",
            do="--keep-in-memory 100",
        )


def _announce_seats() -> list[_Seat]:
    """Announces the address and contents of this process's keeper; returns those of all."""
    seat = None
    error = None
    try:
        seat = dataclasses.asdict(_own_seat())
    except FourPartError as caught:
        error = caught
    seats = []
    for fields in all_or_none("keepers", seat, error, failed=_failure_of_another):
        parts = [KeptPart(**part) for part in fields["parts"]]
        seats.append(_Seat(**fields | {"parts": parts}))
    return seats


def _own_seat() -> _Seat:
    keeper = KeeperClient.of_supervisor(os.environ)
    if keeper is None:
        raise ShardingError(
            "Copies in memory need a supervisor.",
            where="--keep-in-memory",
            why="they are for workers that are restarted, and this process has no supervisor to restart it.",
            do="--keep-in-memory 100 --max-restarts 3",
        )
    try:
        parts, held_bytes = keeper.parts()
        # The client of the run opens its own connection.
        keeper.close()
    except (OSError, ValueError, KeyError) as error:
        raise RunError(
            "The keeper of the copies in memory does not answer.",
            where=keeper.address,
            why=str(error),
            do="start the run again; the keeper is part of the supervisor, which starts the workers.",
        ) from error
    return _Seat(
        host=hostname(),
        address=keeper.address,
        token=keeper.token,
        run=secrets.token_hex(8),
        free_bytes=free_bytes(),
        held_bytes=held_bytes,
        parts=parts,
    )


def _failure_of_another(failures: Failures) -> FourPartError:
    """Creates the error of this process from that of the first one that cannot continue."""
    number = min(failures)
    parts = failures[number]
    kind = ShardingError if parts["is_request"] else RunError
    return kind(parts["what"], where=[*parts["where"], f"process {number}"], why=parts["why"], do=parts["do"])


def _state_bytes(like: Mapping[str, object]) -> int:
    return sum(_manifest.describe(leaf).nbytes for leaf in _leaves.flatten(like).values())


def _check_room(seats: Sequence[_Seat], partners: Sequence[int], part_bytes: int, every: int) -> None:
    """Compares, for each machine, the free memory with that of the copies while a new one replaces an old one."""
    for host in dict.fromkeys(seat.host for seat in seats):  # each once, in the order of the processes
        local = [seat for seat in seats if seat.host == host]
        num_guests = 0  # second copies of the parts of other processes
        for process, partner in enumerate(partners):
            if partner != process and seats[partner].host == host:
                num_guests += 1
        # Several processes may have one keeper.
        held_bytes = sum({seat.address: seat.held_bytes for seat in local}.values())
        available_bytes = min(seat.free_bytes for seat in local) + held_bytes
        # Each part twice, the new beside the old; and once more those of the machine's processes, to be sent.
        needed_bytes = part_bytes * (3 * len(local) + 2 * num_guests)
        if needed_bytes > available_bytes:
            raise ShardingError(
                "There is no room for the copies in memory.",
                where=[f"--keep-in-memory {every}", f"{host}, with {len(local)} of {len(seats)} processes"],
                why=f"{human_bytes(needed_bytes, 1)} are needed: the part of a process has "
                f"{human_bytes(part_bytes, 1)}; of {len(local) + num_guests} the new one is kept beside the old, and "
                f"{len(local)} are on their way; {human_bytes(available_bytes, 1)} of memory are free.",
                do="leave out --keep-in-memory, and save more often: --set checkpoint_every=100",
            )


# Memory that is free.

_UNKNOWN_BYTES = 1 << 40


class _GroupFiles(NamedTuple):
    """The files of a control group, and the name of what is freed on demand in its statistics."""

    limit: str
    used: str
    cache: str


_V2 = _GroupFiles("memory.max", "memory.current", "inactive_file")
_V1 = _GroupFiles("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")


def free_bytes(root: Path = Path("/")) -> int:
    """Returns the memory that could be allocated: that of the system, or less if a container or a job has a limit.

    A large number if it is not known; `root` is the root of the file system that reports it.
    """
    return max(0, min((_available_bytes(root), *_left_in_groups(root))))


def _available_bytes(root: Path) -> int:
    """Returns the free memory of the system."""
    with contextlib.suppress(OSError, ValueError):
        for line in (root / "proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return 1024 * int(line.split()[1])
    return _UNKNOWN_BYTES


def _left_in_groups(root: Path) -> Iterator[int]:
    """Yields the memory left within the limits of this process's control groups and those around them."""
    with contextlib.suppress(OSError):
        for line in (root / "proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers not in ("", "memory"):  # version 1 has a tree for each controller
                continue
            top = (root / "sys/fs/cgroup" / controllers).resolve()
            group = (root / "sys/fs/cgroup" / controllers / path.lstrip("/")).resolve()
            files = _V1 if controllers else _V2
            # Each group around it may have a limit of its own, and the least counts.
            for each in (group, *group.parents):
                if each.is_relative_to(top):
                    yield from _left(each, files)


def _left(group: Path, files: _GroupFiles) -> Iterator[int]:
    """Yields the memory left within the limit of a group, if it has one."""
    with contextlib.suppress(OSError, ValueError):  # a group may have no limit: "max"
        left_bytes = int((group / files.limit).read_text()) - int((group / files.used).read_text())
        for line in (group / "memory.stat").read_text().splitlines():
            name, _, size = line.partition(" ")
            if name == files.cache:
                left_bytes += int(size)  # freed on demand
        yield left_bytes
