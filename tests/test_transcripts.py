"""What a stranger does in the first hour, in an empty folder: own data to a trained, sampled and exported model."""

import json
import shlex
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from safetensors.numpy import load_file

from tests.test_docs_commands import SMALL, run

pytestmark = pytest.mark.wide

TEXT = "the quick brown fox jumps over the lazy dog. "


def done(commands: list[str], folder: Path) -> list[str]:
    """Runs commands; what each has shown."""
    assert len(commands) <= 12
    shown = []
    for command in commands:
        words = shlex.split(command)
        code, text = run([*words, *(SMALL if words[0] == "train" else [])], folder)
        assert code == 0, (command, text)
        shown.append(text)
    return shown


def check(shown: list[str], folder: Path, prompt: str, embedding: str) -> None:
    """Trained, evaluated as the run itself was, sampled, and exported as Transformers reads it."""
    trained, evaluated, sampled, _ = shown
    (metrics,) = folder.glob("runs/*/metrics.jsonl")
    losses = [json.loads(line) for line in metrics.read_text().splitlines()]
    assert f"{losses[-1]['val_loss']:.4f}" in trained and f"{losses[-1]['val_loss']:.4f}" in evaluated
    assert sampled.startswith(prompt) and len(sampled) > len(prompt)
    (weights,) = (folder / "hf").glob("*.safetensors")
    config = json.loads((folder / "hf/config.json").read_text())
    assert load_file(weights)[embedding].shape == (config["vocab_size"], 64)


@pytest.mark.timeout(600)
def test_a_file_of_documents_becomes_a_model(tmp_path):
    folder = tmp_path / "empty"
    folder.mkdir()
    (folder / "notes.jsonl").write_text("\n".join(json.dumps({"body": TEXT * 100}) for _ in range(40)))
    commands = [
        "train llama --data notes.jsonl --text-key body --steps 20",
        "eval runs/llama-tiny",
        "sample runs/llama-tiny --prompt 'the quick' --tokens 8",
        "ckpt export runs/llama-tiny hf",
    ]
    check(done(commands, folder), folder, "the quick", "model.embed_tokens.weight")


@pytest.mark.timeout(600)
def test_token_ids_of_nanogpt_become_a_model(tmp_path):
    """A character for each id, as its `shakespeare_char` has them; the tokenizer that made them as a file."""
    folder = tmp_path / "empty"
    folder.mkdir()
    ids = {c: i for i, c in enumerate(sorted(set(TEXT)))}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(ids, unk_token=" "))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = tokenizers.decoders.Fuse()
    tokenizer.save(str(folder / "characters.json"))
    for name, times in (("train.bin", 200), ("val.bin", 20)):
        np.array([ids[c] for c in TEXT * times], np.uint16).tofile(folder / name)
    commands = [
        "train gpt --data train.bin --held-out val.bin --dtype uint16 --steps 20"
        f" --set model.vocab_size={len(ids)} --set model.positions=learned",
        "eval runs/gpt-tiny",
        "sample runs/gpt-tiny --tokenizer characters.json --prompt 'the quick' --tokens 8",
        "ckpt export runs/gpt-tiny hf",
    ]
    check(done(commands, folder), folder, "the quick", "transformer.wte.weight")
