"""What the experiment about overlap asks of CuPy and of NVIDIA's compilers; no GPU is needed."""

import jax
import numpy as np
import pytest

from benchmarks.overlap import (
    programs,
)
from benchmarks.overlap.grid import groups
from jshard import _compat
from jshard.cluster.topology import parse_topology, topology_devices
from jshard.inspect.audit import audit
from jshard.occupancy import gpu
from jshard.occupancy.gpu_bench import load_shape
from tests.benchmarks.made_up_overlap import RING
from tests.gpu_compiler import needs_gpu_compiler
from tests.occupancy.absent_gpu import needs_ampere_kernels


@needs_gpu_compiler
@pytest.mark.usefixtures("no_stored_programs")
@pytest.mark.parametrize(
    ("device", "kind"),
    [
        ("h200", "all-gather"),
        ("h200", "copies"),
        pytest.param("a100-80", "all-gather", marks=needs_ampere_kernels),
    ],
)
def test_the_load_begins_with_the_second_product(device, kind):
    count = 1 if kind == "copies" else 8
    facts = gpu(device.removesuffix("-80"))
    mesh = jax.sharding.Mesh(np.array(topology_devices(parse_topology(f"{device}:1x{count}"))), (programs.AXIS,))
    split, whole = jax.P(programs.AXIS), jax.P()
    array = lambda spec, *shape, dtype="bfloat16": jax.ShapeDtypeStruct(
        shape, dtype, sharding=jax.NamedSharding(mesh, spec)
    )
    weights = [array(whole, 8192, 8192)] * 2
    setting = groups(facts, RING)[3].settings[-1]
    if kind == "copies":
        buffer, move = array(split, *load_shape(RING, 2**28), dtype="float32"), programs.copies(RING)
    else:
        buffer, move = array(split, 8 * 448_000_000), programs.collective(kind)
    run = programs.two_products(setting, move)
    jitted = programs.over(mesh, run, split, whole, whole, split)
    with _compat.gpu_assumed((facts.major, 0)):
        lowered = jitted.trace(array(split, count * 8192, 8192), *weights, buffer).lower()
    program = lowered.compile(programs.OPTIONS)
    text = program.as_text()
    assert " copy(" not in text[text.rindex("ENTRY") :]
    if kind == "copies":
        assert '_xla_stream_annotation="1"' in text
        return
    (window,) = audit(program).schedule.windows
    assert (window.kind, window.is_overlapped, window.executions) == (kind, True, 1)
