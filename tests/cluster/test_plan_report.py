"""What `jshard plan --topology` reports beside the step asked for: a comparison, a suggestion, what a search chose."""

import dataclasses
import json
import re
import shlex

import pytest

from jshard.cli.plan import PlanReport
from jshard.cluster.choose import choose
from jshard.cluster.comparison import Compared, Comparison, VariantCompiler, compare
from jshard.cluster.compile import Variant, command_line
from jshard.cluster.layouts import DATA_AND_STAGES
from jshard.cluster.report import ClusterPlan
from jshard.cluster.strategies import variants_for
from jshard.errors import RunError
from tests.cluster.fake_compiler import Compiler, cluster_of, costs_of, mesh_of, request_of, step_of

HOST = cluster_of("h100:1x8")
CAPACITY = HOST.topology.device.hbm_bytes
ASKED = request_of(HOST)


def plan_of(peak, *, products=1):
    return ClusterPlan.of(
        step_of(ASKED, peak_bytes=int(peak * CAPACITY), products=products), cluster=HOST, name="my_model, recipe micro"
    )


def row_of(peak, *, name="suggestion", error=None, **way):
    variant = Variant(name=name, mesh=ASKED.mesh, **way)
    command = command_line(variant.of(ASKED), assume=())
    return Compared(variant=variant, command=command, plan=None if error else plan_of(peak), error=error)


def lines_from(report, start):
    """The report from a line on, without the spaces of its tables."""
    lines = [" ".join(line.split()) for line in str(report).splitlines()]
    return lines[lines.index(start) :]


# ---- what to try ------------------------------------------------------------------------------------------------


def test_a_suggestion_is_a_line_to_paste_that_was_compiled():
    tried = row_of(1.2, accumulate=2), row_of(0.5, accumulate=4, units={"remat": "full"})
    report = PlanReport(plan=plan_of(1.5), tried=tried)
    said = str(report)
    assert "\ndoes not fit: 118.7 GiB of 79.1\n" in said
    assert said.endswith(
        "\ntry this, which compiles and fits: 39.6 GiB of 79.1:\n"
        "jshard plan my_model.py --topology h100:1x8 --mesh replica=1,fsdp=8,tensor=1 \\\n"
        "    --set accumulate=4 --unit remat=full"
    )
    assert shlex.split(said.partition("79.1:\n")[2].replace("\\\n", "")) == shlex.split(tried[1].command)
    (reported,) = json.loads(report.to_json())["suggestions"]
    assert reported["command"] == tried[1].command and reported["compiled"]["fits"] is True
    assert not report.fits


@pytest.mark.parametrize(
    ("tried", "text"),
    [
        ((1.2, 1.1), "2 configurations that keep less were compiled, and none fits: it needs more devices, or"),
        ((), "by the estimate, no configuration that keeps less would fit: it needs more devices, or"),
    ],
    ids=["none fits", "none was tried"],
)
def test_where_nothing_helps_it_says_so(tried, text):
    report = PlanReport(plan=plan_of(1.5), tried=tuple(map(row_of, tried)))
    assert text in " ".join(str(report).split())
    assert json.loads(report.to_json())["suggestions"] == []


def test_the_answer_comes_first_and_the_tables_after_it():
    said = str(plan_of(0.5)).splitlines()
    assert said[0].startswith("my_model, recipe micro on 8 x NVIDIA H100")
    assert said[1] == "fits: 39.6 GiB of 79.1"
    estimated = {line.split(": ")[0]: line for line in said[2:5]}
    assert list(estimated) == ["step", "MFU", "communication hidden"]
    for name, line in estimated.items():
        value, low, high = re.fullmatch(r"[^:]*: (\S.*) \((.*) to (.*)\), estimated", line).groups()
        table = next(row for row in said[5:] if row.strip().startswith(name))
        assert re.split(r" {2,}", table.strip())[1:] == [low, high, value]
    assert said.index("Memory of one device (compiled)") > 5


def test_a_small_peak_is_not_nothing():
    assert plan_of(1e-4).verdict == "fits: 8.10 MiB of 79.1 GiB"


def test_close_to_the_limit_a_plan_says_that_overlap_is_gone():
    near, far = (" ".join(str(plan_of(peak)).split()) for peak in (0.95, 0.5))
    assert "of the communication is hidden. --unit remat=full, or --set accumulate=2, frees memory." in near
    assert "frees memory" not in far


def test_the_json_has_what_is_published_of_runs_and_where_the_time_goes():
    found = json.loads(PlanReport(plan=plan_of(0.5)).to_json())
    stated, tokens = found["estimate"]["stated"], found["batch_size"] * found["sequence_length"]
    assert found["devices"] == 8 and found["accumulate"] == 1
    assert stated["tokens_per_s"] == pytest.approx(tokens / stated["step_s"])
    assert stated["tokens_per_s_per_device"] * 8 == pytest.approx(stated["tokens_per_s"])
    assert stated["mfu"] == pytest.approx(stated["model_flops_per_s_per_device"] / 989.5e12)
    assert stated["hfu"] == pytest.approx(stated["computed_flops_per_s"] / 989.5e12)
    assert sum(stated["split_s"].values()) + stated["exposed_s"] == pytest.approx(stated["step_s"])
    assert sum(stated["exposed_by_kind_s"].values()) == pytest.approx(stated["exposed_s"])


def test_a_replay_of_a_compiled_step_reports_that_it_follows_no_copies():
    step = step_of(request_of(HOST), peak_bytes=2**30)
    away = dataclasses.replace(step.memory, host_arguments_bytes=2**31, host_temporaries_bytes=2**30)
    plans = [ClusterPlan.of(one, cluster=HOST, name="x") for one in (step, dataclasses.replace(step, memory=away))]
    assert plans[0].left_out == () and "not in the estimate" not in str(plans[0])
    (line,) = plans[1].left_out
    assert line == (
        "not in the estimate: copies to and from the host, where 3.00 GiB are;"
        " moving that once takes 62.9 ms at 51.2 GB/s"
    )
    assert line in " ".join(str(plans[1]).split()) and plans[1].to_dict()["left_out"] == [line]


# ---- side by side -----------------------------------------------------------------------------------------------


def test_strategies_side_by_side(monkeypatch):
    """One row each, what fits first; of what does not fit nothing is estimated, and a failure is reported."""

    def compiled(asked):
        if asked.plain_flax:
            raise RunError("The compiler failed.", where="h100:1x8", why="it says no.", do="try again.")
        return step_of(asked, peak_bytes=int(CAPACITY * (1.25 if asked.mesh["fsdp"] == 1 else 0.25)))

    compiler, said = Compiler(monkeypatch, compiled), []
    ways = variants_for(
        ["replicate", "zero3", "gspmd"], ASKED.mesh, near=8, capacity_bytes=CAPACITY, held_bytes=lambda mesh: 0
    )
    found = compare(ASKED, ways, VariantCompiler(cluster=HOST, say=said.append))
    assert [asked.plain_flax for asked in compiler.asked] == [False, False, True]
    zero3 = "[2 of 3] zero3: --mesh replica=1,fsdp=8,tensor=1 --unit reshard_after_forward=true"
    assert said[2] == f"{zero3} ..."
    assert re.fullmatch(re.escape(zero3) + r": [^,]* s, fits: 19\.8 GiB of 79\.1", said[3])
    assert re.fullmatch(r"\[3 of 3\] gspmd: .* s, does not compile", said[5])
    rows = lines_from(found, "Side by side")
    assert any(row.startswith("replicate replica=8 98.9 no ") and row.endswith("- - - -") for row in rows)
    assert any(row.startswith("zero3* fsdp=8 19.8 yes ") and "%" in row for row in rows)
    assert "gspmd fsdp=8 - - - - - - - - -" in rows
    assert rows[-4:] == [
        "gspmd: The compiler failed.",
        "where: h100:1x8",
        "why: it says no.",
        "do: try again.",
    ]
    replicate, zero3, gspmd = (row.to_dict() for row in found.rows)
    assert (replicate["compiled"]["fits"], zero3["compiled"]["fits"]) == (False, True)
    assert gspmd == {"name": "gspmd", "mesh": ASKED.mesh, "command": None, "error": str(found.rows[2].error)}
    assert zero3["command"].endswith("--unit reshard_after_forward=true")


def test_the_quickest_comes_first_and_is_marked():
    rows = [row_of(2.0, name="large"), row_of(0.0001, name="slow"), row_of(0.0001, name="quick")]
    rows[1] = dataclasses.replace(rows[1], plan=plan_of(0.0001, products=3000))
    found = Comparison(rows=tuple(rows))
    shown = [row for row in lines_from(found, "Side by side") if " fsdp=8 " in row]
    assert [row.partition(" fsdp=8 ")[0] for row in shown] == ["quick*", "slow", "large"]
    assert [re.search(r"[\d.]+ [mu]s", row)[0] for row in shown[:2]] == ["46.3 us", "10.1 ms"]
    assert [row.to_dict()["name"] for row in found.rows] == ["large", "slow", "quick"]
    assert "9.20-11.3 ms 100.0-100.0%" in lines_from(found, "Side by side")  # the range, in a line of its own


# ---- chosen -----------------------------------------------------------------------------------------------------


def chosen(monkeypatch, compiled, plan, *settings):
    """What a search on eight devices finds.

    Args:
        compiled: the peak, by the capacity, and the products of a request.
        plan: of what was asked for.
    """
    compiler = Compiler(monkeypatch, lambda asked: _step(asked, *compiled(asked)))
    costs, asked = costs_of(HOST, *settings), request_of(HOST, settings=settings)
    found = choose(costs, asked, mesh_of(HOST), free=DATA_AND_STAGES, plan=plan, bench=VariantCompiler(cluster=HOST))
    return found, compiler.asked


def _step(asked, peak, products):
    return step_of(asked, peak_bytes=int(peak * CAPACITY), products=products)


@pytest.mark.wide
def test_the_quickest_that_fits_of_three_and_what_was_asked_for(monkeypatch):
    """By the estimate of the compiled schedule, which has the last word."""
    found, asked = chosen(monkeypatch, lambda asked: (0.5, 100 * (1 + asked.mesh["fsdp"])), plan_of(0.5, products=3000))
    first = found.search.finalists(4)
    assert found.search.default not in first and len(asked) == 3
    assert [row.variant for row in found.compiled] == [found.compiled[0].variant, *(c.variant for c in first[:3])]
    times = [row.plan.estimates.stated.step_s for row in found.compiled]
    assert found.best is found.compiled[times.index(min(times))] is not found.compiled[0]
    assert found.fits and PlanReport(plan=plan_of(2.0), chosen=found).fits
    reported = lines_from(found, "Configurations, by the estimate")
    at = reported.index(f"chosen: {found.best.variant.name}")
    assert " ".join(reported[at + 1 : -1]).replace(" \\", "") == found.best.command
    gain = times[0] / min(times)
    assert reported[-1] == f"by the estimate {gain:.2f}x as fast as the requested configuration."


def test_each_way_says_why_it_was_not_chosen(monkeypatch):
    found, _ = chosen(monkeypatch, lambda asked: (0.5, 1), plan_of(0.5))
    report = json.loads(PlanReport(plan=plan_of(0.5), chosen=found).to_json())["chosen"]
    ways = report["considered"]
    assert len(ways) == len(found.search.ranked) and all(way["fits"] for way in ways)
    assert [way["name"] for way in ways if not way["lost"]] == [found.search.ranked[0].variant.name]
    assert {way["lost"].partition(": ")[2] or way["lost"] for way in ways[1:]} >= {"computes more", "waits more"}
    assert report["best"] == found.best.command and report["refused"] == {}
    rows = lines_from(found, "Configurations, by the estimate")
    (asked,) = [row for row in rows if row.startswith("as asked fsdp=8 0.0 ")]
    assert ": waits" in asked
    assert f"{len(ways)} configurations were considered; 0 do not fit." in " ".join(rows)


def test_three_more_are_compiled_while_none_fits(monkeypatch):
    found, asked = chosen(monkeypatch, lambda asked: (1.5, 1), plan_of(2.0))
    assert len(asked) == 6 and found.best is None and not found.fits
    assert str(found).rstrip().endswith("No compiled configuration fits: it needs more devices, or a smaller batch.")
    assert json.loads(PlanReport(plan=plan_of(2.0), chosen=found).to_json())["chosen"]["best"] is None

    def third_fits(asked):
        seen.append(asked)
        return (0.5 if len(seen) == 4 else 1.5), 1

    seen = []
    found, asked = chosen(monkeypatch, third_fits, plan_of(2.0))
    assert len(asked) == 4 and found.best is found.compiled[4]
    assert "the requested configuration does not fit." in str(found)


# ---- bounds instead of a stated estimate ---------------------------------------------------------------------------


def plan_on(cluster):
    return ClusterPlan.of(step_of(request_of(cluster), peak_bytes=2**30), cluster=cluster, name="my_model")


def test_where_no_speed_of_products_is_published_nothing_is_stated():
    plan = plan_on(cluster_of("mi250x:1x8"))
    said = " ".join(str(plan).split())
    assert "not a measurement; no source for what its matrix products sustain: bounds only" in said
    assert re.search(r"\nstep: [^(]* to [^(]*, estimated\n", str(plan))
    assert "matrix products at 38% to 77% of their peak" in said and "stated" not in said
    assert "RCCL, HIP and fragmentation need more" in said and "NCCL, CUDA" not in said
    estimate = plan.to_dict()["estimate"]
    assert estimate["stated"] is None and estimate["low"]["step_s"] < estimate["high"]["step_s"]
    rows = (Compared(variant=Variant(name="zero3", mesh={"fsdp": 8}), command="jshard", plan=plan),)
    assert " to " in str(Comparison(rows=rows))


@pytest.mark.parametrize("known", [0.6, (0.5, 0.7)])
def test_a_speed_that_is_given_counts_as_a_source(known):
    plan = plan_on(cluster_of("mi250x:1x8", matmul_efficiency=known))
    assert "no source" not in str(plan) and plan.to_dict()["estimate"]["stated"] is not None


def test_estimates_for_an_mi300x_have_sources():
    device = cluster_of("mi300x:1x8").topology.device
    assert "708 of 1307 TFLOP/s" in device.sources["matmul_efficiency"]
    assert device.sources["hbm_bytes"].startswith("AMD's driver") and device.compiler == "rocm"
    assert plan_on(cluster_of("mi300x:1x8")).to_dict()["estimate"]["stated"] is not None
