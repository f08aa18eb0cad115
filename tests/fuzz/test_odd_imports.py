"""Odd contents of the JSON that importers read: the index and the headers of safetensors."""

import json
import struct

import numpy as np
import pytest

from jshard.checkpoint.formats import safetensors
from jshard.checkpoint.formats.source import whole
from tests.fuzz.odd_inputs import NO_JSON, check, damaged, each_change, every_fifth, json_texts, some_changes

ARRAY = np.arange(6, dtype=np.float32)
HEADER = {
    "__metadata__": {"format": "pt"},
    "model.a": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]},
    "model.b": {"dtype": "BF16", "shape": [], "data_offsets": [24, 26]},
}
INDEX = {"metadata": {"total_size": 26}, "weight_map": {"model.a": "model.safetensors", "model.b": "model.safetensors"}}


def file_of(header):
    return struct.pack("<Q", len(header)) + header + ARRAY.tobytes() + b"\0\0"


@pytest.fixture
def read(tmp_path):
    def read(header, index=None):
        (tmp_path / "model.safetensors").write_bytes(file_of(header))
        if index is not None:
            (tmp_path / "model.safetensors.index.json").write_bytes(index)
        source = safetensors.SafetensorsSource(tmp_path)
        for name, leaf in source.leaves.items():
            source.read(name, whole(leaf))
        return source

    return read


def test_headers_and_indices(read):
    check_all(read, every_fifth)


@pytest.mark.wide
def test_every_change_of_headers_and_indices(read):
    check_all(read, list)
    check(json_texts(some_changes(HEADER, seed=31, count=150)), read)
    check(damaged(json.dumps(HEADER).encode(), seed=32, count=150), read)
    good = json.dumps(HEADER).encode()
    check(damaged(json.dumps(INDEX).encode(), seed=33, count=100), lambda raw: read(good, raw))


def check_all(read, some):
    good = json.dumps(HEADER).encode()
    assert set(read(good).leaves) == {"model.a", "model.b"} == set(read(good, json.dumps(INDEX).encode()).leaves)
    check([*NO_JSON, *json_texts(some(each_change(HEADER)))], read)
    check([*NO_JSON, *json_texts(some(each_change(INDEX)))], lambda raw: read(good, raw))
