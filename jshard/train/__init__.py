"""The trainer behind `jshard train`, in pieces that a loop of one's own can use.

    Recipe, ModelFile, load_model_file, Batch     what to train
    run_recipe                                    the whole run, with its record in a folder
    TrainStep, EvalStep                           one compiled program each
    fit, to_devices, evaluate, Every, StopSignal  the loop
    Tracker, Trackers, Progress, Meter            what is shown and recorded

Data are in `js.data`, float16 in `jshard.recipes.loss_scale`, and what remains in the modules of this package and of
`jshard.recipes`.

Example:
    >>> import jshard as js
    >>> step = js.train.TrainStep(loss_fn, model, optimizer, batch)
    >>> js.train.fit(step, loader.train(1000), num_steps=1000, tracker=js.train.Progress(1000))
"""

import warnings as _warnings
from importlib import import_module as _import_module

from jshard._lazy import attach as _attach

_load, __dir__, __all__ = _attach(__name__, __file__)

_MOVED = {
    "data": "ByteTokenizer Data DataError HuggingFaceTokenizer Loader Source Tokenizer load_text local_rows",
    "recipes.loss_scale": "LossScale LossScaleState loss_scale_of scaled_value_and_grad",
    "recipes.mfu": "Mfu Peak dense_flops device_peak",
    "recipes.model_file": "ModelFileError next_token_loss",
    "recipes.state": "create restore",
    "train.jsonl": "Jsonl plot_loss read_metrics",
    "train.loop": "Fitted sample_text",
    "train.profile": "StepProfile",
    "train.run": "Finished",
    "train.trackers": "TensorBoard WeightsAndBiases",
}


def __getattr__(name: str) -> object:
    """A public name, loaded when it is first asked for; for one release also one that is now in its module alone."""
    for module, names in _MOVED.items():
        if name in names.split():
            _warnings.warn(
                f"js.train.{name} has moved, and goes with the next release. The new line:\n"
                f"  from jshard.{module} import {name}",
                FutureWarning,
                stacklevel=2,
            )
            return getattr(_import_module(f"jshard.{module}"), name)
    return _load(name)
