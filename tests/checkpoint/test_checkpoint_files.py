"""Packed files: any reader of safetensors reads them, any box comes out of any pieces, and each is written once."""

import itertools
import os
from pathlib import Path

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors import safe_open

from jshard.checkpoint.packed import file_io
from jshard.checkpoint.packed import layout as layout_module
from jshard.checkpoint.packed.file_io import LocalFolder, do_all
from jshard.checkpoint.packed.file_reads import ChangedError
from jshard.checkpoint.packed.host_memory import Slab
from jshard.checkpoint.packed.layout import Piece, lay_out_files
from jshard.checkpoint.packed.pieces import PackedFile, Pieces, Want
from jshard.checkpoint.packed.write_assignment import LeafToWrite, plan_writes
from jshard.checkpoint.packed.writer import write_file

DTYPES = ("bool", "int4", "uint8", "int64", "bfloat16", "float8_e4m3fn", "float8_e5m2fnuz", "float32", "complex64")


def drawn(dtype, shape):
    return np.random.default_rng(0).integers(0, 2, shape).astype(jnp.dtype(dtype))


def written(folder: Path, leaves, cut):
    """Leaves in pieces that are cut at some rows, in one file."""
    pieces = []
    for number, (path, values) in enumerate(leaves.items()):
        ends = sorted({0, *(min(row, values.shape[0]) for row in cut), values.shape[0]}) if values.ndim else []
        rest = tuple((0, size) for size in values.shape[1:])
        boxes = [((a, b), *rest) for a, b in itertools.pairwise(ends)] if values.ndim else [()]
        pieces += [Piece(number, path, values.dtype, box) for box in boxes]
    (layout,) = lay_out_files(pieces)
    place, values = LocalFolder(folder), list(leaves.values())
    write_file(place, "a.safetensors", layout, lambda n: values[layout.pieces[n].leaf][inside(layout.pieces[n].box)])
    return place, PackedFile.open(place, "a.safetensors", layout.num_bytes)


def inside(box):
    return tuple(slice(*limits) for limits in box)


def test_the_disk_begins_to_write_a_file_before_all_of_it_is_there(tmp_path, monkeypatch):
    begun = []
    ends = []
    start = file_io._start_writing
    flushed = os.fsync

    def starts(file, offset, num_bytes):
        begun.append((offset, num_bytes))
        start(file, offset, num_bytes)

    def flushes(file):
        ends.append(len(begun))
        flushed(file)

    monkeypatch.setattr(file_io, "_start_writing", starts)
    monkeypatch.setattr(os, "fsync", flushes)
    place, _ = written(tmp_path, {"a": drawn("float32", (3, 1 << 20))}, [])
    size = (tmp_path / "a.safetensors").stat().st_size
    assert sum(num_bytes for _, num_bytes in begun) == size > 3 * place.part_bytes
    assert {offset for offset, _ in begun} == set(range(0, size, place.part_bytes))
    assert ends == [len(begun)]
    start(-1, 0, 1)  # a file that it cannot be asked of is left to `os.fsync`


def test_any_reader_of_safetensors_reads_every_piece(tmp_path):
    leaves = {f"a/{dtype}": drawn(dtype, (5, 3)) for dtype in DTYPES} | {"large": drawn("float32", (300, 500))}
    written(tmp_path, leaves | {"scalar": drawn("float32", ())}, [2, 100])
    with safe_open(tmp_path / "a.safetensors", "np") as file:
        entries = [entry for entry in file.keys() if not entry.startswith("jshard.")]  # noqa: SIM118
        assert len(entries) == 2 * len(DTYPES) + 3 + 1
        for entry in entries:
            path, _, box = entry.rstrip("]").rpartition("[")
            if path == "a/bfloat16" or path.startswith("a/float8"):
                continue  # the package has no numpy for them
            wanted = leaves[path][tuple(slice(*map(int, dim.split(":"))) for dim in box.split(","))] if box else None
            if wanted is not None:
                assert file.get_tensor(entry).tobytes() == wanted.tobytes()


def test_hugging_faces_libraries_open_a_file(tmp_path):
    hub = pytest.importorskip("huggingface_hub", reason="tokenizers brings it: the extra hf")
    written(tmp_path, {dtype: drawn(dtype, (5, 3)) for dtype in DTYPES}, [2])
    described = hub.parse_local_safetensors_file_metadata(tmp_path / "a.safetensors")
    assert described.tensors["bfloat16[2:5,0:3]"].shape == [3, 3]
    assert described.metadata["format"] == "pt"  # load_state_dict_from_file, which needs PyTorch, refuses others


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.int4])
def test_any_box_comes_out_of_any_pieces(tmp_path, dtype):
    values = np.random.default_rng(1).integers(-8, 8, (37, 5, 700)).astype(dtype)
    _, file = written(tmp_path, {"a": values[0], "b": values}, [1, 3, 20])
    pieces, draw = Pieces([file], 2), np.random.default_rng(2)
    for _ in range(30):
        box = tuple(tuple(sorted(draw.choice(size + 1, 2, replace=False).tolist())) for size in values.shape)
        out = Slab(1, [b - a for a, b in box], values.dtype)
        do_all(pieces.reads([Want(1, values.shape, (box,), out)], verify=True), threads=2)
        assert out.boxes[0].tobytes() == values[inside(box)].tobytes(), box
    data = bytearray((tmp_path / "a.safetensors").read_bytes())
    data[file.index.offsets[-1]] ^= 1
    (tmp_path / "a.safetensors").write_bytes(data)
    with pytest.raises(ChangedError):
        do_all(pieces.reads([Want(1, values.shape, (box,), out)], verify=True), threads=2)


def test_a_gap_beside_an_overlap_of_equal_size_is_refused(tmp_path):
    values = np.arange(24, dtype=np.float32).reshape(8, 3)
    # Rows 2 and 3 twice, and rows 6 and 7 never: together they have as many elements as the leaf.
    boxes = [((0, 4), (0, 3)), ((2, 6), (0, 3))]
    (layout,) = lay_out_files([Piece(0, "a", values.dtype, box) for box in boxes])
    place = LocalFolder(tmp_path)
    write_file(place, "a.safetensors", layout, lambda number: values[inside(layout.pieces[number].box)])
    pieces = Pieces([PackedFile.open(place, "a.safetensors", layout.num_bytes)], 1)
    whole = ((0, 8), (0, 3))
    with pytest.raises(ValueError, match=r"elements of a leaf of shape \(8, 3\) are in the files twice"):
        list(pieces.reads([Want(0, values.shape, (whole,), Slab(1, values.shape, values.dtype))], verify=True))
    assert pieces.num_missing(0, values.shape) == 0 and pieces.has_overlap(0)
    # What the overlap does not touch is read as before.
    out = Slab(1, (2, 3), values.dtype)
    do_all(pieces.reads([Want(0, values.shape, (((0, 2), (0, 3)),), out)], verify=True), threads=2)
    np.testing.assert_array_equal(out.boxes[0], values[:2])


@pytest.mark.parametrize("dim", [0, 1])
def test_an_overlap_is_found_along_any_dim_and_neighbours_are_none(dim):
    starts = np.zeros((100, 2), np.int64)
    starts[:, dim] = np.random.default_rng(0).permutation(100) * 4
    stops = starts + 4
    assert not layout_module.has_overlap(starts, stops)
    stops[np.argmin(starts[:, dim]), dim] += 1
    assert layout_module.has_overlap(starts, stops)


class Device:
    def __init__(self, process):
        self.process_index = process


class Layout:
    """Stands for a sharding over devices of several processes: boxes along dim 0, with the processes of each."""

    def __init__(self, *owners):
        self.owners = owners

    def devices_indices_map(self, shape):
        rows = shape[0] // len(self.owners)
        boxes = [slice(box * rows, (box + 1) * rows) for box in range(len(self.owners))]
        return {Device(process): (box,) for box, all_ in zip(boxes, self.owners, strict=True) for process in all_}


def test_every_element_is_written_once_and_all_write_alike():
    both, own = Layout((0, 1, 2), (0, 1, 2)), Layout((0,), (1,), (2,))
    leaves = [LeafToWrite(0, "large", (3000,), "float64", both, (3000,))]
    leaves += [LeafToWrite(n, f"{n}", (6 * n,), "float32", both, (6 * n,)) for n in range(1, 40)]
    leaves += [LeafToWrite(50, "own", (8,), "int8", own, (9,)), LeafToWrite(51, "host", (4,), "int8", None)]
    plans = [plan_writes(tuple(leaves), process, 3, 1 << 30) for process in range(3)]
    for leaf in leaves:
        seen = np.zeros(leaf.shape, int)
        for plan in plans:
            for piece in (piece for file in plan.files for piece in file.pieces if piece.leaf == leaf.number):
                seen[inside(piece.box)] += 1
        assert (seen == 1).all(), leaf
    sizes = [sum(piece.nbytes for file in plan.files for piece in file.pieces) for plan in plans]
    assert max(sizes) < 1.1 * min(sizes), sizes


@pytest.mark.parametrize("path", ["p/{}", "a" * 300 + "{}"])
def test_another_file_begins_before_a_header_is_too_long_for_others(monkeypatch, path):
    monkeypatch.setattr(layout_module, "_HEADER_BYTES", 20_000)
    pieces = [Piece(n, path.format(n), np.dtype("int8"), ((n, n + 1), (0, 3))) for n in range(1000)]
    files = lay_out_files(pieces)
    assert [piece for file in files for piece in file.pieces] == pieces
    assert len(files) > 1 and all(len(file.header) < 2 * 20_000 for file in files)
