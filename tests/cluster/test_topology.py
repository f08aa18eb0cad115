"""Topologies as text: what is read, what is refused, and what is said where a compiler is missing."""

import importlib.util
import subprocess
import sys

import pytest

from jshard.cluster import topology as module
from jshard.cluster.child_process import child_environment
from jshard.cluster.topology import TopologyError, parse_topology, require_compiler
from jshard.errors import MissingExtraError
from tests.gpu_compiler import needs_gpu_compiler, needs_rocm_compiler

HAS_TPU_COMPILER = importlib.util.find_spec("libtpu") is not None


@pytest.mark.parametrize(
    ("text", "device", "extents", "devices", "fast"),
    [
        ("h100:64x8", "h100", (1, 64, 8), 512, 8),
        ("h100:4x16x8", "h100", (4, 16, 8), 512, 8),
        ("gb200:128x4", "gb200", (1, 128, 4), 512, 72),
        ("gb200:2x4", "gb200", (1, 2, 4), 8, 8),
        ("v5p:8x8x8", "v5p", (1, 8, 8, 8), 512, 512),
        (" v6e:2x4 ", "v6e", (1, 2, 4), 8, 8),
        ("v5e:2x16x16", "v5e", (2, 16, 16), 512, 256),
        ("v5p:4x8x8x8", "v5p", (4, 8, 8, 8), 2048, 512),
        ("v4:4x4x4", "v4", (1, 4, 4, 4), 64, 64),
        ("tpu7x:2x4x4x4", "tpu7x", (2, 4, 4, 4), 256, 128),
        ("a3-high:16x8", "h100", (1, 16, 8), 128, 8),
        ("p4d:2x8", "a100-40", (1, 2, 8), 16, 8),
        ("mi250x:4x8", "mi250x", (1, 4, 8), 32, 8),
    ],
)
def test_read(text, device, extents, devices, fast):
    found = parse_topology(text)
    assert (found.text, found.device.name, found.extents) == (text.strip(), device, extents)
    assert (found.num_devices, found.fast_group) == (devices, fast)


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("h100:64x8", "512 x NVIDIA H100 SXM, 80 GB, 64 hosts with 8 each"),
        ("h100:4x16x8", "512 x NVIDIA H100 SXM, 80 GB, 4 slices of 16 hosts with 8 each"),
        ("v5e:4x4", "16 x Cloud TPU v5e, a slice of 4x4"),
        ("v5e:2x4x4", "32 x Cloud TPU v5e, 2 slices of 4x4"),
        ("tpu7x:2x2x1", "8 x Cloud TPU7x, one of two chiplets, a slice of 2x2x1 chips"),
    ],
)
def test_described(text, line):
    assert parse_topology(text).describe() == line


def refused(text):
    with pytest.raises(TopologyError) as error:
        parse_topology(text)
    return str(error.value)


def test_unknown_device_names_the_nearest():
    assert refused("h10:64x8") == (
        "There is no device 'h10'.\n"
        "  where: --topology h10:64x8\n"
        "  why:   the devices are h100, h200, a100-40, a100-80, b200, gb200, mi250x, mi300x, v4, v5e, v5p, v6e, tpu7x;"
        " with their own adapters a3-high, a3-mega, p4d, p4de, p5, dgx-a100, dgx-h100; and files, *.toml.\n"
        "  do:    --topology h100:64x8"
    )
    assert "do:    --topology a100-40:64x8  # or --topology a100-80:64x8" in refused("a100:2x8")
    assert "do:    --topology h100:64x8" in refused("")


@pytest.mark.parametrize("shape", ["", ":16", ":0x8", ":-1x8", ":1x2x3x4", ":8x", ":4x16"])
def test_unreadable_extents_of_gpus(shape):
    said = refused(f"h100{shape}")
    assert said.startswith("The topology cannot be read.\n") and said.endswith("do:    --topology h100:64x8")
    assert "HOSTSxGPUS or SLICESxHOSTSxGPUS, with at most 8 GPUs in a host, integers from 1" in said


def test_unreadable_extents_of_tpus():
    assert refused("v5p:8x8") == (
        "The topology cannot be read.\n"
        "  where: --topology v5p:8x8\n"
        "  why:   v5p: must be followed by XxYxZ, the extents of a slice, or SLICESxXxYxZ, integers from 1,"
        " not '8x8'.\n"
        "  do:    --topology v5p:8x8x8"
    )
    assert "followed by XxY, the extents" in refused("v5e:2x2x2x2")


def test_a_missing_compiler_is_one_line_to_install(monkeypatch):
    monkeypatch.setattr(module.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(module._compat, "plugin_versions", lambda cuda: None)
    with pytest.raises(MissingExtraError) as error:
        require_compiler("cuda")
    assert str(error.value) == (
        "The GPU compiler is not installed.\n"
        "  where: jshard plan --topology\n"
        "  why:   it needs jax[cuda12-local] and nvidia-cuda-nvcc-cu12, but no GPU, driver or CUDA.\n"
        "  do:    pip install 'jshard[plan-gpu]'"
    )
    with pytest.raises(MissingExtraError, match=r"pip install 'jshard\[plan-tpu\]'"):
        require_compiler("tpu")


def test_a_compiler_of_another_version_is_named_with_the_version_to_install(monkeypatch):
    monkeypatch.setattr(module._compat, "plugin_versions", lambda cuda: ("0.10.2", "0.12.0"))
    with pytest.raises(MissingExtraError) as error:
        require_compiler("cuda")
    assert error.value.why == "jax-cuda12-plugin has version 0.12.0, jaxlib 0.10.2."
    assert error.value.do == "pip install jax-cuda12-plugin==0.10.2 jax-cuda12-pjrt==0.10.2"


def test_the_compiler_for_amd_has_an_extra_of_its_own_and_three_numbers_of_jaxlibs_version(monkeypatch):
    versions = {}
    monkeypatch.setattr(module._compat, "plugin_versions", versions.get)
    with pytest.raises(MissingExtraError) as error:
        require_compiler("rocm")
    assert str(error.value) == (
        "The ROCm compiler is not installed.\n"
        "  where: jshard plan --topology\n"
        "  why:   it needs jax-rocm7-pjrt, but no AMD GPU and no ROCm.\n"
        "  do:    pip install 'jshard[plan-rocm]'"
    )
    versions["jax-rocm10-pjrt"] = ("0.12.0.1", "0.12.0")
    require_compiler("rocm")
    versions["jax-rocm7-pjrt"] = ("0.12.0.1", "0.11.2")
    with pytest.raises(MissingExtraError, match=r"jax-rocm7-pjrt has version 0.11.2, jaxlib 0.12.0.1") as error:
        require_compiler("rocm")
    assert error.value.do == "pip install jax-rocm7-pjrt==0.12.0"


def test_a_missing_assembler_is_named(monkeypatch):
    monkeypatch.setattr(module._compat, "plugin_versions", lambda cuda: ("0.10.2", "0.10.2"))
    monkeypatch.setattr(module, "_has_ptxas", lambda: False)
    with pytest.raises(MissingExtraError, match="ptxas, CUDA's assembler, is missing") as error:
        require_compiler("cuda")
    assert error.value.do == "pip install nvidia-cuda-nvcc-cu12"


PROGRAM = """
import sys
from jshard.errors import FourPartError
from jshard.cluster.topology import parse_topology, topology_devices
for text in sys.argv[1:]:
    try:
        devices = topology_devices(parse_topology(text))
        print(text, len(devices), devices[0].platform)
    except FourPartError as error:
        print(text, type(error).__name__)
"""


def devices_of(*texts):
    """In a process of its own, as `jshard plan` does it."""
    import os

    command = [sys.executable, "-c", PROGRAM, *texts]
    done = subprocess.run(
        command, env=child_environment(os.environ), capture_output=True, text=True, timeout=800, check=False
    )
    assert not done.returncode, done.stderr
    return done.stdout.splitlines()


@needs_gpu_compiler
def test_devices_of_gpu_clusters():
    names = ["h100:2x8", "h200:1x8", "a100-40:1x4", "a100-80:2x2x2", "b200:1x8", "gb200:2x4"]
    assert devices_of(*names) == [f"{name} {parse_topology(name).num_devices} gpu" for name in names]


@needs_rocm_compiler
def test_devices_of_clusters_of_amd_gpus():
    names = ["mi300x:1x4", "mi250x:2x8"]
    assert devices_of(*names) == [f"{name} {parse_topology(name).num_devices} gpu" for name in names]


@pytest.mark.skipif(not HAS_TPU_COMPILER, reason="needs the extra plan-tpu")
def test_devices_of_tpu_slices():
    names = ["v4:2x2x1", "v5e:2x4", "v5p:2x2x2", "v6e:2x4", "tpu7x:2x2x1", "v5e:2x2x4", "tpu7x:2x2x2x1"]
    expected = [f"{name} {parse_topology(name).num_devices} tpu" for name in names]
    assert devices_of(*names, "v5e:3x5") == [*expected, "v5e:3x5 TopologyError"]
