"""GPUs are counted as a process sees them, NVIDIA's and AMD's, from files and variables alone."""

import pytest

from jshard import launch
from jshard.launch import gpu_share


@pytest.fixture
def nodes(tmp_path):
    """A machine as AMD's driver shows it: two CPUs, and the eight dies of four MI250X."""
    folder = tmp_path / "nodes"
    for number in range(10):
        node = folder / str(number)
        node.mkdir(parents=True)
        is_cpu = number < 2
        (node / "gpu_id").write_text("0\n" if is_cpu else f"{4000 + number}\n")
    return folder


@pytest.mark.parametrize(
    ("environ", "num_gpus"),
    [
        ({}, 8),
        ({"ROCR_VISIBLE_DEVICES": "0,1,GPU-4b2c1a9f8d3e6f7a"}, 3),
        ({"HIP_VISIBLE_DEVICES": "4,5,6,7"}, 4),
        ({"CUDA_VISIBLE_DEVICES": "4,5"}, 2),  # HIP reads it, too
        ({"HIP_VISIBLE_DEVICES": "0,1,2", "CUDA_VISIBLE_DEVICES": "0"}, 3),  # where both are set, its own counts
        ({"ROCR_VISIBLE_DEVICES": "2,3", "HIP_VISIBLE_DEVICES": "0"}, 1),  # the first of those two
        ({"ROCR_VISIBLE_DEVICES": "2", "HIP_VISIBLE_DEVICES": "0,1,2,3"}, 1),
        ({"ROCR_VISIBLE_DEVICES": ""}, 0),
        ({"HIP_VISIBLE_DEVICES": "-1"}, 0),
    ],
)
def test_amd_gpus_are_counted_as_rocm_shows_them(nodes, environ, num_gpus):
    assert gpu_share.num_amd_gpus(environ, nodes=nodes) == num_gpus


def test_a_gpu_that_the_container_may_not_use_is_not_counted(nodes):
    forbidden = nodes / "9" / "gpu_id"
    forbidden.unlink()
    forbidden.mkdir()  # reading it is an OSError, for root as well
    assert gpu_share.num_amd_gpus({}, nodes=nodes) == 7


def test_a_machine_without_the_driver_has_no_gpu(tmp_path):
    assert gpu_share.num_amd_gpus({}, nodes=tmp_path / "nodes") == 0
    assert gpu_share.num_nvidia_gpus({}, gpus=tmp_path / "gpus") == 0


def test_nvidia_gpus_are_counted_by_the_drivers_folders(tmp_path):
    for address in ("0000:19:00.0", "0000:3b:00.0"):
        (tmp_path / address).mkdir()
    assert gpu_share.num_nvidia_gpus({}, gpus=tmp_path) == 2
    assert gpu_share.num_nvidia_gpus({"CUDA_VISIBLE_DEVICES": "1"}, gpus=tmp_path) == 1


@pytest.fixture
def amd_machine(monkeypatch, nodes):
    """Makes this machine one with eight AMD GPUs, with the plugins of both vendors."""
    monkeypatch.setattr(gpu_share, "has_plugin", lambda name: True)
    monkeypatch.setattr(gpu_share, "_NVIDIA_GPUS", nodes / "none")
    amd = gpu_share.Vendor(
        "rocm", plugin="xla_rocm", count=lambda environ: gpu_share.num_amd_gpus(environ, nodes=nodes)
    )
    monkeypatch.setattr(gpu_share, "AMD", amd)


@pytest.mark.usefixtures("amd_machine")
@pytest.mark.parametrize(
    ("environ", "ids"),
    [
        ({}, "4,5,6,7"),
        ({"JAX_PLATFORMS": "rocm,cpu"}, "4,5,6,7"),
        ({"JAX_PLATFORMS": "cpu"}, None),
        ({"JAX_PLATFORMS": "cuda"}, None),
        ({"ROCR_VISIBLE_DEVICES": "0,1,2,3"}, "2,3"),
        # By NVIDIA's count there would be eight here, and ROCm shows two of them.
        ({"ROCR_VISIBLE_DEVICES": "0,1", "CUDA_VISIBLE_DEVICES": "0,1,2,3,4,5,6,7"}, "1"),
    ],
)
def test_amd_gpus_are_shared_out(environ, ids):
    place = launch.Cluster(
        kind="local", coordinator="a:1", num_processes=2, process_id=1, variables={}, local_id=1, local_size=2
    )
    assert gpu_share.device_ids_of(place, environ).get("JAX_LOCAL_DEVICE_IDS") == ids
