"""Eight CPU devices for every test, whatever the machine has; set up before jax starts."""

import os

# XLA:CPU aborts the process when a thread comes late to a collective, as on a loaded machine.
os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "")
    + " --xla_cpu_collective_call_terminate_timeout_seconds=1200"
    + " --xla_cpu_collective_timeout_seconds=1200"
    # Most of what the tests cost is compiling: machine code that is slow and soon made will do.
    + " --xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
)
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax

jax.config.update("jax_num_cpu_devices", 8)
# Strict dtype promotion is not possible: Flax norms mix bfloat16 with float32 on purpose.
jax.config.update("jax_numpy_rank_promotion", "raise")
