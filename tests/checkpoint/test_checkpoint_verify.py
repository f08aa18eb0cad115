"""`verify` finds every file that is missing and every bit that has changed, and names the leaf and the file."""

import shutil
import warnings
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import jshard as js
from jshard.checkpoint.readers import own_checkpoint
from jshard.checkpoint.verifying import verify

BEFORE = Path(__file__).parents[1] / "fixtures" / "checkpoints_of_0_1"
ROWS = 256  # of 1 KiB: eight chunks of 32 KiB, and a leaf that is larger than what a manifest has checksums of


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    path = tmp_path_factory.mktemp("saved") / "c"
    rows = NamedSharding(js.mesh(), PartitionSpec("fsdp"))
    table = jax.device_put(np.random.default_rng(0).normal(size=(ROWS, 256)).astype(np.float32), rows)
    large = np.random.default_rng(1).normal(size=(ROWS, 256)).astype(np.float32)  # in one file
    small = {"scale": jnp.arange(8, dtype=jnp.bfloat16), "none": jnp.zeros((0, 3)), "a.b": jnp.int8(3)}
    state = {"model": {"table": table, "large": large, **small}, "key": jax.random.key(3), "step": 7, "text": "x" * 9}
    js.checkpoint.save(path, state)
    return path


@pytest.fixture
def copy(saved, tmp_path):
    return shutil.copytree(saved, tmp_path / "c")


def flip(path, byte, bit=0):
    content = bytearray(path.read_bytes())
    content[byte] ^= 1 << bit
    path.write_bytes(content)


def found(path):
    return [(finding.leaf, finding.file) for finding in verify(path).findings]


def test_a_good_checkpoint_is_read_whole(saved):
    read = []
    verdict = verify(saved, on_read=read.append)
    assert verdict.is_good and verdict.findings == ()
    assert verdict.num_leaves == 8
    assert verdict.num_bytes == 2 * ROWS * 1024 + 16 + 1 + 8 <= sum(read)


DATA = "arrays/00000-000.safetensors"


# Of every kind of file: bits near its begin and near its end, and in the middle, where the large leaves are.
@pytest.mark.parametrize(("file", "leaf"), [(DATA, "model/table"), ("jshard.json", None)])
def test_a_flipped_bit(copy, file, leaf):
    size = (copy / file).stat().st_size
    for byte, place in ((3, leaf and "model/large"), (2 * size // 3, leaf), (size - 1, None)):  # the last of the index
        flip(copy / file, byte)
        assert (place, file) in found(copy), byte
        flip(copy / file, byte)
    assert verify(copy).is_good


@pytest.mark.parametrize("cut", [0, 100_000])
def test_a_file_that_is_missing_or_cut_off(copy, cut):
    data = (copy / DATA).read_bytes()
    (copy / DATA).unlink()
    if cut:
        (copy / DATA).write_bytes(data[:-cut])
    reasons = {(finding.leaf, finding.file): finding.why for finding in verify(copy).findings}
    assert reasons == {
        (None, DATA): f"{len(data) - cut} bytes of {len(data)}" if cut else "is missing",
    }


def test_an_old_checkpoint_names_the_leaf_and_the_file(tmp_path):
    copy = shutil.copytree(BEFORE / "100", tmp_path / "c")
    (file,) = (copy / "state" / "host").rglob("c/0")
    flip(file, 3)
    assert ("host", None) in found(copy)
    file.unlink()
    assert {(None, "state/host/c/0"), ("host", None)} <= {*found(copy)}


def test_plain_orbax_can_be_read_and_no_more(tmp_path):
    from orbax.checkpoint import v1 as ocp

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ocp.save(tmp_path / "c", {"a": [jnp.arange(12.0).reshape(3, 4), jnp.ones(3)], "n": 3})
    verdict = verify(tmp_path / "c")
    assert verdict.is_good
    assert (verdict.num_leaves, verdict.num_files) == (3, 0)
    source = own_checkpoint(tmp_path / "c")
    np.testing.assert_array_equal(source.read("a/0", (slice(1, 3), slice(0, 2))), [[4, 5], [8, 9]])
    shutil.rmtree(tmp_path / "c" / "state" / "d")
    assert not verify(tmp_path / "c").is_good


def test_each_leaf_of_orbax_has_a_reason_of_its_own(tmp_path):
    """Leaves are read together first: the error of that must not become the reason of every leaf."""
    js.checkpoint.save(tmp_path / "c", {"a": jnp.ones((4, 2)), "b": jnp.zeros(3)}, format="orbax")
    file = next((tmp_path / "c").rglob("manifest.ocdbt"))
    file.write_bytes(file.read_bytes()[:-1] + b"\0")
    verdict = verify(tmp_path / "c")
    reasons = {finding.leaf: finding.why for finding in verdict.findings if finding.leaf}
    assert reasons.keys() == {"a", "b"} and all(f'"{leaf}/' in why for leaf, why in reasons.items()), reasons
