"""Every TPU of the table compiles a step with the installed libtpu: its profile is known there, its program is read.

The real compiler, without a TPU: it needs the extra `plan-tpu`.
"""

import importlib.util
import itertools
import json
import os
import subprocess
import sys
from typing import Any

import pytest

from jshard.cluster.child_process import child_environment
from jshard.cluster.topology import parse_topology
from jshard.facts.devices import DEVICES

pytestmark = pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="needs the extra plan-tpu")

TPUS = [name for name, facts in DEVICES.items() if facts.platform == "tpu"]
SLICES = {2: "4x4", 3: "2x2x2"}  # by the dimensions of the torus: a group over all devices extends along all of them
ON_SLICES = "v5e:2x2x2"
ON_PART_OF_DIMENSION = "v5e:4x4"

# In a process of its own, as JAX_PLATFORMS must be set before JAX is imported. It compiles all of them, as most of the
# time goes into its start.
PROGRAM = """
import json, sys, traceback, warnings
import jax, jax.numpy as jnp
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec
import jshard as js
from jshard.cluster.options import compile_nothing, options_for
from jshard.cluster.topology import parse_topology, topology_devices, traced_for_device

MATRIX_BYTES = 128 * 512 * 2  # the compiler gathers in bfloat16

class Model(nnx.Module):
    def __init__(self):
        self.up = nnx.Linear(128, 512, rngs=nnx.Rngs(0))
        self.down = nnx.Linear(512, 128, rngs=nnx.Rngs(0))

    def __call__(self, x):
        return self.down(nnx.relu(self.up(x)))

def compiled(text, degrees):
    topology = parse_topology(text)
    mesh = js.mesh(**degrees, devices=topology_devices(topology))
    with traced_for_device(topology.device):
        model = js.abstract_init(Model, lambda model: js.fully_shard(model, units=nnx.Linear, mesh=mesh))
        rows = NamedSharding(mesh, PartitionSpec(("replica", "fsdp")))
        x = jax.ShapeDtypeStruct((8 * mesh.size, 128), jnp.float32, sharding=rows)
        # Of x, too: backward then needs the parameters of both layers.
        gradients = nnx.grad(lambda model, x: (model(x) ** 2).mean(), argnums=(0, 1))
        lowered = nnx.jit(gradients).lower(model, x).lowered
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)  # an option that is dropped, or a profile that is refused
        probe = compile_nothing(NamedSharding(mesh, PartitionSpec()))
        options = options_for("fastest", platform=topology.device.name, overrides={}, try_compile=probe)
    report = js.audit(lowered.compile(compiler_options=options), model=model)
    schedule = report.schedule
    axes = sorted({axis for window in schedule.windows for axis in window.axes})
    differences = list(map(str, report.differences))
    # Of the matrices: small arrays are all-reduced.
    kinds = sorted({window.kind for window in schedule.windows if window.full_bytes >= MATRIX_BYTES})
    blocking = sorted({window.kind for window in schedule.windows if not window.is_async})
    return [schedule.num_devices, schedule.num_slices, axes, differences, kinds, blocking]

for text, degrees in json.loads(sys.argv[1]):
    try:
        print(json.dumps(compiled(text, degrees)), flush=True)
    except Exception:
        print(json.dumps(traceback.format_exc()), flush=True)
"""

Steps = dict[tuple[str, int], Any]


@pytest.fixture(scope="module")
def steps() -> Steps:
    """What each step is, by topology and number of replicas: as the last line of the program's `compiled` returns it.

    A text is the error of a step that does not compile, and what the process said where it ended before a step.
    """
    names = [(_slice(name), 1) for name in TPUS]
    names += [(ON_SLICES, 2), (ON_SLICES, 1), (ON_PART_OF_DIMENSION, 2)]
    requests = [(topology, {"replica": replicas}) for topology, replicas in names]
    command = [sys.executable, "-c", PROGRAM, json.dumps(requests)]
    environment = child_environment(os.environ)
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600, check=False)
    answers = map(json.loads, done.stdout.splitlines())
    return dict(itertools.zip_longest(names, answers, fillvalue=done.stderr))


def _slice(name: str) -> str:
    return f"{name}:{SLICES[DEVICES[name].dims]}"


@pytest.mark.parametrize("name", TPUS)
def test_a_step_compiles_with_the_profile_of_the_device(name: str, steps: Steps):
    num_devices = parse_topology(_slice(name)).num_devices
    assert steps[_slice(name), 1][:4] == [num_devices, 1, ["fsdp"], []]


@pytest.mark.parametrize("name", ["v5p", "v6e"])
def test_over_all_dimensions_of_a_torus_gathers_are_gathers_and_reductions_scatter(name: str, steps: Steps):
    """Without options of the profile, libtpu compiles all-reduces, which send twice the bytes."""
    assert steps[_slice(name), 1][4] == ["all-gather", "reduce-scatter"]


@pytest.mark.parametrize("name", ["v5p", "v6e", "tpu7x"])
def test_where_there_are_sparse_cores_no_collective_blocks(name: str, steps: Steps):
    """Small ones are on them, too: by default libtpu leaves the sum of both biases to the TensorCores."""
    assert steps[_slice(name), 1][5] == []


@pytest.mark.parametrize(("replicas", "axes"), [(2, ["fsdp", "replica"]), (1, ["fsdp"])])
def test_a_step_on_two_slices_is_read_and_communicates_as_planned(replicas: int, axes: list[str], steps: Steps):
    assert steps[ON_SLICES, replicas][:4] == [8, 2, axes, []]


def test_an_axis_takes_a_part_of_a_dimension_of_the_torus(steps: Steps):
    assert steps[ON_PART_OF_DIMENSION, 2][:4] == [16, 1, ["fsdp", "replica"], []]
