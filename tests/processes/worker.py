"""One process of a run: trains the micro recipe a few steps and prints what it saw as JSON.

python worker.py PROCESS_ID NUM_PROCESSES PORT FOLDER
"""

import json
import os
import sys
from pathlib import Path

process_id, num_processes, port = map(int, sys.argv[1:4])
folder = Path(sys.argv[4])
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = (
    "--xla_cpu_collective_call_terminate_timeout_seconds=1200 --xla_cpu_collective_timeout_seconds=1200"
)

import jax

jax.config.update("jax_num_cpu_devices", 8 // num_processes)
if num_processes > 1:
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(
        f"localhost:{port}", num_processes=num_processes, process_id=process_id, initialization_timeout=120
    )

import numpy as np

import jshard as js
from jshard import checkpoint
from jshard.train import data, load_model_file
from jshard.train.loop import create, fit

TEXT = np.frombuffer(b"the quick brown fox jumps over the lazy dog. " * 400, dtype=np.uint8)

model_file = load_model_file(Path(__file__).parents[1] / "micro_gpt.py")
recipe = model_file.recipe()[1]
corpus = data.Corpus(train=TEXT[:15000], held_out=TEXT[15000:], description="a fox")
report: dict = {"devices": [jax.local_device_count(), jax.device_count()]}
for name, mesh in {"zero3": js.mesh(), "hsdp": js.mesh(replica=2)}.items():
    rows = data.local_rows(recipe.batch_size, mesh)
    val_loss = fit(model_file, recipe, mesh=mesh, corpus=corpus, out=folder / name)
    model, _ = create(model_file, recipe, mesh)
    kernel = model.blocks[0].mlp.up.kernel.get_raw_value()
    restored = checkpoint.restore(folder / name / "checkpoint", like={"model": model, "step": 0})
    report[name] = {
        "rows": rows,
        "val_loss": val_loss,
        "local_shards": len(kernel.addressable_shards),
        "restored_step": restored["step"],
    }
print(json.dumps(report))
