"""Where a checkpoint may lie: a folder that this machine sees."""

from __future__ import annotations

import os
import re
from pathlib import Path

from jshard.checkpoint.errors import CheckpointError

_URL = re.compile(r"[a-z][a-z0-9+.-]+:/", re.IGNORECASE)


def local_path(path: str | os.PathLike[str]) -> Path:
    """The absolute path of a checkpoint.

    Raises:
        CheckpointError: it is no path, or one of a bucket.
    """
    if not isinstance(path, str | os.PathLike):
        raise CheckpointError(
            "This is no path.",
            where=f"a {type(path).__name__}",
            why="the path comes first, and what is saved, or is to be restored, after it.",
            do='save("run/100", state), and restore("run/100", like=state)',
        )
    refuse_buckets(path)
    return Path(path).absolute()


def refuse_buckets(path: str | os.PathLike[str]) -> None:
    """Raises for the address of a bucket, which would be taken for a folder of that name.

    Raises:
        CheckpointError: it is one.
    """
    if _URL.match(os.fspath(path)):
        raise CheckpointError(
            "Checkpoints cannot lie in a bucket.",
            where=os.fspath(path),
            why="a folder gets its name by a rename when it is complete, and buckets have none.",
            do="mount the bucket, or save to a disk and copy: gcloud storage cp -r run/100 gs://bucket/run/",
        )
