"""`jshard train --init-from` and `jshard ckpt` on a folder of Hugging Face: its config.json makes the recipe."""

import json
import sys

import numpy as np
import pytest
from safetensors.numpy import load_file

from jshard import cli
from tests.hf_folders import config_of, write_folder

CONFIG = config_of("llama", rms_norm_eps=1e-6, rope_theta=5e5)


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", sys.path[:])
    write_folder(tmp_path / "hf", CONFIG)
    return tmp_path


def change(here, **keys):
    (here / "hf/config.json").write_text(json.dumps(CONFIG | keys))


def printed(capsys, *words):
    assert cli.main(["train", "llama", "--init-from", "hf", "--print-config", *words]) == 0
    return json.loads(capsys.readouterr().out)


def test_config_json_sets_the_recipe_and_is_in_the_record(here, capsys):
    config = printed(capsys, "--set", "model.block_size=32", "--set", "model.n_head=4")
    model = config["recipe"]["model"]
    sizes = {"n_layer": 1, "n_head": 4, "n_kv_head": 2, "d_model": 16, "d_ff": 24, "vocab_size": 48, "block_size": 32}
    assert {name: model[name] for name in sizes} == sizes
    assert (model["rms_norm_eps"], model["rope_theta"], model["tied"]) == (1e-6, 5e5, False)


@pytest.mark.wide
def test_weights_are_no_longer_needed_once_a_run_has_their_settings(here, capsys):
    """A run is resumed with the recipe in its record."""
    (here / "ids.bin").write_bytes(bytes(range(48)) * 200)
    new = ["--init-from", "hf", "--data", "ids.bin", "--dtype", "uint8", "--steps", "1", "--mesh", "fsdp=8"]
    small = ["--set", "sequence_length=16", "--set", "batch_size=8", "--set", "eval_sequences=8"]
    always = ["--out", "mine", "--track", "--sample-tokens", "0"]
    assert cli.main(["train", "llama", *new, *small, *always]) == 0
    text = capsys.readouterr()
    assert "parameters of hf, with the settings of its config.json" in text.out + text.err
    record = json.loads((here / "mine/run.json").read_text())
    assert record["recipe"]["model"]["rms_norm_eps"] == 1e-6
    (here / "hf").rename(here / "gone")
    assert cli.main(["ckpt", "export", "mine", "out"]) == 0
    exported = json.loads((here / "out/config.json").read_text())
    assert {name: exported[name] for name in ("rms_norm_eps", "rope_theta", "num_key_value_heads")} == {
        "rms_norm_eps": 1e-6,
        "rope_theta": 5e5,
        "num_key_value_heads": 2,
    }
    assert cli.main(["train", "llama", "--resume", "--steps", "2", "--mesh", "fsdp=8", *always]) == 0


MIXTRAL = config_of("mixtral", num_local_experts=4, num_experts_per_tok=2, rms_norm_eps=1e-6, rope_theta=1e4)
SIZES = "n_layer", "n_head", "n_kv_head", "d_model", "d_ff", "vocab_size"


def test_a_folder_of_mixtral_is_imported_and_exported_as_it_was(tmp_path, monkeypatch, capsys):
    """The arrays bit by bit: jshard has one for all experts and layers, Transformers one for each."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", sys.path[:])
    weights = write_folder(tmp_path / "hf", MIXTRAL)
    assert cli.main(["train", "moe", "--init-from", "hf", "--print-config"]) == 0
    model = json.loads(capsys.readouterr().out)["recipe"]["model"]
    filled = {"n_expert": 4, "top_k": 2, "capacity": 0, "balance": 0.002, "rms_norm_eps": 1e-6, "rope_theta": 1e4}
    assert {name: model[name] for name in filled} == filled
    assert cli.main(["ckpt", "import", "hf", "ours", "--model", "moe", "--mesh", "fsdp=4,expert=2"]) == 0
    sets = [word for name in (*filled, *SIZES) for word in ("--set", f"model.{name}={model[name]}")]
    assert cli.main(["ckpt", "export", "ours", "out", "--model", "moe", *sets]) == 0
    written = load_file(tmp_path / "out/model.safetensors")
    assert written.keys() == weights.keys()
    for name, array in weights.items():
        np.testing.assert_array_equal(written[name], array)
    exported = json.loads((tmp_path / "out/config.json").read_text())
    assert (exported["model_type"], exported["num_local_experts"]) == ("mixtral", 4)


def refusal(capsys, *words):
    assert cli.main(["train", "llama", "--init-from", "hf", "--print-config", *words]) == 2
    return capsys.readouterr().err


def test_a_setting_that_differs_is_refused_with_both_values(here, capsys):
    text = refusal(capsys, "--set", "model.rms_norm_eps=1e-5")
    assert "rms_norm_eps: 1e-06 there, 1e-05 here (model.rms_norm_eps)" in text and "leave out the --set" in text


@pytest.mark.parametrize(
    ("keys", "line"),
    [
        ({"model_type": "granite", "residual_multiplier": 0.2}, 'model_type: "granite"'),
        ({"logits_scaling": 8.0}, "logits_scaling: 8.0  is not known here"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantized parameters are not read"),
        ({"hidden_act": "relu"}, 'hidden_act: "relu"  is supported as "silu" or "swish" only'),
    ],
)
def test_weights_of_another_model_are_refused_before_anything_is_read(keys, line, here, capsys):
    change(here, **keys)
    assert line in refusal(capsys)
    assert cli.main(["ckpt", "import", "hf", "ours", "--model", "llama"]) == 2
    assert line in capsys.readouterr().err and not (here / "ours").exists()


def test_adapters_alone_are_refused(here, capsys):
    (here / "hf/adapter_config.json").write_text('{"peft_type": "LORA"}')
    assert "adapters, not the weights of a model" in refusal(capsys)


@pytest.mark.parametrize("text", ["{", "[]", '"llama"', "\xff"])
def test_a_config_json_that_cannot_be_read_is_an_error_in_four_parts(text, here, capsys):
    (here / "hf/config.json").write_text(text, encoding="latin-1")
    assert "config.json cannot be read" in refusal(capsys)


def test_an_import_takes_the_settings_and_inspect_prints_the_table(here, capsys):
    assert cli.main(["ckpt", "import", "hf", "ours", "--model", "llama", "--mesh", "fsdp=8"]) == 0
    change(here, logits_scaling=8.0)
    capsys.readouterr()
    assert cli.main(["ckpt", "inspect", "hf"]) == 0
    rows = {line.split()[0]: line for line in capsys.readouterr().out.splitlines() if line.strip()}
    assert "1e-06" in rows["rms_norm_eps"] and "model.rms_norm_eps" in rows["rms_norm_eps"]
    assert "model.rope_theta, model.rope_scaling" in rows["rope_theta"]
    assert "is not known here" in rows["logits_scaling"]
    assert "use_cache" in rows["without"]
    assert cli.main(["ckpt", "inspect", "hf", "--json"]) == 0
    reported = json.loads(capsys.readouterr().out)["config"]
    assert {"name": "hidden_size", "value": 16, "field": "model.d_model", "problem": ""} in reported
