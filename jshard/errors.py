"""The four-part error: what failed, where, why (the numbers), and what to do (a line to paste)."""

import errno
from collections.abc import Iterator, Sequence

_MOST_PLACES = 10


def printable(text: str, keep: str = "") -> str:
    r"""Escapes characters that move the cursor, colour the terminal or reverse the text that follows.

    Leaf names come from a file, which may have been written by anyone. Such a character is replaced by its Python
    escape: `\x1b`.

    Args:
        text: such as the path of a leaf.
        keep: characters that are not escaped, such as the newlines of a message.
    """
    characters: list[str] = []
    for character in text:
        if character.isprintable() or character in keep:
            characters.append(character)
        else:
            characters.append(repr(character)[1:-1])  # without the quotes
    return "".join(characters)


class FourPartError(Exception):
    """An error in four parts; the base class of jshard's errors.

    Args:
        what: one sentence: what failed.
        where: the place or places (leaf path, unit, mesh axes); the first ten are shown, then a count.
        why: the numbers behind it.
        do: what to change, with a line to paste.
    """

    def __init__(self, what: str, *, where: str | Sequence[str], why: str, do: str) -> None:
        self.what = what
        self.where = (where,) if isinstance(where, str) else tuple(where)
        self.why = why
        self.do = do
        places = [printable(place) for place in self.where[:_MOST_PLACES]]
        if len(self.where) > _MOST_PLACES:
            places.append(f"... and {len(self.where) - _MOST_PLACES} more")
        lines = [_prose(what), _part("where:", "\n".join(places)), _part("why:", why), _part("do:", do)]
        super().__init__("\n".join(lines))

    def __reduce__(self) -> tuple:  # errors of data workers are pickled; by itself Python would pass the text alone
        return _rebuild, (type(self), self.what, self.where, self.why, self.do)


class ShardingError(FourPartError, ValueError):
    """A request that cannot be met. The command line exits with code 2."""


class RunError(FourPartError, RuntimeError):
    """Work that started and could not finish: a full disk, a lost peer, a loss that is not a number. Exit code 1."""


def is_request(error: BaseException) -> bool:
    """Returns whether the request is at fault, and not what happened after it was begun: exit code 2."""
    return isinstance(error, ShardingError) and not isinstance(error, RunError)


class MeshError(ShardingError):
    """The mesh asked for does not fit the devices, or lacks an axis."""


class AnnotationError(ShardingError):
    """An annotation that does not fit the model or its parameters."""


class CallError(ShardingError):
    """A call into an annotated model that cannot be split over the data shards."""


class MissingExtraError(ShardingError, ImportError):
    """A package of one of the extras is not installed."""


class UnsupportedVersionError(ShardingError, ImportError):
    """The installed version of a dependency lacks a private name that jshard cannot do without."""


class UnsafeFileError(ShardingError, OSError):
    """A file that is not opened, because of what it is. Whoever handles errors of the system handles this one, too."""

    def __init__(self, what: str, *, where: str | Sequence[str], why: str, do: str) -> None:
        super().__init__(what, where=where, why=why, do=do)
        self.errno = errno.EINVAL
        self.strerror = why.rstrip(".")
        self.filename = self.where[0]

    def __str__(self) -> str:  # an OSError with a number would show only that and the file
        return self.args[0]


def causes(error: BaseException | None, *, context: bool = False) -> Iterator[BaseException]:
    """Yields an error, its cause, and so on, each once: if several threads raise it, it may be among its own causes.

    Args:
        error: the error that was caught.
        context: whether to follow an error without a cause to the one that was being handled when it was raised.
    """
    seen: list[BaseException] = []
    while error is not None and not any(error is earlier for earlier in seen):
        yield error
        seen.append(error)
        cause = error.__cause__
        if cause is None and context:
            cause = error.__context__
        error = cause


def _part(head: str, text: str) -> str:
    return f"  {head:<7}" + _prose(text).replace("\n", "\n         ")


def _prose(text: str) -> str:
    return printable(text, keep="\n\t")


def _rebuild(cls: type[FourPartError], what: str, where: tuple, why: str, do: str) -> FourPartError:
    return cls(what, where=where, why=why, do=do)
