"""A packed state comes back under every strategy, bit for bit, without what follows changing it; damage is found."""

from pathlib import Path

import jax
import pytest
from flax import nnx

from jshard.checkpoint.packed import host_snapshot
from jshard.checkpoint.packed.host_snapshot import Packing
from jshard.checkpoint.packed.layout import lay_out_files
from jshard.checkpoint.packed.write_assignment import WritePlan
from jshard.checkpoint.packed_reader import opened_parts
from jshard.checkpoint.restore_operation import RestoreOperation
from jshard.errors import RunError
from tests.checkpoint.checkpoint_states import abstract, differences, filled


def packed(state, step=1):
    return b"".join(Packing(state, step=step).finish())


def restored(data, layout):
    read = lambda begin, size: data[begin : begin + size]
    opened = opened_parts(Path("copy"), [read])
    return RestoreOperation(opened, abstract(layout)).run(verify=True, timeout_s=60)


@pytest.mark.parametrize("target", ["one device", "all axes"])
def test_a_layout_is_read_onto_others(target):
    data = packed(filled("hsdp", 3))
    assert differences(restored(data, target), target, 3) == []


def test_replicas_and_padding_are_packed_once():
    sizes = {layout: len(packed(filled(layout, 0))) for layout in ("one device", "replicate")}
    arrays = sum(leaf.nbytes for leaf in jax.tree.leaves(nnx.state(filled("one device", 0)["model"])))
    assert abs(sizes["replicate"] - sizes["one device"]) < 10_000  # as many bytes of arrays, in more pieces
    assert sizes["replicate"] > 3 * arrays


def test_what_the_next_step_does_to_the_arrays_is_not_in_the_copy():
    state = filled("zero3", 0)
    packing = Packing(state, step=1)
    step = jax.jit(lambda x: jax.tree.map(lambda leaf: leaf * 0, x), donate_argnums=0)
    jax.block_until_ready(step(nnx.state(state["model"], nnx.Param)))
    assert differences(restored(b"".join(packing.finish()), "zero3"), "zero3", 0) == []


@pytest.mark.parametrize("place", [-3, -30_000])
def test_another_byte_is_found(place):
    data = bytearray(packed(filled("zero3", 0)))
    data[place] ^= 1
    with pytest.raises(RunError, match=r"index is damaged|do not match their checksum"):
        restored(bytes(data), "zero3")


def test_a_part_that_is_missing_is_found(monkeypatch):
    plan_writes = host_snapshot.plan_writes

    def half(*args, **options):  # of two processes the first one
        plan = plan_writes(*args, **options)
        (file,), (sources,) = plan.files, plan.sources
        return WritePlan(tuple(lay_out_files(file.pieces[1:])), (sources[1:],))

    monkeypatch.setattr(host_snapshot, "plan_writes", half)
    with pytest.raises(RunError, match="are missing from the files"):
        restored(packed(filled("zero3", 0)), "zero3")
