"""DPO: the reference is the model without its adapters, and the loss is that of its formula."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jshard as js
from jshard.data import DataError, HuggingFaceTokenizer, load_pairs
from jshard.recipes.building import create
from jshard.train import LoRA, TrainStep, without_adapters
from tests.chat_folders import write_rows, write_tokenizer
from tests.models.model_files import model_file, tiny

pytest.importorskip("tokenizers")
pytest.importorskip("jinja2")


def turns(*contents):
    return [{"role": ("user", "assistant")[n % 2], "content": content} for n, content in enumerate(contents)]


PAIRS = [
    {"chosen": turns("hi", "hello"), "rejected": turns("hi", "go away")},
    {"prompt": turns("hi"), "chosen": turns("", "hello")[1:], "rejected": turns("", "no")[1:]},
    {"prompt": "hi", "chosen": "good day", "rejected": "what"},
]


def loaded(tmp_path, *rows, sequence_length=64):
    tokenizer = HuggingFaceTokenizer(write_tokenizer(tmp_path / "model"))
    return load_pairs(write_rows(tmp_path / "pairs.jsonl", *rows), sequence_length=sequence_length, tokenizer=tokenizer)


def test_pairs_are_two_texts_with_the_last_reply(tmp_path):
    data = loaded(tmp_path, *PAIRS, {"chosen": turns("a", "b", "c", "d"), "rejected": turns("a", "b", "c", "e")})
    sample = data.held_out[0]
    replies = []
    for reply in ("chosen", "rejected"):
        ids = sample[f"{reply}_targets"][sample[f"{reply}_weights"] > 0]
        replies.append(data.tokenizer.decode(ids))
    assert replies == ["d\n", "e\n"]  # and not the turn that both have
    texts = {data.tokenizer.decode(data.train[n]["rejected_targets"]).rstrip("\0") for n in range(3)}
    assert len(texts) == 3 and len(data.train) == 3
    long = loaded(tmp_path, *PAIRS, {"prompt": "x" * 99, "chosen": "a", "rejected": "b"})
    assert "1 left out: longer than 65 tokens" in long.description


def test_a_row_that_is_no_pair_is_named_by_its_line(tmp_path):
    with pytest.raises(DataError, match=r"pairs\.jsonl, line 2"):
        loaded(tmp_path, PAIRS[0], {"chosen": turns("hi", "hello")})
    with pytest.raises(DataError, match="the last message is of the role user"):
        loaded(tmp_path, PAIRS[0], {"chosen": turns("hi"), "rejected": turns("hi")})


@pytest.mark.wide
def test_the_loss_is_that_of_the_formula_and_falls(tmp_path):
    file, mesh = model_file("dpo"), js.mesh(fsdp=2, devices=jax.devices()[:2])
    sizes = {"n_layer": 1, "d_model": 32, "d_ff": 32, "n_head": 2, "n_kv_head": 2, "vocab_size": 258}
    model = dataclasses.replace(tiny("dpo").model, **sizes, lora=LoRA(rank=4), beta=0.5)
    recipe = dataclasses.replace(tiny("dpo"), model=model, sequence_length=64, batch_size=2, warmup_steps=0)
    data = loaded(tmp_path, *PAIRS)
    rows = [data.train[n] for n in range(2)]
    batch = js.shard_batch({key: np.stack([row[key] for row in rows]) for key in rows[0]}, mesh)
    policy, optimizer = create(file, dataclasses.replace(recipe, learning_rate=0.02), mesh)
    step = TrainStep(file.loss_fn, policy, optimizer, batch)
    first = {name: float(x) for name, x in step(batch).items()}
    np.testing.assert_allclose(first["loss"], np.log(2), rtol=1e-6)  # both are the same at first
    assert first["margin"] == 0
    for _ in range(4):
        step(batch)

    def likelihoods(model, reply):
        logits = np.asarray(nnx.jit(lambda model, x: model(x))(model, jnp.asarray(batch[f"{reply}_inputs"])))
        log_p = jax.nn.log_softmax(logits)
        picked = np.take_along_axis(np.asarray(log_p), np.asarray(batch[f"{reply}_targets"])[..., None], -1)[..., 0]
        return (picked * np.asarray(batch[f"{reply}_weights"])).sum(-1)

    trained = nnx.clone(step.model)
    reference, _ = create(file, recipe, mesh)  # of the same seed, before a step
    gains = [likelihoods(trained, reply) - likelihoods(reference, reply) for reply in ("chosen", "rejected")]
    wanted = -np.log(1 / (1 + np.exp(-0.5 * (gains[0] - gains[1])))).mean()
    scalars = step(batch)
    np.testing.assert_allclose(scalars["loss"], wanted, rtol=1e-4)
    assert wanted < 0.5 and scalars["preferred"] == 1
    off = without_adapters(trained)
    np.testing.assert_allclose(likelihoods(off, "chosen"), likelihoods(reference, "chosen"), atol=1e-5)


def test_without_adapters_there_is_no_reference():
    with pytest.raises(ValueError, match=r"lora.rank=0"):
        dataclasses.replace(tiny("dpo").model, lora=LoRA())
