"""One of two processes that save; the second is slow to write on purpose.

python slowed_save.py PROCESS PORT FOLDER
"""

import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

import jshard as js
from jshard.checkpoint import storage

SLOW_S = 1.0

process, port, folder = int(sys.argv[1]), sys.argv[2], Path(sys.argv[3])
jax.config.update("jax_num_cpu_devices", 2)
jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.distributed.initialize(f"localhost:{port}", num_processes=2, process_id=process)

if process == 1:
    write = storage._Progress.on_write_end

    def slowed(self, keypath):
        time.sleep(SLOW_S)
        write(self, keypath)

    storage._Progress.on_write_end = slowed

sharding = NamedSharding(js.mesh(replica=1, fsdp=4), PartitionSpec("fsdp"))
state = {"w": jax.make_array_from_callback((8, 4), sharding, lambda box: jnp.ones((2, 4))), "step": 1}
with js.checkpoint.Checkpointer(folder) as checkpoints:
    checkpoints.save(1, state)
