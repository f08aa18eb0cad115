"""`js.plan`: the plan that an annotation has stored with a model."""

import dataclasses
from typing import Any

from flax import nnx

from jshard._errors import AnnotationError
from jshard._nnx import dotted, nested_units, occurrences, plain_class, unit_of
from jshard._shard_plan import ShardPlan
from jshard._shard_plan import resharded as resharded  # for the engines


def plan(model: Any, *, wrt: Any = nnx.Param) -> ShardPlan:
    """Where every parameter of an annotated model lies; the model may be concrete or abstract.

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
    of_its_own = getattr(type(model), "_jshard_plan", None)  # of a model whose parameters lie outside of it
    if of_its_own is not None:
        return of_its_own(wrt)
    root = unit_of(model)
    if root is None or root.plan is None:
        raise root_forgotten(model)
    is_trained, trained = nnx.filterlib.to_predicate(wrt), {}
    for variable, path, _ in occurrences(model):
        trained.setdefault(id(variable), (path, is_trained(path, variable)))
    there = dict(trained.values())
    if unplanned := [path for path in there if path not in root.by_path]:
        raise AnnotationError(
            "The model has parameters that the annotation never saw.",
            where=[f"{plain_class(model).__name__}: {dotted(path)}" for path in unplanned],
            why="they were added after fully_shard.",
            do="change the model first, then annotate it: js.fully_shard(model, mesh=mesh).",
        )
    held = [leaf for leaf in root.plan.leaves if leaf.keys[0] in there]
    leaves = tuple(dataclasses.replace(leaf, trained=there[leaf.keys[0]]) for leaf in held)
    return dataclasses.replace(root.plan, leaves=leaves)


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
    if getattr(type(model), "_jshard_plan", None) is None:
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
