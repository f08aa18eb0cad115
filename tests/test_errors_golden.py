"""The text of every error and warning that a user can meet, against tests/golden/errors.txt.

`UPDATE_GOLDEN=1 pytest tests/test_errors_golden.py` writes the file again; then read its diff.
"""

import ast
import contextlib
import dataclasses
import inspect
import os
import pathlib
import pickle
import re
import tempfile
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from unittest import mock

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import jshard as js
from jshard import _files, _processes, errors
from jshard.api.loss_scale import LossScale
from jshard.api.revise import revise_layers
from jshard.engine.created import check_same
from jshard.engine.rules import PRIMITIVES
from jshard.errors import MeshError
from jshard.inspect.communication import traffic_of
from jshard.plans import wires
from jshard.plans.make_mesh import _in_torus
from jshard.plans.memories import check_offload
from tests.helpers import with_placement
from tests.linen_errors import ERRORS as LINEN_ERRORS
from tests.linen_errors import stacked_layers, submodule_before_init
from tests.stages_errors import ERRORS as STAGES_ERRORS
from tests.stages_errors import layers_that_differ
from tests.toy_models import Cube

GOLDEN = pathlib.Path(__file__).parent / "golden" / "errors.txt"
PACKAGE = pathlib.Path(js.__file__).parent
HEAD = "=== "

X = np.arange(16 * 64, dtype=np.float32).reshape(16, 64) / 1024


class Model(nnx.Module):
    """Two linear layers; `use(model, x)` is its call."""

    def __init__(self, use: Callable, rngs: nnx.Rngs):
        self.inner = nnx.Linear(64, 64, rngs=rngs)
        self.out = nnx.Linear(64, 64, rngs=rngs)
        self.total = nnx.Variable(jnp.zeros(()))
        self.count = 0
        self.use = use

    def __call__(self, x):
        return self.use(self, x)


class Stack(nnx.Module):
    """Layers stacked by vmap."""

    def __init__(self, rngs: nnx.Rngs):
        make = nnx.split_rngs(splits=128)(nnx.vmap(lambda rngs: nnx.Linear(64, 64, rngs=rngs)))
        self.layers = make(rngs)


class Odd(nnx.Module):
    """Two parameters that nothing divides."""

    def __init__(self, wide: int, rngs: nnx.Rngs):
        self.up = nnx.Linear(61, 67, use_bias=False, rngs=rngs)
        self.down = nnx.Linear(67, 61, use_bias=False, rngs=rngs)
        self.wide = nnx.Linear(wide, wide, use_bias=False, rngs=rngs)

    def __call__(self, x):
        return self.down(self.up(x))


class Texts(nnx.Module):
    """A text where Flax keeps arrays."""

    def __init__(self):
        self.linear = nnx.Linear(64, 64, rngs=nnx.Rngs(0))
        self.name = nnx.Variable("head")


class Untracked(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.linear = nnx.Linear(64, 64, rngs=rngs)
        self.table = jnp.arange(64.0)


class Plain(nnx.Module):
    """Weights as Flax keeps any array."""

    def __init__(self):
        self.w, self.b = nnx.data(jnp.ones((64, 64))), nnx.data(jnp.ones(64))


class Holds(nnx.Module):
    """A list of modules without a parameter."""

    def __init__(self, held):
        self.layers = nnx.List([held])


class Listed(nnx.Module):
    """Weights in variables of a class of their own, in a list."""

    def __init__(self):
        self.ws = nnx.List([nnx.Variable(jnp.ones((64, 64))) for _ in range(2)])


class Average(nnx.Module):
    """A copy of the weights that is no parameter."""

    def __init__(self, rngs: nnx.Rngs):
        self.linear = nnx.Linear(256, 256, rngs=rngs)
        self.average = nnx.Variable(jnp.zeros((256, 256)))


def linear() -> nnx.Linear:
    return nnx.Linear(64, 64, rngs=nnx.Rngs(0))


def annotated(use: Callable = lambda model, x: model.out(model.inner(x)), **settings) -> Model:
    model = Model(use, nnx.Rngs(0))
    js.fully_shard(model.inner, mesh=js.mesh())
    return js.fully_shard(model, mesh=js.mesh(), **with_placement(**settings))


def rounded(use: Callable) -> Model:
    return annotated(use, mixed_precision=js.MixedPrecision(param_dtype="bfloat16"))


def call(model: nnx.Module, *args):
    return nnx.jit(lambda model, *args: model(*args))(model, *args)


def shard(module, **settings):
    return js.fully_shard(module, **with_placement(**{"mesh": js.mesh(), **settings}))


def scan_stacked(x=X, **settings):
    return js.scan_layers(Stack(nnx.Rngs(0)).layers, x, **settings)


def write_parameter(model, x):
    model.out.kernel[...] = model.out.kernel[...] * 2
    return model.out(x)


class Distribution:
    def __init__(self, mean, kind="normal"):
        self.mean, self.kind = mean, kind


def return_object(model, x):
    return Distribution(model.out(model.inner(x)))


def store_in_argument(model, given):
    x, log = given
    log(model.out(model.inner(x)))
    return x


def write_attribute(model, x):
    model.count += 1
    return model.out(x)


def make_linear(config):
    return nnx.Linear(config.width, config.width, rngs=nnx.Rngs(0))


def call_a_replaced_layer():
    model = Model(lambda model, x: model.out(x), nnx.Rngs(0))
    model.out = nnx.Linear(64, 61, use_bias=False, rngs=nnx.Rngs(0))
    shard(model, shard_dim=lambda path, shape: 1 if path == "out/kernel" else None)
    model.out = nnx.Linear(64, 64, use_bias=False, rngs=nnx.Rngs(1))
    model(X)


def build_by_value():
    return linear() if jax.random.normal(jax.random.key(0)) > 0 else None


def mean_over_a_name(model, x):
    return jax.lax.pmean(model.out(x), "batch")


def annotate_twice():
    shard(shard(linear()))


def forget_the_root():
    model = Model(lambda model, x: x, nnx.Rngs(0))
    shard(model.inner)
    js.plan(model)


def planned_with_wire(pack):
    """A plan with a wire that is no longer registered."""
    js.register_wire("rows", pack=pack, unpack=lambda arrays, dim, dtype: arrays[0].astype(dtype))
    try:
        return js.plan(shard(linear(), mixed_precision=js.MixedPrecision(gather_dtype="rows")))
    finally:
        del wires.REGISTERED["rows"]


def plan_without_its_wire():
    traffic_of(planned_with_wire(lambda shard, dim: (shard,)))


def call_in_a_shard_map():
    model = annotated()
    jax.shard_map(model, mesh=js.mesh(), in_specs=P("fsdp"), out_specs=P("fsdp"))(X)


def loop_over_padded_layers():
    """The stack of 12 layers is sharded along them, and its loop is outside of a call."""
    make = nnx.split_rngs(splits=12)(nnx.vmap(lambda rngs: nnx.Linear(64, 64, use_bias=False, rngs=rngs)))
    placement = js.PlacementPolicy(shard_dim=0)
    layers = js.abstract_init(lambda: make(nnx.Rngs(0)), lambda layers: shard(layers, placement=placement))
    run = nnx.scan(lambda x, layer: layer(x), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
    nnx.eval_shape(run, X, layers)


def with_a_rule_that_fails():
    """A fault of the engine's own."""
    with pytest.MonkeyPatch.context() as patch:
        failing = dataclasses.replace(PRIMITIVES["sin"], rule=lambda p, eqn, operands: 1 // 0)
        patch.setitem(PRIMITIVES, "sin", failing)
        call(annotated(lambda model, x: jnp.sin(model.out(x))), X)


def builds_layers(model, x):
    model.flows = nnx.List([linear() for _ in range(20)])
    model.norm = nnx.LayerNorm(64, rngs=nnx.Rngs(0))
    return model.norm(x)


def over_another_mesh(model, x):
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    return jax.shard_map(model.out, mesh=mesh, in_specs=P("data"), out_specs=P("data"))(x)


def over_its_own_mesh(model, x):
    mesh = jax.make_mesh((4, 2), ("fsdp", "tensor"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    return jax.shard_map(model.out, mesh=mesh, in_specs=P("fsdp"), out_specs=P("fsdp"))(x)


def tensor_before_fsdp():
    mesh, split = js.mesh(fsdp=2, tensor=4), P(("tensor", "fsdp"))
    inside = lambda model, x: jax.shard_map(jnp.sin, mesh=mesh, in_specs=split, out_specs=split)(model.out(x))
    call(shard(Model(inside, nnx.Rngs(0)), mesh=mesh), X)


def unreduced(model, x):
    """Sums left open in types, which axes of explicit types have."""
    mesh = jax.make_mesh((1, 8, 1), ("replica", "fsdp", "tensor"), axis_types=(jax.sharding.AxisType.Explicit,) * 3)
    left_open = lambda x: jax.lax.pcast(x.sum(0), "fsdp", to="unreduced")
    sums = jax.shard_map(left_open, mesh=mesh, in_specs=P("fsdp"), out_specs=P(unreduced={"fsdp"}))
    total = sums(jax.reshard(model.out(x), jax.NamedSharding(mesh, P("fsdp"))))
    return jax.reshard(total, jax.NamedSharding(mesh, P()))


def under_explicit_axes():
    mesh = jax.make_mesh((8,), ("fsdp",), axis_types=(jax.sharding.AxisType.Explicit,))
    with jax.set_mesh(mesh):
        call(shard(linear(), mesh=mesh), X)


def ordered_callback(model, x):
    jax.debug.callback(print, x.sum(), ordered=True)
    return model.out(x)


def each_example(fn: Callable, *args, in_axes=0):
    """The gradient of a model with a function declared with js.per_example."""
    return nnx.jit(nnx.grad(loss))(annotated(lambda model, x: js.per_example(fn, in_axes)(model.out(x), *args)), X)


def product(x, w):
    return x @ w


def noisy(x, key):
    return x + jax.random.normal(key, x.shape)


def tiles_of_16(x):
    if x.shape[0] % 16:
        raise ValueError("tiles of 16 rows only")
    return x


def another_program_for_few(x):
    return jnp.sin(x) if x.shape[0] > 4 else 2 * x


class Wrapped(nnx.Module):
    @nnx.jit
    def __call__(self, x):
        return x


def with_logical_axes() -> nnx.Linear:
    module = linear()
    module.kernel.set_metadata(out_sharding=("embed", "fsdp"))
    return module


def over_tensor(*entries, mesh=None) -> nnx.Linear:
    module = linear()
    module.kernel.set_metadata(out_sharding=entries)
    return shard(module, mesh=mesh or js.mesh(fsdp=2, tensor=4))


def hold(*entries):
    mesh = js.mesh(fsdp=2, tensor=4)
    call(shard(Model(lambda model, x: js.parallel.hold(model.out(x)[:, :62], *entries), nnx.Rngs(0)), mesh=mesh), X)


def two_meshes():
    model = Model(print, nnx.Rngs(0))
    shard(model.inner, mesh=js.mesh(replica=2))
    shard(model)


def annotated_late():
    model = shard(Model(lambda model, x: model.out(model.inner(x)), nnx.Rngs(0)))
    shard(model.inner)
    call(model, X)


def ungathered(use: Callable) -> Model:
    """The first layer is never gathered."""
    model = Model(use, nnx.Rngs(0))
    shard(model.inner, gathered=False)
    return shard(model)


def ungathered_and_tied() -> Model:
    model = Model(lambda model, x: model.out(x), nnx.Rngs(0))
    model.out.kernel = model.inner.kernel
    shard(model.inner, gathered=False)
    return shard(model)


def ungathered_late():
    model = shard(Model(lambda model, x: model.out(x), nnx.Rngs(0)))
    shard(model.inner, gathered=False)
    call(model, X)


def less_the_mean(model, x):
    """Declared wrongly: it combines examples."""
    return js.per_example(lambda h: h - h.mean(0, keepdims=True))(model.out(x))


def orthogonal_examples(model, x):
    return jnp.linalg.qr(model.out(x))[0]


def with_a_new_parameter() -> Model:
    model = annotated(lambda model, x: model.late(model.inner(x)))
    model.late = linear()
    return model


def loss(model, *batch):
    return (model(*batch) ** 2).mean()


def summed(model: nnx.Module, loss_fn: Callable = loss) -> js.PartialGradients:
    """Gradients that are not reduced."""
    return nnx.jit(js.value_and_grad(loss_fn, sync="none"))(model, X)[1]


def without_host_memory(mesh: Mesh) -> object:
    """Offload on devices that say that they have memory of their own only."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("jshard._compat.memory_kinds", lambda device: ["device"])
        return js.fully_shard(linear(), mesh=mesh, placement=js.PlacementPolicy(offload="params"))


@dataclasses.dataclass(frozen=True)
class Tpu:
    """A TPU that is not there."""

    id: int
    coords: tuple[int, int, int]
    platform: str = "tpu"
    device_kind: str = "TPU v5 lite"
    core_on_chip: int = 0
    process_index: int = 0


TPUS = [Tpu(place, (0, place, 0)) for place in range(2)]


def tensor_on_old_tpus() -> object:
    """A mesh with an axis that an older libtpu cannot compile."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("jshard._compat.environment._version", lambda package: "0.0.42.1")
        return js.mesh(tensor=2, devices=TPUS)


def arrived(folder: str) -> list[tuple[str, str]]:
    """What the service knows where only process 0 of two has come."""
    return [] if folder.endswith("failed/") else [(f"{folder}0", "=1")]


def exchanged(client: mock.Mock, session: str = "") -> list:
    """An exchange of two processes through this service."""
    with (
        mock.patch.object(jax, "process_count", return_value=2),
        mock.patch.object(_processes, "coordinator", return_value=client),
        mock.patch("socket.gethostname", return_value="host0"),
    ):
        return _processes.exchange("save of step 20", 1, timeout_s=60, session=session)


def came_too_late() -> list:
    """An exchange that happens once, when the other process no longer waits."""
    client = mock.Mock(key_value_dir_get=lambda folder: [(f"{folder}0", "=")])
    return exchanged(client, session="a1")


def other_seeds() -> None:
    digests = [["program", "constants"], ["program", "others"]]
    with mock.patch.object(_processes, "exchange", return_value=digests):
        check_same("shard_init(GPT)", *digests[0])


def write_a_file_of_two_names():
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        pathlib.Path("precious").touch()
        pathlib.Path(".lock").hardlink_to("precious")
        _files.open_in_place(".lock", os.O_RDWR)


ERRORS: dict[str, Callable[[], object]] = {
    "mesh: unknown axis": lambda: js.mesh(data=2),
    "mesh: zero": lambda: js.mesh(fsdp=0),
    "mesh: not numbers": lambda: js.mesh(replica="2", fsdp=2.0),
    "mesh: two open axes": lambda: js.mesh(replica=-1),
    "mesh: does not divide": lambda: js.mesh(replica=3),
    "mesh: tensor on TPUs": tensor_on_old_tpus,
    "mesh: slices of TPUs": lambda: _in_torus([SimpleNamespace(slice_index=i // 3) for i in range(12)], (3, 5)),
    "shard_batch: odd batch": lambda: js.shard_batch({"ids": np.zeros((12, 4)), "ok": np.zeros(8)}, js.mesh(replica=2)),
    "shard_batch: texts": lambda: js.shard_batch({"ids": np.array(["a", "b"] * 4)}, js.mesh()),
    "shard_batch: no sequence": lambda: js.shard_batch(
        {"ids": np.zeros((8, 30)), "ok": np.zeros(8)}, js.mesh(fsdp=2, context=4)
    ),
    "call: no sequence": lambda: call(shard(linear(), mesh=js.mesh(fsdp=2, context=4)), jnp.zeros((16, 30, 64))),
    "fully_shard: not a mesh": lambda: shard(linear(), mesh={"fsdp": 8}),
    "fully_shard: mesh without fsdp": lambda: shard(linear(), mesh=Mesh(np.array(jax.devices()), ("data",))),
    "fully_shard: gathered is not true or false": lambda: shard(linear(), gathered="never"),
    "ungathered: settings": lambda: shard(
        linear(),
        gathered=False,
        remat="full",
        prefetch="512MiB",
        reshard_after_forward=True,
        mixed_precision=js.MixedPrecision(param_dtype="bfloat16"),
    ),
    "ungathered: parameters in host memory": lambda: shard(linear(), gathered=False, offload="params"),
    "ungathered: units inside": lambda: shard(Model(print, nnx.Rngs(0)), units="inner", gathered=False),
    "ungathered: tied": ungathered_and_tied,
    "ungathered: called inside": lambda: call(ungathered(lambda model, x: model.out(model.inner(x))), X),
    "ungathered: read inside": lambda: call(ungathered(lambda model, x: model.out(x @ model.inner.kernel)), X),
    "ungathered: annotated after the root": ungathered_late,
    "revise: no units inside": lambda: revise_layers(shard(linear(), mesh=js.mesh()), {"remat": "full"}),
    "revise: no such setting": lambda: revise_layers(shard(linear(), mesh=js.mesh()), {"remat": "full", "depth": 2}),
    "js.revise: no such unit": lambda: js.revise(annotated(), "blocks/*", remat="full"),
    "js.revise: a placement": lambda: js.revise(annotated(), placement=js.PlacementPolicy(min_size=1)),
    "js.revise: no such choice": lambda: js.revise(
        js.fully_shard(nn.Dense(8), mesh=js.mesh(), units="head"), "blocks/*", prefetch=2
    ),
    "fully_shard: manual axes": lambda: shard(
        linear(), mesh=jax.sharding.AbstractMesh((8,), ("fsdp",), axis_types=(jax.sharding.AxisType.Manual,))
    ),
    "call: under explicit axes": under_explicit_axes,
    "fully_shard: not a module": lambda: shard([linear(), linear().kernel[...], 3]),
    "fully_shard: twice": annotate_twice,
    "fully_shard: no such unit": lambda: shard(Model(print, nnx.Rngs(0)), units="blocks/*"),
    "fully_shard: group that does not divide": lambda: shard(linear(), reshard_after_forward=3),
    "fully_shard: plain arrays": lambda: shard(Holds(Plain())),
    "fully_shard: other variables": lambda: shard(Listed()),
    "fully_shard: remat": lambda: shard(linear(), remat="all"),
    "fully_shard: offload": lambda: shard(linear(), offload="cpu"),
    "offload: parameters on TPUs": lambda: check_offload("params", js.mesh(devices=TPUS)),
    "fully_shard: no host memory": lambda: without_host_memory(js.mesh(fsdp=2, devices=jax.devices()[:2])),
    "fully_shard: not a placement": lambda: shard(linear(), placement={"shard_dim": 0}),
    "fully_shard: prefetch": lambda: shard(linear(), prefetch="some"),
    "scan_layers: none": lambda: js.scan_layers([], X),
    "scan_layers: not equal": lambda: js.scan_layers([linear(), nnx.Linear(64, 12, rngs=nnx.Rngs(0))], X),
    "scan_layers: tied": lambda: js.scan_layers([linear()] * 2, X),
    "scan_layers: rngs": lambda: js.scan_layers([linear(), linear()], X, nnx.Rngs(0)),
    "scan_layers: rows": lambda: scan_stacked(xs=np.zeros((3, 2))),
    "scan_layers: another type": lambda: scan_stacked(x=np.zeros((16, 64), np.int32)),
    "scan_layers: no output": lambda: scan_stacked(collect=True),
    "fully_shard: shard_dim": lambda: shard(nnx.Linear(64, 12, rngs=nnx.Rngs(0)), shard_dim=0, stacked=1),
    "fully_shard: shard_dim that is no dim": lambda: shard(linear(), shard_dim=lambda path, shape: "kernel"),
    "MixedPrecision: fp8": lambda: js.MixedPrecision(param_dtype="float8_e4m3fn"),
    "call: keep matches nothing": lambda: call(shard(linear(), mixed_precision=js.MixedPrecision(keep="norm/*"))),
    "fully_shard: mixed_precision as text": lambda: shard(linear(), mixed_precision="bfloat16"),
    "fully_shard: stacked": lambda: shard(linear(), stacked=-1),
    "fully_shard: two meshes": two_meshes,
    "fully_shard: wrapped call": lambda: shard(Wrapped()),
    "fully_shard: ignored matches nothing": lambda: shard(linear(), ignored=["kernel", "layers/*"]),
    "fully_shard: logical axes": lambda: shard(with_logical_axes(), mesh=js.mesh(fsdp=2, tensor=4)),
    "fully_shard: two dims on one axis": lambda: shard(
        with_logical_axes(), mesh=js.mesh(fsdp=2, tensor=4), axis_rules={"embed": "tensor", "fsdp": "tensor"}
    ),
    "fully_shard: a tensor axis that does not divide": lambda: over_tensor(
        None, "tensor", mesh=js.mesh(tensor=3, fsdp=2, devices=6)
    ),
    "js.parallel.split: fewer dims": lambda: js.parallel.split(linear(), {"bias": (None, "tensor")}),
    "js.parallel.split: no such parameter": lambda: js.parallel.split(linear(), {"up/kernel": (None, "tensor")}),
    "shard_init: other seeds": other_seeds,
    "js.parallel.split: annotated before": lambda: js.parallel.split(
        js.fully_shard(linear(), mesh=js.mesh(fsdp=4, tensor=2)), {"kernel": (None, "tensor")}
    ),
    "js.parallel.split: a Linen model": lambda: js.parallel.split(nn.Dense(64), {"kernel": (None, "tensor")}),
    "js.parallel.hold: a data axis": lambda: js.parallel.hold(jnp.zeros((16, 64)), "fsdp", "model"),
    "js.parallel.hold: does not divide": lambda: hold(None, "tensor"),
    "MixedPrecision: not a dtype": lambda: js.MixedPrecision(param_dtype="bf16"),
    "MixedPrecision: not floating": lambda: js.MixedPrecision(param_dtype="bfloat16", reduce_dtype="int8"),
    "MixedPrecision: not in 8 bits": lambda: js.MixedPrecision(gather_dtype="bfloat16"),
    "MixedPrecision: no narrower wire": lambda: js.MixedPrecision(param_dtype="bfloat16", wire_dtype="bfloat16"),
    "MixedPrecision: no such wire": lambda: js.MixedPrecision(wire_dtype="int8_blocks"),
    "register_wire: twice": lambda: js.register_wire("float8_e4m3fn", pack=lambda x, dim: (x,), unpack=print),
    "fully_shard: a wire that does not fit": lambda: planned_with_wire(lambda shard, dim: (shard.ravel(),)),
    "plan: a wire that is not registered": plan_without_its_wire,
    "shard_init: root forgotten": lambda: js.shard_init(linear, lambda model: None),
    "optimizer: padded parameters": lambda: nnx.grad(lambda model, x: model(x).mean())(
        shard(Odd(8, nnx.Rngs(0)), shard_dim=0), X[:, :61]
    ),
    "shard_init: abstract mesh": lambda: js.shard_init(linear, lambda model: shard(model, mesh=js.mesh(devices=64))),
    "shard_init: another mesh": lambda: js.shard_init(linear, shard, mesh=js.mesh(replica=2)),
    "shard_init: untracked array": lambda: js.shard_init(lambda: Untracked(nnx.Rngs(0)), shard),
    "shard_init: large replicated": lambda: js.shard_init(Cube, shard),
    "plan: root forgotten": forget_the_root,
    "plan: a text that is none": lambda: js.ShardPlan.from_json('{"mesh": [["fsdp", "eight"]]}'),
    "plan: parameter after the annotation": lambda: js.plan(with_a_new_parameter()),
    "shard_optimizer: no transformation": lambda: js.shard_optimizer(annotated(), None),
    "shard_optimizer: abstract mesh": lambda: js.shard_optimizer(
        shard(linear(), mesh=js.mesh(devices=64)), optax.sgd(1.0)
    ),
    "shard_optimizer: tx of another mesh": lambda: js.shard_optimizer(
        shard(linear(), mesh=js.mesh()),
        js.shard_optimizer(shard(linear(), mesh=js.mesh(replica=2)), optax.sgd(1.0)).tx,
    ),
    "value_and_grad: accumulate": lambda: js.value_and_grad(loss, accumulate=0),
    "value_and_grad: no parameter": lambda: js.value_and_grad(loss, accumulate=2, sync="last", wrt=nnx.Variable)(
        annotated(), X
    ),
    "value_and_grad: dtype": lambda: js.value_and_grad(loss, grad_dtype="int8"),
    "value_and_grad: weights in float16": lambda: summed(
        annotated(mixed_precision=js.MixedPrecision(param_dtype="float16", reduce_dtype="float16")),
        lambda model, x: js.WeightedMean(loss(model, x), 16.0),
    ),
    "reduce_gradients: another mesh": lambda: js.reduce_gradients(
        shard(linear(), mesh=js.mesh(replica=2)), summed(shard(linear()))
    ),
    "reduce_gradients: another model": lambda: js.reduce_gradients(shard(linear()), summed(annotated())),
    "reduce_gradients: reduced": lambda: js.reduce_gradients(annotated(), {"kernel": jnp.zeros((64, 64))}),
    "loss scale: factor": lambda: LossScale(factor=1.0),
    "value_and_grad: microbatches": lambda: js.value_and_grad(loss, accumulate=4)(annotated(), X),
    "units: a factory": lambda: js.fully_shard(
        Model(lambda model, x: x, nnx.Rngs(0)), mesh=js.mesh(), units=make_linear
    ),
    "optimizer: a part": lambda: js.shard_optimizer(annotated().out, optax.sgd(0.1)),
    "call: no arrays": lambda: js.abstract_init(lambda: Model(lambda model, x: x, nnx.Rngs(0)), shard)(X),
    "call: replaced layer": call_a_replaced_layer,
    "shard_init: needs a value": lambda: js.shard_init(build_by_value, shard),
    "variable: text": lambda: js.fully_shard(Texts(), mesh=js.mesh()),
    "value_and_grad: weight": lambda: js.WeightedMean(jnp.zeros(()), jnp.ones((4, 8), bool)).mean,
    "call: abstract mesh": lambda: call(shard(linear(), mesh=js.mesh(devices=64)), X),
    "call: inside another shard_map": call_in_a_shard_map,
    "call: computed whole": lambda: call(annotated(orthogonal_examples, fallback="error"), X),
    "call: axis of a vmap around": lambda: jax.vmap(annotated(mean_over_a_name), axis_name="batch")(X[None]),
    "call: parameter written": lambda: call(rounded(write_parameter), X),
    "call: result of an unknown class": lambda: call(annotated(return_object), X),
    "call: array stored in an argument": lambda: annotated(store_in_argument)((X, [].append)),
    "call: attribute written": lambda: call(annotated(write_attribute), X),
    "call: layers built inside": lambda: call(annotated(builds_layers), X),
    "call: loop over padded layers": loop_over_padded_layers,
    "call: unit annotated after the root": annotated_late,
    "call: fault of the engine": with_a_rule_that_fails,
    "call: ordered callback": lambda: call(annotated(ordered_callback), X),
    "call: shard_map over another mesh": lambda: call(annotated(over_another_mesh), X),
    "call: shard_map over its own mesh with fsdp": lambda: call(annotated(over_its_own_mesh), X),
    "call: shard_map, tensor before fsdp": tensor_before_fsdp,
    "call: shard_map with an unreduced result": lambda: call(annotated(unreduced), X),
    "per_example: in_axes": lambda: js.per_example(product, in_axes=(0,))(X, X.T),
    "per_example: numbers of examples": lambda: js.per_example(product)(X, X.T),
    "per_example: one key": lambda: js.per_example(noisy, in_axes=(0, None))(X, jax.random.key(0)),
    "per_example: closes over": lambda: jax.jit(lambda w: js.per_example(lambda x: x @ w)(X))(X.T),
    "per_example: no row for each example": lambda: js.per_example(lambda x: x.sum())(X),
    "per_example: for the whole batch": lambda: each_example(tiles_of_16),
    "per_example: rows of the whole batch": lambda: each_example(lambda x: jnp.resize(x, (16, 64))),
    "per_example: other residuals": lambda: each_example(another_program_for_few),
    "check: disagreement": lambda: js.check(annotated(less_the_mean), X),
    **LINEN_ERRORS,
    **STAGES_ERRORS,
    "processes: one is missing": lambda: exchanged(
        mock.Mock(key_value_dir_get=arrived, wait_at_barrier=mock.Mock(side_effect=TimeoutError))
    ),
    "processes: one came too late": came_too_late,
    "processes: no service": lambda: exchanged(
        mock.Mock(key_value_dir_get=mock.Mock(side_effect=RuntimeError("UNAVAILABLE: Socket closed")))
    ),
    "files: not a regular file": lambda: _files.read_bytes("/dev/zero"),
    "files: too large": lambda: _files.read_bytes("/proc/self/maps", 10),
    "files: another name": write_a_file_of_two_names,
}


def gathered_again() -> None:
    def loss(model, x):
        first = model.inner(x)
        model.out.kernel[...] = 2 * model.out.kernel[...]
        return model(x).mean() + first.mean()

    nnx.jit(js.value_and_grad(loss, accumulate=2, sync="last")).lower(annotated(), X)


def every_device_computes(*shapes: tuple[int, ...]) -> None:
    """Traces a call of a model that sums products of each argument. Under a name of its own, as what was said is not
    said again."""

    class Wide(nnx.Module):
        def __init__(self, rngs: nnx.Rngs):
            self.kernel = nnx.Param(jnp.zeros((1024, 1024)))

        def __call__(self, *xs):
            return sum((x @ self.kernel).sum() for x in xs)

    model = js.abstract_init(lambda: type(f"Wide{len(str(shapes))}", (Wide,), {})(nnx.Rngs(0)), shard)
    xs = [jax.ShapeDtypeStruct(shape, np.float32) for shape in shapes]
    nnx.jit(lambda model, xs: model(*xs)).lower(model, xs)


def layers_in_a_loop() -> nnx.Module:
    """64 MiB of layers, in a loop."""
    zeros = nnx.initializers.zeros_init()
    make = nnx.split_rngs(splits=4)(
        nnx.vmap(lambda rngs: nnx.Linear(64, 65536, use_bias=False, kernel_init=zeros, rngs=rngs))
    )
    trip = nnx.scan(lambda x, layer: layer(x)[:, :64], in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)

    class Tower(nnx.Module):
        def __init__(self, rngs: nnx.Rngs):
            self.layers = make(rngs)

        def __call__(self, x):
            return trip(x, self.layers)

    return shard(Tower(nnx.Rngs(0)))


WARNINGS: dict[str, Callable[[], object]] = {
    "warning: computed whole": lambda: call(
        annotated(orthogonal_examples), np.random.default_rng(0).random((4096, 64), np.float32)
    ),
    "warning: products of all examples": lambda: every_device_computes((1020, 1024)),
    "warning: products of too few examples": lambda: every_device_computes((3, 340, 1024)),
    "warning: products of the examples beside the batch": lambda: every_device_computes((1024, 1024), (1020, 1024)),
    "warning: products of another dim of examples": lambda: every_device_computes((16, 1024), (12, 16, 64, 1024)),
    "warning: layers that are no unit": lambda: nnx.eval_shape(call, layers_in_a_loop(), X),
    "warning: replicated": lambda: js.abstract_init(lambda: Odd(64, nnx.Rngs(0)), shard),
    "warning: no parameters, and large": lambda: js.abstract_init(lambda: Average(nnx.Rngs(0)), shard),
    "warning: parameter after the annotation": lambda: call(with_a_new_parameter(), X),
    "warning: gathered again": gathered_again,
    "warning: remat by name": lambda: call(shard(linear(), remat="names:context,up"), X),
    "warning: stages, layers that differ": layers_that_differ,
    "warning: linen, stacked layers": stacked_layers,
    "warning: linen, submodule before init": submodule_before_init,
}


def provoke(name: str) -> str:
    if name in WARNINGS:
        with pytest.warns((UserWarning, FutureWarning, DeprecationWarning), match=r"\w") as caught:
            WARNINGS[name]()
        (warning,) = caught
        return _without_lines(str(warning.message))
    with pytest.raises((js.ShardingError, errors.RunError)) as raised:
        ERRORS[name]()
    return _without_lines(f"{type(raised.value).__name__}: {raised.value}")


def _without_lines(text: str) -> str:
    """Line numbers of this file change with every edit."""
    return re.sub(r"(\.py):\d+", r"\1:<line>", text)


def golden() -> dict[str, str]:
    parts = GOLDEN.read_text().split(HEAD)[1:]
    return {name: text.rstrip("\n") for name, _, text in (part.partition("\n") for part in parts)}


@pytest.mark.parametrize("name", [*ERRORS, *WARNINGS])
def test_text(name):
    found = provoke(name)
    if "UPDATE_GOLDEN" in os.environ:
        texts = (golden() if GOLDEN.exists() else {}) | {name: found}
        ordered = [n for n in [*ERRORS, *WARNINGS] if n in texts]
        GOLDEN.write_text("".join(f"{HEAD}{n}\n{texts[n]}\n\n" for n in ordered))
    assert found == golden()[name]


def test_no_golden_text_is_left_over():
    assert list(golden()) == [*ERRORS, *WARNINGS]


@pytest.mark.parametrize("name", ERRORS)
def test_form(name):
    """What in one sentence; where, why and do, none of them empty."""
    kind, _, text = golden()[name].partition(": ")
    assert issubclass(getattr(errors, kind), RuntimeError if name.startswith("processes: ") else js.ShardingError)
    assert issubclass(js.ShardingError, ValueError)
    lines = text.splitlines()
    assert lines[0].endswith(".")
    heads = [line[:9].strip() for line in lines[1:]]
    assert [head for head in heads if head] == ["where:", "why:", "do:"]
    assert all(len(line) > 12 for line in lines)


CALL = re.compile(r"js\.[\w.]+\((?:[^()]|\((?:[^()]|\([^()]*\))*\))*\)")


def suggested_calls() -> list[str]:
    """The calls of jshard in what the golden texts say to do."""
    texts = "".join(path.read_text() for path in GOLDEN.parent.glob("*.txt"))
    do = re.findall(r"^  do:(.*\n(?: {9}.*\n)*)", texts, re.MULTILINE)
    return sorted({call for text in do for call in CALL.findall(text) if "..." not in call})


@pytest.mark.parametrize("call", suggested_calls())
def test_what_an_error_says_to_call_is_there_and_takes_these_arguments(call):
    if call.startswith("js.mesh("):
        assert isinstance(eval(call), jax.sharding.Mesh | jax.sharding.AbstractMesh)
        return
    bound = []
    for node in ast.walk(ast.parse(call, mode="eval")):
        if isinstance(node, ast.Call) and ast.unparse(node.func).startswith("js."):
            arguments = {word.arg: word.value for word in node.keywords}
            bound.append(inspect.signature(eval(ast.unparse(node.func))).bind(*node.args, **arguments))
    assert bound, "no call of jshard was looked at"


def sources() -> list[pathlib.Path]:
    return [
        *PACKAGE.glob("*.py"),
        *(path for room in ("api", "linen", "engine", "plans") for path in PACKAGE.glob(f"{room}/**/*.py")),
        PACKAGE / "inspect" / "check.py",
    ]


def raised_texts() -> Iterator[tuple[str, re.Pattern[str]]]:
    """Place and first sentence of every error in the source, with anything where it has a value filled in."""
    for path in sources():
        for node in ast.walk(ast.parse(path.read_text())):
            if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id.endswith("Error")):
                continue
            if not node.keywords or not node.args:  # an error that is passed on, or not one of ours
                continue
            what = node.args[0]
            pieces = what.values if isinstance(what, ast.JoinedStr) else [what]
            if isinstance(what, (ast.JoinedStr, ast.Constant)):
                pattern = "".join(re.escape(p.value) if isinstance(p, ast.Constant) else ".*" for p in pieces)
                yield f"{path.name}:{node.lineno}", re.compile(pattern)


def test_every_error_in_the_source_has_its_golden_text():
    firsts = [text.partition(": ")[2].splitlines()[0] for name, text in golden().items() if name in ERRORS]
    found = list(raised_texts())
    assert len(found) > 30
    untold = [place for place, pattern in found if not any(pattern.fullmatch(first) for first in firsts)]
    assert not untold


def test_every_warning_in_the_source_has_its_golden_text():
    count = sum(len(re.findall(r"(warnings|_compat)\.warn(_user)?\(", path.read_text())) for path in sources())
    kinds = {re.sub(r"\d+|[A-Z]\w+(\.\w+)?", "", golden()[name].splitlines()[0]) for name in WARNINGS}
    assert len(kinds) >= count


def test_an_error_survives_pickling():
    error = MeshError("What.", where=["here", "there"], why="numbers", do="this")
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is MeshError and str(again) == str(error) and again.where == error.where


def test_ten_places_are_shown_and_the_rest_counted():
    text = str(js.ShardingError("What.", where=[f"leaf {i}" for i in range(12)], why="why", do="do"))
    assert "leaf 9" in text and "leaf 10" not in text and "... and 2 more" in text
