"""Programs that people write around a model, under the three lines: values and gradients are those of one device.

Each promise has one test. The model is small, and all of its kernels are sharded.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jshard as js
from tests.engine.one_device import apart, on_host
from tests.toy_models import Residual

TOLERANCE = 1e-5  # of the largest element of each array
BATCH, WIDTH, VOCAB = 8, 16, 32  # one row on each device
RANDOM = np.random.default_rng(0)
X, Y = (RANDOM.standard_normal((BATCH, WIDTH)).astype(np.float32) for _ in range(2))
X2, Y2 = (RANDOM.standard_normal((BATCH, WIDTH)).astype(np.float32) for _ in range(2))

pytestmark = [
    pytest.mark.usefixtures("ranks_as_users_have_them"),
    pytest.mark.filterwarnings("ignore::UserWarning"),  # of what an operation over the batch costs
]


def layer(rngs: nnx.Rngs) -> Residual:
    return Residual(WIDTH, 2 * WIDTH, rngs, jnp.tanh)


class SeveralMethods(nnx.Module):
    """Can be called in part, and has a layer that no call uses."""

    def __init__(self, rngs: nnx.Rngs):
        self.first, self.second, self.unused = layer(rngs), layer(rngs), layer(rngs)
        self.head = nnx.Linear(WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x):
        return self.head(self.second(self.first(x)))

    def features(self, x):
        return self.first(x)

    def several(self, x):
        h = self.features(x)
        return {"out": self.head(h), "hidden": h, "square": self.second(h) ** 2}


def sharded(model: nnx.Module, mesh: Any = None) -> nnx.Module:
    placement = js.PlacementPolicy(min_size=1)
    mesh = js.mesh() if mesh is None else mesh
    return js.fully_shard(model, mesh=mesh, units=Residual, placement=placement)


def net(seed: int = 0) -> SeveralMethods:
    return SeveralMethods(nnx.Rngs(seed))


def squares(model: Callable, x: jax.Array, y: jax.Array) -> jax.Array:
    return ((model(x) - y) ** 2).mean()


def assert_same(program: Callable[..., Any], *models: Callable[[], nnx.Module], mesh: Any = None) -> Any:
    """A program of models gives the same on one device, state of the models included; returns what it gave there."""

    def run(place: Callable[[nnx.Module], nnx.Module]) -> dict[str, np.ndarray]:
        made = [place(model()) for model in models]
        result = program(*made)
        return on_host((result, [nnx.state(model) for model in made]))

    wanted = run(lambda model: model)
    differences = apart(run(lambda model: sharded(model, mesh)), wanted)
    assert max(differences.values()) <= TOLERANCE, {k: x for k, x in differences.items() if x > TOLERANCE}
    return wanted


# ---- Operations over the batch, with one row on each device -------------------------------------------

OVER_THE_BATCH: dict[str, Callable[[jax.Array], Any]] = {
    "sort": lambda h: jnp.sort(h, 0),
    "argsort": lambda h: jnp.argsort(h, 0),
    "cumsum": lambda h: jnp.cumsum(h, 0),
    "cumprod": lambda h: jnp.cumprod(h, 0),
    "cummax": lambda h: jax.lax.cummax(h, 0),
    "top_k": lambda h: jax.lax.top_k(h.T, 3),
    "argmax": lambda h: jnp.argmax(h, 0),
    "max": lambda h: h.max(0),
    "median": lambda h: jnp.median(h, 0),
    "quantile": lambda h: jnp.quantile(h, 0.3, axis=0),
    "mean and variance": lambda h: (h.mean(0), h.var(0), h.std(0, ddof=1)),
    "norm": lambda h: jnp.linalg.norm(h, axis=0),
    "norm of the batch": lambda h: (h - h.mean(0)) / jnp.sqrt(h.var(0) + 1e-5),
    "softmax": lambda h: jax.nn.softmax(h, 0),
    "logsumexp": lambda h: jax.nn.logsumexp(h, 0),
    "roll": lambda h: jnp.roll(h, 3, 0),
    "flip": lambda h: jnp.flip(h, 0),
    "difference": lambda h: jnp.diff(h, axis=0),
    "shift": lambda h: jnp.pad(h, ((1, 0), (0, 0)))[:-1],
    "slice": lambda h: h[2:7],
    "every third": lambda h: h[::3],
    "one row": lambda h: h[5],
    "rows by number": lambda h: h[jnp.array([7, 0, 3, 3])],
    "rows by what they hold": lambda h: h[jnp.argsort(h[:, 0])],
    "permuted": lambda h: jax.random.permutation(jax.random.key(0), h),
    "concatenated": lambda h: jnp.concatenate([h, h[::-1]]),
    "stacked": lambda h: jnp.stack([h, 2 * h]),
    "tiled": lambda h: jnp.tile(h, (2, 1)),
    "repeated": lambda h: jnp.repeat(h, 2, 0),
    "transposed": lambda h: h.T,
    "flat": lambda h: h.reshape(-1),
    "in groups": lambda h: h.reshape(2, 4, -1).sum(1),
    "all pairs": lambda h: h @ h.T,
    "distances": lambda h: jnp.sqrt(((h[:, None] - h[None]) ** 2).sum(-1) + 1.0),
    "covariance": lambda h: jnp.cov(h.T),
    "sums by group": lambda h: jax.ops.segment_sum(h, jnp.arange(BATCH) % 3, 3),
    "written rows": lambda h: h.at[jnp.array([1, 6])].set(0.0),
    "added rows": lambda h: jnp.zeros_like(h).at[jnp.array([0, 0, 1, 2, 3, 3, 7, 5])].add(h),
    "scanned over rows": lambda h: jax.lax.scan(lambda c, r: (0.5 * c + r, c), jnp.zeros(WIDTH), h),
    "associative scan": lambda h: jax.lax.associative_scan(jnp.add, h),
    "unique": lambda h: jnp.unique(jnp.round(h[:, 0]), size=BATCH, fill_value=0.0),
    "counted": lambda h: jnp.bincount(jnp.argmax(h, 1), length=WIDTH),
    "where": lambda h: jnp.where(h > h.mean(0), h, h.min(0)),
    "convolved": lambda h: jnp.convolve(h[:, 0], jnp.array([0.5, 0.3, 0.2]), mode="same"),
    "factored": lambda h: jnp.linalg.qr(h)[1] ** 2,
}


def test_operations_over_the_batch_are_right_with_one_row_on_each_device():
    """All in one model, whose loss weighs what each gives."""

    class Mixes(SeveralMethods):
        def __call__(self, x):
            h = self.first(x)
            return {name: operation(h) for name, operation in OVER_THE_BATCH.items()}

    def loss(model, x):
        results = model(x)
        floats = [r for r in jax.tree.leaves(results) if jnp.issubdtype(r.dtype, jnp.floating)]
        # Weights that differ by place: a sum alone would not see rows in another order.
        return sum((jnp.cos(jnp.arange(r.size)).reshape(r.shape) * r).sum() for r in floats), results

    program = lambda model: nnx.jit(nnx.value_and_grad(loss, has_aux=True))(model, X)
    assert_same(program, lambda: Mixes(nnx.Rngs(0)))


# ---- Calls ---------------------------------------------------------------------------------------------


def test_two_forwards_a_partial_one_and_unused_modules_and_outputs():
    def loss(model, x, y):
        twice = squares(model, x, y) * squares(model, 2 * x, model(x))
        partial = model.features(y).sum()
        only_one_output = model.several(x)["square"].mean()
        unused = model.several(y)  # nothing of it counts
        return twice + 1e-2 * partial + only_one_output + 0.0 * unused["hidden"].mean()

    wanted = assert_same(lambda model: nnx.jit(nnx.value_and_grad(loss))(model, X, Y), net)
    gradients = [array for path, array in wanted.items() if path.startswith("[0][1]")]
    assert sum(not array.any() for array in gradients) == 4  # of the module that is not called


def test_gradients_of_some_parameters_and_of_inputs_in_one_call():
    def loss(parts, rest, x):
        return squares(nnx.merge(*parts, rest), x, Y)

    def program(model):
        graphdef, head, rest = nnx.split(model, nnx.PathContains("head"), ...)

        @jax.jit
        def run(head, rest, x):
            return jax.value_and_grad(lambda head, x: loss((graphdef, head), rest, x), argnums=(0, 1))(head, x)

        return run(head, rest, X)

    assert_same(program, net)


# ---- Training loops ------------------------------------------------------------------------------------


def step_of(model: nnx.Module, optimizer: nnx.Optimizer, loss: Callable[[Any], jax.Array]) -> jax.Array:
    value, gradients = nnx.value_and_grad(loss)(model)
    optimizer.update(model, gradients)
    return value


def momentum(model: nnx.Module) -> nnx.Optimizer:
    return nnx.Optimizer(model, optax.sgd(0.1, momentum=0.9), wrt=nnx.Param)


def test_a_gan_of_two_models_and_two_optimizers():
    @nnx.jit
    def step(generator, critic, of_generator, of_critic, noise, real):
        def critic_loss(critic):
            fake = jax.lax.stop_gradient(generator(noise))
            return jax.nn.softplus(-critic(real)).mean() + jax.nn.softplus(critic(fake)).mean()

        first = step_of(critic, of_critic, critic_loss)
        second = step_of(generator, of_generator, lambda generator: jax.nn.softplus(-critic(generator(noise))).mean())
        return first, second

    def program(generator, critic):
        optimizers = momentum(generator), momentum(critic)
        return [step(generator, critic, *optimizers, X, Y) for _ in range(2)]

    assert_same(program, net, lambda: net(1))


def test_a_step_of_maml_through_the_inner_update():
    def program(model):
        graphdef, params, rest = nnx.split(model, nnx.Param, ...)
        loss = lambda params, x, y: squares(nnx.merge(graphdef, params, rest), x, y)

        def outer(params):
            adapted = jax.tree.map(lambda p, g: p - 0.1 * g, params, jax.grad(loss)(params, X, Y))
            return loss(adapted, X2, Y2)

        return jax.jit(jax.value_and_grad(outer))(params)

    assert_same(program, net)


def test_a_penalty_of_the_gradient_by_the_input():
    def loss(model, x):
        slope = jax.grad(lambda x: model(x).sum())(x)
        return model(x).mean() + ((jnp.sqrt((slope**2).sum(-1) + 1e-6) - 1) ** 2).mean()

    assert_same(lambda model: nnx.jit(nnx.value_and_grad(loss))(model, X), net)


def log_probability(model: Callable, x: jax.Array, token: jax.Array) -> jax.Array:
    return jnp.take_along_axis(jax.nn.log_softmax(model(x)), token[:, None], 1)[:, 0]


def test_preference_optimisation_beside_a_frozen_reference():
    chosen, rejected = np.arange(BATCH) % WIDTH, (3 * np.arange(BATCH) + 1) % WIDTH

    @nnx.jit
    def step(policy, reference, optimizer, x):
        def loss(policy):
            gains = [
                log_probability(policy, x, token) - jax.lax.stop_gradient(log_probability(reference, x, token))
                for token in (chosen, rejected)
            ]
            return -jax.nn.log_sigmoid(0.5 * (gains[0] - gains[1])).mean()

        return step_of(policy, optimizer, loss)

    def program(policy, reference):
        optimizer = momentum(policy)
        return [step(policy, reference, optimizer, X) for _ in range(2)]

    assert_same(program, net, net)


def test_a_teacher_that_follows_the_student():
    @nnx.jit
    def step(student, teacher, optimizer, x):
        target = jax.lax.stop_gradient(teacher(x + 0.1))
        value = step_of(student, optimizer, lambda student: squares(student, x, target))
        moved = jax.tree.map(
            lambda t, s: 0.9 * t + 0.1 * s, nnx.state(teacher, nnx.Param), nnx.state(student, nnx.Param)
        )
        nnx.update(teacher, moved)
        return value

    def program(student, teacher):
        optimizer = momentum(student)
        return [step(student, teacher, optimizer, x) for x in (X, X2)]

    assert_same(program, net, lambda: net(1))


def test_gradients_of_each_example():
    """As of DP-SGD: clipped one by one, then summed."""

    def program(model):
        graphdef, params, rest = nnx.split(model, nnx.Param, ...)

        def of_one(params, x, y):
            return squares(nnx.merge(graphdef, params, rest), x[None], y[None])

        @jax.jit
        def run(params, x, y):
            each = jax.vmap(jax.grad(of_one), in_axes=(None, 0, 0))(params, x, y)
            norms = jnp.sqrt(sum((g**2).sum(range(1, g.ndim)) for g in jax.tree.leaves(each)))
            scale = jnp.minimum(1.0, 0.5 / norms)
            return norms, jax.tree.map(lambda g: jnp.einsum("b,b...->...", scale, g), each)

        return run(params, X, Y)

    assert_same(program, net)


# ---- Decoding ------------------------------------------------------------------------------------------


class ScoresOfTwoTokens(nnx.Module):
    """Scores of the next token, of the last two."""

    def __init__(self, rngs: nnx.Rngs):
        self.table = nnx.Embed(VOCAB, WIDTH, rngs=rngs)
        self.layer = layer(rngs)

    def __call__(self, tokens):
        h = self.layer(self.table(tokens[..., -1]) + 0.5 * self.table(tokens[..., -2]))
        return jax.nn.log_softmax(self.table.attend(h))


def test_beam_search_in_a_loop():
    beams, length = 3, 5

    @nnx.jit
    def search(model, start):
        tokens = jnp.zeros((BATCH, beams, length), jnp.int32).at[:, :, :2].set(start[:, None])
        scores = jnp.zeros((BATCH, beams)).at[:, 1:].set(-1e9)
        graphdef, state = nnx.split(model)

        def step(place, carry):
            tokens, scores = carry
            last = jax.lax.dynamic_slice_in_dim(tokens, place - 2, 2, axis=2).reshape(BATCH * beams, 2)
            following = nnx.merge(graphdef, state)(last).reshape(BATCH, beams, VOCAB)
            scores, best = jax.lax.top_k((scores[..., None] + following).reshape(BATCH, -1), beams)
            kept = jnp.take_along_axis(tokens, (best // VOCAB)[..., None], 1)
            return jax.lax.dynamic_update_index_in_dim(kept, best % VOCAB, place, 2), scores

        return jax.lax.fori_loop(2, length, step, (tokens, scores))

    start = RANDOM.integers(0, VOCAB, (BATCH, 2), dtype=np.int32)
    wanted = assert_same(lambda model: search(model, start), lambda: ScoresOfTwoTokens(nnx.Rngs(0)))
    assert len({tuple(row) for row in wanted["[0][0]"][:, 0].tolist()}) > 4  # the rows did not end alike


# ---- Clipping ------------------------------------------------------------------------------------------

MESHES = {
    "fsdp": lambda: js.mesh(),
    "hsdp": lambda: js.mesh(replica=2),
    "tensor": lambda: js.mesh(tensor=2),
}


def norm_of(gradients: Any, order: float) -> jax.Array:
    leaves = [jnp.abs(g) for g in jax.tree.leaves(gradients)]
    if order == np.inf:
        return jnp.stack([g.max() for g in leaves]).max()
    return sum((g**order).sum() for g in leaves) ** (1 / order)


@functools.cache
def clipped_on_one_device() -> dict[str, np.ndarray]:
    return on_host(clipped(net()))


@nnx.jit
def clipped(model: SeveralMethods) -> Any:
    gradients = nnx.grad(squares)(model, X, Y)
    norms = {order: norm_of(gradients, order) for order in (1, 2, 3, np.inf)}
    scaled = {
        str(order): jax.tree.map(lambda g, norm=norm: g * jnp.minimum(1.0, 0.1 / norm), gradients)
        for order, norm in norms.items()
    }
    return list(norms.values()), scaled


@pytest.mark.parametrize("name", MESHES)
def test_gradients_clipped_by_any_norm_are_those_of_one_device(name: str):
    model = net()
    if name == "tensor":
        for layer in (model.first, model.second):
            layer.up.kernel.set_metadata(out_sharding=(None, "tensor"), eager_sharding=False)
            layer.down.kernel.set_metadata(out_sharding=("tensor", None), eager_sharding=False)
    differences = apart(on_host(clipped(sharded(model, MESHES[name]()))), clipped_on_one_device())
    assert max(differences.values()) <= TOLERANCE, differences
