"""The table of device facts: every number has a source, and the compiler's description is made from it."""

import re

import pytest

from jshard.errors import RunError
from jshard.facts.devices import DEVICES, device_of, peak_of
from jshard.facts.gpu_target import accepted_text, target_config_text

GPUS = [facts for facts in DEVICES.values() if facts.target is not None]


def of_target(name):
    target = DEVICES[name].target
    assert target is not None
    return target


def values(text):
    """Plain fields of a text proto, by name; of a name that comes twice the last."""
    return dict(re.findall(r"^ *(\w+): (.*)$", text, re.MULTILINE))


def messages(text):
    """A text proto as nested lists, or an error if it is none."""
    stack = [[]]
    for line in text.splitlines():
        if opened := re.fullmatch(r" *(\w+) \{", line):
            inner = []
            stack[-1].append((opened[1], inner))
            stack.append(inner)
        elif re.fullmatch(r" *\}", line):
            stack.pop()
        else:
            found = re.fullmatch(r' *(\w+): ("[^"]*"|[\w.]+)', line)
            assert found, line
            stack[-1].append(found.groups())
    assert len(stack) == 1
    return stack[0]


@pytest.mark.parametrize("facts", DEVICES.values(), ids=lambda facts: facts.name)
def test_every_number_has_a_source_and_assumptions_say_so(facts):
    ranged = {f"{link}_{what}" for link in ("fast", "slow") for what in ("bytes_per_s", "range")}
    host = {"host_bytes_per_s"} if facts.host else set()  # of no TPU is the rate published
    assert bool(host) == (facts.platform == "gpu")
    given = {"flops_per_s", "hbm_bytes", "hbm_bytes_per_s", "fast_group"} | ({"target"} if facts.target else set())
    assert set(facts.sources) == given | ranged | host
    assert {name for name, source in facts.sources.items() if source.startswith("assumption: ")} == ranged | host
    for link in (facts.fast, facts.slow):
        assert 0 < link.range[0] < link.bytes_per_s < link.range[1]
    assert facts.slow.bytes_per_s < facts.fast.bytes_per_s < facts.hbm_bytes_per_s


@pytest.mark.parametrize("facts", DEVICES.values(), ids=lambda facts: facts.name)
def test_peaks_are_dense_and_found_by_the_names_of_drivers(facts):
    kinds = {"a100": f"NVIDIA A100-SXM4-{facts.name[5:]}GB", "v5e": "TPU v5e", "v5p": "TPU v5p", "v6e": "TPU v6e"}
    kind = kinds.get(facts.name.partition("-")[0], f"NVIDIA {facts.name.upper()}")
    assert device_of(kind) is device_of(facts.name) is facts
    peak = facts.flops_per_s["bf16"]
    assert peak_of(kind) == (peak, facts.sources["flops_per_s"].removesuffix(", dense"))
    if facts.target is not None:  # dense: TF32 half of bf16, fp8 twice
        assert facts.flops_per_s["tf32"] == pytest.approx(peak / 2, rel=1e-3)
        assert facts.flops_per_s.get("fp8", 2 * peak) == 2 * peak


@pytest.mark.parametrize("facts", GPUS, ids=lambda facts: facts.name)
def test_published_rates_of_the_units_give_the_peak_of_the_data_sheet(facts):
    if facts.target.rates is None:
        pytest.skip(f"no published rates for {facts.name}")
    unit = facts.target.rates.matrix[16]  # bf16
    rate = 2 * facts.target.core_count * unit.units_per_core * unit.ops_per_clock * unit.clock_rate_ghz * 1e9
    assert rate == pytest.approx(facts.flops_per_s["bf16"], rel=0.05)


def test_products_by_dtype():
    h100, a100, v5e = (DEVICES[name] for name in ("h100", "a100-80", "v5e"))
    assert h100.product_flops_per_s("bfloat16") == h100.product_flops_per_s("f16") == 989.5e12
    assert h100.product_flops_per_s("float8_e4m3fn") == h100.product_flops_per_s("f8e5m2") == 1979e12
    assert h100.product_flops_per_s("float32") == h100.product_flops_per_s("f32") == 494.7e12
    assert a100.product_flops_per_s("f8e4m3fn") == 312e12
    assert v5e.product_flops_per_s("float32") == 197e12


@pytest.mark.parametrize("facts", GPUS, ids=lambda facts: facts.name)
def test_the_description_is_a_text_proto_made_from_the_facts(facts):
    text = target_config_text(facts.target)
    found = values(text)
    assert found["core_count"] == str(facts.target.core_count)
    assert found["device_memory_size"] == str(facts.hbm_bytes)
    assert found["memory_bandwidth"] == str(int(facts.hbm_bytes_per_s))
    assert found["platform_name"] == '"CUDA"'
    assert found["device_description_str"] == f'"{facts.target.description}"'
    top = dict(messages(text))
    assert list(top) == [
        "gpu_device_info",
        "platform_name",
        "dnn_version_info",
        "runtime_version",
        "device_description_str",
    ]
    names = [name for name, _ in top["gpu_device_info"]]
    assert len(names) == len(set(names))


def test_the_descriptions_differ_by_generation():
    h100, a100 = (
        dict(dict(messages(target_config_text(of_target(n))))["gpu_device_info"]) for n in ("h100", "a100-40")
    )
    assert h100["cuda_compute_capability"] == [("major", "9"), ("feature_extension", "ACCELERATED_FEATURES")]
    assert a100["cuda_compute_capability"] == [("major", "8")]
    assert (h100["platform_version"], a100["platform_version"]) == (
        '"Compute Capability 9.0a"',
        '"Compute Capability 8.0"',
    )
    assert (h100["shared_memory_per_core"], a100["shared_memory_per_core"]) == ("233472", "167936")
    assert (h100["shared_memory_per_block_optin"], a100["shared_memory_per_block_optin"]) == ("232448", "166912")
    assert h100["device_interconnect_info"] == [("active_links", "18")]
    assert len(h100["matrix_unit_description"]) == 16 and "matrix_unit_description" not in a100
    bf16 = next(dict(dict(info)["value"]) for _, info in h100["matrix_unit_description"] if dict(info)["key"] == "16")
    assert bf16 == {"clock_rate_ghz": "1.8295201", "units_per_core": "4", "ops_per_clock": "512"}


def test_what_the_parser_does_not_know_is_dropped_and_named():
    target = of_target("h100")
    unknown = {"ecc_enabled", "matrix_unit_description"}

    def parses(text):
        return not any(name in text for name in unknown)

    text, dropped = accepted_text(target, parses=parses)
    assert set(dropped) == unknown
    assert parses(text) and "scalar_unit_description" in text and "core_count: 132" in text
    assert accepted_text(target, parses=lambda text: True) == (target_config_text(target), ())


def test_a_parser_that_takes_nothing_is_an_error_of_the_installation():
    with pytest.raises(RunError, match="does not take the description") as error:
        accepted_text(of_target("h100"), parses=lambda text: False)
    assert "core_count" in error.value.why and "ecc_enabled" not in error.value.why
