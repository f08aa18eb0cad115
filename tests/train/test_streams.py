"""A dataset of Hugging Face is streamed: each lane reads its own files once, and a run continues at its place."""

import json
import os
import shutil
import sys

import numpy as np
import pytest

from jshard import cli
from jshard.data import ByteTokenizer, DataError, HuggingFaceTokenizer, Loader, load_stream, stream_source
from jshard.data.stream_rows import RowStream, StreamAddress, stream_address
from jshard.data.stream_source import StreamPosition
from jshard.errors import MissingExtraError
from jshard.train.records import read_metrics
from jshard.train.run_checkpoints import RunCheckpoints
from tests.chat_folders import conversation, write_rows, write_tokenizer
from tests.micro_gpt import USERS_FILE

datasets = pytest.importorskip("datasets", reason="needs the extra datasets")
LENGTH = 32


def text(file, row):
    return f"file {file} row {row:03d}: {'abcdefgh'[file % 8] * (20 + 7 * row % 23)}"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Four files of forty texts, and a file of others."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "texts").mkdir()
    for file in range(4):
        write_rows(tmp_path / "texts" / f"part-{file}.jsonl", *[{"text": text(file, row)} for row in range(40)])
    write_rows(tmp_path / "others.jsonl", *[{"text": f"other text {row:04d} " * 3} for row in range(40)])
    return tmp_path


def loaded(address="hf:texts", *, held_out=("hf:others.jsonl",), batch_size=4, **options):
    return load_stream(address, sequence_length=LENGTH, batch_size=batch_size, held_out=held_out, **options)


def windows(texts):
    """The samples of texts, one after another, as often as needed."""
    tokens = np.concatenate([np.frombuffer(f"{one}\0".encode(), np.uint8) for one in texts])
    return [tokens[start : start + LENGTH + 1] for start in range(0, tokens.size - LENGTH, LENGTH)]


def whole(sample):
    return np.append(sample["inputs"], sample["targets"][-1]).tolist()


def test_each_lane_has_the_texts_of_its_own_files(folder):
    data = loaded()
    assert data.train.num_lanes == 4 and "in 4 lanes" in data.description
    for lane in range(4):
        expected = windows([text(lane, row) for row in range(40)])[:20]
        assert [whole(data.train[4 * index + lane]) for index in range(20)] == [one.tolist() for one in expected]


def test_a_lane_that_is_exhausted_starts_over(folder):
    data = loaded("hf:others.jsonl", batch_size=2)
    texts = [f"other text {row:04d} " * 3 for row in range(40)]
    expected = windows(texts * 3)[:150]
    assert [whole(data.train[number]) for number in range(150)] == [one.tolist() for one in expected]


def test_lanes_divide_the_batch_and_are_no_more_than_the_files(folder):
    assert [loaded(batch_size=size).train.num_lanes for size in (1, 2, 6, 8, 9)] == [1, 2, 3, 4, 3]


def test_a_process_reads_the_files_of_its_rows_alone_and_no_row_twice(folder, monkeypatch):
    read = []
    groups = RowStream.groups
    monkeypatch.setattr(RowStream, "groups", lambda self, lane, *rest: read.append(lane) or groups(self, lane, *rest))
    batches = {}
    for name, rows in {"all": range(8), "first": range(4), "second": range(4, 8)}.items():
        loader = Loader(data=loaded(batch_size=8), batch_size=8, seed=0, rows=rows)
        read.clear()
        batches[name] = list(loader.train(5))
        assert set(read) == {"all": {0, 1, 2, 3}, "first": {0, 1}, "second": {2, 3}}[name]
    for step in range(5):
        parts = np.concatenate([batches[name][step]["inputs"] for name in ("first", "second")])
        np.testing.assert_array_equal(batches["all"][step]["inputs"], parts)
    rows = [tuple(row) for batch in batches["all"] for row in batch["inputs"].tolist()]
    assert len(set(rows)) == len(rows) == 40


def test_the_first_rows_are_held_out_and_not_trained_on(folder):
    data = loaded(held_out=(), num_held_out=8)
    assert len(data.held_out) == 8 and "held out (the first 16 rows)" in data.description
    assert [whole(data.held_out[number]) for number in range(8)] == [
        one.tolist() for one in windows([text(0, row) for row in range(16)])[:8]
    ]
    expected = windows([text(0, row) for row in (*range(16, 40), *range(16, 40))])  # in every pass
    assert [whole(data.train[4 * index]) for index in range(60)] == [one.tolist() for one in expected[:60]]


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_a_stored_place_is_read_on_from_without_the_rows_before(kind, folder, monkeypatch):
    """Of several texts in a sample, and of one in several; also if reading was ahead of the position."""
    if kind == "parquet":
        as_tables(folder / "texts")
    source = loaded().train
    expected = [whole(source[number]) for number in range(120)]
    for num_samples in (4, 36, 100):
        ahead = loaded().train
        ahead.batch_order(4, 0)
        for number in range(num_samples + 12):
            ahead[number]
        state = json.loads(json.dumps(StreamPosition(ahead, num_samples).get_state()))
        other = loaded().train
        StreamPosition(other, 0).set_state(state)
        with monkeypatch.context() as patched:
            count = counted_rows(patched)
            samples = [whole(other[number]) for number in range(num_samples, num_samples + 8)]
        assert samples == expected[num_samples : num_samples + 8]
        assert count[0] <= 4 * 3 * 16  # a few groups of rows in each lane


def as_tables(texts):
    """The same texts as Parquet, with several row groups in each file."""
    import pyarrow.parquet

    for file in sorted(texts.iterdir()):
        rows = [json.loads(line) for line in file.read_text().splitlines()]
        table = pyarrow.Table.from_pylist(rows)
        pyarrow.parquet.write_table(table, file.with_suffix(".parquet"), row_group_size=7)
        file.unlink()


def counted_rows(monkeypatch):
    count = [0]
    read = RowStream._read

    def counting(self, part):
        for row in read(self, part):
            count[0] += 1
            yield row

    monkeypatch.setattr(RowStream, "_read", counting)
    return count


def test_without_a_place_samples_are_those_of_their_numbers(folder):
    source = loaded().train
    expected = [whole(source[number]) for number in range(40)]
    other = loaded().train
    assert [whole(other[number]) for number in (37, 5, 38, 0)] == [expected[number] for number in (37, 5, 38, 0)]


def train(*words):
    settings = ["eval_every=4", "checkpoint_every=4", "eval_sequences=8", "batch_size=8"]
    words = [*words, *(word for setting in settings for word in ("--set", setting)), "--track", "--sample-tokens", "0"]
    assert cli.main(["train", "mine.py", *words]) == 0


def losses(out):
    return [(line["step"], line.get("loss"), line.get("val_loss")) for line in read_metrics(f"{out}/metrics.jsonl")]


def without_its_last_checkpoint(source, out):
    """A copy of a run that seems to have been stopped after the checkpoint before the last."""
    shutil.copytree(source, out)
    steps = sorted(int(path.name) for path in (out / "checkpoints").iterdir() if path.name.isdigit())
    shutil.rmtree(out / "checkpoints" / str(steps[-1]))


def test_a_run_continues_at_its_place(folder, monkeypatch, capsys):
    (folder / "mine.py").write_text(USERS_FILE)
    monkeypatch.setattr(sys, "path", sys.path[:])
    train("--data", "hf:texts", "--steps", "12", "--out", "whole")
    assert json.loads((folder / "whole" / "run.json").read_text())["options"]["data"] == [f"hf:{folder}/texts:train"]
    without_its_last_checkpoint(folder / "whole", folder / "parts")
    begun = []
    init = stream_source._Reading.__init__
    monkeypatch.setattr(
        stream_source._Reading, "__init__", lambda self, *args: begun.append(args[3]) or init(self, *args)
    )
    capsys.readouterr()
    train("--out", "parts", "--resume")
    said = capsys.readouterr().out
    assert "checkpoints/8\n" in said and "are read again" not in said
    assert losses("parts") == losses("whole")
    # The first sample, for its form; and each of four lanes after the samples of 8 steps.
    assert sorted(begun) == [0, 16, 16, 16, 16]


def test_a_run_without_a_stored_place_reads_again_and_says_so(folder, monkeypatch, capsys):
    (folder / "mine.py").write_text(USERS_FILE)
    monkeypatch.setattr(sys, "path", sys.path[:])
    with monkeypatch.context() as patched:
        patched.setattr(RunCheckpoints, "_stream", property(lambda self: None, lambda *_: None), raising=False)
        train("--data", "hf:texts", "--steps", "8", "--out", "whole")
    without_its_last_checkpoint(folder / "whole", folder / "parts")
    train("--out", "parts", "--resume")
    assert "its first 32 samples are read again, and skipped" in capsys.readouterr().out
    assert losses("parts") == losses("whole")


def test_conversations_share_sequences_in_the_order_of_the_rows(folder):
    tokenizer = HuggingFaceTokenizer(write_tokenizer(folder / "model"))
    rows = [conversation(f"question {row}", "yes" * (1 + row % 5)) for row in range(60)]
    (folder / "chats").mkdir()
    write_rows(folder / "chats" / "a.jsonl", *rows)
    options = {"sequence_length": 200, "batch_size": 2, "tokenizer": tokenizer, "num_held_out": 2}
    data = load_stream("hf:chats", **options)
    samples = [data.train[number] for number in range(12)]
    learned = [tokenizer._tokenizer.decode(s["targets"][s["weights"] > 0].tolist()) for s in samples]
    replies = "".join(learned).replace("\n", "")
    assert replies.startswith("".join("yes" * (1 + row % 5) for row in range(16, 36)))
    assert all(sample["segment_ids"].max() > 1 for sample in samples)
    alone = load_stream("hf:chats", **options, pack=False).train[3]
    assert alone.keys() == {"inputs", "targets", "weights"} and "segment_ids" in samples[0]
    with pytest.raises(DataError, match="need the tokenizer of the model"):
        load_stream("hf:chats", sequence_length=200, batch_size=2)


def test_the_address_has_a_name_a_config_and_a_split():
    assert stream_address("hf:a/b") == StreamAddress("a/b", None, "train")
    assert stream_address("hf:a/b,ten:test") == StreamAddress("a/b", "ten", "test")
    assert stream_address("hf:./a:b/c") == StreamAddress("./a:b/c", None, "train")
    assert stream_address("hf:./a:b:test") == StreamAddress("./a:b", None, "test")
    assert stream_address("hf:/a/b.jsonl:validation").split == "validation"
    assert stream_address("texts.jsonl") is None and stream_address("runs/hf:a") is None
    with pytest.raises(DataError, match="has no name"):
        stream_address("hf:")


@pytest.mark.parametrize(
    ("words", "what", "do"),
    [
        (["--data", "hf:texts", "others.jsonl"], "A stream is the only data of a run.", "--data hf:texts"),
        (["--data", "hf:no/such_dataset"], "The dataset cannot be streamed.", "hf:NAME,CONFIG:SPLIT"),
        (["--data", "hf:texts:test"], "The dataset cannot be streamed.", "hf:NAME,CONFIG:SPLIT"),
        (
            ["--data", "hf:others.jsonl", *"--set eval_sequences=999".split()],
            "The stream ends within the part that is held out.",
            "eval_sequences=",
        ),
        (["--data", "hf:texts", "--text-key", "body"], "A document has no text of that name.", "--text-key text"),
        (
            ["--data", "hf:texts", "--workers", "2", *"--set eval_sequences=4".split()],
            "not read by worker",
            "--workers 0",
        ),
    ],
)
def test_what_cannot_be_streamed_is_refused(words, what, do, folder, monkeypatch, capsys):
    (folder / "mine.py").write_text(USERS_FILE)
    monkeypatch.setattr(sys, "path", sys.path[:])
    assert cli.main(["train", "mine.py", *words, "--set", "sequence_length=32", "--out", "refused"]) == 2
    said = capsys.readouterr().err
    assert what in said and do in said and not os.path.exists("refused")


def test_without_the_package_the_extra_is_named(folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'jshard\[datasets\]'"):
        loaded()


def test_a_stream_of_nothing_ends(folder):
    write_rows(folder / "empty.jsonl", *[{"text": ""} for _ in range(40)])
    with pytest.raises(DataError, match="has nothing to train on"):
        Loader(data=loaded("hf:empty.jsonl"), batch_size=2, seed=0, rows=range(2))


def test_other_settings_are_other_data(folder):
    tokenizer = HuggingFaceTokenizer(write_tokenizer(folder / "model"))
    kinds = [{}, {"batch_size": 2}, {"tokenizer": tokenizer}, {"held_out": ("others.jsonl",), "num_held_out": 5}]
    prints = [loaded(**kind).fingerprint for kind in kinds]
    assert len(set(prints[:3])) == 3 and loaded().fingerprint == prints[0]
    assert isinstance(loaded().tokenizer, ByteTokenizer)
