"""Hugging Face's `config.json`: its keys as fields of a recipe, and whether the recipe computes what it describes.

Several models store parameters under the names of Llama, and compute something else with them. So the file is judged
whole: each of its keys is in the table of its `model_type`, with the values that the recipe computes, or is known to
leave the logits unchanged (`HARMLESS`). A key that is neither is refused, also one that no version of this library has
seen.

A `Family` is the table of one `model_type`. It is read in four ways: `filled` and `settings_of` set the fields of a
recipe, `check` compares a recipe with a file, `config_json` writes a file, and `jshard ckpt inspect` prints it.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from jshard import _compat
from jshard._files import read_json
from jshard._types import Json
from jshard.checkpoint.formats import CheckedNames, Stored
from jshard.errors import FourPartError, ShardingError
from jshard.recipes.hf_families import ANY_FAMILY, FAMILIES, HARMLESS, OFF, Family
from jshard.recipes.hf_keys import Config, ConfigKey, Fixed

NAME = "config.json"
ADAPTER = "adapter_config.json"

M = TypeVar("M")


class HFConfigError(ShardingError):
    """A config.json that describes another model than the recipe."""


# ---- A file, read by its table.


@dataclasses.dataclass(frozen=True)
class Row:
    """A key of a config.json and what it means for a recipe.

    Attributes:
        name: of the key.
        value: its value.
        field: the recipe's field; empty for a key without one.
        problem: why the recipe cannot compute it; empty if it can.
    """

    name: str
    value: Json
    field: str = ""
    problem: str = ""

    @property
    def short(self) -> str:
        """Its value as JSON, cut if it is long."""
        return _short(self.value)

    @property
    def text(self) -> str:
        """The key, its value and the problem."""
        return f"{self.name}: {self.short}  {self.problem}"


@dataclasses.dataclass(frozen=True)
class Reading:
    """A config.json as read by the table of its family.

    Attributes:
        family: by its `model_type`; None if that has no table.
        values: of the family's keys, as Transformers computes with them.
        rows: one for each key of the file.
    """

    family: Family | None
    values: Mapping[ConfigKey, Json]
    rows: tuple[Row, ...]

    @property
    def problems(self) -> list[Row]:
        """The keys that a recipe cannot compute."""
        return [row for row in self.rows if row.problem]

    @property
    def fields(self) -> dict[str, Json]:
        """The fields of the recipe's model."""
        result: dict[str, Json] = {}
        for key, value in self.values.items():
            result |= key.fields(value)
        if self.family is None:
            return result
        return result | dict(self.family.implied) | dict(self.family.preferred)


def read(config: Config, types: Sequence[str]) -> Reading:
    """Reads a config.json for a model that computes these types."""
    model_type = config.get("model_type")
    if not isinstance(model_type, str) or model_type not in types:
        rows = [Row(name, value) for name, value in config.items() if name != "model_type"]
        return Reading(None, {}, (_other_type(model_type, types), *rows))
    family = FAMILIES[model_type]
    rules = _rules(family)
    fields = {name: key.described for key in family.keys for name in key.names}
    # In this order: what a later step says of a key replaces what an earlier one said.
    values, problems = _values(family, config)
    problems |= _rule_problems(rules, config)
    for name in config.keys() - {"model_type", *fields, *rules, *HARMLESS}:
        problems[name] = _UNKNOWN
    rows = []
    for name, value in config.items():
        rows.append(Row(name, value, fields.get(name, ""), problems.get(name, "")))
    for name, problem in problems.items():
        if name not in config:  # an absent key is a value, too
            rows.append(Row(name, None, problem=problem))
    return Reading(family, values, tuple(rows))


_UNKNOWN = "is not known here, and may change what the model computes"


def _values(family: Family, config: Config) -> tuple[dict[ConfigKey, Json], dict[str, str]]:
    """Returns the values of a family's keys, and the problems of those that have none, by name."""
    values: dict[ConfigKey, Json] = {}
    problems: dict[str, str] = {}
    for key in family.keys:
        try:
            values[key] = key.stored(config)
        except (ValueError, TypeError, AttributeError) as error:
            problems[_name_in(config, key)] = str(error)
    return values, problems


def _name_in(config: Config, key: ConfigKey) -> str:
    """Returns the name of a key that a file has; its first one if it has none."""
    for name in key.names:
        if config.get(name) is not None:
            return name
    return key.name


def _rule_problems(rules: Mapping[str, Fixed], config: Config) -> dict[str, str]:
    """Returns the problems of keys of which only some values are computed, by name."""
    problems = {}
    for name, rule in rules.items():
        try:
            rule.check(config)
        except ValueError as error:
            problems[name] = str(error)
    return problems


def _other_type(model_type: Json, types: Sequence[str]) -> Row:
    if model_type is None:
        problem = "is missing: it says which model the weights are of"
    else:
        problem = f"is another model, whatever the names of its parameters; supported: {', '.join(types)}"
    return Row("model_type", model_type, problem=problem)


def _rules(family: Family) -> dict[str, Fixed]:
    """Returns the keys of which only some values are computed; those of a family replace those of all families."""
    classes = Fixed(name="architectures", only=(None, [], *([name] for name in family.architectures)))
    return {rule.name: rule for rule in (*ANY_FAMILY, *family.fixed, classes)}


def config_file(path: Path) -> Path | None:
    """Returns the config.json of a folder with weights, or beside a file with them; None if there is none."""
    folder = path if path.is_dir() else path.parent
    file = folder / NAME
    return file if file.is_file() else None


def load(file: Path) -> Config:
    """Returns the contents of a config.json.

    Raises:
        HFConfigError: it is not JSON, or no object.
    """
    try:
        config = read_json(file)
    # An error of `read_json` that is complete already; some of these are ValueErrors, too.
    except FourPartError:
        raise
    except (OSError, ValueError) as error:
        raise _unreadable(file, f"{type(error).__name__}: {error}.") from None
    if not isinstance(config, dict):
        raise _unreadable(file, f"it is a {type(config).__name__}, not an object with keys.")
    return config


def _unreadable(file: Path, why: str) -> HFConfigError:
    do = f"copy or download the folder again: {file.parent}"
    return HFConfigError(f"{NAME} cannot be read.", where=str(file), why=why, do=do)


# ---- A recipe and a file.


def check(path: Path, model: object, types: Sequence[str]) -> None:
    """Compares a recipe's model with the config.json of a folder with weights, if there is one.

    Args:
        path: the folder, or a file of weights in it.
        model: the config of the recipe's model.
        types: the `model_type`s that the model file computes.

    Raises:
        HFConfigError: the file describes another model, or the folder has the adapters of one alone.
    """
    reading = _readable(path, types)
    if reading is None:
        return
    different = list(_differences(reading, model))
    if not different:
        return
    raise HFConfigError(
        f"The settings of the recipe and of {NAME} differ.",
        where=[str(config_file(path)), *different],
        why="with other settings the same weights are another model.",
        do=f"leave out the --set of these keys: --init-from and ckpt import take them from {NAME}.\n"
        "In a script: from jshard.recipes.hf_config import filled\n"
        f"config = filled(config, {str(path)!r})",
    )


def settings_of(path: Path, types: Sequence[str]) -> dict[str, Json]:
    """Returns the fields of the recipe's model that a config.json sets, by dotted name; empty without such a file.

    Raises:
        HFConfigError: see `check`.
    """
    reading = _readable(path, types)
    return {} if reading is None else reading.fields


def filled(model: M, path: str | Path, types: Sequence[str] = tuple(FAMILIES)) -> M:
    """Returns the config of a recipe's model with the values of a folder's config.json.

    Examples:
        >>> config = filled(LlamaConfig(), "llama3/")
    """
    names = {field.name for field in dataclasses.fields(model)}  # pyright: ignore[reportArgumentType]
    changes: dict[str, Json] = {}
    for name, value in settings_of(Path(path), types).items():
        outer, _, inner = name.partition(".")
        if outer not in names:
            continue  # `check` compares what such a model computes
        if inner:
            # A plain kind unless the file names another: what the recipe has of another kind must not stay.
            part = changes.get(outer, {"kind": "default"})
            changes[outer] = part | {inner: value}
        else:
            changes[outer] = value
    for name, part in changes.items():
        if isinstance(part, dict):
            changes[name] = dataclasses.replace(getattr(model, name), **part)
    result = dataclasses.replace(model, **changes)  # pyright: ignore[reportArgumentType, reportUnknownVariableType]
    check(Path(path), result, types)
    return result


def _readable(path: Path, types: Sequence[str]) -> Reading | None:
    """Reads the config.json of a path, if there is one, by a table; raises for what no recipe computes."""
    # First: such a folder need not have a config.json, and then nothing else would refuse it.
    _check_adapters(path)
    file = config_file(path)
    if file is None:
        return None
    reading = read(load(file), types)
    problems = reading.problems
    if not problems:
        return reading
    unknown = [row.name for row in problems if row.problem == _UNKNOWN]
    do = f"choose weights of one of these types: {', '.join(types)};\nor write a model file that computes this one."
    if len(unknown) == len(problems):
        do += f"\nIf they leave its logits unchanged, remove {', '.join(unknown)} from {file}"
    raise HFConfigError(
        "The weights are of a model that the recipe does not compute.",
        where=[str(file), *(row.text for row in problems)],
        why="the parameters would fit and give other logits than in Transformers.",
        do=do,
    )


def _check_adapters(path: Path) -> None:
    """Raises for the adapters of PEFT, which are not a model."""
    folder = path if path.is_dir() else path.parent
    file = folder / ADAPTER
    # A file of weights beside adapters may be a whole model; the folder is taken for the adapters.
    if not file.is_file() or not (path.is_dir() or path.name.startswith("adapter_model")):
        return
    raise HFConfigError(
        "The folder has adapters, not the weights of a model.",
        where=str(file),
        why="PEFT stores what it adds to another model, in LoRA's layout or another, and not the sums.",
        do=f"--init-from BASE --adapters {folder}  # trains on with LoRA; or the sums, as weights of a model:\n"
        "from peft import AutoPeftModelForCausalLM\n"
        f"AutoPeftModelForCausalLM.from_pretrained({str(folder)!r}).merge_and_unload().save_pretrained('merged')",
    )


def _differences(reading: Reading, model: object) -> Iterator[str]:
    """Yields a line for each setting of a recipe's model that differs from the file."""
    assert reading.family is not None
    for key, value in reading.values.items():
        computed = key.computed(model)
        if computed is None:
            yield f"{key.name}: {_short(value)} there; {type(model).__name__} has no field {key.field!r}"
        # Both are values that Transformers computes with, so another spelling in the file is no difference.
        elif key.is_compared and computed != value:
            yield f"{key.name}: {_short(value)} there, {_short(computed)} here ({key.described})"
    for field, value in reading.family.implied.items():
        computed = getattr(model, field, OFF.get(field))
        if computed != value:
            kind = reading.family.model_type
            yield f"model_type: {kind} has {field}={_short(value)}, and the recipe {_short(computed)} (model.{field})"


def config_json(model: object, types: Sequence[str]) -> dict[str, Json]:
    """Returns the contents of a config.json for a recipe's model: of the first of the types that can be that model.

    Raises:
        ValueError: no type can.
    """
    for model_type in types:
        config = _config_of(FAMILIES[model_type], model)
        if config is not None:
            return config
    options = ", ".join(f"{name}={getattr(model, name)!r}" for name in OFF if hasattr(model, name))
    raise ValueError(f"none of {', '.join(types)} has together {options}")


def _config_of(family: Family, model: object) -> dict[str, Json] | None:
    """Returns the contents of a config.json of a family; None if it cannot describe the recipe's model."""
    values = {key: key.computed(model) for key in family.keys}
    for field, value in family.implied.items():
        if getattr(model, field, OFF.get(field)) != value:
            return None
    for key, value in values.items():
        if not key.can_be(value):
            return None
    result: dict[str, Json] = {"architectures": [family.architectures[0]], "model_type": family.model_type}
    for key, value in values.items():
        result |= key.written(value)
    for rule in family.fixed:
        # The first allowed value is the one to write; false and null are left out, as absent means the same.
        if rule.only[0]:
            result[rule.name] = rule.only[0]
    return result | {"bos_token_id": None, "eos_token_id": None}  # the tokenizer knows them


def checked_names(names: Mapping[str, str | Stored], model: object, types: Sequence[str]) -> CheckedNames:
    """Returns the names of a model's parameters, which a folder is read by only if its config.json is of that model."""
    return CheckedNames(names, lambda path: check(path, model, types))


def unchecked_names(names: Mapping[str, str | Stored], owner: str) -> CheckedNames:
    """Returns the names of a model whose file does not say what it computes: a config.json gives a warning."""
    return CheckedNames(names, functools.partial(_warn, owner))


def _warn(owner: str, path: Path) -> None:
    file = config_file(path)
    if file is not None:
        _compat.warn_user(
            f"{file} is not compared with the recipe: {owner} has no hf_types, the model types that it computes."
            " Compare the settings yourself, such as the epsilon of norms."
        )


def _short(value: Json) -> str:
    text = json.dumps(value)
    return text if len(text) <= 120 else text[:117] + "..."
