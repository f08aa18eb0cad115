"""What the partitioner makes of a model along its own axes is what the compiler makes of it, and needs no compile."""

import collections
import math

import jax
import pytest
from flax import nnx

import jshard as js
from jshard.inspect.activations import over_tensor, saved_arrays
from jshard.inspect.partitioned import ArrayForm, partitioned_step
from jshard.recipes.building import abstract_model, batch_of
from jshard.recipes.overrides import override
from jshard.train import load_model_file
from tests.micro_gpt import MODELS

LLAMA = load_model_file(MODELS / "llama.py")
MOE = load_model_file(MODELS / "moe.py")


def program_of(model_file, *settings, rows=1, **degrees):
    """The abstract model, its loss, and a batch with so many rows on each data shard."""
    _, recipe = model_file.recipe("tiny")
    recipe = override(recipe, settings)
    mesh = js.mesh(**degrees, devices=jax.devices()[: math.prod(degrees.values())])
    batch = batch_of(model_file, recipe, rows * mesh.shape["fsdp"] * mesh.shape.get("expert", 1))
    return abstract_model(model_file, recipe, mesh), model_file.loss, batch


def compiled_bytes(model, loss, batch):
    """Bytes of the collectives over the model's axes alone, in the program that XLA compiled, by kind and axes."""
    graphdef, params, rest = nnx.split(model, nnx.Param, ...)

    def step(params, rest, batch):
        return jax.grad(lambda params: loss(nnx.merge(graphdef, params, rest), batch))(params)

    audited = js.audit(jax.jit(step).lower(params, rest, batch).compile(), plan=js.plan(model))
    result = collections.Counter()
    for window in audited.schedule.windows:
        if window.axes and set(window.axes) <= {"tensor", "context", "expert"}:
            result[window.kind, window.axes] += window.full_bytes * window.executions
    return result


def predicted_bytes(model, loss, batch):
    result = collections.Counter()
    for collective, count in partitioned_step(model, loss, batch).collectives.items():
        result[collective.kind, collective.axes] += collective.full_bytes * count
    return result


@pytest.mark.parametrize("scan", [False, True])
@pytest.mark.parametrize("remat", ["none", "full"])
def test_a_half_of_a_block_is_summed_over_tensor(scan, remat):
    """By Megatron's count: two sums in forward, two in backward, and one more where forward is computed again."""
    settings = (f"model.scan={scan}".lower(), f"model.remat={remat}", "model.tied=true")
    model, loss, batch = program_of(LLAMA, *settings, fsdp=4, tensor=2)
    sums_per_layer = 5 if remat == "full" else 4
    sum_bytes = 128 * 192 * 4
    assert predicted_bytes(model, loss, batch) == {("all-reduce", ("tensor",)): 3 * sums_per_layer * sum_bytes}


def test_the_partitioner_says_which_values_are_split_over_tensor():
    """Also gradients: the hidden values of an MLP and all that are computed from them, and no inputs of a layer."""
    model, loss, batch = program_of(LLAMA, "model.scan=true", "model.remat=none", rows=3, fsdp=2, tensor=2)
    over_tensor = partitioned_step(model, loss, batch).over_tensor
    (rows, length) = batch["inputs"].shape
    _, recipe = LLAMA.recipe("tiny")
    hidden = ArrayForm(4, (rows // 2, length, recipe.model.d_ff))
    assert over_tensor[hidden] == 1.0
    assert over_tensor[ArrayForm(4, (rows // 2, length, recipe.model.d_model))] < 0.5


@pytest.mark.wide
@pytest.mark.parametrize(
    ("model_file", "degrees"),
    [
        (LLAMA, {"fsdp": 4, "tensor": 2}),
        (LLAMA, {"fsdp": 4, "context": 2}),
        (LLAMA, {"fsdp": 2, "tensor": 2, "context": 2}),
        (MOE, {"fsdp": 4, "expert": 2}),
        (MOE, {"fsdp": 2, "expert": 4}),
    ],
    ids=["tensor", "context", "both", "two shards of experts", "four"],
)
def test_what_is_counted_is_what_is_compiled(model_file, degrees):
    program = program_of(model_file, **degrees)
    compiled = compiled_bytes(*program)
    predicted = predicted_bytes(*program)
    assert predicted
    # The compiler of CPUs does not join sums that are added: in backward it has three for q, k and v, and two for the
    # MLP, where compilers of GPUs have one for each.
    predicted["all-reduce", ("tensor",)] *= 7 / 4
    for key in {*compiled, *predicted}:
        assert predicted[key] == pytest.approx(compiled[key], rel=0.05, abs=4096), key


def test_devices_of_a_larger_tensor_axis_hold_smaller_parts():
    saved = {}
    for tensor in (1, 2):
        model, loss, batch = program_of(LLAMA, "model.remat=none", fsdp=2, tensor=tensor)
        saved[tensor] = saved_arrays(model, loss, batch)
    hidden = [array for array in saved[2] if array.form.shape[-1:] == (512,)]
    assert hidden and all(array.over_tensor == 1.0 for array in hidden)
    stream = [array for array in saved[2] if array.dtype == "float32" and array.form.shape == (1, 128, 1)]
    assert stream and all(array.over_tensor == 0.0 for array in stream)

    def total_bytes(arrays):
        return sum(array.bytes * count for array, count in arrays.items())

    assert 0.5 < total_bytes(saved[2]) / total_bytes(saved[1]) < 0.8
    again = over_tensor(saved[2], traced_degree=2, degree=1)
    assert total_bytes(again) == pytest.approx(total_bytes(saved[1]), rel=0.01)
