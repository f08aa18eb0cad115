"""A run as a file: `--config` reads the JSON printed by `--print-config`, or the same in TOML, or a part of it."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from jshard._files import read_named
from jshard._parsing import check_writable_values, parse_json, parse_toml, shown
from jshard._paths import expanded
from jshard._types import Json
from jshard.cli._devices import as_option
from jshard.errors import ShardingError, UnsafeFileError

_OPTION_OF_KEY = {"model_file": "model", "recipe_name": "recipe"}  # keys whose names differ from their options
_NOT_OPTIONS = frozenset(["model_file", "recipe", "versions"])  # the settings in "recipe" are read by `without_config`

NOT_IN_FILES = frozenset("model recipe set steps seed auto resume config dry_run print_config".split())
"""Options that say what a command does now, or that the keys of "recipe" set."""


def option_of(name: str) -> str:
    """Returns the option for a field of the arguments: `--held-out` for "held_out"."""
    return f"--{name.replace('_', '-')}"


def with_config(argv: Sequence[str], options: Collection[str], *, known: Collection[str]) -> list[str]:
    """Returns the arguments, completed from the file in `--config`.

    Args:
        argv: the arguments. Their options take precedence over the file.
        options: all that the command has.
        known: all that a file may name. Those that the command does not have are left out.
    """
    path = _config_path(argv)
    if path is None:
        return list(argv)
    where = f"--config {path}"
    config = read_config(expanded(path))
    # "recipe" is both: as an option it is the name, which a file has under "recipe_name".
    keys = {*_OPTION_OF_KEY, "recipe", "versions", *known} - (NOT_IN_FILES - {"recipe"})
    check_keys(config, keys, where)
    used = {word.partition("=")[0].replace("_", "-") for word in argv}  # tyro takes --held_out, too
    words: list[str] = []
    for key, value in config.items():
        name = _OPTION_OF_KEY.get(key, key)
        if key not in _NOT_OPTIONS and name in options and option_of(name) not in used:
            words += _words(option_of(name), value, where)
    # The model comes first: after an option of several values it would be taken for one of them.
    has_model = not argv[0].startswith("-")
    if has_model:
        return [argv[0], *words, *argv[1:]]
    if "model_file" in config:
        return [str(config["model_file"]), *words, *argv]
    return [*words, *argv]


def _config_path(argv: Sequence[str]) -> str | None:
    """Returns the value of `--config`; None without it, also if its value is missing, which the parser reports."""
    for position, word in enumerate(argv):
        option, equals, value = word.partition("=")
        if option != "--config":
            continue
        if equals:
            return value
        if position + 1 < len(argv):
            return argv[position + 1]
        return None
    return None


def _words(option: str, value: object, where: str) -> list[str]:
    """Returns the words that give an option a value of a file."""
    if value is None:
        return []
    if isinstance(value, Mapping):  # degrees of a mesh
        value = as_option(value)
    items = value if isinstance(value, list) else [value]
    for item in items:
        if isinstance(item, str) and item.startswith("-"):
            raise _unreadable(where, f"{option.removeprefix('--')} is {shown(item)}, which would be read as an option.")
    values = list(map(str, items))
    if option != "--unit":
        return [option, *values]
    words = []
    for setting in values:  # each needs the option of its own
        words += [option, setting]
    return words


def read_config(path: Path) -> dict[str, Json]:
    """Returns the contents of the file, as a tree of dicts."""
    where = f"--config {path}"
    try:
        raw = read_named(path)
        config = parse_toml(raw) if path.suffix == ".toml" else parse_json(raw)
        # Its texts name files, and stand in the record of the run. Numbers are checked where they are used.
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


def check_keys(keys: Collection[str], known: Collection[str], where: str) -> None:
    """Raises for unknown keys of a file, with the nearest known one."""
    unknown = [key for key in keys if key not in known]
    if not unknown:
        return
    (nearest,) = difflib.get_close_matches(unknown[0], sorted(known), n=1, cutoff=0.0)
    raise ShardingError(
        "The configuration has unknown keys.",
        where=[f"{where}: {key}" for key in unknown],
        why=f"the keys are {', '.join(sorted(known))}.",
        do=f"{nearest} instead of {unknown[0]}; or leave it out.",
    )


def leaves(node: Mapping[str, object], prefix: str = "") -> dict[str, object]:
    """Returns the values of a tree, by dotted keys."""
    values: dict[str, object] = {}
    for key, value in node.items():
        if isinstance(value, Mapping):
            values |= leaves(value, f"{prefix}{key}.")
        else:
            values[f"{prefix}{key}"] = value
    return values


def as_setting(key: str, value: object) -> str:
    """Returns a value in the form of `--set`."""
    items = value if isinstance(value, list) else [value]
    return f"{key}={','.join(map(_item_text, items))}"


def _item_text(item: object) -> str:
    if item is None or isinstance(item, bool):
        return str(item).lower()
    return str(item)
