"""An annotated model stays what it was, and every choice of units, dims and exceptions gives the plan it says."""

import copy
import dataclasses
import inspect
import pathlib
import pickle
import subprocess

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jshard as js
from jshard.errors import AnnotationError
from tests.compiling import python
from tests.helpers import (
    Attention,
    Block,
    Config,
    Decoder,
    annotator,
    builder,
    loss_fn,
    mean_square,
    placed,
    sharded,
    token_batch,
    with_placement,
)
from tests.parity import GRADIENT_TOLERANCE, flat, worst
from tests.toy_models import Cube

CONFIG = Config(width=32, hidden=64)
SLIM = dataclasses.replace(CONFIG, attends=False)
INPUTS, TARGETS = token_batch(CONFIG)


def plain() -> Decoder:
    return builder(CONFIG)()


@pytest.fixture(scope="module")
def model() -> Decoder:
    return sharded(CONFIG, js.mesh())


@nnx.jit
def loss_of(model: nnx.Module, inputs, targets):
    return loss_fn(model, inputs, targets)


def assert_same_gradients(build, annotate, loss, batch) -> None:
    """Loss and gradients of the annotated model are those of the plain one."""
    run = nnx.jit(lambda model, *batch: nnx.value_and_grad(loss)(model, *batch))
    value, grads = run(placed(build, annotate), *batch)
    want_value, want = run(build(), *batch)
    np.testing.assert_allclose(value, want_value, rtol=1e-6)
    found, wanted = flat(grads), flat(want)
    assert found.keys() == wanted.keys()
    assert max(worst(found[k], wanted[k]) for k in wanted) <= GRADIENT_TOLERANCE


def gathers(model: nnx.Module, *batch) -> int:
    """How many all-gathers the call is written with."""
    text = nnx.jit(lambda model, *batch: model(*batch)).lower(model, *batch).lowered.as_text()
    return text.count("stablehlo.all_gather")


# The model stays what it was.


def test_the_class_behaves_as_before(model):
    assert isinstance(model, Decoder)
    assert isinstance(model.blocks[0], Block)
    assert type(model).__name__ == "Decoder"
    assert type(model).__qualname__ == Decoder.__qualname__
    assert type(model).__module__ == Decoder.__module__
    assert type(model).__doc__ == Decoder.__doc__
    assert inspect.signature(model.__call__) == inspect.signature(plain().__call__)
    assert model.config == CONFIG
    assert type(model.norm) is nnx.RMSNorm  # not a unit: untouched
    assert vars(model).keys() == vars(plain()).keys()
    assert type(plain()) is Decoder  # other models of the class are not annotated


def test_names_and_tree_are_those_of_the_plain_model(model):
    state, wanted = nnx.state(model), nnx.state(plain())
    assert jax.tree.structure(state) == jax.tree.structure(wanted)
    assert [p for p, _ in nnx.to_flat_state(state)] == [p for p, _ in nnx.to_flat_state(wanted)]
    same = jax.tree.map(lambda a, b: bool((np.asarray(a) == np.asarray(b)).all()), state, wanted)
    assert all(jax.tree.leaves(same))
    for (_, found), (_, other) in zip(nnx.to_flat_state(state), nnx.to_flat_state(wanted), strict=True):
        assert type(found) is type(other)
        assert found.get_metadata() == other.get_metadata()


COPIES = {
    "split by kind": lambda m: (lambda g, p, r: nnx.merge(g, p, r))(*nnx.split(m, nnx.Param, ...)),
    "clone": nnx.clone,
    "deepcopy": copy.deepcopy,
    "pickle": lambda m: pickle.loads(pickle.dumps(m)),
    "pickled graphdef": lambda m: nnx.merge(pickle.loads(pickle.dumps(nnx.split(m)[0])), nnx.split(m)[1]),
    "pytree": lambda m: nnx.merge(nnx.graphdef(m), jax.tree.map(jnp.copy, nnx.state(m))),
}


def test_copies_are_annotated_and_compute_the_same(model):
    step = nnx.jit(lambda m, x: m(x))
    wanted = step(model, INPUTS)
    for how, copied in COPIES.items():
        other = copied(model)
        assert other is not model and isinstance(other, Decoder), how
        assert js.plan(other) == js.plan(model) and nnx.graphdef(other) == nnx.graphdef(model), how
        np.testing.assert_array_equal(step(other, INPUTS), wanted, err_msg=how)


LOAD = """
import pickle, sys, jax
jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_platforms", "cpu")
from flax import nnx
import jshard as js
from tests.api.test_annotation import CONFIG, loss_fn, token_batch

with open(sys.argv[1], "rb") as file:
    model, graphdef, plan, wanted = pickle.load(file)
assert js.plan(model) == plan
assert nnx.graphdef(model) == graphdef and hash(nnx.graphdef(model)) == hash(graphdef)
loss = nnx.jit(lambda model, *batch: loss_fn(model, *batch))
text = loss.lower(model, *token_batch(CONFIG)).lowered.as_text()
assert "stablehlo.all_gather" in text
assert float(loss(model, *token_batch(CONFIG))) == wanted
"""


def test_pickles_open_in_another_process(model, tmp_path):
    kept = (model, nnx.graphdef(model), js.plan(model), float(loss_of(model, INPUTS, TARGETS)))
    path = tmp_path / "model.pickle"
    path.write_bytes(pickle.dumps(kept))
    root = pathlib.Path(__file__).parents[2]
    done = subprocess.run(python(LOAD, path), cwd=root, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_graphdefs_of_equal_models_are_equal_and_jit_traces_once(model):
    again = sharded(CONFIG, js.mesh())
    assert nnx.graphdef(again) == nnx.graphdef(model) != nnx.graphdef(plain())
    assert hash(nnx.graphdef(again)) == hash(nnx.graphdef(model))
    for others in (annotator(js.mesh(replica=2)), annotator(js.mesh(), remat="full")):
        assert nnx.graphdef(js.abstract_init(builder(CONFIG), others)) != nnx.graphdef(model)
    traces = []
    step = nnx.jit(lambda m, x: traces.append(0) or m(x))
    for each in (model, again, nnx.clone(model)):
        step(each, INPUTS)
    assert len(traces) == 1


def test_eval_shape_of_an_annotated_model(model):
    shapes = nnx.eval_shape(lambda: js.shard_init(builder(CONFIG), annotator(js.mesh())))
    assert js.plan(shapes) == js.plan(model)
    out = nnx.eval_shape(lambda m, x: m(x), model, jnp.asarray(INPUTS))
    assert out.shape == (*INPUTS.shape, CONFIG.vocab)


def test_annotation_in_place_in_one_call_equals_deferred_annotation(model):
    other = js.fully_shard(plain(), units=Block, mesh=js.mesh())
    assert js.plan(other) == js.plan(model) and nnx.graphdef(other) == nnx.graphdef(model)
    for a, b in zip(*(jax.tree.leaves(nnx.state(m)) for m in (other, model)), strict=True):
        assert a.sharding.is_equivalent_to(b.sharding, a.ndim)


# Which submodules are units.

ONE_CALL = {
    "a class": (Block, {"blocks/0", "blocks/1"}),
    "a pattern": ("blocks/*", {"blocks/0", "blocks/1"}),
    "an inner pattern": ("blocks/*/attention", {"blocks/0/attention", "blocks/1/attention"}),
    "a path": ("blocks/1", {"blocks/1"}),
    "a predicate": (lambda path, module: path.endswith("up"), {"blocks/0/up", "blocks/1/up"}),
    "a list": ([Attention, "blocks/0", "embed"], {"blocks/0", "blocks/0/attention", "blocks/1/attention", "embed"}),
    "nested classes": ([Block, Attention], {f"blocks/{i}{inner}" for i in "01" for inner in ("", "/attention")}),
}


@pytest.mark.parametrize("form", ONE_CALL)
def test_one_call_form(form):
    units, names = ONE_CALL[form]
    annotate = lambda m: js.fully_shard(m, units=units, mesh=js.mesh(), reshard_after_forward=True, remat="full")
    plan = js.plan(js.abstract_init(builder(CONFIG), annotate))
    assert {unit.name for unit in plan.units} == {"(root)", *names}
    assert all(unit.reshard_after_forward is True for unit in plan.units)
    assert {unit.name for unit in plan.units if unit.remat == "full"} == names
    for leaf in plan.leaves:  # a parameter belongs to the innermost unit around it
        around = [name for name in names if leaf.path.startswith(f"{name}/")]
        assert leaf.unit == max(around, key=len, default="(root)")


def test_a_list_is_one_unit():
    def annotate(model):
        for block in model.blocks:
            js.fully_shard(block, mesh=js.mesh())
        js.fully_shard([model.norm, model.head], mesh=js.mesh(), reshard_after_forward=False)
        js.fully_shard(model, mesh=js.mesh())

    plan = js.plan(js.abstract_init(builder(dataclasses.replace(SLIM, tied=False)), annotate))
    assert [u.name for u in plan.units] == ["(root)", "blocks/0", "blocks/1", "head+norm"]
    assert {leaf.path for leaf in plan.unit_leaves("head+norm")} == {"norm/scale", "head/kernel"}


# Tied parameters.


class TiedInTwoWays(nnx.Module):
    """An embedding and a head that share one table, and two blocks that share a projection."""

    def __init__(self, rngs: nnx.Rngs, *, blocks: bool = False):
        self.embed = nnx.Linear(64, 256, use_bias=False, rngs=rngs)
        self.blocks = nnx.List([nnx.Linear(256, 256, rngs=rngs) for _ in range(2)])
        self.head = nnx.Linear(64, 256, use_bias=False, rngs=rngs)
        if blocks:
            self.blocks[1].kernel = self.blocks[0].kernel
        else:
            self.head.kernel = self.embed.kernel

    def __call__(self, x):
        h = self.embed(x)
        for block in self.blocks:
            h = jax.nn.gelu(block(h))
        return self.head(h @ jnp.ones((256, 64)) / 256)


ROWS = (np.random.default_rng(0).standard_normal((16, 64)).astype(np.float32),)
MESH = js.mesh()


def test_the_remat_of_the_one_call_form_is_that_of_the_units():
    """Around the root it would gather and compute every unit three times."""
    one_by_one, one_call = plain(), js.fully_shard(plain(), units=Block, mesh=MESH, remat="full")
    for block in one_by_one.blocks:
        js.fully_shard(block, mesh=MESH, remat="full")
    js.fully_shard(one_by_one, mesh=MESH)
    texts = [
        nnx.jit(nnx.value_and_grad(loss_of)).lower(model, INPUTS, TARGETS).lowered.as_text()
        for model in (one_by_one, one_call)
    ]
    gathers, products = ([text.count(op) for text in texts] for op in ("stablehlo.all_gather", "stablehlo.dot_general"))
    assert gathers[0] == gathers[1] > 0 and products[0] == products[1]
    assert js.plan(one_call) == js.plan(one_by_one)
    alone = js.fully_shard(plain(), mesh=MESH, remat="full")  # a root that is the only unit keeps its own
    assert [unit.remat for unit in js.plan(alone).units] == ["full"]


TIES = {
    "across two units": (
        False,
        lambda m: [js.fully_shard(u, mesh=MESH, reshard_after_forward=True, remat="full") for u in (m.embed, m.head)],
    ),
    "in a list": (False, lambda m: js.fully_shard([m.embed, m.head], mesh=MESH)),
    "across blocks": (True, lambda m: [js.fully_shard(b, mesh=MESH) for b in m.blocks]),
}


@pytest.mark.parametrize("case", TIES)
def test_a_tied_parameter_lives_in_one_unit_and_is_gathered_once(case):
    blocks, inner = TIES[case]

    def annotate(model):
        inner(model)
        js.fully_shard(model, mesh=MESH)

    build = lambda: TiedInTwoWays(nnx.Rngs(0), blocks=blocks)
    model = placed(build, annotate)
    plan = js.plan(model)
    first, other = ("blocks/0/kernel", "blocks/1/kernel") if blocks else ("embed/kernel", "head/kernel")
    assert plan.leaf(first) is plan.leaf(other)
    assert plan.leaf(first).unit == ("embed+head" if case == "in a list" else "(root)")  # the innermost around both
    assert len(plan.leaves) == 5
    sharded_leaves = [leaf for leaf in plan.leaves if leaf.placement.dim is not None]
    assert gathers(model, *ROWS) == len(sharded_leaves) == (4 - blocks - (not blocks))
    assert_same_gradients(build, annotate, mean_square, ROWS)
    assert nnx.graphdef(model) != nnx.graphdef(TiedInTwoWays(nnx.Rngs(0), blocks=not blocks))
    copied = nnx.clone(model)
    assert (
        (copied.blocks[0].kernel is copied.blocks[1].kernel) if blocks else (copied.embed.kernel is copied.head.kernel)
    )


class Repeated(nnx.Module):
    """One layer used at two depths, once by two names."""

    def __init__(self, rngs: nnx.Rngs):
        self.first = nnx.Linear(64, 64, rngs=rngs)
        self.second = self.first

    def __call__(self, x):
        return self.second(jax.nn.gelu(self.first(x)))


def test_a_module_used_twice():
    annotate = lambda model: js.fully_shard(model, mesh=MESH, units=nnx.Linear)
    build = lambda: Repeated(nnx.Rngs(0))
    model = js.shard_init(build, annotate)
    assert model.first is model.second
    assert [leaf.aliases for leaf in js.plan(model).leaves] == [("second/bias",), ("second/kernel",)]
    assert_same_gradients(build, annotate, mean_square, ROWS)


# Which dim, and which parameters.


class Shapes(nnx.Module):
    def __init__(self, shapes: dict[str, tuple[int, ...]]):
        for name, shape in shapes.items():
            setattr(self, name, nnx.Param(jnp.zeros(shape)))


SHAPES = {
    "largest": (64, 128),
    "first_of_equal": (128, 128),
    "other_dim": (129, 64),
    "last_of_three": (65, 33, 16),
    "small": (64,),
    "just_small": (1016,),
    "just_large": (1024,),
    "scalar": (),
}


def shapes(mesh=MESH, sizes=SHAPES, **settings):
    model = nnx.eval_shape(lambda: Shapes(sizes))
    return js.plan(js.fully_shard(model, mesh=mesh, **with_placement(**settings)))


def dims(plan: js.ShardPlan) -> dict[str, int | None]:
    return {leaf.path: leaf.placement.dim for leaf in plan.leaves}


def test_the_largest_dim_that_divides_is_sharded_and_small_parameters_are_not():
    plan = shapes()
    assert dims(plan) == {
        "largest": 1,
        "first_of_equal": 0,
        "other_dim": 1,
        "last_of_three": 2,
        "small": None,
        "just_small": None,
        "just_large": 0,
        "scalar": None,
    }
    assert plan.leaf("other_dim").placement.spec == (None, "fsdp")
    assert plan.leaf("other_dim").placement.bytes_per_device == 129 * 64 * 4 // 8
    assert plan.leaf("small").placement.bytes_per_device == 64 * 4
    assert dims(shapes(min_size=0))["small"] == 0
    assert dims(shapes(min_size=0))["scalar"] is None


@pytest.mark.parametrize(
    ("mesh", "path", "because"),
    [
        ({}, "small", "smaller than min_size (64 < 1024 elements)"),
        ({"replica": -1, "fsdp": 1}, "largest", "the fsdp axis has degree 1"),
        ({"devices": 7}, "largest", "no dim divides by 7 (shape (64, 128))"),
    ],
)
def test_a_parameter_is_replicated_with_the_reason(mesh, path, because):
    plan = shapes(js.mesh(**mesh))
    assert plan.leaf(path).placement.because == because
    assert plan.leaf(path) in plan.replicated


@pytest.mark.parametrize(
    ("ignored", "left_out"),
    [
        ("largest", {"largest"}),
        ("*_dim", {"other_dim"}),
        (nnx.Param, set(SHAPES)),
        (lambda path, value: value.ndim == 3, {"last_of_three"}),
        ((nnx.PathContains("largest"), "other_dim"), {"largest", "other_dim"}),
        ([], set()),
    ],
    ids=["path", "pattern", "type", "function", "filter and path", "nothing"],
)
def test_ignored(ignored, left_out):
    plan = shapes(ignored=ignored)
    assert {leaf.path for leaf in plan.leaves if leaf.placement.because == "ignored by the annotation"} == left_out
    for path, dim in dims(shapes()).items():
        assert dims(plan)[path] == (None if path in left_out else dim)


def test_shard_dim_is_a_number_or_a_function():
    matrices = {"a": (64, 128), "b": (128, 64)}
    assert dims(shapes(sizes=matrices, shard_dim=0)) == {"a": 0, "b": 0}
    assert dims(shapes(sizes=matrices, shard_dim=-1)) == {"a": 1, "b": 1}
    seen = {}

    def choose(path, shape):
        seen[path] = shape
        return 0 if path == "a" else None

    assert dims(shapes(sizes=matrices, shard_dim=choose)) == {"a": 0, "b": 0}
    assert seen == matrices
    # one that is asked for is sharded however small it is
    assert dims(shapes(sizes={"small": (64,)}, shard_dim=0)) == {"small": 0}


def test_stacked_dims_are_left_alone():
    sizes = {"kernel": (64, 16, 8), "scale": (64, 32)}
    assert dims(shapes(sizes=sizes)) == {"kernel": 0, "scale": 0}
    assert dims(shapes(sizes=sizes, stacked=1)) == {"kernel": None, "scale": None}  # small per layer
    assert dims(shapes(sizes=sizes, stacked=1, min_size=0)) == {"kernel": 1, "scale": 1}


# Parameters that no dim divides.


class Odd(nnx.Module):
    def __init__(self, rngs: nnx.Rngs, wide: int = 64):
        self.odd = nnx.Linear(61, 67, rngs=rngs)
        self.even = nnx.Linear(67, wide, rngs=rngs)

    def __call__(self, x):
        return self.even(self.odd(x))


ODD_ROWS = ROWS[0][:, :61]


def test_a_large_replicated_parameter_is_an_error_wherever_the_model_is_first_used():
    annotate = lambda model: js.fully_shard(model, mesh=MESH)
    for init in (js.shard_init, js.abstract_init):
        with pytest.raises(AnnotationError, match=r"1 large parameter\(s\) of Cube(.|\n)*odd"):
            init(Cube, annotate)
    model = annotate(Cube())
    with pytest.raises(AnnotationError, match="odd  float32"):
        model(ODD_ROWS)
    with pytest.raises(AnnotationError, match="odd  float32"):  # another name does not help
        js.abstract_init(
            Cube,
            lambda model: js.fully_shard(model, mesh=MESH, placement=js.PlacementPolicy(allow_replicated=["even/*"])),
        )


def test_small_parameters_that_no_dim_divides_are_replicated_with_one_warning():
    annotate = lambda model: js.fully_shard(model, mesh=MESH)
    build = lambda: Odd(nnx.Rngs(0))
    with pytest.warns(
        UserWarning, match=r"1 parameter\(s\) of Odd are replicated(.|\n)* 16348 bytes of them"
    ) as warned:
        model = js.shard_init(build, annotate)
    assert len(warned) == 1
    assert_same_gradients(build, annotate, mean_square, (ODD_ROWS,))  # without another: warnings are errors here
    assert "no dim divides by 8" in str(js.explain(model))


def test_a_requested_dim_is_no_shard_where_fsdp_has_degree_one():
    """Gradients would be summed over the replicas twice: joined with other small ones, and after a reduce-scatter."""
    mesh = js.mesh(replica=8, fsdp=1)
    model = nnx.Linear(64, 64, rngs=nnx.Rngs(0))
    x = np.ones((16, 64), np.float32)
    gradients = nnx.jit(nnx.grad(mean_square))
    expected = flat(gradients(model, x))
    js.fully_shard(model, mesh=mesh, placement=js.PlacementPolicy(shard_dim=0))
    assert all(leaf.placement.dim is None for leaf in js.plan(model).leaves)
    for path, gradient in flat(gradients(model, x)).items():
        assert worst(gradient, expected[path]) <= GRADIENT_TOLERANCE, path
