"""A call of a bound Linen module, shown to the engine as a call of an nnx module.

Flax's own lifting takes the call out of its scopes, as it does for `nn.remat`: a function of variables and keys. Here
these become the variables of a small nnx module, a `View`, whose method puts them into fresh scopes and runs the
Linen method. So a unit is a unit, and a region is a region, for both kinds of module.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import nnx
from flax.core import lift, meta
from flax.core.scope import LazyRng, Scope
from flax.linen import transforms

from jshard._linen.layout import Leaf
from jshard._linen.padded import padding_in
from jshard._linen.values import described, flat, raw_of
from jshard._nnx import Path, dotted
from jshard._padded import store
from jshard.engine.linen_values import Shard, as_arrays, held_in
from jshard.engine.overwritten import COLLECTION, Overwritten
from jshard.engine.reads import hold_shard

_PARAMS = "params"
_KINDS: dict[str, type[nnx.Variable]] = {
    _PARAMS: nnx.Param,
    "batch_stats": nnx.BatchStat,
    "cache": nnx.Cache,
    "intermediates": nnx.Intermediate,
    "perturbations": nnx.Cache,  # split along the batch too
    COLLECTION: Overwritten,
}


def kind_of(collection: str) -> type[nnx.Variable]:
    """The class of the variables of a collection."""
    return _KINDS.get(collection, nnx.Variable)


class View(nnx.Module):
    """The variables and keys of a lifted call, each under its path as text."""


@functools.cache
def _view_class(kind: type) -> type[View]:
    """A class of the name of the Linen class, for messages."""
    metaclass: Any = type(View)
    return metaclass(kind.__name__, (View,), {"__module__": kind.__module__})


@dataclasses.dataclass(frozen=True)
class _Place:
    """Where a variable of a view belongs: which scope, which collection, which path in it."""

    scope: int
    collection: str
    path: Path
    name: str

    @property
    def is_parameter(self) -> bool:
        return self.collection == _PARAMS


@dataclasses.dataclass(eq=False)
class Lifted:
    """A call of a bound Linen module, out of its scopes.

    Args:
        core: the call as a function of scopes and arguments.
        scope_fn: makes scopes of variables and keys, and `repack` takes variables out of them again.
        scopes: the outer scopes that are lifted, none inside another.
        counted: all scopes that the call sees: each counts the keys that it made.
        groups: the variables of each scope.
        rngs: the keys of each scope.
        prefix: path of the annotated module.
    """

    core: Callable[..., Any]
    scope_fn: Callable[..., Any]
    repack: Callable[..., Any]
    scopes: Sequence[Scope]
    counted: Sequence[Scope]
    groups: Sequence[Mapping[str, Any]]
    rngs: Sequence[Mapping[str, LazyRng]]
    prefix: Path

    def __post_init__(self) -> None:
        self._counts = [_copied(scope.rng_counters) for scope in self.counted]
        self._places = {p.name: (p, leaf) for p, leaf in self._variables(self.groups)}
        self._new: dict[str, tuple[_Place, Any]] = {}
        self._keys = {
            f"{i}:rng:{name}": (i, name, rng) for i, rngs in enumerate(self.rngs) for name, rng in rngs.items()
        }

    def _variables(self, groups: Sequence[Mapping[str, Any]]) -> Iterator[tuple[_Place, Any]]:
        for i, collections in enumerate(groups):
            at = tuple(self.scopes[i].path)
            for collection, tree in collections.items():
                for path, leaf in flat(tree):
                    whole = (*at, *path)
                    own = _starts(whole, self.prefix)
                    name = dotted(whole[len(self.prefix) :] if own else ("..", *whole))
                    yield _Place(i, collection, path, name if collection == _PARAMS else f"{collection}:{name}"), leaf

    @property
    def leaves(self) -> dict[Path, Leaf]:
        """The parameters inside the annotated module, by path from it."""
        found = {(*self.scopes[p.scope].path, *p.path): leaf for p, leaf in self._places.values() if p.is_parameter}
        inside = {path[len(self.prefix) :]: leaf for path, leaf in found.items() if _starts(path, self.prefix)}
        return {path: described(leaf, path) for path, leaf in inside.items()}

    @property
    def params(self) -> list[str]:
        """The names of the parameters."""
        return [name for name, (place, _) in self._places.items() if place.is_parameter]

    def view(self, kind: type) -> View:
        """The call's variables and keys as an nnx module."""
        view = _view_class(kind)()
        for name, (place, leaf) in self._places.items():
            variable = _made(place, leaf)
            if isinstance(leaf, Shard):
                hold_shard(variable, leaf.stored.placement, leaf.stored.mesh)
            elif (padding := padding_in(leaf)) is not None:
                store(variable, padding, raw_of(leaf))
            setattr(view, name, variable)
        for name, (_, stream, rng) in self._keys.items():
            setattr(view, name, nnx.RngKey(_typed(rng.rng), tag=stream))
        return view

    def run(self, view: View, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Runs the call on what a view holds, and gives the view what it changed."""
        for scope, counts in zip(self.counted, self._counts, strict=True):
            _restore(scope.rng_counters, counts)  # every trace of the call makes the same keys
        groups: list[dict[str, Any]] = [{name: {} for name in group} for group in self.groups]
        for name, (place, _) in self._places.items():
            _insert(groups[place.scope][place.collection], place.path, held_in(getattr(view, name)))
        rngs: list[dict[str, LazyRng]] = [{} for _ in self.rngs]
        for name, (i, stream, rng) in self._keys.items():
            rngs[i][stream] = LazyRng(_untyped(getattr(view, name).get_raw_value(), rng.rng), rng.suffix)
        scopes = self.scope_fn((tuple(groups),), (tuple(rngs),))
        out = self.core(scopes, *args, **kwargs)
        self._take(view, self.repack(scopes)[0])
        return out

    def _take(self, view: View, groups: Sequence[Mapping[str, Any]]) -> None:
        for place, leaf in self._variables(groups):
            variable = getattr(view, place.name, None)
            if variable is None:
                setattr(view, place.name, _made(place, leaf))
                self._new[place.name] = place, None
            elif variable.get_raw_value() is not raw_of(leaf):
                variable.set_raw_value(as_arrays(raw_of(leaf)))

    def results(self, view: View) -> tuple:
        """The variables that a call may change, as they are now, in the form that Flax's lifting takes back."""
        groups: list[dict[str, Any]] = [{} for _ in self.scopes]
        for name, (place, leaf) in (self._places | self._new).items():
            if self.scopes[place.scope].is_mutable_collection(place.collection) and hasattr(view, name):
                raw = getattr(view, name).get_raw_value()
                same = raw is raw_of(leaf) or place.is_parameter
                value = leaf if same else leaf.replace_boxed(raw) if isinstance(leaf, meta.AxisMetadata) else raw
                _insert(groups[place.scope].setdefault(place.collection, {}), place.path, value)
        return (tuple(groups),)


Run = Callable[[Lifted, tuple, dict[str, Any]], tuple[Any, View]]


def lifted_call(
    module: nn.Module, function: Callable, args: tuple, kwargs: dict[str, Any], *, prefix: Path, run: Run
) -> Any:
    """Calls a method of a bound module out of its scopes.

    Args:
        module: the module.
        function: the plain method, as the class defines it.
        args: its arguments after self.
        kwargs: its keyword arguments.
        prefix: path of the annotated module.
        run: gets the lifted call with its arguments, and returns the result and the view it ran on.
    """

    def transform(core: Callable) -> Callable:
        def transformed(scopes: Sequence[Scope], *args: Any, **kwargs: Any) -> Any:
            def inner(
                scope_fn: Callable, repack: Callable, groups: Any, rngs: Any, *args: Any, **kwargs: Any
            ) -> tuple[Any, tuple]:
                lifted = Lifted(core, scope_fn, repack, _outermost(scopes), scopes, groups[0], rngs[0], prefix)
                out, view = run(lifted, args, kwargs)
                return out, lifted.results(view)

            return lift.pack(inner, (True,), (True,), (True,), enable_kwargs=True)(scopes, *args, **kwargs)

        return transformed

    def jshard_unit(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return function(module, *args, **kwargs)

    if hasattr(function, "compact"):
        jshard_unit.compact = True  # type: ignore[attr-defined]
    return transforms.decorator_lift_transform(transform, jshard_unit)(module, *args, **kwargs)


def _made(place: _Place, leaf: Any) -> nnx.Variable:
    return kind_of(place.collection)(as_arrays(raw_of(leaf)))


def _outermost(scopes: Sequence[Scope]) -> list[Scope]:
    """The scopes that lie in no other of them, as `lift.pack` takes them."""
    unique = dict.fromkeys(scopes)

    def inside(scope: Scope) -> bool:
        while scope.parent is not None:
            scope = scope.parent
            if scope in unique:
                return True
        return False

    return [scope for scope in unique if not inside(scope)]


def _starts(path: Path, start: Path) -> bool:
    return path[: len(start)] == start


def _insert(tree: dict[str, Any], path: Path, leaf: Any) -> None:
    for key in path[:-1]:
        tree = tree.setdefault(key, {})
    tree[path[-1]] = leaf


def _typed(key: Any) -> Any:
    return key if jnp.issubdtype(key.dtype, jax.dtypes.prng_key) else jax.random.wrap_key_data(key)


def _untyped(key: Any, like: Any) -> Any:
    return key if jnp.issubdtype(like.dtype, jax.dtypes.prng_key) else jax.random.key_data(key)


def _copied(counts: Mapping[Any, Any]) -> dict[Any, Any]:
    return {k: _copied(v) if isinstance(v, dict) else v for k, v in counts.items()}


def _restore(counts: dict[Any, Any], saved: Mapping[Any, Any]) -> None:
    """Sets counters back in place: other scopes hold the same dicts."""
    for key in list(counts):
        if key not in saved:
            del counts[key]
    for key, value in saved.items():
        if isinstance(value, dict):
            _restore(counts.setdefault(key, {}), value)
        else:
            counts[key] = value
