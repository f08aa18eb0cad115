"""Ways to train one recipe on one cluster, as values: what a comparison, a suggestion and a search try."""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jshard.cluster.compile import CompileRequest
from jshard.errors import AnnotationError, ShardingError
from jshard.plans.mesh import FSDP, REPLICA
from jshard.plans.policies import strategies

GSPMD = "gspmd"
"""The model as plain Flax under `jax.jit`, its parameters sharded as for zero3; the compiler does the rest."""

COMPARED = "replicate", "zero2", "zero3", "hsdp", GSPMD


@dataclasses.dataclass(frozen=True, kw_only=True)
class Variant:
    """One way to train a recipe, beside the way that was asked for.

    Attributes:
        name: to be shown.
        mesh: degrees of the mesh axes.
        batch_size: of the recipe; None for that asked for.
        accumulate: microbatches; None for those asked for.
        units: of the units, as `--unit` takes them.
        shard_replicated: as in `js.shard_optimizer`.
        plain_flax: see `CompileRequest`.
        profile: of the compiler's options; None for those asked for.
    """

    name: str
    mesh: Mapping[str, int]
    batch_size: int | None = None
    accumulate: int | None = None
    units: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    shard_replicated: bool = False
    plain_flax: bool = False
    profile: str | None = None

    @property
    def settings(self) -> tuple[str, ...]:
        """What it changes of the recipe, as `--set` takes it."""
        given = {"batch_size": self.batch_size, "accumulate": self.accumulate}
        return tuple(f"{key}={value}" for key, value in given.items() if value is not None)

    def of(self, asked: CompileRequest) -> CompileRequest:
        """What to compile, given what was asked for."""
        changed = set(map(_key, self.settings))
        return dataclasses.replace(
            asked,
            mesh=dict(self.mesh),
            settings=(*(text for text in asked.settings if _key(text) not in changed), *self.settings),
            units={**asked.units, **self.units},
            shard_replicated=self.shard_replicated,
            plain_flax=self.plain_flax,
            profile=self.profile or asked.profile,
        )

    @property
    def mesh_text(self) -> str:
        """The mesh as `--mesh` takes it."""
        return ",".join(f"{axis}={size}" for axis, size in self.mesh.items())

    @property
    def command(self) -> str:
        """The options that choose this way, to be added to those asked for."""
        given = ["--mesh", self.mesh_text]
        given += [word for setting in self.settings for word in ("--set", setting)]
        given += [word for name, value in self.units.items() for word in ("--unit", f"{name}={as_text(value)}")]
        return shlex.join(given)


def _key(setting: str) -> str:
    return setting.partition("=")[0].strip()


def command_line(request: CompileRequest, *, known: Mapping[str, float]) -> str:
    """The command line that asks for what is compiled; "" for what only `--compare` asks for.

    Args:
        request: what is compiled.
        known: of the cluster, as `--assume` takes it.
    """
    if request.plain_flax or request.shard_replicated:
        return ""
    words = ["jshard", "plan", request.model]
    words += [] if request.recipe is None else ["--recipe", request.recipe]
    words += ["--topology", request.topology]
    words += ["--mesh", ",".join(f"{axis}={degree}" for axis, degree in request.mesh.items())]
    words += [word for text in request.settings for word in ("--set", text)]
    words += [word for name, value in request.units.items() for word in ("--unit", f"{name}={as_text(value)}")]
    words += [] if request.profile == "fastest" else ["--options", request.profile or "none"]
    words += [f"--xla-flags={request.xla_flags}"] if request.xla_flags else []
    words += [word for name, value in known.items() for word in ("--assume", f"{name}={value:g}")]
    return shlex.join(words)


def as_text(value: Any) -> str:
    """A setting's value as `--unit` takes it."""
    return str(value).lower() if value is None or isinstance(value, bool) else str(value)


def compared(
    names: Sequence[str],
    mesh: Mapping[str, int],
    *,
    near: int,
    capacity_bytes: int,
    held_bytes: Callable[[Mapping[str, int]], int],
) -> tuple[Variant, ...]:
    """The strategies to compare, on as many devices as a mesh has.

    Args:
        names: of `jshard.plans.policies.strategies`, or `gspmd`.
        mesh: the mesh asked for; it decides the groups of the strategies with replicas if it has replicas itself.
        near: else the devices in each group, or a multiple of them that can hold the state, if there are more than
            those; and the neighbours of hpz.
        capacity_bytes: memory of a device.
        held_bytes: what a device of a mesh holds at least.

    Raises:
        ShardingError: there is no strategy of a name.
    """
    unknown = [name for name in names if name not in (*strategies, GSPMD)]
    if unknown:
        raise ShardingError(
            f"There is no strategy {unknown[0]!r}.",
            where=f"--compare {','.join(names)}",
            why=f"the strategies are {', '.join(strategies)}, and {GSPMD}: plain Flax under jax.jit.",
            do=f"--compare {','.join(COMPARED)}",
        )
    devices = mesh.get(REPLICA, 1) * mesh[FSDP]
    group = mesh[FSDP]
    if mesh.get(REPLICA, 1) == 1 and any(n in strategies and strategies[n].replica > 1 for n in names):

        def fits(size: int) -> bool:
            try:
                return held_bytes(dict(mesh) | {REPLICA: devices // size, FSDP: size}) <= capacity_bytes / 2
            except AnnotationError:  # a large parameter does not divide
                return False

        group = _group(devices, near, fits)
    return tuple(_compared(name, dict(mesh), devices, group, near) for name in dict.fromkeys(names))


def _group(devices: int, near: int, fits: Callable[[int], bool]) -> int:
    """The smallest groups of whole hosts that can hold the state, or the largest there are; within a host its half."""
    fewer = [n for n in range(1, devices) if devices % n == 0] or [1]
    whole = [n for n in fewer if n % near == 0] or fewer[-1:]
    return next(filter(fits, whole), whole[-1])


def _compared(name: str, mesh: dict[str, int], devices: int, group: int, near: int) -> Variant:
    strategy = strategies["zero3" if name == GSPMD else name]
    fsdp = devices if strategy.replica == 1 else 1 if strategy.fsdp == 1 else group
    mesh |= {REPLICA: devices // fsdp, FSDP: fsdp}
    reshard = {"hpz": near}.get(name, strategy.reshard_after_forward)
    units = {} if name == GSPMD else {"reshard_after_forward": True if reshard is None else reshard}
    return Variant(
        name=name,
        mesh=mesh,
        units=units,
        shard_replicated=strategy.shard_replicated,
        plain_flax=name == GSPMD,
    )
