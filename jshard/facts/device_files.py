"""Devices that the table lacks, described in a file: a row of the table, and the differences.

Anyone may have written such a file. So every value is checked before it is used: after `read_device` no number is
zero, infinite or of another type, and no percentage is above 100. Estimates divide by these numbers.
"""

from __future__ import annotations

import dataclasses
import difflib
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, NoReturn

from jshard._files import read_named
from jshard._parsing import is_number, is_text, parse_toml, shown
from jshard.errors import ShardingError
from jshard.facts.device_facts import DeviceLink, Reached
from jshard.facts.devices import DEVICES, DeviceFacts
from jshard.facts.gpu_target import AmdTarget

SUFFIX = ".toml"


@dataclasses.dataclass(frozen=True)
class _TableForm:
    """The form of a table of the file."""

    record: type[DeviceLink] | type[Reached]  # what it becomes; its fields are the keys
    label: str  # the field that takes the source of the numbers
    ascending: tuple[str, ...]  # percentages, none of which may exceed the next

    @property
    def keys(self) -> list[str]:
        """The keys that the table may have."""
        return [field.name for field in dataclasses.fields(self.record)]

    @property
    def required(self) -> list[str]:
        """The keys that have no default."""
        return [field.name for field in dataclasses.fields(self.record) if field.default is dataclasses.MISSING]


_LINK = _TableForm(DeviceLink, label="name", ascending=("least_percent", "reached_percent"))
_EFFICIENCY = _TableForm(Reached, label="source", ascending=("least", "stated", "most"))

_TEXTS = ("like", "title", "source")
_COUNTS = ("hbm_bytes", "hbm_bytes_per_s", "fast_group", "core_count")
_PEAKS = "flops_per_s"
_GFX = "gfx"
_TABLES = {
    "fast": _LINK,
    "slow": _LINK,
    "host": _LINK,
    "matmul": _EFFICIENCY,
    "attention": _EFFICIENCY,
}
_KEYS = (*_TEXTS, *_COUNTS, _PEAKS, _GFX, *_TABLES)
_PEAK_DTYPES = ("bf16", "f32", "tf32", "fp8")

# The compiler has its own description of a GPU. A number that stands in both must be changed in both, or the program
# would be compiled for one device and estimated for another.
_NAMES_IN_TARGET = {
    "hbm_bytes": "device_memory_size",
    "hbm_bytes_per_s": "memory_bandwidth",
    "core_count": "core_count",
}

_LARGEST_RATE = 1e30  # with larger ones, products would be infinite
_LARGEST_COUNT = 2**63 - 1

# A line to paste for a key whose value is refused.
_EXAMPLES = {
    "like": 'like = "h100"',
    "title": 'title = "NVIDIA H20, 96 GB"',
    "source": 'source = "NVIDIA H20 data sheet"',
    "hbm_bytes": "hbm_bytes = 96_000_000_000",
    "hbm_bytes_per_s": "hbm_bytes = 96_000_000_000",
    "fast": "fast_group = 8",
    "fast_group": "fast_group = 8",
    "core_count": "core_count = 78",
    "gfx": 'gfx = "gfx950"',
    "flops_per_s": "flops_per_s = { bf16 = 148e12 }",
    "slow": "slow = { gb_per_s = 50 }",
    "host": "host = { gb_per_s = 64 }",
    "matmul": "matmul = { least = 60, stated = 70, most = 80 }",
    "attention": "attention = { least = 30, stated = 42, most = 54 }",
}


def read_device(path: Path) -> DeviceFacts:
    """Reads the device that a TOML file describes.

    Args:
        path: the file. `like` names the row of the table with all other numbers of the device; `source` is the source
            of the file's numbers, and `title` the name of the device. These are optional:
            `flops_per_s`, dense peaks by dtype (bf16, f32, tf32, fp8); `hbm_bytes`, `hbm_bytes_per_s`; `fast_group`,
            the most devices joined by the fast links; `core_count`, of a GPU; the links `fast`, `slow` and `host`, with
            `gb_per_s` one way and the percentage that collectives reach; the percentages of `matmul` and `attention`;
            `gfx`, the architecture of an AMD GPU.

    Raises:
        ShardingError: the file does not exist, or has a value that no device can have.

    Examples:
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
    return _DeviceFile.read(path).device()


@dataclasses.dataclass(frozen=True)
class _DeviceFile:
    """A file that describes a device. Its methods refuse a value before they use it."""

    path: Path
    values: Mapping[str, Any]  # as written

    @classmethod
    def read(cls, path: Path) -> _DeviceFile:
        """Reads a file, and checks its keys and the texts that it must have."""
        try:
            values = parse_toml(read_named(path))
        except (OSError, ValueError) as error:
            do = f'like = "h100"  # {path} is TOML, and starts with such a line'
            _refuse(path, "it cannot be read", str(error), do)
        file = cls(path, values)
        file._check_keys("", values, _KEYS)
        for key in _TEXTS:
            text = values.get(key)
            file._check(is_text(text), key, text, "a quoted string, which is required")
        return file

    def device(self) -> DeviceFacts:
        """Returns the device: the row that the file names, with its changes."""
        base = self._base()
        counts = self._counts()
        changes: dict[str, object] = {"title": self.values["title"]}
        stated_in = dict.fromkeys(counts, self._source)
        if _PEAKS in self.values:
            changes[_PEAKS] = {**base.flops_per_s, **self._peaks()}
            stated_in[_PEAKS] = self._source
        for key, form in _TABLES.items():
            if key in self.values:
                changes[key] = self._table(key, form, getattr(base, key))
        changes |= self._description_changes(base, counts)
        return dataclasses.replace(base, **changes, stated_in=stated_in)

    @property
    def _source(self) -> str:
        return f"{self.path.name}: {self.values['source']}"

    def _base(self) -> DeviceFacts:
        """Returns the row of the table that the file names."""
        name = self.values["like"]
        if name not in DEVICES:
            near = difflib.get_close_matches(name, DEVICES, n=1) or ["h100"]
            self._refuse(f"like = {name!r}", f"the table has {', '.join(DEVICES)}.", f'like = "{near[0]}"')
        return DEVICES[name]

    def _counts(self) -> dict[str, int]:
        """Returns the numbers of bytes and of things."""
        counts = {}
        for key in _COUNTS:
            if key in self.values:
                value = self.values[key]
                self._check(_is_count(value), key, value, "a number from 1 to 2**63 - 1")
                counts[key] = int(value)
        return counts

    def _description_changes(self, base: DeviceFacts, counts: Mapping[str, int]) -> dict[str, object]:
        """Returns the counts as changes of fields, and the changes of the description for the compiler."""
        changes: dict[str, object] = {key: count for key, count in counts.items() if key != "core_count"}
        in_target: dict[str, Any] = {}
        if _GFX in self.values:
            in_target[_GFX] = self._gfx(base)
        if base.target is None:
            if "core_count" in counts:
                why = f"a {base.title} has no description for its compiler."
                self._refuse("core_count", why, "# core_count: remove it")
            return changes
        for key, name in _NAMES_IN_TARGET.items():
            if key in counts:
                in_target[name] = counts[key]
        changes["target"] = dataclasses.replace(base.target, **in_target)
        return changes

    def _gfx(self, base: DeviceFacts) -> str:
        """Returns the architecture to compile for."""
        gfx = self.values[_GFX]
        # It becomes a part of the description for the compiler, which is text: nothing else may be in it.
        is_name = isinstance(gfx, str) and re.fullmatch(r"gfx[0-9a-f]{3,4}", gfx) is not None
        self._check(is_name, _GFX, gfx, "the name of an AMD architecture")
        if not isinstance(base.target, AmdTarget):
            self._refuse(_GFX, f"a {base.title} is not by AMD.", "# gfx: remove it")
        return gfx

    def _peaks(self) -> dict[str, float]:
        """Returns the peaks by dtype."""
        peaks = self.values[_PEAKS]
        self._check(isinstance(peaks, dict), _PEAKS, peaks, "a table of dtypes and operations per second")
        self._check_keys(f"{_PEAKS}.", peaks, _PEAK_DTYPES)
        for dtype, peak in peaks.items():
            self._check(_is_rate(peak), f"{_PEAKS}.{dtype}", peak, "a number above 0")
        return peaks

    def _table(self, key: str, form: _TableForm, base: DeviceLink | Reached | None) -> DeviceLink | Reached:
        """Returns a link, or kernel efficiencies: the numbers of the file, and the others from the table's row."""
        changes = self.values[key]
        self._check_table(key, form, changes)
        values: dict[str, Any] = {} if base is None else dict(vars(base))
        values |= changes
        # The label is printed as the source of the numbers: it must not stay that of the row.
        values[form.label] = f"{changes[form.label]}, {self._source}" if form.label in changes else self._source
        for name in form.required:
            if name not in values:  # the row has no such link
                self._refuse(key, f"the table has no {name} either.", f"{key}.{name} = 64")
        self._check_order(key, form, values)
        return form.record(**values)

    def _check_table(self, key: str, form: _TableForm, changes: Any) -> None:
        """Checks the keys and values of a link, or of kernel efficiencies."""
        self._check(isinstance(changes, dict), key, changes, f"a table of {', '.join(form.keys)}")
        self._check_keys(f"{key}.", changes, form.keys)
        for name, value in changes.items():
            if name in ("name", "source"):
                self._check(is_text(value), f"{key}.{name}", value, "a quoted string")
            else:
                self._check(_is_rate(value), f"{key}.{name}", value, "a number above 0")

    def _check_order(self, key: str, form: _TableForm, values: Mapping[str, Any]) -> None:
        """Checks percentages against one another: those of the file are mixed with those of the row."""
        percentages = [values[name] for name in form.ascending if name in values]
        if not percentages:
            return
        if percentages != sorted(percentages) or percentages[-1] > 100:
            order = " <= ".join(form.ascending)
            why = f"they are {', '.join(map(str, percentages))}, in percent."
            self._refuse(key, why, f"# {key}: {order} <= 100")

    def _check(self, is_good: bool, key: str, value: object, expected: str) -> None:
        """Refuses the value of a key, such as "slow.gb_per_s", unless it is good."""
        if is_good:
            return
        problem = "it is missing" if value is None else f"it is {shown(value)}"
        top_key, _, _ = key.partition(".")
        self._refuse(key, f"{problem}, and should be {expected}.", _EXAMPLES[top_key])

    def _check_keys(self, prefix: str, values: Mapping[str, object], known: Collection[str]) -> None:
        """Refuses keys that would be ignored, with the nearest known one."""
        for key in values:
            if key not in known:
                near = difflib.get_close_matches(key, known, n=1)
                do = f"{prefix}{near[0]}" if near else f"# {key}: remove it"
                self._refuse(f"{prefix}{key}", f"the keys are {', '.join(known)}.", do)

    def _refuse(self, where: str, why: str, do: str) -> NoReturn:
        _refuse(self.path, where, why, do)


def _refuse(path: Path, where: str, why: str, do: str) -> NoReturn:
    raise ShardingError("The file does not describe a device.", where=f"{path}, {where}", why=why, do=do)


def _is_rate(value: Any) -> bool:
    return is_number(value) and 0 < value < _LARGEST_RATE


def _is_count(value: Any) -> bool:
    """Returns whether it is a number of bytes or of things: as an integer it is at least 1, and has 64 bits."""
    return is_number(value) and 1 <= value <= _LARGEST_COUNT
