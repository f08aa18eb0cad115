"""The audit says which form of a kernel a program runs."""

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

import jshard as js
from jshard.inspect.hlo.module import parse_module
from jshard.inspect.hlo.schedule import KernelUse
from jshard.inspect.hlo.walk import kernels_in
from tests.scheduled_text import program

CALL = '%{} = bf16[8,8]{{1,0}} custom-call(%a, %a), custom_call_target="{}", metadata={{op_name="jit(f)/{}/k"}}'


def test_calls_are_counted_by_kernel_and_form():
    module = parse_module(
        program(
            "%a = bf16[8,8]{1,0} constant({...})",
            CALL.format("b", "mosaic_gpu_v2", "jshard.kernels.mlp[mosaic]"),
            CALL.format("c", "mosaic_gpu_v2", "transpose(jvp(jshard.kernels.mlp[mosaic]))"),
            CALL.format("d", "__cublas$gemm", "jshard.kernels.matmul[xla]"),
            CALL.format("e", "mosaic_gpu_v2", "somebody"),
        )
    )
    assert kernels_in(module) == (KernelUse("matmul", "xla", 0), KernelUse("mlp", "mosaic", 2))
    assert [str(use) for use in kernels_in(module)] == ["matmul as plain XLA", "mlp on Mosaic GPU (2 calls)"]


def test_on_a_cpu_the_audit_tells_of_the_twin():
    def step(x, w):
        return jax.lax.psum((js.kernels.matmul(x, w).astype(jnp.float32)).sum(), "fsdp")

    sharded = jax.shard_map(
        step, mesh=js.mesh(), in_specs=(PartitionSpec("fsdp"), PartitionSpec()), out_specs=PartitionSpec()
    )
    found = js.audit(jax.jit(sharded).lower(jnp.ones((16, 8), jnp.bfloat16), jnp.ones((8, 8), jnp.bfloat16)))
    assert found.schedule.kernels == (KernelUse("matmul", "xla", 0),)
    assert "Kernels: matmul as plain XLA." in str(found)
