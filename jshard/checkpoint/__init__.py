"""Checkpoints: a thin shell round Orbax that saves and restores sharded state.

Example:
    js.checkpoint.save("run/100", {"model": model, "optimizer": optimizer, "step": 100})
    state = js.checkpoint.restore("run/100", like={"model": model, "optimizer": optimizer, "step": 0})
"""

from jshard.checkpoint.checkpointer import CheckpointError as CheckpointError
from jshard.checkpoint.checkpointer import restore as restore
from jshard.checkpoint.checkpointer import save as save
