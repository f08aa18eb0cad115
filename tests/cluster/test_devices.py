"""The table of device facts: every number has a source, and the compiler's description is made from it."""

import pytest

from jshard.cluster.target_config import target_config_text
from jshard.facts.device_facts import Bounds
from jshard.facts.devices import CLOUDS, DEVICES, device_of, peak_of
from jshard.facts.gpu_target import NvidiaTarget

GPUS = [facts for facts in DEVICES.values() if facts.target is not None]


def of_target(name):
    target = DEVICES[name].target
    assert isinstance(target, NvidiaTarget)
    return target


@pytest.mark.parametrize("facts", DEVICES.values(), ids=lambda facts: facts.name)
def test_every_number_has_a_source_and_assumptions_say_so(facts):
    ranged = {f"{link}_{what}" for link in ("fast", "slow") for what in ("bytes_per_s", "range")}
    host = {"host_bytes_per_s"} if facts.host else set()  # of no TPU is the rate published
    assert bool(host) == (facts.platform == "gpu")
    given = {"flops_per_s", "hbm_bytes", "hbm_bytes_per_s", "fast_group", "matmul_efficiency", "attention_efficiency"}
    given |= {"target"} if facts.target else set()
    assert set(facts.sources) == given | ranged | host
    assumed = {name for name, source in facts.sources.items() if source.startswith("assumption: ")}
    assert assumed == ranged | host | ({"attention_efficiency"} if facts.compiler != "cuda" else set())
    for reached in (facts.matmul, facts.attention):
        assert 0 < reached.least < reached.stated < reached.most <= 100
        assert isinstance(reached, Bounds) == reached.source.startswith("bounds: ")
        assert reached.stated == pytest.approx((reached.least + reached.most) / 2, abs=1)
    for link in (facts.fast, facts.slow):
        assert 0 < link.range[0] < link.bytes_per_s < link.range[1]
    assert facts.slow.bytes_per_s < facts.fast.bytes_per_s < facts.hbm_bytes_per_s


def test_machines_of_clouds_have_adapters_of_their_own():
    rates = {name: facts.slow.gb_per_s for name, facts in CLOUDS.items()}
    assert rates == {
        "a3-high": 12.5,
        "a3-mega": 25,
        "p4d": 6.25,
        "p4de": 6.25,
        "p5": 50,
        "dgx-a100": 25,
        "dgx-h100": 50,
    }
    assert "800 Gb/s of GPUDirect-TCPX for a host of 8 GPUs" in CLOUDS["a3-high"].sources["slow_bytes_per_s"]


@pytest.mark.parametrize("facts", DEVICES.values(), ids=lambda facts: facts.name)
def test_peaks_are_dense_and_found_by_the_names_of_drivers(facts):
    kinds = {"a100": f"NVIDIA A100-SXM4-{facts.name[5:]}GB", "tpu7x": "TPU7x"}
    for name in ("v4", "v5e", "v5p", "v6e"):
        kinds[name] = f"TPU {name}"
    vendor = "AMD Instinct" if facts.compiler == "rocm" else "NVIDIA"
    kind = kinds.get(facts.name.partition("-")[0], f"{vendor} {facts.name.upper()}")
    assert device_of(kind) is device_of(facts.name) is facts
    peak = facts.flops_per_s["bf16"]
    assert peak_of(kind) == (peak, facts.sources["flops_per_s"].removesuffix(", dense"))
    if facts.target is not None:  # dense: TF32 half of bf16, fp8 twice
        assert facts.flops_per_s.get("tf32", peak / 2) == pytest.approx(peak / 2, rel=1e-3)
        assert facts.flops_per_s.get("fp8", 2 * peak) == pytest.approx(2 * peak, rel=1e-3)


@pytest.mark.parametrize("facts", GPUS, ids=lambda facts: facts.name)
def test_the_description_is_made_from_the_facts(facts):
    """Whether a compiler reads it, tests/cluster/test_topology.py asks one."""
    lines = [line.strip() for line in target_config_text(facts.target).splitlines()]
    assert {
        f"core_count: {facts.target.core_count}",
        f"device_memory_size: {round(facts.hbm_bytes * 0.95 / 0.80)}",  # XLA leaves a fifth of it
        f"memory_bandwidth: {int(facts.hbm_bytes_per_s)}",
        f'device_description_str: "{facts.target.description}"',
        f'platform_name: "{facts.compiler.upper()}"',
    } <= set(lines)
    assert sum(line.endswith("{") for line in lines) == lines.count("}")


def test_the_descriptions_differ_by_generation():
    h100, a100 = (target_config_text(of_target(name)) for name in ("h100", "a100-40"))
    of_hopper = (
        'platform_version: "Compute Capability 9.0a"',
        "feature_extension: ACCELERATED_FEATURES",
        "active_links: 18",
    )
    assert all(line in h100 and line not in a100 for line in of_hopper)
    assert 'platform_version: "Compute Capability 8.0"' in a100
    assert "shared_memory_per_core: 233472" in h100 and "shared_memory_per_core: 167936" in a100
    assert "shared_memory_per_block_optin: 232448" in h100 and "shared_memory_per_block_optin: 166912" in a100
    assert h100.count("matrix_unit_description {") == 1 and "matrix_unit_description" not in a100
    assert "key: 16" in h100 and "ops_per_clock: 512" in h100


def test_a_die_of_an_amd_card_is_described_by_its_architecture():
    text = target_config_text(DEVICES["mi250x"].target)
    assert 'gcn_arch_name: "gfx90a:sramecc+:xnack-"' in text and "threads_per_warp: 64" in text
    assert "shared_memory_per_core: 65536" in text and "cuda" not in text
