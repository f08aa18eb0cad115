"""The messages of the roll call, in both directions. The names of the fields are those on the wire."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from typing import TypeVar

from jshard.errors import FourPartError, ShardingError, is_request
from jshard.launch.messages import Message, parsed
from jshard.launch.restarts import History

T = TypeVar("T")

_ADDRESSES_PER_MESSAGE = 32  # a message has to fit into a line


class BadMessageError(Exception):
    """A message of another version of jshard: its proof is right and its contents are not."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class PeerAddress:
    """How the others reach a process of the run.

    Attributes:
        process: its id in the run.
        host: the name of its supervisor's machine.
        ip: the address of that machine; empty for the sender of the message.
        port: that of its supervisor.
        is_member: whether it takes part in the next attempt.
    """

    process: int
    host: str
    ip: str
    port: int
    is_member: bool


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttemptStart:
    """The start of an attempt: the port of JAX's coordinator, the mesh, and a `History`."""

    port: int
    mesh: str | None
    # Checked by who reads it: `parsed` does not look into a dict.
    history: dict


@dataclasses.dataclass(frozen=True, kw_only=True)
class Failure:
    """The error that ends the roll call for all."""

    what: str
    where: list
    why: str
    do: str
    is_request: bool


def address_messages(addresses: Mapping[int, PeerAddress]) -> Iterator[Message]:
    """Yields messages that together have all addresses, by process."""
    rows = [dataclasses.asdict(addresses[process]) for process in sorted(addresses)]
    for begin in range(0, len(rows), _ADDRESSES_PER_MESSAGE):
        yield {"rows": rows[begin : begin + _ADDRESSES_PER_MESSAGE]}


def addresses_in(message: Message) -> Iterable[PeerAddress]:
    """Parses the addresses of a message; there may be none.

    Raises:
        BadMessageError: they are of another form.
    """
    rows = message.get("rows", [])
    if not isinstance(rows, list):
        raise BadMessageError
    return [understood(PeerAddress, row) for row in rows]


def start_message(port: int, mesh: str | None, history: History) -> Message:
    """Creates the message that starts an attempt."""
    return {"go": {"port": port, "mesh": mesh, "history": dataclasses.asdict(history)}}


def failure_message(error: FourPartError) -> Message:
    """Creates the message that ends the roll call."""
    failure = Failure(
        what=error.what,
        where=list(error.where),
        why=error.why,
        do=error.do,
        is_request=is_request(error),
    )
    return {"error": dataclasses.asdict(failure)}


def error_in(message: object, history: History) -> FourPartError:
    """Returns the error of a `failure_message`.

    Raises:
        BadMessageError: it is of another form.
    """
    failure = understood(Failure, message)
    # After a loss the run can be resumed, and its exit code says so: see `History.not_met`.
    kind = ShardingError if failure.is_request else history.not_met
    return kind(failure.what, where=[str(line) for line in failure.where], why=failure.why, do=failure.do)


def understood(kind: type[T], message: object) -> T:
    """Parses a message whose sender knows the token.

    Raises:
        BadMessageError: it is of another form.
    """
    value = parsed(kind, message)
    if value is None:
        raise BadMessageError
    return value
