"""Two processes that would initialise different models are refused before any array is made."""

import socket
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jshard.engine.created import constants_digest, program_digest
from tests import compiling

ROOT = Path(__file__).parents[2]
TIMEOUT_S = 400


@pytest.mark.timeout(TIMEOUT_S)
def test_processes_with_different_seeds_are_refused_and_with_one_seed_make_one_model(tmp_path):
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    environment = compiling.environment() | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    logs = [tmp_path / f"stdout-{process}" for process in range(2)]
    started = []
    for process, log in enumerate(logs):
        command = [sys.executable, "-m", "tests.processes.seeded_worker", str(process), str(port)]
        with log.open("w") as out:
            started.append(subprocess.Popen(command, env=environment, cwd=ROOT, stdout=out, stderr=out))
    try:
        codes = [process.wait(TIMEOUT_S) for process in started]
    finally:
        for process in started:
            process.kill()
    texts = [log.read_text() for log in logs]
    assert codes == [0, 0], [text[-3000:] for text in texts]
    first, second = (dict(line.split(": ", 1) for line in text.splitlines() if ": " in line) for text in texts)
    for name in ("seed", "key", "numpy", "linen", "shape"):
        assert float(first[f"{name} same"]) == float(second[f"{name} same"]) > 0
        for text in (first[f"{name} different"], second[f"{name} different"]):
            assert "The processes would initialise different models." in text
            assert "process 1 differs from process 0" in text and "do: model = js.shard_init(" in text
    alone = nnx.Linear(64, 64, rngs=nnx.Rngs(0)).kernel[...]
    assert float(first["seed same"]) == pytest.approx(float(jnp.abs(alone).sum()), rel=1e-4)
    assert "constants" in first["numpy different"] and "programs" in first["shape different"]


def test_the_hashes_see_seeds_keys_and_arrays():
    def digests(seed: int, array: np.ndarray) -> tuple[str, str]:
        key = jax.random.key(seed)
        traced = jax.jit(lambda: (jax.random.normal(key, (4,)), jnp.asarray(array))).trace()
        return program_digest(traced.lower()), constants_digest(traced.jaxpr.consts)

    zeros, late = np.zeros(4096, np.float32), np.zeros(4096, np.float32)
    late[-1] = 1
    assert digests(0, zeros) == digests(0, zeros.copy())
    assert digests(0, zeros) != digests(1, zeros)
    assert digests(0, zeros)[1] != digests(0, late)[1]
    seeded = lambda seed: program_digest(jax.jit(lambda: jax.random.normal(jax.random.key(seed), (4,))).lower())
    assert seeded(0) == seeded(0) != seeded(1)
