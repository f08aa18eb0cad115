"""`fully_shard(strategy=...)`: settings of the layers by the name of a strategy, or by what was measured."""

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
from jax.sharding import Mesh

from jshard import _compat
from jshard._errors import AnnotationError
from jshard._processes import gather_texts
from jshard.api.override import has_inner_units
from jshard.plans.mesh import FSDP, REPLICA, AnyMesh, degree
from jshard.plans.padding import logical_shape
from jshard.plans.plan import ShardPlan, plan
from jshard.plans.policies import Strategy, strategies
from jshard.plans.units import dotted, occurrences

_FILE = "choices.json"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Choice:
    """A way that was measured.

    Attributes:
        mesh: degrees of the mesh axes.
        units: settings of the layers, as `jshard.api.override.revise` takes them.
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


# `fully_shard(strategy=...)`: settings of the layers by the name of a strategy, or chosen for model and mesh.

AUTO = "auto"
_STATES = 4  # parameters, gradients and two moments, each of the parameters' size
_ROOM = 0.5  # of the memory of a device: what activations take is not known here


def check_strategy(strategy: Any) -> None:
    """Raises unless it is a strategy, its name, "auto" or None."""
    if strategy is None or isinstance(strategy, Strategy) or strategy in (AUTO, *strategies):
        return
    raise AnnotationError(
        "There is no such strategy.",
        where=f"fully_shard(strategy={strategy!r})",
        why=f'it is "auto", one of {", ".join(strategies)}, or a value of js.strategies.',
        do='js.fully_shard(model, mesh=mesh, strategy="auto")',
    )


def settings_of(strategy: str | Strategy, model: nnx.Module, mesh: AnyMesh) -> tuple[dict[str, Any], str]:
    """The settings of the layers, as `jshard.api.override.revise` takes them, and why these.

    Args:
        strategy: a strategy, its name, or "auto".
        model: the root, annotated.
        mesh: its mesh.

    Raises:
        AnnotationError: a strategy of replicas on a mesh without, or one without shards on a mesh that shards.
    """
    if strategy == AUTO:
        return _chosen(model, mesh)
    found = strategies[strategy] if isinstance(strategy, str) else strategy
    if (found.fsdp == 1 and degree(mesh, FSDP) > 1) or (found.replica > 1 and degree(mesh, REPLICA) == 1):
        raise _other_mesh(found, mesh)
    reshard = found.reshard_after_forward
    return {"reshard_after_forward": True if reshard is None else reshard}, found.name


def _other_mesh(strategy: Strategy, mesh: AnyMesh) -> AnnotationError:
    wanted = ", ".join(f"{axis}={size}" for axis, size in strategy.mesh.items())
    given = ", ".join(f"{axis}={degree(mesh, axis)}" for axis in strategy.mesh)
    return AnnotationError(
        "The strategy is for another mesh.",
        where=f"fully_shard(strategy={strategy.name!r}), mesh {given}",
        why=f"{strategy.summary}: where the parameters lie is the mesh's, and a strategy does not change it.",
        do=f"mesh=js.mesh({wanted})",
    )


def _chosen(model: nnx.Module, mesh: AnyMesh) -> tuple[dict[str, Any], str]:
    if not has_inner_units(model):
        return {}, "auto: nothing to choose, as there are no units inside the root"
    if isinstance(mesh, Mesh):
        known = recall(key_of(model, list(mesh.devices.flat)))
        if known is not None and dict(known.mesh) == dict(mesh.shape):
            return dict(known.units), f"auto: {known.told}"
    if degree(mesh, FSDP) == 1:
        return {}, "auto: nothing is sharded"
    found, capacity = plan(model), _least_bytes(mesh)
    if capacity is None:
        return {"reshard_after_forward": True}, "auto: zero3, as the memory of a device is not known"
    needed = _STATES * found.bytes_per_device + _gathered_bytes(found)
    fits = needed <= _ROOM * capacity
    told = f"{needed / 2**30:.2f} GiB with every gathered copy, {'within' if fits else 'over'} half of a device's"
    return {"reshard_after_forward": not fits}, f"auto: {'zero2' if fits else 'zero3'}, {told} {capacity / 2**30:.1f}"


def _gathered_bytes(found: ShardPlan) -> int:
    return sum(leaf.placement.gathered_bytes for leaf in found.leaves if leaf.placement.dim is not None)


def _least_bytes(mesh: AnyMesh) -> int | None:
    """Memory of the smallest device: all processes have to choose the same."""
    if not isinstance(mesh, Mesh):
        return None
    with jax.ensure_compile_time_eval():
        seen = [json.loads(text) for text in gather_texts(json.dumps(device_bytes(mesh)))]
    return None if None in seen else min(seen)


def device_bytes(mesh: AnyMesh) -> int | None:
    """Memory of one device of a mesh; of simulated ones their share of the host's. None where it is not known."""
    if not isinstance(mesh, Mesh):
        return None
    local: list[Any] = list(mesh.local_devices)
    if not local:
        return None
    if local[0].platform == "cpu":
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // len(local)
    try:
        return (local[0].memory_stats() or {}).get("bytes_limit")
    except jax.errors.JaxRuntimeError:  # devices of a cluster that is not there
        return None
