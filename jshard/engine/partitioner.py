"""Runs a program that was traced in global view on one data shard, inside a `jax.shard_map`.

Every value has a state: whole on every shard, split along a dim, or partial (the sum over the shards is the value). The
registry in `jshard.engine.rules` defines for each primitive how states flow. Operations without a rule, or rejected by
theirs, are computed whole from gathered operands: slower, never wrong, and recorded with the bytes and the user's line.

An equation is tried in this order, and the first that returns results has run it:

    a rule for operands in any state      calls, loops, collectives, effects
    linear in its partial operands        on the parts, whose sum is left open
    no operand is split                   whole, on every device
    a rule for split operands             on the shards
    anything else                         whole, on every device, from gathered operands
"""

import contextlib
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import Jaxpr, JaxprEqn, Literal, Var

from jshard import _compat
from jshard.engine.mixing import Mixing, scope_of

# Importing a module of rules enters them into the registry.
from jshard.engine.rules import along_dims as along_dims
from jshard.engine.rules import collectives as collectives
from jshard.engine.rules import data_free, linear
from jshard.engine.rules import effects as effects
from jshard.engine.rules import elementwise as elementwise
from jshard.engine.rules import indexing as indexing
from jshard.engine.rules import loops as loops
from jshard.engine.rules import opaque_calls as opaque_calls
from jshard.engine.rules import reductions as reductions
from jshard.engine.rules import shapes as shapes
from jshard.engine.rules import shard_maps as shard_maps
from jshard.engine.rules.products import flops
from jshard.engine.rules.registry import OperandStates, record_of
from jshard.engine.rules.values import PARTIAL, Provenance, Shard, State, Value, arrays_of, type_of
from jshard.engine.unsplit import LocalProduct, shapes_of
from jshard.errors import CallError, FourPartError
from jshard.plans.staged_loops import LoopOnStages, PlaceTransfer

if TYPE_CHECKING:
    from jshard.engine.rules.loops import CarryStates, Scan

TraceRecord: TypeAlias = Mixing | LocalProduct | LoopOnStages | PlaceTransfer
"""What a trace leaves of an operation, for reports and warnings."""


class Partitioner:
    """Interprets programs on one data shard, inside a `shard_map` over axes such as ("replica", "fsdp").

    Attributes:
        axes: the axes over which values are split.
        degree: the number of shards.
        batch_sizes: sizes of dims of the batch. A constant with such a dim is kept as a shard where it is stored;
            without any, only if a split of it was requested.
        records: what was sent, multiplied and run on stages, in trace order. What is traced again is recorded again.
        carry_states: the states of the carries of loops that have been traced.
        random_bits: functions of a key that draw one shard's bits, by their width, shape and split dim.
        trips: product of the lengths of the loops around: a collective in them is recorded as so many.
        is_last: whether its result is run. Else it is partitioned once more, over an inner axis.
        is_quiet: whether nothing is recorded, as nothing is sent, or what is sent is no mixing of the model's own.
    """

    def __init__(self, axes: tuple[str, ...], degree: int, *, batch_sizes: Iterable[int] = ()) -> None:
        self.axes = tuple(axes)
        self.degree = degree
        self.batch_sizes = set(batch_sizes)
        self.records: list[TraceRecord] = []
        self.carry_states: dict[Hashable, CarryStates] = {}
        self.random_bits: dict[tuple, Callable[[jax.Array], jax.Array]] = {}
        self.trips = 1
        self.is_last = True
        self.is_quiet = degree == 1
        self._gathered_eqn: JaxprEqn | None = None  # the last whose operands were gathered, to compute it whole
        self._eqn_stack: list[JaxprEqn] = []  # the equation that runs, last, and those whose programs it is part of
        # Of the program that runs, what does not flow to its gradients alone; None: all of it.
        self._needed_elsewhere: set[Var] | None = None

    @property
    def eqn(self) -> JaxprEqn | None:
        """The equation that runs."""
        if not self._eqn_stack:
            return None
        return self._eqn_stack[-1]

    # ---- hooks

    def read(self, value: Value) -> Value:
        """Returns a value for a rule to compute with. A subclass gathers stored shards here."""
        return value

    def store(self, value: Value, state: Shard) -> Value:
        """Returns a value as stored shards; implemented by subclasses that have them."""
        raise NotImplementedError

    def store_row(self, value: Value, stack: Var) -> Value:
        """Returns one row of a variable that a loop stacks; a subclass stores those of gradients as shards."""
        return value

    def may_have_examples(self, value: Value) -> bool:
        """Returns whether a constant with a dim as large as the batch is taken for one with a dim for the examples."""
        return True  # if it has none, who reads it gathers it

    @contextlib.contextmanager
    def own_trace(self) -> Iterator[None]:
        """A context for a function that is traced on its own: what is computed inside must not be used after it.

        It covers all of the function, also conversions of the results of `run_body`. A subclass that caches arrays
        keeps those of the inner trace apart.
        """
        yield

    def run_scan(self, scan: "Scan") -> list[Value]:
        """Runs a loop; a subclass may choose another form of it."""
        return scan.run()

    def run_body(
        self, jaxpr: Jaxpr, consts: Sequence[jax.Array | Value], args: list[Value], *, gradients: Collection[int] = ()
    ) -> list[Value]:
        """Runs the program of a loop's body or of a branch, in its own trace."""
        return self.run(jaxpr, consts, args, gradients=gradients)

    # ---- records

    @contextlib.contextmanager
    def sends(self, kind: str, eqn: JaxprEqn | None, size: int) -> Iterator[None]:
        """A context for tracing a collective of the equation: it is recorded, and named in the compiled program.

        Args:
            kind: see `Mixing.kind`.
            eqn: the equation that needs data from other shards; None: the program's results need it.
            size: bytes of the result on one device.
        """
        if self.is_quiet:
            yield
            return
        with jax.named_scope(scope_of(self.record(kind, eqn, size), size)):
            yield

    def record(self, kind: str, eqn: JaxprEqn | None, size: int) -> Mixing:
        """Records data that an equation needs from other shards; the arguments are those of `sends`."""
        operation = "output" if eqn is None else eqn.primitive.name
        mixing = Mixing(kind, operation, self.place(eqn), 1, size * self.trips)
        if not self.is_quiet:
            self.records.append(mixing)
        return mixing

    def _record_product(self, eqn: JaxprEqn, operands: list[Value], results: list[Value]) -> None:
        """Records a product, except one of constants, of which each device computes its part."""
        num_flops = flops(eqn)
        if not num_flops or results[0].provenance is not None:
            return
        # Split operands do not say that each shard multiplies its part: they may have been gathered for this equation.
        is_on_shards = any(v.is_split or v.is_partial for v in operands)
        if is_on_shards and self._gathered_eqn is not eqn:
            product = LocalProduct(num_flops * self.trips / self.degree, False, "", ())
        else:
            product = LocalProduct(num_flops * self.trips, True, self.place(eqn), shapes_of(eqn))
        self.records.append(product)

    @property
    def moved(self) -> list[Mixing]:
        """The recorded communication."""
        return [record for record in self.records if isinstance(record, Mixing)]

    @property
    def products(self) -> list[LocalProduct]:
        """The recorded products."""
        return [record for record in self.records if isinstance(record, LocalProduct)]

    def place(self, eqn: JaxprEqn | None) -> str:
        """Returns the user's line of an equation, or of a call of a function that the library traced once.

        It is empty if unknown.
        """
        # From the inside out: an equation of one of the library's own functions has no line of the user, and one of the
        # calls around it has.
        for candidate in (eqn, *reversed(self._eqn_stack)):
            if candidate is None:
                continue
            place = _compat.user_place(candidate)
            if place:
                return place
        return ""

    # ---- collectives, which record nothing

    @property
    def shard(self) -> jax.Array:
        """Number of this shard."""
        return lax.axis_index(self.axes)

    def gather(self, x: jax.Array, dim: int) -> jax.Array:
        """Returns all shards of an array, one after the other along `dim`."""
        if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):  # by their data, whose first dims are those of the keys
            bits = lax.all_gather(jax.random.key_data(x), self.axes, axis=dim, tiled=True)
            return jax.random.wrap_key_data(bits, impl=jax.random.key_impl(x))
        return lax.all_gather(x, self.axes, axis=dim, tiled=True)

    def sum(self, x: jax.Array) -> jax.Array:
        """Returns the sum over the shards, on every shard."""
        return lax.psum(x, self.axes)

    def move(self, x: jax.Array, old: int, new: int) -> jax.Array:
        """Returns an array split along another dim than before."""
        return lax.all_to_all(x, self.axes, split_axis=new, concat_axis=old, tiled=True)

    def local_slice(self, x: jax.Array, dim: int) -> jax.Array:
        """Returns this shard's part of a whole array."""
        size = x.shape[dim] // self.degree
        return lax.dynamic_slice_in_dim(x, self.shard * size, size, dim)

    # ---- conversions: each is computed once, and kept with the value

    def whole(self, value: Value) -> Value:
        """Returns a value, whole on every shard."""
        value = self.read(value)
        if value.state is None:
            return value
        if None not in value.conversions:
            value.conversions[None] = Value(self._combined(value))
        return value.conversions[None]

    def _combined(self, value: Value) -> jax.Array:
        """Returns the whole array of a partial or a split value."""
        if value.is_partial:
            with self.sends("sum", self.eqn, value.bytes):
                return self.sum(value.x)
        with self.sends("whole", self.eqn, value.bytes * self.degree):
            return self.gather(value.x, value.dim)

    def reduce_partial(self, value: Value) -> Value:
        """Returns a partial value summed; any other as it is."""
        if value.is_partial:
            return self.whole(value)
        return value

    def split(self, value: Value, dim: int) -> Value:
        """Returns a value split along `dim`, whose size divides by the degree."""
        value = self.read(value)
        if value.state == dim:
            return value
        if dim not in value.conversions:
            value.conversions[dim] = Value(self._part(value, dim), dim)
        return value.conversions[dim]

    def _part(self, value: Value, dim: int) -> jax.Array:
        """Returns this shard's part of a value along a dim, by whatever sends least."""
        is_combined = None in value.conversions  # then a slice of that sends nothing
        # A reduce-scatter sends half of what an all-reduce does; an all-to-all sends what a shard has, a gather all.
        if value.is_partial and not is_combined:
            with self.sends("sum", self.eqn, value.bytes // self.degree):
                return lax.psum_scatter(value.x, self.axes, scatter_dimension=dim, tiled=True)
        if value.is_split and not is_combined:
            with self.sends("move", self.eqn, value.bytes):
                return self.move(value.x, value.dim, dim)
        if value.is_data_free:
            x = data_free.shard_of(self, value, dim)
            if x is not None:
                return x
            self.record("made whole", self.eqn, value.bytes)
        return self.local_slice(self.whole(value).x, dim)

    def partial(self, value: Value) -> Value:
        """Returns a whole value as a partial one: the first shard has it, the others zeros."""
        if value.is_partial:
            return value
        # Not an equal share for each shard: integers have none, and floats would be rounded.
        x = self.whole(value).x
        return Value(jnp.where(self.shard == 0, x, jnp.zeros_like(x)), PARTIAL)

    def in_state(self, value: Value, state: State) -> Value:
        """Returns a value in a state; a split value is not made partial."""
        if isinstance(state, int):
            return self.split(value, state)
        if isinstance(state, Shard):
            return self.store(value, state)
        if state is None:
            return self.whole(value)
        return self.partial(value)

    # ---- values known without data, where a trace begins or ends

    def materialize(self, value: Value, skip: Sequence[int] = ()) -> Value:
        """Returns a value as an array that leaves this trace; see `data_free.materialize`."""
        return data_free.materialize(self, value, skip)

    def for_inner_trace(self, value: Value) -> Value:
        """Returns a value for an inner trace: one that is cheap to compute enters as its equations."""
        if value.is_data_free and not data_free.is_costly(value):
            return value
        return self.materialize(value)

    # ---- programs

    def run(
        self, jaxpr: Jaxpr, consts: Sequence[jax.Array | Value], args: list[Value], *, gradients: Collection[int] = ()
    ) -> list[Value]:
        """Runs a program, traced in global view; returns its results in any state.

        Args:
            jaxpr: the program.
            consts: its constants: arrays, or values.
            args: its arguments.
            gradients: positions of results that are gradients. What flows to them alone is summed at the end.
        """
        # In the order of the user's program, which is also that in which collectives are emitted.
        variables: dict[Var, Value] = {}
        for variable, const in zip(jaxpr.constvars, consts, strict=True):
            variables[variable] = const if isinstance(const, Value) else Value(const)
        variables.update(zip(jaxpr.invars, args, strict=True))

        def look_up(atom: Var | Literal) -> Value:
            if isinstance(atom, Literal):
                return Value(np.asarray(atom.val, type_of(atom).dtype))  # no tracer, so that rules can read it
            return variables[atom]

        def values_of(atoms: Sequence[Var | Literal]) -> list[Value]:
            return [look_up(atom) for atom in atoms]

        # The analysis is of one program's variables: that of the program around it applies again when this one ends.
        outer = self._needed_elsewhere
        self._needed_elsewhere = linear.needed_elsewhere(jaxpr, gradients) if gradients else None
        try:
            for eqn in jaxpr.eqns:
                # Under the names and the line that the equation has, which profiles, audits and errors show.
                with _compat.running(eqn):
                    results = self._run_checked(eqn, values_of(eqn.invars))
                variables.update(zip(eqn.outvars, results, strict=True))
        finally:
            self._needed_elsewhere = outer
        return values_of(jaxpr.outvars)  # in any state: who needs another one converts

    def is_for_gradients(self, variable: Var) -> bool:
        """Returns whether a variable of the program that runs flows to gradients alone."""
        return self._needed_elsewhere is not None and variable not in self._needed_elsewhere

    # ---- equations

    def _run_checked(self, eqn: JaxprEqn, operands: list[Value]) -> list[Value]:
        """Returns an equation's results, checked; errors name the user's line."""
        self._eqn_stack.append(eqn)
        try:
            results = self.equation(eqn, operands)
            for variable, result in zip(eqn.outvars, results, strict=True):
                self._check_shape(eqn, operands, variable, result)
                # Constants of the batch's new size are kept as shards from here on, like those of the old one.
                if self.batch_sizes and result.is_split and record_of(eqn).resizes_batch:
                    self.batch_sizes.add(self.full_shape(result)[result.dim])
            self._record_product(eqn, operands, results)
            return results
        except FourPartError:
            raise
        except Exception as error:
            raise self._failure(eqn, operands, error) from error
        finally:
            self._eqn_stack.pop()

    def _check_shape(self, eqn: JaxprEqn, operands: list[Value], variable: Var, result: Value) -> None:
        """Raises if the array of a result has not the shape of its state: a rule is wrong."""
        if result.is_stored or result.is_staged:
            return
        result_type = type_of(variable)
        assert self.full_shape(result) == tuple(result_type.shape), (
            f"{eqn.primitive.name}: state {result.state} of {result.shape} for {result_type.str_short()}, "
            f"from {[(v.state, v.shape) for v in operands]}; {eqn.params}"
        )

    def _failure(self, eqn: JaxprEqn, operands: list[Value], error: Exception) -> CallError:
        """Returns the error of an equation that cannot run."""
        texts = []
        for atom, operand in zip(eqn.invars, operands, strict=True):
            texts.append(f"{type_of(atom).str_short()} ({_describe_state(operand)})")
        operands_text = ", ".join(texts) or "none"
        return CallError(
            f"The engine cannot run {eqn.primitive.name} on a data shard.",
            where=self.place(eqn) or "in the model",
            why=f"{type(error).__name__}: {error}\noperands: {operands_text}, on {self.degree} data shards.",
            do="with js.global_view(): loss, grads = step(...)  # the model as one program\n"
            "Please report this, with the lines above.",
        )

    def equation(self, eqn: JaxprEqn, operands: list[Value]) -> list[Value]:
        """Runs one equation: see the order at the top of this file."""
        states = record_of(eqn).operand_states
        # Loops and calls pass stored shards on unread: the program inside may be a unit's, which gathers them in time.
        if states is not OperandStates.ANY_OR_STORED:
            operands = [self.read(v) for v in operands]
        if states.is_always_called:
            results = self._apply_rule(eqn, operands)
            # Its operands were not made ready for any other way to compute it.
            assert results is not None, f"{eqn.primitive.name} has no result"
            return results
        # Before the rules: they would sum first, and the sum of a gradient would be taken more than once on its way.
        if any(v.is_partial for v in operands):
            results = linear.apply_linear(self, eqn, operands)
            if results is not None:
                return results
        if not any(v.is_split for v in operands):
            return self._compute_whole(eqn, operands)
        return self._compute_on_shards(eqn, operands)

    def _apply_rule(self, eqn: JaxprEqn, operands: list[Value]) -> list[Value] | None:
        rule = record_of(eqn).rule
        if rule is None:
            return None
        return rule(self, eqn, operands)

    def _compute_on_shards(self, eqn: JaxprEqn, operands: list[Value]) -> list[Value]:
        """Runs an equation on operands some of which are split: by its rule, if that knows how."""
        if record_of(eqn).operand_states is not OperandStates.PARTIAL_BESIDE_SPLIT:
            # A rule that reads the array of a partial operand would take a part for the sum.
            operands = [self.reduce_partial(v) for v in operands]
        results = self._apply_rule(eqn, operands)
        if results is not None:
            return results
        return self._compute_gathered(eqn, operands)

    def _compute_whole(self, eqn: JaxprEqn, operands: list[Value]) -> list[Value]:
        """Runs an equation on operands none of which is split. A result known without data remembers its equation."""
        operands = [self.whole(v) for v in operands]
        results = self._bind_whole(eqn, operands)
        if data_free.is_result_data_free(eqn, operands):
            for index, result in enumerate(results):
                if result.ndim:  # a scalar is never split
                    result.provenance = Provenance(eqn, operands, index)
        return results

    def _compute_gathered(self, eqn: JaxprEqn, operands: list[Value]) -> list[Value]:
        """Runs an equation on gathered operands. Results as large as the batch are split again."""
        self._gathered_eqn = eqn
        results = self._bind_whole(eqn, [self.whole(v) for v in operands])
        if eqn.effects:
            return results
        # Left whole, all that follows would be computed for the whole batch on every device as well: one operation
        # without a rule would cost the rest of the model.
        split_sizes = {v.dim: self.full_shape(v)[v.dim] for v in operands if v.is_split}
        return [self._split_again(result, split_sizes) for result in results]

    def _bind_whole(self, eqn: JaxprEqn, operands: list[Value]) -> list[Value]:
        """Runs the primitive of an equation on whole operands; the results are whole as well."""
        return [Value(x) for x in self.bind(eqn, arrays_of(operands))]

    def _split_again(self, result: Value, split_sizes: dict[int, int]) -> Value:
        """Splits a whole result like the operands were: along the same dim, or any other of that size.

        Args:
            result: a whole value.
            split_sizes: the dims along which operands were split, and their sizes.
        """
        dim = _dim_like_operands(result.shape, split_sizes)
        if dim is None:
            return result
        split = self.split(result, dim)
        split.conversions[None] = result  # who reads it whole need not gather it
        return split

    def bind(self, eqn: JaxprEqn, xs: Sequence[jax.Array], **params: object) -> list[jax.Array]:
        """Runs the primitive of an equation on other arrays, with some parameters changed."""
        for name in ("sharding", "out_sharding"):
            if name in eqn.params:
                params = {name: None, **params}  # it is of the mesh of the trace, and of the whole array
        results = eqn.primitive.bind(*xs, **eqn.primitive.get_bind_params({**eqn.params, **params}))
        if eqn.primitive.multiple_results:
            return list(results)
        return [results]

    def full_shape(self, value: Value) -> tuple[int, ...]:
        """Returns the shape of a value in global view."""
        shape = list(value.shape)
        if value.is_split:
            shape[value.dim] *= self.degree
        return tuple(shape)

    def divides(self, size: int) -> bool:
        """Returns whether a dim of this size can be split."""
        return size > 0 and size % self.degree == 0


def _dim_like_operands(shape: tuple[int, ...], split_sizes: dict[int, int]) -> int | None:
    """Returns the dim of a result that operands were split along; else the first of such a size; None without one."""
    dim_of_size = None
    for dim, size in enumerate(shape):
        if split_sizes.get(dim) == size:
            return dim
        if dim_of_size is None and size in split_sizes.values():
            dim_of_size = dim
    return dim_of_size


def _describe_state(value: Value) -> str:
    """Returns the words for a state in an error."""
    if value.is_split:
        return f"split along dim {value.dim}"
    if value.is_partial:
        return "a sum over the shards"
    if value.is_stored:
        return "stored"
    if value.is_staged:
        return "on pipeline stages"
    return "whole"
