"""Traces of some degrees stand in for those of others: what follows from them is what a trace of its own says."""

import pytest

from jshard.cluster.model_traces import ModelTraces, StandIn
from jshard.cluster.topology import parse_topology, traced_for_device
from jshard.recipes.overrides import override
from jshard.train import load_model_file
from tests.micro_gpt import MODELS

LLAMA = load_model_file(MODELS / "llama.py")
SETTINGS = (
    "model.n_head=16",
    "model.n_kv_head=4",
    "model.head_dim=16",
    "model.compute_dtype=bfloat16",
    "model.vocab_size=320",
    "model.n_layer=2",
    "model.scan=true",
)
ROWS = 24


class DirectTraces(ModelTraces):
    """Each degree has a trace of its own."""

    def stand_in(self, remat, axes):
        return StandIn(axes)


def traces_of(kind, *settings):
    return kind(LLAMA, override(LLAMA.recipe("tiny")[1], (*SETTINGS, *settings)))


@pytest.fixture(autouse=True)
def _for_a_gpu():
    with traced_for_device(parse_topology("h100:1x8").device):
        yield


@pytest.fixture(scope="module")
def shared():
    return traces_of(ModelTraces)


@pytest.fixture(scope="module")
def direct():
    return traces_of(DirectTraces)


@pytest.mark.parametrize(
    ("axes", "traced"),
    [
        ((("context", 4),), (("context", 2), ("tensor", 2))),
        ((("context", 8),), (("context", 4), ("tensor", 2))),  # heads of keys are there twice
        ((("context", 2), ("tensor", 4)), (("context", 4), ("tensor", 2))),
    ],
    ids=["context", "repeated keys", "tensor, too"],
)
def test_fewer_parts_of_a_sequence_stand_in_for_more(axes, traced, shared, direct):
    assert shared.stand_in("full", axes).axes == traced
    step, own_step = shared.step(ROWS, "full", axes), direct.step(ROWS, "full", axes)
    assert flops_of(step) == pytest.approx(flops_of(own_step), rel=1e-3)
    assert memory_bytes_of(step) == pytest.approx(memory_bytes_of(own_step), rel=0.05)
    assert step.live.in_layers == pytest.approx(own_step.live.in_layers, rel=0.05)
    assert step.live.outside == pytest.approx(own_step.live.outside, rel=0.05)
    saved, own_saved = shared.saved(ROWS, "full", axes), direct.saved(ROWS, "full", axes)
    assert saved.saved_bytes == pytest.approx(own_saved.saved_bytes, rel=0.01)
    assert sent_by(shared, axes) == pytest.approx(sent_by(direct, axes), rel=1e-3)


def flops_of(step):
    return sum(kernel.rounds * kernel.work.total_flops for kernel in step.kernels)


def memory_bytes_of(step):
    return sum(kernel.rounds * kernel.work.memory_bytes for kernel in step.kernels)


def sent_by(traces, axes):
    """Numbers of collectives and their bytes, by kind and axes."""
    sent = {}
    for traffic in traces.traffic(ROWS, "full", axes):
        sent[traffic.kind, traffic.axes, "count"] = traffic.count
        sent[traffic.kind, traffic.axes, "bytes"] = traffic.total_bytes
    assert sent
    return sent


def test_of_a_ring_each_degree_is_traced():
    traces = traces_of(ModelTraces, "model.over_context=ring")
    assert traces.stand_in("none", (("context", 4),)) == StandIn((("context", 4),))
