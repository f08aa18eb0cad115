"""A stage of a pipeline: what its own traces say follows from those of the whole model."""

import pytest

from benchmarks.stage_traces import StageTraces
from jshard.cluster.machine import assumptions_of
from jshard.cluster.model_costs import kernel_times
from jshard.cluster.model_traces import ModelTraces
from jshard.cluster.topology import parse_topology
from jshard.recipes.overrides import override
from tests.cluster.fake_compiler import GPT
from tests.micro_gpt import micro


@pytest.mark.parametrize("axes", [(), (("tensor", 2),)], ids=["whole", "tensor"])
@pytest.mark.parametrize("remat", ["none", "full"])
def test_a_model_of_fewer_layers_is_the_same_program_in_fewer_rounds(remat, axes):
    whole = ModelTraces(GPT, override(micro(), ("model.scan=true", "model.n_layer=11")))
    few = ModelTraces(GPT, override(micro(), ("model.scan=true", "model.n_layer=5")))
    derived = StageTraces(whole, few.recipe)
    step, traced = derived.step(24, remat, axes), few.step(24, remat, axes)
    assert [kernel.rounds for kernel in step.kernels] == [kernel.rounds for kernel in traced.kernels]
    for kernel, own in zip(step.kernels, traced.kernels, strict=True):
        # But for casts of a whole stack of parameters.
        assert kernel.work == own.work or not (own.work.products or own.rounds > 1)
    assert step.live.in_layers == pytest.approx(traced.live.in_layers, rel=0.06)
    assert step.live.outside == pytest.approx(traced.live.outside, rel=0.06)
    saved, own_saved = derived.saved(24, remat, axes), few.saved(24, remat, axes)
    assert saved.saved_bytes == pytest.approx(own_saved.saved_bytes, rel=1e-3)
    sent, own_sent = list(derived.traffic(24, remat, axes)), list(few.traffic(24, remat, axes))
    assert [(traffic.kind, traffic.count) for traffic in sent] == [
        (traffic.kind, traffic.count) for traffic in own_sent
    ]


def test_a_loop_without_rounds_takes_no_time():
    """Of a stage with a single layer nothing is left for the loop of the whole model."""
    whole = ModelTraces(GPT, override(micro(), ("model.scan=true", "model.n_layer=11")))
    kernels = StageTraces(whole, override(micro(), ("model.scan=true", "model.n_layer=1"))).step(24, "full", ()).kernels
    h100 = assumptions_of(parse_topology("h100:1x8"))
    times = kernel_times(kernels, h100)
    assert times.total_s == pytest.approx(kernel_times([kernel for kernel in kernels if kernel.rounds], h100).total_s)
    assert any(kernel.rounds == 0 for kernel in kernels)
