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


def test_the_table_shows_each_case():
    rows = [
        {"name": name, "devices": 8, "held_bytes": 2**30, "held_compiled_bytes": 2**30}
        | {"estimate_bytes": 9 * 2**30, "peak_bytes": 8 * 2**30, "ratio": 9 / 8}
        for name in CASES
    ]
    lines = memory.table({"rows": rows})
    assert "| 124M | 8 | 1.00 | 1.00 | 9.00 | 8.00 | 1.12 |" in lines
    assert lines[-1] == f"Peak: {len(rows)} of {len(rows)} within 15 %, ratios from 1.12 to 1.12. Held: within 0.0%."
    assert CASES["1.6B, remat full, hsdp"].command == (
        "jshard plan models/gpt.py --recipe gpt2_xl --topology h100:8x8 --mesh replica=8,fsdp=8"
    )
