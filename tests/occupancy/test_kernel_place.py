"""Where a kernel runs and where its twin: by the device, the mesh, and what is asked."""

import types

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, PartitionSpec

import jshard as js
from jshard.kernels import KernelError, Occupancy
from jshard.kernels.backend import decide
from jshard.kernels.generation import AMPERE
from tests.occupancy.absent_gpu import A40, A100, H200, needs_ampere_kernels, on

ARRAYS = [jnp.ones((8, 8), jnp.bfloat16)]
HOPPER = types.SimpleNamespace(platform="gpu", device_kind="NVIDIA H200", compute_capability="9.0", core_count=132)


def form(backend="auto", arrays=ARRAYS):
    return decide("matmul", backend, None, arrays).form


@pytest.fixture
def hopper(monkeypatch):
    """A machine with one such GPU, which is the first device of the process."""
    monkeypatch.setattr(jax, "devices", lambda platform=None: [HOPPER])
    monkeypatch.setattr(jax, "device_count", lambda: 1)


def test_on_a_cpu_the_twin():
    assert form() == form("xla") == "xla"
    with pytest.raises(KernelError, match="tensor cores of Hopper and Ampere GPUs, not for cpu"):
        form("mosaic")


def test_on_a_hopper_the_kernel_but_not_for_other_dtypes_or_devices(hopper, monkeypatch):
    assert form() == form("mosaic") == "mosaic"
    assert form(arrays=[jnp.ones((8, 8))]) == "xla"
    with jax.default_device(ARRAYS[0].device):
        assert form() == "xla"
    monkeypatch.setattr(jax, "device_count", lambda: 8)  # no one knows what is split
    assert form() == "xla" and form("mosaic") == "mosaic"  # who asks for it knows


@pytest.mark.parametrize(
    ("kind", "cores", "found"), [("NVIDIA H100 80GB HBM3", 132, "mosaic"), ("NVIDIA B200", 148, "xla")]
)
def test_of_a_device_that_is_not_there_its_kind(kind, cores, found):
    with on((kind, "gpu", cores)):
        run = decide("matmul", "auto", None, ARRAYS)
        assert (run.form, run.device.sms) == (found, cores)


@needs_ampere_kernels
@pytest.mark.parametrize(("device", "smem_kib"), [(A100, 163), (A40, 99)], ids=["a100", "a40"])
def test_on_ampere_the_kernel_with_the_limits_and_the_tiles_of_the_gpu(device, smem_kib):
    kind, _, cores = device
    with on(device):
        run = decide("matmul", "auto", Occupancy(reserved_sms=16), ARRAYS)
    assert (run.form, run.generation, run.device.kind) == ("mosaic", AMPERE, kind)
    assert (run.device.sms, run.device.smem_limit_bytes) == (cores, smem_kib * 1024)
    assert run.knobs == Occupancy(tile_m=128, tile_n=64, tile_k=64, stages=3, reserved_sms=16)
    requested = Occupancy(tile_m=64)
    with on(device):
        assert decide("matmul", "auto", requested, ARRAYS).knobs == requested  # tiles that are named stay


def test_on_ampere_the_twin_where_jax_does_not_compile_the_kernel(monkeypatch):
    monkeypatch.setattr("jshard._compat.kernel_capability", lambda: 9)  # as for an absent GPU outside of a plan
    with on(A100):
        assert form() == "xla"
        monkeypatch.setattr("jshard._compat.kernel_capability", lambda: 8)
        monkeypatch.setattr("jshard._compat.COMPILES_FOR_AMPERE", False)
        assert form() == "xla"
        with pytest.raises(KernelError, match=r"need jax 0\.12 or newer"):
            form("interpret")
        monkeypatch.setattr("jshard._compat.COMPILES_FOR_AMPERE", True)
        assert form() == "mosaic"


def test_axes_over_which_xla_splits_arrays():
    with on(H200, axes=[("tensor", 2)]):
        assert form() == "xla"
    device = AbstractDevice(device_kind="NVIDIA H200", num_cores=132, platform="gpu")
    mesh = AbstractMesh((2,), ("tensor",), axis_types=(AxisType.Manual,), abstract_device=device)
    with jax.sharding.use_abstract_mesh(mesh):
        assert form() == "mosaic"


def test_the_interpreter_runs_on_one_device():
    with jax.set_mesh(js.mesh()), pytest.raises(KernelError, match="cannot run step by step here"):
        form("interpret")
    assert form("interpret") == "interpret"


def test_on_a_cpu_the_audit_names_the_twin():
    def step(x, w):
        return jax.lax.psum((js.kernels.matmul(x, w).astype(jnp.float32)).sum(), "fsdp")

    rows, whole = PartitionSpec("fsdp"), PartitionSpec()
    sharded = jax.shard_map(step, mesh=js.mesh(), in_specs=(rows, whole), out_specs=whole)
    found = js.audit(jax.jit(sharded).lower(jnp.ones((16, 8), jnp.bfloat16), ARRAYS[0]))
    assert [str(use) for use in found.schedule.kernels] == ["matmul as plain XLA"]
    assert "Kernels: matmul as plain XLA." in str(found)
