"""Whose code a run may execute: that of its own user, and not whatever file the folder of a run names.

`run.json` names the model file of a run, and a folder may come from anywhere. So a run seals that name with a key of
its user, which is on no other machine, as Jupyter does for notebooks; without the seal the file is not executed unless
the user names it, or trusts the folder.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path

from jshard.errors import ShardingError
from jshard.recipes import shipped_models
from jshard.train.user_key import user_key

SEAL = "model_file_seal"
"""The entry of run.json."""


class UntrustedError(ShardingError):
    """A run from elsewhere names a model file, and executing it was not asked for."""


def sealed(model_file: str) -> str | None:
    """Returns the seal of the file that a run of this user names; None if it needs none, or there can be no key."""
    if model_file in shipped_models():
        return None
    key = user_key()
    if key is None:
        return None
    return _seal(key, model_file)


def model_of_run(record: Mapping[str, object], *, is_trusted: bool, where: Path, command: Sequence[str]) -> Path:
    """Returns the model file that run.json names.

    Args:
        record: the contents of run.json.
        is_trusted: whether the user trusts the folder.
        where: the folder.
        command: the words of the command, for the advice.

    Raises:
        UntrustedError: the run was not made by this user, or not here.
    """
    name = str(record["model_file"])
    shipped = shipped_models().get(name)
    if shipped is not None:  # not `model_path`: a file of that name in the working folder is not meant
        return shipped
    if is_trusted or _is_own(record, name):
        return Path(name)
    named = shlex.join([*command, "--model", name])
    trusting = shlex.join([*command, "--trust"])
    raise UntrustedError(
        "The run names a model file, and was not made by you on this machine.",
        where=[f"{where}/run.json", f"model_file  {name}"],
        why="a model file is a program: loading it executes all that it contains.",
        do=f"read the file, then name it or trust the run:\n{named}\n{trusting}",
    )


def _is_own(record: Mapping[str, object], name: str) -> bool:
    stated = record.get(SEAL)
    # `compare_digest` raises for a text that is not ASCII.
    if not isinstance(stated, str) or not stated.isascii():
        return False
    # Without a key nothing was sealed here, and none has to be created.
    key = user_key(is_needed=False)
    return key is not None and hmac.compare_digest(stated, _seal(key, name))


def _seal(key: bytes, model_file: str) -> str:
    """Signs the path of the file; not its contents, as a user may edit it between two runs."""
    path = os.fsencode(Path(model_file).resolve())
    return hmac.new(key, path, hashlib.sha256).hexdigest()
