"""Tokenizers give ids that decode to the text, in the smallest dtype that holds them."""

import json
import sys

import numpy as np
import pytest

from jshard.data import DataError
from jshard.data.text import load_text
from jshard.data.tokenizer import ByteTokenizer, HuggingFaceTokenizer, transformers_files

TEXT = "def answer():\n    return 42\n\n\nclass Größe: pass\n"


@pytest.fixture
def tokenizer_file(tmp_path):
    """A byte-level BPE of 280 tokens, trained on the spot."""
    tokenizers = pytest.importorskip("tokenizers")
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=280,
        special_tokens=["<|endoftext|>", "<s>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([TEXT * 20], trainer)
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    path = tmp_path / "tokenizer.json"
    tokenizer.save(str(path))
    return path


def test_bytes_are_tokens():
    tokenizer = ByteTokenizer()
    (ids,) = tokenizer.encode_batch([TEXT.encode()])
    assert ids.tolist() == list(TEXT.encode())
    assert ids.dtype == np.uint8
    assert tokenizer.decode(ids) == TEXT
    assert tokenizer.decode(np.array([0xC3, 0x41])) == "\ufffdA"  # a generated sample may be cut anywhere


def test_hugging_face_file(tokenizer_file):
    tokenizer = HuggingFaceTokenizer(tokenizer_file)
    (ids,) = tokenizer.encode_batch([TEXT.encode()])
    assert tokenizer.decode(ids) == TEXT
    assert len(ids) < 0.7 * len(TEXT)
    assert ids.dtype == np.uint16
    assert ids.max() < tokenizer.vocab_size == 280
    assert tokenizer.end_of_text == 0
    assert 1 not in ids  # the <s> that the file would put in front
    assert tokenizer.name.startswith("tokenizer.json ")
    assert tokenizer.encode_batch([b""])[0].size == 0


def test_bytes_as_a_tokenizer_file_give_the_same_ids_and_texts(tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    files = transformers_files(None)
    text = TEXT + "".join(map(chr, [*range(1, 0x300), 0x2028, 0x1F98A]))
    read = tokenizers.Tokenizer.from_str(files["tokenizer.json"])
    assert read.encode(text).ids == [*text.encode()] and read.decode([*text.encode()]) == text
    assert read.encode(f"a{json.loads(files['tokenizer_config.json'])['eos_token']}b").ids == [97, 0, 98]
    (tmp_path / "tokenizer.json").write_text(files["tokenizer.json"])
    again = HuggingFaceTokenizer(tmp_path / "tokenizer.json")
    assert (again.vocab_size, again.end_of_text) == (ByteTokenizer.vocab_size, ByteTokenizer.end_of_text)


def test_a_tokenizer_file_is_handed_on_as_it_is(tokenizer_file):
    files = transformers_files(tokenizer_file)
    assert files["tokenizer.json"] == tokenizer_file.read_text()
    assert json.loads(files["tokenizer_config.json"])["eos_token"] == "<|endoftext|>"


def test_texts_of_a_batch_stay_apart(tokenizer_file, monkeypatch):
    monkeypatch.setattr("jshard.data.tokenizer._PIECE_CHARS", 60)
    monkeypatch.setattr("jshard.data.tokenizer._PIECES_AT_ONCE", 3)
    tokenizer = HuggingFaceTokenizer(tokenizer_file)
    texts = [TEXT * 7, "", "short", "x" * 500, TEXT * 3 + "no line end"]
    batch = tokenizer.encode_batch([text.encode() for text in texts])
    assert [tokenizer.decode(ids) for ids in batch] == texts


def test_vocabulary_with_a_gap_is_as_large_as_its_largest_id(tokenizer_file):
    content = json.loads(tokenizer_file.read_text())
    vocabulary = content["model"]["vocab"]
    vocabulary[max(vocabulary, key=vocabulary.get)] = 999
    tokenizer_file.write_text(json.dumps(content))
    assert HuggingFaceTokenizer(tokenizer_file).vocab_size == 1000


def test_text_through_a_tokenizer(tokenizer_file, tmp_path):
    (tmp_path / "code").mkdir()
    for name in "ab":
        (tmp_path / "code" / f"{name}.py").write_text(TEXT * 20)
    data = load_text([tmp_path / "code"], sequence_length=8, tokenizer=HuggingFaceTokenizer(tokenizer_file))
    ids = np.concatenate([data.train[i]["inputs"] for i in range(len(data.train))])
    assert ids.dtype == np.int32
    assert data.tokenizer.decode(ids).startswith(TEXT)
    ends = [0 in data.held_out[i]["inputs"] for i in range(len(data.held_out))]
    assert any(ends)  # each file ends in <|endoftext|>
    assert "M tokens (tokenizer.json" in data.description
    assert data.fingerprint != load_text([tmp_path / "code"], sequence_length=8).fingerprint


def test_missing_package(tokenizer_file, monkeypatch):
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(DataError, match=r"needs the package(.|\n)*pip install 'jshard\[hf\]'"):
        HuggingFaceTokenizer(tokenizer_file)
