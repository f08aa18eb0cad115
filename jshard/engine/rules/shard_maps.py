"""A user's `shard_map` inside the model: over the data axes, over others, or over both.

The region is manual over the data axes already. So a `shard_map` there runs on the parts that the shards have:

    over data axes                the body is called as it is, on each shard's part by the specs
    over other axes               a `shard_map` over those, whose body is partitioned like any program
    over both                     a `shard_map` over the others, around the body as it is
"""

import math
from collections.abc import Callable, Iterable, Sequence

import jax
from jax import lax
from jax.extend.core import JaxprEqn, Literal, Var
from jax.sharding import PartitionSpec as P

from jshard import _compat
from jshard.engine.rules.building_blocks import find_free_dim, run_in_global_view
from jshard.engine.rules.registry import OperandStates, Partitioner, rule
from jshard.engine.rules.values import State, Value, array_bytes, arrays_of, in_states, states_of, type_of, with_arrays
from jshard.errors import CallError
from jshard.plans.mesh import FSDP
from jshard.plans.model_axes import axes_of, spec_over

DimAxes = tuple[tuple[str, ...], ...]
"""For each dim the axes that it is split over, outermost first; those of degree 1 split nothing and are left out."""


@rule("shard_map", operands=OperandStates.ANY)
def shard_map(p: Partitioner, eqn: JaxprEqn, operands: list[Value]) -> list[Value]:
    """Runs the user's `shard_map` on a data shard."""
    _check_mesh(eqn)
    _check_nothing_is_unreduced(eqn)
    return _InnerShardMap(p, eqn).run(operands)


def _check_mesh(eqn: JaxprEqn) -> None:
    """Raises if the `shard_map` is over an axis that the model's mesh has not, or has with another degree."""
    inner_degrees = dict(eqn.params["mesh"].shape)
    degrees = dict(jax.sharding.get_abstract_mesh().shape)
    # By degree, not by the mesh itself: the mesh around has the region's axes manual, and so is another object.
    wrong = []
    for axis in eqn.params["newly_manual_axes"]:
        if degrees.get(axis) != inner_degrees[axis]:
            wrong.append(f"{axis} of degree {inner_degrees[axis]}")
    if wrong:
        mesh = ", ".join(f"{axis}={degree}" for axis, degree in degrees.items())
        do = "jax.shard_map(f, mesh=mesh, ...)  # the mesh that js.fully_shard was given"
        if FSDP in inner_degrees:  # only then can parameters be sharded over it
            do = f"js.fully_shard(model, mesh=mesh)  # the mesh of the shard_map; or, in the model:\n{do}"
        raise CallError(
            "A shard_map inside the model uses a different mesh than the model.",
            where=_compat.user_place(eqn),
            why=f"it is over {', '.join(sorted(wrong))}; the model is over {mesh}.",
            do=do,
        )


def _check_nothing_is_unreduced(eqn: JaxprEqn) -> None:
    """Raises if a spec says that an array is a sum over axes that nothing has taken."""
    for spec in (*eqn.params["in_specs"], *eqn.params["out_specs"]):
        if getattr(spec, "unreduced", None) or getattr(spec, "reduced", None):
            raise CallError(
                "A shard_map inside the model has an unreduced argument or result.",
                where=_compat.user_place(eqn),
                why="an unreduced array is a sum not computed yet, and the engine cannot cut one into data shards.",
                do="y = jax.lax.psum(y, axis)  # in the function, and out_specs without unreduced",
            )


class _InnerShardMap:
    """A `shard_map` on a data shard.

    Attributes:
        p: the partitioner.
        eqn: the equation.
        degrees: the degree of each axis of the mesh.
        data_axes: the region's axes, without those of degree 1.
        other_axes: the axes of the `shard_map` that are not the region's.
        is_over_data: whether it is over axes of the region, too.
        operand_axes: for each operand, the axes that its dims are split over.
        result_axes: for each result.
    """

    def __init__(self, p: Partitioner, eqn: JaxprEqn) -> None:
        # The mesh around, not that of the equation: its axes say which are manual already.
        mesh = jax.sharding.get_abstract_mesh()
        self.p = p
        self.eqn = eqn
        self.degrees = dict(mesh.shape)
        manual = self._splitting(eqn.params["newly_manual_axes"])
        self.data_axes = self._splitting(p.axes)
        self.other_axes = tuple(axis for axis in mesh.axis_names if axis in manual and axis not in p.axes)
        self.is_over_data = not set(manual).isdisjoint(self.data_axes)
        self.operand_axes = self._axes_of_all(eqn.params["in_specs"], eqn.invars)
        self.result_axes = self._axes_of_all(eqn.params["out_specs"], eqn.outvars)

    def _splitting(self, axes: Iterable[str]) -> tuple[str, ...]:
        """Returns the axes that split something: those of a degree above 1."""
        return tuple(axis for axis in axes if self.degrees[axis] > 1)

    def _axes_of_all(self, specs: Sequence[P], atoms: Sequence[Var | Literal]) -> list[DimAxes]:
        """Returns the axes of operands or results, by their specs."""
        return [self._axes_of_dims(spec, type_of(atom).ndim) for spec, atom in zip(specs, atoms, strict=True)]

    def _axes_of_dims(self, spec: P, ndim: int) -> DimAxes:
        """Returns the axes of each dim by a spec."""
        dims: list[tuple[str, ...]] = []
        for entry in spec:
            axes = self._splitting(axes_of(entry))
            self._check_order(spec, axes)
            dims.append(axes)
        dims += [()] * (ndim - len(dims))  # a spec may be shorter: the last dims are whole
        return tuple(dims)

    def _check_order(self, spec: P, dim: tuple[str, ...]) -> None:
        """Raises for a dim that is split over a data axis inside another axis: a shard's part is not contiguous.

        P(("tensor", "fsdp")), 2 x 2 devices    rows 0-1 | 2-3 | 4-5 | 6-7
        on fsdp 0                               0-1 and 4-5, which is no part of a split along the dim
        """
        # Sorted stably: the axes of each kind keep their order, which the message shows.
        data_first = tuple(sorted(dim, key=self._is_other_axis))
        if list(map(self._is_other_axis, dim)) != list(map(self._is_other_axis, data_first)):
            raise CallError(
                "A shard_map inside the model splits a dim over a data axis inside another axis.",
                where=_compat.user_place(self.eqn),
                why=f"{spec}: over {' then '.join(dim)}, where the batch is split over {', '.join(self.data_axes)}.",
                do=f"jax.P({data_first!r})  # the data axes first",
            )

    def _is_other_axis(self, axis: str) -> bool:
        return axis not in self.data_axes

    def run(self, operands: list[Value]) -> list[Value]:
        """Runs the body: as it is if it is over data axes, else split like any program."""
        # Without JAX's types of varying axes: the region's own `shard_map` is not checked either, and its values have
        # none.
        body = _compat.without_varying(self.eqn.params["jaxpr"], ())
        if self.is_over_data:
            return self._run_on_parts(body, operands)
        return self._run_partitioned(body, operands)

    def _run_on_parts(self, body: Callable[..., Sequence[jax.Array]], operands: list[Value]) -> list[Value]:
        # Not partitioned: its collectives over data axes are between the parts as the user has cut them.
        arrays = [self._part_by_spec(v, axes) for v, axes in zip(operands, self.operand_axes, strict=True)]
        results = self._over_other_axes(body)(*arrays)
        return [self._value_of_parts(x, axes) for x, axes in zip(results, self.result_axes, strict=True)]

    def _run_partitioned(self, body: Callable[..., Sequence[jax.Array]], operands: list[Value]) -> list[Value]:
        # The body computes the sums that it needs: partial operands stay partial. Others enter as arrays, because the
        # body is traced on its own.
        values = self._materialize_but_partial(operands)
        values = self._split_on_other_dims(values, self.operand_axes)
        states: list[State] = []

        def run_on_shard(*xs: jax.Array) -> list[jax.Array]:
            results = run_in_global_view(self.p, body, with_arrays(values, xs))
            results = self._materialize_but_partial(results)
            results = self._split_on_other_dims(results, self.result_axes)
            # Filled when the `shard_map` below traces this function: before its results are wrapped.
            states[:] = states_of(results)
            return arrays_of(results)

        results = self._over_other_axes(run_on_shard)(*arrays_of(values))
        return in_states(results, states)

    def _materialize_but_partial(self, values: Sequence[Value]) -> list[Value]:
        """Returns values as arrays that cross into the body or out of it. A partial value crosses as its part."""
        return [v if v.is_partial else self.p.materialize(v) for v in values]

    def _over_other_axes(self, body: Callable[..., Sequence[jax.Array]]) -> Callable[..., Sequence[jax.Array]]:
        """Returns the body in a `shard_map` over the axes that are not manual yet."""
        if not self.other_axes:
            return body
        return jax.shard_map(
            body,
            in_specs=tuple(self._specs_over_other_axes(self.operand_axes)),
            out_specs=self._specs_over_other_axes(self.result_axes),
            axis_names=set(self.other_axes),
            check_vma=False,
        )

    def _specs_over_other_axes(self, axes_of_values: Sequence[DimAxes]) -> list[P]:
        return [spec_over(self.other_axes, axes_of_dims) for axes_of_dims in axes_of_values]

    def _split_on_other_dims(self, values: Sequence[Value], axes: Sequence[DimAxes]) -> list[Value]:
        return [self._split_on_other_dim(v, axes_of_dims) for v, axes_of_dims in zip(values, axes, strict=True)]

    def _split_on_other_dim(self, value: Value, axes_of_dims: DimAxes) -> Value:
        """Returns a value split along a dim that is not split over the user's axes: those are outside the region's.

        JAX passes what backward needs of a `shard_map` with all its axes on dim 0, which are the examples as a rule.
        """
        if not value.is_split or not axes_of_dims[value.dim]:
            return value
        # Any dim that no axis of the user splits is split over the region's axes alone.
        taken = [dim for dim, axes in enumerate(axes_of_dims) if axes]
        free_dim = find_free_dim(self.p, self.p.full_shape(value), taken)
        if free_dim is None:
            return self.p.whole(value)
        return self.p.split(value, free_dim)

    def _part_by_spec(self, value: Value, axes_of_dims: DimAxes) -> jax.Array:
        """Returns a shard's part of a value by its spec, over the data axes."""
        data_axes = self._data_axes_of_dims(axes_of_dims)
        dim = self._dim_over_all_data(data_axes)
        if dim is not None:
            return self.p.split(value, dim).x
        # Some of the data axes, or several dims: no state says that. The part is cut from the whole.
        x = self.p.whole(value).x
        # One dim after the other. Axes of one dim are in the order of its spec, outermost first, as is their index.
        for dim, axes in data_axes.items():
            size = x.shape[dim] // self._num_parts(axes)
            x = lax.dynamic_slice_in_dim(x, lax.axis_index(axes) * size, size, dim)
        return x

    def _value_of_parts(self, x: jax.Array, axes_of_dims: DimAxes) -> Value:
        """Returns the value of which a shard has a part by its spec; what is not split is the same on all shards."""
        data_axes = self._data_axes_of_dims(axes_of_dims)
        dim = self._dim_over_all_data(data_axes)
        if dim is not None:
            return Value(x, dim)
        for dim, axes in data_axes.items():
            # No state says that a value is split over some of the data axes.
            with self.p.sends("whole", self.eqn, array_bytes(x) * self._num_parts(axes)):
                x = lax.all_gather(x, axes, axis=dim, tiled=True)
        return Value(x)

    def _data_axes_of_dims(self, axes_of_dims: DimAxes) -> dict[int, tuple[str, ...]]:
        """Returns the data axes of the dims that are split over any."""
        data_axes = {}
        for dim, axes in enumerate(axes_of_dims):
            axes_of_dim = tuple(axis for axis in axes if axis in self.data_axes)
            if axes_of_dim:
                data_axes[dim] = axes_of_dim
        return data_axes

    def _dim_over_all_data(self, data_axes: dict[int, tuple[str, ...]]) -> int | None:
        """Returns the dim that is split over all data axes, if it is one: then it is split like in the region."""
        if list(data_axes.values()) != [self.data_axes]:
            return None
        (dim,) = data_axes
        return dim

    def _num_parts(self, axes: Sequence[str]) -> int:
        return math.prod(self.degrees[axis] for axis in axes)
