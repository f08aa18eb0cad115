"""Files of `torch.save` that each rank wrote for itself are read as one checkpoint, or refused: never a wrong value."""

import importlib.util
import itertools
import math
import subprocess
import sys

import jax
import numpy as np
import pytest

import jshard as js
from jshard.checkpoint.errors import CheckpointError, CheckpointWarning
from jshard.checkpoint.formats import TorchSource
from jshard.cli import main
from jshard.errors import RunError
from tests.checkpoint.checkpoint_states import check_source
from tests.checkpoint.torch_fixture import dtensor, parameter, placed, save, sharded_tensor

W = np.arange(70, dtype=np.float32).reshape(7, 10)
B = np.arange(3, dtype=np.float32)
ROWS = placed("Shard", dim=0)
COLUMNS = placed("Shard", dim=1)
WHOLE = placed("Replicate")


def chunk(array, count, index, dim):
    """A part of an array as `torch.chunk` has it: the last ones may be smaller, or empty."""
    size = -(-array.shape[dim] // count)
    return np.ascontiguousarray(np.take(array, range(array.shape[dim])[index * size : (index + 1) * size], dim))


def fsdp(array, rank, count):
    return dtensor(chunk(array, count, rank, 0), array.shape, [ROWS], (count,), (rank,))


def write(folder, states, name="rank_{}.pt"):
    folder.mkdir()
    for rank, state in enumerate(states):
        save(folder / name.format(rank), state)
    return folder


def fsdp_states(count=4):
    """What FSDP2 has on each rank: more ranks than rows of a bias, so that some have no part of it."""
    return [
        {"model": {"w": parameter(fsdp(W, rank, count)), "b": fsdp(B, rank, count)}, "step": 7} for rank in range(count)
    ]


def like():
    mesh = js.mesh(fsdp=4, devices=jax.devices()[:4])
    columns = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(None))
    return {"model": {"w": jax.ShapeDtypeStruct(W.shape, W.dtype, sharding=columns), "b": np.zeros_like(B)}}


@pytest.mark.parametrize("name", ["rank_{}.pt", "rank{}.pth", "model_world_size_4_rank_{}.pt", "fsdp_rank-{}.bin"])
def test_a_folder_and_each_of_its_files_are_the_checkpoint(name, tmp_path):
    folder = write(tmp_path / "run", fsdp_states(), name)
    for path in (folder, folder / name.format(2)):
        restored = js.checkpoint.restore(path, {**like(), "step": 0})
        np.testing.assert_array_equal(restored["model"]["w"], W)
        np.testing.assert_array_equal(restored["model"]["b"], B)
        assert restored["step"] == 7
    assert js.checkpoint.forecast(folder, {**like(), "step": 0}).amplification == 1.0


def test_it_is_inspected_and_imported(tmp_path, capsys):
    folder = write(tmp_path / "run", fsdp_states())
    assert main(["ckpt", "inspect", str(folder)]) == 0
    shown = capsys.readouterr().out
    assert "(7, 10)" in shown
    assert main(["ckpt", "import", str(folder), str(tmp_path / "ours")]) == 0
    np.testing.assert_array_equal(js.checkpoint.restore(tmp_path / "ours", like())["model"]["w"], W)


def test_ten_ranks_are_in_the_order_of_their_numbers(tmp_path):
    folder = write(tmp_path / "run", [{"w": fsdp(W, rank, 12)} for rank in range(12)])
    check_source(TorchSource(folder), {"w": W})


PLACEMENTS = {
    "rows": [ROWS, WHOLE],
    "columns": [WHOLE, COLUMNS],
    "both": [ROWS, COLUMNS],
    "both, swapped": [COLUMNS, ROWS],
    "rows twice": [ROWS, ROWS],
    "replicated": [WHOLE, WHOLE],
}


@pytest.mark.parametrize("name", PLACEMENTS)
def test_each_placement_on_a_mesh_of_two_axes_is_read(name, tmp_path):
    states = []
    for coordinate in itertools.product(range(3), range(2)):
        local = W
        for placement, degree, index in zip(PLACEMENTS[name], (3, 2), coordinate, strict=True):
            if placement is not WHOLE:
                local = chunk(local, degree, index, 0 if placement is ROWS else 1)
        states.append({"w": dtensor(local, W.shape, PLACEMENTS[name], (3, 2), coordinate)})
    check_source(TorchSource(write(tmp_path / "run", states)), {"w": W})


def test_what_tensor_parallelism_cuts_before_fsdp_is_put_together(tmp_path):
    placements = [placed("_StridedShard", dim=0, split_factor=2), ROWS]
    states = []
    for coordinate in itertools.product(range(2), range(2)):
        by_tensor = chunk(W, 2, coordinate[1], 0)  # 4 rows and 3 rows, each cut over two ranks
        local = chunk(by_tensor, 2, coordinate[0], 0)
        states.append({"w": dtensor(local, W.shape, placements, (2, 2), coordinate)})
    check_source(TorchSource(write(tmp_path / "run", states)), {"w": W})


def test_one_rank_may_hold_several_boxes(tmp_path):
    # As of one axis: rows 0, 1 and 4, 5 on the first rank, 2, 3 and 6 on the second.
    strided = [placed("_StridedShard", dim=0, split_factor=2)]
    locals_ = [W[[0, 1, 4, 5]], W[[2, 3, 6]]]
    states = [{"w": dtensor(local, W.shape, strided, (2,), (rank,))} for rank, local in enumerate(locals_)]
    check_source(TorchSource(write(tmp_path / "run", states)), {"w": W})


def test_a_rank_outside_of_a_mesh_has_no_part(tmp_path):
    states = [{"w": fsdp(W, rank, 2)} for rank in range(2)]
    states.append({"w": dtensor(W[:0], W.shape, [ROWS], (2,), None)})
    check_source(TorchSource(write(tmp_path / "run", states)), {"w": W})


def test_sharded_tensors_of_fsdp1_are_read_by_their_offsets(tmp_path):
    states = [{"w": sharded_tensor([((0, 0), W[:4])], W.shape)}, {"w": sharded_tensor([((4, 0), W[4:])], W.shape)}]
    check_source(TorchSource(write(tmp_path / "run", states)), {"w": W})


def test_an_empty_shard_is_left_out_wherever_it_is(tmp_path):
    states = [{"w": sharded_tensor([((0, 0), W), ((3, 0), W[:0])], W.shape)}]
    check_source(TorchSource(write(tmp_path / "run", states)), {"w": W})


def test_what_all_ranks_hold_whole_is_read_if_they_agree(tmp_path):
    folder = write(tmp_path / "run", [{"w": fsdp(W, rank, 2), "scale": B} for rank in range(2)])
    check_source(TorchSource(folder), {"w": W, "scale": B})
    save(folder / "rank_1.pt", {"w": fsdp(W, 1, 2), "scale": B + 1})
    source = TorchSource(folder)
    with pytest.raises(CheckpointError, match="ranks have different values"):
        source.read("scale", (slice(0, 3),))


def test_values_of_which_each_rank_has_its_own_are_noted_and_not_read(tmp_path):
    states = [{"w": fsdp(W, rank, 2), "rank": rank, "loss": float("nan")} for rank in range(2)]
    folder = write(tmp_path / "run", states)
    source = TorchSource(folder)
    assert list(source.values) == ["loss"]
    assert source.notes == ["not read, as the 2 ranks have different values: rank"]
    with pytest.warns(CheckpointWarning, match="different values: rank"):
        js.checkpoint.restore(folder, {"w": np.zeros_like(W)}, extra="ignore")


def test_tensors_of_several_shapes_and_values_of_several_types_are_different(tmp_path):
    steps = (7, 7.0)
    states = [{"w": fsdp(W, rank, 2), "scale": B[: rank + 1], "step": steps[rank]} for rank in range(2)]
    source = TorchSource(write(tmp_path / "run", states))
    assert list(source.leaves) == ["w"]
    assert not source.values
    assert source.notes == ["not read, as the 2 ranks have different values: scale, step"]


@pytest.mark.parametrize("scales", [(1.0, math.nan), (math.nan, 1.0)])
def test_a_number_and_none_at_all_are_different(tmp_path, scales):
    states = [{"w": fsdp(W, rank, 2), "scale": scales[rank]} for rank in range(2)]
    source = TorchSource(write(tmp_path / "run", states))
    assert source.notes == ["not read, as the 2 ranks have different values: scale"]


def test_a_number_that_is_none_on_all_ranks_is_one_value(tmp_path):
    states = [{"w": fsdp(W, rank, 2), "scale": math.nan} for rank in range(2)]
    source = TorchSource(write(tmp_path / "run", states))
    assert list(source.values) == ["scale"]
    assert source.notes == []


def test_a_file_without_shards_is_read_alone(tmp_path):
    folder = write(tmp_path / "run", [{"w": W}, {"w": W + 1}])
    check_source(TorchSource(folder / "rank_1.pt"), {"w": W + 1})


WRONG = {
    "a missing last rank": (lambda folder: (folder / "rank_3.pt").unlink(), "files of some ranks are missing"),
    "a missing rank": (lambda folder: (folder / "rank_1.pt").unlink(), "none of rank 1"),
    "a rank twice": (lambda folder: (folder / "rank_01.pt").write_bytes(b""), "both of rank 1"),
    "a rank of another save": (
        lambda folder: save(folder / "rank_1.pt", {"model": {"w": fsdp(W, 1, 2), "b": fsdp(B, 1, 4)}}),
        "files of some ranks are missing",
    ),
    "another shape": (
        lambda folder: save(folder / "rank_1.pt", {"model": {"w": fsdp(W[:6], 1, 4), "b": fsdp(B, 1, 4)}}),
        "in another file",
    ),
    "no shard": (lambda folder: save(folder / "rank_1.pt", {"model": {"w": W}}), "is in shards in other files"),
}


@pytest.mark.parametrize("name", WRONG)
def test_files_that_do_not_make_up_a_tensor_are_refused(name, tmp_path):
    change, why = WRONG[name]
    folder = write(tmp_path / "run", fsdp_states())
    change(folder)
    with pytest.raises((RunError, CheckpointError), match=why):
        TorchSource(folder)


STATES = {
    "a partial sum": (dtensor(W, W.shape, [placed("Partial", reduce_op="sum")], (1,), (0,)), "partial sum"),
    "local numbers of another shape": (dtensor(W[:5], W.shape, [ROWS], (1,), (0,)), "by its mesh"),
    "a dim that it has not": (dtensor(W, W.shape, [placed("Shard", dim=2)], (1,), (0,)), "not known"),
    "a coordinate outside": (dtensor(W, W.shape, [ROWS], (1,), (1,)), "this rank at"),
    "another dtype": (dtensor(W.view(np.int32), W.shape, [ROWS], (1,), (0,)), None),
    "parts beyond counting": (
        dtensor(W, W.shape, [placed("_StridedShard", dim=0, split_factor=1 << 40)], (1,), (0,)),
        "not known",
    ),
    "a shard beyond the end": (sharded_tensor([((4, 0), W)], W.shape), "a shard of it"),
    "a gap as large as an overlap": (sharded_tensor([((0, 0), W[:4]), ((3, 0), W[:3])], W.shape), "some of them twice"),
    "a shard of other dims": (sharded_tensor([((4,), W[0])], W.shape), "a shard of it"),
}


@pytest.mark.parametrize("name", STATES)
def test_a_tensor_that_does_not_fit_its_description_is_refused(name, tmp_path):
    tensor, why = STATES[name]
    folder = write(tmp_path / "run", [{"w": tensor}])
    if why is None:  # its dtype is that of its numbers
        assert TorchSource(folder).leaves["w"].dtype == "int32"
        return
    with pytest.raises((RunError, CheckpointError), match=why):
        TorchSource(folder)


def test_several_sets_of_files_are_told_apart_by_the_path_of_one(tmp_path):
    folder = write(tmp_path / "run", fsdp_states(), "model_world_size_4_rank_{}.pt")
    for rank in range(4):
        save(folder / f"optim_world_size_4_rank_{rank}.pt", {"state": {0: {"exp_avg": fsdp(W + 1, rank, 4)}}})
    with pytest.raises(CheckpointError, match="several sets of files of ranks") as caught:
        TorchSource(folder)
    assert "model_world_size_4_rank_0.pt" in caught.value.do
    check_source(TorchSource(folder / "optim_world_size_4_rank_0.pt"), {"state.0.exp_avg": W + 1})


REAL = """
import os, sys, torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
folder, rank = sys.argv[1], int(sys.argv[2])
torch.set_num_threads(1)
torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=3)
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.Linear(5, 2))
if rank == 0:
    torch.save(model.state_dict(), f"{folder}/whole.pt")
fully_shard(model, mesh=init_device_mesh("cpu", (3,)))
torch.save({"model": model.state_dict()}, f"{folder}/rank_{rank}.pt")
torch.distributed.barrier()
"""


def test_files_that_fsdp2_wrote_are_read(tmp_path):
    if importlib.util.find_spec("torch") is None:
        pytest.skip("PyTorch is not installed")
    command = [sys.executable, "-c", REAL, str(tmp_path)]
    ranks = [subprocess.Popen([*command, str(rank)]) for rank in range(3)]
    assert [rank.wait() for rank in ranks] == [0, 0, 0]
    whole = TorchSource(tmp_path / "whole.pt")
    expected = {
        f"model.{name}": whole.read(name, tuple(slice(0, size) for size in leaf.shape))
        for name, leaf in whole.leaves.items()
    }
    check_source(TorchSource(tmp_path / "rank_0.pt"), expected)
