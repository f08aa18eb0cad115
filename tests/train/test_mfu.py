"""MFU and peak bytes: the table of devices, and the line that prints the formula."""

import types

import jax
import pytest

from jshard.recipes import step as mfu
from jshard.recipes.model_file import dense_flops


def devices(kind, count=1, **attributes):
    fields = {"device_kind": kind, "platform": "gpu", "process_index": 0} | attributes
    return [types.SimpleNamespace(**fields) for _ in range(count)]


# The names are those that jax gives.
@pytest.mark.parametrize(
    ("kind", "flops_per_s"),
    [
        ("NVIDIA H100 80GB HBM3", 989.5e12),
        ("NVIDIA H100 PCIe", 756.5e12),
        ("NVIDIA H200", 989.5e12),
        ("NVIDIA A100-SXM4-40GB", 312e12),
        ("NVIDIA A40", 149.7e12),
        ("NVIDIA B200", 2.25e15),
        ("Tesla V100-SXM2-16GB", 125e12),
        ("TPU v4", 275e12),
        ("TPU v5p", 459e12),
        ("TPU v6 lite", 918e12),
        ("AMD Instinct MI300X", 1307.4e12),
    ],
)
def test_the_peak_of_a_device(kind, flops_per_s):
    peak = mfu.device_peak(devices(kind))
    assert peak is not None
    assert peak.flops_per_s == flops_per_s
    assert kind in peak.source


@pytest.mark.parametrize(
    "kind",
    [
        "NVIDIA RTX A4000",  # has "A40" in it
        "NVIDIA L40",
        "NVIDIA H20",
        "NVIDIA GB300",
        "TPU v4 lite",
        "NVIDIA H100 80GB HBM3 MIG 1g.10gb",
    ],
)
def test_a_device_that_is_only_like_one_of_the_table_has_no_peak(kind):
    with pytest.warns(UserWarning, match=f"The peak of {kind} is unknown, so no MFU is shown") as reported:
        assert mfu.device_peak(devices(kind)) is None
    assert len(reported) == 1


def test_devices_of_two_kinds_have_no_peak():
    with pytest.warns(UserWarning, match="NVIDIA A100-SXM4-40GB, NVIDIA H200"):
        assert mfu.device_peak(devices("NVIDIA H200") + devices("NVIDIA A100-SXM4-40GB")) is None


def test_cpus_have_no_peak_and_that_is_no_warning(recwarn):
    assert mfu.device_peak(jax.devices()) is None
    assert not recwarn


def test_the_share_and_the_line_that_explains_it():
    peak = mfu.Peak(2e12, "measured")
    used = mfu.Mfu(*dense_flops(num_parameters=1_425_600, num_tokens=4096), peak)
    assert used.of(0.1) == pytest.approx(0.175177728)
    assert used.describe() == (
        "MFU = flops per step / step time / peak; "
        "flops per step = 6 x 1,425,600 parameters x 4,096 tokens = 3.50e+10; "
        "peak = 2.00e+12 flops/s (measured)"
    )


def test_peak_bytes_are_measured_where_the_backend_counts():
    here = [devices("x", memory_stats=lambda n=n: {"peak_bytes_in_use": n})[0] for n in (5, 7, 6)]
    elsewhere = devices("x", process_index=1, memory_stats=lambda: pytest.fail("of another process"))
    assert mfu.peak_bytes(here + elsewhere, compiled_bytes=3) == (7, "measured")


@pytest.mark.parametrize("stats", [None, {}, {"bytes_in_use": 5}])
def test_peak_bytes_are_the_compilers_where_it_does_not(stats):
    assert mfu.peak_bytes(devices("x", memory_stats=lambda: stats), compiled_bytes=3) == (3, "compiled")
