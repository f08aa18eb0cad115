"""`fully_shard`: makes modules units, with parameters sharded over the mesh; and changes the settings of units."""

import collections
import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import flax.linen as nn
import jax
from flax import nnx

from jshard import _compat
from jshard.engine.region import route
from jshard.errors import AnnotationError
from jshard.linen.annotation import annotated
from jshard.plans import checks
from jshard.plans.homes import settle_in
from jshard.plans.memories import apart, as_array, home_in, placed_apart, sharding_of
from jshard.plans.mesh import AnyMesh, check_mesh, is_concrete
from jshard.plans.padding import Padding, logical, logical_shape, padding_of, store
from jshard.plans.placement import Placement, PlacementPolicy, placement_of, reshard_of
from jshard.plans.plan import Leaf, make_plan, record_of
from jshard.plans.policies import Fallback, MixedPrecision, Remat, UnitPolicy
from jshard.plans.units import (
    LogicalOptimizer,
    Path,
    Unit,
    UnitChoice,
    as_filter,
    attach,
    chosen,
    detach,
    dotted,
    nested_units,
    occurrences,
    plain_class,
    store_plan,
    units_in,
    walk,
)

M = TypeVar("M", bound=nnx.Module | Sequence[nnx.Module] | nn.Module)

_groups = itertools.count()


def fully_shard(
    module: M,
    *,
    mesh: AnyMesh,
    units: UnitChoice | Sequence[UnitChoice] | Mapping[UnitChoice, Mapping[str, Any]] | None = None,
    reshard_after_forward: bool | int | None = None,
    mixed_precision: MixedPrecision | None = None,
    remat: Remat = "none",
    prefetch: int | str | None = 1,
    placement: PlacementPolicy | None = None,
    fallback: Fallback = "warn",
    **old: Any,
) -> M:
    """Makes a module a unit: its parameters are stored sharded, and gathered together when it is called.

    Call it on submodules first, then on the root. Annotation places each parameter on the mesh, sharded along its
    largest dim that is divisible by the degree of `fsdp` (times `expert`). If no dim is, a small parameter is
    replicated, and a larger one is stored with some rows of padding, which are not visible when the parameter is read
    (such a model needs the optimizer of `js.shard_optimizer`). A call of the root is traced once, in global view, and
    its program runs on data shards: each unit all-gathers its own parameters, computes, then frees the gathered copies;
    backward gathers them again and reduce-scatters the gradients, which are sharded like the parameters. The results
    equal those on one device, even where the model combines examples of the batch. The module keeps its class, names,
    variables and tree; the training step stays plain Flax, in global view.

    A unit should be a layer or a block: large enough for efficient collectives, small enough that one
    gathered unit fits beside the shards. Parameters outside the inner units belong to the root.

    Args:
        module: the module; or a list of modules that together form one unit, such as a norm and a head: one row in
            the plan, but each module gathers its part when it is called. Or a whole Linen model.
        mesh: from `js.mesh`, or any JAX mesh with these axis names; Explicit axes are treated as Auto. Parameters
            are sharded over `fsdp` and replicated over `replica`.
        units: one-call form: which submodules are units: a class, a path pattern such as `"blocks/*"`, a
            function of (path, module), or a list of these. The settings apply to all units and to the root, except
            `remat`, which applies to the units only. A Linen model also accepts a dict from such choices to their
            own settings: `{Block: {"remat": "full"}}`.
        reshard_after_forward: True: free the gathered parameters after forward and gather them again in
            backward (ZeRO-3). False: keep them until backward (ZeRO-2). A number k: keep 1/k of them on each
            device and gather again within groups of k neighbours (ZeRO++ hpZ). None: True for units inside
            the root, False for the root itself, whose parameters backward needs immediately.
        mixed_precision: dtypes of gathering, computation and reduction; None keeps the stored dtype.
        remat: activation checkpointing of the unit: a name (all are in docs/sharding_a_model.md, such as `"full"`,
            `"dots"`, `"offload"`, `"torchtitan_selective"`, `"minimal_flash"`), `"names:NAME,..."` for values named
            by `jax.ad_checkpoint.checkpoint_name`, or a policy from `jax.checkpoint_policies`. No policy keeps
            gathered parameters. `"offload"` keeps in host memory the values that `"dots_with_no_batch_dims"` keeps;
            a policy offloads activations by name. With `units=` it applies to the units and not to the root, where it
            would run every unit three times; for both, annotate the units one by one, then the root.
        prefetch: how early the unit is gathered. A number n: while the n-th unit before it computes, and no earlier;
            the same in backward, in reverse order. 0: when it is needed. A budget such as `"512MiB"`: as early as
            the bytes gathered but not yet used stay within it. None: the compiler chooses, without a bound.
        placement: a `js.PlacementPolicy`, to override the default of sharding the largest divisible dim.
        fallback: how to treat an operation that has no form on one data shard, so that every device computes it for
            the whole batch: `"warn"`, from 1 MiB and 1 % of the parameters' traffic on; or `"error"`. Set on the root.
        **old: deprecated settings, accepted for one more release; a warning gives the replacement.

    Returns:
        The same object, annotated in place; for a Linen model, an annotated copy.

    Raises:
        AnnotationError: an argument does not fit the model (one message lists all bad parameters), or the model has
            float arrays but no `nnx.Param`.
        MeshError: the mesh has no `fsdp` axis, has Manual axes, or has no host memory to offload to.

    Example:
        >>> for block in model.blocks:
        ...     block = js.fully_shard(block, mesh=mesh)
        >>> model = js.fully_shard(model, mesh=mesh)
    """
    mesh = check_mesh(mesh)
    strategy = old.pop("strategy", None)
    placement = placement_of(checks.check_placement(placement), old)
    policy = UnitPolicy().changed(
        mesh,
        reshard_after_forward=reshard_after_forward,
        mixed_precision=mixed_precision,
        remat=remat,
        prefetch=prefetch,
        fallback=fallback,
    )
    unit = Unit(mesh, policy, dataclasses.replace(placement, ignored=as_filter(placement.ignored)))
    checks.check_unit(unit)
    root = unit if units is None else dataclasses.replace(unit, policy=dataclasses.replace(policy, remat="none"))
    if isinstance(module, nn.Module):
        return annotated(module, root, units, unit)
    modules: list[Any] = list(module) if isinstance(module, (list, tuple, nnx.List)) else [module]
    checks.check_modules(modules)
    checks.check_has_parameters(modules)
    _annotate_all(modules, root, _choose_units(modules, units), unit)
    if strategy is not None:
        reshard = reshard_of(strategy)
        for one in modules:
            revise(one, {"reshard_after_forward": reshard})
    return module


def _annotate_all(modules: list[nnx.Module], root: Unit, chosen: list[nnx.Module], unit: Unit) -> None:
    """Annotates the chosen submodules, then the modules; if one fails, none is annotated."""
    if len(modules) > 1:
        root = dataclasses.replace(root, policy=dataclasses.replace(root.policy, group=next(_groups)))
    done: list[nnx.Module] = []
    try:
        for one, record in [*((m, unit) for m in chosen), *((m, root) for m in modules)]:
            _annotate(one, record)
            done.append(one)
        if unit.placement.ignored is not False:
            names = {dotted(p) for m in modules for _, one in nested_units(m) for _, p, _ in occurrences(one)}
            checks.check_patterns_used(unit.placement.ignored, names)
    except AnnotationError:
        for one in done:
            detach(one)
        raise


def _annotate(module: nnx.Module, record: Unit) -> None:
    """Makes one module a unit, plans it with the units inside, and places the arrays."""
    checks.check_new_unit(module, record)
    checks.check_variables(module)
    _hold_arrays(module)
    attach(module, dataclasses.replace(record, kind=plain_class(module).__name__), route)
    units, leaves = _units(module), _leaves(module)
    try:
        plan = make_plan(leaves, units)
    except AnnotationError:
        detach(module)
        raise
    padded = any(leaf.placement.padding for leaf in plan.leaves)
    line = "optimizer = js.shard_optimizer(model, tx); optimizer.update(model, grads)"
    optimizer = LogicalOptimizer(line) if padded else None
    store_plan(module, plan, {path: dataclasses.replace(unit, optimizer=optimizer) for path, unit in units.items()})
    placed: set[int] = set()  # ids of the values of other parameters
    for leaf, planned in zip(leaves.values(), plan.leaves, strict=True):
        _place(leaf.variable, planned.placement, record.mesh)
        _keep_apart(leaf.variable, placed)


def _hold_arrays(module: nnx.Module) -> None:
    """Puts arrays in place of the numbers of Python and NumPy in parameters, as Flax's own transforms do."""
    for _, variable in walk(module):
        if isinstance(variable, nnx.Param):
            leaves, tree = jax.tree.flatten(variable.get_raw_value())
            arrays = list(map(as_array, leaves))
            if any(array is not leaf for array, leaf in zip(arrays, leaves, strict=True)):
                variable.set_raw_value(jax.tree.unflatten(tree, arrays))


def _keep_apart(variable: nnx.Param, placed: set[int]) -> None:
    """Copies a value that another parameter holds too, as `nnx.clone` leaves it: one step could not donate both."""
    value = variable.get_raw_value()
    if id(value) in placed and isinstance(value, jax.Array) and not _compat.is_tracer(value):
        value = apart([value, value])[1]
        variable.set_raw_value(value)
    placed.add(id(value))


def _units(module: nnx.Module) -> dict[Path, Unit]:
    """The records of the units in a module, by path, as seen from the enclosing module."""
    units = units_in(module)
    allowed = []
    for path, unit in units.items():
        name = "" if unit.placement.gathered or not path else dotted(path)
        units[path] = dataclasses.replace(unit, nested=bool(path) or unit.nested, name=name)
        allowed += [f"{dotted(path)}/{one}" if path else one for one in unit.placement.allow_replicated]
    root = units[()]
    units[()] = dataclasses.replace(root, placement=dataclasses.replace(root.placement, allow_replicated=allowed))
    return units


def _leaves(module: nnx.Module) -> dict[Path, Leaf]:
    """The parameters of a module whose units have records, as a plan takes them."""
    units = {id(one): path for path, one in nested_units(module)}
    uses: dict[int, list[tuple[nnx.Param, Path, tuple[Path, ...]]]] = {}
    for variable, path, around in occurrences(module):
        uses.setdefault(id(variable), []).append((variable, path, tuple(units[id(one)] for one in around)))
    leaves = {}
    for (variable, *_), (first, *aliases), around in (zip(*found, strict=True) for found in uses.values()):
        shape, dtype = logical_shape(variable), variable.get_raw_value().dtype
        leaves[first] = Leaf(shape, dtype, _given_spec(variable), tuple(aliases), around, variable=variable)
    return leaves


def _given_spec(variable: nnx.Param) -> tuple:
    """Mesh axes named by the model's own `out_sharding` metadata, such as a tensor axis."""
    given = variable.get_metadata("out_sharding", None)
    return tuple(given) if given else ()


def _place(variable: nnx.Param, placement: Placement, mesh: AnyMesh) -> None:
    padding = Padding.of(placement)
    value = (variable if padding_of(variable) == padding else logical(variable)).get_raw_value()
    value = value if padding is None else padding.pad(value)
    if _given_spec(variable):  # Flax would place it, and its copies in the optimizer, by the model's axes alone
        variable.set_metadata(eager_sharding=False)
    sharding = sharding_of(mesh, placement.partition_spec, on_host=placement.on_host)
    if isinstance(value, jax.ShapeDtypeStruct):
        value = jax.ShapeDtypeStruct(value.shape, value.dtype, sharding=sharding)
    elif is_concrete(mesh) and not _compat.is_tracer(value):
        value = placed_apart(value, sharding)
    store(variable, padding, value)
    settle_in(variable, home_in(mesh, placement))


def _choose_units(modules: list[nnx.Module], units: Any) -> list[nnx.Module]:
    """The submodules selected by the one-call form, inner ones first."""
    if units is None:
        return []
    if isinstance(units, Mapping):
        raise AnnotationError(
            "Only Linen modules accept settings for each choice of units.",
            where=f"fully_shard({type(modules[0]).__name__}, units={{...}})",
            why="the submodules of an nnx model already exist, and can be annotated one by one.",
            do='js.fully_shard(model.blocks[0], mesh=mesh, remat="full")  # then the root',
        )
    choices = list(units) if isinstance(units, Sequence) and not isinstance(units, str) else [units]
    found, kinds = [], {}
    for root in modules:
        for path, node in nnx.iter_graph(root):
            if not path or not isinstance(node, nnx.Module) or isinstance(node, nnx.List):
                continue
            kinds.setdefault(type(node).__name__, dotted(path))
            if any(chosen(choice, dotted(path), node) for choice in choices):
                found.append(node)
    if not found:
        raise checks.no_unit_chosen(type(modules[0]).__name__, repr(units), kinds, "blocks/*")
    return found


# Changed settings for the units of an annotated model: to try configurations without editing its file.

SETTINGS = ("reshard_after_forward", "remat", "prefetch")
"""What `revise` changes; each as in `js.fully_shard`."""


def revise(model: nnx.Module, settings: Mapping[str, Any]) -> None:
    """Changes settings (`SETTINGS`) of an annotated model's units, in place. Parameters keep their placement.

    `prefetch`, and a `reshard_after_forward` of False, apply to every unit inside the root. Other values of
    `reshard_after_forward`, and `remat`, apply to the layers only: units that the model has several of, or stacks of
    them; to all innermost units if no unit repeats. A head or an encoder's wrapper keeps its settings, as does a unit
    that is never gathered.
    """
    root = record_of(model)
    assert root.plan is not None, "an annotated model has one"
    if unknown := [name for name in settings if name not in SETTINGS]:
        raise AnnotationError(
            "A unit has no such setting.",
            where=[f"{name}={settings[name]!r}" for name in unknown],
            why=f"the settings are {', '.join(SETTINGS)}.",
            do='revise(model, {"remat": "full"})',
        )
    UnitPolicy().changed(root.mesh, **settings)
    if settings and not has_inner_units(model):
        raise AnnotationError(
            "The model has no units whose settings could be changed.",
            where=", ".join(f"{name}={value!r}" for name, value in settings.items()),
            why="its root is the only unit, and it is gathered as a whole.",
            do="js.fully_shard(model, units=Block, mesh=mesh)",
        )
    layers = set(map(id, repeated_layers(model)))
    units: dict[Path, Unit] = {}
    for path, module in nested_units(model):
        units[path] = unit = record_of(module)
        if path and unit.placement.gathered:
            mine = {k: v for k, v in settings.items() if id(module) in layers or _is_for_all(k, v)}
            units[path] = dataclasses.replace(unit, policy=unit.policy.changed(unit.mesh, **mine))
    store_plan(model, root.plan, units)


def has_inner_units(model: nnx.Module) -> bool:
    """Whether there are units inside the root whose settings can be changed."""
    return any(path and record_of(module).placement.gathered for path, module in nested_units(model))


def _is_for_all(name: str, value: Any) -> bool:
    return name == "prefetch" or (name == "reshard_after_forward" and value is False)


def repeated_layers(model: nnx.Module) -> dict[nnx.Module, int]:
    """The units that repeat, with the number of layers in each: innermost units that occur several times, or stacks."""
    inner = [module for path, module in nested_units(model) if path and _is_innermost(module)]
    inner = [module for module in inner if record_of(module).placement.gathered]
    depths = {module: max((leaf.placement.layers for leaf in record_of(module).members), default=1) for module in inner}
    count = collections.Counter(map(plain_class, inner))
    repeated = {module: depth for module, depth in depths.items() if count[plain_class(module)] > 1 or depth > 1}
    return repeated or depths


def _is_innermost(module: nnx.Module) -> bool:
    return all(not path for path, _ in nested_units(module)) and any(True for _ in occurrences(module))
