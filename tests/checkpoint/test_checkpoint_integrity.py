"""No bit of a checkpoint changes unseen, and what is damaged is named."""

import random
import shutil

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jshard as js
from jshard import checkpoint
from jshard.checkpoint import saving
from jshard.checkpoint.leaf_sums import add, box_sums
from jshard.errors import RunError
from tests.checkpoint.checkpoint_states import raw

FLIPS = 25
DATA = "00000-000.safetensors"


def state(zero=False):
    """Large and small leaves of all kinds; the large ones are in files that have no checksum."""
    draw = np.random.default_rng(0)
    large = draw.standard_normal((2048, 128)).astype(np.float32)
    full = {
        "large": jax.device_put(large, NamedSharding(js.mesh(), P("fsdp"))),
        "half": jnp.asarray(draw.standard_normal((3, 7)), jnp.bfloat16),
        "key": jax.random.key(3),
        "ids": np.arange(5),
        "text": "a position in data, " * 8000,
        "step": 7,
    }
    return full if not zero else full | {"text": "", "step": 0, "ids": np.zeros(5, int), "key": jax.random.key(0)}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    path = tmp_path_factory.mktemp("integrity") / "c"
    checkpoint.save(path, state())
    return path


@pytest.fixture
def files(saved):
    """The files of the checkpoint but for Orbax's notes; they are as they were again after the test."""
    files = {path: path.read_bytes() for path in (saved / "arrays" / DATA, saved / "jshard.json")}
    yield files
    for path, content in files.items():
        path.write_bytes(content)


def names(error, path, saved):
    """Whether an error names the file."""
    name = path.relative_to(saved).as_posix()
    return name in str(error)


def test_any_flipped_bit_is_found_and_named(saved, files):
    draw = random.Random(0)
    full = [path for path, content in files.items() if content]
    full += [path for path in full if path.name.endswith(DATA)] * len(full)  # most of them in what was saved
    wanted = raw(state())
    for number in range(FLIPS):
        path = full[number % len(full)] if number < len(full) else draw.choice(full)
        content = bytearray(files[path])
        place, bit = draw.randrange(len(content)), draw.randrange(8)
        content[place] ^= 1 << bit
        path.write_bytes(content)
        with pytest.raises(RunError) as caught:
            checkpoint.restore(saved, like=state(zero=True))
        assert names(caught.value, path, saved), (path, place, bit, str(caught.value))
        path.write_bytes(files[path])
    assert raw(checkpoint.restore(saved, like=state(zero=True))) == wanted


def test_pairs_of_flips_that_cancel_in_sums_are_found_too(saved, files):
    """Two words that changed places, and a bit that went up in one word and down in another."""
    path = saved / "arrays" / DATA
    words = np.frombuffer(files[path][4096 : 4096 + (1 << 20)], np.uint32)  # of the large leaf
    draw = random.Random(1)
    for number in range(FLIPS):
        changed, (i, j) = words.copy(), draw.sample(range(len(words)), 2)
        if number % 2:
            changed[[i, j]] = words[[j, i]]
        else:
            bit = next(bit for bit in map(np.uint32, range(32)) if (words[i] ^ words[j]) >> bit & np.uint32(1))
            changed[[i, j]] ^= np.uint32(1) << bit
        path.write_bytes(files[path][:4096] + changed.tobytes() + files[path][4096 + (1 << 20) :])
        with pytest.raises(RunError, match=r"large  \(2048, 128\) float32"):
            checkpoint.restore(saved, like={"large": state()["large"]})


def test_a_file_of_another_checkpoint_is_found(saved, files, tmp_path):
    """Whole, of the same size, and with sums of its own that are right: as where a folder was copied over another."""
    other = state()
    checkpoint.save(tmp_path / "c", other | {"large": other["large"] * 2})
    assert (tmp_path / "c" / "arrays" / DATA).stat().st_size == (saved / "arrays" / DATA).stat().st_size
    (saved / "arrays" / DATA).write_bytes((tmp_path / "c" / "arrays" / DATA).read_bytes())
    with pytest.raises(RunError, match="it belongs to another checkpoint than the manifest"):
        checkpoint.restore(saved, like=other)


def test_every_missing_or_shortened_file_is_found_and_named(saved, files):
    for path, content in files.items():
        for left in (None, content[: len(content) // 2]):
            path.unlink()
            if left is not None:
                path.write_bytes(left)
            if left == content:
                continue  # it was empty
            with pytest.raises(RunError) as caught:
                checkpoint.restore(saved, like=state(zero=True))
            assert names(caught.value, path, saved), (path, str(caught.value))
            path.write_bytes(content)


def test_what_orbax_notes_is_for_others(saved, tmp_path):
    """All but the mark that says that the folder is complete."""
    copy = shutil.copytree(saved, tmp_path / "c")
    for name in ("_CHECKPOINT_METADATA", "orbax.checkpoint"):
        (copy / name).unlink()
    assert raw(checkpoint.restore(copy, like=state(zero=True))) == raw(state())
    (copy / "commit_success.txt").unlink()
    assert checkpoint.Checkpointer(tmp_path).steps() == []


def test_the_part_that_is_read_is_checked_and_no_other(saved, files):
    path = saved / "arrays" / DATA
    content = bytearray(files[path])
    content[4096 + 1000] ^= 1
    path.write_bytes(content)
    assert checkpoint.restore(saved, like={"step": 0}) == {"step": 7}
    with pytest.raises(RunError, match=r"large  \(2048, 128\) float32"):
        checkpoint.restore(saved, like={"large": state()["large"]})
    found = checkpoint.restore(saved, like={"large": state()["large"]}, verify=False)["large"]
    assert (np.asarray(found) != np.asarray(state()["large"])).sum() == 1


def test_what_is_lost_before_the_seal_is_not_sealed(tmp_path, monkeypatch):
    """Somebody who removes files, or another program in the same folder."""
    write = saving.seal

    def loses(folder, *args):
        (folder / "arrays" / DATA).unlink()
        write(folder, *args)

    monkeypatch.setattr(saving, "seal", loses)
    with pytest.raises(
        RunError, match=r"(?s)arrays/00000-000.safetensors  is missing\n  why:   missing .*: 1 of 1 file"
    ):
        checkpoint.save(tmp_path / "c", state())
    assert not (tmp_path / "c").exists()


# The sums themselves.

DTYPES = [np.dtype(name) for name in ("float32", "float16", "int8", "uint16", "int32", "float64", "int64")]
DTYPES += [np.dtype(name) for name in ("complex64", "complex128")]
DTYPES += [np.dtype(getattr(ml_dtypes, name)) for name in ("bfloat16", "float8_e4m3fn", "float8_e5m2")]
NARROW = [np.dtype(bool), np.dtype(ml_dtypes.int4), np.dtype(ml_dtypes.float4_e2m1fn)]  # with bytes that are no value
DTYPES += NARROW
shapes = st.lists(st.integers(1, 6), min_size=0, max_size=3).map(tuple)


def drawn(dtype, shape, seed):
    draw = np.random.default_rng(seed)
    if dtype in NARROW:
        return draw.integers(0, 2, shape).astype(dtype)
    if dtype.kind == "c":
        return (draw.standard_normal(shape) + 1j * draw.standard_normal(shape)).astype(dtype)
    return draw.integers(0, 256, (*shape, dtype.itemsize), np.uint8).view(dtype).reshape(shape)


def whole(values):
    return box_sums(values, tuple(slice(None) for _ in values.shape), values.shape)


@settings(max_examples=30, deadline=None)
@given(st.data(), st.sampled_from(DTYPES), shapes, st.integers(0, 1000))
def test_a_change_of_any_element_shows(data, dtype, shape, seed):
    values = drawn(dtype, shape, seed)
    changed = values.copy().reshape(-1)
    place = data.draw(st.integers(0, changed.size - 1))
    if dtype in NARROW:
        changed[place] = 1 - int(changed[place])
    else:
        one = changed[place : place + 1].view(np.uint8)
        one[data.draw(st.integers(0, dtype.itemsize - 1))] ^= 1 << data.draw(st.integers(0, 7))
    assert whole(changed.reshape(shape)) != whole(values)


@settings(max_examples=30, deadline=None)
@given(st.data(), st.sampled_from(DTYPES), st.lists(st.integers(1, 6), min_size=1, max_size=3), st.integers(0, 1000))
def test_sums_of_boxes_add_up_however_a_leaf_is_cut(data, dtype, shape, seed):
    values = drawn(dtype, tuple(shape), seed)
    boxes = [tuple(slice(0, size) for size in shape)]
    for _ in range(data.draw(st.integers(1, 4))):
        box = boxes.pop(data.draw(st.integers(0, len(boxes) - 1)))
        dim = data.draw(st.integers(0, len(shape) - 1))
        cut = data.draw(st.integers(box[dim].start, box[dim].stop))
        parts = (slice(box[dim].start, cut), slice(cut, box[dim].stop))
        boxes += [(*box[:dim], part, *box[dim + 1 :]) for part in parts if part.start < part.stop]
    assert add(box_sums(values[box], box, shape) for box in boxes) == whole(values)
