"""The keys of Hugging Face's `config.json`, and the fields of a recipe that have their values.

A `ConfigKey` is read in three directions: from the file to the value that Transformers computes with, from there to
fields of the recipe, and back. A value that a recipe cannot have raises a ValueError with the reason.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterable, Mapping
from typing import Any

from jshard._parsing import is_int, shown
from jshard._types import Json

Config = Mapping[str, Json]
"""The contents of a config.json."""

ModelConfig = Any
"""The `model` of a recipe: a dataclass of the user's, with any fields."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ConfigKey:
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
    default: Json
    off: Json = None
    is_compared: bool = True

    @property
    def names(self) -> tuple[str, ...]:
        """The keys of the file that it reads."""
        return (self.name,)

    @property
    def described(self) -> str:
        """The fields of the recipe, for people."""
        return f"model.{self.field}"

    def stored(self, config: Config) -> Json:
        """Returns the value that Transformers computes with."""
        # A null in the file is not the default: `typed` refuses it.
        return typed(config.get(self.name, self.default), type(self.default))

    def computed(self, model: ModelConfig) -> Json:
        """Returns the same of the recipe's model; None if it has no such field."""
        return getattr(model, self.field, self.off)

    def fields(self, value: Json) -> dict[str, Json]:
        """Returns the fields of the recipe for a value."""
        return {self.field: value}

    def can_be(self, value: Json) -> bool:
        """Returns whether a file can have a value that a recipe computes."""
        return value is not None

    def written(self, value: Json) -> dict[str, Json]:
        """Returns the keys of the file for a value."""
        return {self.name: value}


@dataclasses.dataclass(frozen=True, kw_only=True)
class DerivedKey(ConfigKey):
    """A key that may be null or absent: then its value follows from other keys.

    Attributes:
        base: a key that the value follows from.
        times: the value is so many times that of `base`.
    """

    base: ConfigKey
    times: int = 1
    default: Json = None

    def stored(self, config: Config) -> Json:
        """See `ConfigKey.stored`."""
        value = config.get(self.name, self.default)
        if value is None:
            return self.times * self.base.stored(config)
        return typed(value, int)


@dataclasses.dataclass(frozen=True, kw_only=True)
class HeadWidth(ConfigKey):
    """The width of a head: by default that of the model over its heads, which the recipe has as 0."""

    name: str = "head_dim"
    field: str = "head_dim"
    default: Json = None
    width: ConfigKey
    heads: ConfigKey

    def stored(self, config: Config) -> Json:
        """See `ConfigKey.stored`."""
        value = config.get(self.name, self.default)
        if value is None:
            return self.width.stored(config) // self.heads.stored(config)
        return typed(value, int)

    def computed(self, model: ModelConfig) -> Json:
        """See `ConfigKey.computed`."""
        return getattr(model, self.field, 0) or model.d_model // model.n_head


@dataclasses.dataclass(frozen=True, kw_only=True)
class QueryScale(ConfigKey):
    """By the root of what Gemma divides scores: the recipe divides by that of the width of a head.

    Attributes:
        base: the width of a head.
    """

    name: str = "query_pre_attn_scalar"
    field: str = "head_dim"
    default: Json = 256
    base: ConfigKey

    def stored(self, config: Config) -> Json:
        """See `ConfigKey.stored`."""
        width = self.base.stored(config)
        value = super().stored(config)
        if value != width:
            raise ValueError(f"{value} is supported only for heads of that width, and not of {width}")
        return value


@dataclasses.dataclass(frozen=True)
class Meaning:
    """A value of the file and the value of the recipe's field that means the same."""

    stored: Json
    field: Json


@dataclasses.dataclass(frozen=True, kw_only=True)
class Choice(ConfigKey):
    """A key whose values have other names in the recipe."""

    choices: tuple[Meaning, ...]

    def stored(self, config: Config) -> Json:
        """See `ConfigKey.stored`."""
        value = config.get(self.name, self.default)
        check_only({self.name: value}, self.name, tuple(choice.stored for choice in self.choices))
        return value

    def computed(self, model: ModelConfig) -> Json:
        """See `ConfigKey.computed`; a value that the file cannot have is left as it is."""
        value = super().computed(model)
        for choice in self.choices:
            if choice.field == value:
                return choice.stored
        return value

    def fields(self, value: Json) -> dict[str, Json]:
        """See `ConfigKey.fields`."""
        choice = self._choice_of(value)
        assert choice is not None, "`stored` has checked the value"
        return {self.field: choice.field}

    def can_be(self, value: Json) -> bool:
        """See `ConfigKey.can_be`."""
        return self._choice_of(value) is not None

    def _choice_of(self, value: Json) -> Meaning | None:
        """Returns what a value of the file means; None if the file cannot have it."""
        for choice in self.choices:
            if choice.stored == value:
                return choice
        return None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gated(Choice):
    """The feed-forward of T5, which newer files describe by three keys."""

    @property
    def names(self) -> tuple[str, ...]:
        """See `ConfigKey.names`."""
        return (self.name, "dense_act_fn", "is_gated_act")

    def stored(self, config: Config) -> Json:
        """See `ConfigKey.stored`."""
        value = super().stored(config)
        is_gated = value == "gated-gelu"
        # They follow from the first, and a file in which they differ is of another model.
        check_only(config, "is_gated_act", (is_gated,))
        check_only(config, "dense_act_fn", ("gelu_new" if is_gated else "relu",))
        return value


@dataclasses.dataclass(frozen=True, kw_only=True)
class TiedAndScaled(ConfigKey):
    """Whether T5 scores tokens by their table: then, and only then, its recipe scales what it scores."""

    name: str = "tie_word_embeddings"
    field: str = "tied"
    default: Json = True

    @property
    def names(self) -> tuple[str, ...]:
        """See `ConfigKey.names`."""
        return (self.name, "scale_decoder_outputs")

    def stored(self, config: Config) -> Json:
        """See `ConfigKey.stored`."""
        is_tied = super().stored(config)
        check_only(config, "scale_decoder_outputs", (is_tied,))
        return is_tied


@dataclasses.dataclass(frozen=True, kw_only=True)
class SlidingWindow(ConfigKey):
    """The sliding window of Mistral, null for none."""

    name: str = "sliding_window"
    field: str = "sliding_window"
    default: Json = None
    off: Json = 0

    def stored(self, config: Config) -> Json:
        """See `ConfigKey.stored`."""
        value = config.get(self.name, self.default)
        if value is None:
            return 0
        return typed(value, int)

    def written(self, value: Json) -> dict[str, Json]:
        """See `ConfigKey.written`."""
        return {self.name: value or None}


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerWindow(SlidingWindow):
    """The sliding window of Qwen, which other keys switch on, for all layers or some."""

    default: Json = 4096
    layers: ConfigKey

    @property
    def names(self) -> tuple[str, ...]:
        """See `ConfigKey.names`."""
        return ("sliding_window", "use_sliding_window", "max_window_layers", "layer_types")

    def stored(self, config: Config) -> Json:
        """See `ConfigKey.stored`."""
        window = 0
        if typed(config.get("use_sliding_window", False), bool):
            window = super().stored(config)
        num_layers = self.layers.stored(config)
        kinds = config.get("layer_types")
        # An explicit list of layers replaces their number in `max_window_layers`.
        if kinds is not None:
            num_sliding = _num_named(kinds, num_layers)
        else:
            num_sliding = _num_after_first(config, num_layers)
            if not window:
                num_sliding = 0
        if num_sliding and not window:
            raise ValueError("layer_types has sliding attention, and use_sliding_window is off")
        if num_sliding not in (0, num_layers):
            raise ValueError(
                f"{num_sliding} of {num_layers} layers have a window; the recipe has one in all layers or in none"
            )
        return window if num_sliding else 0

    def written(self, value: Json) -> dict[str, Json]:
        """See `ConfigKey.written`."""
        if value:
            # 0, or the first 28 layers would have no window by default.
            return {"use_sliding_window": True, "sliding_window": value, "max_window_layers": 0}
        return {"use_sliding_window": False}


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerPattern(ConfigKey):
    """How often a layer of Gemma 3 sees all positions; the others see a window."""

    name: str = "layer_types"
    field: str = "full_every"
    default: Json = 6
    layers: ConfigKey

    @property
    def names(self) -> tuple[str, ...]:
        """See `ConfigKey.names`."""
        return ("layer_types", "sliding_window_pattern", "_sliding_window_pattern")

    def stored(self, config: Config) -> Json:
        """See `ConfigKey.stored`."""
        every = self.default
        for name in ("sliding_window_pattern", "_sliding_window_pattern"):
            if config.get(name) is not None:
                every = typed(config[name], int)
        kinds = config.get("layer_types")
        if kinds is None:
            return every
        num_layers = self.layers.stored(config)
        _num_named(kinds, num_layers)
        # The list replaces the number. Without a layer that sees all, any larger number says the same.
        every = kinds.index("full_attention") + 1 if "full_attention" in kinds else max(every, num_layers + 1)
        if kinds != self._kinds(every, num_layers):
            raise ValueError("the layers that see all do not stand at equal distances")
        return every

    def written(self, value: Json) -> dict[str, Json]:
        """See `ConfigKey.written`; without the list, which has the number of layers, and follows from it."""
        return {"sliding_window_pattern": value}

    def _kinds(self, every: int, num_layers: int) -> list[str]:
        return ["sliding_attention" if (layer + 1) % every else "full_attention" for layer in range(num_layers)]


def _num_after_first(config: Config, num_layers: int) -> int:
    """Returns how many layers have a window by `max_window_layers`: those after so many."""
    # 28 is the default in Transformers.
    first = config.get("max_window_layers", 28)
    # `typed` takes numbers above 0 alone, and here 0 means: all layers have a window.
    if first != 0:
        first = typed(first, int)
    return max(num_layers - first, 0)


def _num_named(kinds: Json, num_layers: int) -> int:
    """Returns how many layers have a window by `layer_types`."""
    is_list = isinstance(kinds, list) and len(kinds) == num_layers
    if not is_list or not set(kinds) <= {"full_attention", "sliding_attention"}:
        raise ValueError(f"layer_types={json.dumps(kinds)} does not name the attention of {num_layers} layers")
    return kinds.count("sliding_attention")


@dataclasses.dataclass(frozen=True, kw_only=True)
class BalanceWeight(ConfigKey):
    """The weight of the loss that keeps the load of experts even.

    Transformers counts each of a token's choices in full, and the recipe their mean: for an even load its loss is 1
    and that of Transformers the number of choices. The value here is the recipe's weight, beside that number.
    """

    name: str = "router_aux_loss_coef"
    field: str = "balance"
    default: Json = 0.001
    off: Json = 0.0
    is_compared: bool = False  # no logit depends on it
    choices: ConfigKey

    def stored(self, config: Config) -> Json:
        """See `ConfigKey.stored`; a dict with the fields "balance" and "top_k"."""
        weight = config.get(self.name, self.default)
        # `typed` takes numbers above 0 alone; 0 switches the loss off. False is no number.
        if weight != 0 or isinstance(weight, bool):
            weight = typed(weight, float)
        count = self.choices.stored(config)
        return {self.field: float(weight) * count, self.choices.field: count}

    def computed(self, model: ModelConfig) -> Json:
        """See `ConfigKey.computed`."""
        return {self.field: super().computed(model), self.choices.field: self.choices.computed(model)}

    def fields(self, value: Json) -> dict[str, Json]:
        """See `ConfigKey.fields`."""
        return {self.field: value[self.field]}

    def written(self, value: Json) -> dict[str, Json]:
        """See `ConfigKey.written`."""
        # Undoes the product of `stored`.
        return {self.name: value[self.field] / value[self.choices.field]}


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScalingKey:
    """A key of `rope_scaling`, and the field of the recipe's `rope_scaling` that has its value."""

    name: str
    field: str
    default: Json = None  # None: the key is needed


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
class Rope(ConfigKey):
    """Rotary positions: in `rope_theta` and `rope_scaling`, or from Transformers 5 on together in `rope_parameters`."""

    name: str = "rope_parameters"
    field: str = "rope_theta"
    default: Json = 10_000.0
    length: ConfigKey

    @property
    def names(self) -> tuple[str, ...]:
        """See `ConfigKey.names`."""
        return ("rope_theta", "rope_scaling", "rope_parameters", "partial_rotary_factor", "rope_interleaved")

    @property
    def described(self) -> str:
        """See `ConfigKey.described`."""
        return "model.rope_theta, model.rope_scaling"

    def stored(self, config: Config) -> Json:
        """See `ConfigKey.stored`; a dict with "rope_theta", "kind" and the fields of that kind."""
        check_only(config, "partial_rotary_factor", (None, 1))
        check_only(config, "rope_interleaved", (None, False))
        parts = []
        thetas = set()
        for name in ("rope_parameters", "rope_scaling"):
            if not config.get(name):
                continue
            part = dict(config[name])
            parts.append(part)
            if part.get("rope_theta") is not None:
                thetas.add(part.pop("rope_theta"))
        if config.get("rope_theta") is not None:
            thetas.add(config["rope_theta"])
        # The old and the new form may both be in a file, if they agree.
        if len(thetas) > 1:
            raise ValueError(f"rope_theta is {' and '.join(map(str, sorted(thetas)))}")
        scalings = [self._scaling(part, config) for part in parts]
        if any(scaling != scalings[0] for scaling in scalings):
            raise ValueError("rope_parameters and rope_scaling differ")
        theta = typed(next(iter(thetas), self.default), float)
        return {"rope_theta": theta, **next(iter(scalings), {"kind": "default"})}

    def _scaling(self, part: dict[str, Json], config: Config) -> dict[str, Json]:
        """Returns the kind of a scaling and its fields."""
        check_only(part, "partial_rotary_factor", (None, 1))
        kind = _kind_of_scaling(part)
        keys = {}
        for name, value in part.items():
            # A null is like an absent key; these three are read already.
            if value is not None and name not in ("rope_type", "type", "partial_rotary_factor"):
                keys[name] = value
        longest = self.length.stored(config)
        # Transformers begins it at `max_position_embeddings`, whatever the key says.
        if kind == "dynamic" and keys.setdefault(_ORIGINAL.name, longest) != longest:
            raise ValueError(f"dynamic scaling begins at max_position_embeddings={longest}")
        # Without the key, the longest sequence is that of the original model.
        if kind in ("llama3", "yarn"):
            keys.setdefault(_ORIGINAL.name, longest)
        if kind == "yarn":
            _settle_yarn(keys, longest)
        unknown = keys.keys() - {key.name for key in _SCALINGS[kind]}
        if unknown:
            raise ValueError(f"{', '.join(sorted(unknown))} of {kind} scaling is not known here")
        return {"kind": kind, **{key.field: _scaling_value(key, keys) for key in _SCALINGS[kind]}}

    def computed(self, model: ModelConfig) -> Json:
        """See `ConfigKey.computed`."""
        theta = super().computed(model)
        if theta is None:
            return None
        scaling = getattr(model, "rope_scaling", None)
        kind = getattr(scaling, "kind", "default")
        fields = {key.field: getattr(scaling, key.field) for key in _SCALINGS.get(kind, ())}
        return {"rope_theta": theta, "kind": kind, **fields}

    def fields(self, value: Json) -> dict[str, Json]:
        """See `ConfigKey.fields`."""
        scaling = {f"rope_scaling.{name}": setting for name, setting in value.items() if name != "rope_theta"}
        # The fields of other kinds stay in the recipe, where they have no effect.
        if value["kind"] == "default":
            scaling = {"rope_scaling.kind": "default"}
        return {"rope_theta": value["rope_theta"]} | scaling

    def written(self, value: Json) -> dict[str, Json]:
        """See `ConfigKey.written`; in the form that all versions of Transformers read."""
        kind = value["kind"]
        if kind == "default":
            return {"rope_theta": value["rope_theta"], "rope_scaling": None}
        keys = {key.name: value[key.field] for key in _SCALINGS[kind] if value[key.field] is not None}
        result: dict[str, Json] = {"rope_theta": value["rope_theta"]}
        if kind == "dynamic":  # it begins there
            # The length of the recipe may be another, and is replaced by the one that scaling begins at.
            result[self.length.name] = keys.pop(_ORIGINAL.name)
        return result | {"rope_scaling": {"rope_type": kind, **keys}}


@dataclasses.dataclass(frozen=True, kw_only=True)
class TwoRopes(Rope):
    """The rotary positions of Gemma 3: of layers that see all, and by another base of those that see a window.

    The base of the latter is in `rope_local_base_freq`, or from Transformers 5 on in `rope_parameters`, which then has
    an entry for each kind of layer.
    """

    local_default: Json = 10_000.0

    @property
    def names(self) -> tuple[str, ...]:
        """See `ConfigKey.names`."""
        return (*super().names, "rope_local_base_freq")

    @property
    def described(self) -> str:
        """See `ConfigKey.described`."""
        return "model.rope_theta, model.rope_scaling, model.local_theta"

    def stored(self, config: Config) -> Json:
        """See `ConfigKey.stored`; that of `Rope`, with "local_theta"."""
        local_theta = config.get("rope_local_base_freq")
        parameters = config.get("rope_parameters")
        if parameters and parameters.keys() <= {"full_attention", "sliding_attention"}:
            local_theta = self._local_theta(parameters.get("sliding_attention") or {}, local_theta)
            config = {**config, "rope_parameters": parameters.get("full_attention")}
        if local_theta is None:
            local_theta = self.local_default
        return {**super().stored(config), "local_theta": typed(local_theta, float)}

    def _local_theta(self, entry: Mapping[str, Json], older: Json) -> Json:
        """Returns the base of layers with a window, or None.

        Args:
            entry: that of these layers in `rope_parameters`.
            older: the value of the key in older files, or None.
        """
        check_only(entry, "rope_type", (None, "default"))
        if entry.keys() - {"rope_type", "rope_theta"}:
            raise ValueError("the positions of layers with a window are scaled")
        theta = entry.get("rope_theta")
        if older is None:
            return theta
        if theta not in (None, older):
            raise ValueError(f"rope_local_base_freq is {older} and {theta}")
        return older

    def computed(self, model: ModelConfig) -> Json:
        """See `ConfigKey.computed`."""
        value = super().computed(model)
        if value is None:
            return None
        return {**value, "local_theta": getattr(model, "local_theta", None)}

    def fields(self, value: Json) -> dict[str, Json]:
        """See `ConfigKey.fields`."""
        of_all = {name: setting for name, setting in value.items() if name != "local_theta"}
        return {**super().fields(of_all), "local_theta": value["local_theta"]}

    def written(self, value: Json) -> dict[str, Json]:
        """See `ConfigKey.written`."""
        return {**super().written(value), "rope_local_base_freq": value["local_theta"]}


def _kind_of_scaling(part: Mapping[str, Json]) -> str:
    """Returns the kind, which has two names: the older one is `type`."""
    kinds = {part[name] for name in ("rope_type", "type") if part.get(name) is not None}
    if len(kinds) > 1 or not kinds <= _SCALINGS.keys():
        raise ValueError(f"the kind {json.dumps(sorted(map(str, kinds)))} is not one of {', '.join(_SCALINGS)}")
    return next(iter(kinds), "default")


def _settle_yarn(keys: dict[str, Json], longest: int) -> None:
    """Replaces the keys of yarn from which Transformers computes others."""
    if "factor" not in keys:
        keys["factor"] = longest / typed(keys[_ORIGINAL.name], int)
    top = keys.pop("mscale", None)
    bottom = keys.pop("mscale_all_dim", None)
    if top and bottom and "attention_factor" not in keys:
        # As in Transformers: the attention factor is the ratio of 0.1 m ln(factor) + 1 for both of the values m.
        growth = 0.1 * math.log(typed(keys["factor"], float))
        keys["attention_factor"] = (typed(top, float) * growth + 1) / (typed(bottom, float) * growth + 1)


def _scaling_value(key: ScalingKey, keys: Mapping[str, Json]) -> Json:
    value = keys.get(key.name, key.default)
    # None in the recipe, too: it follows from `factor` when positions are scaled.
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
    only: tuple[Json, ...]
    why: str = ""

    @property
    def names(self) -> tuple[str, ...]:
        """The keys of the file that it reads."""
        return (self.name,)

    def check(self, config: Config) -> None:
        """Raises a ValueError for another value."""
        if self.name in config and not _is_among(config[self.name], self.only):
            raise ValueError(self.why or f"is supported as {_listed(self.only)} only")


def typed(value: Json, kind: type) -> Json:
    """Returns the value in the type of its key; integers count as floats."""
    is_integer = isinstance(value, int) and not isinstance(value, bool)
    if kind is float and is_integer:
        if not is_int(value):
            raise ValueError(f"it is {shown(value)}")
        value = float(value)
    # In Python True is an int: `1` must not pass for true, nor true for 1.
    is_kind = isinstance(value, kind) and isinstance(value, bool) == (kind is bool)
    if not is_kind:
        raise ValueError(f"{json.dumps(value)} is no {kind.__name__}")
    if kind is not bool and not 0 < value < math.inf:
        raise ValueError(f"{value} is not above 0")
    return value


def _is_among(value: Json, values: Iterable[Json]) -> bool:
    # As in `typed`: 1 == True, but a file says another thing with each.
    return any(value == allowed and isinstance(value, bool) == isinstance(allowed, bool) for allowed in values)


def check_only(config: Config, name: str, only: tuple[Json, ...]) -> None:
    """Raises a ValueError if the key is there with another value than these."""
    if name in config and not _is_among(config[name], only):
        raise ValueError(f"{name} is supported as {_listed(only)} only")


def _listed(values: tuple[Json, ...]) -> str:
    """Returns the values as JSON; of several, those that say something."""
    full = [value for value in values if value not in (None, [], {})]
    return " or ".join(json.dumps(value) for value in full or values[:1])
