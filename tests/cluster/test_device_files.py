"""Devices that the table lacks are described in a file, for `--topology FILE.toml:SHAPE`."""

import dataclasses
import pathlib
import re

import pytest

from jshard import cli
from jshard.cluster.machine import assumptions_of
from jshard.cluster.target_config import target_config_text
from jshard.cluster.topology import parse_topology
from jshard.errors import ShardingError
from jshard.facts.device_files import read_device
from jshard.facts.devices import DEVICES
from tests.gpu_compiler import needs_gpu_compiler
from tests.micro_gpt import MODELS

_ROOT = pathlib.Path(__file__).parents[2]
_PAGE = _ROOT / "docs" / "planning.md"
_FILES = sorted((_ROOT / "benchmarks" / "devices").glob("mi*.toml"))
H20, MI350X = re.findall(r"```toml\n(.*?)```", _PAGE.read_text(), re.DOTALL)


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "h20.toml"
    path.write_text(H20)
    return path


def test_what_is_given_counts_and_the_rest_is_that_of_the_row(file):
    topology = parse_topology(f"{file}:4x8")
    device, base = topology.device, DEVICES["h200"]
    assert topology.num_devices == 32 and topology.describe().startswith("32 x NVIDIA H20, 96 GB, 4 hosts")
    assert device.flops_per_s["bf16"] == 148e12 and device.hbm_bytes == 102_625_181_696
    assert (device.fast, device.attention, device.platform, device.name) == (base.fast, base.attention, "gpu", "h200")
    assert (device.slow.gb_per_s, device.slow.least_percent) == (25, base.slow.least_percent)
    assert device.target is not None
    text = target_config_text(device.target)
    assert "core_count: 78\n" in text and "memory_bandwidth: 4000000000000\n" in text
    assumed = assumptions_of(topology)
    assert (assumed.flops_per_s, assumed.matmul_efficiency, assumed.memory_bytes_per_s) == (148e12, 0.8, 4e12)
    source = "h20.toml: NVIDIA H20 data sheet"
    assert device.sources["flops_per_s"] == device.sources["hbm_bytes"] == device.sources["matmul_efficiency"] == source
    assert source in device.sources["slow_bytes_per_s"]
    assert device.sources["attention_efficiency"] == base.sources["attention_efficiency"]


def test_an_amd_gpu_may_have_another_architecture(tmp_path):
    path = tmp_path / "mi350x.toml"
    path.write_text(MI350X)
    device = read_device(path)
    assert device.target is not None and device.compiler == "rocm"
    text = target_config_text(device.target)
    assert 'gcn_arch_name: "gfx950:sramecc+:xnack-"' in text and "core_count: 256\n" in text
    assert "shared_memory_per_core: 163840\n" in text


@pytest.mark.parametrize("path", _FILES, ids=lambda path: path.stem)
def test_the_files_of_amd_gpus_are_whole(path):
    device = read_device(path)
    assert device.title.startswith(f"AMD {path.stem.upper()}, ")
    # All that is not an MI300X's: of its memory, and of its products.
    assert {"hbm_bytes", "hbm_bytes_per_s"} <= set(device.stated_in)
    assert device.matmul != DEVICES["mi300x"].matmul
    is_cdna4 = path.stem.startswith("mi35")
    assert device.target is not None
    assert ("gfx950" in target_config_text(device.target)) == is_cdna4
    assert (device.flops_per_s["bf16"] > 2e15) == (device.fast.gb_per_s > 500) == is_cdna4


def test_the_file_in_the_guide_is_one_of_these():
    assert {path.stem for path in _FILES} == {"mi325x", "mi350x", "mi355x"}
    written = (_ROOT / "benchmarks" / "devices" / "mi350x.toml").read_text()
    assert MI350X.removeprefix("# mi350x.toml\n") == written


def test_a_file_that_changes_nothing_is_the_row(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text('like = "v5p"\ntitle = "Cloud TPU v5p"\nsource = "the table"\n')
    assert read_device(path) == dataclasses.replace(DEVICES["v5p"], stated_in={})


WRONG = {
    "no file": (None, "No such file"),
    "no TOML": ("like = ", "Invalid value"),
    "no like": ('title = "x"\nsource = "y"\n', "it is missing, and should be a quoted string"),
    "other like": (H20.replace('"h200"', '"h20"'), 'like = "h200"'),
    "key": (H20.replace("hbm_bytes =", "hbm_byte ="), "do:    hbm_bytes"),
    "dtype": (H20.replace("bf16", "bf61"), r"do:    flops_per_s.bf16"),
    "text": (H20.replace("4.0e12", '"4 TB/s"'), "it is '4 TB/s', and should be a number from 1"),
    "zero": (H20.replace("core_count = 78", "core_count = 0"), "it is 0, and should be"),
    "order": (H20.replace("least = 70", "least = 85"), "least <= stated <= most"),
    "percent": (H20.replace("most = 90", "most = 120"), "they are 70, 80, 120, in percent"),
    "architecture": (MI350X.replace('"gfx950"', "'gfx950\"'"), "should be the name of an AMD architecture"),
    "architecture of NVIDIA": (H20 + 'gfx = "gfx950"\n', "is not by AMD"),
    "architecture of a TPU": (H20.replace('"h200"', '"v5e"') + 'gfx = "gfx950"\n', "is not by AMD"),
    "cores of a TPU": (H20.replace('"h200"', '"v5e"'), "has no description for its compiler"),
    "host of a TPU": ('like = "v5e"\ntitle = "x"\nsource = "y"\nhost = { name = "PCIe" }\n', "has no gb_per_s either"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_describes_no_device_is_refused(tmp_path, case):
    text, said = WRONG[case]
    path = tmp_path / "h20.toml"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ShardingError, match="The file does not describe a device") as caught:
        parse_topology(f"{path}:1x8")
    assert said in str(caught.value) and str(path) in str(caught.value)


@needs_gpu_compiler
def test_a_plan_for_it_is_compiled(file, capsys, monkeypatch):
    monkeypatch.chdir(file.parent)
    assert cli.main(["plan", str(MODELS / "gpt.py"), "--topology", "h20.toml:1x8"]) == 0
    assert "8 x NVIDIA H20, 96 GB" in capsys.readouterr().out
