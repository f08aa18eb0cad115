"""The trainer behind `jshard train`, in parts that you can use in your own loop.

    Recipe, ModelFile, load_model_file, Batch              what to train
    run_recipe, RunOptions                                 the whole run, with its record in a folder
    TrainStep, EvalStep                                    one compiled program each
    fit, to_devices, evaluate, StopSignal                  the loop
    EvaluationHook, CheckpointHook, PeriodicHook           what it does between steps
    Tracker, Trackers, register_tracker, Progress, Meter   output and records

Data are in `jshard.data`, float16 in `jshard.api.gradients`, and the rest in the modules of this package and of
`jshard.recipes`.

Example:
    >>> import jshard as js
    >>> step = js.train.TrainStep(loss_fn, model, optimizer, batch)
    >>> js.train.fit(step, loader.train(1000), num_steps=1000, tracker=js.train.Progress(1000))
"""

from jshard._lazy import attach as _attach

_MOVED = {
    "jshard.data": "ByteTokenizer Data DataError HuggingFaceTokenizer Loader Source Tokenizer load_text local_rows",
    "jshard.api.gradients": "LossScale LossScaleState loss_scale_of scaled_value_and_grad",
    "jshard.recipes.model_file": "ModelFileError dense_flops next_token_loss",
    "jshard.recipes.step": "Mfu Peak device_peak",
    "jshard.recipes.building": "create restore",
    "jshard.train.records": "Jsonl plot_loss read_metrics",
    "jshard.train.trackers": "TensorBoard WeightsAndBiases",
    "jshard.train.loop": "Fitted",
    "jshard.train.progress": "StepProfile",
    "jshard.train.training_run": "Finished",
    "jshard.train.sampling": "sample_text",
}

__getattr__, __dir__, __all__ = _attach(__name__, __file__, moved=_MOVED)
