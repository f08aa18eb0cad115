"""Any Optax optimizer on sharded state: the updates of one device, state that is as the plan says, one trace."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jshard as js
from benchmarks.optimizers import OPTIMIZERS, STEPS
from tests.helpers import placed
from tests.parity import distance, flat
from tests.wide import wide

WIDTH, HIDDEN = 32, 64  # Shampoo takes roots of matrices as wide
LOOK_AT_MATRICES = ("adam, clip by the global norm", "adafactor", "lamb", "muon", "shampoo")
ROWS = np.random.default_rng(0).standard_normal((16, WIDTH)).astype(np.float32)


class NormBetweenLayers(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.up = nnx.Linear(WIDTH, HIDDEN, rngs=rngs)
        self.norm = nnx.LayerNorm(HIDDEN, rngs=rngs)
        self.down = nnx.Linear(HIDDEN, WIDTH, rngs=rngs)

    def __call__(self, x):
        return self.down(jax.nn.gelu(self.norm(self.up(x))))


def loss_fn(model: NormBetweenLayers, x: jax.Array) -> jax.Array:
    return ((model(x) - jnp.flip(x, 1)) ** 2).mean()


def plain() -> NormBetweenLayers:
    return NormBetweenLayers(nnx.Rngs(0))


def sharded(mesh: jax.sharding.Mesh) -> NormBetweenLayers:
    return placed(plain, lambda model: js.fully_shard(model, units=nnx.Linear, mesh=mesh))


def train(model: NormBetweenLayers, optimizer: nnx.Optimizer, steps: int = STEPS) -> int:
    """Plain Flax; returns how often the step was traced."""
    traces = 0

    @nnx.jit
    def step(model, optimizer, x):
        nonlocal traces
        traces += 1
        optimizer.update(model, nnx.grad(loss_fn)(model, x))

    for _ in range(steps):
        step(model, optimizer, ROWS)
    return traces


@functools.cache
def on_one_device(name: str) -> dict[str, np.ndarray]:
    """Parameters after the steps of plain Flax."""
    model = plain()
    train(model, nnx.Optimizer(model, OPTIMIZERS[name](), wrt=nnx.Param))
    return flat(nnx.state(model, nnx.Param))


def arrays(module: nnx.Module, kind=...) -> dict[str, jax.Array]:
    state = nnx.state(module, kind)
    return {jax.tree_util.keystr(path): x for path, x in jax.tree.leaves_with_path(state)}


def parameter_of(path: str, model: NormBetweenLayers) -> jax.Array | None:
    """The parameter that a leaf of state belongs to: its path ends in that of the parameter."""
    return next((x for name, x in arrays(model, nnx.Param).items() if path.endswith(name)), None)


def assert_state_follows(optimizer: nnx.Optimizer, model: NormBetweenLayers) -> None:
    """State of the shape of its parameter is like it; no large array is whole on a device."""
    for path, x in arrays(optimizer).items():
        parameter = parameter_of(path, model)
        if parameter is not None and parameter.shape == x.shape:
            assert x.sharding.is_equivalent_to(parameter.sharding, x.ndim), path
        assert x.nbytes < 4096 or not x.sharding.is_fully_replicated, path


@pytest.fixture(scope="module")
def mesh() -> jax.sharding.Mesh:
    return js.mesh(replica=2)


# Of what updates each element by itself, some; of what looks at whole matrices or keeps state of its own, all.
AGAIN = ("sgd, Nesterov momentum", "lion", "adamw, schedule", "sgd, EMA of the updates", "adafactor, not factored")


@pytest.mark.parametrize("name", [wide(name) if name in AGAIN else name for name in OPTIMIZERS])
def test_the_updates_of_one_device(name, mesh):
    model = sharded(mesh)
    optimizer = js.shard_optimizer(model, OPTIMIZERS[name]())
    placed = {path: x.sharding for path, x in arrays(optimizer).items()}
    assert_state_follows(optimizer, model)
    start = flat(nnx.state(model, nnx.Param))
    traces = train(model, optimizer)
    assert traces == 1
    found, wanted = flat(nnx.state(model, nnx.Param)), on_one_device(name)
    assert distance(found, wanted) <= 2e-6
    assert distance(start, wanted) > 1e-5  # it did train
    assert_state_follows(optimizer, model)
    for path, x in arrays(optimizer).items():
        assert x.sharding.is_equivalent_to(placed[path], x.ndim), path
    for x in arrays(model, nnx.Param).values():
        assert x.nbytes < 4096 or {s.data.nbytes for s in x.addressable_shards} == {x.nbytes // 4}


@pytest.mark.parametrize(
    "name", [name if name in ("adafactor", "shampoo") else wide(name) for name in LOOK_AT_MATRICES]
)
def test_what_looks_at_whole_matrices_beside_a_tensor_axis(name):
    mesh = js.mesh(tensor=2)

    def annotate(model: NormBetweenLayers) -> None:
        model.up.kernel.set_metadata(out_sharding=(None, "tensor"))
        model.down.kernel.set_metadata(out_sharding=("tensor", None))
        js.fully_shard(model, units=nnx.Linear, mesh=mesh)

    with nnx.use_eager_sharding(False):
        model = placed(plain, annotate)
        optimizer = js.shard_optimizer(model, OPTIMIZERS[name]())
        train(model, optimizer)
    assert model.up.kernel.get_raw_value().sharding.spec == P("fsdp", "tensor")
    assert distance(flat(nnx.state(model, nnx.Param)), on_one_device(name)) <= 2e-6


MOVED = (
    "sgd, Nesterov momentum",
    "adamw",
    "adafactor",
    "muon",
    "shampoo",
    *map(wide, ("lion", "lamb", "adamw, MultiSteps")),
)


@pytest.mark.parametrize("name", MOVED)
def test_a_run_that_moves_to_another_mesh_ends_as_on_one_device(name, mesh, tmp_path):
    """Its state goes with it, through a checkpoint: moments, factored ones, roots, counters."""
    model = sharded(mesh)
    optimizer = js.shard_optimizer(model, OPTIMIZERS[name]())
    train(model, optimizer, 3)
    js.checkpoint.save(tmp_path / "3", {"model": model, "optimizer": optimizer})
    elsewhere = js.mesh(fsdp=8)
    model = js.abstract_init(plain, lambda model: js.fully_shard(model, units=nnx.Linear, mesh=elsewhere))
    like = {"model": model, "optimizer": js.shard_optimizer(model, OPTIMIZERS[name]())}
    state = js.checkpoint.restore(tmp_path / "3", like=like)
    train(state["model"], state["optimizer"], STEPS - 3)
    assert distance(flat(nnx.state(state["model"], nnx.Param)), on_one_device(name)) <= 2e-6


def test_an_abstract_model_has_an_abstract_optimizer(mesh):
    """As a checkpoint is restored into it: the same tree with the same shardings, and no array."""
    wanted = arrays(js.shard_optimizer(sharded(mesh), optax.adamw(1e-3)))
    model = js.abstract_init(plain, lambda model: js.fully_shard(model, units=nnx.Linear, mesh=mesh))
    found = arrays(js.shard_optimizer(model, optax.adamw(1e-3)))
    assert found.keys() == wanted.keys()
    for path, x in found.items():
        assert isinstance(x, jax.ShapeDtypeStruct)
        assert x.shape == wanted[path].shape and x.dtype == wanted[path].dtype
        assert x.sharding.is_equivalent_to(wanted[path].sharding, x.ndim), path


def test_a_plain_optimizer_trains_the_same_with_at_most_two_traces(mesh):
    model = sharded(mesh)
    optimizer = nnx.Optimizer(model, optax.adamw(1e-3), wrt=nnx.Param)
    assert_state_follows(optimizer, model)
    assert train(model, optimizer) <= 2
    assert distance(flat(nnx.state(model, nnx.Param)), on_one_device("adamw")) <= 2e-6
    assert_state_follows(optimizer, model)


# ZeRO-1: the optimizer's state of replicated parameters, sharded over the replicas.


@pytest.mark.parametrize(
    "name", ["adamw", wide("adam, clip by the global norm"), wide("lion"), wide("sgd, Nesterov momentum")]
)
def test_zero1_shards_the_state_and_not_the_parameters(name):
    mesh = js.mesh(replica=-1, fsdp=1)
    model = sharded(mesh)
    optimizer = js.shard_optimizer(model, OPTIMIZERS[name](), shard_replicated=True)

    def check_places() -> None:
        for x in arrays(model, nnx.Param).values():
            assert x.sharding.is_fully_replicated
        for path, x in arrays(optimizer).items():
            if x.nbytes >= 4096:
                assert {s.data.nbytes for s in x.addressable_shards} == {x.nbytes // 8}, path
                assert x.sharding.is_equivalent_to(NamedSharding(mesh, replica_spec(x.shape)), x.ndim), path

    check_places()
    assert train(model, optimizer) == 1
    check_places()
    assert distance(flat(nnx.state(model, nnx.Param)), on_one_device(name)) <= 2e-6


def replica_spec(shape: tuple[int, ...]) -> P:
    largest = max(range(len(shape)), key=lambda d: shape[d])
    return P(*["replica" if d == largest else None for d in range(len(shape))])


def test_zero1_over_the_replicas_of_a_sharded_model():
    """Sharded parameters keep their state beside them; only what is replicated is split over replicas."""
    mesh = js.mesh(replica=2)
    annotate = lambda model: js.fully_shard(model, mesh=mesh, placement=js.PlacementPolicy(ignored="up/kernel"))
    model = placed(plain, annotate)
    optimizer = js.shard_optimizer(model, optax.adamw(1e-3), shard_replicated=True)
    moments = {path: x for path, x in arrays(optimizer).items() if "mu" in path and "kernel" in path}
    parts = {("up" if "up" in path else "down"): x.addressable_shards[0].data.nbytes for path, x in moments.items()}
    assert parts == {"up": WIDTH * HIDDEN * 4 // 2, "down": WIDTH * HIDDEN * 4 // 4}
    train(model, optimizer)
    assert distance(flat(nnx.state(model, nnx.Param)), on_one_device("adamw")) <= 2e-6


def test_the_transformation_of_a_sharded_optimizer_is_refused_on_another_mesh():
    def sharded(degree, tx):
        mesh = js.mesh(fsdp=degree, devices=jax.devices()[:degree])
        model = js.fully_shard(
            nnx.Linear(24, 24, rngs=nnx.Rngs(0)), mesh=mesh, placement=js.PlacementPolicy(min_size=0)
        )
        return js.shard_optimizer(model, tx)

    optimizer = sharded(4, optax.sgd(0.1, momentum=0.9))
    assert sharded(4, optimizer.tx) is not None
    with pytest.raises(js.ShardingError, match="belongs to another sharded optimizer"):  # all of it in the golden texts
        sharded(8, optimizer.tx)
