"""What PyTorch takes beyond jshard's program, by arithmetic over the sizes of a model."""

import dataclasses

import pytest

from benchmarks.published_pytorch import (
    KeptByPyTorch,
    computed_again_s,
    kept_bytes,
    logits_bytes,
    unfused_norms_s,
)
from jshard.cluster.machine import assumptions_of
from jshard.cluster.topology import parse_topology


@dataclasses.dataclass(frozen=True)
class Gpt:
    n_layer: int = 4
    d_model: int = 1024
    d_ff: int = 4096
    vocab_size: int = 50_000


@dataclasses.dataclass(frozen=True)
class Llama(Gpt):
    n_head: int = 8
    n_kv_head: int = 2
    head_width: int = 128


@dataclasses.dataclass(frozen=True)
class Run:
    model: Gpt
    sequence_length: int = 2048


A100 = assumptions_of(parse_topology("a100-80:1x8"))


def test_a_layer_of_a_gpt_keeps_what_korthikanti_et_al_count_without_dropout():
    kept = KeptByPyTorch.of(Gpt())
    assert kept.bytes_on(1) == 32 * 1024
    assert kept.bytes_on(8) == (8 + 24 / 8) * 1024  # norms are on each device
    assert KeptByPyTorch.of(Gpt(), split_sequence=True).bytes_on(8) == 4 * 1024


def test_a_layer_of_a_llama_keeps_fewer_keys_and_four_values_of_the_feed_forward_width():
    in_values = 4 * 1024 + 2 * 1024 + 2 * 256 + 4 * 4096
    assert KeptByPyTorch.of(Llama()).bytes_on(1) == 2 * in_values
    assert KeptByPyTorch.of(Llama(), unfused_norms=True).bytes_on(1) == 2 * (in_values + 4 * 1024)
    assert kept_bytes(Run(Llama()), {"fsdp": 8}, rows=3) == 4 * 3 * 2048 * 2 * in_values


def test_logits_are_there_four_times():
    run = Run(Gpt())
    assert logits_bytes(run, {"fsdp": 2}, rows=1) == 2048 * 50_000 * 14
    assert logits_bytes(run, {"fsdp": 1, "tensor": 4}, rows=1) == 2048 * 50_000 * 14 / 4
    assert logits_bytes(run, {"fsdp": 1, "tensor": 4}, rows=1, whole=True) == 2048 * 50_000 * 14
    assert logits_bytes(run, {"fsdp": 1, "context": 2}, rows=1) == 2048 * 50_000 * 7
    assert logits_bytes(run, {"fsdp": 2}, rows=1, fused_loss=True) == 2048 * 50_000 * 4
    assert logits_bytes(run, {"fsdp": 2}, rows=1, kept=True) == 2048 * 50_000 * 16


def test_the_last_product_of_each_layer_is_computed_again_and_its_parts_are_summed():
    run = Run(Gpt())
    alone_s = computed_again_s(run, {"fsdp": 8}, rows=8, assumptions=A100)
    at_peak_s = 4 * 2 * 8 * 2048 * 1024 * 4096 / A100.flops_per_s
    assert at_peak_s < alone_s < 2 * at_peak_s
    sums_s = 4 * A100.transfer_s("all-reduce", 2 * 8 * 2048 * 1024, range(4))
    split_s = computed_again_s(run, {"fsdp": 2, "tensor": 4}, rows=8, assumptions=A100)
    assert sums_s < split_s < sums_s + alone_s


def test_norms_in_single_operations_read_and_write_more_if_they_are_computed_again():
    run = Run(Gpt())
    once_s, twice_s = (
        unfused_norms_s(run, {"fsdp": 8}, rows=8, is_repeated=is_repeated, assumptions=A100)
        for is_repeated in (False, True)
    )
    num_values = 4 * 2 * 8 * 2048 * 1024
    assert once_s == pytest.approx(
        num_values * 100 / (A100.memory_bytes_per_s * A100.memory_efficiency) * (1 + A100.straggling), rel=0.01
    )
    assert twice_s == pytest.approx(once_s * 132 / 100, rel=0.01)
