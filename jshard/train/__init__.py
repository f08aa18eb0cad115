"""The trainer behind `jshard train`, in pieces that a loop of one's own can use.

`run_recipe` is the whole run. It is made of the pieces below, and keeps its record in a folder:

    Recipe, load_model_file                    what to train
    load_text, Data, Loader                    samples in an order of their own, batches ahead of time
    create, restore                            model and optimizer, born sharded, or from a checkpoint
    TrainStep, EvalStep                        one compiled program each
    LossScale, scaled_value_and_grad           gradients in float16
    fit, evaluate, Every, StopSignal, Meter    the loop
    StepProfile                                a profile of some of its steps, for js.trace
    Jsonl, Progress, Trackers                  what is shown and recorded
    sample_text, plot_loss                     the end

Example:
    >>> import jshard as js
    >>> step = js.train.TrainStep(loss_fn, model, optimizer, batch)
    >>> js.train.fit(step, loader.train(1000), num_steps=1000, tracker=js.train.Progress(1000))
"""

from jshard.train.data import (
    ByteTokenizer,
    Data,
    DataError,
    HuggingFaceTokenizer,
    Loader,
    Source,
    Tokenizer,
    load_text,
    local_rows,
)
from jshard.train.loop import Every, Fitted, evaluate, fit, to_devices
from jshard.train.loss_scale import LossScale, LossScaleState, loss_scale_of, scaled_value_and_grad
from jshard.train.metrics import (
    Jsonl,
    Meter,
    Mfu,
    Peak,
    Progress,
    TensorBoard,
    Tracker,
    Trackers,
    WeightsAndBiases,
    dense_flops,
    device_peak,
    plot_loss,
    read_metrics,
)
from jshard.train.model_file import Batch, ModelFile, ModelFileError, load_model_file, next_token_loss
from jshard.train.profile import StepProfile
from jshard.train.run import Finished, run_recipe
from jshard.train.sample import sample_text
from jshard.train.settings.recipe import Recipe
from jshard.train.state import create, restore
from jshard.train.step import EvalStep, TrainStep
from jshard.train.stop import StopSignal

__all__ = [
    "Batch",
    "ByteTokenizer",
    "Data",
    "DataError",
    "EvalStep",
    "Every",
    "Finished",
    "Fitted",
    "HuggingFaceTokenizer",
    "Jsonl",
    "Loader",
    "LossScale",
    "LossScaleState",
    "Meter",
    "Mfu",
    "ModelFile",
    "ModelFileError",
    "Peak",
    "Progress",
    "Recipe",
    "Source",
    "StepProfile",
    "StopSignal",
    "TensorBoard",
    "Tokenizer",
    "Tracker",
    "Trackers",
    "TrainStep",
    "WeightsAndBiases",
    "create",
    "dense_flops",
    "device_peak",
    "evaluate",
    "fit",
    "load_model_file",
    "load_text",
    "local_rows",
    "loss_scale_of",
    "next_token_loss",
    "plot_loss",
    "read_metrics",
    "restore",
    "run_recipe",
    "sample_text",
    "scaled_value_and_grad",
    "to_devices",
]
