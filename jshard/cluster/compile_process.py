"""The compiling process: `python -m` of this module with REQUEST FOLDER, started by `jshard.cluster.compile`."""

from __future__ import annotations

import contextlib
import dataclasses
import re
import resource
import sys
import time
import warnings
from collections.abc import Sequence
from pathlib import Path

import jax
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import jshard as js
from jshard._types import Json
from jshard.api.optimizer import abstract_optimizer
from jshard.cluster.child_process import CompileError, answer
from jshard.cluster.compile import CompiledStep, CompileRequest, TooLargeError
from jshard.cluster.options import Options, compile_nothing, options_for
from jshard.cluster.rocm_stubs import check_rocm
from jshard.cluster.topology import Topology, parse_topology, topology_devices, traced_for_device
from jshard.engine.chosen_remat import chosen_for, with_chosen_remats
from jshard.engine.context import plain_flax
from jshard.errors import FourPartError
from jshard.inspect.audit import CompiledMemory
from jshard.inspect.plan_tables import chosen_remats
from jshard.plans.mesh import num_hosts
from jshard.recipes.building import abstract_model, batch_of, optimizer_of
from jshard.recipes.ema import ema_of
from jshard.recipes.model_file import ModelFile, load_model_file, refuses_batches
from jshard.recipes.overrides import override
from jshard.recipes.recipe import Recipe, versions
from jshard.recipes.step import lower_step

# The TPU compiler's messages for a program that does not fit: needed and available GiB.
_TOO_LARGE = (
    r"Used ([\d.]+)G of ([\d.]+)G hbm",
    r"\(([\d.]+)G\) exceeds available HBM \(([\d.]+)G\)",
)
_SHOWN_LINES = 6  # of a compiler's message


def main(argv: Sequence[str]) -> int:
    """Compiles, and writes the result or the error."""
    return answer(argv, _result)


def _result(request: dict[str, Json], folder: Path) -> CompiledStep:
    """Returns the compiled step. Warnings are among its notes, because the output of the child is not shown."""
    with warnings.catch_warnings(record=True) as caught:
        # Python shows a warning of one line only once: all are notes here.
        warnings.simplefilter("always", UserWarning)
        step = _compiled_step(CompileRequest(**request))
    messages = [str(warning.message) for warning in caught if issubclass(warning.category, UserWarning)]
    notes = dict.fromkeys((*messages, *step.notes))  # each once
    return dataclasses.replace(step, notes=tuple(notes))


def _compiled_step(request: CompileRequest) -> CompiledStep:
    model_file = load_model_file(request.model).with_units(request.units)
    _, recipe = model_file.recipe(request.recipe)
    recipe = override(recipe, request.settings)
    topology = parse_topology(request.topology)
    mesh = js.mesh(**request.mesh, devices=topology_devices(topology))
    assert isinstance(mesh, Mesh)  # it was created with devices

    # Before the clock: the model file and the description of the devices are no part of tracing.
    start_s = time.perf_counter()
    model, lowered, notes = _traced(request, model_file, recipe, mesh, topology)
    if topology.device.compiler == "rocm":
        check_rocm(lowered, where=f"{request.model} for {topology.text}")
    traced_s = time.perf_counter()
    options = options_for(
        request.profile,
        platform=topology.device.name,
        overrides={},
        in_one_host=num_hosts(mesh) == 1,
        # On the mesh, so that the compiler of the cluster answers, and not that of this process's CPU.
        try_compile=compile_nothing(NamedSharding(mesh, PartitionSpec())),
    )
    compiled = _compiled(lowered, options, topology)
    compiled_s = time.perf_counter()

    plan = with_chosen_remats(js.plan(model, wrt=model_file.trained(recipe)))
    flops, formula = model_file.step_flops(recipe, plan)
    own_usage = resource.getrusage(resource.RUSAGE_SELF)
    children_usage = resource.getrusage(resource.RUSAGE_CHILDREN)  # ptxas
    return CompiledStep(
        text=compiled.as_text() or "",
        memory=_memory(compiled, topology),
        plan=plan,
        options=options,
        batch_size=recipe.batch_size,
        sequence_length=recipe.sequence_length,
        accumulate=recipe.accumulate,
        sync=recipe.sync,
        flops=flops,
        flops_formula=formula,
        trace_s=traced_s - start_s,
        compile_s=compiled_s - traced_s,
        cpu_s=_cpu_s(own_usage) + _cpu_s(children_usage),
        rss_bytes=own_usage.ru_maxrss * 1024,  # Linux counts KiB
        versions=versions(),
        notes=(*notes, *chosen_remats(plan)),
    )


def _cpu_s(usage: resource.struct_rusage) -> float:
    return usage.ru_utime + usage.ru_stime


def _traced(
    request: CompileRequest, model_file: ModelFile, recipe: Recipe, mesh: Mesh, topology: Topology
) -> tuple[nnx.Module, jax.stages.Lowered, tuple[str, ...]]:
    """Returns the model, its lowered step, and the assumptions of tracing for an absent device."""
    with contextlib.ExitStack() as stack:
        assumptions = stack.enter_context(traced_for_device(topology.device))
        stack.enter_context(chosen_for(topology.device))
        if request.plain_flax:
            stack.enter_context(plain_flax())
        try:
            model, lowered = lowered_step(model_file, recipe, mesh, shard_replicated=request.shard_replicated)
        except FourPartError:  # many are a ValueError, too, but say better what is wrong
            raise
        except ValueError as error:
            raise refuses_batches(model_file.path, error) from error
        return model, lowered, assumptions()


def lowered_step(
    model_file: ModelFile, recipe: Recipe, mesh: Mesh, *, shard_replicated: bool = False
) -> tuple[nnx.Module, jax.stages.Lowered]:
    """Returns the lowered step of a recipe on a mesh, and its model, both without arrays."""
    model = abstract_model(model_file, recipe, mesh)
    optimizer = abstract_optimizer(
        model, optimizer_of(recipe, model), wrt=model_file.trained(recipe), shard_replicated=shard_replicated
    )
    batch = batch_of(model_file, recipe, recipe.batch_size, mesh)
    ema = ema_of(recipe, model, model_file.trained(recipe))
    lowered = lower_step(
        model_file.loss_fn, model, optimizer, batch, accumulate=recipe.accumulate, sync=recipe.sync, ema=ema
    )
    return model, lowered


def _compiled(lowered: jax.stages.Lowered, options: Options, topology: Topology) -> jax.stages.Compiled:
    try:
        return lowered.compile(compiler_options=options)
    except jax.errors.JaxRuntimeError as error:
        raise compiler_error(error, topology) from error


def compiler_error(error: Exception, topology: Topology) -> FourPartError:
    """Returns a compiler's error in four parts."""
    lines = str(error).splitlines()
    for pattern in _TOO_LARGE:
        match = re.search(pattern, str(error))
        if match is not None:
            needed_gib = float(match[1])
            available_gib = float(match[2])
            return TooLargeError(
                f"does not fit: {needed_gib:.1f} GiB of {available_gib:.1f} in each {topology.device.title}.",
                where=topology.text,
                why=f"the compiler's own figure: {lines[0]}",
                do="use a --topology with more devices, --set accumulate=2, or a smaller --set batch_size=N.",
            )
    return CompileError(
        "The compiler failed.",
        where=topology.text,
        why="\n".join(lines[:_SHOWN_LINES]),
        do="--options none  # compiles without jshard's options",
    )


def _memory(compiled: jax.stages.Compiled, topology: Topology) -> CompiledMemory:
    memory = CompiledMemory.of(compiled)
    if memory is None:
        raise CompileError(
            "The compiler does not report the program's memory.",
            where=topology.text,
            why="memory_analysis() of the compiled step is empty.",
            do="report this with your versions of jax and jaxlib.",
        )
    return memory


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
