"""DeepSpeed's ZeRO-3 checkpoints are read box by box, without DeepSpeed, and restored into models of ours."""

import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jshard as js
from jshard.checkpoint.errors import CheckpointError
from jshard.checkpoint.formats import ZeroSource, dcp_writer, foreign_source
from jshard.checkpoint.formats.torch_writer import PickledCall, PickledGlobal, rebuilt, write_archive
from jshard.cli import main
from jshard.errors import RunError
from tests.checkpoint.checkpoint_states import check_source

RANKS = 3
RNG = np.random.default_rng(0)
ARRAYS = {
    "w": RNG.normal(size=(5, 4)).astype(np.float32),  # 7 numbers for each rank, one of them beyond the end
    "scale": RNG.normal(size=(3,)).astype(np.float32),
    "gate": np.array(0.5, np.float32),
    "deep.w": RNG.normal(size=(2, 3, 4)).astype(np.float32),
}
FROZEN = {"frozen": RNG.normal(size=(4, 2)).astype(jnp.bfloat16)}
BUFFERS = {"table": RNG.normal(size=(2, 3)).astype(np.float32).T}


def pieces(array):
    """A parameter as the ranks have it: equal parts of the flat array, padded."""
    count = -(-array.size // RANKS)
    return np.pad(array.ravel(), (0, count * RANKS - array.size)).reshape(RANKS, count)


def save(path, state):
    """What `torch.save` writes of a state with arrays in it."""
    stored = []

    def described(value):
        if isinstance(value, np.ndarray):
            call, key = rebuilt(value), str(len(stored))
            storage, *rest = call.args
            stored.append(value if value.flags.c_contiguous else value.T)
            return call._replace(args=(storage._replace(key=(*storage.key[:2], key, *storage.key[3:])), *rest))
        if isinstance(value, dict):
            return {name: described(item) for name, item in value.items()}
        return [described(item) for item in value] if isinstance(value, list) else value

    value = described(state)
    with path.open("wb") as file:
        write_archive(file, value, tuple(stored))


def write(folder, *, stage=3, prefix="", tensor_rank=0):
    """A checkpoint of three ranks, whose parameters are in two groups."""
    step = folder / "global_step7"
    step.mkdir(parents=True)
    (folder / "latest").write_text("global_step7\n")
    names = list(ARRAYS)
    for rank in range(RANKS):
        flat = {name: pieces(ARRAYS[name])[rank] for name in names}
        groups = [np.concatenate([flat[name] for name in some]) for some in (names[:2], names[2:])]
        groups[-1] = np.append(groups[-1], np.zeros(5, np.float32))  # DeepSpeed aligns the whole
        number = PickledCall(PickledGlobal("deepspeed.runtime.zero.config", "ZeroStageEnum"), (stage,))
        optim = {"zero_stage": number, "partition_count": RANKS, "fp32_flat_groups": groups}
        of = f"zero_pp_rank_{rank}_mp_rank_{tensor_rank:02d}"
        save(step / f"{prefix}{of}_optim_states.pt", {"optimizer_state_dict": optim, "ds_version": "0.18"})
        size = lambda array: dcp_writer._size(array.shape)
        model = {
            "module": dict.fromkeys(names, np.zeros(0, np.float32)) | BUFFERS,
            "buffer_names": list(BUFFERS),
            "param_shapes": [{name: size(ARRAYS[name]) for name in some} for some in (names[:2], names[2:])],
            "frozen_param_shapes": {name: size(array) for name, array in FROZEN.items()},
            "frozen_param_fragments": {name: pieces(array)[rank] for name, array in FROZEN.items()},
            "shared_params": {"head.w": "w"},
        }
        save(step / f"{of}_model_states.pt", model)
    return step


@pytest.fixture
def folder(tmp_path):
    write(tmp_path / "run")
    return tmp_path / "run"


def test_tensors_are_those_that_the_ranks_wrote(folder):
    wanted = ARRAYS | FROZEN | BUFFERS | {"head.w": ARRAYS["w"]}
    for path in (folder, folder / "global_step7"):
        source = foreign_source(path)
        assert isinstance(source, ZeroSource) and set(source.leaves) == set(wanted)
        check_source(source, wanted)


def test_it_is_restored_onto_a_mesh_and_imported(folder, tmp_path):
    mesh = js.mesh(fsdp=4, devices=jax.devices()[:4])
    sharded = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(None, "fsdp"))
    like = {"w": jax.ShapeDtypeStruct((5, 4), jnp.float32, sharding=sharded)}
    found = js.checkpoint.restore(folder, like, extra="ignore")
    np.testing.assert_array_equal(found["w"], ARRAYS["w"])
    assert main(["ckpt", "import", str(folder), str(tmp_path / "ours")]) == 0
    found = js.checkpoint.restore(tmp_path / "ours", like, extra="ignore")
    np.testing.assert_array_equal(found["w"], ARRAYS["w"])


def test_bf16_optimizers_have_files_of_another_name(tmp_path):
    write(tmp_path / "run", prefix="bf16_")
    check_source(ZeroSource(tmp_path / "run"), ARRAYS)


def truncate(step):
    file = step / "zero_pp_rank_1_mp_rank_00_optim_states.pt"
    file.write_bytes(file.read_bytes()[:-100])


def shorten(step):
    state = {"zero_stage": 3, "fp32_flat_groups": [np.zeros(4, np.float32)]}
    save(step / "zero_pp_rank_2_mp_rank_00_optim_states.pt", {"optimizer_state_dict": state})


def edit_model(step, rank, **fields):
    """Writes a rank's model states again, with other fields."""
    size = lambda array: dcp_writer._size(array.shape)
    model = {
        "module": dict(BUFFERS),
        "buffer_names": list(BUFFERS),
        "param_shapes": {name: size(array) for name, array in ARRAYS.items()},
        "frozen_param_shapes": {name: size(array) for name, array in FROZEN.items()},
        "frozen_param_fragments": {name: pieces(array)[rank] for name, array in FROZEN.items()},
    }
    save(step / f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt", model | fields)


def other_shapes(step):
    edit_model(step, 1, param_shapes={"w": dcp_writer._size((5, 4))})


def lost_buffer(step):
    edit_model(step, 0, module={})


def unknown_piece(step):
    edit_model(step, 2, frozen_param_fragments={"frozen": pieces(FROZEN["frozen"])[2], "lost": np.zeros(2, np.float32)})


def other_dtype(step):
    state = {"zero_stage": 3, "fp32_flat_groups": [np.zeros(30, np.float16)]}
    save(step / "zero_pp_rank_1_mp_rank_00_optim_states.pt", {"optimizer_state_dict": state})


def other_frozen_dtype(step):
    piece = pieces(FROZEN["frozen"])[2].astype(np.float32)  # would be rounded to the dtype of the first rank's piece
    edit_model(step, 2, frozen_param_fragments={"frozen": piece})


DAMAGE = {
    "other shapes": (other_shapes, "rank_1(.|\n)*it does not list the parameters that zero_pp_rank_0_mp"),
    "lost buffer": (lost_buffer, "it lists the buffer table and does not hold it"),
    "unknown piece": (unknown_piece, "rank_2(.|\n)*it has a piece of lost"),
    "other dtype": (
        other_dtype,
        "rank_1(.|\n)*its flat weights are float16, and those of zero_pp_rank_0.* are float32",
    ),
    "other frozen dtype": (other_frozen_dtype, "rank_2(.|\n)*its piece of frozen is float32, and that of .*bfloat16"),
    "lost rank": (lambda step: (step / "zero_pp_rank_1_mp_rank_00_optim_states.pt").unlink(), r"ranks \[0, 2\]"),
    "lost model state": (lambda step: (step / "zero_pp_rank_2_mp_rank_00_model_states.pt").unlink(), r"of \[0, 1\]"),
    "cut": (truncate, "cannot be read"),
    "short": (shorten, "it holds 4 numbers; a piece of every parameter is 17 in 3 ranks"),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_damage_is_found(folder, name):
    damage, text = DAMAGE[name]
    damage(folder / "global_step7")
    with pytest.raises(RunError, match=text):
        ZeroSource(folder)


def test_other_stages_tensor_parallelism_and_code_are_refused(tmp_path):
    write(tmp_path / "two", stage=2)
    with pytest.raises(CheckpointError, match="it is from ZeRO stage 2") as caught:
        ZeroSource(tmp_path / "two")
    assert "zero_to_fp32.py" in str(caught.value)
    write(tmp_path / "cut", tensor_rank=1)
    with pytest.raises(CheckpointError, match="cut by tensor parallelism"):
        ZeroSource(tmp_path / "cut")
    step = write(tmp_path / "evil")
    call = PickledCall(PickledGlobal("os", "system"), (f"touch {tmp_path / 'ran'}",))
    save(step / "zero_pp_rank_0_mp_rank_00_model_states.pt", {"module": call})
    with pytest.raises(CheckpointError, match=r"os\.system is not among"):
        ZeroSource(tmp_path / "evil")
    assert not (tmp_path / "ran").exists()


# DeepSpeed itself.

_TRAINED = """
import sys, deepspeed, torch
import numpy as np
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(7, 5), torch.nn.Linear(5, 3))
model[1].bias.requires_grad_(False)
model.register_buffer("table", torch.arange(6.0).reshape(2, 3))
config = {"train_batch_size": 4, "zero_optimization": {"stage": 3}, "bf16": {"enabled": True},
          "optimizer": {"type": "Adam", "params": {"lr": 0.1, "torch_adam": True}}}
trained = [p for p in model.parameters() if p.requires_grad]
engine, *_ = deepspeed.initialize(model=model, model_parameters=trained, config=config)
per_rank = 4 // engine.world_size
for _ in range(2):
    loss = engine(torch.ones(per_rank, 7, dtype=torch.bfloat16)).float().sum()
    engine.backward(loss)
    engine.step()
engine.save_checkpoint(sys.argv[1])
if engine.global_rank == 0:
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
    whole = get_fp32_state_dict_from_zero_checkpoint(sys.argv[1])
    np.savez(sys.argv[1] + ".npz", **{name: tensor.detach().float().numpy() for name, tensor in whole.items()})
"""


@pytest.mark.slow
def test_deepspeed_wrote_it(tmp_path):
    pytest.importorskip("deepspeed")
    folder = tmp_path / "run"
    environ = os.environ | {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29517",
        "WORLD_SIZE": "2",
        "DS_ACCELERATOR": "cpu",
    }
    command = [sys.executable, "-c", _TRAINED, str(folder)]
    ranks = [subprocess.Popen(command, env=environ | {"RANK": str(r), "LOCAL_RANK": str(r)}) for r in range(2)]
    assert [rank.wait(timeout=600) for rank in ranks] == [0, 0]
    wanted = np.load(f"{folder}.npz")
    source = ZeroSource(folder)
    assert set(wanted) <= set(source.leaves)
    for name, array in wanted.items():
        box = tuple(slice(0, n) for n in array.shape)
        np.testing.assert_array_equal(source.read(name, box).astype(np.float32), array)
