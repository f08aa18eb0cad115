"""`jshard plan --topology mi300x:...` on a machine without an AMD GPU and without ROCm.

It needs the extra `plan-rocm`. What needs no compiler is in tests/cluster.
"""

import json
import sys

import pytest

from jshard import cli
from tests.gpu_compiler import needs_rocm_compiler
from tests.micro_gpt import MODELS, USERS_FILE

pytestmark = needs_rocm_compiler


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", sys.path[:])
    monkeypatch.delenv("JSHARD_DEBUG", raising=False)
    monkeypatch.delenv("LD_LIBRARY_PATH", raising=False)
    (tmp_path / "my_model.py").write_text(USERS_FILE)
    return tmp_path


@pytest.mark.parametrize("name", ["mi300x", "mi250x"])
def test_a_step_is_compiled_and_communicates_as_planned(capsys, name):
    assert cli.main(["plan", "my_model.py", "--topology", f"{name}:1x8", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["platform"], found["compiler"], found["compiled"]["fits"]) == ("gpu", "rocm", True)
    audit = found["compiled"]["audit"]
    assert audit["differences"] == [] and audit["memory_per_device"]["peak_bytes"] > 0
    assert {row["kind"] for row in audit["collectives"]} == {"all-gather", "reduce-scatter", "all-reduce"}
    assert found["compiled"]["options"]["xla_gpu_enable_latency_hiding_scheduler"] is True
    # Of products on an MI250X no measurement is published.
    assert (found["estimate"]["stated"] is None) == (name == "mi250x")


def test_convolutions_are_refused_before_compiling(capsys):
    assert cli.main(["plan", str(MODELS / "resnet.py"), "--topology", "mi300x:1x8"]) == 2
    assert "convolutions: XLA takes their kernels from MIOpen, which finds no GPU." in capsys.readouterr().err


def test_attention_by_cudnn_is_refused_by_its_own_error(capsys):
    arguments = ["--topology", "mi300x:1x8", "--set", "model.attention=cudnn"]
    assert cli.main(["plan", str(MODELS / "gpt.py"), *arguments]) == 2
    assert "cuDNN" in capsys.readouterr().err
