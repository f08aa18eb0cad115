"""What users write between two layers: functions of activations `h` (batch, WIDTH) and a weight `w` (WIDTH, WIDTH).

Each gives an array, or a tuple of arrays. What JAX cannot differentiate takes `still(h)`.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax, random
from jax.experimental import pallas

BATCH, WIDTH, TIME, FEATURES = 32, 48, 6, 8
KEY = lambda: random.key(3)
ORDER = np.random.default_rng(0).permutation(BATCH)
still = lax.stop_gradient

steps = lambda h: h.reshape(len(h), TIME, FEATURES)  # sequences
rows = lambda h: h.reshape(len(h), WIDTH)
image = lambda h: h.reshape(len(h), 4, 4, 3)
square = lambda w: w[:FEATURES, :FEATURES]
noisy = lambda draw: lambda h, w: h + draw(KEY(), h.shape)
loop = lambda h, body, n=3: lax.fori_loop(0, n, body, h)


def scanned(h, body, n=3):
    """A loop that is differentiated backwards."""
    return lax.scan(lambda c, i: (body(i, c), None), h, jnp.arange(n))[0]


# ---- The number, the order and the sums of examples ---------------------------------------------

PLACES: dict[str, Callable[[Any, Any], Any]] = {
    "over the number of examples": lambda h, w: h / h.shape[0],
    "weights by place": lambda h, w: h * jnp.arange(h.shape[0])[:, None] / h.shape[0],
    "centred": lambda h, w: h - h.mean(0),
    "minibatch deviation": lambda h, w: h + jnp.tile(jnp.sqrt(h.reshape(4, -1, WIDTH).var(0) + 1e-6), (4, 1)),
    "pairs flipped": lambda h, w: 0.5 * h + 0.5 * h.reshape(-1, 2, WIDTH)[:, ::-1].reshape(h.shape),
    "a constant order": lambda h, w: h + h[ORDER],
    "a drawn order": lambda h, w: random.permutation(KEY(), h),
    "rolled": lambda h, w: h + jnp.roll(h, 1, 0),
    "turned over": lambda h, w: h[::-1] * h,
    "sums so far": lambda h, w: h + jnp.cumsum(h, 0) / BATCH,
    "an associative scan": lambda h, w: h + lax.associative_scan(jnp.add, h, axis=0) / BATCH,
    "rows joined": lambda h, w: jnp.concatenate([h[:5], h * 2, h[::3]]),
    "every other row set": lambda h, w: h.at[jnp.arange(0, len(h), 2)].set(0.0),
    "a window written": lambda h, w: lax.dynamic_update_slice(h, h[:4] * 2, (5, 0)),
    "first against the rest": lambda h, w: h - h[0],
    "rows where": lambda h, w: h * (jnp.arange(len(h)) < 20)[:, None],
    "rows in a list": lambda h, w: jnp.stack([row - h[0] for row in h]),
}
REDUCTIONS: dict[str, Callable[[Any, Any], Any]] = {
    "logsumexp": lambda h, w: h - jax.nn.logsumexp(h, 0),
    "softmax of the batch": lambda h, w: jax.nn.softmax(h, 0) * h,
    "a median": lambda h, w: jnp.median(h, 0),
    "a product": lambda h, w: (1 + h * 0.01).prod(0),
    "a largest": lambda h, w: h / (1 + jnp.abs(h).max()),
    "where the largest is": lambda h, w: (h.argmax(0), h),
    "a standard score": lambda h, w: (h - h.mean(0)) / jnp.sqrt(h.var(0) + 1e-2),
    "a count, divided": lambda h, w: ((h > 0).sum() // 3 + ((h > 0).sum() / 7).astype(jnp.int32), h),
    "a sum as a whole number": lambda h, w: ((h * 9).sum(0).astype(jnp.int32), h),
    "a guard against nan": lambda h, w: jnp.where(jnp.isfinite(h).all(), h, 0),
    "quantised by the largest": lambda h, w: (jnp.round(still(h) / jnp.abs(still(h)).max() * 127).astype(jnp.int8), h),
    "a mean over a mask of its own": lambda h, w: (h * (h > 0)).sum() / (h > 0).sum(),
    "a clipped norm": lambda h, w: h * jnp.minimum(1.0, 3.0 / jnp.sqrt((h**2).sum())),
    "a window over the batch": lambda h, w: lax.reduce_window(h, 0.0, lax.add, (3, 3), (1, 1), "SAME"),
    "moments by segments": lambda h, w: jax.ops.segment_sum(h, ORDER % 8, 8)[ORDER % 8],
}
SORTS: dict[str, Callable[[Any, Any], Any]] = {
    "a sort": lambda h, w: h + jnp.sort(h, 0),
    "the best of the batch": lambda h, w: h * lax.top_k(h[:, 0], 4)[0].sum(),
    "experts choose": lambda h, w: _experts_choose(h, w),
    "the hardest examples": lambda h, w: (h**2).mean(1)[lax.top_k((h**2).mean(1), 8)[1]],
    "sorts of rows": lambda h, w: (lax.top_k(h, 3), jnp.sort(h, -1), jnp.argsort(h, -1)),
    "picked by label": lambda h, w: h[jnp.arange(len(h)), (h[:, 0] > 0).astype(int)],
    "picked by a constant": lambda h, w: h[jnp.arange(BATCH), jnp.arange(BATCH) % 16].sum(),
    "picked along": lambda h, w: jnp.take_along_axis(h, jnp.argsort(h, 1)[:, ::2], 1),
    "added where labels say": lambda h, w: jnp.zeros((4, WIDTH)).at[jnp.argmax(h[:, :4], 1)].add(h),
    "places within a capacity": lambda h, w: _within_capacity(h),
    "quantiles": lambda h, w: jnp.clip(h, jnp.quantile(still(h), 0.1, axis=0), jnp.quantile(still(h), 0.9, axis=0)),
    "duplicates": lambda h, w: jnp.zeros(BATCH).at[ORDER // 2].add(h.sum(1)),
}


def _experts_choose(h, w):
    """Each of 4 experts takes the 8 examples that it likes best."""
    likes = jax.nn.softmax(h @ w[:, :4], axis=-1)
    gates, chosen = lax.top_k(likes.T, 8)
    given = jnp.tanh(h[chosen]) * gates[..., None]
    return jnp.zeros_like(h).at[chosen.reshape(-1)].add(given.reshape(-1, WIDTH))


def _within_capacity(h):
    """The first 10 examples of each of 4 experts pass."""
    hot = jax.nn.one_hot(jnp.argmax(h[:, :4], 1), 4)
    place = (jnp.cumsum(hot, 0) * hot).sum(1)
    return h * (place <= 10)[:, None]


# ---- Products -----------------------------------------------------------------------------------


def _contrastive(h, w):
    """All pairs, each example with its own label `arange(B)`."""
    a, b = (x / jnp.sqrt((x**2).sum(1, keepdims=True) + 1e-6) for x in (h, h @ w))
    logits, labels = 5 * a @ b.T, jnp.arange(len(h))
    losses = [jax.nn.log_softmax(m)[labels, labels] for m in (logits, logits.T)]
    return -sum(losses).mean() / 2


def _convolutions(h, w):
    kernel = w[:9, :6].reshape(3, 3, 1, 6)
    pairs = ((1, 1), (2, 1), (1, 2))
    dims, groups = ("NHWC", "HWIO", "NHWC"), {"feature_group_count": 3}
    conv = lambda s, d: lax.conv_general_dilated(
        image(h), kernel, (s, s), "SAME", (1, 1), (d, d), dimension_numbers=dims, **groups
    )
    return tuple(conv(*p) for p in pairs)


PRODUCTS: dict[str, Callable[[Any, Any], Any]] = {
    "negatives of the batch": lambda h, w: h + jax.nn.softmax(h @ h.T / BATCH) @ (h @ w),
    "all pairs": _contrastive,
    "a sigmoid loss of all pairs": lambda h, w: (
        -jax.nn.log_sigmoid((2 * jnp.eye(len(h)) - 1) * (h @ (h @ w).T) / WIDTH).mean()
    ),
    "all distances": lambda h, w: (jnp.square(h[:, None] - h[None]).sum(-1) + 1.0) ** -1,
    "a covariance": lambda h, w: ((h - h.mean(0)).T @ (h - h.mean(0)) / (len(h) - 1)) ** 2,
    "its eigenvalues": lambda h, w: (jnp.linalg.eigh(still(h).T @ still(h))[0], h),
    "an inverse for each row": lambda h, w: jnp.linalg.inv(h[:, :9].reshape(-1, 3, 3) + 5 * jnp.eye(3)),
    "a fourier transform of rows": lambda h, w: jnp.abs(jnp.fft.fft(h)) + 0.1,
    "an int8 product": lambda h, w: (_int8(h), h),
    "an fp8 round trip": lambda h, w: h.astype(jnp.float8_e4m3fn).astype(jnp.float32) @ w,
    "a product in bfloat16": lambda h, w: (h.astype(jnp.bfloat16) @ w.astype(jnp.bfloat16)).astype(jnp.float32),
    "both ways round": lambda h, w: (h.T @ h @ h.T / 100, h @ w @ w.T),
    "a batch in a minor dim": lambda h, w: (h.T.reshape(-1)[:, None] * jnp.ones((1, 2))).reshape(WIDTH, -1),
    "a ragged product": lambda h, w: lax.ragged_dot(h, jnp.stack([w, 2 * w]), jnp.array([10, BATCH - 10], jnp.int32)),
    "a mixture by one-hot": lambda h, w: jnp.einsum(
        "be,bd,edf->bf", jax.nn.softmax(h[:, :4]), h, jnp.stack([w, -w, w.T, 2 * w])
    ),
    "three factors": lambda h, w: jnp.einsum("bi,ci,cj->bj", h, h, h @ w) / 64,
}
IMAGES: dict[str, Callable[[Any, Any], Any]] = {
    "convolutions": _convolutions,
    "a transposed convolution": lambda h, w: lax.conv_transpose(
        image(h), w[:9, :9].reshape(3, 3, 3, 3), (2, 2), "SAME"
    ),
    "pooling": lambda h, w: lax.reduce_window(image(h), -jnp.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "SAME"),
    "mean over places and examples": lambda h, w: image(h) - image(h).mean((0, 1, 2)),
    "attention": lambda h, w: jax.nn.dot_product_attention(*[steps(x)[:, :, None] for x in (h, h @ w, h)]),
}


def _int8(h):
    small = (still(h) * 9).astype(jnp.int8)
    return lax.dot_general(small, small, (((0,), (0,)), ((), ())), preferred_element_type=jnp.int32)


# ---- Loops, branches and derivatives ------------------------------------------------------------


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _doubled(n, x):
    return x * n


_doubled.defvjp(lambda n, x: (x * n, x), lambda n, x, g: (g * n + x.mean(),))


def _kernel(h):
    double = lambda x, out: out.__setitem__(..., x[...] * 2)
    return pallas.pallas_call(double, out_shape=jax.ShapeDtypeStruct(h.shape, h.dtype), interpret=True)(h)


def _through_a_ref(h):
    ref = jax.new_ref(h)
    ref[...] = ref[...] * 2
    return ref[...]


sizes = lambda x: jnp.abs(still(x))
LOOPS: dict[str, Callable[[Any, Any], Any]] = {
    "weights in a scan": lambda h, w: lax.scan(lambda c, _: (jnp.tanh(c @ w), None), h, None, 4)[0],
    "a recurrence from zeros": lambda h, w: lax.scan(
        lambda c, x: (jnp.tanh(c @ square(w) + x),) * 2, jnp.zeros((len(h), FEATURES)), steps(h).swapaxes(0, 1)
    )[1],
    "a scan over examples": lambda h, w: lax.scan(lambda c, x: (jnp.tanh(c * 0.9 + x), c), jnp.zeros(WIDTH), h),
    "a scan with sums of the batch": lambda h, w: lax.scan(
        lambda c, _: (jnp.tanh(c @ w) + c.mean(0), None), h, None, 3
    )[0],
    "a map over examples": lambda h, w: lax.map(lambda row: row - h.mean(0), h),
    "until it converged": lambda h, w: h * lax.while_loop(lambda c: jnp.any(c > 0.1), lambda c: c * 0.5, sizes(h)),
    "while a sum is small": lambda h, w: (
        h * lax.while_loop(lambda c: c[1].sum() < 1e4, lambda c: (c[0] + 1, c[1] * 1.5), (0, sizes(h)))[0]
    ),
    "a carry of sums": lambda h, w: h + loop(jnp.zeros(WIDTH), lambda i, a: a + still(h).mean(0) * i, 5),
    "scaled by the largest": lambda h, w: scanned(h, lambda i, c: c * (1 + 1 / (1 + jnp.abs(c).max()))),
    "a map with while": lambda h, w: (
        h * jax.vmap(lambda r: lax.while_loop(lambda c: c.max() > 0.1, lambda c: c * 0.5, r))(sizes(h))
    ),
}
BRANCHES: dict[str, Callable[[Any, Any], Any]] = {
    "on a sum": lambda h, w: lax.cond(h.sum() > 0, lambda h: h * 2, lambda h: h * 3, h),
    "a sum or a row": lambda h, w: lax.cond(h.sum() > 1e9, lambda h: h.sum(0), lambda h: h[3], h),
    "turned or centred": lambda h, w: lax.cond(h.sum() > 0, jnp.flip, lambda h: h - h.mean(0), h),
    "one of three": lambda h, w: lax.switch((still(h) > 0).sum() % 3, [jnp.sin, jnp.cos, lambda x: x @ w], h),
    "for each row": lambda h, w: jax.vmap(lambda r: lax.cond(r[0] > 0, jnp.sin, jnp.cos, r))(h),
    "constants": lambda h, w: h * lax.cond(h.sum() > 0, lambda: jnp.ones(h.shape), lambda: jnp.zeros(h.shape)),
    "rules of their own": lambda h, w: jax.nn.relu(h) + jax.nn.silu(h) + _doubled(2, h),
    "recomputed": lambda h, w: jax.checkpoint(
        lambda h: jnp.sin(jnp.sin(h @ w) @ w) * h.sum(0) / BATCH, policy=jax.checkpoint_policies.dots_saveable
    )(h),
    "jitted": lambda h, w: jax.jit(lambda h, w: h @ w - h.mean(0))(h, w),
    "gradients for each example": lambda h, w: (
        jax.vmap(jax.grad(lambda w, r: (jnp.tanh(r @ w) ** 2).sum()), (None, 0))(w, h) ** 2
    ).sum((1, 2)),
    "a gradient inside": lambda h, w: jax.grad(lambda h: (jnp.tanh(h @ w) ** 2).mean())(h) * BATCH,
    "a hessian and a vector": lambda h, w: jax.jvp(jax.grad(lambda w: (jnp.tanh(h @ w) ** 2).mean()), (w,), (w,))[1],
    "an array that is written": lambda h, w: h * _through_a_ref(still(h)),
    "a kernel": lambda h, w: h * _kernel(still(h)),
    "mapped with a mean of all": lambda h, w: jax.vmap(lambda x, y: x * y.sum() + y, (0, None))(h, h.mean(0)),
}

# ---- Random numbers -----------------------------------------------------------------------------

keep = lambda h, key, p=0.5: random.bernoulli(key, p, h.shape)
seq = lambda h: (len(h), TIME, FEATURES)
RANDOM: dict[str, Callable[[Any, Any], Any]] = {
    "a mask": lambda h, w: h * keep(h, KEY()),
    "a mask of an old key": lambda h, w: h * keep(h, random.PRNGKey(0)),
    "a mask of an rbg key": lambda h, w: h * keep(h, random.key(0, impl="rbg")),
    "a mask over time": lambda h, w: rows(steps(h) * random.bernoulli(KEY(), 0.5, (len(h), 1, FEATURES))),
    "bits, time first": lambda h, w: rows(
        steps(h) * random.bernoulli(KEY(), 0.5, (TIME, len(h), FEATURES)).swapaxes(0, 1)
    ),
    "bits, flat": lambda h, w: rows(steps(h) * random.bernoulli(KEY(), 0.5, (len(h) * TIME, FEATURES)).reshape(seq(h))),
    "a key for each row": lambda h, w: jax.vmap(lambda r, k: r * random.bernoulli(k, 0.5, r.shape))(
        h, random.split(KEY(), len(h))
    ),
    "a number of the row folded in": lambda h, w: jax.vmap(
        lambda r, i: r + random.normal(random.fold_in(KEY(), i), r.shape)
    )(h, jnp.arange(len(h))),
    "bits": lambda h, w: (random.bits(KEY(), (len(h), 5), "uint8"), random.bits(KEY(), (3, len(h)), "uint16"), h),
    "normal": noisy(random.normal),
    "truncated": noisy(lambda key, shape: random.truncated_normal(key, -2, 2, shape)),
    "uniform": noisy(random.uniform),
    "gumbel": noisy(random.gumbel),
    "whole numbers": noisy(lambda key, shape: random.randint(key, shape, 0, 9)),
    "noise of an odd shape": lambda h, w: h[:, :5] * random.normal(KEY(), (len(h), 5)),
    "categories": lambda h, w: (random.categorical(KEY(), still(h)), h),
    "mixup": lambda h, w: _mixup(h),
    "a mask in a loop": lambda h, w: scanned(
        h, lambda i, c: jnp.where(keep(c, random.fold_in(KEY(), i)), jnp.tanh(c), 0)
    ),
    "a mask in a recomputed loop": lambda h, w: scanned(
        h, jax.checkpoint(lambda i, c: jnp.where(keep(c, random.fold_in(KEY(), i)), jnp.tanh(c), 0))
    ),
    "one mask for a loop": lambda h, w: (lambda m: scanned(h, lambda i, c: jnp.where(m, jnp.tanh(c), 0)))(
        keep(h, KEY())
    ),
    "stacked masks": lambda h, w: lax.scan(
        lambda c, m: (jnp.where(m, jnp.tanh(c), 0), None), h, random.bernoulli(KEY(), 0.5, (3, *h.shape))
    )[0],
    "a key in the carry": lambda h, w: lax.scan(_drops, (h, KEY()), None, 3)[0][0],
    "a mask in a while": lambda h, w: (
        h * loop(jnp.ones_like(h), lambda i, c: jnp.where(keep(c, random.fold_in(KEY(), i)), c * 1.1, c))
    ),
    "a mask in a branch": lambda h, w: lax.cond(h.sum() > 0, lambda h: jnp.where(keep(h, KEY()), h, 0), lambda h: h, h),
    "a mask, jitted and recomputed": lambda h, w: jax.checkpoint(
        jax.jit(lambda h: jnp.where(keep(h, KEY()), jnp.tanh(h), 0))
    )(h),
}


GAMMAS: dict[str, Callable[[Any, Any], Any]] = {
    "of activations": lambda h, w: random.gamma(KEY(), 1 + jnp.abs(h[:, :2])),
    "for each key": lambda h, w: jax.vmap(lambda key, h: random.gamma(key, 1 + jnp.abs(h[:2])))(
        random.split(KEY(), len(h)), h
    ),
}


def _mixup(h):
    """Each example with another one, by keys that are made inside."""
    order, share = random.split(KEY())
    share = random.beta(share, 0.4, 0.4, (len(h), 1))
    return share * h + (1 - share) * h[random.permutation(order, len(h))]


def _drops(carry, _):
    h, key = carry
    now, key = random.split(key)
    return (jnp.where(keep(h, now), jnp.tanh(h), 0), key), None


# ---- Arrays that are known without data, as large as the batch ----------------------------------


def causal(h):
    """A mask for each example."""
    return jnp.where(jnp.tril(jnp.ones((TIME, TIME), bool))[None], 0.0, -1e9) * jnp.ones((len(h), 1, 1))


def attend(c, mask):
    return jnp.einsum("bts,bsd->btd", jax.nn.softmax(jnp.einsum("btd,bsd->bts", c, c) + mask), c)


positions = lambda h: jnp.broadcast_to(jnp.arange(TIME), (len(h), TIME))
table = lambda w: w[:TIME, :FEATURES]
KNOWN: dict[str, Callable[[Any, Any], Any]] = {
    "a mask": lambda h, w: attend(steps(h), causal(h)),
    "a mask under jit": lambda h, w: jax.jit(attend)(steps(h), causal(h)),
    "a mask under remat": lambda h, w: jax.checkpoint(lambda c: attend(c, causal(c)))(steps(h)),
    "a mask into remat": lambda h, w: jax.checkpoint(attend)(steps(h), causal(h)),
    "a mask in a loop": lambda h, w: scanned(steps(h), lambda i, c: attend(c, causal(c))),
    "a mask into a loop": lambda h, w: (lambda m: scanned(steps(h), lambda i, c: attend(c, m)))(causal(h)),
    "a mask into a recomputed loop": lambda h, w: (
        lambda m: scanned(steps(h), jax.checkpoint(lambda i, c: attend(c, m)))
    )(causal(h)),
    "a loop in a loop": lambda h, w: (
        lambda m: scanned(steps(h), lambda i, c: scanned(c, lambda i, c: attend(c, m), 2))
    )(causal(h)),
    "a mask into a branch": lambda h, w: lax.cond(
        h.sum() > 0, attend, lambda c, m: c + m[..., :1] * 1e-9, steps(h), causal(h)
    ),
    "a mask into a while": lambda h, w: h * rows(loop(jnp.ones(seq(h)), lambda i, c: jnp.tanh(attend(c, causal(h))))),
    "ones in a carry": lambda h, w: lax.scan(
        lambda c, _: ((jnp.tanh(c[0]) + c[1], c[1] * 0.5), None), (steps(h), jnp.ones(seq(h))), None, 3
    )[0],
    "positions in a carry": lambda h, w: scanned(
        (positions(h), steps(h)), lambda i, c: (c[0] + 1, c[1] * jnp.cos(c[0])[..., None])
    )[1],
    "positions into a table": lambda h, w: steps(h) + table(w)[positions(h)],
    "positions by one-hot": lambda h, w: steps(h) * (jax.nn.one_hot(positions(h), TIME) @ table(w)),
    "rotary": lambda h, w: steps(h) * jnp.cos(positions(h)[..., None] * (10.0 ** -jnp.arange(FEATURES))),
    "labels by place": lambda h, w: steps(h)[:, 0] * jax.nn.one_hot(jnp.arange(len(h)) % FEATURES, FEATURES),
    "all but itself": lambda h, w: jnp.where(jnp.eye(len(h), dtype=bool), 0, h @ h.T).sum(1) / WIDTH,
    "given back": lambda h, w: (h, causal(h), positions(h)),
    "made of numpy": lambda h, w: h * np.linspace(0, 1, BATCH, dtype=np.float32)[:, None],
}

GROUPS = {
    "places": PLACES,
    "reductions": REDUCTIONS,
    "sorts": SORTS,
    "products": PRODUCTS,
    "images": IMAGES,
    "loops": LOOPS,
    "branches": BRANCHES,
    "random": RANDOM,
    "gammas": GAMMAS,
    "known": KNOWN,
}
