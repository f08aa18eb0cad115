"""Requests about conversations and adapters that cannot be met are refused before anything is compiled."""

import pytest

from jshard import cli
from jshard.data.chat_rows import chat_key
from tests.chat_folders import conversation, write_rows, write_tokenizer

pytest.importorskip("tokenizers")
pytest.importorskip("jinja2")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_tokenizer(tmp_path / "model")
    write_rows(tmp_path / "chats.jsonl", *[conversation(f"q{n}", f"a{n}") for n in range(4)])
    write_rows(tmp_path / "texts.jsonl", {"text": "the quick brown fox " * 50, "messages": []})
    return tmp_path


@pytest.mark.parametrize(
    ("options", "what", "do"),
    [
        (["--data", "chats.jsonl"], "Conversations need the tokenizer of the model.", "--tokenizer qwen3/"),
        (["--data", "chats.jsonl", "texts.jsonl"], "The data are of several kinds.", "--data chats.jsonl"),
        (["--data", "texts.jsonl", "--pack", "no"], "Only conversations are packed.", "leave out --pack"),
        (["--adapters", "model"], "The adapters have no base.", "--init-from BASE --adapters model"),
        (["--init-from", "model", "--adapters", "model"], "The adapters cannot be read.", "--adapters FOLDER"),
        (["--set", "model.lora.targets=w1", "--set", "model.lora.rank=2"], "no layer is called 'w1'", "--print-config"),
    ],
)
def test_a_request_is_refused_with_what_to_do(options, what, do, folder, capsys):
    assert cli.main(["train", "llama", *options]) == 2
    said = capsys.readouterr().err
    assert what in said and do in said


def test_conversations_are_recognised_by_the_first_row(folder):
    assert chat_key(folder / "chats.jsonl") == "messages"
    assert chat_key(folder / "texts.jsonl") is None  # it has a text, too
    assert chat_key(folder / "texts.jsonl", "messages") == "messages"
    assert chat_key(folder / "chats.jsonl", "text") is None
    assert chat_key(folder / "gone.jsonl") is None
    (folder / "many").mkdir()
    (folder / "chats.jsonl").rename(folder / "many" / "a.jsonl")
    assert chat_key(folder / "many") == "messages"
