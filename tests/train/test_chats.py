"""Conversations are rendered by the tokenizer's own template, and only what the assistant writes is learned."""

import re

import numpy as np
import pytest

from jshard.data import DataError, HuggingFaceTokenizer, load_chats
from tests.chat_folders import CHATML, MARKED, THINKING, conversation, write_rows, write_tokenizer

pytest.importorskip("tokenizers")
pytest.importorskip("jinja2")

OTHER = conversation("bye", "see you")


def loaded(tmp_path, *rows, template=CHATML, sequence_length=64, **options):
    tokenizer = HuggingFaceTokenizer(write_tokenizer(tmp_path / "model", template))
    path = write_rows(tmp_path / "chats.jsonl", *rows)
    options.setdefault("held_out", [write_rows(tmp_path / "held.jsonl", OTHER)])
    return load_chats([path], sequence_length=sequence_length, tokenizer=tokenizer, **options)


def text_of(data, ids):
    """The text of ids with the marks of turns."""
    return data.tokenizer._tokenizer.decode([int(i) for i in ids], skip_special_tokens=False)


def learned(data, sample):
    return text_of(data, sample["targets"][sample["weights"] > 0])


def test_a_conversation_is_the_text_of_its_template_and_its_replies_are_learned(tmp_path):
    data = loaded(tmp_path, conversation("hi", "hello", "so?", "yes"), sequence_length=100)
    sample = data.train[0]
    size = int((sample["segment_ids"] == 1).sum())
    text = text_of(data, [sample["inputs"][0], *sample["targets"][:size]])
    assert text == (
        "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nhello<|im_end|>\n"
        "<|im_start|>user\nso?<|im_end|>\n<|im_start|>assistant\nyes<|im_end|>\n"
    )
    assert learned(data, sample) == "hello<|im_end|>\nyes<|im_end|>\n"
    assert (sample["inputs"][1:size] == sample["targets"][: size - 1]).all()
    assert not sample["weights"][size:].any() and not sample["segment_ids"][size:].any()


def test_what_the_template_marks_is_learned(tmp_path):
    data = loaded(tmp_path, conversation("hi", "hello", "so?", "yes"), template=MARKED, sequence_length=100)
    assert learned(data, data.train[0]) == "hello<|im_end|>yes<|im_end|>"  # without the newlines


def test_a_template_that_shows_earlier_replies_otherwise_gives_a_text_for_each_reply(tmp_path):
    data = loaded(tmp_path, conversation("hi", "hello", "so?", "yes"), template=THINKING, pack=False)
    assert len(data.train) == 2 and "1 conversation split by turn" in data.description
    whole = loaded(
        tmp_path, conversation("hi", "hello", "so?", "yes"), template=THINKING, pack=False, sequence_length=120
    )
    thoughts = "<think>\n\n</think>\n\n"
    assert [learned(whole, whole.train[n]) for n in range(2)] == [
        f"{thoughts}hello<|im_end|>\n",
        f"{thoughts}yes<|im_end|>\n",
    ]
    assert "\nhello<|im_end|>" in text_of(whole, whole.train[1]["inputs"])  # the earlier one is without thoughts


def test_files_of_other_kinds_and_keys(tmp_path):
    turns = [{"from": "system", "value": "be kind"}, {"from": "human", "value": "hi"}, {"from": "gpt", "value": "ho"}]
    data = loaded(tmp_path, {"id": 1, "conversations": turns}, sequence_length=100)
    assert learned(data, data.train[0]) == "ho<|im_end|>\n"
    own = write_rows(tmp_path / "own.jsonl", {"chat": OTHER["messages"]})
    other = loaded(tmp_path, {"chat": conversation("a", "b")["messages"]}, key="chat", held_out=[own])
    assert learned(other, other.train[0]) == "b<|im_end|>\n"
    arrow = pytest.importorskip("pyarrow")
    parquet_files = pytest.importorskip("pyarrow.parquet")

    table = arrow.Table.from_pylist([conversation("hi", "hello"), {"messages": [{"role": "user", "content": "x"}]}])
    parquet_files.write_table(table, tmp_path / "chats.parquet")
    parquet = load_chats(
        [tmp_path / "chats.parquet"], sequence_length=64, tokenizer=data.tokenizer, held_out=[tmp_path / "held.jsonl"]
    )
    assert learned(parquet, parquet.train[0]) == "hello<|im_end|>\n"
    assert "1 left out: no token of the assistant" in parquet.description


def test_the_template_file_wins_over_the_config_and_dates_do_not_change(tmp_path):
    folder = tmp_path / "model"
    write_tokenizer(folder, template="{{ raise_exception('the old one') }}", bos_token={"content": "<|im_start|>"})
    (folder / "chat_template.jinja").write_text("{{ bos_token }}{{ strftime_now('%d %b %Y') }}{{ messages | tojson }}")
    path = write_rows(tmp_path / "chats.jsonl", {"messages": [{"role": "assistant", "content": "a<é"}]}, OTHER)
    # With one reply the text before it has no messages, and is no prefix.
    with pytest.raises(DataError, match="does not continue the prompt"):
        load_chats([path], sequence_length=64, tokenizer=HuggingFaceTokenizer(folder), held_out=[path])
    (folder / "chat_template.jinja").write_text(
        "{{ bos_token }}{{ strftime_now('%d %b %Y') }}{% generation %}{{ messages | tojson }}{% endgeneration %}"
    )
    data = load_chats([path], sequence_length=64, tokenizer=HuggingFaceTokenizer(folder), held_out=[path], pack=False)
    beginning = '<|im_start|>26 Jul 2024[{"role": "assistant", "content": "a<é"'
    assert text_of(data, data.train[0]["inputs"]).startswith(beginning)


def test_several_share_a_sequence_and_none_is_lost(tmp_path):
    rows = [conversation("q" * (n % 7), "a" * (1 + n % 5)) for n in range(23)]
    data = loaded(tmp_path, *rows, sequence_length=150)
    alone = loaded(tmp_path, *rows, sequence_length=150, pack=False)
    assert len(alone.train) == 23 and len(data.train) == 5  # of 19 to 28 tokens each
    parts = []
    for row in range(len(data.train)):
        sample = data.train[row]
        for segment in range(1, sample["segment_ids"].max() + 1):
            place = sample["segment_ids"] == segment
            assert sample["positions"][place].tolist() == list(range(place.sum()))
            parts.append(tuple(tuple(sample[key][place].tolist()) for key in ("inputs", "targets", "weights")))
    wanted = []
    for row in range(23):
        sample = alone.train[row]
        assert "segment_ids" not in sample and "positions" not in sample
        size = max(np.flatnonzero(sample["targets"])) + 1
        wanted.append(tuple(tuple(sample[key][:size].tolist()) for key in ("inputs", "targets", "weights")))
    assert sorted(parts) == sorted(wanted)


def test_too_long_conversations_are_cut_or_left_out_and_counted(tmp_path):
    data = loaded(tmp_path, conversation("hi", "hello" * 20), conversation("hi" * 50, "x"), conversation("a", "b"))
    assert "2 cut to 65 tokens" in data.description and "1 left out" in data.description
    assert len(data.train) == 2
    cut = next(data.train[n] for n in range(2) if "hello" in text_of(data, data.train[n]["inputs"]))
    assert cut["weights"][-1] == 1  # the last target is beyond the inputs


def test_a_twentieth_is_held_out_and_stays_so(tmp_path):
    rows = [conversation(f"question {n}", f"answer {n}") for n in range(400)]
    few = loaded(tmp_path, *rows[:40], held_out=[], pack=False)
    assert len(few.held_out) == 2 and len(few.train) == 38
    some = loaded(tmp_path, *rows[:300], held_out=[], pack=False)
    more = loaded(tmp_path, *rows, held_out=[], pack=False)
    texts = [{text_of(data, data.held_out[n]["inputs"]) for n in range(len(data.held_out))} for data in (some, more)]
    assert 5 < len(texts[0]) < 30 and texts[0] < texts[1]
    assert some.fingerprint != more.fingerprint


@pytest.mark.parametrize(
    ("row", "why"),
    [
        ({"text": "hi"}, "a list of messages is looked for under 'messages' and 'conversations'"),
        ({"messages": []}, "it has 'messages'"),
        ({"messages": ["hi"]}, "message 1 is a str"),
        ({"messages": [{"role": "narrator", "content": "once"}]}, "the role of message 1 is 'narrator'"),
        ({"messages": [{"role": "user"}]}, "message 1 of the role user has no content"),
        ({"messages": [{"role": "user", "content": "\ufdd0"}]}, "U+FDD0"),
    ],
)
def test_a_row_that_is_no_conversation_is_named_by_its_line(row, why, tmp_path):
    with pytest.raises(DataError, match=r"A row is not a conversation") as error:
        loaded(tmp_path, OTHER, row)
    assert f"{tmp_path / 'chats.jsonl'}, line 2" in str(error.value) and why in str(error.value)


def test_a_template_that_fails_is_named_with_the_line(tmp_path):
    template = "{% if messages | length > 2 %}{{ raise_exception('one turn each') }}{% endif %}" + CHATML
    with pytest.raises(DataError, match="one turn each") as error:
        loaded(tmp_path, OTHER, conversation("a", "b", "c", "d"), template=template)
    assert "line 2" in str(error.value) and "tokenizer_config.json" in str(error.value)
    with pytest.raises(DataError, match="The chat template is not valid"):
        loaded(tmp_path, OTHER, template="{% if %}")
    with pytest.raises(DataError, match="has no chat template"):
        loaded(tmp_path, OTHER, template=None)
    with pytest.raises(DataError, match=re.escape("SecurityError")):  # the sandbox: a template is somebody's program
        loaded(tmp_path, OTHER, template="{{ messages.__class__.__mro__[1].__subclasses__() }}")


def test_not_enough_conversations(tmp_path):
    with pytest.raises(DataError, match="There are not enough conversations") as error:
        loaded(tmp_path, conversation("hi"), held_out=[])
    assert "1 have no token of the assistant" in str(error.value)
