"""LoRA: small trained matrices beside the frozen ones of a model (Hu et al. 2021, arXiv 2106.09685), as PEFT has them.

A linear layer with an adapter computes `x W + (alpha / rank) x A B`, where A has `rank` columns and B `rank` rows. B
begins at zero, so an adapted model begins as the model itself. A model file has a field `lora: LoRA` in its config, and
makes its layers with `config.lora.linear(name, ...)`; names are those of Hugging Face's modules.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from typing import Any, TypeVar

import jax
from flax import nnx
from flax.nnx.filterlib import Filter

from jshard._types import Json
from jshard.checkpoint.formats import Names, Stored
from jshard.checkpoint.matching import stacks

M = TypeVar("M", bound=nnx.Module)

ALL_LINEAR = "all-linear"


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoRA:
    """Adapters beside the linear layers of a model; with them only they are trained.

    Attributes:
        rank: columns of A and rows of B; 0 for a model without adapters.
        alpha: the product of A and B counts `alpha / rank` times.
        targets: names of the layers in Hugging Face's model, separated by commas, such as "q_proj,v_proj"; or
            "all-linear" for all that the model file has adapters for.
    """

    rank: int = 0
    alpha: float = 16.0
    targets: str = ALL_LINEAR

    @property
    def scale(self) -> float:
        """The factor of the product of A and B."""
        return self.alpha / self.rank

    @property
    def names(self) -> tuple[str, ...]:
        """The targets, one by one."""
        return tuple(name.strip() for name in self.targets.split(",") if name.strip())

    def adapts(self, name: str) -> bool:
        """Returns whether a layer has an adapter, by its name there, such as "self_attn.q_proj"."""
        if not self.rank:
            return False
        if self.targets == ALL_LINEAR:
            return True
        return any(name == target or name.endswith(f".{target}") for target in self.names)

    def linear(self, name: str, d_in: int, d_out: int, **settings: Any) -> nnx.Linear:
        """Returns a linear layer, with an adapter if it is one of the targets.

        Args:
            name: that of the layer in Hugging Face's model.
            d_in: width of the input.
            d_out: width of the output.
            **settings: of `nnx.Linear`.
        """
        if self.adapts(name):
            return AdaptedLinear(d_in, d_out, lora=self, **settings)
        return nnx.Linear(d_in, d_out, **settings)

    def linear_general(self, name: str, d_in: int, d_out: tuple[int, ...], **settings: Any) -> nnx.LinearGeneral:
        """Returns the same as an `nnx.LinearGeneral`, for several output dims."""
        if self.adapts(name):
            return AdaptedLinearGeneral(d_in, d_out, lora=self, **settings)
        return nnx.LinearGeneral(d_in, d_out, **settings)

    def check(self, names: Collection[str]) -> None:
        """Raises a `ValueError` for settings that no model has, or targets that this one does not have.

        Args:
            names: of the layers that may have adapters.
        """
        if self.rank < 0:
            raise ValueError(f"lora.rank={self.rank} is no number of columns, nor 0 for no adapters")
        if not self.rank or self.targets == ALL_LINEAR:
            return
        for target in self.names:
            if not any(name == target or name.endswith(f".{target}") for name in names):
                raise ValueError(
                    f"lora.targets={self.targets!r}: no layer is called {target!r}; {', '.join(names)} are"
                )
        if not self.names:
            raise ValueError(f"lora.targets={self.targets!r} names no layer; {', '.join(names)} may be named")


NO_LORA = LoRA()


def lora_of(config: object) -> LoRA:
    """Returns the adapters of a recipe's model; a config without such a field has none."""
    lora = getattr(config, "lora", None)
    return lora if isinstance(lora, LoRA) else NO_LORA


def trained_in(config: object, wrt: Filter) -> Filter:
    """Returns what is trained of a recipe's model: the adapters, or without any what `wrt` selects."""
    return nnx.LoRAParam if lora_of(config).rank else wrt


def without_adapters(model: M) -> M:
    """Returns the model with its adapters off, as it was before they were trained. It shares the arrays.

    Examples:
        >>> reference = without_adapters(model)
    """
    return nnx.with_attributes(model, raise_if_not_found=False, lora_scale=0.0)


class _Adapter:
    """The part of an adapted layer that is the same for each kind of layer."""

    lora_a: nnx.LoRAParam
    lora_b: nnx.LoRAParam
    lora_scale: float

    def _add_adapter(self, d_in: int, d_out: int, lora: LoRA, rngs: nnx.Rngs) -> None:
        # As PEFT begins: A uniform up to 1 / sqrt(d_in), B zero.
        uniform = jax.nn.initializers.variance_scaling(1 / 3, "fan_in", "uniform")
        self.lora_a = nnx.LoRAParam(uniform(rngs.params(), (d_in, lora.rank)))
        self.lora_b = nnx.LoRAParam(jax.numpy.zeros((lora.rank, d_out)))
        self.lora_scale = lora.scale

    def _with_adapter(self, x: jax.Array, y: jax.Array) -> jax.Array:
        """Returns the output of the layer with that of the adapter added."""
        if not self.lora_scale:  # see `without_adapters`
            return y
        added = self.lora_scale * (x @ self.lora_a[...] @ self.lora_b[...])
        return y + added.reshape(y.shape).astype(y.dtype)


class AdaptedLinear(nnx.Linear, _Adapter):
    """A linear layer with an adapter; its own parameters have the paths that they have in `nnx.Linear`.

    Args:
        in_features: width of the input.
        out_features: width of the output.
        lora: rank and alpha of the adapter.
        rngs: keys of the parameters.
        **settings: further arguments of `nnx.Linear`.
    """

    def __init__(self, in_features: int, out_features: int, *, lora: LoRA, rngs: nnx.Rngs, **settings: Any) -> None:
        super().__init__(in_features, out_features, rngs=rngs, **settings)
        self._add_adapter(in_features, out_features, lora, rngs)

    def __call__(self, inputs: jax.Array, out_sharding: Any = None) -> jax.Array:
        """Returns the output of the layer and its adapter."""
        return self._with_adapter(inputs, super().__call__(inputs, out_sharding))


class AdaptedLinearGeneral(nnx.LinearGeneral, _Adapter):
    """An `nnx.LinearGeneral` over the last dim with an adapter, which has the output dims as one.

    Args:
        in_features: width of the input.
        out_features: sizes of the output dims.
        lora: rank and alpha of the adapter.
        rngs: keys of the parameters.
        **settings: further arguments of `nnx.LinearGeneral`.
    """

    def __init__(
        self, in_features: int, out_features: tuple[int, ...], *, lora: LoRA, rngs: nnx.Rngs, **settings: Any
    ) -> None:
        super().__init__(in_features, out_features, rngs=rngs, **settings)
        d_out = 1
        for size in out_features:
            d_out *= size
        self._add_adapter(in_features, d_out, lora, rngs)

    def __call__(self, inputs: jax.Array, out_sharding: Any = None) -> jax.Array:
        """Returns the output of the layer and its adapter."""
        return self._with_adapter(inputs, super().__call__(inputs, out_sharding))


# ---- PEFT's names.


PREFIX = "base_model.model."


def adapter_names(names: Names, paths: Collection[str]) -> dict[str, Stored]:
    """Returns the name of each adapter in PEFT's files, by its path in the model.

    Args:
        names: those of the model's parameters in Hugging Face's files.
        paths: of the parameters that the model has; a stack of layers has one for all.
    """
    result = {}
    for path, stored in names.items():
        layer = path.removesuffix("/kernel")
        their_names = stored.names if isinstance(stored, Stored) else (stored,)
        # Experts and norms have no adapters, and a matrix that is stored in parts has no name of its own.
        if layer == path or len(their_names) != 1:
            continue
        module = their_names[0].removesuffix(".weight")
        for ours, theirs in (("lora_a", "lora_A"), ("lora_b", "lora_B")):
            place = f"{layer}/{ours}"
            if _is_in(place, paths):
                # torch's Linear is (out, in).
                result[place] = Stored(f"{PREFIX}{module}.{theirs}.weight", transpose=True)
    return result


def _is_in(path: str, paths: Collection[str]) -> bool:
    return path in paths or any(stack in paths for stack, _ in stacks(path))


def adapter_config(lora: LoRA, names: Collection[str], *, base: str, model_type: Json) -> dict[str, Json]:
    """Returns the contents of an adapter_config.json.

    Args:
        lora: of the model.
        names: PEFT's, of the arrays.
        base: the folder or the name of the weights without adapters.
        model_type: that of Hugging Face.
    """
    modules = set()
    for name in names:
        *_, module, _, _ = name.split(".")  # ...q_proj.lora_A.weight
        modules.add(module)
    targets: list[Json] = [*sorted(modules)]
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "lora_dropout": 0.0,
        "target_modules": targets,
        "bias": "none",
        "fan_in_fan_out": model_type == "gpt2",  # whose matrices are (in, out)
        "init_lora_weights": True,
        "inference_mode": True,
        "modules_to_save": None,
        "use_dora": False,
        "use_rslora": False,
    }
