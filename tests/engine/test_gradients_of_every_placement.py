"""A gradient is summed over each axis once, whatever the placement says: meshes, placements and settings, enumerated.

One model per mesh has parameters of every form in every placement, in units of every setting, so that few programs
cover all combinations.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jshard as js
from jshard.linen.boxes import unboxed
from tests.parity import flat, worst
from tests.wide import slow, wide

TOLERANCE = 2e-6  # of the largest element of the gradient
WIDTH = 4

# How a parameter is placed, by the first part of its name; `split` is split over `tensor` by the model itself.
PLACEMENTS = ("first", "last", "default", "ignored", "split")
SHAPES = {
    "even": (8, 16),
    "uneven": (9, 11),  # padded where a dim is asked for
    "vector": (16,),  # with the next one: gradients that are summed as one array, where they are replicated
    "short": (3,),
    "scalar": (),
    "empty": (0, 8),
    "large": (8, 2064),  # beyond 64 KiB, where gradients are not joined
}


@dataclasses.dataclass(frozen=True)
class Form:
    """One parameter of each unit."""

    placement: str
    shape_name: str

    @property
    def name(self) -> str:
        return f"{self.placement}_{self.shape_name}"

    @property
    def shape(self) -> tuple[int, ...]:
        return SHAPES[self.shape_name]

    @property
    def axes(self) -> tuple[str | None, ...] | None:
        """The mesh axes that the model names."""
        if self.placement != "split" or self.shape_name not in ("even", "large", "empty"):
            return None
        return (None, "tensor")


FORMS = [Form(placement, shape_name) for placement in PLACEMENTS for shape_name in SHAPES]
LAYERS = 2  # of the unit whose parameters are stacked


def shard_dim(path: str, shape: tuple[int, ...]) -> int | None:
    """The dim that the name of a parameter asks for."""
    placement = path.split("/")[-1].split("_")[0]
    if not shape or placement not in ("first", "last"):
        return None
    return 0 if placement == "first" else len(shape) - 1


def last_dim_of_layer(path: str, shape: tuple[int, ...]) -> int | None:
    """The same for stacked layers, whose first dim is not theirs."""
    placement = path.split("/")[-1].split("_")[0]
    if len(shape) < 2 or placement not in ("first", "last"):
        return None
    return 1 if placement == "first" else len(shape) - 1


def initial(form: Form, *, layers: int = 0) -> jax.Array:
    shape = (layers, *form.shape) if layers else form.shape
    return jnp.sin(jnp.arange(math.prod(shape), dtype=jnp.float32) + len(form.name)).reshape(shape)


def read(form: Form, value: jax.Array) -> jax.Array:
    """A number to which each element contributes with its own weight, so that its gradient is its own."""
    weights = jnp.cos(jnp.arange(value.size, dtype=value.dtype) * 0.7).reshape(value.shape)
    return (weights * value).sum() / max(math.sqrt(value.size), 1)


def apply(x: jax.Array, values: Mapping[str, jax.Array]) -> jax.Array:
    return x * (1 + 0.01 * sum(read(form, values[form.name]) for form in FORMS))


class Cell(nnx.Module):
    def __init__(self, layers: int = 0):
        for form in FORMS:
            axes = form.axes and ((None, *form.axes) if layers else form.axes)
            metadata = {} if axes is None else {"out_sharding": axes}
            setattr(self, form.name, nnx.Param(initial(form, layers=layers), eager_sharding=False, **metadata))

    def __call__(self, x):
        return apply(x, {form.name: getattr(self, form.name)[...] for form in FORMS})


class CellsInAListAndAStack(Cell):
    def __init__(self):
        super().__init__()
        self.cells = nnx.List([Cell() for _ in range(3)])
        self.stack = Cell(layers=LAYERS)

    def __call__(self, x):
        x = super().__call__(x)
        for cell in (*self.cells, self.stack):
            x = cell(x)
        return x


class LinenCell(nn.Module):
    @nn.compact
    def __call__(self, x):
        values = {}
        for form in FORMS:
            make = lambda key, form=form: initial(form)
            values[form.name] = self.param(
                form.name, make if form.axes is None else nn.with_partitioning(make, form.axes)
            )
        return apply(x, values)


class LinenLayer(nn.Module):
    @nn.compact
    def __call__(self, x, _):
        return LinenCell(name="cell")(x), None


class LinenModel(nn.Module):
    @nn.compact
    def __call__(self, x):
        for i in range(3):
            x = LinenCell(name=f"cell{i}")(x)
        variables, name = {"params": 0}, {nn.PARTITION_NAME: None}
        layers = nn.scan(
            LinenLayer, variable_axes=variables, split_rngs={"params": True}, length=LAYERS, metadata_params=name
        )
        return layers(name="stack")(x, None)[0]


X = np.random.default_rng(0).normal(size=(32, WIDTH)).astype(np.float32)
MODES: dict[str, dict[str, Any]] = {
    "one": {},
    "each": {"accumulate": 2, "sync": "each"},
    "last": {"accumulate": 2, "sync": "last"},
}


def settings_of_cells(mesh: Any) -> list[dict[str, Any]]:
    """How the cells are kept after forward: not at all, whole, and in pieces."""
    fsdp = dict(mesh.shape)["fsdp"]
    return [{"reshard_after_forward": setting} for setting in (True, False, max(fsdp // 2, 1))]


def nnx_gradients(mesh: Any, mode: str) -> dict[str, np.ndarray]:
    """The gradients of the nnx model; on one device if there is no mesh."""
    model = CellsInAListAndAStack()
    loss_fn = lambda model, x: (model(x) ** 2).mean()
    if mesh is not None:
        how = {"mesh": mesh}
        placement = js.PlacementPolicy(shard_dim=shard_dim, min_size=1, ignored="*ignored_*")
        of_layers = dataclasses.replace(placement, shard_dim=last_dim_of_layer, stacked=1)
        for cell, settings in zip(model.cells, settings_of_cells(mesh), strict=True):
            js.fully_shard(cell, placement=placement, **how, **settings)
        js.fully_shard(model.stack, placement=of_layers, **how)
        js.fully_shard(model, placement=placement, **how)
        js.shard_optimizer(model, optax.sgd(0.1))  # it sees logical arrays, so padded ones may be differentiated
        grad_fn = js.value_and_grad(loss_fn, **MODES[mode])
    else:
        grad_fn = nnx.value_and_grad(loss_fn)
    return flat(nnx.jit(lambda model, x: grad_fn(model, x)[1])(model, X))


def linen_gradients(mesh: Any, mode: str) -> dict[str, np.ndarray]:
    """The gradients of the Linen model; on one device if there is no mesh."""
    model = LinenModel()
    if mesh is not None:
        placement = js.PlacementPolicy(shard_dim=linen_shard_dim, min_size=1, ignored="*ignored_*")
        units: dict[Any, Any] = {f"cell{i}": settings for i, settings in enumerate(settings_of_cells(mesh))}
        model = js.fully_shard(model, mesh=mesh, placement=placement, units=units | {"stack/cell": {}})
        js.shard_optimizer(model, optax.sgd(0.1))
        params = js.shard_init(lambda: model.init(jax.random.key(0), X), model)
    else:
        params = model.init(jax.random.key(0), X)
    loss_fn = lambda params, x: (model.apply(params, x) ** 2).mean()
    if mesh is not None:
        grad_fn = js.value_and_grad(loss_fn, model=model, **MODES[mode])
    else:
        grad_fn = jax.value_and_grad(loss_fn)
    grads = unboxed(jax.jit(lambda params, x: grad_fn(params, x)[1])(params, X))
    arrays = nn.meta.unbox(grads)
    return {jax.tree_util.keystr(path): np.asarray(x) for path, x in jax.tree.leaves_with_path(arrays)}


def linen_shard_dim(path: str, shape: tuple[int, ...]) -> int | None:
    """The dims of stacked layers are counted behind those of the layers."""
    form = next(form for form in FORMS if path.endswith(form.name))
    is_stacked = len(shape) > len(form.shape)
    return last_dim_of_layer(path, shape) if is_stacked else shard_dim(path, shape)


KINDS: dict[str, Callable[[Any, str], dict[str, np.ndarray]]] = {"nnx": nnx_gradients, "linen": linen_gradients}


@functools.cache
def one_device(kind: str) -> dict[str, np.ndarray]:
    return KINDS[kind](None, "one")


MESHES = {
    "8": {"fsdp": 8},
    "replica 8": {"replica": 8, "fsdp": 1},
    "2x4": {"replica": 2, "fsdp": 4},
    "4x2": {"replica": 4, "fsdp": 2},
    "2x1x4": {"replica": 2, "fsdp": 1, "tensor": 4},
    "1x2x4": {"replica": 1, "fsdp": 2, "tensor": 4},
    "2x2x2": {"replica": 2, "fsdp": 2, "tensor": 2},
    "1x1x8": {"replica": 1, "fsdp": 1, "tensor": 8},
    "1": {"fsdp": 1, "devices": 1},
}
ALWAYS = [("nnx", "2x1x4", "one"), ("linen", "2x2x2", "last")]
# Each mesh once: kinds of models and modes take turns.
WIDE = [
    (list(KINDS)[number % len(KINDS)], mesh, list(MODES)[number % len(MODES)]) for number, mesh in enumerate(MESHES)
]
EVERY = [(kind, mesh, mode) for kind in KINDS for mesh in MESHES for mode in MODES]


def cases() -> list[Any]:
    others = [case for case in EVERY if case not in ALWAYS]
    return [*ALWAYS, *(wide(*case) if case in WIDE else slow(*case) for case in others)]


@pytest.mark.filterwarnings("ignore:.*replicated, because no dim divides")
@pytest.mark.parametrize(("kind", "mesh", "mode"), cases())
def test_gradients_are_those_of_one_device(kind, mesh, mode):
    degrees = dict(MESHES[mesh])
    devices = jax.devices()[: degrees.pop("devices", 8)]
    found = KINDS[kind](js.mesh(**degrees, devices=devices), mode)
    wanted = one_device(kind)
    assert found.keys() == wanted.keys()
    assert len(found) >= 4 * len(FORMS)
    apart = {}
    for path, gradient in wanted.items():
        assert found[path].shape == gradient.shape, path
        assert found[path].dtype == gradient.dtype, path
        if gradient.size:
            assert np.abs(gradient).max() > 0, path
            apart[path] = worst(found[path], gradient)
    assert max(apart.values()) <= TOLERANCE, {path: size for path, size in apart.items() if size > TOLERANCE}
