"""What an annotation may say: each check raises an error that names what is wrong."""

import dataclasses
import fnmatch
from typing import Any

from flax import nnx

from jshard.errors import AnnotationError
from jshard.plans.memories import PARAMS
from jshard.plans.mesh import FSDP, AnyMesh, degree
from jshard.plans.policies import MixedPrecision, UnitPolicy
from jshard.plans.replicated import ARRAY, Other, others_of
from jshard.plans.units import Unit, dotted, hidden_call, nested_units, occurrences, plain_class, unit_of
from jshard.plans.units import modules as modules_of


def check_modules(modules: list[Any]) -> None:
    """Raises if what is to be a unit is not made of nnx modules."""
    wrong = dict.fromkeys(type(m).__name__ for m in modules if not isinstance(m, nnx.Module))
    if wrong or not modules:
        raise AnnotationError(
            "fully_shard needs an nnx module, a list of them, or one Linen module.",
            where=f"fully_shard({', '.join(wrong) or '[]'})",
            why="only an nnx.Module holds parameters and is called.",
            do="js.fully_shard(model.blocks[0], mesh=mesh)",
        )


def check_has_parameters(modules: list[nnx.Module]) -> None:
    """Raises if nothing would be sharded, though there are float arrays: they are not in an `nnx.Param`."""
    if any(True for module in modules for _ in occurrences(module)):
        return
    found = [(module, other) for module in modules for other in others_of(module)]
    if not found:
        return
    found.sort(key=lambda item: -item[1].bytes)
    raise nothing_to_shard(
        [f"{plain_class(module).__name__}: {other}" for module, other in found],
        sum(other.bytes for _, other in found),
        needed="an nnx.Param",
        do=_as_parameter(*found[0]),
    )


def _as_parameter(module: nnx.Module, other: Other) -> str:
    """The line that makes a parameter of an array, and the class that it belongs into."""
    around = [m for p, m in modules_of(module) if p == other.path[: len(p)] and not isinstance(m, (nnx.List, nnx.Dict))]
    name = "self." + next((key for key in reversed(other.path) if isinstance(key, str)), "array")
    value = lambda held: held if other.kind == ARRAY else f"{held}[...]"
    one = f"nnx.Param({value(name)})"
    made = f"nnx.List([nnx.Param({value('x')}) for x in {name}])" if isinstance(other.path[-1], int) else one
    return f"{name} = {made}  # in {plain_class(around[-1]).__name__}.__init__"


def nothing_to_shard(where: list[str], held: int, *, needed: str, do: str) -> AnnotationError:
    """The error for a model whose arrays are no parameters."""
    return AnnotationError(
        "The model has no parameters to shard.",
        where=where,
        why=f"none of its {len(where)} float array(s), {held} bytes, is in {needed}: each would be whole on every"
        " device, and no optimizer would train it.",
        do=do,
    )


def check_no_strategy(strategy: Any) -> None:
    """Raises if a strategy was named for a Linen model, whose units are only known when it is called."""
    if strategy is not None:
        raise AnnotationError(
            "A strategy is for nnx models only.",
            where=f"fully_shard(strategy={strategy!r})",
            why="the layers of a Linen model are not known before it is called.",
            do="js.fully_shard(model, mesh=mesh, units=Block, reshard_after_forward=False)  # zero2",
        )


def check_no_units(units: Any, gathered: bool) -> None:
    """Raises for units inside a Linen model that is never gathered."""
    if units is not None and not gathered:
        raise AnnotationError(
            "A unit that is never gathered has units inside.",
            where=f"fully_shard(units={units!r}, placement=js.ShardPlacement(gathered=False))",
            why="its whole call runs as written, and so would they.",
            do='js.fully_shard(model, mesh=mesh, units={"tables": {"placement": js.ShardPlacement(gathered=False)},'
            " Block: {}})  # only the tables",
        )


def check_ungathered(policy: UnitPolicy, offload: str | None) -> None:
    """Raises for settings that mean nothing for a unit that is never gathered."""
    plain = UnitPolicy(gathered=False, group=policy.group)
    names = [f.name for f in dataclasses.fields(policy) if getattr(policy, f.name) != getattr(plain, f.name)]
    given = [f"{name}=..." for name in names]
    given += [f"offload={offload!r}"] if offload == PARAMS else []
    if given:
        raise AnnotationError(
            "A unit that is never gathered takes no such settings.",
            where=f"gathered=False with {', '.join(given)}",
            why="its call runs as written, in global view: no copy is gathered, kept, cast or reduced, and nothing is"
            " split by jshard. It takes shard_dim, stacked, ignored, allow_replicated, min_size and"
            " offload='optimizer'.",
            do="js.fully_shard(model.tables, mesh=mesh, placement=js.ShardPlacement(gathered=False, shard_dim=0))",
        )


def check_no_units_inside(module: nnx.Module, record: Unit) -> None:
    """Raises for units inside a unit that is never gathered: no region is opened that they could gather in."""
    inner = [dotted(p) for p, _ in nested_units(module)]
    if inner and not record.policy.gathered:
        raise AnnotationError(
            "A unit that is never gathered has units inside.",
            where=[f"{plain_class(module).__name__}: {path}" for path in inner],
            why="its whole call runs as written, and so would they.",
            do="annotate only what is not to be gathered: js.fully_shard(model.tables, mesh=mesh,"
            " placement=js.ShardPlacement(gathered=False));"
            "\nthen the root: js.fully_shard(model, mesh=mesh)",
        )


def check_types(mixed_precision: Any, shard_dim: Any, stacked: Any, min_size: Any) -> None:
    """Raises for settings of another type than the annotation takes."""
    checks = (
        (
            "mixed_precision",
            mixed_precision,
            mixed_precision is None or isinstance(mixed_precision, MixedPrecision),
            "a js.MixedPrecision",
            'js.fully_shard(block, mesh=mesh, mixed_precision=js.MixedPrecision(param="bfloat16"))',
        ),
        (
            "shard_dim",
            shard_dim,
            shard_dim is None or callable(shard_dim) or type(shard_dim) is int,
            "a number or a function of (path, shape)",
            "js.fully_shard(block, mesh=mesh, placement=js.ShardPlacement(shard_dim=0))",
        ),
        (
            "stacked",
            stacked,
            type(stacked) is int and stacked >= 0,
            "a number of leading dims, 0 or more",
            "js.fully_shard(layers, mesh=mesh, placement=js.ShardPlacement(stacked=1))",
        ),
        (
            "min_size",
            min_size,
            type(min_size) is int and min_size >= 0,
            "a number of elements",
            "js.fully_shard(model, mesh=mesh, placement=js.ShardPlacement(min_size=1024))",
        ),
    )
    for name, value, good, wanted, line in checks:
        if not good:
            raise AnnotationError(
                f"The setting of {name} is not allowed.",
                where=f"fully_shard({name}={value!r})",
                why=f"it is {wanted}.",
                do=line,
            )


def check_same_mesh(module: nnx.Module, record: Unit) -> None:
    """Raises if a unit inside is on another mesh."""
    others = [dotted(p) for p, m in nested_units(module) if unit_of(m).mesh != record.mesh]  # type: ignore[union-attr]
    if others:
        raise AnnotationError(
            "Units of one model are on different meshes.",
            where=[f"{plain_class(module).__name__}: {path}" for path in others],
            why=f"the module around them is on {dict(record.mesh.shape)}, or on other devices.",
            do="make one mesh = js.mesh(fsdp=-1) and pass it to every js.fully_shard.",
        )


def check_call(module: nnx.Module) -> None:
    """Raises if the module's `__call__` is hidden by a wrapper."""
    wrapper = hidden_call(module)
    if wrapper is not None:
        raise AnnotationError(
            "The call of a module is wrapped, so that it cannot become a sharded region.",
            where=f"{plain_class(module).__name__}.__call__",
            why=f"it is a {wrapper}, not a plain method.",
            do="take the decorator off, and put @nnx.jit on the training step.",
        )


def check_patterns(ignored: Any, modules: list[nnx.Module]) -> None:
    """Raises for a text pattern in `ignored` that no parameter of the modules matches."""
    if ignored is None:
        return
    check_patterns_used(ignored, {dotted(p) for m in modules for _, u in nested_units(m) for _, p, _ in occurrences(u)})


def check_patterns_used(choice: Any, paths: set[str], setting: str = "ignored") -> None:
    """Raises for a text pattern in `ignored`, or another setting, that none of the paths matches."""
    choices = choice if isinstance(choice, (list, tuple, set)) else [choice]
    unused = [c for c in choices if isinstance(c, str) and not any(fnmatch.fnmatch(p, c) for p in paths)]
    if unused:
        from_unit = " or from a unit in it" if setting == "ignored" else ""
        raise AnnotationError(
            f"A pattern in {setting} matches no parameter.",
            where=[f"{setting}={pattern!r}" for pattern in unused],
            why=f"the parameters are {', '.join(sorted(paths)[:6])}{', ...' if len(paths) > 6 else ''}.",
            do=f'give a path from the module{from_unit}, e.g. {setting}="*/bias".',
        )


def check_reshard(value: Any, mesh: AnyMesh) -> None:
    """Raises if `reshard_after_forward` is no bool and no divisor of the degree of `fsdp`."""
    if value is None or isinstance(value, bool):
        return
    size = degree(mesh, FSDP)
    if isinstance(value, int) and value >= 1 and size % value == 0:
        return
    raise AnnotationError(
        "The parameters cannot be resharded to such a group after forward.",
        where=f"fully_shard(reshard_after_forward={value!r}), fsdp={size}",
        why=f"it is True, False, or a number that divides the degree of the fsdp axis, {size}.",
        do="js.fully_shard(block, mesh=mesh, reshard_after_forward=True)",
    )


OF_PLACEMENT = "placement=js.ShardPlacement({})"


def check_choice(name: str, value: Any, allowed: tuple, within: str = "{}") -> None:
    """Raises for a value that is none of those allowed.

    Args:
        name: of the setting.
        value: as given.
        allowed: what it may be, the usual one last.
        within: how it is written as an argument of `fully_shard`.
    """
    if value not in allowed:
        raise AnnotationError(
            f"The choice for {name} is not allowed.",
            where=f"fully_shard({within.format(f'{name}={value!r}')})",
            why=f"it is one of {', '.join(map(repr, allowed))}.",
            do=f"js.fully_shard(model, mesh=mesh, {within.format(f'{name}={allowed[-1]!r}')})",
        )
