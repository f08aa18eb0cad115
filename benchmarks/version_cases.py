"""The steps for comparing versions: forms, settings and sizes, as values."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_ROOT = Path(__file__).parents[1]
_FORMS = str(_ROOT / "benchmarks" / "forms.py")
MODELS = (_FORMS, str(_ROOT / "models"))
"""Where the Python of the models is."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """A step to be compiled.

    Attributes:
        model: the model file.
        recipe: the name of its recipe.
        settings: changes of the recipe, in the form of `--set`.
        topology: the cluster.
        mesh: degrees of the mesh; `fsdp` over all devices by default.
        units: settings of the units, as for `jshard.api.revise.revise`.
        profile: the profile of `js.compiler_options`.
        plain: further settings for the model as plain Flax. A Linen model then only has its own dtypes, and no remat.
    """

    model: str = _FORMS
    recipe: str = "large"
    settings: tuple[str, ...] = ()
    topology: str = "h100:8x8"
    mesh: Mapping[str, int] = dataclasses.field(default_factory=lambda: {"fsdp": -1})
    units: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    profile: str | None = "fastest"
    plain: tuple[str, ...] = ()


_HSDP = {"replica": 8, "fsdp": 8}
_WIDE = {"topology": "h100:64x8"}


def _form(form: str, *settings: str, **changes: Any) -> Case:
    settings = (f"model.form={form}", *settings)
    if changes.get("topology") == _WIDE["topology"]:
        settings += ("batch_size=512",)
    plain = ("model.compute_dtype=float32", "model.remat=none") if form in ("Linen", "nn.scan") else ()
    return Case(settings=settings, plain=plain, **changes)


def _remat(policy: str) -> str:
    return f"model.remat={policy}"


def _forms() -> dict[str, Case]:
    found = {}
    for form in ("loop", "units", "scan_layers", "nnx.scan", "Linen", "nn.scan"):
        for policy in ("full", "none", "dots"):
            found[f"{form}, {policy}"] = _form(form, _remat(policy))
        found[f"{form}, zero2"] = _form(form, _remat("none"), units={"reshard_after_forward": False})
        found[f"{form}, hpz"] = _form(form, units={"reshard_after_forward": 8})
        found[f"{form}, hsdp"] = _form(form, mesh=_HSDP)
        found[f"{form}, 512"] = _form(form, _remat("none"), **_WIDE)
        found[f"{form}, 512, full"] = _form(form, **_WIDE)
        found[f"{form}, dropout"] = _form(form, _remat("none"), "model.dropout=0.1")
        found[f"{form}, accumulate"] = _form(form, "accumulate=2", "batch_size=128")
    for form in ("loop", "scan_layers", "nnx.scan"):
        for ahead in (0, 2, "512MiB", "compiler"):
            found[f"{form}, prefetch {ahead}"] = _form(form, units={"prefetch": ahead})
        found[f"{form}, no options"] = _form(form, profile=None)
        found[f"{form}, memory"] = _form(form, profile="memory")
        found[f"{form}, float32"] = _form(form, "model.compute_dtype=float32")
        found[f"{form}, 512, hsdp"] = _form(form, mesh={"replica": 8, "fsdp": 64}, **_WIDE)
    found["loop, zero2 hsdp"] = _form("loop", mesh=_HSDP, units={"reshard_after_forward": False})
    found["loop, tied"] = _form("loop", "model.tied=true", _remat("none"))
    found["loop, no options, prefetch 0"] = _form("loop", profile=None, units={"prefetch": 0})
    found["loop, no options, prefetch 2"] = _form("loop", profile=None, units={"prefetch": 2})
    found["loop, 512, dropout"] = _form("loop", _remat("none"), "model.dropout=0.1", **_WIDE)
    found["nnx.scan, 512, dropout"] = _form("nnx.scan", _remat("none"), "model.dropout=0.1", **_WIDE)
    return found


def _model(name: str, recipe: str, batch_size: int, *settings: str, **changes: Any) -> Case:
    settings = ("accumulate=1", f"batch_size={batch_size}", *settings)
    return Case(model=str(_ROOT / "models" / f"{name}.py"), recipe=recipe, settings=settings, **changes)


_ONE_BY_ONE = "model.scan=false"
CASES: dict[str, Case] = {
    **_forms(),
    "gpt2_small": _model("gpt", "gpt2_small", 256),
    "gpt2_small, accumulate": _model("gpt", "gpt2_small", 512, "accumulate=4"),
    "gpt2_xl": _model("gpt", "gpt2_xl", 512),
    "gpt3_175b, 64": _model("gpt", "gpt3_175b", 64),
    "gpt3_175b, 512": _model("gpt", "gpt3_175b", 512, **_WIDE),
    "gpt3_175b, 512, hsdp": _model("gpt", "gpt3_175b", 512, mesh={"replica": 4, "fsdp": 128}, **_WIDE),
    "gpt3_175b, 512, hpz": _model("gpt", "gpt3_175b", 512, units={"reshard_after_forward": 8}, **_WIDE),
    "gpt3_175b, 512, unrolled": _model("gpt", "gpt3_175b", 512, _ONE_BY_ONE, "model.n_layer=8", **_WIDE),
    "gpt, tensor": _model("gpt", "gpt3_175b", 64, "model.n_layer=8", mesh={"fsdp": 16, "tensor": 4}),
    "llama3_8b": _model("llama", "llama3_8b", 64),
    "llama3_8b, unrolled": _model("llama", "llama3_8b", 64, _ONE_BY_ONE, "model.n_layer=8"),
    "llama3_70b, 512": _model("llama", "llama3_70b", 512, **_WIDE),
    "t5_11b": _model("t5", "t5_11b", 64),
    "t5_11b, unrolled": _model("t5", "t5_11b", 64, _ONE_BY_ONE, "model.n_layer=4"),
    "mixtral": _model("moe", "mixtral_8x7b", 64, "model.n_layer=8"),
    "mixtral, expert": _model("moe", "mixtral_8x7b", 64, "model.n_layer=8", mesh={"fsdp": 8, "expert": 8}),
    "mixtral, 512": _model("moe", "mixtral_8x7b", 512, **_WIDE),
    "vdit_4b": _model("vdit", "vdit_4b", 64),
    "vdit_4b, unrolled": _model("vdit", "vdit_4b", 64, _ONE_BY_ONE, "model.n_layer=8"),
    "lora": _model("gpt", "gpt2_small", 64, "model.lora.rank=8", "model.lora.targets=c_fc,c_proj"),
}
