"""The settings of a step of a Grain pipeline that the order of its samples depends on, as plain data."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jshard._types import Json
from jshard.checkpoint.data_position.sample_digest import PipelineNode, last_part, text_digest

_PACKING = ("_length_struct", "_num_packing_bins", "_seed", "_shuffle_bins", "_max_sequences_per_bin")
# By step. Grain has no public names for these; one that a version lacks is not compared.
_SETTINGS: Mapping[str, Sequence[str]] = {
    "Shuffle": ("_seed",),
    "WindowShuffle": ("_window_size", "_seed", "_global_seed"),
    "Repeat": ("_num_epochs", "_reseed_each_epoch"),
    "Slice": ("_start", "_stop", "_step"),
    "Range": ("start", "stop", "step"),
    "Batch": ("_batch_size", "_drop_remainder"),
    "Rebatch": ("_batch_size", "_drop_remainder"),
    "Limit": ("_count",),
    "Interleave": ("_cycle_length",),
    "Packing": _PACKING,
    "FirstFitPack": _PACKING,
    "BestFitPack": _PACKING,
}
# The numbers that a rule of selection is asked for. Rules may begin alike and differ later: so also far ones.
_PROBES = (*range(64), *(1 << power for power in range(7, 40)))
_UNKNOWN = object()  # not None, which is a value of settings


def is_of_grain(value: object) -> bool:
    """Returns whether an object's class is one of Grain's."""
    return type(value).__module__.partition(".")[0] == "grain"


def settings_of(node: PipelineNode, name: str) -> dict[str, Json]:
    """Returns the settings of a step that the order depends on; objects are left out, and functions are their names."""
    attributes = vars(node)
    if is_of_grain(node):
        named = _known_settings(attributes, name)
        named |= _settings_in_objects(attributes)
    else:
        named = _all_numbers(attributes)
        named.pop("default_seed", None)  # computed when it is first asked for
    if "global_seed" in named:
        named["seed"] = named.pop("global_seed")

    settings = {}
    for key, value in named.items():
        plain = _plain(value)
        if plain is not _UNKNOWN:
            settings[key] = plain
    return settings


def _known_settings(attributes: Mapping[str, Any], name: str) -> dict[str, object]:
    """Returns the settings of a step of Grain that its attributes have, by their names without underscores."""
    settings: dict[str, object] = {}
    for attribute in _SETTINGS.get(name, ()):
        if attribute in attributes:
            settings[attribute.lstrip("_")] = attributes[attribute]
    return settings


def _all_numbers(attributes: Mapping[str, Any]) -> dict[str, object]:
    """Returns all numbers of a step of the user's class, of which it is unknown what the order depends on."""
    numbers: dict[str, object] = {}
    for attribute, value in attributes.items():
        if _is_number(value):
            numbers[attribute.lstrip("_")] = value
    return numbers


def _settings_in_objects(attributes: Mapping[str, Any]) -> dict[str, object]:
    """Returns the settings that Grain's steps have in files, functions and objects rather than in numbers."""
    settings: dict[str, object] = {}
    file = attributes.get("_path", attributes.get("_pq_path"))
    if isinstance(file, str):
        settings["file"] = last_part(file)
    if "_filter_fn" in attributes:
        settings["filter"] = _name_of_function(attributes["_filter_fn"])
    transform: Any = attributes.get("_transform")
    if hasattr(transform, "max_fan_out"):
        settings["flat_map"] = _name_of_function(transform)
        settings["max_fan_out"] = transform.max_fan_out
    config: Any = attributes.get("_config")
    if hasattr(config, "length_struct"):
        settings["length_struct"] = config.length_struct
    if "_proportions" in attributes:
        settings["proportions"] = _reduced(attributes["_proportions"])
    if "_selection_map" in attributes:
        settings |= _selection_of(attributes["_selection_map"])
    return settings


def _reduced(proportions: Sequence[float]) -> Sequence[float]:
    """Returns proportions without a common divisor: 100 and 100 mix as 1 and 1."""
    integers = [int(proportion) for proportion in proportions]
    # Fractions are compared as they are: they have no divisor.
    if integers != list(proportions):
        return list(proportions)
    divisor = math.gcd(*integers) or 1
    return [proportion // divisor for proportion in integers]


def _selection_of(selection: PipelineNode) -> dict[str, object]:
    """Returns which source gives which sample: the proportions or, as a rule may be of any class, what it answers."""
    if hasattr(selection, "_proportions"):
        return {"proportions": _reduced(selection._proportions)}
    picks = []
    try:
        for number in _PROBES:
            if number < len(selection):
                picks.append([int(part) for part in selection[number]])
    except Exception:  # a rule of the user's; the run reports what it raises
        return {"selection": type(selection).__qualname__}
    return {"selection": text_digest(json.dumps(picks))}


def _is_number(value: object) -> bool:
    return value is None or isinstance(value, bool | int | float | np.bool_ | np.integer | np.floating)


def _plain(value: object) -> object:
    """Returns a value as plain data, equal in every process; `_UNKNOWN` for an object."""
    if isinstance(value, np.generic):
        value = value.item()
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list | tuple):
        elements = [_plain(element) for element in value]
        return _UNKNOWN if _has_unknown(elements) else elements
    if isinstance(value, Mapping):
        items = {str(key): _plain(item) for key, item in value.items()}
        return _UNKNOWN if _has_unknown(list(items.values())) else items
    return _UNKNOWN


def _has_unknown(values: Sequence[object]) -> bool:
    return any(value is _UNKNOWN for value in values)


def _name_of_function(function: Any) -> str:
    """Returns the name of a function, bound method or object; never its address."""
    owner = getattr(function, "__self__", None)
    if owner is not None:
        return f"{type(owner).__qualname__}.{getattr(function, '__name__', '')}"
    inner = getattr(function, "func", None)  # a functools.partial
    if inner is not None:
        arguments = _plain([list(function.args), function.keywords])
        if arguments is _UNKNOWN:
            return _name_of_function(inner)
        return _name_of_function(inner) + json.dumps(arguments, sort_keys=True)
    return getattr(function, "__qualname__", type(function).__qualname__)
