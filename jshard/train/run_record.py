"""The request of a run, in run.json, compared with that of a resumed run and of the other processes."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from jshard._types import Json
from jshard.data import Data
from jshard.errors import ShardingError
from jshard.recipes.recipe import Recipe, tree
from jshard.train.run_json import StoredData, StoredRecord
from jshard.train.trust import SEAL, sealed

_FIXED = ("model", "sequence_length", "seed")  # with other values it would be another run

NOTHING = object()
"""Stands for a missing setting, which differs from None."""


class ChangedSetting(NamedTuple):
    """A setting that differs.

    Attributes:
        key: its path, with dots.
        stored: the one value, such as that of the stored run; NOTHING if it is missing there.
        current: the other one.
    """

    key: str
    stored: object
    current: object

    @property
    def is_fixed(self) -> bool:
        """Returns whether it is a setting that a run cannot change."""
        return self.key.split(".")[0] in _FIXED


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunRecord:
    """The request of a run, as JSON values.

    Attributes:
        name: of the recipe.
        recipe: every field, with those of the model's config under "model".
        model_file: its path, or its name if it is included in jshard.
        data: "description" and "fingerprint" of the data.
        options: the command-line options, which a resumed run inherits.
    """

    name: str
    recipe: Mapping[str, Json]
    model_file: str
    data: StoredData
    options: Mapping[str, Json]

    @classmethod
    def of(
        cls,
        recipe: object,
        *,
        name: str,
        model_file: str | Path,
        data: Data,
        options: Mapping[str, Json] | None = None,
    ) -> RunRecord:
        """Creates the record of a recipe (a dataclass) on data with a description and a fingerprint."""
        return cls(
            name=name,
            recipe=tree(recipe),
            model_file=str(model_file),
            data={"description": data.description, "fingerprint": data.fingerprint},
            options=tree(options or {}),
        )

    def as_json(self) -> dict[str, Json]:
        """Returns the record in the form of the file."""
        record = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return record | {SEAL: sealed(self.model_file)}

    def check_continues(self, stored: StoredRecord, *, where: str) -> list[str]:
        """Checks that this run may continue from the checkpoints of a stored one; returns allowed differences as lines.

        Raises:
            ShardingError: the model, the samples or the seed differ; one error lists all.
        """
        settings = [setting for setting in differences(stored["recipe"], self.recipe) if not _is_new_default(setting)]
        self._check_fixed([setting for setting in settings if setting.is_fixed], stored["data"], where)
        # Others may change, such as the learning rate or the batch size; the run says so.
        changes = [setting for setting in settings if not setting.is_fixed]
        stored_names = {key: stored.get(key) for key in ("name", "model_file")}
        changes += differences(stored_names, {"name": self.name, "model_file": self.model_file})
        return [f"{change.key} is {_text(change.current)}, was {_text(change.stored)}" for change in changes]

    def _check_fixed(self, fixed: Sequence[ChangedSetting], stored_data: StoredData, where: str) -> None:
        """Raises an error if there are changes, or the run would get other samples."""
        lines = [f"{change.key}  stored {_text(change.stored)}  wanted {_text(change.current)}" for change in fixed]
        num_changes = len(lines)
        # By the fingerprint: the same text may have moved to another folder.
        if stored_data["fingerprint"] != self.data["fingerprint"]:
            # One change, in two lines: descriptions are long.
            num_changes += 1
            lines.append(f"data  stored {_data_text(stored_data)}")
            lines.append(f"      wanted {_data_text(self.data)}")
        if num_changes:
            raise ShardingError(
                f"The run cannot be resumed: {num_changes} of its settings would change.",
                where=[where, *lines],
                why="the checkpoints were made with the stored model and the stored order of samples.",
                do="resume with the stored values; or begin a new run: without --resume, in another --out.",
            )

    def common(self) -> dict[str, object]:
        """Returns the parts of the request that must be equal in all processes; paths may differ between hosts."""
        return {"recipe": self.recipe, "data": self.data["fingerprint"]}


def check_agree(requests: Sequence[Mapping[str, object]], hosts: Sequence[str]) -> None:
    """Checks that all processes of a run have the same request: else each would compute a part of another model."""
    lines = []
    for process, request in enumerate(requests):
        # Against the first process, which writes the record of the run.
        for key, ours, theirs in differences(requests[0], request):
            their_text = f"process {process} on {hosts[process]} {_text(theirs)}"
            lines.append(f"{key}  {their_text}  process 0 on {hosts[0]} {_text(ours)}")
    if lines:
        raise ShardingError(
            "The processes of the run do not agree on what to train.",
            where=lines,
            why="they train one model together, from the same recipe and the same data.",
            do="give every process the same command, the same model file and the same data.",
        )


def differences(stored: object, current: object, path: str = "") -> Iterator[ChangedSetting]:
    """Yields each setting that differs between two trees of JSON values."""
    if isinstance(stored, Mapping) and isinstance(current, Mapping):
        for key in dict.fromkeys([*stored, *current]):  # each once, in the order of the file
            key_path = f"{path}.{key}" if path else key
            yield from differences(stored.get(key, NOTHING), current.get(key, NOTHING), key_path)
    elif stored != current or isinstance(stored, bool) != isinstance(current, bool):  # True == 1 in Python
        yield ChangedSetting(path, stored, current)


def _is_new_default(setting: ChangedSetting) -> bool:
    """Returns whether an earlier version did not have a setting, which has its default now: nothing has changed."""
    if setting.stored is not NOTHING:
        return False
    defaults = {field.name: field.default for field in dataclasses.fields(Recipe)}
    return setting.key in defaults and tree(defaults[setting.key]) == setting.current


def _text(value: object) -> str:
    if isinstance(value, str):
        return value
    if value is NOTHING:
        return "nothing"
    return repr(value)


def _data_text(data: StoredData) -> str:
    return f"{data['description']} ({data['fingerprint']})"
