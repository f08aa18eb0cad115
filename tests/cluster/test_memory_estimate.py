"""A step as it is estimated from the traced model, against what the compiler for GPUs lays out and schedules.

The configurations are some of benchmarks/memory_configurations.py. It needs the extra `plan-gpu`, and no GPU.
"""

import pytest

from benchmarks import memory
from benchmarks.memory_configurations import FULL
from tests.gpu_compiler import needs_gpu_compiler

CONFIGURATIONS = {configuration.name: configuration for configuration in FULL}


@needs_gpu_compiler
@pytest.mark.parametrize("name", ["0.5B, scan", "1.6B, full, zero2", "1.6B, full, hsdp, plain attention"])
def test_the_estimate_is_near_what_is_compiled(name: str):
    configuration = CONFIGURATIONS[name]
    row = memory.row_of(configuration, memory.compiled_row(configuration))
    assert row["held_bytes"] == pytest.approx(row["held_compiled_bytes"], rel=0.05)
    assert row["estimate_bytes"] == pytest.approx(row["peak_bytes"], rel=0.15)
    assert row["estimate_s"] == pytest.approx(row["compiled_s"], rel=0.15)
