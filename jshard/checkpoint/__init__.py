"""Checkpoints: a thin shell round Orbax that saves and restores sharded state.

Example:
    js.checkpoint.save("run/100", {"model": model, "optimizer": optimizer, "step": 100})
    state = js.checkpoint.restore("run/100", like={"model": model, "optimizer": optimizer, "step": 0})

    checkpoints = js.checkpoint.Checkpointer("run", keep=3)  # the same by step, with the old ones deleted
    checkpoints.save(100, {"model": model, "optimizer": optimizer, "step": 100})
"""

from jshard.checkpoint.checkpointer import CheckpointError as CheckpointError
from jshard.checkpoint.checkpointer import restore as restore
from jshard.checkpoint.checkpointer import save as save
from jshard.checkpoint.series import Checkpointer as Checkpointer
