"""What was found to be the quickest way to train a model on some devices, kept for the next time.

One JSON file in the user's cache folder, a row for each model and kind and number of devices. A file that cannot be
read or written is no reason to stop: the search is then done again.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import hashlib
import json
import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
from flax import nnx

from jshard import _compat
from jshard._nnx import dotted, occurrences
from jshard._padded import logical_shape
from jshard._processes import gather_texts

_FILE = "choices.json"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Choice:
    """A way that was measured.

    Attributes:
        mesh: degrees of the mesh axes.
        units: settings of the layers, as `jshard._revise.revise` takes them.
        batch_size: sequences of a step.
        accumulate: microbatches.
        sample: shapes of the data, as text: another choice may suit others.
        step_s: measured seconds of a step.
        jax: version; another one compiles other programs, and has to be measured anew.
        measured_on: date.
    """

    mesh: Mapping[str, int]
    units: Mapping[str, Any]
    batch_size: int
    accumulate: int
    sample: str
    step_s: float
    jax: str = dataclasses.field(default_factory=_compat.jax_version)
    measured_on: str = dataclasses.field(default_factory=lambda: datetime.date.today().isoformat())

    @property
    def told(self) -> str:
        """Where the choice is from, in words."""
        return f"measured on {self.measured_on}: {self.step_s:.3g} s a step of {self.batch_size}"


def key_of(model: nnx.Module, devices: Sequence[jax.Device]) -> str:  # pyright: ignore[reportInvalidTypeForm]
    """The key of a model on some devices: paths, shapes and dtypes of its parameters, kind and number of devices."""
    params = sorted(
        {f"{dotted(path)} {logical_shape(v)} {v.get_raw_value().dtype}" for v, path, _ in occurrences(model)}
    )
    text = "\n".join([*params, f"{len(devices)} x {devices[0].device_kind}"])
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def recall(key: str) -> Choice | None:
    """The choice of a key; None where nothing is remembered. In several processes all call, and the first decides."""
    with jax.ensure_compile_time_eval():
        found = json.loads(gather_texts(json.dumps(_read().get(key)))[0])
    if not isinstance(found, dict):
        return None
    with contextlib.suppress(TypeError):  # of another version of this file
        choice = Choice(**found)
        return choice if choice.jax == _compat.jax_version() else None
    return None


def remember(key: str, choice: Choice) -> Path | None:
    """Keeps a choice, in place of an earlier one of its key.

    Returns:
        The file; None if it could not be written.
    """
    path = _path()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        rows = _read() | {key: dataclasses.asdict(choice)}
        with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False) as file:
            json.dump(rows, file, indent=1)
        os.replace(file.name, path)  # another process may be reading
    except OSError:
        return None
    return path


def _read() -> dict[str, Any]:
    try:
        found = json.loads(_path().read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _path() -> Path:
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "jshard" / _FILE
