"""`--print-config`: everything that a run is made from, as JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

from jshard.train.folder.as_json import tree, versions
from jshard.train.settings.recipe import Recipe


def config_json(
    *,
    model_file: str | Path,
    recipe_name: str,
    recipe: Recipe,
    mesh: Mapping[str, int],
    data: Sequence[Path] = (),
    tokenizer: str | Path | None = None,
    out: Path | None = None,
    options: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """The configuration of a run as values of JSON.

    Args:
        model_file: path of the model file, or its name if it comes with jshard.
        recipe_name: name of the recipe.
        recipe: the recipe with every option and setting in it.
        mesh: degree of every mesh axis.
        data: the paths given; none for the default corpus.
        tokenizer: the tokenizer's file; None for bytes.
        out: the folder of the run, if it is decided.
        options: the other options of the command.
    """
    return {
        "model_file": str(model_file),
        "recipe_name": recipe_name,
        "recipe": tree(recipe),
        "mesh": dict(mesh),
        "data": [str(path) for path in data],
        "tokenizer": None if tokenizer is None else str(tokenizer),
        "out": None if out is None else str(out),
        "options": tree(dict(options or {})),
        "versions": versions(),
    }


def print_config(config: Mapping[str, Any], file: TextIO | None = None) -> None:
    """Prints a configuration, by default on stdout, and nothing else: it can be piped into a file or `jq`."""
    print(json.dumps(config, indent=2, allow_nan=False), file=file)
