"""safetensors files are checked before they are read, read box by box, and written as Hugging Face's libraries do."""

import json
import os
import random

import jax.numpy as jnp
import numpy as np
import pytest

import jshard as js
from jshard.checkpoint.errors import CheckpointError, CheckpointWarning
from jshard.checkpoint.formats import SafetensorsSource, foreign_source, write_safetensors
from jshard.checkpoint.formats.safetensors import INDEX
from jshard.cli import main
from jshard.errors import RunError
from tests.checkpoint.checkpoint_states import Held, bits, check_source, everything

RNG = np.random.default_rng(0)
W = RNG.normal(size=(16, 24)).astype(np.float32)
ARRAYS = {
    "w": W,
    "half": W.astype(jnp.bfloat16),
    "narrow": W[:3, :5].astype(jnp.float8_e4m3fn),
    "scalar": np.array(2.5, np.float32),
    "mask": np.array([True, False, True]),
    "ids": np.arange(7),
    "empty": np.zeros((0, 3), np.float32),
}


def write_raw(path, header, data=b""):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return path


def entry(dtype, shape, begin, end):
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


# ---- There and back -------------------------------------------------------------------------------


@pytest.mark.parametrize("max_shard_bytes", [5e9, 2000])
def test_what_is_written_is_read_again(tmp_path, max_shard_bytes):
    files = write_safetensors(tmp_path / "c", Held(ARRAYS), max_shard_bytes=max_shard_bytes)
    assert sorted(files) == sorted((tmp_path / "c").iterdir())
    check_source(SafetensorsSource(tmp_path / "c"), ARRAYS)
    if max_shard_bytes > 1e9:
        assert [file.name for file in files] == ["model.safetensors"]
        check_source(SafetensorsSource(files[0]), ARRAYS)


def test_the_index_is_hugging_faces(tmp_path):
    arrays = {"c": W, "a": W[:8], "b": W[:2], "d": W[:8]}
    files = write_safetensors(tmp_path / "c", Held(arrays), max_shard_bytes=W.nbytes)
    names = [f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)]
    assert [file.name for file in files] == [*names, INDEX]
    assert (tmp_path / "c" / INDEX).read_text() == (
        f'{{\n  "metadata": {{\n    "total_size": {sum(array.nbytes for array in arrays.values())}\n  }},\n'
        f'  "weight_map": {{\n    "a": "{names[1]}",\n    "b": "{names[1]}",\n'
        f'    "c": "{names[0]}",\n    "d": "{names[2]}"\n  }}\n}}\n'
    )


def test_the_package_reads_what_is_written_and_writes_what_is_read(tmp_path):
    package = pytest.importorskip("safetensors.numpy")
    arrays = {name: array for name, array in ARRAYS.items() if name != "narrow"}  # numpy lacks its float8
    file = write_safetensors(tmp_path / "ours", Held(arrays))[0]
    for name, array in package.load_file(file).items():
        assert (array.shape, array.dtype) == (arrays[name].shape, arrays[name].dtype)
        np.testing.assert_array_equal(bits(array), bits(arrays[name]))
    theirs = tmp_path / "theirs.safetensors"
    package.save_file(ARRAYS, theirs, metadata={"format": "pt"})
    check_source(SafetensorsSource(theirs), ARRAYS)
    package.save_file(arrays, theirs, metadata={"format": "pt"})
    assert theirs.read_bytes() == file.read_bytes()


def test_nothing_is_replaced_and_a_failed_write_leaves_nothing(tmp_path, monkeypatch):
    write_safetensors(tmp_path / "c", Held({"w": W}))
    with pytest.raises(CheckpointError, match="such files already exist"):
        write_safetensors(tmp_path / "c", Held({"w": W * 2}), max_shard_bytes=1)
    check_source(SafetensorsSource(tmp_path / "c"), {"w": W})
    monkeypatch.setattr(os, "fsync", lambda number: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with pytest.raises(RunError, match=r"No space left on device \(ENOSPC\)"):
        write_safetensors(tmp_path / "d", Held({"w": W}))
    assert list((tmp_path / "d").iterdir()) == []


def test_what_cannot_be_written_is_reported_before(tmp_path):
    with pytest.raises(CheckpointError, match=r"not support the dtypes of 1 array.\n  where: w  complex128"):
        write_safetensors(tmp_path / "c", Held({"w": W.astype(np.complex128), "x": W}))
    assert not (tmp_path / "c").exists()
    source = Held({"w": W})
    source.arrays["w"] = W[:2]
    with pytest.raises(ValueError, match="was declared as"):
        write_safetensors(tmp_path / "c", source)
    assert list((tmp_path / "c").iterdir()) == []
    path = write_raw(tmp_path / "c.safetensors", {"w": entry("F4", [16], 0, 8), "x": entry("F99", [1], 0, 4)}, EIGHT)
    with pytest.raises(CheckpointError, match="The checkpoint holds 2 arrays of a dtype that cannot be read") as caught:
        SafetensorsSource(path)
    assert caught.value.where == (str(path), "w  F4", "x  F99")


# ---- Damaged and odd ones -------------------------------------------------------------------------

EIGHT = bytes(8)
DAMAGED = {
    "empty": (b"", "its header would have 0 bytes; the file has 0."),
    "huge": (b"\xff" * 8 + b"{}", "its header would have 18446744073709551615 bytes"),
    "no json": (b"{nope", "its header is not JSON"),
    "no table": (b"[]", "its header is not a table"),
    "deep": (b"[" * 100_000, "its header is not JSON"),
    "past the end": ({"w": entry("F32", [4], 0, 16)}, r"w cannot be F32 \[4\] at \[0, 16\]: the data has 8 bytes"),
    "backwards": ({"w": entry("F32", [2], 8, 0)}, "w cannot be F32"),
    "negative": ({"w": entry("F32", [-2], 0, 8)}, "w cannot be F32"),
    "no numbers": ({"w": entry("F32", "ab", 0, 8)}, "w cannot be F32"),
    "no offsets": ({"w": {"dtype": "F32", "shape": [2]}}, "w cannot be F32"),
    "overlap": ({"w": entry("F32", [2], 0, 8), "x": entry("F32", [1], 4, 8)}, "x begins at byte 4 of the data"),
    "hole": ({"w": entry("F32", [1], 4, 8)}, "w begins at byte 4 of the data; the array before it ends at 0"),
    "left over": ({"w": entry("F32", [1], 0, 4)}, "the data has 8 bytes; the arrays in the header have 4"),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_a_damaged_header_is_reported(tmp_path, name):
    header, text = DAMAGED[name]
    path = tmp_path / "model.safetensors"
    if name in ("empty", "huge"):
        path.write_bytes(header)
    else:
        write_raw(path, header, EIGHT)
    with pytest.raises(RunError, match=text) as caught:
        SafetensorsSource(path)
    assert str(caught.value).startswith(f"A file of the checkpoint is damaged.\n  where: {path}\n  why:   ")


def test_parts_of_arrays_are_refused(tmp_path):
    """As PyTorch's HuggingFaceStorageWriter writes them: the last file would win, with too small an array."""
    for rank in (1, 2):
        where = json.dumps({"w": {"saved_offsets": [rank - 1, 0]}})
        header = {"__metadata__": {"DCP_SHARDING_INFO": where}, "w": entry("F32", [1, 2], 0, 8)}
        shard = write_raw(tmp_path / f"shard-0000{rank}-model-00001-of-00001.safetensors", header, EIGHT)
    second = shard.with_name("renamed.safetensors")  # it begins at another place, whatever it is called
    second.write_bytes(shard.read_bytes())
    for path in (tmp_path, *tmp_path.iterdir()):
        with pytest.raises(CheckpointError, match="holds parts of arrays"):
            SafetensorsSource(path)
    second.unlink()
    for rank in (1, 2):
        write_raw(
            tmp_path / f"shard-0000{rank}-model-00001-of-00001.safetensors", {"w": entry("F32", [2], 0, 8)}, EIGHT
        )
    with pytest.raises(CheckpointError, match=r"w is in shard-00001-model-00001-of-00001.safetensors too"):
        SafetensorsSource(tmp_path)


def test_whole_arrays_by_pytorch_are_read(tmp_path):
    """With save_distributed=False its files name offsets too, and all are zero."""
    where = {"DCP_SHARDING_INFO": json.dumps({"w": {"saved_offsets": [0, 0]}}), "DCP_VERSION": "1.0", "format": "pt"}
    header = {"__metadata__": where, "w": entry("F32", [1, 2], 0, 8)}
    path = write_raw(tmp_path / "model-00001-of-00001.safetensors", header, EIGHT)
    check_source(SafetensorsSource(path), {"w": np.zeros((1, 2), np.float32)})
    header["__metadata__"] = {"DCP_SHARDING_INFO": "[]"}
    with pytest.raises(RunError, match="its DCP_SHARDING_INFO cannot be read"):
        SafetensorsSource(write_raw(path, header, EIGHT))


def test_an_index_that_does_not_fit_is_reported(tmp_path):
    write_safetensors(tmp_path, Held({"a": W, "b": W}), max_shard_bytes=W.nbytes)

    def put(index):
        (tmp_path / INDEX).write_text(json.dumps(index))

    for index, text in (
        ({"weight_map": {"a": "../a.safetensors"}}, r"names something that is not a file beside it: \.\./a"),
        ({"weight_map": {"a": "gone.safetensors"}}, "files that it names are missing: gone.safetensors"),
        ({"weight_map": [1]}, "names something that is not a file"),
        ({}, "not an index with a weight_map"),
    ):
        put(index)
        with pytest.raises(RunError, match=text):
            SafetensorsSource(tmp_path)


FILES = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")


def indexed(folder, weight_map):
    """A folder of two files, with `a` in the first and `b` in the second, and this index."""
    folder.mkdir()
    for file, name in zip(FILES, "ab", strict=True):
        write_raw(folder / file, {name: entry("F32", [2], 0, 8)}, EIGHT)
    (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    return folder


@pytest.mark.parametrize(
    ("weight_map", "line"),
    [
        ({"a": FILES[0], "b": FILES[1], "c": FILES[1]}, f"c  is not in {FILES[1]}"),
        ({"a": FILES[1], "b": FILES[1]}, f"a  is not in {FILES[1]}"),  # the other file is not read
        ({"a": FILES[1], "b": FILES[0]}, f"a  is in {FILES[0]}, and not in {FILES[1]}"),
    ],
)
def test_an_index_and_its_files_name_the_same_arrays(tmp_path, capsys, weight_map, line):
    """A tensor that only one of them has would be lost silently, or read from another checkpoint's file."""
    folder = indexed(tmp_path / "theirs", weight_map)
    for path in (folder, folder / INDEX):
        with pytest.raises(RunError, match="do not fit its index") as caught:
            SafetensorsSource(path)
        assert caught.value.where[0] == str(folder / INDEX) and line in caught.value.where
    is_lost = "is not in" in line
    assert ("rm " in caught.value.do) is not is_lost  # without the index a lost array would go unnoticed
    assert main(["ckpt", "import", str(folder), str(tmp_path / "ours")]) == 1
    assert line in capsys.readouterr().err and not (tmp_path / "ours").exists()


def test_an_array_that_the_index_does_not_name_is_refused_with_a_way_to_read_it(tmp_path):
    folder = indexed(tmp_path / "theirs", {"a": FILES[0], "b": FILES[1]})
    write_raw(folder / FILES[1], {"b": entry("F32", [1], 0, 4), "d": entry("F32", [1], 4, 8)}, EIGHT)
    with pytest.raises(RunError, match="do not fit its index") as caught:
        SafetensorsSource(folder)
    assert caught.value.where == (str(folder / INDEX), f"d  is in {FILES[1]}, and not in the index")
    assert caught.value.do.endswith(f"rm {folder / INDEX}")
    (folder / INDEX).unlink()
    assert set(SafetensorsSource(folder).leaves) == {"a", "b", "d"}


def test_without_an_index_missing_files_are_seen_by_their_numbers(tmp_path):
    folder = indexed(tmp_path / "theirs", {})
    with pytest.raises(RunError, match="its weight_map names no array"):
        SafetensorsSource(folder)
    (folder / INDEX).unlink()
    assert set(SafetensorsSource(folder).leaves) == {"a", "b"}
    (folder / FILES[0]).unlink()
    with pytest.raises(RunError, match=f"there: 1 of 2 files; missing: {FILES[0]}"):
        SafetensorsSource(folder)
    assert set(SafetensorsSource(folder / FILES[1]).leaves) == {"b"}  # one file that is asked for


def test_a_single_file_beside_an_index_is_refused_until_one_is_chosen(tmp_path):
    folder = indexed(tmp_path / "theirs", {"a": FILES[0], "b": FILES[1]})
    single = write_raw(folder / "model.safetensors", {"a": entry("F32", [2], 0, 8)}, b"\1" * 8)
    with pytest.raises(CheckpointError, match="The folder holds several checkpoints") as caught:
        SafetensorsSource(folder)
    choices = caught.value.do.splitlines()[1:]
    assert choices == [str(single), str(folder / INDEX)]
    assert [set(foreign_source(path).leaves) for path in choices] == [{"a"}, {"a", "b"}]


def test_files_that_an_index_does_not_name_are_said_not_to_be_read(tmp_path, capsys):
    """As Mistral's folders have them: the same weights again, under other names, in one file."""
    folder = indexed(tmp_path / "theirs", {"a": FILES[0], "b": FILES[1]})
    write_raw(folder / "consolidated.safetensors", {"c": entry("F32", [2], 0, 8)}, EIGHT)
    note = f"read are the files that {INDEX} names, and not consolidated.safetensors."
    with pytest.warns(CheckpointWarning, match=note) as caught:
        js.checkpoint.restore(folder, like={"a": jnp.ones(2), "b": jnp.ones(2)})
    assert len(caught) == 1
    assert main(["ckpt", "import", str(folder), str(tmp_path / "ours")]) == 0
    assert capsys.readouterr().err.count(note) == 1


def test_the_index_of_diffusers_counts(tmp_path):
    folder = indexed(tmp_path / "theirs", {"a": FILES[0], "b": FILES[1], "c": FILES[1]})
    index = (folder / INDEX).rename(folder / f"diffusion_pytorch_{INDEX}")
    with pytest.raises(RunError, match="do not fit its index"):
        SafetensorsSource(folder)
    (folder / f"other_{INDEX}").write_text(index.read_text())
    with pytest.raises(CheckpointError, match="The folder holds several checkpoints"):
        SafetensorsSource(folder)


def test_an_index_without_any_of_its_files(tmp_path):
    folder = indexed(tmp_path / "theirs", {"a": FILES[0]})
    for file in FILES:
        (folder / file).unlink()
    with pytest.raises(RunError, match=f"files that it names are missing: {FILES[0]}"):
        foreign_source(folder)


def test_nothing_to_read(tmp_path):
    with pytest.raises(CheckpointError, match="no such file or folder"):
        SafetensorsSource(tmp_path / "gone")
    with pytest.raises(CheckpointError, match=r"neither model.*json nor a file"):
        SafetensorsSource(tmp_path)
    with pytest.raises(CheckpointError, match="Checkpoints cannot be stored there"):
        SafetensorsSource("gs://bucket/model.safetensors")


def test_a_file_that_is_cut_after_it_was_opened_is_reported(tmp_path):
    path = write_safetensors(tmp_path, Held({"w": W}))[0]
    source = SafetensorsSource(path)
    os.truncate(path, 300)
    with pytest.raises(RunError, match="is damaged"):
        source.read("w", everything(W))


def test_a_header_that_changed_ends_in_a_four_part_error_or_in_nothing(tmp_path):
    path = write_safetensors(tmp_path, Held({"w": W[:2], "x": W[:1].astype(jnp.bfloat16)}))[0]
    before, dice, reported = path.read_bytes(), random.Random(0), []
    for _ in range(100):
        raw = bytearray(before)
        raw[dice.randrange(len(raw) - W[:2].nbytes - 48)] ^= 1 << dice.randrange(8)
        path.write_bytes(raw)
        try:
            source = SafetensorsSource(path)
            for name, leaf in source.leaves.items():
                source.read(name, (slice(0, 1),) * len(leaf.shape))
        except (CheckpointError, RunError) as error:
            reported.append(error)
    assert 0 < len(reported) < 100
    assert all(error.what and error.where and error.why and error.do for error in reported)
