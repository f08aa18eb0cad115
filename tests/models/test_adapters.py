"""One setting gives a decoder LoRA: adapters that begin as PEFT's do, and are written and read in its layout."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file

import jshard as js
from jshard import cli
from jshard.recipes.building import abstract_model, check_source, create, create_from, new_model
from jshard.recipes.hf_config import HFConfigError, filled
from jshard.recipes.peft_folder import adapter_settings
from jshard.train import LoRA, TrainStep
from tests.hf_folders import config_of, write_folder
from tests.models.model_files import model_file, smaller, tiny

SIZES = {"vocab_size": 48, "block_size": 32, "n_layer": 2, "d_model": 32, "d_ff": 40}
MODELS = {
    "gpt": {"n_head": 2, "positions": "learned"},
    "llama": {"n_head": 4, "n_kv_head": 2, "scan": True},
    "moe": {"n_head": 4, "n_kv_head": 2},
}


def small(name, lora=LoRA(rank=4), **config):  # noqa: B008 - it is frozen
    recipe = smaller(tiny(name), sequence_length=16, **(SIZES | MODELS[name] | config), lora=lora)
    return dataclasses.replace(recipe, learning_rate=0.01, warmup_steps=0)


def values(model, kind=nnx.Param):
    flat = nnx.to_flat_state(nnx.state(model, kind))
    return {"/".join(map(str, path)): np.asarray(x) for path, x in flat}


def logits_of(model, tokens):
    result = nnx.jit(lambda model, tokens: model(tokens))(model, tokens)
    return np.asarray(result[0] if isinstance(result, tuple) else result)


@pytest.mark.wide
@pytest.mark.parametrize("name", MODELS)
def test_adapters_begin_as_nothing_and_alone_are_trained(name):
    file, recipe, mesh = model_file(name), small(name), js.mesh(fsdp=4, devices=jax.devices()[:4])
    model, optimizer = create(file, recipe, mesh)
    before = values(model)
    adapters = values(model, nnx.LoRAParam)
    targets = {"gpt": 4, "llama": 7, "moe": 4}[name]
    layers = 1 if "scan" in MODELS[name] or name == "moe" else 2  # a stack has one array for all
    assert len(adapters) == 2 * targets * layers
    for path, x in adapters.items():
        if path.endswith("lora_b"):
            assert not x.any()
        else:  # PEFT's: uniform up to 1 / sqrt(width)
            assert 0.9 < np.abs(x).max() * np.sqrt(x.shape[-2]) <= 1
    tokens = jnp.arange(8 * 16, dtype=jnp.int32).reshape(8, 16) % 48
    batch = js.shard_batch({"inputs": tokens, "targets": tokens}, mesh)
    step = TrainStep(file.loss_fn, model, optimizer, batch)
    losses = [float(step(batch)["loss"]) for _ in range(3)]
    assert losses[2] < losses[0]
    after = values(step.model)
    changed = {path for path in before if (before[path] != after[path]).any()}
    assert changed == set(adapters)
    # A is as good as random at first, and B zero: the product must count alpha / rank times.
    double = new_model(file, small(name, LoRA(rank=4, alpha=32.0)), mesh)
    nnx.update(double, nnx.state(step.model, nnx.Param))
    for path, x in nnx.to_flat_state(nnx.state(double, nnx.LoRAParam)):
        if path[-1] == "lora_b":
            x[...] = x[...] / 2
    np.testing.assert_allclose(logits_of(double, tokens), logits_of(step.model, tokens), atol=1e-5)


def test_targets_are_those_of_hugging_face():
    llama = model_file("llama")
    model = abstract_model(llama, small("llama", LoRA(rank=2, targets="q_proj, self_attn.v_proj")), js.mesh())
    flat = nnx.to_flat_state(nnx.state(model, nnx.LoRAParam))
    paths = {"/".join(path[:-1]) for path, _ in flat}
    assert paths == {"blocks/attention/q", "blocks/attention/v"}
    with pytest.raises(ValueError, match=r"no layer is called 'c_attn'; self_attn.q_proj, "):
        small("llama", LoRA(rank=2, targets="c_attn"))
    with pytest.raises(ValueError, match="computes no adapters"):
        small("gpt", mlp="pallas")
    with pytest.raises(ValueError, match=r"lora.rank=-1"):
        small("moe", LoRA(rank=-1))


@pytest.mark.wide
def test_adapters_on_a_tensor_axis_are_those_of_one_device():
    file, recipe = model_file("llama"), small("llama")
    tokens = jnp.arange(8 * 16, dtype=jnp.int32).reshape(8, 16) * 7 % 48
    norms = []
    for mesh in (js.mesh(fsdp=1, devices=jax.devices()[:1]), js.mesh(fsdp=2, tensor=2, devices=jax.devices()[:4])):
        model, optimizer = create(file, recipe, mesh)
        batch = js.shard_batch({"inputs": tokens, "targets": tokens}, mesh)
        step = TrainStep(file.loss_fn, model, optimizer, batch)
        norms.append([float(step(batch)["grad_norm"]) for _ in range(2)])
    np.testing.assert_allclose(norms[0], norms[1], rtol=1e-4)


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """A run of adapters over a folder of Qwen 3: its folder, adapters and merged weights, and the weights before."""
    folder = tmp_path_factory.mktemp("adapters")
    weights = write_folder(folder / "hf", config_of("qwen3", rms_norm_eps=1e-6, head_dim=8, vocab_size=256))
    (folder / "text.txt").write_text("the quick brown fox jumps over the lazy dog. " * 60)
    asked = ["--init-from", str(folder / "hf"), "--data", str(folder / "text.txt"), "--out", str(folder / "run")]
    sizes = ["sequence_length=16", "batch_size=8", "warmup_steps=0", "learning_rate=0.03", "eval_sequences=8"]
    sizes += ["model.lora.rank=4", "model.lora.alpha=6", "model.lora.targets=q_proj,o_proj,down_proj"]
    words = [word for setting in sizes for word in ("--set", setting)]
    assert cli.main(["train", "llama", *asked, *words, "--steps", "3", "--track", "--sample-tokens", "0"]) == 0
    assert cli.main(["ckpt", "export", str(folder / "run"), str(folder / "adapters"), "--format", "peft"]) == 0
    assert cli.main(["ckpt", "export", str(folder / "run"), str(folder / "merged"), "--merge"]) == 0
    return folder, weights


@pytest.mark.wide
def test_an_export_has_pefts_names_and_the_sums(exported):
    folder, weights = exported
    adapters = load_file(folder / "adapters" / "adapter_model.safetensors")
    modules = ("self_attn.q_proj", "self_attn.o_proj", "mlp.down_proj")
    names = [f"base_model.model.model.layers.0.{module}.lora_{part}.weight" for module in modules for part in "AB"]
    assert sorted(adapters) == sorted(names)
    assert adapters[names[4]].shape == (4, 24) and adapters[names[5]].shape == (16, 4)  # down: 24 in, 16 out
    config = json.loads((folder / "adapters" / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], config["peft_type"]) == (4, 6.0, "LORA")
    assert config["target_modules"] == ["down_proj", "o_proj", "q_proj"]
    assert config["base_model_name_or_path"] == str(folder / "hf")
    merged = load_file(folder / "merged" / "model.safetensors")
    assert merged.keys() == weights.keys()
    for name, before in weights.items():
        stem = f"base_model.model.{name.removesuffix('.weight')}"
        wanted = before
        if f"{stem}.lora_A.weight" in adapters:
            wanted = before + 1.5 * adapters[f"{stem}.lora_B.weight"] @ adapters[f"{stem}.lora_A.weight"]
            assert np.abs(wanted - before).max() > 1e-3
        np.testing.assert_allclose(merged[name], wanted, atol=1e-6)
    assert json.loads((folder / "merged" / "config.json").read_text())["model_type"] == "qwen3"


@pytest.mark.wide
def test_a_run_with_adapters_is_not_exported_without_them(exported, capsys):
    folder, _ = exported
    assert cli.main(["ckpt", "export", str(folder / "run"), str(folder / "x")]) == 2
    said = capsys.readouterr().err
    assert "The run has adapters." in said and "--merge" in said and "--format peft" in said
    assert cli.main(["ckpt", "export", str(folder / "run"), str(folder / "x"), "--merge", "--format", "peft"]) == 2
    assert cli.main(["ckpt", "export", str(folder / "run"), str(folder / "x"), "--merge", "--own-names"]) == 2
    assert not (folder / "x").exists()


@pytest.mark.wide
def test_adapters_are_read_beside_their_base(exported, tmp_path):
    folder, _ = exported
    settings = adapter_settings(folder / "adapters")
    assert settings == {"rank": 4, "alpha": 6.0, "targets": "down_proj,o_proj,q_proj"}
    file = model_file("llama")
    config = dataclasses.replace(filled(tiny("llama").model, folder / "hf"), lora=LoRA(**settings), scan=True)
    recipe = dataclasses.replace(tiny("llama"), model=config)
    mesh = js.mesh(fsdp=4, devices=jax.devices()[:4])
    given = {"adapters": folder / "adapters"}
    check_source(file, recipe, mesh, folder / "hf", **given)
    model, _ = create_from(file, recipe, mesh, folder / "hf", **given)
    merged = dataclasses.replace(recipe, model=dataclasses.replace(config, lora=LoRA()))
    whole, _ = create_from(file, merged, mesh, folder / "merged")
    tokens = jnp.arange(8 * 16, dtype=jnp.int32).reshape(8, 16) * 7 % 48
    np.testing.assert_allclose(logits_of(model, tokens), logits_of(whole, tokens), atol=1e-5)
    other = dataclasses.replace(recipe, model=dataclasses.replace(config, lora=LoRA(rank=4, targets="q_proj")))
    with pytest.raises(js.checkpoint.CheckpointError, match=r"down_proj\.lora_A"):
        check_source(file, other, mesh, folder / "hf", **given)


def test_adapters_of_another_kind_are_refused(tmp_path):
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"], "use_rslora": True}

    def settings(**keys):
        (tmp_path / "adapter_config.json").write_text(json.dumps(config | keys))
        return adapter_settings(tmp_path)

    assert settings() == {"rank": 4, "alpha": 16.0, "targets": "q_proj"}  # alpha / sqrt(4) = 16 / 4
    for key, value in {"use_dora": True, "bias": "all", "peft_type": "IA3", "rank_pattern": {"a": 2}}.items():
        with pytest.raises(HFConfigError, match="of a kind that is not computed") as error:
            settings(**{key: value})
        assert key in str(error.value)
    with pytest.raises(HFConfigError, match="a pattern"):
        settings(target_modules=".*q_proj")
    with pytest.raises(HFConfigError, match="cannot be read"):
        adapter_settings(tmp_path / "gone")
