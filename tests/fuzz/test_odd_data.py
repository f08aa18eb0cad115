"""Damaged and odd data files, of every kind that `--data` and `--tokenizer` read: an error in four parts, or data."""

import gzip
import io
import json
import struct
import warnings
from fractions import Fraction

import numpy as np
import pytest

from jshard.data import DataError, documents, files, load_text
from jshard.data.tokenizer import HuggingFaceTokenizer, transformers_files
from tests.fuzz.odd_inputs import NO_JSON, Input, check, damaged, each_change, every_fifth, json_texts

DOCUMENT = {"text": "document é", "id": 3, "meta": {"a": [1]}}
LINES = "\n".join(json.dumps(DOCUMENT | {"text": f"document {i} é"}) for i in range(30)).encode() + b"\n"
STATE = {"_data_files": [{"filename": "data-0.arrow"}], "_format_type": None, "_split": "train"}
SPLITS = {"splits": ["train", "test"]}
TOKENIZER = {
    "version": "1.0",
    "added_tokens": [
        {"id": 4, "content": "</s>", "single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
        | {"special": True}
    ],
    "normalizer": {"type": "Lowercase"},
    "pre_tokenizer": {"type": "Whitespace"},
    "model": {"type": "WordLevel", "vocab": {"[UNK]": 0, "some": 1, "text": 2}, "unk_token": "[UNK]"},
}


def as_json(value):
    return json.dumps(value).encode()


def as_npy(array):
    file = io.BytesIO()
    np.save(file, array, allow_pickle=True)
    return file.getvalue()


def npy(header, body=bytes(4000)):
    """A .npy file with a header as text."""
    raw = header.encode()
    raw += b" " * (63 - (len(raw) + 10) % 64) + b"\n"
    return b"\x93NUMPY\x01\0" + struct.pack("<H", len(raw)) + raw + body


def table():
    pyarrow = pytest.importorskip("pyarrow")
    pytest.importorskip("pyarrow.parquet")
    return pyarrow.table({"text": [f"document {i}" for i in range(50)], "id": list(range(50))})


def as_parquet(rows):
    import pyarrow.parquet

    file = io.BytesIO()
    pyarrow.parquet.write_table(rows, file)
    return file.getvalue()


def as_arrow(rows):
    import pyarrow

    file = io.BytesIO()
    with pyarrow.ipc.new_stream(file, rows.schema) as stream:
        stream.write_table(rows)
    return file.getvalue()


@pytest.fixture
def read(tmp_path):
    """Writes files by name, and reads the first, or the folder, as data to the last sample."""

    def read(named, place, **how):
        for name, raw in named.items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(raw)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a folder's unreadable files are skipped with one
            data = load_text([tmp_path / place], sequence_length=8, **how)
        for part in (data.train, data.held_out):
            for number in range(min(len(part), 50)):
                part[number]
        return data

    return read


def reader_of(read, name, **how):
    return lambda raw: read({name: raw}, name, **how)


def headers():
    """Every combination of an odd dtype, order and shape, and headers that are no dict of them."""
    dtypes = ["<u2", ">u2", "<i4", "|O", "<f4", "|b1", "<U3", "<m8", "|V2", "<u3", "zz", "", None, 3]
    dtypes += [[("a", "<u2")], "<u2" * 100]
    shapes = [(500,), (), (0,), (-1,), (-500,), (2**62,), (2**70,), (10**400,), (500, 1), (1, 500), None, 500, [500]]
    shapes += [(True,), (5.0,), ("5",), (-1, -500), (2**32, 2**32), (0, 2**70), (1,) * 100]
    for dtype in dtypes:
        for order in (False, True, None):
            for shape in shapes:
                value = {"descr": dtype, "fortran_order": order, "shape": shape}
                yield Input(str(value), npy(repr(value)))
    texts = ["", "{", "{}", "[" * 2000, "(" * 2000 + ")" * 2000, "1" * 9000, "__import__('os')", "\xff", "{'descr':'\0"]
    texts.append("{'descr':'<u2','fortran_order':False,'shape':" + "-" * 4000 + "1}")
    texts.append("{'descr':'<u2','fortran_order':False,'shape':(5,),'x':1}")
    yield from (Input(text[:60], npy(text)) for text in texts)
    good = npy("{'descr':'<u2','fortran_order':False,'shape':(5,)}")
    yield Input("objects", as_npy(np.array([{"a": 1}], object)))
    yield Input("version 9", b"\x93NUMPY\x09\0" + good[8:])
    yield Input("an archive", b"PK\3\4" + bytes(100))
    yield Input("empty", b"")


def test_json_lines_that_are_none(read):
    for name in ("web.jsonl", "web.NDJSON"):
        check(NO_JSON, reader_of(read, name))
    check([Input(each.name, LINES + each.value) for each in NO_JSON], reader_of(read, "web.jsonl"))


def test_json_lines_of_odd_values(read):
    changes = json_texts(every_fifth(each_change(DOCUMENT)))
    check(changes, lambda raw: read({"web.jsonl": LINES + raw}, "web.jsonl"))


def test_headers_of_npy_files(read):
    surveyed = check(every_fifth(headers()), reader_of(read, "ids.npy", vocab_size=600))
    assert surveyed.returned > 0


def test_json_files_of_a_saved_dataset(read):
    surveys = saved_datasets(read, every_fifth)
    assert all(survey.refused > 0 and survey.returned > 0 for survey in surveys)


def saved_datasets(read, some):
    """Surveys changes of either file."""
    arrow = as_arrow(table())

    def saved(state=None, splits=None):
        parts = {"saved/data-0.arrow": arrow, "saved/state.json": state or as_json(STATE)}
        if splits is not None:
            parts = {f"splits/train/{name.removeprefix('saved/')}": raw for name, raw in parts.items()}
            parts["splits/dataset_dict.json"] = splits
        return read(parts, "saved" if splits is None else "splits")

    assert len(saved().train) > 0 and len(saved(splits=as_json(SPLITS)).train) > 0
    return [
        check([*NO_JSON[1:], *json_texts(some(each_change(STATE)))], saved),
        check([*NO_JSON[1:], *json_texts(some(each_change(SPLITS)))], lambda raw: saved(splits=raw)),
    ]


def encode(read, tmp_path, raw):
    path = tmp_path / "tokenizer.json"
    path.write_bytes(raw)
    tokenizer = HuggingFaceTokenizer(path)
    data = read({"some.txt": b"some text\n" * 100}, "some.txt", tokenizer=tokenizer)
    tokenizer.decode(data.train[0]["inputs"])
    transformers_files(path)


def test_tokenizer_files(read, tmp_path):
    encode(read, tmp_path, as_json(TOKENIZER))
    changes = json_texts(every_fifth(each_change(TOKENIZER)))
    check([*NO_JSON, *changes], lambda raw: encode(read, tmp_path, raw))


def test_bytes_of_each_kind_are_damaged_by_a_seed(read, tmp_path):
    surveys = each_kind(read, tmp_path, count=15)
    assert all(survey.refused + survey.returned > 0 for survey in surveys)
    # Not each kind refuses: plain text is read whatever its bytes are.
    assert sum(survey.refused for survey in surveys) > 0


@pytest.mark.wide
def test_more_bytes_of_each_kind_are_damaged(read, tmp_path):
    each_kind(read, tmp_path, count=150)
    check(json_texts(each_change(TOKENIZER)), lambda raw: encode(read, tmp_path, raw))
    check(json_texts(each_change(DOCUMENT)), lambda raw: read({"web.jsonl": LINES + raw}, "web.jsonl"))
    check(headers(), reader_of(read, "ids.npy", vocab_size=600))
    saved_datasets(read, list)


def each_kind(read, tmp_path, count):
    """Surveys files of each kind with damaged bytes."""
    ids = np.arange(500, dtype=np.uint16)
    surveys = [
        check(damaged(LINES, seed=1, count=count), reader_of(read, "web.jsonl")),
        check(damaged(gzip.compress(LINES), seed=2, count=count), reader_of(read, "web.jsonl.gz")),
        check(damaged("text é\n".encode() * 100, seed=3, count=count), reader_of(read, "some.txt")),
        check(damaged(as_npy(ids), seed=4, count=2 * count), reader_of(read, "ids.npy", vocab_size=600)),
    ]
    for dtype in ("uint8", "uint16", "uint32", "int32", "int64"):
        raw = ids.astype(np.int64).tobytes()
        surveys.append(check(damaged(raw, seed=5, count=count // 2), reader_of(read, "ids.bin", dtype=dtype)))
    tokenizers = damaged(as_json(TOKENIZER), seed=6, count=count)
    surveys.append(check(tokenizers, lambda raw: encode(read, tmp_path, raw)))
    rows = table()
    surveys.append(check(damaged(as_parquet(rows), seed=7, count=count), reader_of(read, "web.parquet")))
    state = {"saved/state.json": as_json(STATE)}
    arrows = damaged(as_arrow(rows), seed=8, count=2 * count)
    surveys.append(check(arrows, lambda raw: read({**state, "saved/data-0.arrow": raw}, "saved")))
    return surveys


# What failed first, by name.


def test_a_zero_byte_in_a_document_is_no_end_of_text(read, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    lines = LINES + as_json({"text": "one\0two"}) + b"\n"
    with pytest.raises(DataError, match=r"(?s)zero bytes.*document 31.*sed 's/") as refused:
        read({"web.jsonl": lines}, "web.jsonl")
    assert refused.value.do.startswith("sed 's/\\\\u0000//g' ")
    words = type("Words", (), {"name": "words", "vocab_size": 9, "end_of_text": None})()
    words.encode_batch = lambda texts: [np.ones(9, np.uint8) for _ in texts]
    read({"web.jsonl": lines, "val.txt": b"text"}, "web.jsonl", tokenizer=words, held_out=["val.txt"])


def test_of_a_npy_file_the_ids_are_read_and_nothing_behind_them(read):
    ids = np.arange(500, dtype=">u2")
    data = read({"ids.npy": as_npy(ids) + b"\0"}, "ids.npy")
    np.testing.assert_array_equal(data.train[1]["inputs"], ids[8:16])
    with pytest.raises(DataError, match="promises 500 ids, and it has 499"):
        read({"ids.npy": as_npy(ids)[:-1]}, "ids.npy")


@pytest.mark.parametrize("odd", [-1, 2**31, 2**40])
def test_an_id_that_is_no_int32_is_an_error_without_a_vocabulary(read, odd):
    ids = np.arange(500, dtype=np.int64)
    ids[100] = odd
    with pytest.raises(DataError, match=f"token 100(.|\n)*it is {odd};"):
        read({"ids.npy": as_npy(ids)}, "ids.npy")


def test_a_line_without_an_end_takes_bounded_memory(read, monkeypatch):
    monkeypatch.setattr(documents, "_MOST_LINE_BYTES", 1 << 20)
    bomb = gzip.compress(bytes(50 << 20), 1)

    def refused(raw):
        with pytest.raises(DataError, match="a line has more than 1 MiB"):
            read({"web.jsonl.gz": raw}, "web.jsonl.gz")

    surveyed = check([Input("zeros", bomb)], refused)
    assert surveyed.largest[0] < 8 << 20


def test_a_dataset_reads_no_file_outside_of_its_folder(read):
    for name in ("../data.arrow", "/etc/passwd", "..", ""):
        state = STATE | {"_data_files": [{"filename": name}]}
        with pytest.raises(DataError, match="is not in the folder"):
            read({"saved/state.json": as_json(state), "data.arrow": as_arrow(table())}, "saved")


def test_a_weight_with_an_enormous_exponent_is_refused_at_once():
    for text in ("1e999999999", "1e-999999999", "9" * 5000, "1/" + "9" * 5000, "inf", "nan", "1/0", "-1", "\u0663"):
        with pytest.raises(DataError, match="is not a number above 0"):
            files.weighted([f"web={text}"])
    assert files.weighted(["web=1/3", "code=2e-1"])[1] == [Fraction(1, 3), Fraction(1, 5)]
