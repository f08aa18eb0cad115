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
from typing import Any

import jax
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import jshard as js
from jshard.api.optimizer import abstract_optimizer
from jshard.cluster.compile import CompiledStep, CompileError, CompileRequest, TooLargeError, answer
from jshard.cluster.options import Options, compile_nothing, options_for
from jshard.cluster.topology import Topology, parse_topology, topology_devices, traced_for_device
from jshard.engine.context import plain_flax
from jshard.errors import FourPartError
from jshard.inspect.audit import CompiledMemory
from jshard.recipes.building import abstract_model, batch_of, optimizer_of
from jshard.recipes.model_file import ModelFile, load_model_file, refuses_batches
from jshard.recipes.overrides import override
from jshard.recipes.recipe import Recipe, versions
from jshard.recipes.step import lower_step

# The TPU compiler's messages for a program that does not fit: needed and available GiB.
_TOO_LARGE = (r"Used ([\d.]+)G of ([\d.]+)G hbm", r"\(([\d.]+)G\) exceeds available HBM \(([\d.]+)G\)")


def main(argv: Sequence[str]) -> int:
    """Compiles, and writes the result or the error."""
    return answer(argv, _result)


def _result(asked: dict[str, Any], folder: Path) -> CompiledStep:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        step = _compiled_step(CompileRequest(**asked))
    said = (str(one.message) for one in caught if issubclass(one.category, UserWarning))
    return dataclasses.replace(step, notes=tuple(dict.fromkeys((*said, *step.notes))))


def _compiled_step(request: CompileRequest) -> CompiledStep:
    model_file = load_model_file(request.model).with_units(request.units)
    recipe = override(model_file.recipe(request.recipe)[1], request.settings)
    topology = parse_topology(request.topology)
    mesh = js.mesh(**request.mesh, devices=topology_devices(topology))
    assert isinstance(mesh, Mesh)  # it was created with devices
    start_s = time.perf_counter()
    try:
        with contextlib.ExitStack() as stack:
            assumed = stack.enter_context(traced_for_device(topology.device))
            stack.enter_context(plain_flax() if request.plain_flax else contextlib.nullcontext())
            model, lowered = lowered_step(model_file, recipe, mesh, shard_replicated=request.shard_replicated)
            notes = assumed()
    except FourPartError:
        raise
    except ValueError as error:
        raise refuses_batches(model_file.path, error) from error
    lowered_s = time.perf_counter()
    options = options_for(
        request.profile,
        platform=topology.device.name,
        overrides={},
        try_compile=compile_nothing(NamedSharding(mesh, PartitionSpec())),
    )
    compiled = _compiled(lowered, options, topology)
    done_s = time.perf_counter()
    plan = js.plan(model, wrt=model_file.wrt)
    flops, formula = model_file.step_flops(recipe, plan)
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]  # children: ptxas
    return CompiledStep(
        text=compiled.as_text() or "",
        memory=_memory(compiled, topology),
        plan=plan,
        options=options,
        batch_size=recipe.batch_size,
        sequence_length=recipe.sequence_length,
        accumulate=recipe.accumulate,
        flops=flops,
        flops_formula=formula,
        trace_s=lowered_s - start_s,
        compile_s=done_s - lowered_s,
        cpu_s=sum(one.ru_utime + one.ru_stime for one in used),
        rss_bytes=used[0].ru_maxrss * 1024,
        versions=versions(),
        notes=notes,
    )


def lowered_step(
    model_file: ModelFile, recipe: Recipe, mesh: Mesh, *, shard_replicated: bool = False
) -> tuple[nnx.Module, jax.stages.Lowered]:
    """The lowered step of a recipe on a mesh, and its model, both without arrays."""
    model = abstract_model(model_file, recipe, mesh)
    optimizer = abstract_optimizer(
        model, optimizer_of(recipe, model), wrt=model_file.wrt, shard_replicated=shard_replicated
    )
    batch = batch_of(model_file, recipe, recipe.batch_size, mesh)
    return model, lower_step(model_file.loss_fn, model, optimizer, batch, accumulate=recipe.accumulate)


def _compiled(lowered: jax.stages.Lowered, options: Options, topology: Topology) -> jax.stages.Compiled:
    try:
        return lowered.compile(compiler_options=options)
    except jax.errors.JaxRuntimeError as error:
        raise compiler_error(error, topology) from error


def compiler_error(error: Exception, topology: Topology) -> FourPartError:
    """A compiler's error in four parts."""
    said = str(error)
    used = next(filter(None, (re.search(form, said) for form in _TOO_LARGE)), None)
    if used is None:
        return CompileError(
            "The compiler failed.",
            where=topology.text,
            why="\n".join(said.splitlines()[:6]),
            do="--options none  # compiles without jshard's options",
        )
    return TooLargeError(
        f"does not fit: {float(used[1]):.1f} GiB of {float(used[2]):.1f} in each {topology.device.title}.",
        where=topology.text,
        why=f"the compiler's own figure: {said.splitlines()[0]}",
        do="use a --topology with more devices, --set accumulate=2, or a smaller --set batch_size=N.",
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
