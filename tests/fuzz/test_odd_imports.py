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
        source = OPEN(tmp_path)
        for name, leaf in source.leaves.items():
            source.read(name, whole(leaf))
        return source

    return read
