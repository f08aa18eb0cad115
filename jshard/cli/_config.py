"""A run as a file: `--config` reads the JSON printed by `--print-config`, or the same in TOML, or a part of it."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from jshard._files import read_named
from jshard._parsing import check_writable_values, parse_json, parse_toml, shown
from jshard._paths import expanded
from jshard.errors import ShardingError, UnsafeFileError

_OPTIONS = {"model_file": "model", "recipe_name": "recipe"}  # keys whose names differ from their options
# Options that say what a command does now, or that the keys of "recipe" set.
NOT_IN_FILES = frozenset("model recipe set steps seed auto resume config dry_run print_config".split())


def with_config(argv: Sequence[str], options: Collection[str], *, known: Collection[str]) -> list[str]:
    """The arguments, completed from the file in `--config`.

    Args:
        argv: the arguments.
        options: all that the command has.
        known: all that a file may name. Those that the command does not have are left out.
    """
    path = next((_value(argv, i) for i, word in enumerate(argv) if word.partition("=")[0] == "--config"), None)
    if path is None:
        return list(argv)
    config = read_config(expanded(path))
    check_keys(config, {*_OPTIONS, "recipe", "versions", *known} - (NOT_IN_FILES - {"recipe"}), f"--config {path}")
    given = {word.partition("=")[0].replace("_", "-") for word in argv}
    has_model = argv[0][:1] != "-"
    model = argv[:1] if has_model else [str(config["model_file"])] if "model_file" in config else []
    words = []
    for key, value in config.items():
        name = _OPTIONS.get(key, key)
        option = f"--{name.replace('_', '-')}"
        is_option = key not in ("model_file", "recipe", "versions") and name in options
        if is_option and option not in given:
            words += _words(option, value, f"--config {path}")
    return [*model, *words, *argv[has_model:]]


def _value(argv: Sequence[str], place: int) -> str | None:
    _, equals, value = argv[place].partition("=")
    return value if equals else next(iter(argv[place + 1 : place + 2]), None)


def _words(option: str, value: Any, where: str) -> list[str]:
    if value is None:
        return []
    if isinstance(value, Mapping):  # degrees of a mesh
        value = ",".join(f"{axis}={degree}" for axis, degree in value.items())
    items = value if isinstance(value, list) else [value]
    for item in items:
        if isinstance(item, str) and item.startswith("-"):
            raise _unreadable(where, f"{option.removeprefix('--')} is {shown(item)}, which would be read as an option.")
    values = list(map(str, items))
    return [word for one in values for word in (option, one)] if option == "--unit" else [option, *values]


def read_config(path: Path) -> dict[str, Any]:
    """The file, as a tree of dicts."""
    where = f"--config {path}"
    try:
        raw = read_named(path)
        config = parse_toml(raw) if path.suffix == ".toml" else parse_json(raw)
        check_writable_values(config, finite=False)
    except UnsafeFileError:
        raise
    except OSError as error:
        why = "it is a folder." if path.is_dir() else f"{(error.strerror or repr(error)).lower()}."
        raise _unreadable(where, why) from error
    except ValueError as error:
        raise _unreadable(where, f"{error}.") from error
    if not isinstance(config, dict) or not isinstance(config.get("recipe", {}), dict):
        raise _unreadable(where, 'it must be a table of options, with a table of settings as "recipe".')
    return config


def _unreadable(where: str, why: str) -> ShardingError:
    do = "jshard train gpt --print-config > gpt.json  # writes such a file"
    return ShardingError("The configuration cannot be read.", where=where, why=why, do=do)


def check_keys(found: Collection[str], known: Collection[str], where: str) -> None:
    """Raises for unknown keys of a file, with the nearest known one."""
    unknown = [key for key in found if key not in known]
    if unknown:
        near = difflib.get_close_matches(unknown[0], sorted(known), n=1, cutoff=0.0)
        raise ShardingError(
            "The configuration has unknown keys.",
            where=[f"{where}: {key}" for key in unknown],
            why=f"the keys are {', '.join(sorted(known))}.",
            do=f"{near[0]} instead of {unknown[0]}; or leave it out.",
        )


def leaves(node: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """The values of a tree, by dotted keys."""
    found: dict[str, Any] = {}
    for key, value in node.items():
        found |= leaves(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
    return found


def as_setting(key: str, value: Any) -> str:
    """A value in the form of `--set`."""
    values = value if isinstance(value, list) else [value]
    return f"{key}={','.join(str(one).lower() if one is None or isinstance(one, bool) else str(one) for one in values)}"
