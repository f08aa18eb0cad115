"""Settings of a model's units that a command line changes: `--unit remat=full`."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import flax.linen as nn
from flax import nnx
from jax.sharding import AbstractMesh, Mesh

from jshard.api.fully_shard import SETTINGS, revise
from jshard.errors import ShardingError
from jshard.plans.policies import Prefetch, check_remat
from jshard.recipes.model_file import LinenUnits, ModelFile

_WORDS = {"true": True, "false": False, "none": None}


def parse_units(texts: Sequence[str]) -> dict[str, Any]:
    """The settings in texts such as `remat=full`, `prefetch=512MiB`, `reshard_after_forward=false`.

    Raises:
        ShardingError: there is no such setting of a unit, or it has no such value.
    """
    found: dict[str, Any] = {}
    for text in texts:
        name, _, value = (part.strip() for part in text.partition("="))
        if name not in SETTINGS or not value or name in found:
            raise ShardingError(
                "The units have no such setting." if name not in found else "A setting is given twice.",
                where=f"--unit {text}",
                why=f"the settings are {', '.join(SETTINGS)}, each as in js.fully_shard, and given once.",
                do="--unit remat=full --unit prefetch=2 --unit reshard_after_forward=false",
            )
        # The policy of remat is called "none", too.
        found[name] = value if name == "remat" else _read(value)
        _check(name, found[name])
    return found


def _read(value: str) -> Any:
    return int(value) if value.isdecimal() else _WORDS.get(value.lower(), value)


def _check(name: str, value: Any) -> None:
    if name == "remat":
        check_remat(value)
    elif name == "prefetch":
        Prefetch.parse(value)
    elif not (value is None or isinstance(value, int)):
        raise ShardingError(
            "The units have no such setting.",
            where=f"--unit {name}={value}",
            why="it is true, false, none, or a number of neighbours.",
            do="--unit reshard_after_forward=true",
        )


def with_units(model_file: ModelFile, settings: Mapping[str, Any]) -> ModelFile:
    """The model file with an annotation that says something else about the units; see `jshard.api.fully_shard.revise`.

    Args:
        model_file: the file as it is.
        settings: new values, by name.
    """
    if not settings:
        return model_file

    def annotate(model: nnx.Module | nn.Module, mesh: Mesh | AbstractMesh) -> LinenUnits | None:
        annotated = model_file.annotate(model, mesh)
        if isinstance(model, nn.Module):
            return LinenUnits(annotated, settings)
        revise(model, settings)
        return None

    return dataclasses.replace(model_file, annotate=annotate)
