"""What the experiment about overlap measures on each kind of GPU, from the driver's name alone; no GPU is needed."""

import jax
import pytest

from benchmarks.overlap import command, programs, target
from benchmarks.overlap.grid import DOT, SIZES, TRITON, Setting, groups
from benchmarks.overlap.session import PLACEMENT
from benchmarks.overlap.target import LoadForm, load_form
from jshard.errors import FourPartError
from jshard.occupancy import AmdGpuFacts, RcclFootprint
from tests.occupancy.absent_gpu import A40, A100, H200, needs_ampere_kernels, of, on

HOPPER = ["NVIDIA H100 80GB HBM3", "NVIDIA H200"]
AMPERE = ["NVIDIA A40", "NVIDIA A100-SXM4-80GB"]
BLACKWELL = ["NVIDIA B200", "NVIDIA GB200"]
AMD = ["AMD Instinct MI250X", "AMD Instinct MI300X"]


def target_of(kind):
    facts = target.gpu_of(kind)
    return facts, target.collective(facts, nccl=None, ctas=16)


def forms_of(facts, comm):
    """The products of each group."""
    grid = groups(facts, comm)
    return [[setting.form for setting in group.settings] for group in grid]


@pytest.mark.parametrize("kind", [*HOPPER, *AMPERE])
def test_where_jshard_has_kernels_they_are_measured(kind, monkeypatch):
    monkeypatch.setattr("jshard._compat.COMPILES_FOR_AMPERE", True)
    facts, comm = target_of(kind)
    for first, *others in forms_of(facts, comm):
        assert first == DOT and TRITON not in others
        assert all(form.startswith(("persistent", "tiled")) for form in others)
    names = [task.name for task in command.tasks(facts, comm, quick=False)]
    assert names[0] == PLACEMENT and any(name.startswith("kernels/") for name in names)


@pytest.mark.parametrize(
    ("kind", "blocks_and_pads"),
    [
        ("NVIDIA A100-SXM4-80GB", [(3, 0), (2, 14_336), (1, 41_984)]),
        ("NVIDIA A40", [(2, 0), (1, 9_216)]),
    ],
)
def test_on_ampere_it_is_the_kernels_of_ampere(kind, blocks_and_pads, monkeypatch):
    monkeypatch.setattr("jshard._compat.COMPILES_FOR_AMPERE", True)
    settings = {group.form: group.settings for group in groups(*target_of(kind), SIZES[:1])}
    assert list(settings) == [
        "persistent 128x64x64/3",
        "tiled 128x64x64/3",
        "tiled 128x64x64/2",
        "tiled 64x128x64/3",
        "tiled 64x64x64/2",
    ]
    _, *persistent = settings["persistent 128x64x64/3"]
    assert [(setting.reserved_sms, setting.drain) for setting in persistent] == [
        (0, "kernel"), (8, "kernel"), (16, "0"), (32, "0"),
    ]  # fmt: skip
    _, *small = settings["tiled 64x64x64/2"]
    assert [(setting.blocks_per_sm, setting.pad_bytes) for setting in small] == blocks_and_pads


@pytest.mark.parametrize(
    "device",
    [
        H200,
        pytest.param(A100, marks=needs_ampere_kernels),
        pytest.param(A40, marks=needs_ampere_kernels),
    ],
    ids=lambda device: device[0],
)
def test_the_kernel_takes_every_setting_of_the_grid(device):
    kind, _, _ = device
    for group in groups(*target_of(kind), SIZES[:1]):
        for setting in group.settings:
            with on(device):
                product = jax.eval_shape(programs.product_of(setting), of(512, 512), of(512, 512))
            assert product.shape == (512, 512)


@pytest.mark.parametrize("kind", [*AMPERE, *BLACKWELL, *AMD])
def test_elsewhere_it_is_both_products_of_xla(kind, monkeypatch):
    monkeypatch.setattr("jshard._compat.COMPILES_FOR_AMPERE", False)
    facts, comm = target_of(kind)
    assert forms_of(facts, comm) == [[DOT, TRITON]] * 2
    names = [task.name for task in command.tasks(facts, comm, quick=False)]
    first = [] if kind in AMD else [PLACEMENT]
    assert names == [*first, f"cube/{TRITON}", f"wide/{TRITON}"]


def test_why_there_are_no_kernels(monkeypatch, capsys):
    why = {kind: target.why_no_kernels(target.gpu_of(kind)) for kind in ("h200", "b200", "mi300x")}
    assert why["h200"] == "" and "not for NVIDIA B200" in why["b200"] and "not for AMD MI300X" in why["mi300x"]
    monkeypatch.setattr("jshard._compat.COMPILES_FOR_AMPERE", False)
    assert command.main(["--list", "--gpu", "a100"]) == 0
    assert "Without jshard's kernels: on Ampere GPUs the kernels need jax 0.12" in capsys.readouterr().err


def test_only_the_triton_product_is_compiled_with_its_options():
    assert programs.options_of(Setting(form=DOT)) == programs.OPTIONS
    options = programs.options_of(Setting(form=TRITON))
    assert options["xla_gpu_cublas_fallback"] is False and programs.OPTIONS.items() <= options.items()


@pytest.mark.parametrize(
    ("kind", "num_devices", "has_cupy", "expected"),
    [
        ("NVIDIA H200", 1, True, LoadForm.CUPY),
        ("NVIDIA H200", 1, False, LoadForm.PALLAS),
        ("NVIDIA H200", 8, True, LoadForm.NCCL),
        ("NVIDIA A40", 1, True, LoadForm.CUPY),
        ("NVIDIA A40", 1, False, LoadForm.NONE),
        ("NVIDIA A40", 4, False, LoadForm.NCCL),
        ("AMD Instinct MI250X", 1, True, LoadForm.NONE),  # CuPy is for CUDA
        ("AMD Instinct MI250X", 8, True, LoadForm.RCCL),
    ],
)
def test_the_load_beside_a_product(kind, num_devices, has_cupy, expected):
    facts = target.gpu_of(kind)
    assert load_form(facts, num_devices=num_devices, has_cupy=has_cupy) is expected


def test_without_a_load_the_error_says_what_is_needed():
    assert "CuPy is not installed" in str(target.no_load(target.gpu_of("a40")))
    text = str(target.no_load(target.gpu_of("mi250x")))
    assert "There is no load for one AMD GPU." in text and "both dies" in text


def test_the_collective_of_an_amd_gpu_is_that_of_rccl():
    facts, comm = target_of("AMD Instinct MI250X")
    assert isinstance(facts, AmdGpuFacts) and isinstance(comm, RcclFootprint)
    with pytest.raises(FourPartError, match="The load has no version of NCCL"):
        target.collective(facts, nccl="2.30.7", ctas=16)


def test_the_command_lists_what_there_is_for_an_amd_gpu(capsys):
    assert command.main(["--list", "--gpu", "mi250x"]) == 0
    assert capsys.readouterr().out.splitlines() == [f"cube/{TRITON}", f"wide/{TRITON}"]
    assert command.main(["--list", "--gpu", "mi250x", "--nccl", "2.30.7"]) == 2
    assert "where: --nccl 2.30.7" in capsys.readouterr().err
