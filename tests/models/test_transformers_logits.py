"""Each model of today has the logits of Transformers: its weights read from there, and what is written read there."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import save_file

import jshard as js
from jshard.recipes.hf_config import filled
from tests.hf_folders import ORIGINAL, config_of
from tests.models.model_files import module

pytestmark = pytest.mark.slow

llama, gemma = module("llama"), module("gemma")
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, ORIGINAL: 16}
YARN = {"rope_type": "yarn", "factor": 4.0, ORIGINAL: 16}
SIZES = {"num_hidden_layers": 3, "rms_norm_eps": 1e-6}
WINDOW = {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 0}
GEMMA = {"num_hidden_layers": 7, "head_dim": 8, "query_pre_attn_scalar": 8, "sliding_window": 5, "rope_theta": 1e6}
MODELS = {
    "Llama 2": config_of("llama", **SIZES, rope_theta=1e4),
    "Llama 3": config_of("llama", **SIZES, rope_theta=5e5),
    "Llama 3.1": config_of("llama", **SIZES, rope_theta=5e5, rope_scaling=LLAMA3),
    "Llama 3.2": config_of("llama", **SIZES, rope_theta=5e5, rope_scaling=LLAMA3, tie_word_embeddings=True),
    "Llama with biases": config_of("llama", **SIZES, attention_bias=True, mlp_bias=True, head_dim=8),
    "Mistral 7B v0.1": config_of("mistral", **SIZES, rope_theta=1e4, sliding_window=7),
    "Mistral 7B v0.3": config_of("mistral", **SIZES, rope_theta=1e6, sliding_window=None),
    "Mistral NeMo": config_of("mistral", **SIZES, rope_theta=1e6, sliding_window=None, head_dim=8),
    "Qwen 2.5 0.5B": config_of("qwen2", **SIZES, rope_theta=1e6, use_sliding_window=False, tie_word_embeddings=True),
    "Qwen 2.5 7B": config_of("qwen2", **SIZES, rope_theta=1e6, use_sliding_window=False),
    "Qwen 2 with a window": config_of("qwen2", **SIZES, rope_theta=1e6, **WINDOW),
    "Qwen 3 0.6B": config_of("qwen3", **SIZES, rope_theta=1e6, head_dim=8, tie_word_embeddings=True),
    "Qwen 3 8B": config_of("qwen3", **SIZES, rope_theta=1e6, head_dim=8),
    "Qwen 3 with YaRN": config_of("qwen3", **SIZES, rope_theta=1e6, head_dim=8, rope_scaling=YARN),
    "Gemma 3 1B": config_of("gemma3_text", **GEMMA),
    "Gemma 3 with scaled positions": config_of(
        "gemma3_text", **GEMMA, rope_scaling={"rope_type": "linear", "factor": 8.0}
    ),
}
IDS_BT = np.random.default_rng(0).integers(0, 48, (8, 40))


@pytest.mark.parametrize("name", MODELS)
def test_weights_of_transformers_have_its_logits_here_and_there_again(name, tmp_path):
    transformers, torch = pytest.importorskip("transformers"), pytest.importorskip("torch")
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(**MODELS[name])
    theirs = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.copy_(parameter + 0.1 * torch.randn_like(parameter))  # norms are 1 and biases 0 at first
    theirs.save_pretrained(tmp_path / "hf")
    wanted = logits_there(theirs)
    assert np.abs(wanted).max() > 0.1

    file, default = (gemma, gemma.GemmaConfig()) if "Gemma" in name else (llama, llama.LlamaConfig())
    own = filled(default, tmp_path / "hf")
    model = js.shard_init(
        lambda: file.build(own, nnx.Rngs(0)), lambda model: file.annotate(model, js.mesh()), mesh=js.mesh()
    )
    names = file.hf_names(own)
    model = js.checkpoint.restore(tmp_path / "hf", like={"model": model}, names=names)["model"]
    result = nnx.jit(lambda model, ids: model(ids))(model, jnp.asarray(IDS_BT))
    np.testing.assert_allclose(result, wanted, atol=1e-5)

    written = written_folder(tmp_path / "out", model, names, file.hf_config(own))
    read = {"attn_implementation": "eager", "output_loading_info": True}
    again, info = transformers.AutoModelForCausalLM.from_pretrained(written, **read)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    again.eval()
    np.testing.assert_allclose(logits_there(again), wanted, atol=1e-6)


def logits_there(model):
    import torch

    with torch.no_grad():
        return model(torch.from_numpy(IDS_BT)).logits.numpy()


def written_folder(folder, model, names, config):
    """A folder of config.json and weights, by the names that the model file gives."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    arrays = {}
    for path, array in jax.tree_util.tree_leaves_with_path(js.gather(model)):
        theirs = names[jax.tree_util.keystr(path, simple=True, separator="/")]
        if getattr(theirs, "transpose", False):
            array = array.T
        arrays[getattr(theirs, "names", (theirs,))[0]] = np.ascontiguousarray(array)
    save_file(arrays, folder / "model.safetensors", metadata={"format": "pt"})
    return folder
