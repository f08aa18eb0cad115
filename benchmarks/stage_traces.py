"""Traces of one stage of a pipeline, from those of the model whose layers it has a share of."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping

from jshard.cluster.model_traces import Degrees, ModelTraces, StandIn
from jshard.inspect.activations import Activations
from jshard.inspect.live_values import LiveBytes
from jshard.inspect.partitioned import ModelCollective
from jshard.inspect.traced_step import TracedStep
from jshard.recipes.recipe import Recipe

# A loop may have so many rounds fewer than the model has layers: its first and last layer have programs of their own.
_PEELED_LAYERS = 2


class StageTraces(ModelTraces):
    """Traces of a model that has fewer layers in its loop over them, from those of the whole model.

    Both have the same program, but for the rounds of the loop. So nothing else is traced. What is done once for the
    stack of all layers, as a cast of their parameters, stays as it is.

    Args:
        whole: traces of a recipe whose model has all its layers in one loop.
        recipe: the same with fewer layers.
    """

    def __init__(self, whole: ModelTraces, recipe: Recipe) -> None:
        super().__init__(whole.model_file, recipe)
        self.whole = whole

    def stand_in(self, remat: str, axes: Degrees) -> StandIn:
        """Returns the degrees that are traced in the place of some."""
        return self.whole.stand_in(remat, axes)

    def saved(self, rows: int, remat: str, axes: Degrees) -> Activations:
        """Returns the bytes that a device saves."""
        saved = self.whole.saved(rows, remat, axes)
        return dataclasses.replace(
            saved,
            saved_bytes=saved.saved_bytes - self._of_missing_layers(saved.saved_bytes - saved.outside_bytes),
            offloaded_bytes=saved.offloaded_bytes - self._of_missing_layers(saved.offloaded_bytes),
        )

    def step(self, rows: int, remat: str, axes: Degrees) -> TracedStep:
        """Returns forward and backward of a microbatch on a device."""
        step = self.whole.step(rows, remat, axes)
        saved = self.whole.saved(rows, remat, axes)
        less_bytes = self._of_missing_layers(saved.saved_bytes - saved.outside_bytes)
        live = LiveBytes(
            in_layers=max(0.0, step.live.in_layers - less_bytes),
            outside=max(0.0, step.live.outside - less_bytes),
        )
        kernels = [dataclasses.replace(kernel, rounds=self._rounds(kernel.rounds)) for kernel in step.kernels]
        collectives = [dataclasses.replace(sent, rounds=self._rounds(sent.rounds)) for sent in step.collectives]
        return TracedStep(live, tuple(kernels), tuple(collectives))

    def collectives(self, rows: int, remat: str, axes: Degrees) -> Mapping[ModelCollective, int]:
        """Returns the collectives of the model over its own axes, with their numbers, for a batch that is traced."""
        counts = self.whole.collectives(rows, remat, axes)
        return {collective: self._rounds(count) for collective, count in counts.items()}

    @functools.cached_property
    def low_and_high_rows(self) -> tuple[int, int]:
        """Returns the traced numbers of sequences per device."""
        return self.whole.low_and_high_rows

    def _of_missing_layers(self, layers_bytes: int) -> int:
        """Returns the part of what all layers save that is of those which this model lacks."""
        return layers_bytes * (self.whole.num_layers - self.num_layers) // self.whole.num_layers

    def _rounds(self, of_whole: int) -> int:
        """Returns how often something is done that the whole model does so often."""
        num_layers = self.whole.num_layers
        for_each_layer = (of_whole + _PEELED_LAYERS) // num_layers
        return max(0, of_whole - for_each_layer * (num_layers - self.num_layers))
