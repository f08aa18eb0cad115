"""Checkpoints: a layer over Orbax that saves sharded state and restores it onto any mesh.

Examples:
    >>> js.checkpoint.save("run/100", {"model": model, "optimizer": optimizer, "step": 100})
    >>> state = js.checkpoint.restore("run/100", like={"model": model, "optimizer": optimizer, "step": 0})

    The same by step, with the old ones deleted:

    >>> checkpoints = js.checkpoint.Checkpointer("run", keep=3)
    >>> checkpoints.save(100, {"model": model, "optimizer": optimizer, "step": 100})
"""

from jshard.checkpoint.errors import CheckpointError as CheckpointError
from jshard.checkpoint.errors import CheckpointWarning as CheckpointWarning
from jshard.checkpoint.formats import register_format as register_format
from jshard.checkpoint.pending import Pending as Pending
from jshard.checkpoint.restoring import forecast as forecast
from jshard.checkpoint.restoring import restore as restore
from jshard.checkpoint.saving import save as save
from jshard.checkpoint.saving import save_async as save_async
from jshard.checkpoint.series.checkpointer import Checkpointer as Checkpointer
from jshard.checkpoint.series.checkpointer import Keep as Keep
from jshard.checkpoint.verifying import verify as verify
