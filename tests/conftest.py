"""Eight CPU devices for every test, whatever the machine has; set up before jax starts."""

import os
import tempfile

from tests.compiling import XLA_FLAGS

# XLA:CPU aborts the process when a thread comes late to a collective, as on a loaded machine.
os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "")
    + " --xla_cpu_collective_call_terminate_timeout_seconds=1200"
    + " --xla_cpu_collective_timeout_seconds=1200 "
    + XLA_FLAGS
)
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax

jax.config.update("jax_num_cpu_devices", 8)
# Strict dtype promotion is not possible: Flax norms mix bfloat16 with float32 on purpose.
jax.config.update("jax_numpy_rank_promotion", "raise")

# Many tests initialise the same model: equal programs are compiled once. A folder for each worker of xdist, as jax may
# read what another process has half written.
_programs = tempfile.TemporaryDirectory(prefix="jshard-tests-")
jax.config.update("jax_compilation_cache_dir", _programs.name)
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)
