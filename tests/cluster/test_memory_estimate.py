"""The memory of a step, as it is estimated from the traced model, against what the compiler for GPUs lays out.

The configurations are some of benchmarks/memory.py. It needs the extra `plan-gpu`, and no GPU.
"""

import pytest

from benchmarks import memory
from tests.gpu_compiler import needs_gpu_compiler

CASES = {case.name: case for case in memory.FULL}


@needs_gpu_compiler
@pytest.mark.parametrize("name", ["0.5B, scan", "1.6B", "1.6B, remat full, hsdp"])
def test_the_estimate_is_near_what_is_compiled(name):
    row = memory._row(CASES[name])
    assert row["held_bytes"] == pytest.approx(row["held_compiled_bytes"], rel=0.05)
    assert row["estimate_bytes"] == pytest.approx(row["peak_bytes"], rel=0.15)
