"""Where a sharded region could be silently wrong: each is right, or an error, or a warning."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jshard as js
from tests.helpers import Config, builder, loss_fn, sharded, token_batch

X = np.random.default_rng(0).standard_normal((16, 64)).astype(np.float32)


def call(model, *args, **kwargs):
    return nnx.jit(lambda model, *args: model(*args, **kwargs))(model, *args)


def test_check_of_a_whole_model_and_its_loss():
    config = Config()
    model = sharded(config, js.mesh(replica=2))
    report = js.check(model, *token_batch(config), loss_fn=loss_fn)
    assert report.worst < 1e-5 and len(report.gradients) == 18


class Dropping(nnx.Module):
    def __init__(self, rngs):
        self.linear = nnx.Linear(64, 64, rngs=rngs)
        self.drop = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x):
        return self.drop(self.linear(x))


def test_check_refuses_random_numbers():
    model = js.fully_shard(Dropping(nnx.Rngs(0)), mesh=js.mesh())
    with pytest.raises(js.CallError, match="drew random numbers"):
        js.check(model, X)
    model.eval()
    assert js.check(model, X).worst < 1e-5


class Outer(nnx.Module):
    """Has an inner unit whose parameters it uses by `use`."""

    def __init__(self, rngs, use):
        self.inner = nnx.Linear(64, 64, rngs=rngs)
        self.out = nnx.Linear(64, 64, rngs=rngs)
        self.use = use

    def __call__(self, x):
        h = self.out(self.inner(x))
        return h + self.use(self.inner)


RAW = {
    "nnx.state": lambda m: sum((v**2).sum() for v in jax.tree.leaves(nnx.state(m, nnx.Param))),
    "nnx.split": lambda m: nnx.split(m)[1]["kernel"].get_raw_value().mean(),
    "indexed leaf": lambda m: jax.tree.leaves(nnx.state(m, nnx.Param))[1][0].sum(),
    "inside a scan": lambda m: jax.lax.map(jnp.sum, m.kernel.get_raw_value()).sum(),
    "inside a branch": lambda m: jax.lax.cond(True, lambda w: w.sum(), lambda w: w.mean(), m.kernel.get_raw_value()),
}
READ = {
    "a whole parameter": lambda m: (m.kernel[...] ** 2).sum(),
    "an index": lambda m: m.kernel[3, 5] + m.kernel[60:].sum(),
    "an operator": lambda m: (m.kernel * 2.0).sum(),
    "variables of nnx.state": lambda m: sum((v[...] ** 2).sum() for _, v in nnx.to_flat_state(nnx.state(m, nnx.Param))),
    "a size": lambda m: jnp.float32(m.kernel.size + m.kernel.shape[0] + m.kernel.ndim),
    "a loop": lambda m: sum(row.sum() for row in m.kernel),
}


def outer(use):
    model = Outer(nnx.Rngs(0), use)
    js.fully_shard(model.inner, mesh=js.mesh())
    return js.fully_shard(model, mesh=js.mesh())


@pytest.mark.parametrize("use", RAW)
def test_b_raw_shards_inside_the_region_are_refused(use):
    with pytest.raises(js.CallError, match=r"local shard was used(.|\n)*Outer.__call__: inner/kernel"):
        call(outer(RAW[use]), X)


@pytest.mark.parametrize("use", READ)
def test_c_reads_inside_the_region_are_of_the_whole_parameter(use):
    plain = Outer(nnx.Rngs(0), READ[use])
    np.testing.assert_allclose(call(outer(READ[use]), X), plain(X), rtol=2e-5, atol=2e-5)


class Losing(nnx.Module):
    def __init__(self, rngs):
        self.linear = nnx.Linear(64, 64, rngs=rngs)

    def __call__(self, x):
        return {"loss": (self.linear(x) ** 2).mean()}


def test_d_an_output_without_a_batch_dim_is_refused_or_declared():
    with pytest.raises(js.CallError, match=r"Losing.__call__ returned \['loss'\]: float32\[\](.|\n)*js.batch_mean"):
        call(js.fully_shard(Losing(nnx.Rngs(0)), mesh=js.mesh()), X)
    model = js.fully_shard(Losing(nnx.Rngs(0)), mesh=js.mesh(), outputs="mean")
    np.testing.assert_allclose(call(model, X)["loss"], Losing(nnx.Rngs(0))(X)["loss"], rtol=1e-5)


class Tabled(nnx.Module):
    """E. Arguments whose leading dim is the batch size, by chance or not."""

    def __init__(self, rngs):
        self.linear = nnx.Linear(64, 64, rngs=rngs)

    def __call__(self, x, ids, table, weight):
        return self.linear(x + table[ids]) * weight[:, None]


def test_e_an_argument_that_may_carry_the_batch_or_not_must_be_named():
    rng = np.random.default_rng(1)
    ids, table = rng.permutation(16).astype(np.int32), rng.standard_normal((16, 64)).astype(np.float32)
    weight = rng.random(16).astype(np.float32)
    with pytest.raises(js.CallError, match="argument 'table'"):
        call(js.fully_shard(Tabled(nnx.Rngs(0)), mesh=js.mesh()), X, ids, table, weight)
    model = js.fully_shard(Tabled(nnx.Rngs(0)), mesh=js.mesh(), replicated_args=("table",))
    wanted = Tabled(nnx.Rngs(0))(X, ids, table, weight)
    np.testing.assert_allclose(call(model, X, ids, table, weight), wanted, rtol=1e-5, atol=1e-5)


class Writing(nnx.Module):
    def __init__(self, rngs, how):
        self.linear = nnx.Linear(64, 64, rngs=rngs)
        self.count = 0
        self.total = nnx.Variable(jnp.zeros(()))
        self.how = how

    def __call__(self, x):
        self.how(self, x)
        return self.linear(x)


def write_parameter(model, x):
    model.linear.kernel[...] = model.linear.kernel[...] * 2.0


def write_attribute(model, x):
    model.count = model.count + 1


def write_shard_state(model, x):
    model.total[...] += x.sum()


def write_state(model, x):
    model.total[...] += js.batch_mean(x.mean())


@pytest.mark.parametrize(
    ("how", "message"),
    [
        (write_parameter, r"parameter was written(.|\n)*linear/kernel"),
        (write_attribute, r"plain attribute was written(.|\n)*count"),
        (write_shard_state, r"State differs between data shards(.|\n)*total"),
    ],
)
def test_f_writes_that_cannot_leave_the_region_are_refused(how, message):
    model = js.fully_shard(Writing(nnx.Rngs(0), how), mesh=js.mesh())
    with pytest.raises(js.CallError, match=message):
        call(model, X)


def test_f_state_that_is_the_same_on_all_shards_leaves():
    model = js.fully_shard(Writing(nnx.Rngs(0), write_state), mesh=js.mesh())
    call(model, X)
    np.testing.assert_allclose(model.total[...], X.mean(), rtol=1e-4)


def test_j_units_in_a_call_of_their_own_are_right_without_a_root():
    config = Config()
    model, plain = builder(config)(), builder(config)()
    js.fully_shard(model.blocks[0], mesh=js.mesh())
    h = np.random.default_rng(2).standard_normal((16, 8, 64)).astype(np.float32)
    np.testing.assert_allclose(call(model.blocks[0], h), call(plain.blocks[0], h), rtol=1e-5, atol=1e-5)


class TimeMajor(nnx.Module):
    def __init__(self, rngs):
        self.linear = nnx.Linear(64, 64, rngs=rngs)

    def __call__(self, x):
        return jnp.cumsum(self.linear(x), axis=0)


def test_k_the_batch_may_lie_in_another_dim():
    x = np.random.default_rng(0).standard_normal((5, 16, 64)).astype(np.float32)
    model = js.fully_shard(TimeMajor(nnx.Rngs(0)), mesh=js.mesh(), batch_dim=1)
    found = call(model, x)
    np.testing.assert_allclose(found, TimeMajor(nnx.Rngs(0))(x), rtol=1e-5, atol=1e-5)
    assert found.sharding.shard_shape(found.shape) == (5, 2, 64)


def test_k_accumulation_that_syncs_last_works_through_any_method():
    config = Config()
    batch = token_batch(config)

    def by_hand(model, x, y):
        h = model.embed(x)
        for block in model.blocks:
            h = block(h)
        logits = model.embed.attend(model.norm(h))
        return -jax.nn.log_softmax(logits)[jnp.arange(x.shape[0])[:, None], jnp.arange(x.shape[1])[None], y].mean()

    model, plain = sharded(config, js.mesh()), builder(config)()
    grad = js.value_and_grad(by_hand, accumulate=2, sync="last")
    loss, grads = nnx.jit(lambda m, x, y: grad(m, x, y))(model, *batch)
    want_loss, want = nnx.jit(lambda m, x, y: nnx.value_and_grad(by_hand)(m, x, y))(plain, *batch)
    np.testing.assert_allclose(loss, want_loss, rtol=1e-6)
    for (path, g), (_, w) in zip(nnx.to_flat_state(grads), nnx.to_flat_state(want), strict=True):
        scale = float(jnp.abs(w[...]).max())
        np.testing.assert_allclose(np.asarray(g[...]) / scale, np.asarray(w[...]) / scale, atol=2e-6, err_msg=str(path))


def test_k_accumulation_that_syncs_last_does_not_take_copies_of_what_was_changed():
    """A parameter that the loss itself perturbs before the call."""

    def perturbed(model, x, y):
        model.embed.embedding[...] = 2 * model.embed.embedding[...]
        return loss_fn(model, x, y)

    config = Config()
    grad = js.value_and_grad(perturbed, accumulate=2, sync="last")
    with pytest.raises(js.CallError, match="the loss changed them before the call"):
        grad(sharded(config, js.mesh()), *token_batch(config))


class Recurrent(nnx.Module):
    """A loop whose carry starts from zeros, which are the same on all data shards."""

    def __init__(self, rngs, start=lambda x: x):
        self.rnn = nnx.RNN(nnx.GRUCell(64, 64, rngs=rngs))
        self.start = start

    def __call__(self, x):
        return self.rnn(x, initial_carry=self.start(jnp.zeros((x.shape[0], 64))))


def test_a_loop_that_starts_from_a_constant():
    x = np.random.default_rng(0).standard_normal((16, 5, 64)).astype(np.float32)
    with pytest.raises(js.CallError, match=r"loop in the model(.|\n)*js.per_shard"):
        call(js.fully_shard(Recurrent(nnx.Rngs(0)), mesh=js.mesh()), x)
    model = js.fully_shard(Recurrent(nnx.Rngs(0), js.per_shard), mesh=js.mesh())
    np.testing.assert_allclose(call(model, x), Recurrent(nnx.Rngs(0), js.per_shard)(x), rtol=1e-5, atol=1e-5)


class Towers(nnx.Module):
    """Two arguments of the batch's length that never meet element by element."""

    def __init__(self, rngs):
        self.first, self.second = nnx.Linear(64, 64, rngs=rngs), nnx.Linear(64, 64, rngs=rngs)

    def __call__(self, x, y):
        return self.first(x), self.second(y)


def test_e_two_towers_say_that_both_carry_the_batch():
    with pytest.raises(js.CallError, match="may carry the batch or not"):
        call(js.fully_shard(Towers(nnx.Rngs(0)), mesh=js.mesh()), X, X)
    model = js.fully_shard(Towers(nnx.Rngs(0)), mesh=js.mesh(), batch_arg=("x", "y"))
    for found, wanted in zip(call(model, X, X), Towers(nnx.Rngs(0))(X, X), strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-5)
        assert found.sharding.shard_shape(found.shape) == (2, 64)


class Sowing(nnx.Module):
    def __init__(self, rngs, how):
        self.linear = nnx.Linear(64, 64, rngs=rngs)
        self.how = how

    def __call__(self, x):
        h = self.linear(x)
        self.sow(nnx.Intermediate, "seen", self.how(h))
        return h


@pytest.mark.filterwarnings("ignore:Using 'Module.sow:DeprecationWarning")
def test_d_sown_statistics_without_a_batch_dim_must_be_declared():
    for how in (lambda h: h.max(), lambda h: h.sum(0)[:2]):  # two numbers, as many as examples of a shard
        with pytest.raises(js.CallError, match=r"State differs between data shards(.|\n)*seen"):
            call(js.fully_shard(Sowing(nnx.Rngs(0), how), mesh=js.mesh()), X)
    model, plain = (Sowing(nnx.Rngs(0), lambda h: js.batch_mean(h.mean())) for _ in range(2))
    call(js.fully_shard(model, mesh=js.mesh()), X)
    plain(X)
    (found,), (wanted,) = model.seen.get_raw_value(), plain.seen.get_raw_value()
    np.testing.assert_allclose(found, wanted, rtol=1e-4)


def test_k_accumulation_cuts_the_batch_where_it_lies():
    x = np.random.default_rng(0).standard_normal((5, 32, 64)).astype(np.float32)

    def loss(model, x):
        return (model(x) ** 2).mean()

    model = js.fully_shard(TimeMajor(nnx.Rngs(0)), mesh=js.mesh(), batch_dim=1)
    want, _ = nnx.value_and_grad(loss)(TimeMajor(nnx.Rngs(0)), x)
    for sync in ("each", "last"):
        grad = js.value_and_grad(loss, accumulate=2, sync=sync)
        found, _ = nnx.jit(lambda model, x, grad=grad: grad(model, x))(model, x)
        np.testing.assert_allclose(found, want, rtol=1e-5)
