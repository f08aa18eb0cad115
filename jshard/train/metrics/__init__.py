"""What is measured, shown and recorded of a run."""

from jshard.recipes.mfu import Mfu, Peak, dense_flops, device_peak, peak_bytes
from jshard.train.metrics.jsonl import Jsonl, iterate_metrics, keep_on_disk, plot_loss, read_metrics
from jshard.train.metrics.progress import Meter, Progress
from jshard.train.metrics.trackers import (
    TensorBoard,
    Tracker,
    Trackers,
    WeightsAndBiases,
    available,
    check_names,
    open_trackers,
)

__all__ = [
    "Jsonl",
    "Meter",
    "Mfu",
    "Peak",
    "Progress",
    "TensorBoard",
    "Tracker",
    "Trackers",
    "WeightsAndBiases",
    "available",
    "check_names",
    "dense_flops",
    "device_peak",
    "iterate_metrics",
    "keep_on_disk",
    "open_trackers",
    "peak_bytes",
    "plot_loss",
    "read_metrics",
]
