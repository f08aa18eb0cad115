"""Devices that the table lacks, described in a file: a row of the table, and the differences."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NoReturn

from jshard._files import read_named
from jshard._parsing import is_number, is_text, parse_toml, shown
from jshard.errors import ShardingError
from jshard.facts.devices import DEVICES, DeviceFacts, DeviceLink, Reached

SUFFIX = ".toml"

_TEXTS = ("like", "title", "source")
_COUNTS = ("hbm_bytes", "hbm_bytes_per_s", "fast_group", "core_count")
_TABLES: Mapping[str, Any] = {
    "fast": DeviceLink,
    "slow": DeviceLink,
    "host": DeviceLink,
    "matmul": Reached,
    "attention": Reached,
}
_KEYS = (*_TEXTS, *_COUNTS, "flops_per_s", *_TABLES)


def read_device(path: Path) -> DeviceFacts:
    """The device that a TOML file describes.

    Args:
        path: the file. `like` names the row of the table with all other numbers of the device; `source` is the source
            of the file's numbers, and `title` the name of the device. These are optional:
            `flops_per_s`, dense peaks by dtype (bf16, f32, tf32, fp8); `hbm_bytes`, `hbm_bytes_per_s`; `fast_group`,
            the most devices joined by the fast links; `core_count`, of a GPU; the links `fast`, `slow` and `host`, with
            `gb_per_s` one way and the percentage that collectives reach; the percentages of `matmul` and `attention`.

    Raises:
        ShardingError: the file does not exist, or has a value that no device can have.

    Example:
        >>> # h20.toml
        >>> like = "h200"
        >>> title = "NVIDIA H20, 96 GB"
        >>> source = "NVIDIA H20 data sheet"
        >>> core_count = 78
        >>> flops_per_s = { bf16 = 148e12, tf32 = 74e12, fp8 = 296e12, f32 = 44e12 }
        >>> hbm_bytes = 102_625_181_696
        >>> hbm_bytes_per_s = 4.0e12
        >>> slow = { gb_per_s = 50, name = "one 400 Gb/s adapter per GPU", reached_percent = 84, least_percent = 30 }
    """
    try:
        found = parse_toml(read_named(path))
    except (OSError, ValueError) as error:
        _refuse(path, "it cannot be read", str(error), f'like = "h100"  # {path} is TOML, and starts with such a line')
    _known(path, "", found, _KEYS)
    for key in _TEXTS:
        _check(path, key, found.get(key), is_text(found.get(key)), "a quoted string, which is required")
    base = DEVICES.get(found["like"])
    if base is None:
        near = difflib.get_close_matches(found["like"], DEVICES, n=1) or ["h100"]
        _refuse(path, f"like = {found['like']!r}", f"the table has {', '.join(DEVICES)}.", f'like = "{near[0]}"')
    source = f"{path.name}: {found['source']}"
    changed: dict[str, Any] = {"title": found["title"]}
    for key in _COUNTS:
        if key in found:
            _check(path, key, found[key], _is_count(found[key]), "a number from 1 to 2**63 - 1")
            changed[key] = int(found[key])
    if "flops_per_s" in found:
        peaks = found["flops_per_s"]
        _check(path, "flops_per_s", peaks, isinstance(peaks, dict), "a table of dtypes and operations per second")
        _known(path, "flops_per_s.", peaks, ("bf16", "f32", "tf32", "fp8"))
        for dtype, peak in peaks.items():
            _check(path, f"flops_per_s.{dtype}", peak, _is_positive(peak), "a number above 0")
        changed["flops_per_s"] = {**base.flops_per_s, **peaks}
    stated = {key: source for key in changed if key in (*_COUNTS, "flops_per_s")}
    changed |= {key: _table(path, key, found[key], getattr(base, key), source) for key in _TABLES if key in found}
    return dataclasses.replace(base, **_described(path, base, changed), stated_in=stated)


def _described(path: Path, base: DeviceFacts, changed: Mapping[str, Any]) -> dict[str, Any]:
    """The changes, including those to a GPU's description for the compiler."""
    fields = {key: value for key, value in changed.items() if key != "core_count"}
    if base.target is None:
        if "core_count" in changed:
            _refuse(
                path, "core_count", f"a {base.title} has no description for its compiler.", "# core_count: remove it"
            )
        return fields
    names = {"hbm_bytes": "device_memory_size", "hbm_bytes_per_s": "memory_bandwidth", "core_count": "core_count"}
    target = {name: changed[key] for key, name in names.items() if key in changed}
    return fields | {"target": dataclasses.replace(base.target, **target)}


def _table(path: Path, key: str, given: Any, base: Any, source: str) -> Any:
    """A link, or kernel efficiencies: the given numbers, and the others from the table's row."""
    cls = _TABLES[key]
    names = [field.name for field in dataclasses.fields(cls)]
    _check(path, key, given, isinstance(given, dict), f"a table of {', '.join(names)}")
    _known(path, f"{key}.", given, names)
    for name, value in given.items():
        if name in ("name", "source"):
            _check(path, f"{key}.{name}", value, is_text(value), "a quoted string")
        else:
            _check(path, f"{key}.{name}", value, _is_positive(value), "a number above 0")
    of = "source" if cls is Reached else "name"
    values = ({} if base is None else vars(base)) | given | {of: f"{given[of]}, {source}" if of in given else source}
    if missing := [field.name for field in dataclasses.fields(cls) if field.name not in values and _is_needed(field)]:
        _refuse(
            path, key, f"{(base and base.name) or 'the table'} has no {missing[0]} either.", f"{key}.{missing[0]} = 64"
        )
    ordered = ("least", "stated", "most") if cls is Reached else ("least_percent", "reached_percent")
    sizes = [values[name] for name in ordered if name in values]
    if sizes != sorted(sizes) or (sizes and sizes[-1] > 100):
        order = " <= ".join(ordered)
        _refuse(path, key, f"they are {', '.join(map(str, sizes))}, in percent.", f"# {key}: {order} <= 100")
    return cls(**values)


def _is_needed(field: dataclasses.Field[Any]) -> bool:
    return field.default is dataclasses.MISSING


def _is_positive(value: Any) -> bool:
    return is_number(value) and 0 < value < _LARGEST


def _is_count(value: Any) -> bool:
    """Whether it is a number of bytes or of things: as an integer it is at least 1, and has 64 bits."""
    return is_number(value) and 1 <= value < 2**63


_LARGEST = 1e30  # of a rate: with larger ones, products would be infinite


def _check(path: Path, key: str, value: object, is_good: bool, wanted: str) -> None:
    if not is_good:
        is_or_has = "it is missing" if value is None else f"it is {shown(value)}"
        _refuse(path, key, f"{is_or_has}, and should be {wanted}.", _LINES[key[:4]])


_LINES = {
    **{"like": 'like = "h100"', "titl": 'title = "NVIDIA H20, 96 GB"', "sour": 'source = "NVIDIA H20 data sheet"'},
    **{"hbm_": "hbm_bytes = 96_000_000_000", "fast": "fast_group = 8", "core": "core_count = 78"},
    **{
        "flop": "flops_per_s = { bf16 = 148e12 }",
        "slow": "slow = { gb_per_s = 50 }",
        "host": "host = { gb_per_s = 64 }",
    },
    **{
        "matm": "matmul = { least = 60, stated = 70, most = 80 }",
        "atte": "attention = { least = 30, stated = 42, most = 54 }",
    },
}


def _known(path: Path, of: str, given: Mapping[str, Any], names: Iterable[str]) -> None:
    names = list(names)
    for key in given:
        if key not in names:
            near = difflib.get_close_matches(key, names, n=1)
            _refuse(
                path,
                f"{of}{key}",
                f"the keys are {', '.join(names)}.",
                f"{of}{near[0]}" if near else f"# {key}: remove it",
            )


def _refuse(path: Path, where: str, why: str, do: str) -> NoReturn:
    raise ShardingError("The file does not describe a device.", where=f"{path}, {where}", why=why, do=do)
