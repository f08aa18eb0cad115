"""A run is exported by its folder alone, and Transformers loads what came of it: the logits are equal."""

import sys

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jshard as js
from jshard import cli
from jshard.cli._stored import StoredRun

pytestmark = pytest.mark.slow

SMALL = ["model.n_layer=2", "model.n_head=4", "model.d_model=64", "model.d_ff=96", "model.vocab_size=300"]
OF = {
    "gpt": ["model.positions=learned"],
    "llama": ["model.n_kv_head=2", "model.rope_theta=500.0", "model.head_dim=24"],
}


@pytest.mark.parametrize("tied", ["true", "false"])
@pytest.mark.parametrize("name", OF)
def test_transformers_has_the_logits_of_the_run(name, tied, tmp_path, monkeypatch, capsys):
    transformers, torch = pytest.importorskip("transformers"), pytest.importorskip("torch")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", sys.path[:])
    (tmp_path / "text.txt").write_text("the quick brown fox jumps over the lazy dog. " * 400)
    settings = [*SMALL, *OF[name], f"model.tied={tied}", f"model.scan={tied}"]
    words = [word for setting in settings for word in ("--set", setting)]
    words += ["--set", "learning_rate=0.03"]  # large weights: what differs is seen
    asked = ["--data", "text.txt", "--steps", "8", "--out", "mine", "--track", "--sample-tokens", "0"]
    assert cli.main(["train", name, *asked, *words]) == 0
    assert cli.main(["ckpt", "export", "mine", "hf"]) == 0
    assert capsys.readouterr().out.endswith(": model.safetensors, config.json, tokenizer.json, tokenizer_config.json\n")
    tokenizer = transformers.AutoTokenizer.from_pretrained("hf")
    assert (
        tokenizer("fox: \u0120 \u00e9\n").input_ids == [*"fox: \u0120 \u00e9\n".encode()]
        and tokenizer.eos_token_id == 0
    )

    theirs, info = transformers.AutoModelForCausalLM.from_pretrained("hf", output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    ids = np.random.default_rng(0).integers(0, 300, (8, 50))
    with torch.no_grad():
        wanted = theirs(torch.from_numpy(ids)).logits.numpy()
    held, step = StoredRun.read(tmp_path / "mine", command=()).restored_model(js.mesh())
    found = nnx.jit(lambda model, ids: model(ids))(held.model, jnp.asarray(ids))
    assert step == 8 and np.abs(wanted).max() > 0.1
    np.testing.assert_allclose(found, wanted, atol=1e-4)
