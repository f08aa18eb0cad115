"""The strategies of `--compare` and the ways of a search: what is compiled, and the command line that asks for it."""

import shlex
from pathlib import Path

import pytest

from jshard.cli._arguments import parse
from jshard.cli._devices import parse_mesh
from jshard.cli.plan import PlanArgs
from jshard.cluster.compile import Variant, command_line
from jshard.cluster.machine import parse_known
from jshard.cluster.strategies import GSPMD, strategies, variants_for
from jshard.errors import AnnotationError, ShardingError
from jshard.recipes.overrides import override, parse_units
from tests.cluster.fake_compiler import cluster_of, request_of
from tests.micro_gpt import micro

GIB = 2**30


def variants(names="replicate,zero1,zero2,zero3,hsdp,hsdp_zero2,hpz,gspmd", *, mesh=(1, 64, 1), near=8, held=GIB):
    """On devices of 80 GiB; `held` is a device's part of the state in a group, times the size of the group."""
    return variants_for(
        names.split(","),
        dict(zip(("replica", "fsdp", "tensor"), mesh, strict=True)),
        near=near,
        capacity_bytes=80 * GIB,
        held_bytes=lambda mesh: held // mesh["fsdp"],
    )


def test_each_strategy_has_its_mesh_and_its_units():
    found = {v.name: v for v in variants()}
    mesh = lambda name: tuple(found[name].mesh.values())
    assert mesh("replicate") == mesh("zero1") == (64, 1, 1)
    assert mesh("zero2") == mesh("zero3") == mesh("hpz") == mesh(GSPMD) == (1, 64, 1)
    assert mesh("hsdp") == mesh("hsdp_zero2") == (8, 8, 1)
    assert set(found) == {*strategies, GSPMD}
    kept = {name: v.units.get("reshard_after_forward") for name, v in found.items()}
    assert kept == dict.fromkeys(("replicate", "zero1", "zero3", "hsdp"), True) | {
        "zero2": False,
        "hsdp_zero2": False,
        "hpz": 8,
        GSPMD: None,
    }
    assert [v.name for v in found.values() if v.shard_replicated] == ["zero1"]
    assert [v.name for v in found.values() if v.plain_flax] == [GSPMD]


def test_a_tensor_axis_stays():
    assert [tuple(v.mesh.values()) for v in variants("replicate,zero3,hsdp", mesh=(1, 16, 4))] == [
        (16, 1, 4),
        (1, 16, 4),
        (2, 8, 4),
    ]


@pytest.mark.parametrize(
    ("held", "group"),
    [(8 * 40 * GIB, 8), (8 * 41 * GIB, 16), (64 * 80 * GIB, 32)],
    ids=["fits", "larger", "nowhere: the largest that leaves replicas"],
)
def test_groups_of_hsdp_are_the_smallest_whole_hosts_that_hold_the_state_in_half_the_memory(held, group):
    (hsdp,) = variants("hsdp", held=held)
    assert hsdp.mesh == {"replica": 64 // group, "fsdp": group, "tensor": 1}


@pytest.mark.parametrize(("devices", "group"), [(8, 4), (1, 1), (24, 8)])
def test_within_a_host_groups_of_hsdp_are_half_of_it(devices, group):
    (hsdp,) = variants("hsdp", mesh=(1, devices, 1))
    assert hsdp.mesh["fsdp"] == group and hsdp.mesh["replica"] == devices // group


def test_groups_that_parameters_do_not_divide_over_are_passed_over():
    def held_bytes(mesh):
        if mesh["fsdp"] % 16 == 0:
            raise AnnotationError("No.", where="w", why="y", do="d")
        return 100 * GIB

    found = variants_for(
        ["hsdp"], {"replica": 1, "fsdp": 48, "tensor": 1}, near=8, capacity_bytes=80 * GIB, held_bytes=held_bytes
    )
    assert found[0].mesh["fsdp"] == 24


def test_a_name_that_is_no_strategy():
    with pytest.raises(ShardingError) as error:
        variants("zero3,ddp")
    assert str(error.value) == (
        "There is no strategy 'ddp'.\n"
        "  where: --compare zero3,ddp\n"
        "  why:   the strategies are replicate, zero1, zero2, zero3, hsdp, hsdp_zero2, hpz, and gspmd, which is plain"
        " Flax under jax.jit.\n"
        "  do:    --compare replicate,zero2,zero3,hsdp,gspmd"
    )


# ---- as a request, and as a command line ------------------------------------------------------------------------

WAY = Variant(
    name="a way",
    mesh={"replica": 2, "fsdp": 4, "tensor": 1},
    accumulate=4,
    units={"remat": "full", "reshard_after_forward": False, "prefetch": "compiler"},
)
ASKED = request_of(
    cluster_of("h100:1x8"),
    recipe="micro",
    settings=("model.n_layer=4", "accumulate=2"),
    units={"remat": "none", "prefetch": "512MiB"},
    profile=None,
    xla_flags="--xla_a=1 --xla_b=2",
)


def test_a_way_goes_before_what_was_asked_for():
    """And each setting is given once: twice would be refused."""
    found = WAY.of(ASKED)
    assert found.settings == ("model.n_layer=4", "accumulate=4")
    assert found.units == {"remat": "full", "prefetch": "compiler", "reshard_after_forward": False}
    assert (found.mesh, found.profile, found.recipe) == (WAY.mesh, None, "micro")
    assert override(micro(), found.settings).accumulate == 4


def test_the_command_line_asks_for_what_was_compiled():
    found, known = WAY.of(ASKED), {"slow_bytes_per_s": 2.5e10, "fast_group": 8}
    words = shlex.split(command_line(found, assume=cluster_of("h100:1x8", **known).assume))
    assert words[:2] == ["jshard", "plan"]
    args = parse(PlanArgs, words[2:], command="jshard plan")
    assert args.model == Path("my_model.py") and args.recipe == "micro" and args.topology == "h100:1x8"
    assert parse_mesh(args.mesh) == found.mesh
    assert args.set == found.settings and parse_units(args.unit) == found.units
    assert args.options == "none" and args.xla_flags == found.xla_flags and parse_known(args.assume) == known


def test_what_only_a_comparison_asks_for_has_no_command_line():
    assert [command_line(found.of(ASKED), assume=()) for found in variants(f"zero1,{GSPMD}")] == ["", ""]


# ---- what is known of a cluster ---------------------------------------------------------------------------------


def test_what_is_known_is_not_varied():
    known = parse_known(["slow_bytes_per_s = 25e9", "matmul_efficiency=.7"])
    assert known == {"slow_bytes_per_s": 25e9, "matmul_efficiency": 0.7}
    cluster = cluster_of("h100:2x8", **known)
    assert cluster.assumptions.slow_bytes_per_s == cluster.machine.assumptions.slow_bytes_per_s == 25e9
    assert set(cluster_of("h100:2x8").ranges) == set(cluster.ranges) | set(known)
    assert not set(cluster.ranges) & set(known)
    assert parse_known(["fast_group=4", "straggling=0"]) == {"fast_group": 4, "straggling": 0}


def test_what_is_known_may_be_a_range_and_stated_is_its_middle():
    known = parse_known(["slow_bytes_per_s=10e9..14e9"])
    cluster = cluster_of("h100:2x8", **known)
    assert cluster.assumptions.slow_bytes_per_s == 12e9 and cluster.ranges["slow_bytes_per_s"] == (10e9, 14e9)
    assert parse_known(cluster.assume) == known


@pytest.mark.parametrize(
    "text",
    ["slow=1", "slow_bytes_per_s", "latency_s=0", "flops_per_s=nan", "matmul_efficiency=70", "fast_group=0.5"]
    + ["straggling=-1", "slow_bytes_per_s=2..1"],
)
def test_what_cannot_be_assumed(text):
    with pytest.raises(ShardingError) as error:
        parse_known([text])
    assert error.value.what == "The assumption about the cluster is unknown." and error.value.where == (
        f"--assume {text}",
    )


def test_an_assumption_is_given_once():
    with pytest.raises(ShardingError, match="An assumption is given twice"):
        parse_known(["latency_s=1e-5", "latency_s=2e-5"])
