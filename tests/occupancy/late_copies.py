"""Copies without a barrier (cp.async) for JAX's interpreter of kernels, which has none.

Each copy is done as late as the wait for it allows. So a wait that is missing, or that counts wrongly, leaves a tile
unwritten, and a copy into a tile that is still read changes the result.
"""

import collections
import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import jax
import pytest

from jshard import _compat

_MARK = (
    1 << 20
)  # added to the number of copies in a wait for them, which has the form of a wait for copies the other way


@contextlib.contextmanager
def late_copies(too_few: int = 0) -> Iterator[collections.Counter[str]]:
    """Inside, pipelines are traced as for an A100, and their copies are done; yields how many, and how many waits.

    Args:
        too_few: copies for which no wait waits, to see that this is seen.
    """
    from jax._src.pallas.mosaic_gpu import primitives
    from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks, jaxpr_interpret

    pending: dict[Any, collections.deque[Any]] = collections.defaultdict(collections.deque)
    count: collections.Counter[str] = collections.Counter()

    def begin_copy(*, token, mesh_location, thread, src, src_transforms, dst, dst_transforms):
        memory = gpu_callbacks._get_shared_memory()
        source, target = map(gpu_callbacks.HostAllocationKey.from_array, (src, dst))
        plain = lambda transforms: jax.tree.map(int, gpu_callbacks._remove_noop_transforms(transforms))
        copy = gpu_callbacks.AsyncCopyTask(
            mesh_location,
            thread,
            source,
            memory.access(source, plain(src_transforms)),
            target,
            memory.access(target, plain(dst_transforms)),
        )
        pending[mesh_location, thread].append(copy)
        count["copies"] += 1
        return token

    def interpret_copy(self, eqn, token, get_invals):
        if eqn.params["has_barrier"]:
            return with_barrier(self, eqn, token, get_invals)
        (src, dst), *flat = jaxpr_interpret.split_list(
            get_invals(), [2, *(eqn.params[f"{end}_transforms_treedef"].num_leaves for end in ("src", "dst"))]
        )
        ends = {}
        for name, variable, value, leaves in zip(("src", "dst"), eqn.invars, (src, dst), flat, strict=False):
            transforms = jax.tree.unflatten(eqn.params[f"{name}_transforms_treedef"], leaves)
            value, transforms = jaxpr_interpret.resolve_ref(variable.aval, value, transforms)
            ends |= {name: value, f"{name}_transforms": transforms}
        return jaxpr_interpret.callback.io_callback(
            begin_copy,
            gpu_callbacks.TOKEN_SHAPE_DTYPE,
            token=token,
            mesh_location=self.mesh_location,
            thread=self.thread,
            **ends,
        ), []

    def wait(*, token, mesh_location, thread, n, **rest):
        if n < _MARK:
            return wait_other_way(token=token, mesh_location=mesh_location, thread=thread, n=n, **rest)
        count["waits"] += 1
        copies = pending[mesh_location, thread]
        memory = gpu_callbacks._get_shared_memory()
        while len(copies) > n - _MARK + too_few:
            memory.execute_async_task(copies.popleft())
        return token

    kind = jaxpr_interpret.JaxprInterpreter
    with_barrier = kind._interpret_copy_gmem_to_smem_p
    wait_other_way = gpu_callbacks.wait_smem_to_gmem
    with pytest.MonkeyPatch.context() as patch, _compat.gpu_assumed((8, 0)):
        patch.setattr(kind, "_interpret_copy_gmem_to_smem_p", interpret_copy)
        patch.setattr(gpu_callbacks, "wait_smem_to_gmem", functools.wraps(wait_other_way)(wait))
        patch.setattr(primitives, "wait_gmem_to_smem", lambda n: primitives.wait_smem_to_gmem(n + _MARK))
        yield count
    assert too_few or not any(pending.values())
