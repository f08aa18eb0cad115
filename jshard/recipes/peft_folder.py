"""A folder of PEFT's adapters: its settings, and where its arrays are."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import cast

from jshard._files import read_json
from jshard._types import Json
from jshard.errors import FourPartError
from jshard.recipes.hf_config import ADAPTER, HFConfigError

WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin")

_ALL_MATRICES = "all-linear"  # PEFT's word for every matrix but the head

# Keys that change what an adapter computes, with the values that are computed here; as in PEFT an absent key is off.
_OFF: Mapping[str, tuple[Json, ...]] = {
    "alora_invocation_tokens": (None,),
    "alpha_pattern": (None, {}),
    "arrow_config": (None,),
    "bias": (None, "none"),
    "corda_config": (None,),
    "layer_replication": (None,),
    "layers_pattern": (None, []),
    "layers_to_transform": (None,),
    "lora_bias": (None, False),
    "megatron_config": (None,),
    "modules_to_save": (None, []),
    "rank_pattern": (None, {}),
    "target_parameters": (None, []),
    "trainable_token_indices": (None, []),
    "use_bdlora": (None,),
    "use_dora": (None, False),
    "use_qalora": (None, False),
}


def adapter_settings(folder: Path) -> dict[str, Json]:
    """Returns the fields of the recipe's `model.lora` that an adapter_config.json sets.

    Raises:
        HFConfigError: there is none, or its adapters are of a kind that is not computed here.
    """
    file = folder / ADAPTER
    config = _config(file)
    problems = [*_problems_of_kind(config), *_problems_of_size(config), *_problems_of_targets(config)]
    if problems:
        raise HFConfigError(
            "The adapters are of a kind that is not computed here.",
            where=[str(file), *problems],
            why="LoRA of matrices is: of one rank, without biases, and without further parameters.",
            do="from peft import AutoPeftModelForCausalLM\n"
            f"AutoPeftModelForCausalLM.from_pretrained({str(folder)!r}).merge_and_unload().save_pretrained('merged')",
        )
    rank = cast(int, config["r"])
    alpha = cast(float, config["lora_alpha"])
    if config.get("use_rslora"):
        # Its factor is alpha / sqrt(rank): the same as that of another alpha.
        alpha = alpha * math.sqrt(rank)
    return {"rank": rank, "alpha": float(alpha), "targets": _target_names(config["target_modules"])}


def _problems_of_kind(config: Mapping[str, Json]) -> list[str]:
    problems = []
    kind = config.get("peft_type")
    if kind != "LORA":
        problems.append(f"peft_type: {kind!r}")
    for key, computed in _OFF.items():
        if config.get(key) not in computed:
            problems.append(f"{key}: {config[key]!r}")
    return problems


def _problems_of_size(config: Mapping[str, Json]) -> list[str]:
    rank = config.get("r")
    alpha = config.get("lora_alpha")
    is_rank = isinstance(rank, int) and rank > 0
    if is_rank and isinstance(alpha, int | float):
        return []
    return [f"r: {rank!r}, lora_alpha: {alpha!r}"]


def _problems_of_targets(config: Mapping[str, Json]) -> list[str]:
    targets = config.get("target_modules")
    problems = []
    if isinstance(targets, str) and targets != _ALL_MATRICES:
        problems.append(f"target_modules: {targets!r}  # a pattern")
    if not isinstance(targets, str | list) or not targets:
        problems.append(f"target_modules: {targets!r}")
    return problems


def _target_names(targets: Json) -> str:
    if isinstance(targets, str):
        return targets
    return ",".join(map(str, cast(list[Json], targets)))


def adapter_weights(folder: Path) -> Path:
    """Returns the file with the arrays of a folder of adapters."""
    for name in WEIGHTS:
        if (folder / name).is_file():
            return folder / name
    raise _unreadable(folder, f"it has neither {' nor '.join(WEIGHTS)}.")


def _config(file: Path) -> dict[str, Json]:
    try:
        config = read_json(file)
    except FourPartError:
        raise
    except (OSError, ValueError) as error:
        raise _unreadable(file.parent, f"{ADAPTER}: {type(error).__name__}: {error}.") from None
    if not isinstance(config, dict):
        raise _unreadable(file.parent, f"{ADAPTER} is a {type(config).__name__}, not an object with keys.")
    return config


def _unreadable(folder: Path, why: str) -> HFConfigError:
    return HFConfigError(
        "The adapters cannot be read.",
        where=str(folder),
        why=why,
        do="--adapters FOLDER  # one that PEFT's save_pretrained or `jshard ckpt export --format peft` has written",
    )
