"""The form of run.json, which is checked when it is read: the folder may come from elsewhere, or be edited by hand."""

from __future__ import annotations

from typing import TypedDict

from jshard._parsing import FormError, check_writable_values, checked, shown
from jshard._types import Json
from jshard.train.attempts import Attempt, seconds_of


class StoredData(TypedDict):
    """What `RunRecord.of` says of the data."""

    description: str
    fingerprint: str


class StoredOptions(TypedDict, total=False):
    """The options that a resumed run inherits."""

    recipe: str | None
    set: list[str]
    unit: list[str]
    steps: int | None
    seed: int | None
    data: list[str]
    held_out: list[str]
    text_key: str | None
    pack: str | None
    dtype: str | None
    tokenizer: str | None
    init_from: str | None
    adapters: str | None
    checkpoints: str | None


class StoredStart(TypedDict):
    """A start of the run."""

    step: int
    batch_size: int
    mesh: dict[str, int]
    versions: dict[str, str | None]


class _BegunRun(TypedDict):
    name: str
    model_file: str
    recipe: dict[str, Json]
    data: StoredData
    options: StoredOptions
    versions: dict[str, str | None]
    starts: list[StoredStart]


class StoredRecord(_BegunRun, total=False):
    """The whole of run.json."""

    attempts: list[Attempt]


# Optional in `Attempt`, as one in progress lacks them; sums over ended ones need them.
_KEYS_OF_END = ("cause", "productive_s", "steps_lost", "seconds_lost")
_MOMENTS = ("begin", "ready", "end")


def checked_record(value: object) -> StoredRecord:
    """Returns the contents of run.json, if they have its form.

    Raises:
        FormError: they have not.
    """
    record = checked(value, StoredRecord)
    # All of it: a start writes back also the keys that this version does not know.
    check_writable_values(value, finite=True)
    for number, attempt in enumerate(record.get("attempts", [])):
        missing = [key for key in _KEYS_OF_END if key not in attempt]
        if missing and attempt["end"] is not None:
            raise FormError(f"attempts[{number}] has ended, and lacks {', '.join(missing)}")
        for key in _MOMENTS:
            _check_moment(attempt[key], f"attempts[{number}].{key}")
    return record


def _check_moment(text: str | None, where: str) -> None:
    if text is None:
        return
    # The text is only checked: the file keeps it as it was written.
    try:
        seconds_of(text)
    except (ValueError, OverflowError) as error:
        raise FormError(f"{where} is {shown(text)}, not a time") from error
