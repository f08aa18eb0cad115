"""What the order of samples of a Grain pipeline depends on, as plain data that a restore compares.

A position counts samples. With other weights of a mixture, or sources in another order, the same count stands for other
samples: some would repeat and others would be skipped, without an error.

A description has no addresses or ids: a pipeline that is built again, in another process, has an equal one.
"""

from __future__ import annotations

import hashlib
import json
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import PurePath
from typing import Any

import numpy as np

from jshard import _compat

Description = dict[str, Any]
"""A step of a pipeline: `step`, its name; `settings`; `length`, if it is known; and `of`, the steps before it."""

# Steps that change what samples hold, or when they are read, and not which sample is the next.
_NOT_IN_ORDER = frozenset(
    "Map RandomMap MapWithIndex WithSeed WithOptions Output "
    "Prefetch ThreadPrefetch MpContext Cache InMemoryCache".split()
)
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
_BEFORE = ("_parents", "_source", "_map_parent", "_ds", "_datasets", "_maybe_nonnative_parent", "_iter_parent")
_MOST_SOURCES = 64  # whose samples are read, and whose descriptions are kept one by one
_NUM_PROBES = 64
_NUM_FILTERED = 16
_LONGEST_PATH = 1024


def describe(pipeline: Any) -> Description | None:
    """The steps of a Grain dataset or iterator that its order of samples depends on; None for anything else."""
    if not _is_step(pipeline):
        return None
    version = _compat.versions(["grain"])["grain"]
    return {"grain": version or "unknown", "pipeline": _Describing().step(pipeline)}


def differences(saved: Description | None, here: Description | None) -> list[str]:
    """What differs between two descriptions, a line each; none if one of them is not known."""
    if saved is None or here is None:
        return []
    # Another version may name its steps otherwise.
    lenient = saved["grain"] != here["grain"]
    return list(_differences(saved["pipeline"], here["pipeline"], "", lenient=lenient))


def agreed(descriptions: Sequence[Description | None]) -> Description | None:
    """The description that all processes have; without the samples of its sources where those differ."""
    first, *others = descriptions
    if all(other == first for other in others):
        return first
    without = [_without_samples(description) for description in descriptions]
    return without[0] if all(other == without[0] for other in without) else None


def _is_step(value: Any) -> bool:
    grain = sys.modules.get("grain")
    names = ("MapDataset", "IterDataset", "DatasetIterator")
    kinds = tuple(getattr(grain, name) for name in names if hasattr(grain, name))
    return isinstance(value, kinds) or (_is_grains(value) and hasattr(value, "_ds"))  # ElasticIterator


def _is_grains(value: Any) -> bool:
    return type(value).__module__.partition(".")[0] == "grain"


class _Describing:
    """One walk over a pipeline; counts its sources."""

    def __init__(self) -> None:
        self._num_sources = 0

    def step(self, node: Any) -> Description:
        """A step and those before it; steps that do not count are left out."""
        before = _steps_before(node)
        name = _name(node)
        if len(before) == 1 and _is_grains(node) and _is_left_out(node, name):
            return self.step(before[0])
        found: Description = {"step": name, "settings": _settings_of(node, name)}
        length = _length_of(node)
        if length is not None:
            found["length"] = length
        if "<lambda>" in found["settings"].get("filter", "") and hasattr(node, "__getitem__"):
            found["settings"]["passes"] = _passes(node)
        if len(before) > _MOST_SOURCES:
            parts = [_Describing._without_reading(part) for part in before]
            found["settings"]["parts"] = _digest(json.dumps(parts, sort_keys=True))
        elif before:
            found["of"] = [self.step(part) for part in before]
        elif length and name != "Range" and hasattr(node, "__getitem__"):
            found["samples"] = self._samples(node, length)
        return found

    def _samples(self, source: Any, length: int) -> list[str] | None:
        self._num_sources += 1
        return _marks(source, length) if self._num_sources <= _MOST_SOURCES else None

    @staticmethod
    def _without_reading(node: Any) -> Description:
        describing = _Describing()
        describing._num_sources = _MOST_SOURCES
        return describing.step(node)


def _steps_before(node: Any) -> list[Any]:
    before: dict[int, Any] = {}
    for attribute in _BEFORE:
        value = vars(node).get(attribute)
        items = value if isinstance(value, list | tuple) else (value,)
        before |= {id(item): item for item in items if _is_step(item)}
    return list(before.values())


def _name(node: Any) -> str:
    name = type(node).__name__.lstrip("_")
    for ending in ("MapDataset", "IterDataset", "DatasetIterator", "Iterator", "Dataset"):
        if name.endswith(ending) and name != ending:
            return name.removesuffix(ending)
    return name


def _is_left_out(node: Any, name: str) -> bool:
    # A batch of an iterator counts samples, that of a dataset with numbers counts batches.
    return name in _NOT_IN_ORDER or (name == "Batch" and not hasattr(node, "__getitem__"))


def _length_of(node: Any) -> int | None:
    try:
        length = len(node)
    except Exception:  # iterators have none, and some sources cannot say
        return None
    return None if length >= sys.maxsize else int(length)


def _settings_of(node: Any, name: str) -> dict[str, Any]:
    """The settings that the order depends on, as plain data; objects are left out, and functions are their names."""
    attributes = vars(node)
    if _is_grains(node):
        named = {key.lstrip("_"): attributes[key] for key in _SETTINGS.get(name, ()) if key in attributes}
        named |= _settings_in_objects(attributes)
    else:
        named = {key.lstrip("_"): value for key, value in attributes.items() if _is_number(value)}
        named.pop("default_seed", None)  # computed when it is first asked for
    if "global_seed" in named:
        named["seed"] = named.pop("global_seed")
    plain = {key: _plain(value) for key, value in named.items()}
    return {key: value for key, value in plain.items() if value is not _UNKNOWN}


def _settings_in_objects(attributes: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    file = attributes.get("_path", attributes.get("_pq_path"))
    if isinstance(file, str):
        found["file"] = _last_part(file)
    if "_filter_fn" in attributes:
        found["filter"] = _name_of_function(attributes["_filter_fn"])
    transform: Any = attributes.get("_transform")
    if hasattr(transform, "max_fan_out"):
        found |= {"flat_map": _name_of_function(transform), "max_fan_out": transform.max_fan_out}
    config: Any = attributes.get("_config")
    if hasattr(config, "length_struct"):
        found["length_struct"] = config.length_struct
    if "_proportions" in attributes:
        found["proportions"] = _reduced(attributes["_proportions"])
    if "_selection_map" in attributes:
        found |= _selection(attributes["_selection_map"])
    return found


def _passes(filtered: Any) -> str | None:
    """Which of the first samples pass a filter that has no name to know it by; None if they cannot be read."""
    try:
        numbers = range(min(len(filtered), _NUM_FILTERED))
        return "".join("-" if filtered[number] is None else "+" for number in numbers)
    except Exception:  # as `_marks`
        return None


def _reduced(proportions: Sequence[float]) -> Sequence[float]:
    """Proportions without a common divisor: 100 and 100 mix as 1 and 1."""
    whole = [int(proportion) for proportion in proportions]
    if whole != list(proportions):
        return list(proportions)
    divisor = math.gcd(*whole) or 1
    return [proportion // divisor for proportion in whole]


def _selection(selection: Any) -> dict[str, Any]:
    """Which source gives which sample: the proportions or, as a rule may be of any class, what it answers."""
    if hasattr(selection, "_proportions"):
        return {"proportions": _reduced(selection._proportions)}
    numbers = [*range(_NUM_PROBES), *(2**power for power in range(7, 40))]
    try:
        picks = [[int(part) for part in selection[number]] for number in numbers if number < len(selection)]
    except Exception:  # a rule of the user's; the run reports what it raises
        return {"selection": type(selection).__qualname__}
    return {"selection": _digest(json.dumps(picks))}


_UNKNOWN = object()


def _is_number(value: Any) -> bool:
    return value is None or isinstance(value, bool | int | float | np.bool_ | np.integer | np.floating)


def _plain(value: Any) -> Any:
    """A value as plain data, equal in every process; `_UNKNOWN` for an object."""
    if isinstance(value, np.generic):
        value = value.item()
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list | tuple):
        items = [_plain(item) for item in value]
        return _UNKNOWN if any(item is _UNKNOWN for item in items) else items
    if isinstance(value, Mapping):
        pairs = {str(key): _plain(item) for key, item in value.items()}
        return _UNKNOWN if any(item is _UNKNOWN for item in pairs.values()) else pairs
    return _UNKNOWN


def _name_of_function(function: Any) -> str:
    """The name of a function, bound method or object; never its address."""
    owner = getattr(function, "__self__", None)
    if owner is not None:
        return f"{type(owner).__qualname__}.{getattr(function, '__name__', '')}"
    inner = getattr(function, "func", None)  # a functools.partial
    if inner is not None:
        arguments = _plain([list(function.args), function.keywords])
        return f"{_name_of_function(inner)}{'' if arguments is _UNKNOWN else json.dumps(arguments, sort_keys=True)}"
    return getattr(function, "__qualname__", type(function).__qualname__)


# The samples by which a source is recognised.


def _marks(source: Any, length: int) -> list[str] | None:
    """Digests of the first, middle and last sample; None if they cannot be read, or differ when they are read again."""
    numbers = sorted({0, length // 2, length - 1})
    try:
        first = [_digest_of_sample(source[number]) for number in numbers]
        again = [_digest_of_sample(source[number]) for number in numbers]
    except Exception:  # the run reports a sample that cannot be read; here it only means that it is not compared
        return None
    return first if first == again else None


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def _digest_of_sample(sample: Any) -> str:
    digest = hashlib.sha256()
    _add(sample, digest.update)
    return digest.hexdigest()[:12]


def _add(value: Any, update: Callable[[bytes], None]) -> None:
    """Adds a value to a digest; of an object of another class, only its class."""
    if isinstance(value, np.generic) and not value.dtype.hasobject:
        value = value.item()
    if isinstance(value, str | PurePath):
        value = _last_part(str(value))
    if value is None or isinstance(value, bool | int | float | complex | str | bytes):
        update(f"{type(value).__name__} {value!r};".encode())
    elif isinstance(value, np.ndarray) and not value.dtype.hasobject:
        update(f"array {value.dtype.str} {value.shape};".encode())
        update(np.ascontiguousarray(value).tobytes())
    elif isinstance(value, Mapping):
        update(f"dict {len(value)};".encode())
        for key in sorted(value, key=str):
            update(f"{key};".encode())
            _add(value[key], update)
    elif isinstance(value, list | tuple):
        update(f"list {len(value)};".encode())
        for item in value:
            _add(item, update)
    else:
        update(f"{type(value).__qualname__};".encode())


def _last_part(text: str) -> str:
    """A path without its folders: the same files may be elsewhere on another machine. Other texts are unchanged."""
    if len(text) > _LONGEST_PATH or "\n" in text:
        return text
    return text.replace("\\", "/").rstrip("/").rpartition("/")[2]


# Comparing.


def _differences(saved: Description, here: Description, place: str, *, lenient: bool) -> Iterator[str]:
    before = saved.get("of", []), here.get("of", [])
    names = saved["step"], here["step"]
    if names[0] != names[1] or len(before[0]) != len(before[1]):
        if not lenient:
            yield f"{place or 'step'}  saved {_summary(saved)}  here {_summary(here)}"
        return
    step = f"{place}{names[0].lower()}"
    if saved.get("length") != here.get("length"):
        yield f"{step} length  saved {saved.get('length', 'unknown')}  here {here.get('length', 'unknown')}"
    for name in saved["settings"].keys() & here["settings"].keys():
        then, now = saved["settings"][name], here["settings"][name]
        is_unread = name == "passes" and None in (then, now)
        if then != now and not is_unread:
            yield f"{step} {name}  saved {_shown(then)}  here {_shown(now)}"
    samples = saved.get("samples"), here.get("samples")
    if None not in samples and samples[0] != samples[1]:
        yield f"{step} samples  saved {_shown(samples[0])}  here {_shown(samples[1])}"
    for number, (then, now) in enumerate(zip(*before, strict=True)):
        inner = f"{step}[{number}] of " if len(before[0]) > 1 else f"{step} of "
        yield from _differences(then, now, inner, lenient=lenient)


def _summary(step: Description) -> str:
    of = len(step.get("of", []))
    return f"{step['step'].lower()} of {of} datasets" if of > 1 else step["step"].lower()


def _shown(value: Any) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)


def _without_samples(description: Description | None) -> Description | None:
    if description is None:
        return None
    return {**description, "pipeline": _step_without_samples(description["pipeline"])}


def _step_without_samples(step: Description) -> Description:
    found = {key: value for key, value in step.items() if key not in ("samples", "of")}
    if "of" in step:
        found["of"] = [_step_without_samples(part) for part in step["of"]]
    return found
