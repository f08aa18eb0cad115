"""The round of a layer, played: what is hidden beside its computation, and what is waited for."""

import dataclasses

import pytest

from jshard.cluster.layer_rounds import Awaited, LayerRound, played, spread

CONTENTION = 0.25


def test_what_fits_beside_the_computation_slows_it_alone():
    result = played(LayerRound(compute_s=10.0, sent_s=(2.0, 3.0)), CONTENTION)
    assert result.exposed_s == 0
    assert result.slowdown_s == pytest.approx(5.0 * CONTENTION / (1 + CONTENTION))


def test_what_does_not_fit_is_waited_for():
    result = played(LayerRound(compute_s=4.0, sent_s=(2.0, 6.0)), CONTENTION)
    assert result.exposed_s == pytest.approx(8.0 - 4.0 * (1 + CONTENTION))
    assert result.slowdown_s == pytest.approx(4.0 * CONTENTION)


def test_large_gathers_begin_when_the_small_ones_have_ended():
    """So a wait for the small ones is a wait for no large one, and all of them take their sum."""
    short = played(LayerRound(compute_s=1.0, first_s=2.0, sent_s=(3.0,)), 0.0)
    assert short.exposed_s == pytest.approx(2.0 + 3.0 - 1.0)
    long = played(LayerRound(compute_s=9.0, first_s=2.0, sent_s=(3.0,)), 0.0)
    assert long.exposed_s == 0


def test_a_collective_of_the_layer_itself_queues_behind_others():
    """The computation after it cannot hide what has ended with it."""
    alone = LayerRound(compute_s=8.0, sent_s=(), awaited=spread((1.0, 1.0), 8.0))
    assert played(alone, 0.0).exposed_s == pytest.approx(2.0)
    beside = LayerRound(compute_s=8.0, sent_s=(8.0,), awaited=spread((1.0, 1.0), 8.0))
    # The gather begins with the layer; the first collective ends 1 after it, of which 4 are hidden.
    assert played(beside, 0.0).exposed_s == pytest.approx(8.0 + 1.0 - 4.0 + 1.0)
    assert beside.communication_s == 10.0


def test_gradients_are_computed_beside_a_sum_over_tensor():
    """The sum is of the gradient of a product's input; that of its weights needs none."""
    layer = LayerRound(compute_s=8.0, awaited=spread((1.0, 3.0), 8.0, 4.0))
    assert played(layer, 0.0).exposed_s == pytest.approx(3.0 - 2.0)


def test_a_collective_that_is_over_before_the_gathers_start_is_not_behind_them():
    early = LayerRound(compute_s=8.0, sent_s=(4.0,), expected_s=(6.0,), awaited=(Awaited(1.0, 1.0, 1.0),))
    late = dataclasses.replace(early, awaited=(Awaited(1.0, 5.0, 5.0),))
    assert played(early, 0.0).exposed_s == pytest.approx(1.0)
    # The gather starts at 3, because the compiler expects to wait for the collective, too, and is half done at 5.
    assert played(late, 0.0).exposed_s == pytest.approx(2.0 + 1.0)


def test_collectives_that_start_together_may_all_start_too_late():
    """Each alone would end with the layer. One after another on the links, they end after it."""
    layer = LayerRound(compute_s=8.0, sent_s=(3.0, 3.0), expected_s=(3.0, 3.0))
    assert played(layer, 0.0).exposed_s == pytest.approx(3.0)
    assert played(dataclasses.replace(layer, expected_s=()), 0.0).exposed_s == 0


def test_a_collective_starts_as_early_as_the_compiler_expects():
    """It takes a link for slow, and computation for quick; and starts nothing in the middle of a kernel."""
    layer = LayerRound(compute_s=8.0, sent_s=(2.0, 2.0), expected_s=(2.0, 2.0))
    assert played(layer, 0.0).exposed_s == pytest.approx(2.0)
    assert played(dataclasses.replace(layer, expected_s=(3.0, 3.0)), 0.0).exposed_s == pytest.approx(1.0)
    assert played(dataclasses.replace(layer, expected_pace=0.5), 0.0).exposed_s == 0
    assert played(dataclasses.replace(layer, kernel_s=0.5), 0.0).exposed_s == pytest.approx(1.5)
