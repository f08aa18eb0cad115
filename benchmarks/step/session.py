"""A session: all candidates live side by side, and only one of them computes at a time."""

from __future__ import annotations

import dataclasses
import random
import statistics
from collections.abc import Iterable, Iterator
from typing import Any

from benchmarks.quiet import busy_share, wait_for_quiet
from benchmarks.step.candidates import Candidate
from benchmarks.step.place import Place
from benchmarks.step.sizes import Sizes
from benchmarks.step.workers import CandidateError, Workers, interpreter


@dataclasses.dataclass(frozen=True, kw_only=True)
class Session:
    """What is measured, and how."""

    sizes: Sizes  # of the model
    place: Place  # of the processes
    device: str  # "cpu" or "gpu"
    rounds: int  # in each of them every candidate has its turn, in another order
    steps: int  # that are timed in a turn; one before them is not
    alive: bool  # candidates stay in memory from turn to turn; else each turn starts its processes again
    wait_s: float = 0  # seconds at most to wait for a quiet machine, once all have started
    torch_python: str | None = None  # the interpreter with PyTorch; this one by default

    def measure(self, candidates: Iterable[Candidate]) -> dict[str, Any]:
        """The figures of all rounds.

        Returns:
            "candidates": by name, the facts and by process the rounds; "left_out": why some have none;
            "others_share": of the cores' time that other programs took between the turns.
        """
        *_, last = self.growing(candidates)
        return last

    def growing(self, candidates: Iterable[Candidate]) -> Iterator[dict[str, Any]]:
        """Yields the figures as they grow: after each turn of the first round, after each later round, and at the end.

        Always as many rounds of each candidate as of the others, for they are compared round by round.
        """
        found: dict[str, Any] = {}
        left_out: dict[str, str] = {}
        turns = _Turns(self, list(candidates), left_out)
        if self.wait_s:
            print("waiting for a quiet machine", flush=True)
            wait_for_quiet(self.wait_s)
        busy = []
        try:
            for round_ in range(self.rounds):
                order = list(turns.candidates)
                random.Random(round_).shuffle(order)
                for candidate in order:
                    if candidate.name not in left_out:
                        busy.append(busy_share())
                        self._turn(turns, candidate, round_, found, left_out)
                        if round_ == 0:
                            yield _figures(turns, found, left_out, busy)
                yield _figures(turns, found, left_out, busy)
        finally:
            turns.close()
        yield _figures(turns, found, left_out, busy)

    def _turn(self, turns: _Turns, candidate: Candidate, round_: int, found: dict, left_out: dict) -> None:
        try:
            facts, answers = turns.take(candidate, round_)
        except CandidateError as error:
            _leave_out(candidate, error, left_out)
            return
        described = {"sharded": candidate.sharded, "alone": candidate.alone, "restarted": not self.alive}
        row = found.setdefault(candidate.name, described | {"facts": facts[0], "processes": {}})
        for process, begun, answer in zip(self.place.mine, facts, answers, strict=True):
            mine = row["processes"].setdefault(str(process), {"first_loss": begun["losses"][0], "rounds": []})
            mine["rounds"].append(answer)
        print(f"round {round_ + 1}: {candidate.name:<18}{1e3 * answers[0]['step_s']:9.1f} ms", flush=True)


def _figures(turns: _Turns, found: dict, left_out: dict[str, str], busy: list[float | None]) -> dict[str, Any]:
    names = [c.name for c in turns.candidates if c.name in found and c.name not in left_out]
    known = [share for share in busy if share is not None]
    return {
        "candidates": {name: found[name] for name in names},
        "left_out": left_out,
        "others_share": statistics.median(known) if known else None,
    }


def _leave_out(candidate: Candidate, error: CandidateError, left_out: dict[str, str]) -> None:
    left_out[candidate.name] = str(error)
    print(f"{candidate.name} is left out: {error}", flush=True)


class _Turns:
    """The workers of a session, alive or started for each turn."""

    def __init__(self, session: Session, candidates: list[Candidate], left_out: dict[str, str]) -> None:
        self._session, self.candidates = session, candidates
        self._alive: dict[str, tuple[Workers, list[dict[str, Any]]]] = {}
        self._starts = 0
        if session.alive:
            for candidate in candidates:
                try:
                    self._alive[candidate.name] = self._started(candidate)
                except CandidateError as error:
                    _leave_out(candidate, error, left_out)

    def take(self, candidate: Candidate, round_: int) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        """The facts and the answers of the processes for a turn."""
        session = self._session
        request = {"first": 1, "warm": 1, "steps": session.steps}
        if session.alive:
            workers, facts = self._alive[candidate.name]
            request["first"] += round_ * (1 + session.steps)
            return facts, workers.ask(**request)
        workers, facts = self._started(candidate)
        try:
            return facts, workers.ask(**request)
        finally:
            workers.close()

    def close(self) -> None:
        """Ends all workers."""
        for workers, _ in self._alive.values():
            workers.close()

    def _started(self, candidate: Candidate) -> tuple[Workers, list[dict[str, Any]]]:
        session = self._session
        self._starts += 1
        python = interpreter(candidate, session.torch_python)
        print(f"starting {candidate.name}", flush=True)
        workers = Workers(
            candidate, session.sizes, session.place, device=session.device, python=python, number=self._starts
        )
        try:
            return workers, workers.ready()
        except CandidateError:
            workers.close()
            raise
