"""Creates arrays by one compiled program, which must be the same in every process that runs it."""

import hashlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, Sharding

from jshard import _compat, _processes
from jshard.engine.values import AnyArray, type_text
from jshard.errors import AnnotationError
from jshard.plans.mesh import num_processes

_SHORT = 16  # elements of a constant in a program's text: longer ones are compared by their bytes


def created(
    make: Callable[[], list[jax.Array]], shardings: Sequence[Sharding], mesh: Mesh, where: str
) -> list[jax.Array]:
    """The arrays that a function makes, with these shardings.

    Several processes first compare the program: each runs it for its own shards, and where seeds differ, an array
    would be a mixture of several models' values.
    """
    if _compat.is_tracer(jnp.zeros(())):  # jax takes options of the compiler only at top level
        return jax.jit(make, out_shardings=shardings)()
    run = jax.jit(make, out_shardings=shardings, compiler_options=_compat.init_options(mesh))
    if jax.process_count() == 1 or num_processes(mesh) < jax.process_count():
        return run()  # to compare takes every process, and a mesh of some of them is used by these alone
    # Constants are hashed by themselves: in the text of a program large ones are left out, and a model's seed may be
    # in an array that NumPy made.
    traced = run.trace()
    lowered = traced.lower()
    check_same(where, program_digest(lowered), constants_digest(traced.jaxpr.consts))
    return lowered.compile()()


def check_same(where: str, program: str, constants: str) -> None:
    """Raises in every process if they have different programs, or constants such as keys; every process calls it."""
    # All processes get all digests, and so raise together: one that raised alone would leave the others waiting.
    digests = [tuple(digest) for digest in _processes.exchange("shard_init", [program, constants])]
    if len(set(digests)) == 1:
        return
    is_program = len({program for program, _ in digests}) > 1
    difference = "programs" if is_program else "constants (keys, arrays made by NumPy)"
    differing = []
    for number, digest in enumerate(digests):
        if digest != digests[0]:
            differing.append(f"{where}: process {number} differs from process 0")
    raise AnnotationError(
        "The processes would initialise different models.",
        where=differing,
        why=f"their {difference} are not the same: each process would fill its shards with the values of its own"
        " model.",
        do="model = js.shard_init(lambda: Model(rngs=nnx.Rngs(0)), annotate)  # one seed in all processes,\n"
        "np.random.default_rng(0)  # also of NumPy; not one of the time, or of jax.process_index()",
    )


def program_digest(lowered: jax.stages.Lowered) -> str:
    """A hash of a program, with its short constants: a seed is one of them."""
    module: Any = lowered.compiler_ir()
    return hashlib.sha256(module.operation.get_asm(large_elements_limit=_SHORT).encode()).hexdigest()


def constants_digest(constants: Iterable[AnyArray]) -> str:
    """A hash of a program's constants; of an array that several processes hold parts of, only its type."""
    digest = hashlib.sha256()
    for constant in constants:
        digest.update(type_text(constant).encode())
        if isinstance(constant, jax.Array):
            if not (constant.is_fully_addressable or constant.is_fully_replicated):
                continue
            is_key = jnp.issubdtype(constant.dtype, jax.dtypes.prng_key)
            constant = (jax.random.key_data(constant) if is_key else constant).addressable_data(0)
        digest.update(np.ascontiguousarray(constant).tobytes())
    return digest.hexdigest()
