"""js.mesh and js.shard_batch: every layout from one device up, and every request that makes no sense."""

import dataclasses

import jax
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

import jshard as js
from jshard._compat import environment
from jshard.errors import MeshError
from jshard.plans.make_mesh import _in_torus
from jshard.plans.memories import check_offload

LAYOUTS = {
    "default": ({}, (1, 8, 1)),
    "all given": ({"replica": 2, "fsdp": 2, "tensor": 2}, (2, 2, 2)),
    "rest to fsdp": ({"replica": 2}, (2, 4, 1)),
    "rest to replica": ({"replica": -1, "fsdp": 2}, (4, 2, 1)),
    "rest to tensor": ({"tensor": -1, "fsdp": 2}, (1, 2, 4)),
    "nothing left": ({"replica": -1, "fsdp": 8}, (1, 8, 1)),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_layouts(name):
    asked, sizes = LAYOUTS[name]
    mesh = js.mesh(**asked)
    assert isinstance(mesh, Mesh)
    assert mesh.axis_names == ("replica", "fsdp", "tensor")
    assert mesh.axis_sizes == sizes
    assert mesh.axis_types == (AxisType.Auto,) * 3
    assert [d.id for d in mesh.devices.flat] == list(range(8))
    abstract = js.mesh(**asked, devices=8)
    assert isinstance(abstract, AbstractMesh)
    assert (abstract.shape, abstract.axis_types) == (mesh.shape, mesh.axis_types)


@dataclasses.dataclass(frozen=True)
class Tpu:
    """A TPU that is not there, at its place in the torus of its slice."""

    id: int
    coords: tuple[int, int, int]
    slice_index: int
    platform: str = "tpu"
    device_kind: str = "TPU v5 lite"
    core_on_chip: int = 0
    process_index: int = 0


def test_an_axis_is_along_a_part_of_a_dimension_of_the_torus_where_it_must_be():
    chips = [Tpu(4 * x + y, (x, y, 0), 0) for x in range(4) for y in range(4)]
    mesh = js.mesh(replica=2, fsdp=8, devices=chips)
    assert dict(mesh.shape) == {"replica": 2, "fsdp": 8, "tensor": 1}
    for group in mesh.devices.reshape(2, 8):  # each is a rectangle of neighbours
        extents = [len({chip.coords[dim] for chip in group}) for dim in (0, 1)]
        assert sorted(extents) == [2, 4]


def test_a_tensor_axis_on_tpus_needs_a_compiler_that_does_not_abort(monkeypatch):
    chips = [Tpu(4 * x + y, (x, y, 0), 0) for x in range(4) for y in range(4)]
    monkeypatch.setattr(environment, "_version", {"libtpu": "0.0.42.1"}.get)
    with pytest.raises(MeshError) as error:
        js.mesh(tensor=4, devices=chips)
    assert str(error.value) == (
        "The TPU compiler is too old for a tensor axis.\n"
        "  where: js.mesh(replica=1, fsdp=4, tensor=4)\n"
        "  why:   libtpu 0.0.42.1 aborts the process on products that it splits inside of a region; 0.0.50 does not.\n"
        "  do:    pip install --upgrade --no-deps 'libtpu>=0.0.50'"
    )
    js.mesh(devices=chips)
    for version in ("0.0.50.1", "0.1.0", None):  # None: another package has it
        monkeypatch.setattr(environment, "_version", {"libtpu": version}.get)
        assert js.mesh(tensor=4, devices=chips).shape["tensor"] == 4


def test_parameters_in_host_memory_are_refused_on_tpus_and_the_optimizers_state_is_not():
    mesh = js.mesh(devices=[Tpu(y, (0, y, 0), 0) for y in range(4)])
    with pytest.raises(MeshError, match=r"cannot be in the host's memory on TPUs.*\n.*\n.*\n.*offload=\"optimizer\""):
        check_offload("params", mesh)
    check_offload("optimizer", mesh)


@pytest.mark.parametrize(
    ("sizes", "over_slices"), [((2, 8), 0), ((4, 4), 0), ((1, 16), 1)], ids=["replica", "replica, more", "fsdp"]
)
def test_the_outermost_axes_go_over_the_slices_of_tpus(sizes, over_slices):
    chips = [Tpu(8 * k + 2 * x + y, (x, y, 0), k) for k in range(2) for x in range(4) for y in range(2)]
    placed = _in_torus(chips, sizes)
    assert placed.shape == sizes and {chip.id for chip in placed.flat} == set(range(16))
    for k, part in enumerate(np.split(placed, 2, axis=over_slices)):
        assert {chip.slice_index for chip in part.flat} == {k}


@pytest.mark.parametrize("count", [1, 2, 7, 8])
def test_any_number_of_devices(count):
    mesh = js.mesh(devices=jax.devices()[:count])
    assert mesh.axis_sizes == (1, count, 1)
    assert js.mesh(devices=count).axis_sizes == (1, count, 1)


@dataclasses.dataclass(frozen=True)
class Chip:
    """What the order is made from."""

    id: int
    process_index: int
    slice_index: int = 0
    platform: str = "gpu"
    device_kind: str = "chip"


def test_the_innermost_axis_is_within_a_host_and_the_outermost_across_slices():
    # ids that go round the hosts, as some launchers number them, in the order of a shuffled list
    chips = [
        Chip(id=4 * local + host, process_index=host, slice_index=host // 2) for host in range(4) for local in range(4)
    ]
    order = np.random.default_rng(0).permutation(16)
    mesh = js.mesh(replica=2, fsdp=4, tensor=2, devices=[chips[i] for i in order])
    hosts = np.vectorize(lambda d: d.process_index)(mesh.devices)
    slices = np.vectorize(lambda d: d.slice_index)(mesh.devices)
    assert (hosts[..., 0] == hosts[..., 1]).all()  # tensor: one host
    assert [set(row) for row in slices.reshape(2, 8)] == [{0}, {1}]  # replica: one slice each
    assert [d.id for d in mesh.devices[0, :2].flat] == [0, 4, 8, 12]  # the chips of a host are neighbours


def test_the_mesh_that_is_suggested_keeps_the_other_axes():
    for asked, suggested in (
        ({"tensor": 2, "fsdp": 8}, "js.mesh(fsdp=-1, tensor=2)"),
        ({"tensor": 2, "replica": 3}, "js.mesh(replica=2, fsdp=-1, tensor=2)"),
        ({"tensor": 2, "data": 4}, "js.mesh(fsdp=-1, tensor=2)"),
        ({"replica": -1, "tensor": 2}, "js.mesh(replica=-1, fsdp=1, tensor=2)"),
        ({"fsdp": 4, "expert": 2, "devices": 6}, "js.mesh(fsdp=-1, expert=2, devices=6)"),
    ):
        with pytest.raises(MeshError) as caught:
            js.mesh(**asked)
        assert caught.value.do.partition("  #")[0].splitlines()[0] == suggested


def test_too_few_cpu_devices_can_be_simulated(monkeypatch):
    one = jax.devices()[:1]
    monkeypatch.setattr(jax, "devices", lambda: one)
    with pytest.raises(MeshError) as caught:
        js.mesh(replica=2, tensor=2)
    call, update = caught.value.do.splitlines()
    assert call == "js.mesh(fsdp=-1)" and eval(call, {"js": js}).size == 1
    assert update.startswith('jax.config.update("jax_num_cpu_devices", 4)  # ')


MESHES = [{}, {"replica": 2}, {"replica": -1, "fsdp": 1}, {"replica": 2, "fsdp": 2, "tensor": 2}]


@pytest.mark.parametrize("axes", MESHES, ids=str)
def test_a_batch_is_split_over_replica_and_fsdp_and_repeated_over_tensor(axes):
    mesh = js.mesh(**axes)
    shards = mesh.shape["replica"] * mesh.shape["fsdp"]
    batch = {
        "x": np.arange(64, dtype=np.float32).reshape(16, 4),
        "y": (np.arange(16, dtype=np.int32), np.ones((8, 1), bool)),
    }
    placed = js.shard_batch(batch, mesh)
    assert jax.tree.structure(placed) == jax.tree.structure(batch)
    for found, wanted in zip(jax.tree.leaves(placed), jax.tree.leaves(batch), strict=True):
        wanted_sharding = NamedSharding(mesh, PartitionSpec(("replica", "fsdp")))
        assert found.sharding.is_equivalent_to(wanted_sharding, found.ndim)
        assert found.dtype == wanted.dtype
        np.testing.assert_array_equal(found, wanted)
        rows = len(wanted) // shards
        for piece in found.addressable_shards:
            assert piece.data.shape[0] == rows
    # consecutive rows go to consecutive data shards
    first_rows = {s.device.id: float(s.data[0, 0]) for s in placed["x"].addressable_shards}
    place = {d.id: i for i, row in enumerate(mesh.devices.reshape(shards, -1)) for d in row}
    assert first_rows == {device: 64 / shards * i for device, i in place.items()}


def test_a_batch_on_one_device_and_one_of_nothing():
    mesh = js.mesh(devices=jax.devices()[:1])
    np.testing.assert_array_equal(js.shard_batch(np.arange(3), mesh), np.arange(3))
    assert js.shard_batch({}, js.mesh()) == {}
    assert js.shard_batch({"x": np.zeros((0, 3))}, js.mesh())["x"].shape == (0, 3)
