"""What devices along `tensor` divide in published programs, beside the products of the layers.

models/llama.py and gpt.py compute on each of them the head, the loss, and what is between the products of a layer:
norms and sums. Megatron and others divide both tables, the head and the loss by words. With sequence parallelism they
also divide what is between the products, by tokens: no device reads or writes more than its part of anything.

Source: Korthikanti et al. 2022, arXiv 2205.05198, section 4.2.2.

The compiler adds cotangents over `tensor` beside the products of gradients of weights. In programs whose layers call an
all-reduce as an operation of its own, nothing runs beside it: `copy_to_tensor_model_parallel_region` in
megatron/mpu/layers.py of bigscience-workshop/Megatron-DeepSpeed, and in src/scaling/core/nn/linear of
Aleph-Alpha/scaling. There each product of columns has one, also both products that read the input of a gated MLP.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping

from benchmarks.published_pytorch import PyTorchProgram
from benchmarks.stage_traces import StageTraces
from jshard.cluster.assumptions import Assumptions
from jshard.cluster.compile import UnitSettings, Variant
from jshard.cluster.costs import Costs
from jshard.cluster.model_costs import kernel_times, without_parameter_work
from jshard.cluster.model_traces import ModelTraces, alike
from jshard.inspect.hlo.work import EqualProducts, OpWork
from jshard.inspect.memory import whole_elements
from jshard.inspect.partitioned import MODEL_AXES
from jshard.inspect.traced_work import KernelWork
from jshard.plans.mesh import CONTEXT, TENSOR
from jshard.plans.plan import ShardPlan
from jshard.recipes.recipe import Recipe, gathers_once

_ITEMSIZE = 2  # of 16 bits


def divided_s(program: PyTorchProgram, costs: Costs, mesh: Mapping[str, int], *, rows: int) -> float:
    """Returns how much longer a microbatch takes than in jshard's program, because more is divided: at most 0.

    Args:
        program: how it is written.
        costs: of the model.
        mesh: degrees of its axes.
        rows: the sequences of a microbatch.
    """
    if mesh.get(TENSOR, 1) == 1:
        return 0.0
    assumptions = costs.machine.assumptions
    more_s = split_head_s(costs.recipe, mesh, rows=rows, whole=program.whole_logits, assumptions=assumptions)
    return more_s + _split_traffic_s(program, costs, mesh, rows)


def sums_s(program: PyTorchProgram, costs: Costs, mesh: Mapping[str, int], units: UnitSettings, *, rows: int) -> float:
    """Returns how much longer a microbatch waits for sums over `tensor` than in jshard's program.

    Args:
        program: how it is written.
        costs: of the model, or of a stage.
        mesh: degrees of its axes.
        units: settings of the layers.
        rows: the sequences of a microbatch.
    """
    # Of parameters that are gathered in each microbatch, communication is hidden as well.
    if mesh.get(TENSOR, 1) == 1 or not gathers_once(costs.recipe):
        return 0.0
    more_s = 0.0
    if program.blocking_sums:
        cost = costs.of(Variant(name="a step", mesh=mesh, units=units))
        hidden_s = cost.communication_s - cost.exposed_s
        more_s += (hidden_s - cost.work.slowdown_s) / costs.recipe.accumulate
    if program.sums_each_product and not program.split_sequence:
        more_s += _more_sums_s(costs.recipe, mesh, rows, costs.machine.assumptions)
    return more_s


def _more_sums_s(recipe: Recipe, mesh: Mapping[str, int], rows: int, assumptions: Assumptions) -> float:
    """Returns the time of sums of cotangents beyond one for each value: one more in the gated MLP of each layer."""
    config = recipe.model
    if not hasattr(config, "n_kv_head"):  # as in gpt.py, whose MLP has no gate
        return 0.0
    sum_bytes = _ITEMSIZE * _tokens(recipe, mesh, rows) * config.d_model
    return config.n_layer * assumptions.transfer_s("all-reduce", sum_bytes, range(mesh[TENSOR]))


def tables_elsewhere(costs: Costs, plan: ShardPlan, *, tensor: int, is_stage: bool) -> dict[str, float]:
    """Returns which part of the tables of tokens and head a device does not have, by path; in jshard's program it does.

    No stage has both of them, and of those that it has, devices along `tensor` have a part each.

    Args:
        costs: of the model, or of a stage.
        plan: its plan.
        tensor: over how many devices tables are divided.
        is_stage: whether it is a stage of a pipeline.
    """
    outside = []
    for leaf in plan.leaves:
        if not any(leaf.path.startswith(name) for name in costs.traces.layer_names):
            outside.append(leaf)
    tables = sorted(outside, key=lambda leaf: whole_elements(leaf.placement))[-2:]
    elsewhere = {}
    if is_stage and len(tables) > 1:
        elsewhere[tables.pop(0).path] = 1.0
    for table in tables:
        elsewhere[table.path] = 1 - 1 / tensor
    return elsewhere


def split_head_s(recipe: Recipe, mesh: Mapping[str, int], *, rows: int, whole: bool, assumptions: Assumptions) -> float:
    """Returns how much longer the products of the head take if its words are divided over `tensor`: less than 0.

    Args:
        recipe: of the model.
        mesh: degrees of its axes.
        rows: the sequences of a microbatch.
        whole: whether each device along `tensor` then gathers all logits.
        assumptions: about the device and its links.
    """
    tensor = mesh.get(TENSOR, 1)
    if tensor == 1:
        return 0.0
    config = recipe.model
    tokens = _tokens(recipe, mesh, rows)
    more_s = 0.0
    for words, sign in ((config.vocab_size, -1), (config.vocab_size / tensor, 1)):
        # Of forward, and of the gradients of both operands.
        for sizes in (
            (1.0, tokens, words, config.d_model),
            (1.0, tokens, config.d_model, words),
            (1.0, config.d_model, words, tokens),
        ):
            product = EqualProducts("bf16", 2 * math.prod(sizes), sizes=sizes)
            more_s += sign * assumptions.compute_s(OpWork((product,)))
    if whole:
        logits_bytes = _ITEMSIZE * tokens * config.vocab_size
        more_s += assumptions.transfer_s("all-gather", logits_bytes, range(tensor))
    return more_s


def _split_traffic_s(program: PyTorchProgram, costs: Costs, mesh: Mapping[str, int], rows: int) -> float:
    """Returns how much longer the kernels beside the products take: at most 0."""
    config = costs.recipe.model
    splits_sequence = program.split_sequence and not getattr(config, "split_sequence", False)
    traced_mesh = {**mesh, TENSOR: 1} if splits_sequence else mesh
    of_logits = _bytes_of_logits(costs, traced_mesh, rows)
    published = []
    for kernel in _kernels(costs.traces, traced_mesh, rows):
        is_of_logits = kernel.work.memory_bytes in of_logits
        is_divided = not program.whole_logits if is_of_logits else splits_sequence
        published.append(_part(kernel, mesh[TENSOR]) if is_divided else kernel)
    assumptions = costs.machine.assumptions
    as_traced_s = kernel_times(_kernels(costs.traces, mesh, rows), assumptions).traffic_s
    return kernel_times(published, assumptions).traffic_s - as_traced_s


def _bytes_of_logits(costs: Costs, mesh: Mapping[str, int], rows: int) -> set[float]:
    """Returns what the kernels of the loss read and write that have the logits as an operand or as their result.

    They are as large as the logits at least, and no layer in a loop has one of them.
    """
    traces = costs.traces
    if isinstance(traces, StageTraces):  # a stage may have a single layer in its loop
        traces = traces.whole
    least_bytes = _ITEMSIZE * _tokens(costs.recipe, mesh, rows) * costs.recipe.model.vocab_size
    of_logits = set()
    of_layers = set()
    for kernel in _kernels(traces, mesh, rows):
        num_bytes = kernel.work.memory_bytes
        if kernel.rounds > 1:
            of_layers.add(num_bytes)
        elif num_bytes >= least_bytes:
            of_logits.add(num_bytes)
    return of_logits - of_layers


def _kernels(traces: ModelTraces, mesh: Mapping[str, int], rows: int) -> list[KernelWork]:
    """Returns the kernels of a microbatch that have no products, and do not only cast parameters or gradients."""
    axes = alike(tuple((axis, mesh[axis]) for axis in MODEL_AXES if mesh.get(axis, 1) > 1))
    of_rows = traces.step(rows, traces.remat, axes).kernels
    of_no_rows = traces.step(0, traces.remat, axes).kernels
    return [kernel for kernel in without_parameter_work(of_rows, of_no_rows) if not kernel.work.products]


def _part(kernel: KernelWork, degree: int) -> KernelWork:
    """Returns the part of a kernel on one of so many devices."""
    return dataclasses.replace(kernel, work=OpWork(memory_bytes=kernel.work.memory_bytes / degree))


def _tokens(recipe: Recipe, mesh: Mapping[str, int], rows: int) -> float:
    """Returns the tokens of a microbatch on one device."""
    return rows * recipe.sequence_length / mesh.get(CONTEXT, 1)
