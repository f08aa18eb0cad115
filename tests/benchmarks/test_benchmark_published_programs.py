"""What published programs do otherwise than jshard's, by arithmetic and in schedules that are made up."""

import dataclasses
import json
import types

import pytest

from benchmarks import published
from benchmarks.published_programs import (
    PROGRAMS,
    Elementwise,
    Program,
    Traffic,
    elementwise_bytes,
    estimated_as,
    program_of,
    with_elementwise_bytes,
)
from benchmarks.published_pytorch import computed_again_s
from jshard.cluster.machine import PlannedCluster
from jshard.cluster.topology import parse_topology
from jshard.inspect.hlo import Compute, Loop, Schedule
from jshard.inspect.hlo.work import EqualProducts, OpWork

ROWS = json.loads(published._ROWS.read_text())["rows"]
H100 = PlannedCluster(parse_topology("h100:1x8"))


@dataclasses.dataclass(frozen=True)
class Gpt:
    n_layer: int = 2
    d_model: int = 1024
    n_head: int = 8
    d_ff: int = 4096
    vocab_size: int = 50_000
    remat: str = "none"


@dataclasses.dataclass(frozen=True)
class Llama(Gpt):
    n_kv_head: int = 2
    head_width: int = 128


@dataclasses.dataclass(frozen=True)
class Run:
    model: Gpt
    sequence_length: int = 2048
    batch_size: int = 32
    accumulate: int = 2


def computing(*products, num_bytes=0.0):
    return Compute("an operation", OpWork(products, num_bytes))


ATTENTION = EqualProducts("bf16", 1e12, is_attention=True)
PRODUCT = EqualProducts("bf16", 1e12)
STEPS = (
    computing(num_bytes=1e6),
    Loop("layers", 10, (computing(ATTENTION, num_bytes=5e6), computing(num_bytes=2e6))),
    computing(PRODUCT, num_bytes=3e6),
    computing(num_bytes=4e6),  # the update
)


def plan_of(steps):
    """As much of a plan as estimates of programs read."""
    schedule = Schedule(windows=(), steps=steps, num_devices=8, flops=0.0)
    return types.SimpleNamespace(
        audit=types.SimpleNamespace(schedule=schedule),
        cluster=H100,
        topology=H100.topology,
        step=types.SimpleNamespace(plan=types.SimpleNamespace(num_parameters=1_000_000, mesh=(("fsdp", 8),))),
        estimates=H100.estimate(schedule),
    )


# ---- what is counted


def test_a_kernel_reaches_what_was_measured_of_the_next_shorter_sequence():
    flash = PROGRAMS["mpt"].attention
    h100, h200, a100 = (parse_topology(f"{name}:1x8").device for name in ("h100", "h200", "a100-80"))
    assert flash.efficiency(h100, head_width=128, sequence_length=8192) == pytest.approx(135 / 989.5)
    assert flash.efficiency(h200, head_width=128, sequence_length=8192) == pytest.approx(135 / 989.5)
    assert flash.efficiency(a100, head_width=128, sequence_length=3000) == pytest.approx(69 / 312)
    assert flash.efficiency(a100, head_width=64, sequence_length=65_536) == pytest.approx(97 / 312)
    assert flash.efficiency(a100, head_width=80, sequence_length=100) == pytest.approx(55 / 312)


def test_a_layer_of_mpt_reads_and_writes_what_its_operations_do():
    mpt = PROGRAMS["mpt"].elementwise
    # Norms 4 + 4, sums 6 + 6, GELU 4 of four times the width.
    assert mpt.forward.bytes_of(Gpt()) == 36 * 1024
    # Sums 6 + 6, norms 10 + 10, parts of queries, keys and values joined 12, biases 2 x (1 + 3 + 1) and 2 x 4, GELU 24.
    assert mpt.backward.bytes_of(Gpt()) == 86 * 1024
    assert mpt.again.bytes_of(Gpt()) == 30 * 1024
    assert PROGRAMS["mpt_torch_1"].elementwise.again == mpt.forward


def test_keys_of_a_llama_are_narrower():
    assert Traffic(width=2, keys=3, mlp=5).bytes_of(Llama()) == 2 * 1024 + 3 * 256 + 5 * 4096
    assert Traffic(keys=3).bytes_of(Gpt()) == 3 * 1024


def test_a_step_has_forward_again_only_with_checkpointing_and_gradients_in_each_microbatch():
    elementwise = Elementwise(
        forward=Traffic(width=1),
        backward=Traffic(width=2),
        again=Traffic(width=10),
        always_again=Traffic(width=20),
        logit_bytes=6,
        gradient_bytes=4,
        sum_bytes=3,
    )
    num_tokens, num_parameters = 100, 7
    of_rest = num_tokens * 50_000 * 6 + num_parameters * (2 * 4 + 1 * 3)
    for remat, again in (("none", 20), ("full", 10)):
        run = Run(Gpt(remat=remat))
        found = elementwise.step_bytes(run, num_tokens=num_tokens, num_parameters=num_parameters)
        assert found == num_tokens * 2 * 1024 * (1 + 2 + again) + of_rest


# ---- which program ran


def test_every_row_names_a_program_or_a_repository_and_others_are_as_planned():
    of_nvidia = [row for row in ROWS if published._compiler(row) == "cuda"]
    assert all(program_of(row) is not PROGRAMS["unknown"] for row in of_nvidia)
    assert all(row["program"] in PROGRAMS for row in ROWS if "program" in row)
    assert program_of({"source": "a/b file @1"}) is PROGRAMS["unknown"]
    assert program_of({"source": "mosaicml/llm-foundry file @1"}) is PROGRAMS["mpt"]
    assert program_of({"source": "mosaicml/llm-foundry file @1", "program": "jax"}) is PROGRAMS["jax"]


# ---- schedules


def test_elementwise_operations_before_the_update_get_other_bytes():
    schedule = Schedule(windows=(), steps=STEPS, num_devices=8, flops=0.0)
    assert elementwise_bytes(schedule.steps[:3]) == 21e6
    changed = with_elementwise_bytes(schedule, 42e6)
    assert elementwise_bytes(changed.steps[:3]) == pytest.approx(42e6)
    assert changed.steps[2:] == STEPS[2:]  # the product, and the update
    assert changed.steps[1].steps[0] == STEPS[1].steps[0]  # attention


def test_a_program_as_planned_has_the_estimate_of_the_plan():
    plan = plan_of(STEPS)
    assert estimated_as(PROGRAMS["unknown"], plan, Run(Gpt())) == plan.estimates


def test_a_slower_attention_kernel_takes_longer_and_a_lower_clock_longer_still():
    plan = plan_of(STEPS)
    program = PROGRAMS["torchtitan"]
    found = estimated_as(program, plan, Run(Gpt()))
    of_plan = plan.estimates.stated.split_s["attention"]
    assert found.stated.split_s["attention"] == pytest.approx(of_plan * 0.42 / (265 / 989.5), rel=1e-3)
    slower = estimated_as(program, plan, Run(Gpt()), clock_share=0.5)
    assert slower.stated.split_s["attention"] == pytest.approx(2 * found.stated.split_s["attention"], rel=1e-3)
    assert found.stated.split_s["products"] == plan.estimates.stated.split_s["products"]


def test_elementwise_operations_of_a_program_replace_the_compiled_ones():
    num_bytes = 10.0
    counted = Elementwise(Traffic(), Traffic(), Traffic(), logit_bytes=num_bytes)
    plan = plan_of(STEPS)
    found = estimated_as(Program("eager", None, counted), plan, Run(Gpt()))
    assumptions = plan.estimates.stated.assumptions
    expected_s = num_bytes * 50_000 * 32 * 2048 / 8 / (assumptions.memory_bytes_per_s * assumptions.memory_efficiency)
    launches_s = 11 * assumptions.launch_s
    elementwise_s = found.stated.split_s["elementwise"]
    assert elementwise_s == pytest.approx(expected_s * (1 + assumptions.straggling) + launches_s)
    assert found.stated.split_s["update"] == plan.estimates.stated.split_s["update"]


def test_the_last_products_are_added_with_full_checkpointing_alone():
    plan = plan_of(STEPS)
    program = Program("eager", whole_again=True)
    assert estimated_as(program, plan, Run(Gpt())) == plan.estimates
    run = Run(Gpt(remat="full"))
    found = estimated_as(program, plan, run)
    for case, before in zip(found.cases, plan.estimates.cases, strict=True):
        more_s = 2 * computed_again_s(run, {"fsdp": 8}, rows=2, assumptions=case.assumptions)
        assert case.step_s == pytest.approx(before.step_s + more_s)
