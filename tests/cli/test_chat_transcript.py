"""From a folder of Hugging Face and chats to adapters and merged weights, in six commands; PEFT has equal logits."""

import json
import sys

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jshard as js
from jshard import cli
from jshard.cli._stored import StoredRun
from jshard.data import HuggingFaceTokenizer, load_chats
from tests.chat_folders import CHATML, MARKED, conversation, write_rows, write_tokenizer

pytestmark = pytest.mark.slow

SIZES = {
    "vocab_size": 258,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
    "rope_theta": 5e5,
}
COMMANDS = """
train llama --data chats.jsonl --tokenizer hf --init-from hf --config chat.toml --out run
eval run
sample run --chat --prompt hello --tokens 8
ckpt export run adapters --format peft
ckpt export run merged --merge
train llama --data chats.jsonl --tokenizer hf --init-from hf --adapters adapters --config chat.toml --out again
"""
SETTINGS = """
sample_tokens = 0
track = []

[recipe]
num_steps = 6
sequence_length = 96
batch_size = 16
accumulate = 2
warmup_steps = 0
learning_rate = 0.01
eval_sequences = 8

[recipe.model]
scan = true

[recipe.model.lora]
rank = 4
"""


def made(transformers, torch, kind):
    """A small random model of Transformers, with a tokenizer that has a chat template."""
    torch.manual_seed(0)
    if kind == "qwen3":
        config = transformers.Qwen3Config(**SIZES, head_dim=16, tie_word_embeddings=True)
        model = transformers.Qwen3ForCausalLM(config)
    else:
        config = transformers.LlamaConfig(**SIZES, rope_parameters=LLAMA3)
        model = transformers.LlamaForCausalLM(config)
    model.save_pretrained("hf")


# PEFT's, of a name that Transformers has renamed.
@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")
@pytest.mark.parametrize("kind", ["qwen3", "llama 3.1"])
def test_the_transcript(kind, tmp_path, monkeypatch, capsys):
    transformers, torch = pytest.importorskip("transformers"), pytest.importorskip("torch")
    peft = pytest.importorskip("peft")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", sys.path[:])
    made(transformers, torch, kind)
    write_tokenizer(tmp_path / "hf")
    rows = [conversation(f"what is {n} plus one?", f"it is {n + 1}.", "thanks", "welcome") for n in range(60)]
    write_rows(tmp_path / "chats.jsonl", *rows)
    (tmp_path / "chat.toml").write_text(SETTINGS)
    for line in COMMANDS.strip().splitlines():
        assert cli.main(line.split()) == 0, line
    said = capsys.readouterr().out
    assert "57 conversations of chats.jsonl" in said and "perplexity" in said
    assert "and the adapters of adapters" in said

    ids = np.random.default_rng(0).integers(0, 256, (8, 80))
    held, _ = StoredRun.read(tmp_path / "run", command=()).restored_model(js.mesh())
    ours = np.asarray(nnx.jit(lambda model, ids: model(ids))(held.model, jnp.asarray(ids)))
    with torch.no_grad():
        given = torch.from_numpy(ids)
        merged, info = transformers.AutoModelForCausalLM.from_pretrained("merged", output_loading_info=True)
        assert not info["missing_keys"] and not info["unexpected_keys"]
        base = transformers.AutoModelForCausalLM.from_pretrained("hf")
        before = base(given).logits.numpy()
        adapted = peft.PeftModel.from_pretrained(base, "adapters")
        assert np.abs(ours - before).max() > 0.1  # it was trained
        np.testing.assert_allclose(ours, merged(given).logits.numpy(), atol=1e-5)
        np.testing.assert_allclose(ours, adapted(given).logits.numpy(), atol=1e-5)
        # The other way round: PEFT's own files begin the run where this one has ended.
        adapted.save_pretrained("theirs")
    from safetensors.numpy import load_file

    ours_there, theirs = (load_file(f"{folder}/adapter_model.safetensors") for folder in ("adapters", "theirs"))
    assert ours_there.keys() == theirs.keys()
    assert all((ours_there[name] == theirs[name]).all() for name in theirs)
    first = [json.loads(line) for line in (tmp_path / "again" / "metrics.jsonl").read_text().splitlines()]
    last = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert first[0]["loss"] < last[0]["loss"]
    # The exported tokenizer has the template.
    assert transformers.AutoTokenizer.from_pretrained("merged").chat_template == CHATML


@pytest.mark.parametrize("template", [CHATML, MARKED])
def test_texts_and_masks_are_those_of_transformers(template, tmp_path):
    transformers = pytest.importorskip("transformers")
    tokenizer_file = write_tokenizer(tmp_path / "hf", template)
    row = conversation("hé\n", " it is <|im_end|>", "{{ so }}", "\n\nyes  ")
    path = write_rows(tmp_path / "chats.jsonl", row)
    data = load_chats([path], sequence_length=200, tokenizer=HuggingFaceTokenizer(tokenizer_file), held_out=[path])
    sample = data.train[0]
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "hf").apply_chat_template(
        row["messages"], return_dict=True, return_assistant_tokens_mask=template == MARKED
    )
    size = len(theirs["input_ids"]) - 1
    assert sample["inputs"][:size].tolist() == theirs["input_ids"][:-1]
    assert sample["targets"][:size].tolist() == theirs["input_ids"][1:]
    if template == MARKED:
        assert sample["weights"][:size].tolist() == theirs["assistant_masks"][1:]
