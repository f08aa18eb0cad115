"""What is tried when a step does not fit: ways that hold less, the quickest first, until one compiles and fits."""

import functools

import pytest

from jshard.cluster.comparison import VariantCompiler
from jshard.cluster.compile import Variant
from jshard.cluster.suggest import suggestions
from jshard.errors import RunError
from tests.cluster.fake_compiler import Compiler, cluster_of, costs_of, mesh_of, request_of, step_of

HOST = cluster_of("h100:1x8")
CAPACITY = HOST.topology.device.hbm_bytes
LARGE = (f"batch_size={2**22}", "model.remat=none")  # twice what fits


@functools.cache
def costs(*settings, **units):
    return costs_of(HOST, *settings, **units)


def suggested(monkeypatch, compiled, *settings, mesh=None, wrong=1.0, **units):
    """What was tried, and the estimates of it.

    Args:
        compiled: the peak of a request, by the capacity.
        wrong: by how much the compiled peak is more than the estimate.
    """
    found, mesh = costs(*(settings or LARGE), **units), mesh or mesh_of(HOST)
    compiler = Compiler(monkeypatch, lambda asked: step_of(asked, peak_bytes=int(CAPACITY * compiled(asked))))
    now = found.of(Variant(name="", mesh=mesh)).memory.step_bytes
    assert now > CAPACITY
    tried = suggestions(
        found,
        request_of(HOST, settings=settings or LARGE, units=units, mesh=mesh),
        mesh,
        bench=VariantCompiler(cluster=HOST),
        peak_bytes=int(wrong * now),
    )
    assert [one.settings for one in compiler.asked] == [
        row.variant.of(request_of(HOST, settings=settings or LARGE)).settings for row in tried
    ]
    return tried, [found.of(row.variant) for row in tried]


def test_the_first_that_fits_is_the_last_that_is_tried(monkeypatch):
    tried, (cost,) = suggested(monkeypatch, lambda asked: 0.9)
    assert tried[0].fits and cost.memory.step_bytes <= 0.95 * CAPACITY
    assert all("batch_size" not in text for text in tried[0].variant.settings)  # the batch of a step stays


def test_it_is_the_quickest_that_fits_by_the_estimate(monkeypatch):
    _, (cost,) = suggested(monkeypatch, lambda asked: 0.9)
    others = [{"remat": remat} for remat in ("dots", "full")]
    ways = [
        Variant(name="", mesh=mesh_of(HOST), accumulate=n, units=units) for n in (None, 2, 4) for units in ({}, *others)
    ]
    fitting = [c for c in map(costs(*LARGE).of, ways) if c.memory.step_bytes <= 0.95 * CAPACITY]
    assert cost.step_s <= min(c.step_s for c in fitting) and len(fitting) > 2


def test_at_most_four_are_compiled_and_each_holds_less_than_the_one_before(monkeypatch):
    tried, found = suggested(monkeypatch, lambda asked: 1.1)
    sizes = [cost.memory.step_bytes for cost in found]
    assert len(tried) == 4 and not any(row.fits for row in tried)
    assert sizes == sorted(set(sizes), reverse=True)


def test_what_cannot_be_compiled_does_not_fit(monkeypatch):
    def compiled(asked):
        if "remat" not in asked.units:
            raise RunError("No.", where="w", why="y", do="d")
        return 0.5

    tried, _ = suggested(monkeypatch, compiled)
    assert tried[-1].fits == ("remat" in tried[-1].variant.units)
    assert all(row.error is not None for row in tried[:-1])


def test_estimates_are_corrected_by_the_compiled_peak(monkeypatch):
    _, (plain,) = suggested(monkeypatch, lambda asked: 0.9)
    _, (cost,) = suggested(monkeypatch, lambda asked: 0.9, wrong=2.5)
    assert cost.memory.step_bytes <= 0.95 * CAPACITY / 2.5 < plain.memory.step_bytes


def test_what_was_asked_for_gives_way_to_what_is_suggested(monkeypatch):
    """Its microbatches are split further; the command names each setting once."""
    settings = f"batch_size={2**24}", "accumulate=2"
    tried, _ = suggested(monkeypatch, lambda asked: 0.9, *settings, remat="full", prefetch=2)
    parts = tried[0].variant.accumulate
    assert parts is not None and parts > 2
    assert f"--set batch_size={2**24} --set accumulate={parts} " in tried[0].command
    assert "--unit remat=full --unit prefetch=2" in tried[0].command
    assert tried[0].command.startswith("jshard plan my_model.py --topology h100:1x8 --mesh replica=1,fsdp=8,tensor=1 ")


@pytest.mark.wide
def test_parameters_may_be_freed_and_spread_wider(monkeypatch):
    """A model whose state fills a device: nothing but more shards can help."""
    mesh = mesh_of(HOST, replica=8)
    settings = "model.d_model=16384", "model.d_ff=65536", "batch_size=8", "model.n_layer=4"
    _, (cost,) = suggested(monkeypatch, lambda asked: 0.9, *settings, mesh=mesh, reshard_after_forward=False)
    assert cost.variant.mesh == {"replica": 1, "fsdp": 8, "tensor": 1}
    assert costs(*settings, reshard_after_forward=False).of(Variant(name="", mesh=mesh)).memory.held_bytes > CAPACITY
