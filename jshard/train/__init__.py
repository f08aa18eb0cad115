"""The trainer behind `jshard train`, in parts that you can use in your own loop.

    Recipe, ModelFile, load_model_file, Batch              what to train
    run_recipe, RunOptions                                 the whole run, with its record in a folder
    TrainStep, EvalStep                                    one compiled program each
    Ema, AveragedModel                                     an average of the weights
    fit, to_devices, evaluate, StopSignal, EarlyStopping   the loop, and its end
    EvaluationHook, CheckpointHook, PeriodicHook           what it does between steps
    StepHook, EvaluatedHook, SavedHook                     your own code after a step, an evaluation or a save
    Tracker, Trackers, register_tracker, Progress, Meter   output and records

Data are in `js.data`, float16's loss scale is `js.LossScale`, and the rest is in the modules of this package and of
`jshard.recipes`.

Examples:
    >>> import jshard as js
    >>> step = js.train.TrainStep(loss_fn, model, optimizer, batch)
    >>> js.train.fit(step, loader.train(1000), num_steps=1000, tracker=js.train.Progress(1000))
"""

from jshard._lazy import attach as _attach

__getattr__, __dir__, __all__ = _attach(__name__, __file__)
