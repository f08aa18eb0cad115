"""A small decoder in two forms, its annotation, a batch, a loss and a training step: what most tests need."""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.extend import core as jex

import jshard as js
from jshard.inspect.hlo import Window


@dataclasses.dataclass(frozen=True)
class Config:
    """Size and form of the decoder.

    Args:
        scanned: the blocks are stacked by the user's own `nnx.vmap` and run by `nnx.scan`.
        tied: the embedding table also scores the tokens.
        attends: blocks have attention; one without compiles in half the time.
    """

    layers: int = 2
    width: int = 64
    hidden: int = 256
    heads: int = 4
    vocab: int = 256
    scanned: bool = False
    tied: bool = True
    attends: bool = True


class Attention(nnx.Module):
    def __init__(self, config: Config, rngs: nnx.Rngs):
        self.heads = config.heads
        self.qkv = nnx.Linear(config.width, 3 * config.width, use_bias=False, rngs=rngs)
        self.out = nnx.Linear(config.width, config.width, use_bias=False, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        batch, length, width = x.shape
        split = self.qkv(x).reshape(batch, length, 3, self.heads, width // self.heads)
        q, k, v = (split[:, :, i] for i in range(3))
        mixed = jax.nn.dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.reshape(batch, length, width))


class Block(nnx.Module):
    def __init__(self, config: Config, rngs: nnx.Rngs):
        self.attends = config.attends
        if config.attends:
            self.attention_norm = nnx.RMSNorm(config.width, rngs=rngs)
            self.attention = Attention(config, rngs)
        self.mlp_norm = nnx.RMSNorm(config.width, rngs=rngs)
        self.up = nnx.Linear(config.width, config.hidden, rngs=rngs)
        self.down = nnx.Linear(config.hidden, config.width, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        if self.attends:
            x = x + self.attention(self.attention_norm(x))
        return x + self.down(jax.nn.gelu(self.up(self.mlp_norm(x))))


class Decoder(nnx.Module):
    """Token ids (batch, length) in, logits (batch, length, vocab) out."""

    def __init__(self, config: Config, rngs: nnx.Rngs):
        self.config = config
        self.embed = nnx.Embed(config.vocab, config.width, rngs=rngs)
        if config.scanned:

            @nnx.split_rngs(splits=config.layers)
            @nnx.vmap(in_axes=0, out_axes=0)
            def stack(rngs: nnx.Rngs) -> Block:
                return Block(config, rngs)

            self.blocks = stack(rngs)
        else:
            self.blocks = nnx.List([Block(config, rngs) for _ in range(config.layers)])
        self.norm = nnx.RMSNorm(config.width, rngs=rngs)
        if not config.tied:
            self.head = nnx.Linear(config.width, config.vocab, use_bias=False, rngs=rngs)

    def __call__(self, ids: jax.Array) -> jax.Array:
        x = self.embed(ids)
        if self.config.scanned:

            @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
            def run(x: jax.Array, block: Block) -> jax.Array:
                return block(x)

            x = run(x, self.blocks)
        else:
            for block in self.blocks:
                x = block(x)
        x = self.norm(x)
        return self.embed.attend(x) if self.config.tied else self.head(x)


class Scanning(Decoder):
    """The decoder, with `js.scan_layers` in the place of its loop."""

    def __call__(self, ids: jax.Array) -> jax.Array:
        x = self.norm(js.scan_layers(self.blocks, self.embed(ids)))
        return self.embed.attend(x) if self.config.tied else self.head(x)


@functools.cache
def builder(config: Config = Config(), seed: int = 0) -> Callable[[], Decoder]:
    """Builds the decoder when called: for `js.shard_init` and `js.abstract_init`."""
    return lambda: Decoder(config, nnx.Rngs(seed))


def with_placement(**settings: Any) -> dict[str, Any]:
    """Settings of `fully_shard`, those of a placement as one value; so are those of units that have their own."""
    fields = {name: settings.pop(name) for name in [*settings] if name in js.PlacementPolicy.__dataclass_fields__}
    if isinstance(units := settings.get("units"), dict):
        settings["units"] = {unit: with_placement(**of_unit) for unit, of_unit in units.items()}
    return settings | ({"placement": js.PlacementPolicy(**fields)} if fields else {})


def equations_run(jaxpr: Any) -> Iterator[Any]:
    """The equations of a program and of those inside of it: of a function that is called twice, twice."""
    return (eqn for eqn, _ in equations_and_trips(jaxpr))


def equations_and_trips(jaxpr: Any, times: int = 1) -> Iterator[tuple[Any, int]]:
    """The same, each with how often it runs: as many times as the loops around it have trips."""
    for eqn in jaxpr.eqns:
        yield eqn, times
        trips = eqn.params["length"] if eqn.primitive.name == "scan" else 1
        for inner in jex.jaxprs_in_params(eqn.params):
            yield from equations_and_trips(inner, times * trips)


def annotator(mesh: Any, **settings: Any) -> Callable[[Decoder], None]:
    """The annotation: a unit per block with these settings of `js.fully_shard`, then the root.

    Dtypes go to the root too; the other settings are the blocks' alone.
    """
    dtypes = {k: v for k, v in settings.items() if k == "mixed_precision"}

    def annotate(model: Decoder) -> None:
        if model.config.scanned:
            js.fully_shard(model.blocks, mesh=mesh, **with_placement(stacked=1, **settings))
        else:
            for block in model.blocks:
                js.fully_shard(block, mesh=mesh, **with_placement(**settings))
        js.fully_shard(model, mesh=mesh, **with_placement(**dtypes))

    return annotate


def sharded(config: Config, mesh: Any, **settings: Any) -> Decoder:
    """The decoder on the mesh, placed as `js.shard_init` does it; see `placed`."""
    return placed(builder(config), annotator(mesh, **settings))


def fresh(build: Callable[[], nnx.Module]) -> Any:
    """The model that is built, on one device; what it draws is drawn once for all who ask."""
    return nnx.merge(*_drawn(build), copy=True)


@functools.lru_cache(maxsize=16)
def _drawn(build: Callable[[], nnx.Module]) -> tuple[Any, Any]:
    return nnx.split(build())


def placed(build: Callable[[], nnx.Module], annotate: Callable[[Any], Any]) -> Any:
    """A model made whole and then put where `js.shard_init` has it, for tests of what it does: that compiles longer."""
    model = fresh(build)
    nnx.update(model, jax.device_get(nnx.state(model, nnx.Param)))  # from the host no program has to cut them
    annotate(model)
    params, rest = nnx.state(model, nnx.Param, ...)
    mesh = jax.tree.leaves(params)[0].sharding.mesh
    nnx.update(model, jax.device_put(rest, jax.NamedSharding(mesh, jax.P())))
    return model


def abstract(config: Config, mesh: Any, **settings: Any) -> Decoder:
    """The annotated decoder without arrays; the mesh may be abstract."""
    return js.abstract_init(builder(config), annotator(mesh, **settings))


def ups(path: tuple[Any, ...], variable: Any) -> bool:
    """A filter of nnx: the first matrix of every block of the decoder."""
    return isinstance(variable, nnx.Param) and "up" in path


def token_batch(config: Config, batch: int = 16, length: int = 16, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Inputs and targets, the same text one token later: two int32 arrays (batch, length)."""
    ids = np.random.default_rng(seed).integers(0, config.vocab, (batch, length + 1), dtype=np.int32)
    return ids[:, :-1], ids[:, 1:]


def loss_fn(model: Decoder, inputs: jax.Array, targets: jax.Array) -> jax.Array:
    """Mean cross entropy over the global batch."""
    logits = model(inputs).astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()


def mean_square(model: Callable[[Any], jax.Array], x: Any) -> jax.Array:
    """Mean square of what a model gives, in float32: a loss for a model of which only the arithmetic matters."""
    return (model(x).astype(jnp.float32) ** 2).mean()


def losses_of_steps(
    model: nnx.Module, x: Any, optimizer: nnx.Optimizer, grad_fn: Callable | None = None
) -> list[float]:
    """The mean squares of three steps of training, in plain Flax."""
    grad_fn = grad_fn or nnx.value_and_grad(mean_square)

    @nnx.jit
    def step(model, optimizer, x):
        loss, grads = grad_fn(model, x)
        optimizer.update(model, grads)
        return loss

    return [float(step(model, optimizer, x)) for _ in range(3)]


def compile_to_read(lowered: jax.stages.Lowered) -> jax.stages.Compiled:
    """Compiles a program that is not going to run.

    Its machine code is slow and made in half the time; its HLO and memory are the same.
    """
    return lowered.compile(compiler_options={"xla_backend_optimization_level": 0})


@dataclasses.dataclass(frozen=True)
class Program:
    """Loss and gradients of a decoder, lowered, with the plan of its model; compiled when first asked for."""

    plan: js.ShardPlan
    mesh: Any
    lowered: jax.stages.Lowered

    @functools.cached_property
    def compiled(self) -> jax.stages.Compiled:
        return compile_to_read(self.lowered)


@functools.cache
def program(
    config: Config,
    *,
    replica: int = 1,
    fsdp: int = -1,
    batch: tuple[int, int] = (8, 8),
    accumulate: int = 1,
    sync: str = "each",
    **settings: Any,
) -> Program:
    """Loss and gradients of the decoder for a batch of (sequences, tokens), to be read and not run.

    Kept for the whole test session, as compiling is most of what the tests cost.

    Args:
        config: the decoder.
        replica: degree of the mesh axis; also `fsdp`.
        batch: sequences and tokens of each.
        accumulate: as in `js.value_and_grad`; 1 takes Flax's own.
        sync: as there.
        settings: of the blocks' `js.fully_shard`; they must hash.
    """
    mesh = js.mesh(replica=replica, fsdp=fsdp)
    model = abstract(config, mesh, **settings)
    plain = nnx.value_and_grad(loss_fn)
    run = plain if accumulate == 1 else js.value_and_grad(loss_fn, accumulate=accumulate, sync=sync)
    lowered = nnx.jit(lambda model, *batch: run(model, *batch)).lower(model, *token_batch(config, *batch))
    return Program(js.plan(model), mesh, lowered.lowered)


def full_bytes(found: Iterable[Window], kind: str, *, over: int = 1) -> int:
    """Sum of the whole arrays' bytes over all executions of one kind, for groups of more than `over` devices."""
    return sum(w.total_bytes for w in found if w.kind == kind and len(w.group) > over)


def wire_bytes(found: Iterable[Window]) -> float:
    """Bytes that each device sends in one run of the program."""
    return sum(w.wire_bytes for w in found)
