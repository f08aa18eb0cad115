"""`jshard occupancy`: its table, its JSON, its picture. Its errors are in tests/golden/occupancy_errors.txt.

Of AMD GPUs, tests/golden/occupancy_amd.txt has what it prints.
"""

import json
import os
import pathlib
import re
from types import SimpleNamespace

from jshard import cli
from jshard.facts.devices import DEVICES
from jshard.occupancy import AMD_GPUS, GPUS, shipped_for

GOLDEN = pathlib.Path(__file__).parents[1] / "golden" / "occupancy_table.txt"
AMD_GOLDEN = GOLDEN.with_name("occupancy_amd.txt")
NVIDIA_WORDS = re.compile(
    r"\bSMs?\b|SMEM|shared memory|\bNCCL|multiprocessor|quarter|\bwarps?\b|thread|NVIDIA|\bblocks? of"
)


def test_the_table_of_a_gpu(capsys):
    assert cli.main("occupancy --gpu h200 --nccl 2.30.7 --footprint ring --footprint copy-engine".split()) == 0
    said = capsys.readouterr().out
    lines = said.splitlines()
    assert lines[0] == "NVIDIA H200: 132 SMs of 228 KiB shared memory"
    assert "beside NCCL 2.30.7 ring: 16 blocks of 544 x 96, 120,064 B, 1 on an empty SM" in lines
    rows = [re.split(r"  +", line.strip()) for line in lines if line.startswith(" matmul_nn_tiled:64x64x64/2")]
    assert rows == [
        ["matmul_nn_tiled:64x64x64/2", "128 x 58, 40,977 B", "5", "SMEM", "5", "pad 74,752: 1 per SM,"],
        ["matmul_nn_tiled:64x64x64/2", "128 x 58, 40,977 B", "5", "SMEM", "0", "as it is"],
    ]
    assert max(map(len, lines)) <= 120


def test_every_gpu_and_every_kernel_has_its_row(capsys):
    assert cli.main(["occupancy"]) == 0
    said = capsys.readouterr().out
    tables = re.split(r"^(?=NVIDIA .*: \d+ SMs of )", said, flags=re.MULTILINE)[1:]
    for facts, table in zip(GPUS.values(), tables, strict=True):
        assert table.startswith(f"{facts.title}: {facts.num_sms} SMs of ")
        shipped = shipped_for(facts)
        assert [table.count(f" {kernel.label} ") for kernel in shipped.kernels] == [1] * len(shipped.kernels)
        text = " ".join(table.split())
        assert shipped.source in text
        assert ("they do not run on this GPU" in text) == (facts.name in ("b200", "gb200"))
    assert "compiled for sm_80" in tables[[*GPUS].index("a40")]


def test_ampere_has_kernels_of_its_own(capsys):
    assert cli.main("occupancy --gpu a100 --nccl 2.30.7".split()) == 0
    said = capsys.readouterr().out
    rows = [re.split(r"  +", line.strip()) for line in said.splitlines() if line.startswith(" matmul_nn_tiled:64x64")]
    assert rows == [["matmul_nn_tiled:64x64x64/2", "128 x 122, 40,961 B", "3", "SMEM", "3", "pad 41,984: 1 per SM,"]]
    assert "compiled for sm_80" in said and "sm_90a" not in said

    assert cli.main("occupancy --kernel matmul_nn_tiled:128x128x64/4 --json".split()) == 0
    kernels = {found["gpu"]["name"]: found["kernels"] for found in json.loads(capsys.readouterr().out)["gpus"]}
    assert [name for name in kernels if kernels[name]] == ["h100", "h200", "b200", "gb200"]


def test_the_whole_table(capsys):
    """Of every kernel on every GPU: `UPDATE_GOLDEN=1 pytest` of this file writes it again; then read its diff."""
    assert cli.main(["occupancy", "--nccl", "2.30.7"]) == 0
    said = "\n".join(line.rstrip() for line in capsys.readouterr().out.splitlines()) + "\n"
    if "UPDATE_GOLDEN" in os.environ:
        GOLDEN.write_text(said)
    assert said == GOLDEN.read_text()


def test_a_picture_has_a_panel_only_where_padding_changes_something(tmp_path, capsys, monkeypatch):
    drawn = []
    keep = lambda figure: drawn.append(figure) or SimpleNamespace(print_png=lambda path: None)
    monkeypatch.setattr("matplotlib.backends.backend_agg.FigureCanvasAgg", keep)
    path = tmp_path / "h200.png"
    assert cli.main(["occupancy", "--gpu", "h200", "--plot", str(path)]) == 0
    assert f"written: {path}" in capsys.readouterr().err
    panels = [axes for axes in drawn[0].axes if axes.lines]
    assert 1 < len(panels) == len({axes.get_title(loc="left") for axes in panels})
    for axes in panels:
        assert any(len(set(line.get_ydata())) > 1 for line in axes.lines), axes.get_title(loc="left")
    assert "rms_norm_backward:1024, layer_norm:1024" in [axes.get_title(loc="left") for axes in panels]
    assert "Padding changes nothing for" in drawn[0].get_supxlabel()


def test_a_picture_of_nothing_that_changes_is_still_one(tmp_path):
    path = tmp_path / "h200.png"
    assert cli.main(["occupancy", "--gpu", "h200", "--kernel", "mlp_silu_tiled", "--plot", str(path)]) == 0
    assert path.read_bytes().startswith(b"\x89PNG")


def test_a_kernel_goes_by_its_name_its_form_and_how_they_begin(capsys):
    def rows(name):
        assert cli.main(["occupancy", "--gpu", "h200", "--kernel", name, "--json"]) == 0
        return [kernel["kernel"] for kernel in json.loads(capsys.readouterr().out)["gpus"][0]["kernels"]]

    assert rows("rms_norm_backward:1024") == ["rms_norm_backward:1024"]
    assert rows("rms_norm_backward") == ["rms_norm_backward:1024", "rms_norm_backward:4096"]
    assert len(rows("rms_norm")) == 4
    assert len(rows("matmul")) == 4 and {name.split("_")[0] for name in rows("matmul")} == {"matmul"}


def test_json_has_all_plans_and_sources(capsys):
    assert cli.main("occupancy --gpu h200 --block 128,58,41_024 --nccl 2.29.9 --ctas 4 --json".split()) == 0
    reported = capsys.readouterr()
    (found,) = json.loads(reported.out)["gpus"]
    assert reported.err == (
        "The kernels of NCCL 2.29.9 were not read: its footprint is assumed to be that of 2.28.9, the nearest"
        " older release that was read.\n"
    )
    assert found["gpu"]["sources"]["num_sms"].endswith("h200.txtpb, core_count")
    assert found["footprints"][0]["ctas"] == 4
    (row,) = found["kernels"]
    assert (row["kernel"], row["blocks_per_sm"], row["limits"]["shared memory"]) == ("block", 5, 5)
    beside = row["beside"]["NCCL 2.28.9 ring"]
    assert beside["drain"] == 5 and [plan["blocks_per_sm"] for plan in beside["plans"]] == [1, 5, 4, 3, 2]


# AMD GPUs.

AMD_LINES = (
    "occupancy --gpu mi250x",
    "occupancy --gpu mi250x --block 256,64,16_384,48",
    "occupancy --gpu mi300x --block 256,173,32768 --footprint p2p --ctas 32",
)


def test_what_is_printed_of_an_amd_gpu(capsys):
    """`UPDATE_GOLDEN=1 pytest` of this file writes it again; then read its diff."""
    parts = []
    for line in AMD_LINES:
        assert cli.main(line.split()) == 0
        printed = [row.rstrip() for row in capsys.readouterr().out.splitlines()]
        assert max(map(len, printed)) <= 120
        parts.append("\n".join([f"$ jshard {line}", *printed, ""]))
    text = "\n".join(parts)
    if "UPDATE_GOLDEN" in os.environ:
        AMD_GOLDEN.write_text(text)
    assert text == AMD_GOLDEN.read_text()
    assert not NVIDIA_WORDS.findall(text)


def test_json_of_an_amd_gpu_has_its_limits_and_sources(capsys):
    assert cli.main("occupancy --gpu mi250x --block 256,64,16384 --ctas 4 --json".split()) == 0
    (answer,) = json.loads(capsys.readouterr().out)["gpus"]
    assert answer["gpu"]["gfx"] == "gfx90a" and answer["gpu"]["sources"]["num_cus"].endswith("mi200.txtpb, core_count")
    (comm,) = answer["footprints"]
    assert comm["workgroups"] == 4 and "Debian" in comm["source"]
    assert comm["room_beside"][2] == {"per_cu": 3, "vgprs": 80, "lds_bytes": 20_992}
    (kernel,) = answer["kernels"]
    assert kernel["workgroups_per_cu"] == 4 and kernel["limits"]["LDS"] == 4
    beside = kernel["beside"]["RCCL 2.13.4 ring"]
    assert beside["drain"] == 1 and [way["per_cu"] for way in beside["paddings"]] == [4, 3, 2, 1]


def test_every_amd_gpu_that_clusters_are_planned_for_is_known():
    planned = {name for name, facts in DEVICES.items() if facts.compiler == "rocm"}
    assert planned == set(AMD_GPUS)
