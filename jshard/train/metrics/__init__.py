"""What is measured, shown and recorded of a run."""

from jshard.train.metrics.jsonl import Jsonl, iterate_metrics, keep_on_disk, read_metrics
from jshard.train.metrics.meter import Meter
from jshard.train.metrics.mfu import Mfu, Peak, dense_flops, device_peak, peak_bytes
from jshard.train.metrics.plot import plot_loss
from jshard.train.metrics.progress import Progress
from jshard.train.metrics.services import TensorBoard, WeightsAndBiases, available, check_names, open_trackers
from jshard.train.metrics.trackers import Tracker, Trackers

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
