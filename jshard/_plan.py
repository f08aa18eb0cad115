"""ShardPlan: where every parameter lies, as one frozen value that everything else reads."""

import dataclasses
import functools
import json
from collections.abc import Callable
from typing import Any

from flax import nnx

from jshard._errors import AnnotationError
from jshard._nnx import Path, Unit, dotted, nested_units, occurrences, plain_class, unit_of
from jshard._placement import Placement


@dataclasses.dataclass(frozen=True)
class LeafPlan:
    """One parameter of the model.

    Args:
        path: its path from the root, `blocks/0/attn/kernel`.
        unit: name of the unit that gathers it.
        placement: how it is stored, gathered and reduced.
        aliases: other paths of the same parameter, if it is tied.
        trained: whether it has a gradient; a frozen one is gathered, and nothing more.
        stack: path of the layers of a loop that it is stacked with, where they are gathered all at once.
    """

    path: str
    unit: str
    placement: Placement
    aliases: tuple[str, ...] = ()
    trained: bool = True
    stack: str = ""


@dataclasses.dataclass(frozen=True)
class UnitPlan:
    """Parameters that are gathered together.

    Args:
        name: path of the unit's module; several joined by `+` if they were given in a list.
        kind: class of the module.
        reshard_after_forward: True: gathered again before backward. False: kept. A number: kept in that
            many pieces, within the fastest links.
        remat: the activation checkpointing policy.
        mixed_precision: the dtypes asked for, as text.
        prefetch: how early it is gathered: so many units ahead, within so many bytes, or as the compiler likes.
        strategy: of the root: what was chosen for the layers, and why; empty if nothing was.
        gathered: False: its parameters are sharded, and never gathered; the settings above mean nothing then.
    """

    name: str
    kind: str
    reshard_after_forward: bool | int
    remat: str
    mixed_precision: str
    prefetch: str = "1"
    strategy: str = ""
    gathered: bool = True


@dataclasses.dataclass(frozen=True)
class ShardPlan:
    """Where every parameter lies: pure data, made from the model's shapes, good for any size of model.

    Args:
        mesh: degree of every mesh axis, outermost first.
        units: the units in tree order, root first.
        leaves: the parameters in tree order.
    """

    mesh: tuple[tuple[str, int], ...]
    units: tuple[UnitPlan, ...]
    leaves: tuple[LeafPlan, ...]

    @functools.cached_property
    def _by_path(self) -> dict[str, LeafPlan]:
        return {p: leaf for leaf in self.leaves for p in (leaf.path, *leaf.aliases)}

    def leaf(self, path: str) -> LeafPlan:
        """The parameter at a path, or at one of its aliases."""
        return self._by_path[path]

    def unit_leaves(self, name: str) -> tuple[LeafPlan, ...]:
        """The parameters that a unit gathers."""
        return tuple(leaf for leaf in self.leaves if leaf.unit == name)

    @property
    def num_parameters(self) -> int:
        return sum(leaf.placement.size for leaf in self.leaves)

    @property
    def num_frozen(self) -> int:
        """How many of them are not trained."""
        return sum(leaf.placement.size for leaf in self.leaves if not leaf.trained)

    @property
    def logical_bytes(self) -> int:
        """Bytes of all parameters as stored, over all devices, each counted once."""
        return sum(leaf.placement.logical_bytes for leaf in self.leaves)

    @functools.cached_property
    def gathered_part(self) -> "ShardPlan":
        """The same without the parameters that are never gathered; the plan itself if none is ever gathered."""
        leaves = tuple(leaf for leaf in self.leaves if leaf.placement.gathered)
        return dataclasses.replace(self, leaves=leaves) if leaves else self

    @property
    def bytes_per_device(self) -> int:
        """Bytes of the stored parameters on one device."""
        return sum(leaf.placement.bytes_per_device for leaf in self.leaves)

    @property
    def whole_stacks(self) -> dict[tuple[str, str], int]:
        """Layers of a loop that are gathered all at once: path and unit, with the bytes of the gathered copy."""
        found: dict[tuple[str, str], int] = {}
        for leaf in self.leaves:
            if leaf.stack and leaf.placement.gathered and leaf.placement.dim is not None:
                key = leaf.stack, leaf.unit
                found[key] = found.get(key, 0) + leaf.placement.gathered_bytes
        return found

    @property
    def replicated(self) -> tuple[LeafPlan, ...]:
        """Parameters that every device of the `fsdp` axis holds whole."""
        return tuple(leaf for leaf in self.leaves if leaf.placement.dim is None)

    def to_json(self) -> str:
        """The plan as JSON text; `ShardPlan.from_json` reads it back."""
        return json.dumps(dataclasses.asdict(self), indent=1)

    @classmethod
    def from_json(cls, text: str) -> "ShardPlan":
        """Reads what `to_json` wrote."""
        data = json.loads(text)
        return cls(
            mesh=tuple((name, size) for name, size in data["mesh"]),
            units=tuple(UnitPlan(**unit) for unit in data["units"]),
            leaves=tuple(_leaf_from_json(leaf) for leaf in data["leaves"]),
        )


def plan(model: Any, *, wrt: Any = nnx.Param) -> ShardPlan:
    """Reads the plan off an annotated model, concrete or abstract.

    Args:
        model: the root module, after `fully_shard`; `nnx.eval_shape(...)` gives an abstract one of any size. Of a
            Linen module, the plan is that of the parameters that `init` or `apply` saw last.
        wrt: the parameters that are trained, as `js.value_and_grad` takes them; the others are frozen.

    Raises:
        AnnotationError: the root is not annotated, parameters were added after the annotation, or those of a Linen
            module are not known yet.

    Example:
        >>> js.plan(model).num_parameters
        8704
    """
    # An Annotation, of a room that imports this file.
    linen = getattr(type(model), "_jshard_linen", None)
    if linen is not None:
        return linen.layout.plan if wrt is nnx.Param else linen.layout.plan_for(wrt)
    own = getattr(type(model), "_jshard_plan", None)  # of one that calls a Linen module: jshard.train.linen_model
    if own is not None:
        return own(model, wrt)
    root = unit_of(model)
    if root is None:
        raise root_forgotten(model)
    names = _unit_names(model)
    leaves = _leaves(model, root, names, nnx.filterlib.to_predicate(wrt))
    units = {names[id(m)]: _unit_plan(names[id(m)], p, m) for p, m in reversed(list(nested_units(model)))}
    order = [names[id(m)] for _, m in nested_units(model)]
    return ShardPlan(
        mesh=tuple(zip(root.mesh.axis_names, root.mesh.axis_sizes, strict=True)),
        units=tuple(units[name] for name in dict.fromkeys(order)),
        leaves=leaves,
    )


def _leaves(
    model: nnx.Module, root: Unit, names: dict[int, str], is_trained: Callable[[Path, Any], bool]
) -> tuple[LeafPlan, ...]:
    owners = _owners(model)
    paths: dict[int, list[Path]] = {}
    trained: dict[int, bool] = {}
    for variable, path, _ in occurrences(model):
        paths.setdefault(id(variable), []).append(path)
        trained.setdefault(id(variable), is_trained(path, variable))
    unplanned = [found[0] for found in paths.values() if found[0] not in root.by_path]
    if unplanned:
        raise AnnotationError(
            "The model has parameters that the annotation never saw.",
            where=[f"{plain_class(model).__name__}: {dotted(path)}" for path in unplanned],
            why="they were added after fully_shard.",
            do="change the model first, then annotate it: js.fully_shard(model, mesh=mesh).",
        )
    return tuple(
        LeafPlan(
            path=dotted(first),
            unit=names[id(owners[key])],
            placement=root.by_path[first].placement,
            aliases=tuple(map(dotted, others)),
            trained=trained[key],
        )
        for key, (first, *others) in paths.items()
    )


def root_forgotten(model: Any) -> AnnotationError:
    """The error for a model whose root is not a unit, or that is no nnx model."""
    if not isinstance(model, nnx.Module):
        return _not_nnx(model)
    inner = [dotted(p) for p, _ in nested_units(model)]
    units = (
        f"{len(inner)} units inside ({', '.join(inner[:4])}{' ...' if inner[4:] else ''})"
        if inner
        else "no unit inside"
    )
    return AnnotationError(
        "The root of the model is not annotated.",
        where=f"{type(model).__name__}: {units}",
        why="parameters outside the inner units belong to the root, and one call into the root is one sharded region.",
        do="js.fully_shard(model, mesh=mesh)  # after its submodules",
    )


def _not_nnx(model: Any) -> AnnotationError:
    if getattr(type(model), "_jshard_linen", None) is None:
        return AnnotationError(
            "This is not an annotated model.",
            where=type(model).__name__,
            why="fully_shard annotates an nnx module in place; of a Linen module it returns a copy.",
            do="model = js.fully_shard(model, mesh=mesh)",
        )
    return AnnotationError(
        "This is for nnx models only.",
        where=type(model).__name__,
        why="the parameters of a Linen model are an argument of its loss, and of what differentiates it.",
        do="js.value_and_grad(loss_fn, model=model, accumulate=4)(state.params, x)  # loss_fn(params, x)",
    )


def owner_of(chains: list[tuple[nnx.Module, ...]]) -> nnx.Module | None:
    """The innermost unit that encloses every occurrence of a parameter."""
    owner = None
    for level in zip(*chains, strict=False):
        if any(unit is not level[0] for unit in level):
            break
        owner = level[0]
    return owner


def _owners(model: nnx.Module) -> dict[int, nnx.Module | None]:
    chains: dict[int, list[tuple[nnx.Module, ...]]] = {}
    for variable, _, units in occurrences(model):
        chains.setdefault(id(variable), []).append(units)
    return {key: owner_of(found) for key, found in chains.items()}


def _unit_names(model: nnx.Module) -> dict[int, str]:
    """Name of every unit module: its path, or the paths of its list joined."""
    groups: dict[Any, list[tuple[Path, nnx.Module]]] = {}
    for path, module in nested_units(model):
        group = unit_of(module).policy.group  # type: ignore[union-attr]
        groups.setdefault(id(module) if group is None else ("group", group), []).append((path, module))
    return {id(m): "+".join(dotted(p) for p, _ in found) for found in groups.values() for _, m in found}


def _unit_plan(name: str, path: Path, module: nnx.Module) -> UnitPlan:
    unit = unit_of(module)
    assert unit is not None
    return made_unit_plan(name, plain_class(module).__name__, unit, is_root=not path)


def made_unit_plan(name: str, kind: str, unit: Unit, *, is_root: bool) -> UnitPlan:
    """The row of one unit, from its record."""
    remat = unit.policy.remat
    precision = unit.policy.mixed_precision
    return UnitPlan(
        name=name,
        kind=kind,
        reshard_after_forward=resharded(unit, is_root=is_root),
        remat=remat if isinstance(remat, str) else getattr(remat, "__name__", repr(remat)),
        mixed_precision=f"param={precision.param}, reduce={precision.reduce}, output={precision.output}"
        + (f", keep={' '.join(precision.keep)}" if precision.keep else ""),
        prefetch="compiler" if unit.policy.prefetch is None else str(unit.policy.prefetch),
        strategy=unit.policy.strategy,
        gathered=unit.policy.gathered,
    )


def resharded(unit: Unit, *, is_root: bool) -> bool | int:
    """What `reshard_after_forward=None` means: True, but False for the root, whose copy backward needs at once."""
    asked = unit.policy.reshard_after_forward
    return (not is_root) if asked is None else asked


def _leaf_from_json(data: dict[str, Any]) -> LeafPlan:
    placement = dict(data["placement"])
    placement["shape"] = tuple(placement["shape"])
    placement["spec"] = tuple(tuple(e) if isinstance(e, list) else e for e in placement["spec"])
    aliases, trained = tuple(data["aliases"]), data.get("trained", True)
    return LeafPlan(data["path"], data["unit"], Placement(**placement), aliases, trained, data.get("stack", ""))
