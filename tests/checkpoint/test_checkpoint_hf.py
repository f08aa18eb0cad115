"""Our leaves under the names of other libraries and back, bitwise; GPT-2's names are those of Hugging Face."""

import dataclasses
import sys

import jax
import numpy as np
import pytest
from flax import nnx

import jshard as js
from jshard.checkpoint.errors import CheckpointError
from jshard.checkpoint.formats import (
    ForeignSource,
    NamedSource,
    SafetensorsSource,
    Stored,
    write_dcp,
    write_safetensors,
)
from jshard.train import load_model_file
from tests.checkpoint.checkpoint_states import Held, check_source
from tests.micro_gpt import MODELS, micro

gpt = sys.modules[load_model_file(MODELS / "gpt.py").build.__module__]
CONFIG = dataclasses.replace(micro().model, positions="learned", vocab_size=11, block_size=8, d_model=4, d_ff=16)

# What GPT2LMHeadModel(GPT2Config(n_layer=2, n_embd=4, vocab_size=11, n_positions=8)).save_pretrained() writes:
# V=11, D=4. Conv1D keeps (in, out). The head is the table of the tokens, and no array of its own.
_LAYER = {
    **{f"{norm}.{part}": (4,) for norm in ("ln_1", "ln_2") for part in ("weight", "bias")},
    **{
        "attn.c_attn.weight": (4, 12),
        "attn.c_attn.bias": (12,),
        "attn.c_proj.weight": (4, 4),
        "attn.c_proj.bias": (4,),
    },
    **{"mlp.c_fc.weight": (4, 16), "mlp.c_fc.bias": (16,), "mlp.c_proj.weight": (16, 4), "mlp.c_proj.bias": (4,)},
}
HUGGING_FACE = {
    **{"transformer.wte.weight": (11, 4), "transformer.wpe.weight": (8, 4)},
    **{f"transformer.h.{n}.{name}": shape for n in range(2) for name, shape in _LAYER.items()},
    **{"transformer.ln_f.weight": (4,), "transformer.ln_f.bias": (4,)},
}


def parameters(config):
    """The parameters of a GPT by path, no two numbers alike."""
    shapes = nnx.state(nnx.eval_shape(lambda: gpt.GPT(config, rngs=nnx.Rngs(0))), nnx.Param)
    rng = np.random.default_rng(0)
    flat = jax.tree_util.tree_flatten_with_path(nnx.to_pure_dict(shapes))[0]
    paths = {"/".join(str(key.key) for key in path): leaf for path, leaf in flat}
    return {path: rng.normal(size=leaf.shape).astype(np.float32) for path, leaf in paths.items()}


def numbered(shape):
    return np.arange(np.prod(shape), dtype=np.float32).reshape(shape)


def read(source, name):
    return source.read(name, (slice(None),) * len(source.leaves[name].shape))


def test_names_and_shapes_are_hugging_faces():
    ours = Held(parameters(CONFIG))
    exported = ForeignSource(ours, gpt.hf_names(CONFIG))
    assert {name: leaf.shape for name, leaf in exported.leaves.items()} == HUGGING_FACE


@pytest.mark.parametrize(("tied", "max_shard_bytes"), [(True, 500), (False, 5e9)])
def test_export_then_import_is_bitwise_equal(tmp_path, tied, max_shard_bytes):
    config = dataclasses.replace(CONFIG, tied=tied)
    ours, names = parameters(config), gpt.hf_names(config)
    assert set(ours) == set(names)
    write_safetensors(tmp_path, ForeignSource(Held(ours), names), max_shard_bytes=max_shard_bytes)
    stored = SafetensorsSource(tmp_path)
    assert ("lm_head.weight" in stored.leaves) is not tied
    if not tied:
        np.testing.assert_array_equal(read(stored, "lm_head.weight"), ours["head/kernel"].T)
    imported = NamedSource(stored, names)
    assert (imported.absent, imported.unused) == ({}, [])
    assert list(imported.leaves) == list(names)
    check_source(imported, ours)


def test_files_without_the_prefix_and_with_old_buffers_are_read():
    """As the first files of GPT-2 were: saved from GPT2Model, with the causal mask beside the weights."""
    arrays = {name.removeprefix("transformer."): numbered(shape) for name, shape in HUGGING_FACE.items()}
    masks = {"h.0.attn.bias": np.ones((1, 1, 8, 8), np.uint8), "h.1.attn.masked_bias": np.array(-1e4, np.float32)}
    source = NamedSource(Held(arrays | masks), gpt.hf_names(CONFIG))
    assert (source.absent, source.unused) == ({}, [])
    np.testing.assert_array_equal(read(source, "blocks/1/mlp/down/kernel"), arrays["h.1.mlp.c_proj.weight"])


def test_what_is_missing_and_what_is_left_over_is_reported():
    arrays = {name: numbered(shape) for name, shape in HUGGING_FACE.items()} | {"lm_head.weight": numbered((11, 4))}
    del arrays["transformer.h.1.ln_2.bias"]
    arrays["transformer.h.0.attn.bias"] = numbered((4,))  # a bias, and no mask
    source = NamedSource(Held(arrays), gpt.hf_names(CONFIG))
    assert source.absent == {"blocks/1/mlp_norm/bias": ["transformer.h.1.ln_2.bias"]}
    assert source.unused == ["lm_head.weight", "transformer.h.0.attn.bias"]
    assert "blocks/1/mlp_norm/bias" not in source.leaves


def test_rotary_positions_have_no_place_in_gpt2():
    with pytest.raises(ValueError, match="learns its positions"):
        gpt.hf_names(dataclasses.replace(CONFIG, positions="rotary"))


# ---- Other architectures ----------------------------------------------------------------------------

LLAMA = {
    "qkv": Stored("wq.weight", "wk.weight", "wv.weight", transpose=True, sizes=(8, 4, 4)),
    "out": Stored("wo.weight", transpose=True),
    "gate_up": Stored("w1.weight", "w3.weight", transpose=True, dim=1),
    "table": Stored("first", "second", dim=0),
    "norm": "norm.weight",
    "fused": Stored("fused.weight", parts=3),
}
THEIRS = {
    **{f"w{name}.weight": (rows, 6) for name, rows in {"q": 8, "k": 4, "v": 4, "1": 10, "3": 10}.items()},
    **{"wo.weight": (6, 8), "first": (3, 5), "second": (3, 5), "norm.weight": (6,), "fused.weight": (6, 12)},
}


def test_joined_and_turned_leaves_are_read_box_by_box():
    theirs = {name: numbered(shape) + 1000 * i for i, (name, shape) in enumerate(THEIRS.items())}
    stored = Held(theirs)
    source = NamedSource(stored, LLAMA)
    whole = {
        "qkv": np.concatenate([theirs[f"w{part}.weight"].T for part in "qkv"], axis=1),
        "out": theirs["wo.weight"].T,
        "gate_up": np.concatenate([theirs["w1.weight"].T, theirs["w3.weight"].T], axis=1),
        "table": np.concatenate([theirs["first"], theirs["second"]]),
        "norm": theirs["norm.weight"],
        "fused": theirs["fused.weight"].reshape(6, 3, 4),
    }
    check_source(source, whole)
    assert all(read(source, path).flags.c_contiguous for path in whole)
    stored.boxes.clear()
    source.read("qkv", (slice(1, 3), slice(6, 10)))
    inside = [(name, box) for name, box in stored.boxes if all(part.stop > part.start for part in box)]
    assert inside == [("wq.weight", (slice(6, 8), slice(1, 3))), ("wk.weight", (slice(0, 2), slice(1, 3)))]


def test_the_way_out_is_the_inverse():
    theirs = {name: numbered(shape) + 1000 * i for i, (name, shape) in enumerate(THEIRS.items())}
    back = ForeignSource(NamedSource(Held(theirs), LLAMA), LLAMA)
    assert back.leaves.keys() == THEIRS.keys()
    check_source(back, theirs)


def test_names_that_do_not_fit_are_reported():
    theirs = {name: numbered(shape) for name, shape in THEIRS.items()} | {"wk.weight": numbered((4, 7))}
    with pytest.raises(CheckpointError, match="The stored arrays of qkv do not fit together") as caught:
        NamedSource(Held(theirs), LLAMA)
    assert caught.value.where[1] == "wk.weight  (4, 7) float32"
    with pytest.raises(CheckpointError, match=r"fused does not have 3 parts(.|\n)*fused.weight  \(6, 13\)"):
        NamedSource(Held({"fused.weight": numbered((6, 13))}), {"fused": LLAMA["fused"]})
    with pytest.raises(ValueError, match="a single array"):
        Stored("fused.weight", parts=3, transpose=True)
    with pytest.raises(CheckpointError, match="qkv cannot be cut into 3 arrays"):
        ForeignSource(Held({"qkv": numbered((6, 17))}), LLAMA)
    with pytest.raises(CheckpointError, match="1 leaf has no name in the other format") as caught:
        ForeignSource(Held({"norm": numbered((6,)), "opt_state/mu": numbered((6,))}), LLAMA)
    assert caught.value.where == ("opt_state/mu",)


# ---- Experts ------------------------------------------------------------------------------------------

EXPERTS = [f"experts.{expert}.w1" for expert in range(3)]
MIXTURE = {
    "experts/gate": Stored(*EXPERTS, transpose=True, stack=0),
    "experts/bias": Stored(*(f"{name}.bias" for name in EXPERTS), stack=-1),
    "only": Stored("only", stack=1),
}


def of_experts():
    shapes = dict.fromkeys(EXPERTS, (5, 4)) | {f"{name}.bias": (5,) for name in EXPERTS} | {"only": (2, 3)}
    return {name: numbered(shape) + 100 * i for i, (name, shape) in enumerate(shapes.items())}


def test_arrays_of_experts_are_stacked_along_a_new_dim_and_written_one_by_one():
    theirs = of_experts()
    stored = Held(theirs)
    source = NamedSource(stored, MIXTURE)
    whole = {
        "experts/gate": np.stack([theirs[name].T for name in EXPERTS]),
        "experts/bias": np.stack([theirs[f"{name}.bias"] for name in EXPERTS], axis=-1),
        "only": theirs["only"][:, None],
    }
    check_source(source, whole)
    check_source(ForeignSource(source, MIXTURE), theirs)
    stored.boxes.clear()
    source.read("experts/gate", (slice(1, 2), slice(0, 3), slice(2, 5)))
    assert stored.boxes == [(EXPERTS[1], (slice(2, 5), slice(0, 3)))]  # of the other experts nothing is read


def test_arrays_that_do_not_stack_are_reported():
    theirs = of_experts() | {EXPERTS[2]: numbered((5, 3))}
    with pytest.raises(CheckpointError, match=r"(?s)experts/gate do not fit.*experts.2.w1  \(5, 3\).*a new dim 0"):
        NamedSource(Held(theirs), MIXTURE)
    with pytest.raises(CheckpointError, match=r"only do not fit together"):
        NamedSource(Held({"only": numbered((2, 3))}), {"only": Stored("only", stack=3)})
    with pytest.raises(CheckpointError, match=r"experts/gate cannot be cut into 3 arrays"):
        ForeignSource(Held({"experts/gate": numbered((6, 4, 5))}), MIXTURE)
    with pytest.raises(CheckpointError, match=r"only cannot be cut into 1 arrays"):
        ForeignSource(Held({"only": numbered((2,))}), {"only": Stored("only", stack=1)})
    source = NamedSource(Held(of_experts() | {"experts.3.w1": numbered((5, 4))}), MIXTURE)
    assert source.unused == ["experts.3.w1"]
    for other in ({"parts": 3}, {"sizes": (1,)}, {"dim": 0}):
        with pytest.raises(ValueError, match="takes no dim, sizes or parts"):
            Stored("fused.weight", stack=0, **other)


# ---- Convolutions -----------------------------------------------------------------------------------

# By the number of dims of a kernel: PyTorch's (out, in, ...) and the order in which Flax has them.
CONVOLUTIONS = {
    3: ((5, 4, 3), (2, 1, 0)),
    4: ((5, 4, 3, 2), (2, 3, 1, 0)),
    5: ((5, 4, 3, 2, 6), (2, 3, 4, 1, 0)),
}


@pytest.mark.parametrize("ndim", CONVOLUTIONS)
def test_kernels_of_convolutions_are_read_and_written_in_the_order_of_dims(ndim):
    shape, dims = CONVOLUTIONS[ndim]
    theirs = {"conv.weight": numbered(shape), "a": numbered(shape), "b": numbered((3, *shape[1:])) + 1000}
    names = {"kernel": Stored("conv.weight", dims=dims), "joined": Stored("a", "b", dims=list(dims), sizes=(5, 3))}
    source = NamedSource(Held(theirs), names)
    whole = {
        "kernel": np.transpose(theirs["conv.weight"], dims),
        "joined": np.concatenate([np.transpose(theirs[name], dims) for name in "ab"], axis=-1),
    }
    check_source(source, whole)
    check_source(ForeignSource(source, names), theirs)


def test_an_order_of_dims_reads_only_the_box_that_is_asked_for():
    stored = Held({"conv.weight": numbered((8, 6, 5, 3))})
    source = NamedSource(stored, {"kernel": Stored("conv.weight", dims=(2, 3, 1, 0))})
    source.read("kernel", (slice(1, 5), slice(0, 2), slice(4, 6), slice(3, 7)))
    assert stored.boxes == [("conv.weight", (slice(3, 7), slice(4, 6), slice(1, 5), slice(0, 2)))]


def test_a_convolution_of_pytorch_gives_the_same_numbers_from_each_format_on_any_mesh(tmp_path):
    weight = np.random.default_rng(0).normal(size=(8, 8, 3, 3)).astype(np.float32)
    x = np.random.default_rng(1).normal(size=(8, 6, 6, 8)).astype(np.float32)
    arrays = Held({"conv.weight": weight})
    write_safetensors(tmp_path / "hf", arrays)
    write_dcp(tmp_path / "dcp", arrays)
    padded = np.pad(x, ((0, 0), (1, 1), (1, 1), (0, 0)))
    windows = np.lib.stride_tricks.sliding_window_view(padded, (3, 3), axis=(1, 2))  # (n, y, x, in, ky, kx)
    wanted = np.einsum("nyxikl,oikl->nyxo", windows, weight)  # cross-correlation, as both libraries have it
    names = {"kernel": Stored("conv.weight", dims=(2, 3, 1, 0))}
    for degrees in ({"fsdp": 8}, {"replica": 2, "fsdp": 4}):
        for dim in (0, 2, 3):
            conv = nnx.Conv(8, 8, (3, 3), use_bias=False, rngs=nnx.Rngs(0))
            placement = js.PlacementPolicy(shard_dim=dim, min_size=1)
            js.fully_shard(conv, mesh=js.mesh(**degrees), placement=placement)
            for folder in ("hf", "dcp"):
                like = {"conv": conv}
                restored = js.checkpoint.restore(tmp_path / folder, like=like, names=names)["conv"]
                np.testing.assert_allclose(restored(x), wanted, atol=1e-4)


@pytest.mark.parametrize("ndim", CONVOLUTIONS)
def test_transpose_of_more_than_two_dims_is_refused_with_the_line_that_is_right(ndim):
    """Reversed, a square kernel would fit, with its height and width swapped."""
    shape, dims = CONVOLUTIONS[ndim]
    names = {"kernel": Stored("conv.weight", transpose=True)}
    for make, source in (
        (NamedSource, Held({"conv.weight": numbered(shape)})),
        (ForeignSource, Held({"kernel": numbered(tuple(shape[dim] for dim in dims))})),
    ):
        with pytest.raises(CheckpointError, match=f"does not say how the {ndim} dims of kernel are stored") as caught:
            make(source, names)
        line = caught.value.do.partition("  #")[0]
        assert eval(line, {"Stored": Stored}) == Stored("conv.weight", dims=dims)


def test_an_order_that_is_none_or_does_not_fit_is_refused():
    for dims, transpose in (((0, 0), False), ((1, 2), False), ((-1, 0), False), ((1, 0), True), (("b", 0), False)):
        with pytest.raises(CheckpointError, match="The order of the dims cannot be read") as caught:
            Stored("a", "b", dims=dims, transpose=transpose, dim=0, sizes=(1, 2))
        assert caught.value.do.startswith('Stored("a", "b", dims=(1, 0), dim=0, sizes=(1, 2))')
    names = {"kernel": Stored("conv.weight", dims=(2, 3, 1, 0))}
    with pytest.raises(CheckpointError, match="The order of the dims of kernel does not fit its arrays") as caught:
        NamedSource(Held({"conv.weight": numbered((5, 4, 3))}), names)
    assert caught.value.do.startswith('Stored("conv.weight", dims=(2, 1, 0))')
    with pytest.raises(CheckpointError, match="The order of the dims of kernel does not fit its arrays"):
        ForeignSource(Held({"kernel": numbered((5, 4, 3))}), names)
    with pytest.raises(ValueError, match="a single array"):
        Stored("fused.weight", parts=3, dims=(1, 0))
