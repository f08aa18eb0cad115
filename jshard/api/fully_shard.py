"""`fully_shard`: makes modules units, with parameters sharded over the mesh."""

import dataclasses
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeVar

import flax.linen as nn
import jax
from flax import nnx

from jshard import _compat
from jshard.engine.region import route
from jshard.errors import AnnotationError
from jshard.linen.annotated_class import annotated
from jshard.plans import checks
from jshard.plans.buffers import apart, as_array, placed_apart
from jshard.plans.homes import settle_in
from jshard.plans.memories import home_in, sharding_of
from jshard.plans.mesh import AnyMesh, check_mesh, is_concrete
from jshard.plans.model_axes import Entry
from jshard.plans.padding import Padding, logical, logical_shape, padding_of, store
from jshard.plans.placement import Placement, PlacementPolicy
from jshard.plans.plan import Leaf, make_plan
from jshard.plans.policies import Fallback, MixedPrecision, UnitPolicy
from jshard.plans.remat import AUTO, Remat
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

UnitChoices = UnitChoice | Sequence[UnitChoice] | Mapping[UnitChoice, Mapping[str, object]] | None
"""One choice of units or several; with settings for each, of Linen modules only."""

# Numbers for lists of modules that form one unit: modules with one number are one row of the plan.
_groups = itertools.count()


def fully_shard(
    module: M,
    *,
    mesh: AnyMesh,
    units: UnitChoices = None,
    reshard_after_forward: bool | int | None = None,
    mixed_precision: MixedPrecision | None = None,
    remat: Remat = "auto",
    prefetch: int | str = 1,
    placement: PlacementPolicy | None = None,
    fallback: Fallback = "warn",
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
            `"dots"`, `"offload"`, `"torchtitan_selective"`, `"minimal_flash"`), `"names:NAME,..."` for values named by
            `jax.ad_checkpoint.checkpoint_name`, or a policy from `jax.checkpoint_policies`. No policy keeps gathered
            parameters. `"auto"`, the default, chooses when a gradient is traced, by an estimate of time and memory: for
            layers in a loop the fastest of `"none"`, `"dots"` and `"full"` that fits the device, for layers called one
            after another `"none"` if it fits, and `"none"` for the root and other units; `js.explain` shows what was
            chosen, and why. `"offload"` keeps in host memory the values that `"dots_with_no_batch_dims"` keeps; a
            policy offloads activations by name. With `units=` it applies to the units and not to the root, where it
            would run every unit three times; for both, annotate the units one by one, then the root.
        prefetch: how early the unit is gathered. A number n: while the n-th unit before it computes, and no earlier;
            the same in backward, in reverse order. 0: when it is needed. A budget such as `"512MiB"`: as early as
            the bytes gathered but not yet used stay within it. `"compiler"`: the compiler chooses, without a bound.
        placement: a `js.PlacementPolicy`, to override the default of sharding the largest divisible dim.
        fallback: how to treat an operation that has no form on one data shard, so that every device computes it for
            the whole batch: `"warn"`, from 1 MiB and 1 % of the parameters' traffic on; or `"error"`. Set on the root.

    Returns:
        The same object, annotated in place; for a Linen model, an annotated copy.

    Raises:
        AnnotationError: an argument does not fit the model (one message lists all bad parameters), or the model has
            float arrays but no `nnx.Param`.
        MeshError: the mesh has no `fsdp` axis, has Manual axes, or has no host memory to offload to.

    Examples:
        >>> for block in model.blocks:
        ...     block = js.fully_shard(block, mesh=mesh)
        >>> model = js.fully_shard(model, mesh=mesh)
    """
    mesh = check_mesh(mesh)
    placement = checks.check_placement(placement)
    policy = UnitPolicy().changed(
        mesh,
        reshard_after_forward=reshard_after_forward,
        mixed_precision=mixed_precision,
        remat=remat,
        prefetch=prefetch,
        fallback=fallback,
    )
    # The filter is hashable: records of units are keys of caches.
    unit = Unit(mesh, policy, dataclasses.replace(placement, ignored=as_filter(placement.ignored)))
    # Before any module is changed: an error here leaves the model plain.
    checks.check_unit(unit)
    root = unit
    if units is not None:
        # Of a root this means "none": a policy of its own would run every unit three times.
        root = dataclasses.replace(unit, policy=dataclasses.replace(policy, remat=AUTO))
    if isinstance(module, nn.Module):
        return annotated(module, root, units, unit)
    modules: list[Any] = list(module) if isinstance(module, (list, tuple, nnx.List)) else [module]
    checks.check_modules(modules)
    checks.check_has_parameters(modules)
    _annotate_all(modules, root, _choose_units(modules, units), unit)
    return module


def _choose_units(modules: list[nnx.Module], units: UnitChoices) -> list[nnx.Module]:
    """Returns the submodules selected by the one-call form, inner ones first."""
    if units is None:
        return []
    if isinstance(units, Mapping):
        raise AnnotationError(
            "Only Linen modules accept settings for each choice of units.",
            where=f"fully_shard({type(modules[0]).__name__}, units={{...}})",
            why="the submodules of an nnx model already exist, and can be annotated one by one.",
            do='js.fully_shard(model.blocks[0], mesh=mesh, remat="full")  # then the root',
        )
    # A pattern is a sequence of letters, too.
    choices = list(units) if isinstance(units, Sequence) and not isinstance(units, str) else [units]
    chosen_modules = []
    kinds: dict[str, str] = {}  # classes of the submodules, each with the path of one
    for path, submodule in _submodules(modules):
        kinds.setdefault(type(submodule).__name__, path)
        if any(chosen(choice, path, submodule) for choice in choices):
            chosen_modules.append(submodule)
    if not chosen_modules:
        raise checks.no_unit_chosen(type(modules[0]).__name__, repr(units), kinds, "blocks/*")
    return chosen_modules


def _submodules(modules: list[nnx.Module]) -> Iterator[tuple[str, nnx.Module]]:
    """Yields the modules inside, inner ones first, each with its path; a list of modules is not one."""
    for module in modules:
        for path, node in nnx.iter_graph(module):  # inner nodes first
            is_submodule = len(path) > 0 and isinstance(node, nnx.Module)
            if is_submodule and not isinstance(node, nnx.List):
                yield dotted(path), node


def _annotate_all(modules: list[nnx.Module], root: Unit, chosen_modules: list[nnx.Module], unit: Unit) -> None:
    """Annotates the chosen submodules, then the modules; if one fails, none is annotated.

    Args:
        modules: what the user annotates.
        root: the record of these.
        chosen_modules: submodules, inner ones first.
        unit: the record of those.
    """
    if len(modules) > 1:
        root = dataclasses.replace(root, policy=dataclasses.replace(root.policy, group=next(_groups)))
    # Inner ones first: a plan is made with the units inside, whose records must exist.
    records = [(module, unit) for module in chosen_modules] + [(module, root) for module in modules]
    done: list[nnx.Module] = []
    try:
        for module, record in records:
            _annotate(module, record)
            done.append(module)
        ignored = unit.placement.ignored
        # `as_filter` returns False for None: no parameter is ignored.
        if ignored is not False:
            checks.check_patterns_used(ignored, _paths_from_units(modules))
    except AnnotationError:
        # Their arrays stay as they were placed: a later annotation places them again.
        for module in done:
            detach(module)
        raise


def _paths_from_units(modules: list[nnx.Module]) -> set[str]:
    """Returns the paths of all parameters, each from every unit around it."""
    paths = set()
    for module in modules:
        for _, unit_module in nested_units(module):
            paths |= {dotted(path) for _, path, _ in occurrences(unit_module)}
    return paths


def _annotate(module: nnx.Module, record: Unit) -> None:
    """Makes one module a unit, plans it with the units inside, and places the arrays."""
    checks.check_new_unit(module, record)
    checks.check_variables(module)
    # Before the plan, which reads shapes and dtypes.
    _replace_numbers_by_arrays(module)
    # A unit before its plan is made: the plan is that of all units in the module, itself included.
    attach(module, dataclasses.replace(record, kind=plain_class(module).__name__), route)
    units = _units_seen_from(module)
    leaves = leaves_of(module)
    try:
        plan = make_plan(leaves, units)
    except AnnotationError:
        detach(module)
        raise
    optimizer = None  # shared by all units: once one is made for the model, each of them knows
    if any(leaf.placement.padding for leaf in plan.leaves):
        line = "optimizer = js.shard_optimizer(model, tx); optimizer.update(model, grads)"
        optimizer = LogicalOptimizer(line)
    store_plan(module, plan, {path: dataclasses.replace(unit, optimizer=optimizer) for path, unit in units.items()})
    # Of all parameters of this module: two units inside it may hold one array.
    placed: set[int] = set()
    for leaf, planned in zip(leaves.values(), plan.leaves, strict=True):
        _place(leaf.variable, planned.placement, record.mesh)
        _keep_apart(leaf.variable, placed)


def _replace_numbers_by_arrays(module: nnx.Module) -> None:
    """Puts arrays in place of the numbers of Python and NumPy in parameters, as Flax's own transforms do."""
    for _, variable in walk(module):
        if isinstance(variable, nnx.Param):
            leaves, tree = jax.tree.flatten(variable.get_raw_value())
            arrays = list(map(as_array, leaves))
            if any(array is not leaf for array, leaf in zip(arrays, leaves, strict=True)):
                variable.set_raw_value(jax.tree.unflatten(tree, arrays))


def _keep_apart(variable: nnx.Param, placed: set[int]) -> None:
    """Copies a value that another parameter holds too, as `nnx.clone` leaves it: one step could not donate both.

    Args:
        variable: a parameter.
        placed: ids of the values of other parameters, which keep them alive; that of this one is added.
    """
    value = variable.get_raw_value()
    if id(value) in placed and isinstance(value, jax.Array) and not _compat.is_tracer(value):
        value = apart([value, value])[1]
        variable.set_raw_value(value)
    placed.add(id(value))


def _units_seen_from(module: nnx.Module) -> dict[Path, Unit]:
    """Returns the records of the units in a module, by path, as seen from the enclosing module."""
    units = units_in(module)
    allowed_from_root = []  # only the root's patterns are matched when it checks the whole model
    for path, unit in units.items():
        is_root = not path
        name = "" if unit.placement.gathered or is_root else dotted(path)
        units[path] = dataclasses.replace(unit, nested=unit.nested or not is_root, name=name)
        for pattern in unit.placement.allow_replicated:
            allowed_from_root.append(pattern if is_root else f"{dotted(path)}/{pattern}")
    root = units[()]
    placement = dataclasses.replace(root.placement, allow_replicated=allowed_from_root)
    units[()] = dataclasses.replace(root, placement=placement)
    return units


@dataclasses.dataclass(frozen=True)
class _Use:
    """One of the places of a parameter in a model; a tied one has several."""

    variable: nnx.Param
    path: Path
    around: tuple[Path, ...]  # the units around it, outermost first


def leaves_of(module: nnx.Module) -> dict[Path, Leaf]:
    """Returns the parameters of a module whose units have records, as a plan takes them."""
    # By identity: a module that is used in two places is one unit, with its first path.
    unit_paths = {id(unit_module): path for path, unit_module in nested_units(module)}
    # By identity, in tree order: a tied parameter is one leaf, at its first path.
    uses: dict[int, list[_Use]] = {}
    for variable, path, unit_modules in occurrences(module):
        around = tuple(unit_paths[id(unit_module)] for unit_module in unit_modules)
        uses.setdefault(id(variable), []).append(_Use(variable, path, around))
    return {uses_of_one[0].path: _leaf(uses_of_one) for uses_of_one in uses.values()}


def _leaf(uses: list[_Use]) -> Leaf:
    variable = uses[0].variable
    return Leaf(
        shape=logical_shape(variable),
        dtype=variable.get_raw_value().dtype,
        spec=_model_axes(variable),
        aliases=tuple(use.path for use in uses[1:]),
        around=tuple(use.around for use in uses),
        variable=variable,
    )


def _model_axes(variable: nnx.Param) -> tuple[Entry, ...]:
    """Returns the mesh axes named by the model's own `out_sharding` metadata, such as a tensor axis."""
    return tuple(variable.get_metadata("out_sharding", None) or ())


def _place(variable: nnx.Param, placement: Placement, mesh: AnyMesh) -> None:
    """Stores the value of a parameter as planned: padded, sharded, in its memory."""
    padding = Padding.of(placement)
    # A unit inside, annotated before, may have stored it with another padding: the root can allow it to be replicated.
    as_planned = variable if padding_of(variable) == padding else logical(variable)
    value = as_planned.get_raw_value()
    if padding is not None:
        value = padding.pad(value)
    if _model_axes(variable):  # Flax would place it, and its copies in the optimizer, by the model's axes alone
        variable.set_metadata(eager_sharding=False)
    sharding = sharding_of(mesh, placement.partition_spec, on_host=placement.on_host)
    # An abstract model: its shapes carry the shardings to `shard_init` and to a restore.
    if isinstance(value, jax.ShapeDtypeStruct):
        value = jax.ShapeDtypeStruct(value.shape, value.dtype, sharding=sharding)
    # A value of a trace is in no memory that it could be moved from.
    elif is_concrete(mesh) and not _compat.is_tracer(value):
        value = placed_apart(value, sharding)
    store(variable, padding, value)
    # Last: the home is that of the stored array, and moves the value where it is elsewhere.
    settle_in(variable, home_in(mesh, placement))
