"""The keys of Hugging Face's `config.json` and the fields of a recipe: one table for each `model_type`.

A `Key` is read in three directions: from the file to the value that Transformers computes with, from there to fields of
the recipe, and back. A value that a recipe cannot have raises a ValueError with the reason.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterable, Mapping
from typing import Any

Config = Mapping[str, Any]
"""The contents of a config.json."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Key:
    """A key whose value is a field of the recipe's model.

    Attributes:
        name: of the key.
        field: of the recipe's model.
        default: what Transformers takes if the key is absent; its type is that of the value.
        off: the value of a model without such a field; None if there is none.
        is_compared: whether another value of the recipe is another model.
    """

    name: str
    field: str
    default: Any
    off: Any = None
    is_compared: bool = True

    @property
    def names(self) -> tuple[str, ...]:
        """The keys of the file that it reads."""
        return (self.name,)

    @property
    def described(self) -> str:
        """The fields of the recipe, for people."""
        return f"model.{self.field}"

    def stored(self, config: Config) -> Any:
        """The value that Transformers computes with."""
        return typed(config.get(self.name, self.default), type(self.default))

    def computed(self, model: Any) -> Any:
        """The same of the recipe's model; None if it has no such field."""
        return getattr(model, self.field, self.off)

    def fields(self, value: Any) -> dict[str, Any]:
        """The fields of the recipe for a value."""
        return {self.field: value}

    def written(self, value: Any) -> dict[str, Any]:
        """The keys of the file for a value."""
        return {self.name: value}


@dataclasses.dataclass(frozen=True, kw_only=True)
class KeyFrom(Key):
    """A key that may be null or absent: then its value follows from other keys.

    Attributes:
        base: a key that the value follows from.
        times: the value is so many times that of `base`.
    """

    base: Key
    times: int = 1
    default: Any = None

    def stored(self, config: Config) -> Any:
        """See `Key.stored`."""
        value = config.get(self.name, self.default)
        if value is None:
            return self.times * self.base.stored(config)
        return typed(value, int)


@dataclasses.dataclass(frozen=True, kw_only=True)
class HeadWidth(Key):
    """The width of a head: by default that of the model over its heads, which the recipe has as 0."""

    name: str = "head_dim"
    field: str = "head_dim"
    default: Any = None
    width: Key
    heads: Key

    def stored(self, config: Config) -> Any:
        """See `Key.stored`."""
        value = config.get(self.name, self.default)
        if value is None:
            return self.width.stored(config) // self.heads.stored(config)
        return typed(value, int)

    def computed(self, model: Any) -> Any:
        """See `Key.computed`."""
        return getattr(model, self.field, 0) or model.d_model // model.n_head


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttentionBias(Key):
    """Whether the four matrices of attention have biases."""

    name: str = "attention_bias"
    field: str = "attention_bias"
    default: Any = False
    off: Any = "none"

    def computed(self, model: Any) -> Any:
        """See `Key.computed`."""
        kinds = {"none": False, "all": True}
        return kinds.get(super().computed(model), "of queries, keys and values only")

    def fields(self, value: Any) -> dict[str, Any]:
        """See `Key.fields`."""
        if value:
            return {self.field: "all"}
        return {self.field: "none"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Window(Key):
    """The sliding window of Mistral, null for none."""

    name: str = "sliding_window"
    field: str = "sliding_window"
    default: Any = None
    off: Any = 0

    def stored(self, config: Config) -> Any:
        """See `Key.stored`."""
        value = config.get(self.name, self.default)
        if value is None:
            return 0
        return typed(value, int)

    def written(self, value: Any) -> dict[str, Any]:
        """See `Key.written`."""
        return {self.name: value or None}


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerWindow(Window):
    """The sliding window of Qwen, which other keys switch on, for all layers or some."""

    default: Any = 4096
    layers: Key

    @property
    def names(self) -> tuple[str, ...]:
        """See `Key.names`."""
        return ("sliding_window", "use_sliding_window", "max_window_layers", "layer_types")

    def stored(self, config: Config) -> Any:
        """See `Key.stored`."""
        window = 0
        if typed(config.get("use_sliding_window", False), bool):
            window = super().stored(config)
        count = self.layers.stored(config)
        kinds = config.get("layer_types")
        if kinds is None:
            first = typed(config.get("max_window_layers", 28), int)
            sliding = max(count - first, 0) if window else 0
        elif isinstance(kinds, list) and len(kinds) == count and set(kinds) <= {"full_attention", "sliding_attention"}:
            sliding = kinds.count("sliding_attention")
        else:
            raise ValueError(f"layer_types={json.dumps(kinds)} does not name the attention of {count} layers")
        if sliding and not window:
            raise ValueError("layer_types has sliding attention, and use_sliding_window is off")
        if sliding not in (0, count):
            raise ValueError(f"{sliding} of {count} layers have a window; the recipe has one in all layers or in none")
        return window if sliding else 0

    def written(self, value: Any) -> dict[str, Any]:
        """See `Key.written`."""
        if value:
            return {"use_sliding_window": True, "sliding_window": value, "max_window_layers": 0}
        return {"use_sliding_window": False}


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScalingKey:
    """A key of `rope_scaling`, and the field of the recipe's `rope_scaling` that has its value."""

    name: str
    field: str
    default: Any = None  # None: the key is needed


_FACTOR = ScalingKey(name="factor", field="factor")
_ORIGINAL = ScalingKey(name="original_max_position_embeddings", field="original_size")
_SCALINGS: Mapping[str, tuple[ScalingKey, ...]] = {
    "default": (),
    "linear": (_FACTOR,),
    "dynamic": (_FACTOR, _ORIGINAL),
    "llama3": (
        _FACTOR,
        _ORIGINAL,
        ScalingKey(name="low_freq_factor", field="low_freq_factor"),
        ScalingKey(name="high_freq_factor", field="high_freq_factor"),
    ),
    "yarn": (
        _FACTOR,
        _ORIGINAL,
        ScalingKey(name="beta_fast", field="beta_fast", default=32.0),
        ScalingKey(name="beta_slow", field="beta_slow", default=1.0),
        ScalingKey(name="truncate", field="truncate", default=True),
        ScalingKey(name="attention_factor", field="attention_factor"),
    ),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rope(Key):
    """Rotary positions: in `rope_theta` and `rope_scaling`, or from Transformers 5 on together in `rope_parameters`."""

    name: str = "rope_parameters"
    field: str = "rope_theta"
    default: Any = 10_000.0
    length: Key

    @property
    def names(self) -> tuple[str, ...]:
        """See `Key.names`."""
        return ("rope_theta", "rope_scaling", "rope_parameters", "partial_rotary_factor", "rope_interleaved")

    @property
    def described(self) -> str:
        """See `Key.described`."""
        return "model.rope_theta, model.rope_scaling"

    def stored(self, config: Config) -> Any:
        """See `Key.stored`; a dict with "rope_theta", "kind" and the fields of that kind."""
        _check_only(config, "partial_rotary_factor", (None, 1))
        _check_only(config, "rope_interleaved", (None, False))
        parts = [dict(value) for value in map(config.get, ("rope_parameters", "rope_scaling")) if value]
        thetas = {part.pop("rope_theta") for part in parts if part.get("rope_theta") is not None}
        thetas |= {config["rope_theta"]} if config.get("rope_theta") is not None else set()
        if len(thetas) > 1:
            raise ValueError(f"rope_theta is {' and '.join(map(str, sorted(thetas)))}")
        scalings = [self._scaling(part, config) for part in parts]
        if any(scaling != scalings[0] for scaling in scalings):
            raise ValueError("rope_parameters and rope_scaling differ")
        theta = typed(next(iter(thetas), self.default), float)
        return {"rope_theta": theta, **next(iter(scalings), {"kind": "default"})}

    def _scaling(self, part: dict[str, Any], config: Config) -> dict[str, Any]:
        """The kind of a scaling and its fields."""
        _check_only(part, "partial_rotary_factor", (None, 1))
        kinds = {part[name] for name in ("rope_type", "type") if part.get(name) is not None}
        if len(kinds) > 1 or not kinds <= _SCALINGS.keys():
            raise ValueError(f"the kind {json.dumps(sorted(map(str, kinds)))} is not one of {', '.join(_SCALINGS)}")
        kind = next(iter(kinds), "default")
        keys = {name: value for name, value in part.items() if value is not None}
        for name in ("rope_type", "type", "partial_rotary_factor"):
            keys.pop(name, None)
        longest = self.length.stored(config)
        if kind == "dynamic" and keys.setdefault(_ORIGINAL.name, longest) != longest:
            raise ValueError(f"dynamic scaling begins at max_position_embeddings={longest}")
        if kind in ("llama3", "yarn"):
            keys.setdefault(_ORIGINAL.name, longest)
        if kind == "yarn":
            _settle_yarn(keys, longest)
        unknown = keys.keys() - {key.name for key in _SCALINGS[kind]}
        if unknown:
            raise ValueError(f"{', '.join(sorted(unknown))} of {kind} scaling is not known here")
        return {"kind": kind, **{key.field: _scaling_value(key, keys) for key in _SCALINGS[kind]}}

    def computed(self, model: Any) -> Any:
        """See `Key.computed`."""
        theta = super().computed(model)
        if theta is None:
            return None
        scaling = getattr(model, "rope_scaling", None)
        kind = getattr(scaling, "kind", "default")
        fields = {key.field: getattr(scaling, key.field) for key in _SCALINGS.get(kind, ())}
        return {"rope_theta": theta, "kind": kind, **fields}

    def fields(self, value: Any) -> dict[str, Any]:
        """See `Key.fields`."""
        scaling = {f"rope_scaling.{name}": setting for name, setting in value.items() if name != "rope_theta"}
        if value["kind"] == "default":
            scaling = {"rope_scaling.kind": "default"}
        return {"rope_theta": value["rope_theta"]} | scaling

    def written(self, value: Any) -> dict[str, Any]:
        """See `Key.written`; in the form that all versions of Transformers read."""
        kind = value["kind"]
        if kind == "default":
            return {"rope_theta": value["rope_theta"], "rope_scaling": None}
        keys = {key.name: value[key.field] for key in _SCALINGS[kind] if value[key.field] is not None}
        result: dict[str, Any] = {"rope_theta": value["rope_theta"]}
        if kind == "dynamic":  # it begins there
            result[self.length.name] = keys.pop(_ORIGINAL.name)
        return result | {"rope_scaling": {"rope_type": kind, **keys}}


def _settle_yarn(keys: dict[str, Any], longest: int) -> None:
    """Replaces the keys of yarn from which Transformers computes others."""
    if "factor" not in keys:
        keys["factor"] = longest / typed(keys[_ORIGINAL.name], int)
    top, bottom = keys.pop("mscale", None), keys.pop("mscale_all_dim", None)
    if top and bottom and "attention_factor" not in keys:
        growth = 0.1 * math.log(typed(keys["factor"], float))
        keys["attention_factor"] = (typed(top, float) * growth + 1) / (typed(bottom, float) * growth + 1)


def _scaling_value(key: ScalingKey, keys: Mapping[str, Any]) -> Any:
    value = keys.get(key.name, key.default)
    if value is None and key.name == "attention_factor":
        return None
    if value is None:
        raise ValueError(f"{key.name} is missing")
    if key is _ORIGINAL:
        return typed(value, int)
    if isinstance(key.default, bool):
        return typed(value, bool)
    return typed(value, float)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fixed:
    """A key of which only some values are computed, and absent means one of them."""

    name: str
    only: tuple[Any, ...]
    why: str = ""

    @property
    def names(self) -> tuple[str, ...]:
        """The keys of the file that it reads."""
        return (self.name,)

    def check(self, config: Config) -> None:
        """Raises a ValueError for another value."""
        if self.name in config and self.why and not _is_among(config[self.name], self.only):
            raise ValueError(self.why)
        _check_only(config, self.name, self.only)


def typed(value: Any, kind: type) -> Any:
    """The value in the type of its key; integers count as floats."""
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    is_kind = isinstance(value, kind) and isinstance(value, bool) == (kind is bool)
    if not is_kind:
        raise ValueError(f"{json.dumps(value)} is no {kind.__name__}")
    if kind is not bool and not 0 < value < math.inf:
        raise ValueError(f"{value} is not above 0")
    return value


def _is_among(value: Any, values: Iterable[Any]) -> bool:
    return any(value == other and isinstance(value, bool) == isinstance(other, bool) for other in values)


def _check_only(config: Config, name: str, only: tuple[Any, ...]) -> None:
    if name in config and not _is_among(config[name], only):
        values = " or ".join(json.dumps(value) for value in only if value is not None or len(only) == 1)
        raise ValueError(f"{name} is supported as {values} only")


# ---- The tables.


@dataclasses.dataclass(frozen=True, kw_only=True)
class Family:
    """The table of one `model_type`.

    Attributes:
        model_type: its name.
        architectures: the classes whose parameters a model file of jshard has; the first is written.
        keys: those that are fields of the recipe.
        fixed: those of which only some values are computed.
        implied: fields of the recipe that follow from the type.
    """

    model_type: str
    architectures: tuple[str, ...]
    keys: tuple[Key, ...]
    fixed: tuple[Fixed, ...] = ()
    implied: Mapping[str, Any] = dataclasses.field(default_factory=dict)


# What a model without such a field computes.
OFF = {"attention_bias": "none", "mlp_bias": False, "qk_norm": False, "sliding_window": 0}

_QUANTIZED = "quantized parameters are not read; export them in 16 or 32 bits"
_CUSTOM_CODE = "the model is the Python code beside it, whatever model_type says"
ANY_FAMILY = (
    Fixed(name="add_cross_attention", only=(False, None)),
    Fixed(name="auto_map", only=(None, {}), why=_CUSTOM_CODE),
    Fixed(name="cross_attention_hidden_size", only=(None,)),
    Fixed(name="is_encoder_decoder", only=(False, None)),
    Fixed(name="per_layer_config", only=(None, {})),
    Fixed(name="pruned_heads", only=(None, {})),
    Fixed(name="quantization_config", only=(None,), why=_QUANTIZED),
    Fixed(name="tie_encoder_decoder", only=(False, None)),
)

# Keys that leave the logits unchanged, whatever their value is.
HARMLESS = frozenset(
    # Of training: the recipe has its own.
    "attention_dropout attn_pdrop embd_pdrop resid_pdrop initializer_range gradient_checkpointing"
    # Of the file, of how it is computed, and of what a call returns.
    " _attn_implementation _attn_implementation_autoset _commit_hash _from_model_config _name_or_path"
    " attn_implementation chunk_size_feed_forward dtype experts_implementation is_decoder is_llama_config"
    " keys_to_ignore_at_inference name_or_path output_attentions output_hidden_states pretraining_tp"
    " reorder_and_upcast_attn return_dict tf_legacy_loss torch_dtype torchscript transformers_version unsloth_fixed"
    " unsloth_version use_bfloat16 use_cache use_return_dict vocab_file"
    # Of tokens and of heads of other tasks; `architectures` says whether there is one.
    " bos_token_id decoder_start_token_id eos_token_id pad_token_id sep_token_id prefix tokenizer_class"
    " finetuning_task id2label label2id n_ctx num_labels problem_type summary_activation summary_first_dropout"
    " summary_proj_to_labels summary_type summary_use_proj task_specific_params"
    # Of generation.
    " assistant_confidence_threshold assistant_lookbehind bad_words_ids begin_suppress_tokens diversity_penalty"
    " do_sample early_stopping encoder_no_repeat_ngram_size encoder_repetition_penalty epsilon_cutoff eta_cutoff"
    " exponential_decay_length_penalty forced_bos_token_id forced_eos_token_id length_penalty max_length min_length"
    " no_repeat_ngram_size num_assistant_tokens num_assistant_tokens_schedule num_beam_groups num_beams"
    " num_return_sequences output_scores remove_invalid_values repetition_penalty return_dict_in_generate"
    " suppress_tokens target_lookbehind temperature top_k top_p typical_p".split()
)


def _decoder(name: str, *, shared: int | None, width: int | None, window: bool = False, bias: bool) -> tuple[Key, ...]:
    """The keys of Llama and its relatives; `shared` and `width` are the defaults of kv heads and of a head's width."""
    wide = Key(name="hidden_size", field="d_model", default=4096)
    heads = Key(name="num_attention_heads", field="n_head", default=32)
    layers = Key(name="num_hidden_layers", field="n_layer", default=32)
    length = Key(name="max_position_embeddings", field="block_size", default=_LENGTHS[name], is_compared=False)
    keys: list[Key] = [
        Key(name="vocab_size", field="vocab_size", default=151_936 if name.startswith("qwen") else 32_000),
        length,
        layers,
        heads,
        KeyFrom(name="num_key_value_heads", field="n_kv_head", default=shared, base=heads),
        HeadWidth(width=wide, heads=heads, default=width),
        wide,
        Key(name="intermediate_size", field="d_ff", default=_HIDDEN_SIZES[name]),
        Key(name="rms_norm_eps", field="rms_norm_eps", default=1e-6),
        Rope(length=length),
        Key(name="tie_word_embeddings", field="tied", default=False),
    ]
    if bias:
        keys.append(AttentionBias())
    if window:
        keys.append(LayerWindow(layers=layers))
    return tuple(keys)


_LENGTHS = {"llama": 2048, "mistral": 131_072, "qwen2": 32_768, "qwen3": 32_768}
_HIDDEN_SIZES = {"llama": 11_008, "mistral": 14_336, "qwen2": 22_016, "qwen3": 22_016}
_SILU = Fixed(name="hidden_act", only=("silu", "swish"))
_NO_WINDOW = Fixed(name="sliding_window", only=(None,))
_NO_MROPE = Fixed(name="use_mrope", only=(False, None))
_NO_BIAS = (Fixed(name="attention_bias", only=(False, None)), Fixed(name="mlp_bias", only=(False, None)))

_EMBEDDING = Key(name="n_embd", field="d_model", default=768)

FAMILIES: Mapping[str, Family] = {
    family.model_type: family
    for family in (
        Family(
            model_type="llama",
            architectures=("LlamaForCausalLM", "LLaMAForCausalLM", "LlamaModel"),
            keys=(
                *_decoder("llama", shared=None, width=None, bias=True),
                Key(name="mlp_bias", field="mlp_bias", default=False, off=False),
            ),
            fixed=(_SILU, _NO_WINDOW, _NO_MROPE),
            implied={"qk_norm": False, "sliding_window": 0},
        ),
        Family(
            model_type="mistral",
            architectures=("MistralForCausalLM", "MistralModel"),
            keys=(*_decoder("mistral", shared=8, width=None, bias=False), Window(default=4096)),
            fixed=(_SILU, *_NO_BIAS),
            implied={"attention_bias": "none", "mlp_bias": False, "qk_norm": False},
        ),
        Family(
            model_type="qwen2",
            architectures=("Qwen2ForCausalLM", "Qwen2Model"),
            keys=_decoder("qwen2", shared=32, width=None, window=True, bias=False),
            fixed=(_SILU, _NO_MROPE),
            implied={"attention_bias": "qkv", "mlp_bias": False, "qk_norm": False},
        ),
        Family(
            model_type="qwen3",
            architectures=("Qwen3ForCausalLM", "Qwen3Model"),
            keys=_decoder("qwen3", shared=32, width=128, window=True, bias=True),
            fixed=(_SILU, _NO_MROPE),
            implied={"mlp_bias": False, "qk_norm": True},
        ),
        Family(
            model_type="gpt2",
            architectures=("GPT2LMHeadModel", "GPT2Model"),
            keys=(
                Key(name="vocab_size", field="vocab_size", default=50_257),
                Key(name="n_positions", field="block_size", default=1024),
                Key(name="n_layer", field="n_layer", default=12),
                Key(name="n_head", field="n_head", default=12),
                _EMBEDDING,
                KeyFrom(name="n_inner", field="d_ff", base=_EMBEDDING, times=4),
                Key(name="layer_norm_epsilon", field="layer_norm_eps", default=1e-5),
                Key(name="tie_word_embeddings", field="tied", default=True),
            ),
            fixed=(
                Fixed(name="activation_function", only=("gelu_new", "gelu_pytorch_tanh")),
                Fixed(name="scale_attn_by_inverse_layer_idx", only=(False,)),
                Fixed(name="scale_attn_weights", only=(True,)),
            ),
            implied={"positions": "learned"},
        ),
    )
}
