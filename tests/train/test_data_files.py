"""`--data`: documents, token ids and mixtures are read as what they are; what cannot be is said."""

import gzip
import json
from fractions import Fraction

import numpy as np
import pytest

from jshard.data import DataError, Loader, Mixture, load_text
from jshard.errors import FourPartError

IDS = np.arange(2000, dtype=np.uint16) % 500


def texts(data):
    return b"".join(np.asarray(data.train[i]["inputs"]).astype(np.uint8).tobytes() for i in range(len(data.train)))


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    lines = [json.dumps({"text": f"document {i} ", "id": i}) for i in range(200)]
    (tmp_path / "web.jsonl").write_text("\n".join(lines))
    (tmp_path / "web.jsonl.gz").write_bytes(gzip.compress("\n".join(lines).encode()))
    IDS.tofile(tmp_path / "train.bin")
    IDS[:500].tofile(tmp_path / "val.bin")
    np.save(tmp_path / "train.npy", IDS)
    return tmp_path


@pytest.mark.parametrize("name", ["web.jsonl", "web.jsonl.gz"])
def test_of_a_document_its_text_is_read_and_nothing_else(folder, name):
    data = load_text([name], sequence_length=16)
    found = texts(data)
    assert found.startswith(b"document ") and b"\0" in found and b"id" not in found and b"{" not in found
    assert "document" in data.description


def test_a_column_of_parquet_and_of_a_saved_dataset(folder):
    pyarrow = pytest.importorskip("pyarrow")
    pytest.importorskip("pyarrow.parquet")
    table = pyarrow.table({"body": [f"document {i} " for i in range(200)], "id": list(range(200))})
    pyarrow.parquet.write_table(table, "web.parquet")
    (folder / "saved").mkdir()
    with pyarrow.OSFile("saved/data-0.arrow", "wb") as file, pyarrow.ipc.new_stream(file, table.schema) as stream:
        stream.write_table(table)
    (folder / "saved" / "state.json").write_text(json.dumps({"_data_files": [{"filename": "data-0.arrow"}]}))
    (folder / "saved" / "dataset_info.json").write_text("{}")
    for path in ("web.parquet", "saved"):
        assert texts(load_text([path], sequence_length=16, text_key="body")).startswith(b"document ")
        with pytest.raises(DataError, match=r"(?s)has 'body', 'id', but no 'text'.*--text-key body"):
            load_text([path], sequence_length=16)


def test_token_ids_stay_as_they_are_and_another_file_is_held_out(folder):
    for path, dtype in (("train.bin", "uint16"), ("train.npy", None)):
        data = load_text([path], held_out=["val.bin"], dtype=dtype or "uint16", sequence_length=100, vocab_size=500)
        np.testing.assert_array_equal(data.train[3]["inputs"], IDS[300:400])
        np.testing.assert_array_equal(data.train[3]["targets"], IDS[301:401])
        assert (len(data.train), len(data.held_out), data.tokenizer) == (19, 4, None)


@pytest.mark.parametrize(
    ("path", "how", "said"),
    [
        ("train.bin", {}, r"does not record the dtype(.|\n)*--dtype uint16"),
        ("train.bin", {"dtype": "uint8"}, r"looks like uint16(.|\n)*--dtype uint16"),
        ("train.bin", {"dtype": "uint16", "vocab_size": 300}, r"token 300(.|\n)*it is 300(.|\n)*model.vocab_size=500"),
        ("web.jsonl", {"text_key": "txt"}, r"line 1(.|\n)*'text', 'id', but no 'txt'(.|\n)*--text-key text"),
        ("web.jsonl.zst", {}, r"zstd -d web.jsonl.zst"),
        ("web.jsonl=x", {}, r"'x' is not a number above 0"),
    ],
)
def test_what_cannot_be_read_is_said(folder, path, how, said):
    (folder / "web.jsonl.zst").write_bytes(b"\x28\xb5\x2f\xfd\x00")
    if "dtype" in how and how["dtype"] == "uint8":
        (IDS % 200).tofile("train.bin")
    with pytest.raises(FourPartError, match=said):
        texts(load_text([path], sequence_length=16, **how))


@pytest.mark.parametrize("weights", [("0.7", "0.3"), ("1/3", "2/3"), ("0.5", "0.1", "0.4"), ("1", "1", "5", "7")])
def test_a_mixture_keeps_its_proportions_at_every_step_and_over_a_resume(weights):
    sources = [[{"of": np.array(k), "n": np.array(i)} for i in range(size)] for k, size in enumerate((50, 7, 20, 30))]
    parts = [Fraction(weight) for weight in weights]
    mixture = Mixture(sources[: len(parts)], parts)
    order = mixture.order(3)
    given = np.zeros(len(parts))
    for number in range(500):
        given[int(mixture[order[number]]["of"])] += 1
        for count, part in zip(given, parts, strict=True):
            assert abs(count - (number + 1) * float(part / sum(parts))) < 1
    seen = [int(mixture[order[n]]["n"]) for n in range(300) if mixture[order[n]]["of"] == 1]
    assert sorted(seen[:7]) == list(range(7))  # all of a source before one comes again
    assert [order[n] for n in range(120, 140)] == [mixture.order(3)[n] for n in range(120, 140)]


def test_a_resumed_mixture_continues_where_it_was(folder):
    (folder / "code.txt").write_text("def f(): pass\n" * 300)
    data = load_text(["web.jsonl=0.7", "code.txt=0.3"], sequence_length=16)
    loader = Loader(data=data, batch_size=8, seed=1, rows=range(8))
    whole, late = list(loader.train(6)), list(loader.train(6, start_step=3))
    for one, other in zip(whole[3:], late, strict=True):
        np.testing.assert_array_equal(one["inputs"], other["inputs"])
    half = list(Loader(data=data, batch_size=8, seed=1, rows=range(4, 8)).train(6))
    np.testing.assert_array_equal(half[5]["inputs"], whole[5]["inputs"][4:])
