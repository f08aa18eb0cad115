"""Inspection of traces: axes, tracers, equations and their origin; programs without types of varying axes."""

import contextlib
import inspect
import itertools
import pathlib
import sysconfig
import traceback
import warnings
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any

import flax
import jax
import numpy as np
import optax
from jax import core, lax
from jax.extend import core as jex
from jax.extend import source_info_util
from jax.interpreters import partial_eval
from jax.sharding import PartitionSpec as P

import jshard


def trace_context() -> Hashable:
    """The settings on which a trace depends: precision of products, dtype promotion, the mesh in use, user contexts.

    If the private name is gone, each result is different.
    """
    try:
        from jax._src.config import trace_context as context
    except ImportError:
        return object()
    return context()


def varying_axes(x: Any) -> frozenset[str]:
    """Manual mesh axes over which a value inside `shard_map` differs."""
    return frozenset(jax.typeof(x).manual_axis_type.varying)


def manual_axes() -> frozenset[str]:
    """Mesh axes that are manual in the current context: not empty inside a `shard_map`."""
    return frozenset(jax.sharding.get_abstract_mesh().manual_axes)


def automatic_axes() -> dict[str, int]:
    """Axes of the mesh in use over which the compiler splits arrays, with their degrees, without those of degree 1."""
    mesh = jax.sharding.get_abstract_mesh()
    return {axis: mesh.shape[axis] for axis in mesh.axis_names if axis not in mesh.manual_axes and mesh.shape[axis] > 1}


def has_devices() -> bool:
    """Whether this process has initialised its devices; True if the private module has changed."""
    try:
        from jax._src import xla_bridge

        return xla_bridge.backends_are_initialized()
    except (ImportError, AttributeError):
        return True


def abstract_device() -> Any:
    """Kind, platform and number of cores of the devices of the mesh in use; None without a mesh or devices."""
    return jax.sharding.get_abstract_mesh().abstract_device


def is_tracer(x: Any) -> bool:
    """Whether a value is traced, not concrete."""
    return isinstance(x, core.Tracer)


def is_concrete(x: Any) -> bool:
    """Whether the numbers of a value are known, also to code that is differentiated; False for a tracer if unknown."""
    if not is_tracer(x):
        return True
    try:
        from jax._src.core import is_concrete as has_numbers
    except ImportError:
        return False
    return has_numbers(x)


def in_trace() -> bool:
    """Whether operations are being traced, whatever their operands."""
    return is_tracer(jax.numpy.zeros(()))


def bind(eqn: Any, values: list[Any]) -> list[Any]:
    """Runs an equation of a jaxpr on other values; returns its results."""
    found = eqn.primitive.bind(*values, **eqn.primitive.get_bind_params(eqn.params))
    return list(found) if eqn.primitive.multiple_results else [found]


def equation_setting(eqn: Any) -> Hashable:
    """The name scopes around an equation, its effects, and the other settings at its trace."""
    return eqn.source_info.name_stack, eqn.ctx, frozenset(eqn.effects)


def is_same_rule(one: Any, other: Any) -> bool:
    """Whether two equations of `jax.custom_jvp` have the same rule, without static arguments; False if unknown."""
    rule = _custom_rule(one)
    return rule is not None and rule is _custom_rule(other)


def _custom_rule(memoized: Any) -> Any:
    """The user's function in an equation of `jax.custom_jvp`, two closures deep; None for any other form."""
    inside = lambda function, name: inspect.getclosurevars(function).nonlocals[name]
    try:
        rule = inside(inside(memoized.f, "fn"), "jvp")
        return rule.f if len(rule.transforms) == 1 else None  # one flattens its arguments; more hold static ones
    except (AttributeError, KeyError, TypeError):
        return None


def with_results(jaxpr: Any, outvars: list[Any]) -> Any:
    """A jaxpr with other results."""
    return jaxpr.replace(outvars=outvars, debug_info=jaxpr.debug_info._replace(result_paths=None))


def axis_names(jaxpr: Any) -> list[str]:
    """The axes of a vmap or a shard_map around that a program's collectives name."""
    return sorted(str(name) for e in jaxpr.effects if (name := getattr(e, "name", None)) is not None)


@contextlib.contextmanager
def equation_context(eqn: Any) -> Iterator[None]:
    """Inside it, traced operations have the lines, names and settings (compute_on, metadata) of an equation."""
    with running(eqn), eqn.ctx.manager:
        yield


def scan_arguments(eqn: Any) -> tuple[int, int]:
    """How many arguments of an equation of `jax.lax.scan` are constants, and how many are carried."""
    if "num_consts" in eqn.params:
        return eqn.params["num_consts"], eqn.params["num_carry"]
    consts, carry, _ = eqn.params["ft_in"].unpack()  # jax 0.12
    return len(list(consts)), len(list(carry))


@contextlib.contextmanager
def fast_shape_tracing() -> Iterator[None]:
    """Inside this context, building a large model abstractly takes time linear in its size.

    Flax reads the sharding of every traced RNG counter; jax raises an AttributeError whose text, which Flax discards,
    costs a search through the whole program so far: quadratic, two thirds of the time for 96 layers. There is no public
    switch; if the private name is gone, this does nothing.
    """
    try:
        from jax._src.interpreters.partial_eval import DynamicJaxprTracer as tracer

        search = tracer._origin_msg
    except (ImportError, AttributeError):
        yield
        return
    tracer._origin_msg = lambda self: ""
    try:
        yield
    finally:
        tracer._origin_msg = search


@contextlib.contextmanager
def running(eqn: Any) -> Iterator[None]:
    """Inside it, traced operations have the lines, names and settings of an equation; the mesh stays the same."""
    stack = source_info_util.current_name_stack() + eqn.source_info.name_stack
    with contextlib.ExitStack() as contexts:
        for context in _settings(eqn.ctx):
            contexts.enter_context(context)
        contexts.enter_context(source_info_util.user_context(eqn.source_info.traceback, name_stack=stack))
        yield


def _settings(context: Any) -> Iterator[Any]:
    """The settings of a user's `compute_on`, `set_xla_metadata` or `threefry_partitionable` around an equation."""
    if context.compute_type is not None:
        from jax._src.compute_on import extend_compute_type

        yield extend_compute_type(context.compute_type)
    if context.xla_metadata:
        from jax.experimental.xla_metadata import set_xla_metadata

        yield set_xla_metadata(**context.xla_metadata)
    partitionable: Any = jax.threefry_partitionable
    if context.threefry_partitionable != partitionable.value:
        yield partitionable(context.threefry_partitionable)


def threefry_bits(key: Any, bit_width: int, shape: tuple[int, ...]) -> Any:
    """Random bits from a key's data, equal to `jax.random.bits` of a threefry key."""
    from jax._src.random.threefry2x32 import threefry_random_bits

    return threefry_random_bits(key, bit_width, shape)


def without_dead_code(
    closed: Any, keep: Sequence[bool] = (), results_used: Sequence[bool] = ()
) -> tuple[Any, list[bool]]:
    """A program without the parts that its results do not need, and which of its inputs it then has.

    Args:
        closed: the program.
        keep: for each input, whether it is kept in any case; by default none.
        results_used: for each result, whether it is kept; by default all.
    """
    keep = keep or [False] * len(closed.jaxpr.invars)
    results_used = results_used or [True] * len(closed.jaxpr.outvars)
    jaxpr, used = partial_eval.dce_jaxpr(closed.jaxpr, list(results_used), list(keep))
    return jex.ClosedJaxpr(jaxpr, closed.consts), list(used)


# The origin of an equation, and the caller: JAX records the Python stack.

_LIBRARY = tuple(str(pathlib.Path(file or "").parent) for file in (jax.__file__, flax.__file__, jshard.__file__))
_MODELS = f"{_LIBRARY[-1]}/models/"
_PYTHON = sysconfig.get_path("stdlib")
_TRACING = (*_LIBRARY[:2], str(pathlib.Path(optax.__file__).parent))


def user_place(eqn: Any) -> str:
    """`file:line (function)` of the user's code that created an equation: the innermost frame outside the libraries.

    Empty without one.
    """
    found = (frame for frame in _frames(eqn.source_info) if not _is_library(frame.file_name))
    return next((f"{_line(frame)} ({frame.function_name})" for frame in found), "")


def failed_check(error: Any, *, below: str) -> str:
    """`file:line` of the user's code where a check of `jax.experimental.checkify` failed.

    Without user code, as in a loss of jshard, that of the innermost function outside jax, flax and optax; empty if that
    is inside a jitted function of JAX.

    Args:
        error: the error of the check.
        below: the file that traced the program; frames outside its own are not the model's.
    """
    inside = list(itertools.takewhile(lambda frame: frame.file_name != below, error.traceback_info.frames))
    named = [frame for frame in inside if not frame.file_name.startswith((*_TRACING, "<"))]
    users = [frame for frame in named if not _is_library(frame.file_name)]
    return next(map(_line, users or named), "")


def failed_line(error: BaseException) -> str:
    """`file:line (function)` of the user's code that raised an error: the innermost frame outside the libraries."""
    frames = traceback.extract_tb(error.__traceback__)
    users = [frame for frame in frames if not _is_no_users(frame.filename)]
    return f"{pathlib.Path(users[-1].filename).name}:{users[-1].lineno} ({users[-1].name})" if users else ""


def warn_user(text: str, category: type[Warning] = UserWarning) -> None:
    """Warns with the file and line of the user's calling code: the innermost outside jax, flax and jshard."""
    frames = [(frame.f_code.co_filename, line) for frame, line in traceback.walk_stack(None)]
    file, line = next((place for place in frames if not _is_no_users(place[0])), frames[-1])
    warnings.warn_explicit(text, category, file, line)


def users_line(error: BaseException) -> str:
    """The innermost line of user code that an error was raised through."""
    frames = traceback.extract_tb(error.__traceback__)
    frame = next((frame for frame in reversed(frames) if not _is_no_users(frame.filename)), frames[-1])
    return f"{pathlib.Path(frame.filename).name}:{frame.lineno}: {frame.line}"


def _is_no_users(file: str) -> bool:
    """Whether a file is not user code; jax's frames include the standard library, as for context managers."""
    return _is_library(file) or (file.startswith(_PYTHON) and "-packages" not in file)


def _is_library(file: str) -> bool:
    """Whether a file belongs to a library; the model files included in jshard do not, as users read and copy them."""
    return file.startswith((*_LIBRARY, "<")) and not file.startswith(_MODELS)


def _line(frame: Any) -> str:
    return f"{frame.file_name.rsplit('/', 1)[-1]}:{frame.line_num}"


def _frames(source_info: Any) -> list[Any]:
    noted = getattr(source_info, "traceback", None)
    return list(noted.frames) if noted is not None else []


# Programs whose types record the manual axes over which a value varies, for a `shard_map` that does not check them.

CASTS = frozenset({"pvary", "reduced_vary_cast", "reduced_vary_cast_p"})
"""Primitives that change the type but no number."""

_OPAQUE = frozenset({"pallas_call", "core_map", "mosaic_gpu"})  # their programs are a kernel's


def without_varying(jaxpr: Any, consts: Sequence[Any]) -> Callable[..., list[Any]]:
    """A program as a function that binds no primitive of such types; its axes are those around the call.

    Derivatives are taken before, so custom rules for them are dropped.
    """

    def run(*xs: Any) -> list[Any]:
        env = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *xs), strict=True))
        # a constant's type has the mesh of its trace, which is another one
        value = lambda literal: np.asarray(literal.val, literal.aval.dtype)
        read = lambda atom: value(atom) if isinstance(atom, jex.Literal) else env[atom]
        for eqn in jaxpr.eqns:
            with running(eqn):
                found = _run(eqn, [read(atom) for atom in eqn.invars])
            env.update(zip(eqn.outvars, found, strict=True))
        return [read(atom) for atom in jaxpr.outvars]

    return run


def _run(eqn: Any, xs: list[Any]) -> list[Any]:
    name, params = eqn.primitive.name, eqn.params
    if name in CASTS:
        return xs
    if name == "psum_invariant":
        return [lax.psum(x, params["axes"]) for x in xs]
    if name == "all_gather_invariant":
        given = {"axis_name": params["axis_name"], "axis": params["all_gather_dimension"], "tiled": params["tiled"]}
        return [lax.all_gather(x, **given) for x in xs]
    if name in ("custom_jvp_call", "custom_vjp_call", "custom_vjp_call_jaxpr"):
        inner = params.get("call_jaxpr") or params["fun_jaxpr"]
        return without_varying(inner.jaxpr, inner.consts)(*xs)
    if name == "shard_map":
        run = jax.shard_map(
            without_varying(params["jaxpr"], ()),
            in_specs=tuple(params["in_specs"]),
            out_specs=list(params["out_specs"]),
            axis_names=set(params["newly_manual_axes"]),
            check_vma=False,
        )
        return list(run(*xs))
    if name in ("sharding_constraint", "reshard"):
        sharding = params["sharding" if name == "sharding_constraint" else "dst_sharding"]
        return [_constrained(x, sharding) for x in xs]
    params = {key: _plain(value, opaque=name in _OPAQUE) for key, value in params.items()}
    found = eqn.primitive.bind(*xs, **eqn.primitive.get_bind_params(params))
    return list(found) if eqn.primitive.multiple_results else [found]


def _constrained(x: Any, sharding: Any) -> Any:
    axes = automatic_axes()
    if not axes or not isinstance(sharding, jax.sharding.NamedSharding):
        return x
    dims = [(dim,) if isinstance(dim, str) else dim for dim in sharding.spec]
    kept = [dim if dim is P.UNCONSTRAINED else tuple(a for a in dim or () if a in axes) or None for dim in dims]
    return lax.with_sharding_constraint(x, P(*kept))


def _plain(value: Any, *, opaque: bool) -> Any:
    if isinstance(value, jax.sharding.NamedSharding):
        return None  # over the mesh of the trace, which is another one
    if isinstance(value, core.ShapedArray):
        return core.ShapedArray(value.shape, value.dtype, weak_type=value.weak_type)
    if isinstance(value, jex.ClosedJaxpr) and not opaque:
        return _traced(value.jaxpr, value.consts)
    if isinstance(value, jex.Jaxpr) and not opaque:
        closed = _traced(value, ())
        assert not closed.consts, "a program without constants has some"
        return closed.jaxpr
    if isinstance(value, tuple) and not isinstance(value, P):
        items = [_plain(item, opaque=opaque) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
    return value


def _traced(jaxpr: Any, consts: Sequence[Any]) -> Any:
    return jax.make_jaxpr(without_varying(jaxpr, consts))(*[_plain(v.aval, opaque=True) for v in jaxpr.invars])
