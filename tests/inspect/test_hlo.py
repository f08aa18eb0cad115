"""The reader of compiled programs counts what is there, and raises where it cannot."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import PartitionSpec

import jshard as js
from jshard.inspect import ProgramError, collectives
from jshard.inspect.hlo.module import parse_module
from tests.scheduled_text import program


def test_a_compiled_program_is_counted():
    mesh = js.mesh(replica=2)

    def body(x):
        def step(carry, _):
            full = lax.all_gather(carry, "fsdp", tiled=True)
            scattered = lax.psum_scatter(jnp.sin(full), "fsdp", tiled=True)
            return lax.pmean(scattered, "replica"), None

        out, _ = lax.scan(step, x, length=7)
        return lax.ppermute(out, "fsdp", [(i, (i + 1) % 4) for i in range(4)])

    spec = PartitionSpec("fsdp")
    run = jax.jit(jax.shard_map(body, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False))
    found = {c.kind: c for c in collectives(run.lower(jnp.zeros(64)).compile(), mesh=mesh)}
    gather, scatter, reduce, permute = (
        found[k] for k in ("all-gather", "reduce-scatter", "all-reduce", "collective-permute")
    )
    assert (gather.executions, gather.full_bytes, gather.axes) == (7, 256, ("fsdp",))
    assert (scatter.executions, scatter.full_bytes, scatter.axes) == (7, 256, ("fsdp",))
    assert (reduce.executions, reduce.full_bytes, reduce.axes) == (7, 64, ("replica",))
    assert (permute.executions, permute.full_bytes) == (1, 64)
    assert gather.wire_bytes == 7 * 256 * 3 / 4
    assert reduce.wire_bytes == 7 * 2 * 64 / 2


@pytest.mark.parametrize(
    ("groups", "group"),
    [
        ("{{0,4},{1,5},{2,6},{3,7}}", (0, 4)),
        ("{}", tuple(range(8))),
        ("[2,4]<=[8]", (0, 1, 2, 3)),
        ("[4,2]<=[2,4]T(1,0)", (0, 4)),
        ("mesh['a'=2,'b'=4] {'b'}", (0, 1, 2, 3)),
        ("mesh['a'=2,'b'=4] {'a'}", (0, 4)),
        ("mesh['a'=4,'b'=2], device_ids=([2,4]T(1,0)) {'a'}", (0, 1, 2, 3)),
        ("mesh['a'=4,'b'=2], device_ids=([2,4]T(1,0)) {'b'}", (0, 4)),
    ],
)
def test_groups_in_every_notation(groups: str, group: tuple[int, ...]):
    text = program(f"%r = f32[16]{{0}} all-reduce(%x), channel_id=1, replica_groups={groups}, to_apply=%add")
    (found,) = collectives(text)
    assert found.group == group
    assert found.full_bytes == 64


@pytest.mark.parametrize(
    "shape",
    [
        "f32[16]{0}",
        "((f32[16]{0}), f32[16]{0})",
        "(f32[12]{0}, /*index=1*/f32[4]{0})",
        "((f32[12]{0}, f32[4]{0}), (f32[12]{0}, f32[4]{0}))",
    ],
    ids=["one", "one of jax 0.12", "combined", "combined of jax 0.12"],
)
def test_an_asynchronous_all_reduce_counts_once(shape: str):
    text = program(f"%s = {shape} all-reduce-start(%x), replica_groups={{}}, to_apply=%add")
    assert [(c.kind, c.full_bytes) for c in collectives(text)] == [("all-reduce", 64)]


def test_of_branches_all_count_and_say_so():
    branch = "%yes (p: f32[8]) -> f32[8] {\n  %ar = f32[8]{0} all-reduce(%p), replica_groups={}, to_apply=%add\n}\n"
    call = "%c = f32[8]{0} conditional(%p, %x, %x), true_computation=%yes, false_computation=%no"
    (found,) = collectives(program(call, computations=branch))
    assert found.conditional


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (program("%r = f32[8]{0} all-reduce(%x), replica_groups=mesh['a'=8] {'a':(1)2}"), "part of a mesh axis"),
        (program("%r = f32[8]{0} all-reduce(%x), replica_groups=?"), "unknown way"),
        (program("%r = f3[8]{0} all-reduce(%x), replica_groups={}"), "element type 'f3'"),
        ("no program", "no ENTRY"),
    ],
)
def test_what_cannot_be_counted_is_an_error(text: str, why: str):
    with pytest.raises(ProgramError, match=why):
        collectives(text)


def test_the_metadata_of_a_kernel_are_lines_of_their_own():
    call = (
        '%y = f32[8]{0} custom-call(%p), custom_call_target="tpu_custom_call", frontend_attributes={kernel_metadata={'
    )
    broken = call + '\n"xprof_metadata":"{\\"block_q\\": 512}"\n}}, metadata={op_name="step/splash"}'
    module = parse_module(program(broken, "%z = f32[8]{0} negate(%y)"))
    *_, kernel, after = module.computations[module.entry].instructions
    assert (kernel.op_name, after.opcode, after.operands) == ("step/splash", "negate", ("y",))
