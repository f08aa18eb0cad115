"""What a run was asked to do, as it is written into run.json and held against what a resumed run is asked to do."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from jshard._errors import ShardingError
from jshard.train.folder.as_json import tree

_FIXED = ("model", "sequence_length", "seed")  # with other values it would be another run


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunRecord:
    """What a run was asked to do, in values of JSON.

    Attributes:
        name: of the recipe.
        recipe: every field, with those of the model's config under "model".
        model_file: its path, or its name if it comes with jshard.
        data: "description" and "fingerprint" of the data.
        options: what the command line was given, for a resumed run to take over.
    """

    name: str
    recipe: Mapping[str, Any]
    model_file: str
    data: Mapping[str, str]
    options: Mapping[str, Any]

    @classmethod
    def of(
        cls, recipe: Any, *, name: str, model_file: str | Path, data: Any, options: Mapping[str, Any] | None = None
    ) -> RunRecord:
        """The record of a recipe (a dataclass) on data with a description and a fingerprint."""
        return cls(
            name=name,
            recipe=tree(recipe),
            model_file=str(model_file),
            data={"description": data.description, "fingerprint": data.fingerprint},
            options=tree(options or {}),
        )

    def as_json(self) -> dict[str, Any]:
        """As it is written."""
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}

    def check_continues(self, stored: Mapping[str, Any], *, where: str) -> list[str]:
        """Checks that this run may go on from the checkpoints of a stored one.

        Args:
            stored: what run.json holds.
            where: its path.

        Returns:
            What differs and may, a line each.

        Raises:
            ShardingError: the model, the samples or the seed differ: all of it in one error.
        """
        found = list(_differences(stored["recipe"], self.recipe))
        fixed = [(key, *values) for key, *values in found if key.split(".")[0] in _FIXED]
        bad = [f"{key}  stored {_text(before)}  wanted {_text(now)}" for key, before, now in fixed]
        if stored["data"]["fingerprint"] != self.data["fingerprint"]:
            bad.append(f"data  stored {_data_text(stored['data'])}")
        if bad:
            more = [f"      wanted {_data_text(self.data)}"] if bad[-1].startswith("data  ") else []
            raise ShardingError(
                f"The run cannot be resumed: {len(bad)} of its settings would change.",
                where=[where, *bad, *more],
                why="the checkpoints were made with the stored model and the stored order of samples.",
                do="resume with the stored values; or begin a new run: without --resume, in another --out.",
            )
        free = [line for line in found if line[0].split(".")[0] not in _FIXED]
        own = {key: stored.get(key) for key in ("name", "model_file")}
        free += _differences(own, {"name": self.name, "model_file": self.model_file})
        return [f"{key} is {_text(now)}, was {_text(before)}" for key, before, now in free]

    def said(self) -> dict[str, Any]:
        """What every process of a run has to be asked for in the same words; paths may differ from host to host."""
        return {"recipe": self.recipe, "data": self.data["fingerprint"]}


def check_agree(said: Sequence[Mapping[str, Any]], hosts: Sequence[str]) -> None:
    """Checks that all processes of a run are asked for the same: else each would compute a part of another model.

    Args:
        said: what each was asked for, by process.
        hosts: their machines.

    Raises:
        ShardingError: they are not.
    """
    bad = [
        f"{key}  process {process} on {hosts[process]} {_text(theirs)}  process 0 on {hosts[0]} {_text(ours)}"
        for process, one in enumerate(said)
        for key, ours, theirs in _differences(said[0], one)
    ]
    if bad:
        raise ShardingError(
            "The processes of the run do not agree on what to train.",
            where=bad,
            why="they train one model together, from the same recipe and the same data.",
            do="give every process the same command, the same model file and the same data.",
        )


class _Nothing:
    """Where a setting is not there."""

    def __repr__(self) -> str:
        return "nothing"


_NOTHING = _Nothing()


def _differences(stored: Any, wanted: Any, path: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Dotted key, stored and wanted value of each setting that differs."""
    if isinstance(stored, Mapping) and isinstance(wanted, Mapping):
        for key in dict.fromkeys([*stored, *wanted]):
            below = f"{path}.{key}" if path else key
            yield from _differences(stored.get(key, _NOTHING), wanted.get(key, _NOTHING), below)
    elif stored != wanted or isinstance(stored, bool) != isinstance(wanted, bool):
        yield path, stored, wanted


def _text(value: Any) -> str:
    return value if isinstance(value, str) else repr(value)


def _data_text(data: Mapping[str, str]) -> str:
    return f"{data['description']} ({data['fingerprint']})"
