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

from jshard._lazy import attach as _attach

__getattr__, __dir__, __all__ = _attach(__name__, __file__)
