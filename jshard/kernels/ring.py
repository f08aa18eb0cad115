"""Ring attention for a sequence that is split over `context`: keys and values circulate between the devices.

Each device keeps its own queries. Keys and values pass from device to device, and the partial results are combined by
their sums of exponentials; in backward they circulate once more, with the gradients of keys and values. Under a causal
mask the first positions have little work: the sequence is cut into twice as many chunks as there are devices, and
device i takes chunks i and 2N-1-i, so that all have the same work at every step.

It is one equation of a traced program. Over axes other than `context` it is split along the batch.

Shapes, as suffixes:
    B: examples.
    T, S: queries; keys and values.
    H, G: heads of queries; heads of keys and values. In a name that has G, H is the heads of one group, of which there
        are G.
    K, V: elements of a head of queries and keys; of a head of values and results.
"""

import functools
from collections.abc import Callable, Iterator
from typing import NamedTuple, Protocol, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.core import ShapedArray
from jax.extend import core as jex
from jax.extend.core import JaxprEqn, Literal, Var
from jax.interpreters import mlir
from jax.sharding import PartitionSpec

from jshard import _compat
from jshard.engine.rules import OperandStates, Partitioner, Value, rule, same, type_of
from jshard.plans.mesh import CONTEXT, TENSOR

Tree = TypeVar("Tree")

Chunks = list[jax.Array]
"""The parts of an array along the sequence that a device processes: an early and a late one under a causal mask, else
one."""


class RingSettings(NamedTuple):
    """The settings of the attention; a parameter of the equation."""

    is_causal: bool
    scale: float
    queries_at_once: int


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def ring_attention(settings: RingSettings, q_BTHK: jax.Array, k_BSGK: jax.Array, v_BSGV: jax.Array) -> jax.Array:
    """Computes attention, (B, T, H, V); keys and values may have fewer heads than queries."""
    y_BTHV, _ = _ring_p.bind(q_BTHK, k_BSGK, v_BSGV, settings=settings)
    return y_BTHV


def _forward(
    settings: RingSettings, q_BTHK: jax.Array, k_BSGK: jax.Array, v_BSGV: jax.Array
) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    y_BTHV, sums_BHT = _ring_p.bind(q_BTHK, k_BSGK, v_BSGV, settings=settings)
    residuals = (q_BTHK, k_BSGK, v_BSGV, y_BTHV, sums_BHT)
    return y_BTHV, residuals


def _backward(settings: RingSettings, residuals: tuple[jax.Array, ...], dy_BTHV: jax.Array) -> tuple[jax.Array, ...]:
    # In the order in which `_on_part` reads them; their number says that this is backward.
    return tuple(_ring_p.bind(*residuals, dy_BTHV, settings=settings))


ring_attention.defvjp(_forward, _backward)


# ---- the equation

# From (q, k, v): the result and its sums. From these five and the result's gradient: the gradients of q, k and v.
# One primitive for both, because both are split in the same way.
_ring_p = jex.Primitive("ring_attention")
_ring_p.multiple_results = True


def _on_one_device(*arrays: jax.Array, settings: RingSettings) -> list[jax.Array]:
    """Computes the equation from whole sequences."""
    return _on_part(1, settings, *arrays)


def _result_types(*types: ShapedArray, settings: RingSettings) -> list[ShapedArray]:
    # All queries at once: of a long sequence in many parts, the trace would be long, and its types the same.
    num_queries = types[0].shape[1]
    run = functools.partial(_on_one_device, settings=settings._replace(queries_at_once=num_queries))
    return jax.make_jaxpr(run)(*types).out_avals


# Without a rule that splits it, the equation runs on one device: that is its meaning, and its types.
_ring_p.def_impl(_on_one_device)
_ring_p.def_abstract_eval(_result_types)
mlir.register_lowering(_ring_p, mlir.lower_fun(_on_one_device, multiple_results=True))


@rule("ring_attention", operands=OperandStates.PARTIAL_BESIDE_SPLIT)
def _split(p: Partitioner, eqn: JaxprEqn, values: list[Value]) -> list[Value] | None:
    """Splits over `context` along the sequence, where it communicates; over any other axis along the batch."""
    if CONTEXT in p.axes:
        return _split_sequence(p, eqn, values)
    batch_size = p.full_shape(values[0])[0]
    if not p.divides(batch_size):
        return None
    operands = [p.split(value, 0) for value in values]
    return same(p, eqn, operands, 0)


def _split_sequence(p: Partitioner, eqn: JaxprEqn, values: list[Value]) -> list[Value] | None:
    # Two chunks a device, also without a causal mask: `attention` refuses other lengths for both.
    for value in values[:3]:
        num_positions = p.full_shape(value)[1]
        if num_positions % (2 * p.degree):
            return None
    run = functools.partial(_on_part, p.degree, eqn.params["settings"])
    operands = [p.split(value, _sequence_dim(value.ndim)).x for value in values]
    results = _on_heads(run, eqn)(*operands)
    return [Value(x, _sequence_dim(x.ndim)) for x in results]


def _on_heads(run: Callable[..., list[jax.Array]], eqn: JaxprEqn) -> Callable[..., list[jax.Array]]:
    """Runs on each part of the heads where the compiler split them over `tensor`; otherwise it would gather them."""
    degree = _compat.automatic_axes().get(TENSOR, 1)
    if degree == 1:
        return run
    for atom in eqn.invars[:3]:
        num_heads = type_of(atom).shape[2]
        if num_heads % degree:
            return run
    # Heads of queries and of keys are split alike, so that the groups of a device are whole.
    in_specs = tuple(_split_heads(atom) for atom in eqn.invars)
    out_specs = [_split_heads(variable) for variable in eqn.outvars]
    return jax.shard_map(run, in_specs=in_specs, out_specs=out_specs, axis_names={TENSOR}, check_vma=False)


def _split_heads(atom: Var | Literal) -> PartitionSpec:
    """Returns the spec of an operand or result whose heads are split over `tensor`."""
    heads_dim = 2 if type_of(atom).ndim == 4 else 1  # sums are (B, H, T)
    return PartitionSpec(*[None] * heads_dim, TENSOR)


def _sequence_dim(ndim: int) -> int:
    """Returns the dim of the positions: sums are (B, H, T), all other arrays (B, T, H, K)."""
    return 1 if ndim == 4 else 2


# ---- on one of `num_devices`; a device that has the whole sequence sends nothing


def _on_part(num_devices: int, settings: RingSettings, *arrays: jax.Array) -> list[jax.Array]:
    """Computes the equation on one device, from its part of each operand."""
    exchange: _ChunkExchange = _OneChunk()
    if settings.is_causal and num_devices > 1:
        exchange = _Zigzag(num_devices)
    q, k, v = (exchange.to_chunks(x) for x in arrays[:3])
    if len(arrays) == 3:
        ys, sums = _attend_around(num_devices, settings, q, k, v)
        # Before the exchange: in 16 bits it sends half as much.
        ys = [y.astype(x.dtype) for y, x in zip(ys, q, strict=True)]
        return [exchange.from_chunks(ys), exchange.from_chunks(sums)]

    y, sums, dy = (exchange.to_chunks(x) for x in arrays[3:])
    gradients = _gradients_around(num_devices, settings, q, k, v, y, sums, dy)
    return [exchange.from_chunks(chunks).astype(x.dtype) for chunks, x in zip(gradients, arrays[:3], strict=True)]


class _ChunkExchange(Protocol):
    """How the positions that a device stores become the chunks that it processes."""

    def to_chunks(self, x: jax.Array) -> Chunks: ...

    def from_chunks(self, chunks: Chunks) -> jax.Array: ...


class _OneChunk:
    """Each device processes the positions that it stores."""

    def to_chunks(self, x: jax.Array) -> Chunks:
        return [x]

    def from_chunks(self, chunks: Chunks) -> jax.Array:
        return chunks[0]


class _Zigzag:
    """Exchanges a device's two neighbouring chunks for an early and a late one, and back.

    The chunks of 4 devices:

        stored       0 1 | 2 3 | 4 5 | 6 7
        processed    0 7 | 1 6 | 2 5 | 3 4
    """

    def __init__(self, num_devices: int) -> None:
        # Each route is a permutation of the devices: it takes the first, or the second, chunk that a device stores.
        self._routes: list[list[tuple[int, int]]] = []
        for side in (0, 1):
            route = []
            for device in range(num_devices):
                chunk = 2 * device + side
                # Device c processes chunk c if it is in the first half of the sequence, and device 2N-1-c otherwise.
                route.append((device, min(chunk, 2 * num_devices - 1 - chunk)))
            self._routes.append(route)
        # The first route takes the even chunks. Of i and 2N-1-i, the chunks of device i, one is even and one is odd.
        self._is_even_first = lax.axis_index(CONTEXT) % 2 == 0

    def to_chunks(self, x: jax.Array) -> Chunks:
        """Returns the early and the late chunk that this device processes."""
        stored = jnp.split(x, 2, axis=_sequence_dim(x.ndim))
        received = [lax.ppermute(chunk, CONTEXT, route) for chunk, route in zip(stored, self._routes, strict=True)]
        return self._swap_on_odd(received)

    def from_chunks(self, chunks: Chunks) -> jax.Array:
        """Returns the positions that this device stores."""
        stored = []
        for chunk, route in zip(self._swap_on_odd(chunks), self._routes, strict=True):
            way_back = [(target, source) for source, target in route]
            stored.append(lax.ppermute(chunk, CONTEXT, way_back))
        return jnp.concatenate(stored, axis=_sequence_dim(stored[0].ndim))

    def _swap_on_odd(self, chunks: Chunks) -> Chunks:
        """Swaps (even, odd) and (early, late): on a device with an even number they are the same."""
        first, second = chunks
        return [jnp.where(self._is_even_first, first, second), jnp.where(self._is_even_first, second, first)]


Side = int | jax.Array
"""Which of two chunks: its number, or whether it is the first."""


class _ScoreBlock(NamedTuple):
    """A chunk of queries and a chunk of keys: a part of the matrix of scores."""

    queries: Side
    keys: Side
    is_diagonal: bool  # whether both are of the same positions, so that the causal mask cuts the block


def _blocks(num_devices: int, settings: RingSettings, step: int) -> list[_ScoreBlock]:
    """Returns the blocks of a step; with a mask, those that have any scores."""
    if num_devices == 1 or not settings.is_causal:
        return [_ScoreBlock(0, 0, settings.is_causal)]
    # All blocks are of one size. Which ones a device has may differ, but not how many: the devices run one program.
    if step == 0:
        return [_ScoreBlock(0, 0, True), _ScoreBlock(1, 0, False), _ScoreBlock(1, 1, True)]
    # The keys are those of the device `step` places before. If that device has a lower index, both chunks attend to its
    # early chunk; else the late chunk attends to both of its chunks.
    is_later = lax.axis_index(CONTEXT) >= step
    return [_ScoreBlock(1, 0, False), _ScoreBlock(is_later, is_later, False)]


def _chunk(chunks: Chunks, side: Side) -> jax.Array:
    if isinstance(side, int):
        return chunks[side]
    # Which side is known only on the device, so both chunks are operands.
    return jnp.where(side, *chunks)


def _with_chunk(chunks: Chunks, side: Side, x: jax.Array) -> Chunks:
    """Returns the chunks with another one at a side."""
    if isinstance(side, int):
        return [*chunks[:side], x, *chunks[side + 1 :]]
    return [jnp.where(side, x, chunks[0]), jnp.where(side, chunks[1], x)]


def _with_sum(chunks: Chunks, side: Side, x: jax.Array) -> Chunks:
    """Returns the chunks with an array added to the one at a side."""
    return _with_chunk(chunks, side, _chunk(chunks, side) + x)


def _pass_on(num_devices: int, x: Tree) -> Tree:
    """Sends arrays to the next device of the ring, and returns those of the previous one."""
    if num_devices == 1:
        return x
    # To the next higher index: `_blocks` relies on it.
    route = [(i, (i + 1) % num_devices) for i in range(num_devices)]
    return lax.ppermute(x, CONTEXT, route)


def _attend_around(num_devices: int, settings: RingSettings, q: Chunks, k: Chunks, v: Chunks) -> tuple[Chunks, Chunks]:
    """Returns attention of the queries to all keys, in float32, and the logarithms of the sums of exponentials."""
    ys = [jnp.zeros((*x.shape[:3], v[0].shape[3]), jnp.float32) for x in q]
    # Of no keys: exp(-inf) = 0 is the factor of these zeros in the first combination.
    sums = [jnp.full((x.shape[0], x.shape[2], x.shape[1]), -jnp.inf) for x in q]
    # A device has its own keys at step 0, where each query sees at least itself: from then on no sum is infinite.
    for step in range(num_devices):
        for block in _blocks(num_devices, settings, step):
            y_of_block, sums_of_block = _attend(
                settings,
                _chunk(q, block.queries),
                _chunk(k, block.keys),
                _chunk(v, block.keys),
                is_diagonal=block.is_diagonal,
            )
            # As one softmax over all keys so far: each side has its share of the sum of exponentials.
            sums_before = _chunk(sums, block.queries)
            sums_after = jnp.logaddexp(sums_before, sums_of_block)
            y = _chunk(ys, block.queries) * _exp_BTH1(sums_before - sums_after)
            y = y + y_of_block * _exp_BTH1(sums_of_block - sums_after)
            ys = _with_chunk(ys, block.queries, y)
            sums = _with_chunk(sums, block.queries, sums_after)
        if step + 1 < num_devices:
            k, v = _pass_on(num_devices, (k, v))
    return ys, sums


def _exp_BTH1(x_BHT: jax.Array) -> jax.Array:
    return jnp.exp(jnp.swapaxes(x_BHT, 1, 2))[..., None]


def _gradients_around(
    num_devices: int, settings: RingSettings, q: Chunks, k: Chunks, v: Chunks, y: Chunks, sums: Chunks, dy: Chunks
) -> tuple[Chunks, Chunks, Chunks]:
    """Returns the gradients of q, k and v, in float32."""
    # Once for all blocks: they depend on the results only.
    dots = [_row_dots(y_BTHV, dy_BTHV) for y_BTHV, dy_BTHV in zip(y, dy, strict=True)]
    # In float32, as each is a sum over the blocks of all devices.
    dq = _zeros_like(q)
    dk = _zeros_like(k)
    dv = _zeros_like(v)
    for step in range(num_devices):
        for block in _blocks(num_devices, settings, step):
            of_block = _gradients(
                settings,
                q_BTHK=_chunk(q, block.queries),
                dy_BTHV=_chunk(dy, block.queries),
                sums_BHT=_chunk(sums, block.queries),
                dots_BHT=_chunk(dots, block.queries),
                k_BSGK=_chunk(k, block.keys),
                v_BSGV=_chunk(v, block.keys),
                is_diagonal=block.is_diagonal,
            )
            dq = _with_sum(dq, block.queries, of_block.dq)
            # To the keys at hand: their gradients are on this device, too, see below.
            dk = _with_sum(dk, block.keys, of_block.dk)
            dv = _with_sum(dv, block.keys, of_block.dv)
        # They circulate with the keys and values that they belong to, and after the last step one step home.
        dk, dv = _pass_on(num_devices, (dk, dv))
        if step + 1 < num_devices:
            k, v = _pass_on(num_devices, (k, v))
    return dq, dk, dv


def _zeros_like(chunks: Chunks) -> Chunks:
    return [jnp.zeros(x.shape, jnp.float32) for x in chunks]


def _row_dots(y_BTHV: jax.Array, dy_BTHV: jax.Array) -> jax.Array:
    """Returns for each query the product of its result and of that one's gradient, (B, H, T).

    It equals the sum over all keys of weight times the weight's gradient, which the gradient of a softmax subtracts. So
    no device needs the weights of the other blocks.
    """
    return jnp.einsum("bthk,bthk->bht", _to_float32(y_BTHV), _to_float32(dy_BTHV))


# ---- one block, some queries at a time


def _to_float32(x: jax.Array) -> jax.Array:
    return x.astype(jnp.float32)


def _parts(
    settings: RingSettings, num_queries: int, num_keys: int, *, is_diagonal: bool
) -> Iterator[tuple[slice, slice]]:
    """Yields the queries that are processed at a time, and the keys that they attend to."""
    for start in range(0, num_queries, settings.queries_at_once):
        stop = min(start + settings.queries_at_once, num_queries)
        num_seen = num_keys
        if is_diagonal:
            # On the diagonal there are as many keys as queries: `_ring_faults` refuses other lengths.
            num_seen = stop  # the mask hides all later keys from all of these queries
        yield slice(start, stop), slice(0, num_seen)


def _grouped(x_BTHK: jax.Array, num_groups: int) -> jax.Array:
    """Returns (B, T, G, H, K): the heads of each group beside each other."""
    B, T, H, K = x_BTHK.shape
    return x_BTHK.reshape(B, T, num_groups, H // num_groups, K)


def _scores(settings: RingSettings, q_BTGHK: jax.Array, k_BSGK: jax.Array, *, is_diagonal: bool) -> jax.Array:
    """Returns (B, G, H, T, S); on the diagonal the last query is aligned with the last key."""
    products = jnp.einsum("btghk,bsgk->bghts", q_BTGHK, k_BSGK, preferred_element_type=jnp.float32)
    # After the product, in float32: the factor of a query in 16 bits would be rounded.
    scores_BGHTS = settings.scale * products
    if not is_diagonal:
        return scores_BGHTS
    T, S = scores_BGHTS.shape[3:]
    mask_TS = jnp.tril(jnp.ones((T, S), bool), S - T)
    return jnp.where(mask_TS, scores_BGHTS, -jnp.inf)


def _attend(
    settings: RingSettings, q_BTHK: jax.Array, k_BSGK: jax.Array, v_BSGV: jax.Array, *, is_diagonal: bool
) -> tuple[jax.Array, jax.Array]:
    """Returns attention of the queries to these keys alone, and the logarithms of the sums of exponentials."""
    B, T, H, _ = q_BTHK.shape
    _, S, G, V = v_BSGV.shape
    ys: list[jax.Array] = []
    sums: list[jax.Array] = []
    for queries, keys in _parts(settings, T, S, is_diagonal=is_diagonal):
        q_BTGHK = _grouped(q_BTHK[:, queries], G)
        scores_BGHTS = _scores(settings, q_BTGHK, k_BSGK[:, keys], is_diagonal=is_diagonal)
        # Never -inf: a query on the diagonal sees itself, and other blocks have no mask. `-inf - -inf` would be NaN.
        sums_BGHT = jax.nn.logsumexp(scores_BGHTS, axis=-1)
        weights_BGHTS = jnp.exp(scores_BGHTS - sums_BGHT[..., None]).astype(v_BSGV.dtype)
        y_BTGHV = jnp.einsum("bghts,bsgk->btghk", weights_BGHTS, v_BSGV[:, keys], preferred_element_type=jnp.float32)
        ys.append(y_BTGHV.reshape(B, -1, H, V))
        sums.append(sums_BGHT.reshape(B, H, -1))
    return jnp.concatenate(ys, axis=1), jnp.concatenate(sums, axis=2)


class _BlockGradients(NamedTuple):
    """Contributions of a block to the gradients of queries, keys and values, in float32."""

    dq: jax.Array
    dk: jax.Array
    dv: jax.Array


def _gradients(
    settings: RingSettings,
    *,
    q_BTHK: jax.Array,
    dy_BTHV: jax.Array,
    sums_BHT: jax.Array,
    dots_BHT: jax.Array,
    k_BSGK: jax.Array,
    v_BSGV: jax.Array,
    is_diagonal: bool,
) -> _BlockGradients:
    """Computes the weights of one block again, from the sums over all blocks, and the gradients from them.

    Args:
        settings: of the attention.
        q_BTHK: the queries of the block.
        dy_BTHV: the gradient of their results.
        sums_BHT: their sums of exponentials over all keys, as logarithms.
        dots_BHT: their `_row_dots`.
        k_BSGK: the keys of the block.
        v_BSGV: their values.
        is_diagonal: whether queries and keys are of the same positions.
    """
    B, T, H, K = q_BTHK.shape
    _, S, G, _ = k_BSGK.shape
    product = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)
    dqs: list[jax.Array] = []
    dk_BSGK = jnp.zeros(k_BSGK.shape, jnp.float32)
    dv_BSGV = jnp.zeros(v_BSGV.shape, jnp.float32)
    for queries, keys in _parts(settings, T, S, is_diagonal=is_diagonal):
        q_BTGHK = _grouped(q_BTHK[:, queries], G)
        dy_BTGHV = _grouped(dy_BTHV[:, queries], G)
        scores_BGHTS = _scores(settings, q_BTGHK, k_BSGK[:, keys], is_diagonal=is_diagonal)
        weights_BGHTS = jnp.exp(scores_BGHTS - _per_score(sums_BHT[:, :, queries], G))
        dweights_BGHTS = product("btghk,bsgk->bghts", dy_BTGHV, v_BSGV[:, keys])
        dscores_BGHTS = settings.scale * weights_BGHTS * (dweights_BGHTS - _per_score(dots_BHT[:, :, queries], G))
        dscores_BGHTS = dscores_BGHTS.astype(q_BTHK.dtype)
        dq_BTGHK = product("bghts,bsgk->btghk", dscores_BGHTS, k_BSGK[:, keys])
        dqs.append(dq_BTGHK.reshape(B, -1, H, K))
        dk_BSGK = dk_BSGK.at[:, keys].add(product("bghts,btghk->bsgk", dscores_BGHTS, q_BTGHK))
        dv_BSGV = dv_BSGV.at[:, keys].add(product("bghts,btghk->bsgk", weights_BGHTS.astype(dy_BTHV.dtype), dy_BTGHV))
    return _BlockGradients(jnp.concatenate(dqs, axis=1), dk_BSGK, dv_BSGV)


def _per_score(x_BHT: jax.Array, num_groups: int) -> jax.Array:
    """Returns (B, G, H, T, 1): a number of each query, to combine with its scores."""
    B, H, _ = x_BHT.shape
    return x_BHT.reshape(B, num_groups, H // num_groups, -1, 1)
