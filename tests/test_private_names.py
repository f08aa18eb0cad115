"""Private names of JAX, Flax and Orbax: only one package has them, all are listed, and each may be gone."""

import ast
import collections
import functools
import importlib.metadata
import inspect
import pathlib
import re
from collections.abc import Callable, Iterator
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.extend import core as jex

import jshard as js
from jshard import _compat
from jshard._compat import compiler, kernels, nnx_graphs, private_names, tracing, variables
from jshard._compat.private_names import PRIVATE_NAMES, SUPPORTED, PrivateName
from jshard.errors import UnsupportedVersionError

pytestmark = pytest.mark.usefixtures("no_stored_programs")

ROOT = pathlib.Path(js.__file__).parents[1]
LIST = pathlib.Path(private_names.__file__)
SOURCES = sorted(path for path in (ROOT / "jshard").rglob("*.py") if path != LIST)
LIBRARIES = ("jax", "jaxlib", "flax", "orbax", "optax")

# Private names of Python, and of named tuples.
OTHERS = frozenset("_exit _current_frames _Pickler _Unpickler _Stop _register_atexit _replace _fields _asdict".split())
# Grain has no public name for the settings of a pipeline's steps: these are read, each only if it exists.
OF_GRAIN = frozenset("_path _transform _config _pq_path _ds _proportions _seed".split())
READ_GRAIN = (
    ROOT / "jshard" / "checkpoint" / "data_position" / "sample_order.py",
    ROOT / "jshard" / "checkpoint" / "data_position" / "step_settings.py",
    ROOT / "jshard" / "data" / "batches.py",
)


# No file but the list has such a name.


def is_private(name: object) -> bool:
    return isinstance(name, str) and re.fullmatch(r"_(?!_)\w+|__\w*(?<!__)", name) is not None


def is_of_library(dotted: str) -> bool:
    """Whether a dotted name leads into a private part of a library."""
    first, *rest = dotted.split(".")
    return first in LIBRARIES and any(map(is_private, rest))


def names_made_in(tree: ast.Module) -> set[str]:
    """The private names that a file itself gives to functions, classes, variables, attributes and parameters."""
    names = set()
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef() | ast.ClassDef():
                names.add(node.name)
            case ast.Name(ctx=ast.Store()):
                names.add(node.id)
            case ast.Attribute(ctx=ast.Store(), value=ast.Name(id="self" | "cls")):
                names.add(node.attr)
            case ast.arg():
                names.add(node.arg)
            case ast.alias():
                names.add(node.asname or node.name)
            case ast.Constant(value=str(text)) if text.startswith("_jshard_"):
                names.add(text)  # an attribute of a class made at run time
    return set(filter(is_private, names))


def private_uses(text: str, made_elsewhere: frozenset[str] = frozenset()) -> list[str]:
    """What a file reads of the private parts of libraries: imports, attributes, named arguments, and texts.

    A private attribute must be one that this file makes itself; of `self`, one that any file makes.
    """
    tree = ast.parse(text)
    aliases = dict(imported_names(tree))
    own = names_made_in(tree) | OTHERS
    found = [name for name in aliases.values() if is_of_library(name)]
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(attr=name, value=value) if is_private(name):
                is_self = ast.unparse(value) in ("self", "cls", "super()")
                if name not in own and not (is_self and name in made_elsewhere):
                    found.append(full_name(node, aliases))
            case ast.Attribute() if is_of_library(full_name(node, aliases)):
                found.append(full_name(node, aliases))
            case ast.keyword(arg=name) if is_private(name) and name not in own:
                found.append(f"{name}=")
            case ast.Call(func=function, args=args) if "attr" in ast.unparse(function):
                texts = [arg.value for arg in args if isinstance(arg, ast.Constant)]
                found += [text for text in texts if is_private(text) and text not in own]
            case ast.Constant(value=str(text)) if re.fullmatch(r"[\w.]+\._\w[\w.]*", text):
                found += [text] if is_of_library(text) else []
    return found


def imported_names(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """The names that imports make in a file, and what each stands for."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.asname or alias.name, alias.name
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for alias in node.names:
                yield alias.asname or alias.name, f"{node.module}.{alias.name}"


def full_name(node: ast.expr, aliases: dict[str, str]) -> str:
    first, dot, rest = ast.unparse(node).partition(".")
    return f"{aliases.get(first, first)}{dot}{rest}"


@functools.cache
def made_anywhere() -> frozenset[str]:
    return frozenset().union(*(names_made_in(ast.parse(path.read_text())) for path in SOURCES))


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_file_but_the_list_has_a_private_name(path):
    found = private_uses(path.read_text(), made_anywhere())
    if path in READ_GRAIN:
        found = [name for name in found if name.rpartition(".")[2] not in OF_GRAIN]
    assert not found


@pytest.mark.parametrize(
    "line",
    [
        "from jax._src import core",
        "from jax import _src",
        "import jax._src.core as core",
        "import jax.numpy as jnp\njnp._private()",
        "from flax import nnx\nnnx.Module._pytree__is_pytree",
        "from flax.linen import module as linen\nlinen._context.module_stack",
        "variable._trace_state",
        "self._raw_value",
        "self._raw_value.at[0]",
        "variable.set_raw_value(x, _unsafe_bypass_check=True)",
        "getattr(variable, '_raw_value')",
        "object.__setattr__(variable, '_raw_value', x)",
        "importlib.import_module('jax._src.core')",
        "'orbax.checkpoint._src.futures'",
    ],
)
def test_a_private_name_is_seen(line):
    assert private_uses(line)


@pytest.mark.parametrize(
    "line",
    [
        "from jshard import _compat\n_compat.bind(eqn, values)",
        "import jax\njax.numpy.ones(3)",
        "nnx.Module.__init__",
        "class A:\n  def __init__(self):\n    self._x = 1\ndef f(a):\n  return a._x",
        "import os\nos._exit(0)",
        "row._replace(a=1)",
    ],
)
def test_names_that_are_ours_or_public_are_not_taken_for_private_ones(line):
    assert not private_uses(line)


def test_no_function_of_the_package_has_the_name_of_a_file():
    """Python puts a file that is imported in place of the name."""
    assert not set(dir(_compat)) & {path.stem for path in LIST.parent.glob("*.py")}


# All are listed, and are there.


def test_each_name_is_listed_once_with_what_happens_without_it():
    assert len({(name.module, name.path) for name in PRIVATE_NAMES}) == len(PRIVATE_NAMES) > 30
    for name in PRIVATE_NAMES:
        assert name.module.partition(".")[0] in SUPPORTED and len(name.without) > 10, name


def instances() -> dict[str, object]:
    """An instance of each class of which only instances have a name."""
    return {"flax.nnx Module": nnx.Linear(2, 2, rngs=nnx.Rngs(0)), "flax.linen Module": nn.Dense(2)}


@pytest.mark.parametrize("name", PRIVATE_NAMES, ids=lambda name: f"{name.module}.{name.path}")
def test_each_name_is_in_the_installed_version(name):
    if name.is_on_instances:
        owner = f"{name.module} {name.path.rpartition('.')[0]}"
        assert name.find_in(instances()[owner]) is not None
    else:
        assert name.exists() or is_for_later_versions(name)


def is_for_later_versions(name: PrivateName) -> bool:
    package = SUPPORTED[name.module.partition(".")[0]].package
    return bool(name.since) and numbers(importlib.metadata.version(package)) < numbers(name.since)


@pytest.mark.parametrize("library", SUPPORTED)
def test_supported_versions_are_those_of_the_package(library):
    supported = SUPPORTED[library]
    requirements = importlib.metadata.requires("jshard") or []
    assert f"{supported.package}>={supported.first}" in requirements
    installed = importlib.metadata.version(supported.package)
    assert numbers(supported.first) <= numbers(installed) < numbers(supported.excluded)


def numbers(version: str) -> list[int]:
    return [int(part) for part in version.split(".") if part.isdigit()]


# Each may be gone.


def remove(monkeypatch: pytest.MonkeyPatch, *names: PrivateName) -> None:
    """Lets names be missing, as if the library had renamed them."""
    for name in names:
        monkeypatch.setitem(vars(name), "path", f"{name.path}_renamed")
    for cached in (nnx_graphs._graphlib, variables._remembering_class):
        cached.cache_clear()


@pytest.fixture(autouse=True)
def _nothing_is_cached(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    yield
    monkeypatch.undo()
    nnx_graphs._graphlib.cache_clear()
    variables._remembering_class.cache_clear()


Case = Callable[[pytest.MonkeyPatch, pathlib.Path], None]
CASES: dict[PrivateName, Case] = {}
"""For each name: removes it, and checks what happens without it."""


def case(*names: PrivateName) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Enters a function as the case of names; each is removed alone."""

    def enter(function: Callable[..., None]) -> Callable[..., None]:
        for name in names:
            CASES[name] = functools.partial(function, name)
        return function

    return enter


def test_each_name_has_a_case():
    assert CASES.keys() == set(PRIVATE_NAMES)


@pytest.mark.parametrize("name", PRIVATE_NAMES, ids=lambda name: f"{name.module}.{name.path}")
def test_without_the_name(name, monkeypatch, tmp_path):
    """A case checks what happens without its name, which it has removed by the end."""
    installed_path = name.path
    CASES[name](monkeypatch, tmp_path)
    assert name.path == f"{installed_path}_renamed"


def test_the_error_names_the_version_and_the_name():
    text = str(private_names.LINEN_SETUP.missing())
    version = importlib.metadata.version("flax")
    assert f"where: flax {version}: flax.linen.Module._try_setup\n" in text
    assert text.endswith('do:    pip install "flax>=0.12.8,<0.13"')
    assert re.findall(r"^  (\w+): +\S", text, re.MULTILINE) == ["where", "why", "do"]


@case(private_names.TRACE_CONTEXT)
def _trace_context(name, monkeypatch, tmp_path):
    assert _compat.trace_context() == _compat.trace_context()
    remove(monkeypatch, name)
    assert _compat.trace_context() != _compat.trace_context()


@case(private_names.HAS_NUMBERS)
def _is_concrete(name, monkeypatch, tmp_path):
    answers = []

    def f(x: jax.Array) -> jax.Array:
        answers.append(_compat.is_concrete(x))
        return x * x

    jax.grad(f)(1.0)
    remove(monkeypatch, name)
    jax.grad(f)(1.0)
    assert answers == [True, False] and _compat.is_concrete(jnp.ones(3))


@case(private_names.TRACER_ORIGIN)
def _tracer_origin(name, monkeypatch, tmp_path):
    search = name.find()
    with _compat.fast_shape_tracing():
        assert name.find() is not search
    assert name.find() is search
    owner = name._owner()
    remove(monkeypatch, name)
    with _compat.fast_shape_tracing():
        assert owner._origin_msg is search
        assert jax.eval_shape(lambda: nnx.Dropout(0.5, rngs=nnx.Rngs(0)).rate) is not None


@case(private_names.STAGING_RULES)
def _staging_rules(name, monkeypatch, tmp_path):
    table = name.find()
    remove(monkeypatch, name)
    primitive = jex.Primitive("staged")
    _compat.stage_with_params(primitive, lambda avals, **params: params)
    assert primitive not in table


@case(private_names.WEAK_CACHE_KEYS)
def _weak_cache_keys(name, monkeypatch, tmp_path):
    kinds = name.find()
    remove(monkeypatch, name)
    kind = type("Held", (), {})
    assert _compat.hold_weakly(kind) is kind and kind not in kinds


@case(private_names.CHECKIFY_ERROR, private_names.CHECKIFY_JAXPR, private_names.CHECKIFY_RULES)
def _checkify(name, monkeypatch, tmp_path):
    table = private_names.CHECKIFY_RULES.find()
    remove(monkeypatch, name)
    primitive = jex.Primitive("checked")
    _compat.check_inside(primitive, pytest.fail)
    assert primitive not in table


@case(private_names.COMPUTE_TYPE)
def _compute_type(name, monkeypatch, tmp_path):
    from jax.experimental import compute_on as module

    def types() -> list[Any]:
        def f(x: jax.Array) -> jax.Array:
            with tracing._compute_on("device_host"):
                return x + 1

        return [eqn.ctx.compute_type for eqn in jax.make_jaxpr(f)(1.0).jaxpr.eqns]

    assert types() == ["device_host"]
    remove(monkeypatch, name)
    if "out_memory_spaces" in inspect.signature(module.compute_on).parameters:
        with pytest.raises(UnsupportedVersionError, match="models that use compute_on depend on this private name"):
            types()
    else:
        assert types() == ["device_host"]


@case(private_names.EMPTY_ON_HOST)
def _host_rows(name, monkeypatch, tmp_path):
    remove(monkeypatch, name)
    rows = jax.make_jaxpr(lambda: _compat.host_rows((3, 2), "bfloat16"))().out_avals[0]
    assert rows.shape == (3, 2) and rows.dtype == jnp.bfloat16 and _compat.on_host(rows)


@case(private_names.BACKENDS_ARE_INITIALIZED)
def _backends(name, monkeypatch, tmp_path):
    remove(monkeypatch, name)
    assert _compat.has_devices() is True


@case(private_names.CLUSTER_TYPES)
def _cluster_types(name, monkeypatch, tmp_path):
    launcher = {
        "OMPI_MCA_orte_hnp_uri": "1.0;tcp://10.0.0.1:1",
        "OMPI_COMM_WORLD_SIZE": "2",
        "OMPI_COMM_WORLD_RANK": "1",
    }
    assert _compat.launcher_cluster(launcher) is not None
    remove(monkeypatch, name)
    assert _compat.launcher_cluster(launcher) is None


@case(private_names.PLUGIN_IS_LOADED, private_names.REGISTER_PLUGIN)
def _rocm(name, monkeypatch, tmp_path):
    remove(monkeypatch, name)
    with pytest.raises(UnsupportedVersionError, match="plans for AMD GPUs depend on this private name"):
        _compat.register_rocm(tmp_path / "plugin.so")


@case(private_names.DISTRIBUTED_CLIENT)
def _coordinator(name, monkeypatch, tmp_path):
    assert _compat.coordinator() is None  # one process
    remove(monkeypatch, name)
    with pytest.raises(UnsupportedVersionError, match="runs of several processes depend on this private name"):
        _compat.coordinator()


class Programs(dict):
    """A cache of compiled programs, as JAX takes it."""

    _path = "programs"

    def put(self, key: str, value: bytes) -> None:
        self[key] = value


@case(private_names.CACHE_OF_FOLDER)
def _cache_of_folder(name, monkeypatch, tmp_path):
    owner, before, write = name._owner(), name.find(), private_names.CACHE_WRITE.find()
    monkeypatch.setattr(owner, name.attribute, before)  # restored in the end
    ours, not_used = Programs(), Programs()
    _compat.set_program_cache(ours, str(tmp_path))
    jax.jit(lambda x: x * 3 + 1)(jnp.ones(3))
    assert ours and owner.get_file_cache is not before
    monkeypatch.setattr(owner, name.attribute, before)
    remove(monkeypatch, name)
    _compat.use_program_cache(not_used, str(tmp_path))
    jax.jit(lambda x: x * 5 + 1)(jnp.ones(3))
    assert not not_used and owner.get_file_cache is before
    assert private_names.CACHE_WRITE.find() is write
    assert jax.config.values["jax_compilation_cache_dir"] == str(tmp_path)
    jax.config.update("jax_compilation_cache_dir", None)


@case(private_names.CACHE_PUT, private_names.CACHE_WRITE)
def _cache_write(name, monkeypatch, tmp_path):
    assert compiler._is_known_cache_write()
    remove(monkeypatch, name)
    assert not compiler._is_known_cache_write()


CUDNN = (private_names.CUDNN_VERSION, private_names.CUDNN_AT_LEAST, private_names.CUDNN_IS_EQUAL)


@case(*CUDNN)
def _cudnn(name, monkeypatch, tmp_path):
    owner, attribute, before = name._owner(), name.attribute, name.find()
    remove(monkeypatch, name)
    others = [other for other in CUDNN if other is not name]
    originals = [other.find() for other in others]
    with _compat.cudnn_assumed((9, 10), (9, 0)) as was_checked:
        assert getattr(owner, attribute) is before and not was_checked()
        assert all(other.find() is not original for other, original in zip(others, originals, strict=True))
    assert [other.find() for other in others] == originals


@case(private_names.GPU_INTERPRETER)
def _interpreter(name, monkeypatch, tmp_path):
    assert type(kernels._interpreter_params()) is name.find()
    remove(monkeypatch, name)
    if _compat.interpreter_transposes():  # public
        assert kernels._interpreter_params() is not None
    else:
        with pytest.raises(UnsupportedVersionError, match="kernels that run step by step on a CPU"):
            kernels._interpreter_params()


@case(private_names.KERNEL_CAPABILITY)
def _kernel_capability(name, monkeypatch, tmp_path):
    assert _compat.kernel_capability() == 9
    with _compat.gpu_assumed((8, 6)):
        assert _compat.kernel_capability() == (8 if name.exists() else 9)  # only jax 0.12 has it
    remove(monkeypatch, name)
    with _compat.gpu_assumed((8, 0)):
        assert _compat.kernel_capability() == 9


Point = collections.namedtuple("Point", "y x")


class EveryKindOfNode(nnx.Module):
    def __init__(self) -> None:
        rngs = nnx.Rngs(0)
        self.layers = nnx.List([nnx.Linear(2, 2, rngs=rngs) for _ in range(11)])
        self.by_name = nnx.Dict(b=nnx.Linear(2, 2, rngs=rngs), a=nnx.Param(jnp.ones(2)))
        self.stack = nnx.Sequential(nnx.Linear(2, 2, rngs=rngs), nnx.relu)
        self.pair = nnx.data((nnx.Param(jnp.ones(2)), {"z": jnp.ones(1), "y": None}))
        self.point = nnx.data(Point(jnp.ones(1), jnp.zeros(1)))
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.size, self.name, self.nothing, self.dtype = 3, "model", None, jnp.float32
        self.function = nnx.relu


def walked(node: Any, depth: int = 0) -> list[tuple[Any, ...]]:
    """All that a walk of a graph sees, along every path."""
    seen: list[tuple[Any, ...]] = [(depth, type(node), _compat.is_node(node))]
    for key, child in _compat.children(node).items():
        seen += [(depth, key), *walked(child, depth + 1)]
    return seen


@case(private_names.GRAPH_REGISTRY, private_names.GRAPH_NODE_IMPL, private_names.IS_GRAPH_NODE)
def _graphlib(name, monkeypatch, tmp_path):
    model = EveryKindOfNode()
    graphs = [model, nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param), nnx.state(model), nnx.Rngs(0)]
    before = [walked(graph) for graph in graphs]
    assert sum(map(len, before)) > 200
    remove(monkeypatch, name)
    assert [walked(graph) for graph in graphs] == before


@case(private_names.INTERNAL_STATE)
def _internal_state(name, monkeypatch, tmp_path):
    model = EveryKindOfNode()
    attribute = name.attribute
    before = _compat.children(model)
    remove(monkeypatch, name)
    monkeypatch.setattr(private_names, "INTERNAL_PREFIX", "_renamed__")  # the part of the name that is searched for
    after = _compat.children(model)
    internal = after.keys() - before.keys()
    assert attribute in internal
    assert not any(isinstance(x, jax.Array) for key in internal for x in jax.tree.leaves(after[key]))


class Doubling:
    """A home."""

    def arriving(self, value: Any) -> Any:
        return value

    def settled(self, value: Any) -> Any:
        return value * 2


@case(private_names.TRACE_STATE, private_names.TRACE_OF_STATE, private_names.VARIABLE_TRACE)
def _home(name, monkeypatch, tmp_path):
    remove(monkeypatch, name)
    variable = nnx.Param(jnp.ones(2))
    with pytest.raises(UnsupportedVersionError, match="parameters that keep their placement when they are written"):
        _compat.give_home(variable, Doubling())
    assert _compat.home_of(variable) is None
    variable.set_value(jnp.zeros(2))
    assert variable.get_raw_value().sum() == 0
    mesh = js.mesh()
    with pytest.raises(UnsupportedVersionError):
        js.fully_shard(nnx.Linear(8, 8, rngs=nnx.Rngs(0)), mesh=mesh)


@case(private_names.VARIABLE_VALUE)
def _raw_value(name, monkeypatch, tmp_path):
    variable = nnx.Param(jnp.ones(2))
    _compat.give_home(variable, Doubling())
    remove(monkeypatch, name)
    _compat.write_past_home(variable, jnp.full(2, 3.0))
    np.testing.assert_array_equal(variable.get_raw_value(), [3, 3])
    variable.set_raw_value(jnp.ones(2))
    np.testing.assert_array_equal(variable.get_raw_value(), [2, 2])


@case(private_names.VARIABLE_METADATA)
def _metadata(name, monkeypatch, tmp_path):
    variable = nnx.Param(jnp.ones(2), role="scale")
    names = ("role", "value", "shape")
    before = [_compat.has_metadata(variable, text) for text in names]
    remove(monkeypatch, name)
    assert [_compat.has_metadata(variable, text) for text in names] == before == [True, False, False]


@case(*(name for name in PRIVATE_NAMES if name.needed_for == private_names.LINEN_STATE.needed_for))
def _linen(name, monkeypatch, tmp_path):
    remove(monkeypatch, name)
    version = importlib.metadata.version("flax")
    with pytest.raises(UnsupportedVersionError, match=f"where: flax {re.escape(version)}: {name.module}") as error:
        js.fully_shard(nn.Dense(8), mesh=js.mesh())
    assert "Linen models depend on this private name" in str(error.value)


@case(private_names.ORBAX_DEADLINE)
def _deadline(name, monkeypatch, tmp_path):
    owner, before = name._owner(), name.find()
    monkeypatch.setattr(owner, name.attribute, before)  # restored in the end
    _compat.set_orbax_deadline(17.9)
    assert name.find() == 17
    remove(monkeypatch, name)
    _compat.set_orbax_deadline(40)
    assert owner._DEFAULT_BARRIER_TIMEOUT == 17


@case(private_names.ORBAX_COUNTER, private_names.ORBAX_COUNT)
def _operations(name, monkeypatch, tmp_path):
    count = _compat.orbax_operations()
    assert _compat.orbax_operations(count + 2) == count + 2
    remove(monkeypatch, name)
    assert _compat.orbax_operations(count + 5) == 0


# What is public after all: no private name is needed.


@pytest.mark.parametrize("bit_width", [8, 16, 32])
@pytest.mark.parametrize("shape", [(), (3,), (5, 7), (2, 3, 4)])
@pytest.mark.parametrize("is_partitionable", [True, False])
def test_bits_of_threefry_are_those_of_jax(bit_width, shape, is_partitionable):
    draw = _compat.threefry_bits()
    assert draw is not None
    with jax.threefry_partitionable(is_partitionable):
        for seed in range(3):
            data = jax.random.key_data(jax.random.key(seed, impl="threefry2x32"))
            key = jax.random.wrap_key_data(data, impl="threefry2x32")
            bits = jax.random.bits(key, shape, f"uint{bit_width}")
            np.testing.assert_array_equal(draw(data, bit_width, shape), bits)


def test_without_that_function_bits_are_drawn_whole_and_equal(monkeypatch):
    """Each device draws the bits of the whole batch: slower, and the same numbers."""

    def loss_of() -> jax.Array:
        rngs = nnx.Rngs(0)
        model = nnx.Sequential(nnx.Linear(8, 8, rngs=rngs), nnx.Dropout(0.5, rngs=rngs))
        js.fully_shard(model, mesh=js.mesh())
        loss, _ = js.value_and_grad(lambda model, x: (model(x) ** 2).mean())(model, jnp.ones((16, 8)))
        return loss

    with_function = loss_of()
    monkeypatch.setattr("jshard._compat.threefry_bits", lambda: None)
    np.testing.assert_array_equal(loss_of(), with_function)


@pytest.mark.parametrize("is_pytree", [True, False])
def test_whether_the_modules_of_a_class_are_pytrees(is_pytree):
    metaclass: Any = type(nnx.Module)
    cls = metaclass("Made", (nnx.Module,), {"__annotations__": {}}, pytree=is_pytree)
    assert _compat.is_pytree_class(cls) is is_pytree
    assert _compat.is_pytree_class(EveryKindOfNode) and _compat.is_pytree_class(nnx.Linear)
