"""PyTorch's distributed checkpoints are read box by box, without PyTorch, and nothing that their pickles name runs."""

import collections
import importlib.util
import os
import pickle
import random
import subprocess
import sys
import zipfile
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest

from jshard.checkpoint.errors import CheckpointError
from jshard.checkpoint.formats import DcpSource, dcp_writer
from jshard.checkpoint.formats.source import stored_array
from jshard.checkpoint.formats.torch_writer import PickledCall, PickledGlobal
from jshard.errors import RunError
from tests.checkpoint import dcp_fixture
from tests.checkpoint.checkpoint_states import Held, bits, check_source, everything
from tests.checkpoint.dcp_fixture import edit_metadata, places, put_archive, split, write_dcp

RNG = np.random.default_rng(0)
W = RNG.normal(size=(19, 8)).astype(np.float32)
TENSORS = {
    "model.w": (W, split(W, 4)),
    "model.columns": (W, split(W, 3, dim=1)),
    "model.half": (W.astype(jnp.bfloat16), split(W.astype(jnp.bfloat16), 4)),
    "model.narrow": (W.astype(jnp.float8_e4m3fn), split(W.astype(jnp.float8_e4m3fn), 2)),
    "turned": (W.T, [[((0, 0), W.T)]]),
    "scalar": (np.array(2.5, np.float32), [[((), np.array(2.5, np.float32))]]),
    "ids": (np.arange(5), [[], [((0,), np.arange(5))]]),
    "empty": (np.zeros((0, 3), np.float32), [[((0, 0), np.zeros((0, 3), np.float32))]]),
}
VALUES = {"step": 7, "lr": 0.5, "note": "text", "list": [1, (2.5, None)], "raw": b"\x00\xff", "many": {1, 2}}
VALUES |= {"ordered": collections.OrderedDict(a=1), "big": 2**70}


@pytest.fixture
def folder(tmp_path):
    write_dcp(tmp_path / "c", {name: chunks for name, (_, chunks) in TENSORS.items()}, VALUES)
    return tmp_path / "c"


def read_w(folder):
    return DcpSource(folder).read("model.w", everything(W))


def read_step(folder):
    return DcpSource(folder).values["step"].value()


# ---- Reading ------------------------------------------------------------------------------------


def test_tensors_and_values_are_those_that_were_written(folder):
    source = DcpSource(folder)
    assert source.leaves == {name: stored_array(array.shape, array.dtype) for name, (array, _) in TENSORS.items()}
    check_source(source, {name: array for name, (array, _) in TENSORS.items()})
    values = {name: place.value() for name, place in source.values.items()}
    assert values == VALUES and list(map(type, values.values()))[:2] == [int, float]


# ---- Pickles that name something else -------------------------------------------------------------


class Call:
    """Pickled as the call of a function."""

    def __init__(self, function, *args):
        self.call = function, args

    def __reduce__(self):
        return self.call


def global_call(module, name, argument):
    """A pickle that calls module.name(argument): the name need not exist here."""
    return f"c{module}\n{name}\n(V{argument}\ntR.".encode()


ATTACKS = {
    "posix.system": lambda mark: pickle.dumps(Call(os.system, f"touch {mark}")),
    "builtins.eval": lambda mark: pickle.dumps(Call(eval, f"open({str(mark)!r}, 'w')"), protocol=4),
    "builtins.getattr": lambda mark: pickle.dumps(Call(getattr, Call(getattr, 1, "real"), "to_bytes"), protocol=4),
    "torch.load": lambda mark: global_call("torch", "load", mark),
    "torch._utils._rebuild_tensor_v2.__globals__": lambda mark: (
        b"\x80\x04\x8c\x0ctorch._utils\x8c\x1e_rebuild_tensor_v2.__globals__\x93."
    ),
    "_codecs.encode": lambda mark: pickle.dumps(Call(__import__("_codecs").encode, "a", "rot13"), protocol=4),
}


@pytest.mark.parametrize("name", ATTACKS)
@pytest.mark.parametrize("where", ["metadata", "tensor", "value"])
def test_a_pickle_that_names_anything_else_is_refused_and_not_run(folder, tmp_path, name, where):
    mark = tmp_path / "ran"
    attack = ATTACKS[name](mark)
    if where == "metadata":
        (folder / ".metadata").write_bytes(attack)
    else:
        put_archive(folder, "model.w" if where == "tensor" else "step", {"archive/data.pkl": attack})
    reads = {"metadata": DcpSource, "value": read_step, "tensor": read_w}
    with pytest.raises(CheckpointError) as caught:
        reads[where](folder)
    assert f"  why:   {name} is not among the classes" in str(caught.value)
    assert not mark.exists()


@pytest.mark.parametrize("name", ["torch Size", "torch device", "collections OrderedDict"])
def test_a_pickle_changes_nothing_for_the_next_one(folder, name):
    before = (folder / ".metadata").read_bytes()
    (folder / ".metadata").write_bytes("c{}\n{}\n(N(dV__new__\nNstb.".format(*name.split()).encode())
    with pytest.raises(RunError, match="its pickle cannot be read"):
        DcpSource(folder)
    (folder / ".metadata").write_bytes(before)
    np.testing.assert_array_equal(read_w(folder), W)


def test_an_enum_of_an_early_python_3_11_is_read(folder):
    def change(described):
        for tensor in described.tensors.values():
            tensor.encoding = PickledCall(
                PickledGlobal("builtins", "getattr"), (tensor.encoding.function, "TORCH_CONTIGUOUS_FORMAT")
            )

    edit_metadata(folder, change)
    assert b"getattr" in (folder / ".metadata").read_bytes()
    np.testing.assert_array_equal(read_w(folder), W)


# ---- Damaged and odd ones -------------------------------------------------------------------------


def set_place(name, **fields):
    return lambda folder: edit_metadata(folder, lambda described: places(described, name)[0].update(fields))


def cut(folder):
    path = folder / "__2_0.distcp"
    path.write_bytes(path.read_bytes()[:-100])


def lose_a_chunk(described):
    described.tensors["model.w"].chunks.pop()


def double_a_chunk(described):
    chunks = described.tensors["model.w"].chunks
    chunks[1].begin = chunks[0].begin


def shift_a_chunk(described):
    """Two chunks overlap, and their sizes add up all the same."""
    chunk = described.tensors["model.w"].chunks[1]
    place = next(place for place in described.places if (place.name, place.begin) == ("model.w", chunk.begin))
    chunk.begin = place.begin = (4, 0)


def swap_two(described):
    first, second = places(described, "model.w")[0], places(described, "model.half")[0]
    both = dict(first), dict(second)
    first.update(both[1]), second.update(both[0])


def lose_a_place(name):
    def change(described):
        described.places = [place for place in described.places if place.name != name]

    return lambda folder: edit_metadata(folder, change)


def lose_a_description(described):
    del described.tensors["model.half"]


def lose_the_description_of_a_value(described):
    described.values.remove("step")


def add_a_place(described):
    first = next(place for place in described.places if place.name == "model.w")
    described.places.append(SimpleNamespace(name="model.w", begin=(3, 0), info=dict(first.info)))


RUN_ERRORS = {
    "value nowhere": (lose_a_place("step"), "it has no location for step"),
    "tensor nowhere": (lose_a_place("model.half"), "it has no location for the chunks"),
    "undescribed": (
        lambda folder: edit_metadata(folder, lose_a_description),
        r"a location, and no description, for model\.half in __0_0\.distcp",
    ),
    "undescribed value": (
        lambda folder: edit_metadata(folder, lose_the_description_of_a_value),
        r"a location, and no description, for step in __0_0\.distcp",
    ),
    "undescribed chunk": (
        lambda folder: edit_metadata(folder, add_a_place),
        r"a location, and no description, for model\.w in __0_0\.distcp",
    ),
    "cut": (cut, "__2_0.distcp\n.*it ends at byte"),
    "missing": (lambda folder: (folder / "__3_0.distcp").unlink(), "a file that it names is missing: __3_0.distcp"),
    "no pickle": (lambda folder: (folder / ".metadata").write_bytes(b"hello"), "its pickle cannot be read"),
    "other": (lambda folder: (folder / ".metadata").write_bytes(pickle.dumps([1])), "does not describe a checkpoint"),
    "outside": (set_place("model.w", relative_path="../c/__0_0.distcp"), r"it places model\.w in \.\./c"),
    "negative": (set_place("model.w", offset=-1), "it places model.w in"),
    "far": (set_place("model.w", offset=1 << 40), "it ends at byte"),
    "shifted place": (set_place("model.w", offset=1), "cannot be read"),
    "lost chunk": (lambda folder: edit_metadata(folder, lose_a_chunk), "3 chunks do not make up model.w"),
    "double chunk": (lambda folder: edit_metadata(folder, double_a_chunk), "4 chunks do not make up model.w"),
    "overlap": (lambda folder: edit_metadata(folder, shift_a_chunk), "the chunks hold 152, some twice"),
    "swapped": (lambda folder: edit_metadata(folder, swap_two), r"a chunk is \(5, 8\) bfloat16; .metadata says"),
    "big endian": (
        lambda folder: put_archive(folder, "model.w", {"a/data.pkl": b"N.", "a/byteorder": b"big"}),
        "is not little-endian",
    ),
    "no tensor": (lambda folder: put_archive(folder, "model.w", {"a/data.pkl": b"N."}), "is not a tensor"),
}


@pytest.mark.parametrize("name", RUN_ERRORS)
def test_damage_is_reported(folder, name):
    damage, text = RUN_ERRORS[name]
    damage(folder)
    with pytest.raises(RunError, match=text) as caught:
        read_w(folder)
    assert str(caught.value).startswith("A file of the checkpoint is damaged.\n  where: " + str(folder.parent))


def tensor_pickle(storage, size, stride, offset=0):
    """A pickle of a float32 tensor over the storage "0" said to have this many elements."""
    arguments = f"(I{offset}\n(" + "".join(f"I{n}\n" for n in size) + "t(" + "".join(f"I{n}\n" for n in stride) + "t"
    persistent = f"(Vstorage\nctorch\nFloatStorage\nV0\nVcpu\nI{storage}\ntQ"
    return f"ctorch._utils\n_rebuild_tensor_v2\n({persistent}{arguments[1:]}I00\n}}tR.".encode()


@pytest.mark.parametrize(
    "pickled",
    [
        tensor_pickle(41, (5, 8), (8, 1)),  # more than the member holds
        tensor_pickle(40, (5, 8), (9, 1)),
        tensor_pickle(40, (5, 8), (8, 1), offset=1),
        tensor_pickle(40, (5, 8), (8, -1)),
    ],
)
def test_a_tensor_stays_inside_its_storage(folder, pickled):
    put_archive(folder, "model.w", {"a/data.pkl": tensor_pickle(40, (5, 8), (8, 1)), "a/data/0": b"\1" * 160})
    read_w(folder)
    put_archive(folder, "model.w", {"a/data.pkl": pickled, "a/data/0": b"\1" * 160})
    with pytest.raises(RunError, match="its pickle cannot be read: ValueError"):
        read_w(folder)


def test_extensions_and_compression_are_refused(folder):
    put_archive(folder, "model.w", {"a/data.pkl": b"N."}, compression=zipfile.ZIP_DEFLATED)
    with pytest.raises(CheckpointError, match="compressed or encrypted"):
        read_w(folder)
    set_place("model.w", transform_descriptors=["zstd"])(folder)
    with pytest.raises(CheckpointError, match=r"model.w was transformed by \['zstd'\]"):
        DcpSource(folder)


def test_a_folder_without_metadata(folder):
    with pytest.raises(CheckpointError, match=r"the folder has no \.metadata"):
        DcpSource(folder.parent)


def test_bytes_that_changed_end_in_a_four_part_error_or_in_nothing(folder):
    dice = random.Random(0)
    for name in (".metadata", "__0_0.distcp"):
        before, reported = (folder / name).read_bytes(), []
        for _ in range(40):
            raw = bytearray(before)
            raw[dice.randrange(len(raw))] ^= 1 << dice.randrange(8)
            (folder / name).write_bytes(raw)
            try:
                source = DcpSource(folder)
                for leaf in source.leaves:
                    source.read(leaf, (slice(0, 1),) * len(source.leaves[leaf].shape))
                [place.value() for place in source.values.values()]
            except (CheckpointError, RunError) as error:
                reported.append(error)
        assert 0 < len(reported) < 40
        assert all(error.what and error.where and error.why and error.do for error in reported)
        (folder / name).write_bytes(before)


# ---- Writing ----------------------------------------------------------------------------------------


WRITTEN = {name.replace(".", "/"): array for name, (array, _) in TENSORS.items()}
WRITTEN |= {"deep": np.arange(100).reshape(2, 5, 10), "yes": np.array([True, False]), "bytes": np.arange(5, dtype="u4")}
WRITTEN_VALUES = {"opt/step": 7, "lr": 0.5, "note": "text \N{SNOWMAN}"}


@pytest.fixture
def written(tmp_path, monkeypatch):
    monkeypatch.setattr(dcp_writer, "_CHUNK_BYTES", 150)  # so that most arrays are in several chunks
    counted = []
    dcp_writer.write_dcp(tmp_path / "w", Held(WRITTEN), values=WRITTEN_VALUES, on_written=counted.append)
    assert sum(counted) == sum(array.nbytes for array in WRITTEN.values())
    return tmp_path / "w"


def test_what_is_written_is_read_as_it_was(written):
    source = DcpSource(written)
    check_source(source, {name.replace("/", "."): array for name, array in WRITTEN.items()})
    found = {name: place.value() for name, place in source.values.items()}
    assert found == {name.replace("/", "."): value for name, value in WRITTEN_VALUES.items()}
    with pytest.raises(CheckpointError, match="such files already exist"):
        dcp_writer.write_dcp(written, Held(WRITTEN))
    with pytest.raises(CheckpointError, match=r"(?s)not support the dtypes of 1 array.*x  int4"):
        dcp_writer.write_dcp(written.parent / "x", Held({"x": np.zeros(2, jnp.int4)}))


# ---- Against PyTorch itself -----------------------------------------------------------------------


@pytest.fixture(scope="module")
def by_torch(tmp_path_factory):
    if importlib.util.find_spec("torch") is None:
        pytest.skip("PyTorch is not installed")
    folder = tmp_path_factory.mktemp("torch") / "c"
    command = [sys.executable, "-W", "ignore", dcp_fixture.__file__, str(folder)]
    processes = [subprocess.Popen([*command, str(rank), "2"]) for rank in range(2)]
    assert [process.wait(250) for process in processes] == [0, 0]
    return folder


@pytest.mark.slow
def test_pytorch_wrote_it(by_torch):
    source = DcpSource(by_torch)
    weights = np.load(f"{by_torch}.npz")
    assert set(weights) <= set(source.leaves) and len(weights) == 4
    check_source(source, dict(weights))
    numbers = np.arange(28, dtype=np.float32).reshape(7, 4)
    same = {"columns": numbers, "turned": numbers.T, "scalar": np.array(2.5, np.float32)}
    same |= {"bytes": np.arange(5, dtype=np.uint8), "narrow": numbers.astype(jnp.float8_e4m3fn)}
    same |= {f"rows.{dtype}": numbers.astype(dtype) for dtype in (jnp.bfloat16.dtype, "float16", "float64")}
    check_source(source, same)
    assert source.leaves["optimizer.state.0.weight.exp_avg"].shape == (5, 6)
    values = {"step": 7, "note": "text", "list": [1, 2.5, None], "raw": b"\x00\xff"}
    assert {name: source.values[name].value() for name in values} == values
    assert source.values["optimizer.param_groups.0.lr"].value() == 1e-3


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")  # it is made to read in one process
def test_pytorch_reads_what_the_tests_write(folder):
    torch = pytest.importorskip("torch")
    import torch.distributed.checkpoint as dcp

    names = {"model.w": torch.float32, "model.half": torch.bfloat16, "model.narrow": torch.float8_e4m3fn}
    state = {name: torch.empty(19, 8, dtype=dtype) for name, dtype in names.items()}
    state |= {"turned": torch.empty(8, 19), "step": 0, "note": ""}
    dcp.load(state, checkpoint_id=folder, no_dist=True)
    assert (state["step"], state["note"]) == (7, "text")
    for name in (*names, "turned"):
        np.testing.assert_array_equal(
            state[name].contiguous().view(torch.uint8).numpy().ravel(), bits(TENSORS[name][0])
        )


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_pytorch_loads_what_is_written(written):
    torch = pytest.importorskip("torch")
    import torch.distributed.checkpoint as dcp

    arrays = {name.replace("/", "."): np.asarray(array) for name, array in WRITTEN.items()}
    state = {name: torch.empty(x.shape, dtype=getattr(torch, str(x.dtype))) for name, x in arrays.items()}
    state |= {"opt": {"step": 0}, "lr": 0.0, "note": ""}
    dcp.load(state, checkpoint_id=written, no_dist=True)
    for name, array in arrays.items():
        found = state[name].contiguous().reshape(-1).view(torch.uint8).numpy()
        np.testing.assert_array_equal(found, np.ascontiguousarray(array).reshape(-1).view(np.uint8))
    assert (state["opt"]["step"], state["lr"], state["note"]) == tuple(WRITTEN_VALUES.values())
