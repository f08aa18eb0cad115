"""Runs a program that was traced in global view on one data shard, inside a `jax.shard_map`.

Every value has a state: whole on every shard, split along a dim, or partial (the sum over the shards is the value). The
table in `jshard.engine.rules` defines for each primitive how states flow. Operations without a rule, or rejected by
theirs, are computed whole from gathered operands: slower, never wrong, and noted with the bytes and the user's line.
"""

import contextlib
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend import core as jex

from jshard import _compat
from jshard.engine import rules
from jshard.engine.mixing import Mixing, scope_of
from jshard.engine.rules import PARTIAL, Eqn, MadeFrom, Shard, State, Value, known
from jshard.engine.rules import loops as loops  # enters rules into the table, like the others here
from jshard.engine.rules import opaque as opaque
from jshard.engine.rules.reductions import flops
from jshard.engine.unsplit import LocalProduct, shapes_of
from jshard.errors import CallError, FourPartError

if TYPE_CHECKING:
    from jshard.engine.rules.loops import Scan


class Partitioner:
    """Interprets programs on one data shard, inside a `shard_map` over axes such as ("replica", "fsdp").

    A constant with a dim of one of `batch_sizes` is kept as a shard where it is stored; without any, only if a split of
    it was requested.
    """

    def __init__(self, axes: tuple[str, ...], degree: int, *, batch_sizes: Iterable[int] = ()) -> None:
        self.axes, self.degree = tuple(axes), degree
        self.batch_sizes = set(batch_sizes)
        self.noted: list[Mixing | LocalProduct] = []  # in trace order; retraced operations are noted again
        self.settled: dict[Any, tuple[Any, list[State]]] = {}  # the states of the carries of loops
        self.random_bits: dict[Any, Any] = {}  # functions of a key that make a shard of them
        self.trips = 1  # product of the lengths of the loops around
        self.is_last = True  # its result is run; else it is partitioned once more, over an inner axis
        self.is_quiet = degree == 1  # nothing is sent, or it is no mixing of the model's own: not noted, and unnamed
        self._computed: Eqn | None = None  # the last equation whose operands were gathered, to compute it whole
        self._around: list[Eqn] = []  # the equation that is run, last, and those whose programs it is part of
        self._needed_elsewhere: set[Any] | None = None  # of the program that is run; None: all of it

    @property
    def eqn(self) -> Eqn | None:
        """The equation that is run."""
        return self._around[-1] if self._around else None

    # ---- hooks
    def read(self, value: Value) -> Value:
        """A value for a rule to compute with. A subclass gathers stored shards here."""
        return value

    def store(self, value: Value, state: Shard) -> Value:
        """A value as stored shards; implemented by subclasses that have them."""
        raise NotImplementedError

    def store_row(self, value: Value, stack: Any) -> Value:
        """One row of a variable that a loop stacks; a subclass stores those of gradients as shards."""
        return value

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

    def run_body(self, jaxpr: Any, consts: Any, args: list[Value], *, gradients: Collection[int] = ()) -> list[Value]:
        """Runs the program of a loop's body or of a branch, in its own trace."""
        return self.run(jaxpr, consts, args, gradients=gradients)

    @contextlib.contextmanager
    def sends(self, kind: Any, eqn: Eqn | None, size: int) -> Iterator[None]:
        """A context for tracing a collective of the equation: it is recorded, and named in the compiled program."""
        if self.is_quiet:
            yield
            return
        with jax.named_scope(scope_of(self.note(kind, eqn, size), size)):
            yield

    def note(self, kind: Any, eqn: Eqn | None, size: int) -> Mixing:
        """Records data that the equation needs from other shards; None: the program's results need it."""
        operation = "output" if eqn is None else eqn.primitive.name
        one = Mixing(kind, operation, self.place(eqn), 1, size * self.trips)
        self.noted += [] if self.is_quiet else [one]
        return one

    def _note_product(self, eqn: Eqn, values: list[Value], found: list[Value]) -> None:
        """Records a product, except one of constants, of which each device computes its part."""
        if (work := flops(eqn)) and found[0].source is None:
            is_whole = self._computed is eqn or not any(v.is_split or v.is_partial for v in values)
            share = 1 if is_whole else self.degree
            where, shapes = (self.place(eqn), shapes_of(eqn)) if is_whole else ("", ())
            self.noted.append(LocalProduct(work * self.trips / share, is_whole, where, shapes))

    @property
    def moved(self) -> list[Mixing]:
        """The recorded communication."""
        return [one for one in self.noted if isinstance(one, Mixing)]

    def place(self, eqn: Eqn | None) -> str:
        """The user's line of an equation, or of a call of a function that the library traced once; empty if unknown."""
        places = (_compat.user_place(e) for e in (eqn, *reversed(self._around)) if e is not None)
        return next(filter(None, places), "")

    # ---- collectives, which note nothing
    @property
    def shard(self) -> jax.Array:
        """Number of this shard."""
        return lax.axis_index(self.axes)

    def gather(self, x: Any, dim: int) -> Any:
        """All shards of an array, one after the other along `dim`."""
        if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            bits = lax.all_gather(jax.random.key_data(x), self.axes, axis=dim, tiled=True)
            return jax.random.wrap_key_data(bits, impl=jax.random.key_impl(x))
        return lax.all_gather(x, self.axes, axis=dim, tiled=True)

    def sum(self, x: Any) -> Any:
        """The sum over the shards, on every shard."""
        return lax.psum(x, self.axes)

    def move(self, x: Any, old: int, new: int) -> Any:
        """An array split along another dim than before."""
        return lax.all_to_all(x, self.axes, split_axis=new, concat_axis=old, tiled=True)

    def cut(self, x: Any, dim: int) -> Any:
        """This shard's part of a whole array."""
        size = x.shape[dim] // self.degree
        return lax.dynamic_slice_in_dim(x, self.shard * size, size, dim)

    # ---- conversions
    def whole(self, value: Value) -> Value:
        """The value, whole on every shard."""
        value = self.read(value)
        if value.state is None:
            return value
        if None not in value.done:
            kind, times = ("sum", 1) if value.is_partial else ("whole", self.degree)
            with self.sends(kind, self.eqn, value.bytes * times):
                x = self.sum(value.x) if value.is_partial else self.gather(value.x, value.dim)
            value.done[None] = Value(x)
        return value.done[None]

    def settle(self, value: Value) -> Value:
        """A partial value summed; any other as it is."""
        return self.whole(value) if value.is_partial else value

    def split(self, value: Value, dim: int) -> Value:
        """The value split along `dim`, whose size divides by the degree."""
        value = self.read(value)
        if value.state == dim:
            return value
        if dim not in value.done:
            value.done[dim] = Value(self._part(value, dim), dim)
        return value.done[dim]

    def _part(self, value: Value, dim: int) -> Any:
        if value.is_partial and None not in value.done:
            with self.sends("sum", self.eqn, value.bytes // self.degree):
                return lax.psum_scatter(value.x, self.axes, scatter_dimension=dim, tiled=True)
        if value.is_split and None not in value.done:
            with self.sends("move", self.eqn, value.bytes):
                return self.move(value.x, value.dim, dim)
        if value.is_known:
            if (x := known.shard_of(self, value, dim)) is not None:
                return x
            self.note("made whole", self.eqn, value.bytes)
        return self.cut(self.whole(value).x, dim)

    def partial(self, value: Value) -> Value:
        """A whole value as a partial one: the first shard has it, the others zeros."""
        if value.is_partial:
            return value
        x = self.whole(value).x
        return Value(jnp.where(self.shard == 0, x, jnp.zeros_like(x)), PARTIAL)

    def in_state(self, value: Value, state: State) -> Value:
        """The value in a state; a split value is not made partial."""
        if isinstance(state, int):
            return self.split(value, state)
        if isinstance(state, Shard):
            return self.store(value, state)
        return self.whole(value) if state is None else self.partial(value)

    # ---- values known without data, where a trace begins or ends
    def land(self, value: Value, skip: Sequence[int] = ()) -> Value:
        """A value as an array that leaves this trace; see `known.land`."""
        return known.land(self, value, skip)

    def cross(self, value: Value) -> Value:
        """A value for an inner trace: one that is cheap to compute enters as its equations."""
        return value if value.is_known and not known.is_costly(value) else self.land(value)

    # ---- programs
    def run(self, jaxpr: Any, consts: Any, args: list[Value], *, gradients: Collection[int] = ()) -> list[Value]:
        """Runs a program, traced in global view; returns its results in any state.

        Of `gradients` (results, by number) what flows to them alone is summed at the end.
        """
        env: dict[Any, Value] = {}
        env.update(zip(jaxpr.constvars, (c if isinstance(c, Value) else Value(c) for c in consts), strict=True))
        env.update(zip(jaxpr.invars, args, strict=True))

        def look_up(atom: Any) -> Value:
            if isinstance(atom, jex.Literal):
                aval: Any = atom.aval
                return Value(np.asarray(atom.val, aval.dtype))  # no tracer, so that rules can read it
            return env[atom]

        outer = self._needed_elsewhere
        self._needed_elsewhere = rules.needed_elsewhere(jaxpr, gradients) if gradients else None
        try:
            for eqn in jaxpr.eqns:
                with _compat.running(eqn):
                    found = self._guarded(eqn, [look_up(atom) for atom in eqn.invars])
                env.update(zip(eqn.outvars, found, strict=True))
        finally:
            self._needed_elsewhere = outer
        return [look_up(atom) for atom in jaxpr.outvars]

    def is_for_gradients(self, variable: Any) -> bool:
        """Whether a variable of the program that is run flows to gradients alone."""
        return self._needed_elsewhere is not None and variable not in self._needed_elsewhere

    def _guarded(self, eqn: Eqn, values: list[Value]) -> list[Value]:
        """An equation's results, checked; errors name the user's line."""
        self._around.append(eqn)
        try:
            found = self.equation(eqn, values)
            for atom, value in zip(eqn.outvars, found, strict=True):
                shape = self.full_shape(value)
                assert value.is_stored or shape == tuple(atom.aval.shape), (
                    f"{eqn.primitive.name}: state {value.state} of {value.shape} for {atom.aval.str_short()}, "
                    f"from {[(v.state, v.shape) for v in values]}; {eqn.params}"
                )
                if self.batch_sizes and value.is_split and eqn.primitive.name in ("reshape", "gather", "dot_general"):
                    self.batch_sizes.add(shape[value.dim])  # a dim may also be a part of it
            self._note_product(eqn, values, found)
            return found
        except FourPartError:
            raise
        except Exception as error:
            whole_or_sum = {None: "whole", PARTIAL: "a sum over the shards"}
            how = lambda v: f"split along dim {v.dim}" if v.is_split else whole_or_sum.get(v.state, "stored")
            given = zip(eqn.invars, values, strict=True)
            operands = ", ".join(f"{a.aval.str_short()} ({how(v)})" for a, v in given) or "none"
            raise CallError(
                f"The engine cannot run {eqn.primitive.name} on a data shard.",
                where=self.place(eqn) or "in the model",
                why=f"{type(error).__name__}: {error}\noperands: {operands}, on {self.degree} data shards.",
                do="with js.global_view(): loss, grads = step(...)  # the model as one program\n"
                "Please report this, with the lines above.",
            ) from error
        finally:
            self._around.pop()

    def equation(self, eqn: Eqn, values: list[Value]) -> list[Value]:
        """Runs one equation."""
        name = eqn.primitive.name
        if name not in rules.KEEP_STORED:
            values = [self.read(value) for value in values]
        if name in rules.TAKE_PARTIAL:
            found = rules.RULES[name](self, eqn, values)
            assert found is not None, f"{name} has no result"
            return found
        if any(v.is_partial for v in values) and (found := rules.apply_linear(self, eqn, values)) is not None:
            return found
        if not any(v.is_split for v in values):
            values = [self.whole(v) for v in values]
            found = self.bind(eqn, [v.x for v in values])
            if not known.can_be_known(eqn, values):
                return [Value(x) for x in found]
            return [Value(x, source=MadeFrom(eqn, values, k) if x.ndim else None) for k, x in enumerate(found)]
        if name not in rules.CONVERT_PARTIAL:
            values = [self.settle(v) for v in values]
        found = rules.RULES[name](self, eqn, values) if name in rules.RULES else None
        return self._computed_whole(eqn, values) if found is None else found

    def _computed_whole(self, eqn: Eqn, values: list[Value]) -> list[Value]:
        """Results from gathered operands, split again where they are as large as the batch."""
        self._computed = eqn
        found = [Value(x) for x in self.bind(eqn, [self.whole(v).x for v in values])]
        sizes = {} if eqn.effects else {v.dim: self.full_shape(v)[v.dim] for v in values if v.is_split}
        for k, value in enumerate(found):
            dims = [d for d, n in enumerate(value.shape) if n in sizes.values()]
            if dims:  # the one that operands were split along, or one of that size
                dim = next((d for d in dims if sizes.get(d) == value.shape[d]), dims[0])
                found[k] = self.split(value, dim)
                found[k].done[None] = value
        return found

    def bind(self, eqn: Eqn, xs: Sequence[Any], **params: Any) -> list[Any]:
        """Runs the primitive of an equation on other arrays, with some parameters changed."""
        for name in ("sharding", "out_sharding"):
            if name in eqn.params:
                params = {name: None, **params}
        found = eqn.primitive.bind(*xs, **eqn.primitive.get_bind_params({**eqn.params, **params}))
        return list(found) if eqn.primitive.multiple_results else [found]

    def full_shape(self, value: Value) -> tuple[int, ...]:
        """Shape of the value in global view."""
        return tuple(n * self.degree if i == value.state else n for i, n in enumerate(value.shape))

    def divides(self, size: int) -> bool:
        """Whether a dim of this size can be split."""
        return size > 0 and size % self.degree == 0
