"""The ruler: unions of intervals, not sums; whole steps by the devices' own work; a real profile of eight devices."""

import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jshard as js
from jshard.errors import RunError, ShardingError
from jshard.inspect.profile.events import Event
from jshard.inspect.profile.operations import Ops
from tests.golden_texts import GoldenTexts
from tests.helpers import mean_square
from tests.inspect.made_up_profiles import event, kernel, marks, plane, thunk, write
from tests.scheduled_text import body, dot, gather, gathered, loop, program, scatter, scattered
from tests.toy_models import Residual, Tower

FILE = "a.xplane.pb"
PROGRAM = program(
    gather("all-gather-start.1", 1),
    dot("fusion.1"),
    gathered("all-gather-done.1", "all-gather-start.1"),
    dot("fusion.2"),
    scatter("reduce-scatter-start.1", 2, unit="blocks/1"),
    dot("fusion.3"),
    scattered("reduce-scatter-done.1", "reduce-scatter-start.1"),
    dot("fusion.4"),
)


def parts(shares):
    """Computing, communicating, both and idle in microseconds."""
    found = shares.computing_s, shares.communicating_s, shares.both_s, shares.idle_s
    return tuple(round(part_s * 1e6, 6) for part_s in found)


@pytest.mark.parametrize("seed", range(3))
def test_shares_are_those_of_a_bitmap(seed, tmp_path):
    """Microsecond by microsecond; of what is exposed each collective in flight has an equal part."""
    random = np.random.default_rng(seed)
    covered = {name: np.zeros(64, bool) for name in ("dot.1", "all_gather.1", "reduce_scatter.1", "psum.1")}
    threads = {}
    for name, cover in covered.items():
        for begin, length in random.integers(0, (56, 8), (6, 2)).tolist():
            threads[f"worker/{len(threads)}"] = [thunk(name, begin, begin + length + 1, run=1)]
            cover[begin : begin + length + 1] = True
    found = js.read_profile(write(tmp_path / FILE, plane("/host:CPU", threads)))
    busy, *flights = covered.values()
    at_once = sum(flights).astype(float)
    exposed, both = (at_once > 0) & ~busy, (at_once > 0) & busy
    used = np.flatnonzero(busy | (at_once > 0))
    idle = used[-1] + 1 - used[0] - len(used)
    assert parts(found.shares) == ((busy & ~both).sum(), exposed.sum(), both.sum(), idle)
    wanted = {name: (exposed * flight / np.maximum(at_once, 1)).sum() for name, flight in [*covered.items()][1:]}
    assert {row.name: row.exposed_s * 1e6 for row in found.by_instruction} == pytest.approx(wanted)


# ---- platforms


def gpu_step(at, device=0):
    """A step of 100 us from `at` on: two streams of kernels, one of NCCL."""
    late = 5 * device
    return {
        "Stream #14(Compute)": [
            kernel("fusion.1", at + 10, at + 40),
            kernel("fusion.1", at + 30, at + 45, name="nested"),  # inside and beyond: a sum would count it twice
            kernel("fusion.2", at + 45, at + 50),
            kernel("fusion.3", at + 60, at + 70 + late),
            kernel("fusion.4", at + 90, at + 100),
        ],
        "Stream #15(Compute)": [kernel("fusion.3", at + 62, at + 66, name="beside")],
        "Stream #20(Memcpy)": [event("MemcpyH2D", at + 50, at + 60)],
        "Stream #30(Compute)": [
            kernel("all-gather-start.1", at, at + 20, name="ncclDevKernel_AllGather_RING_LL"),
            kernel("reduce-scatter-start.1", at + 55, at + 85, name="ncclDevKernel_ReduceScatter_Sum_f32_RING_LL"),
        ],
    }


def gpu_planes(*begins, devices=2, drop=()):
    """Planes of GPUs that do a step at each of these times; events named in `drop` (step, operation) are missing."""
    planes = []
    for device in range(devices):
        lines = {}
        for place, at in enumerate(begins):
            for line, events in gpu_step(at, device).items():
                kept = [e for e in events if (place, e[3].get("hlo_op")) not in drop]
                lines.setdefault(line, []).extend(kept)
        planes.append(plane(f"/device:GPU:{device}", lines | {"XLA Ops": [event("derived", 0, 1000)]}))
    return planes


def test_gpus_by_streams(tmp_path):
    found = js.read_profile(write(tmp_path / "host.xplane.pb", *gpu_planes(0, 150), marks(11, 12), program=PROGRAM))
    assert (found.platform, found.devices, [s.number for s in found.steps]) == ("gpu", ("gpu:0", "gpu:1"), [11, 12])
    for step in found.steps:
        first, second = step.devices
        # 10..50, 60..70 and 90..100 compute; 0..20 and 55..85 communicate
        assert parts(first.shares) == (40, 10 + 5 + 15, 10 + 10, 10)
        assert parts(second.shares) == (40, 10 + 5 + 10, 10 + 15, 10)
        assert first.shares.step_s == pytest.approx(100e-6)
    assert parts(found.shares) == (40, 27.5, 22.5, 10)
    assert found.shares.hidden == pytest.approx(22.5 / 50)
    assert found.between_s == pytest.approx(50e-6)
    rows = {(r.kind, r.unit, r.phase): (r.runs, round(r.in_flight_s * 1e6), r.exposed_s) for r in found.by_unit}
    assert rows == {
        ("reduce-scatter", "blocks/1", "backward"): (1, 30, pytest.approx(17.5e-6)),
        ("all-gather", "blocks/0", "forward"): (1, 20, pytest.approx(10e-6)),
    }
    assert sum(r.exposed_s for r in found.by_instruction) == pytest.approx(found.shares.communicating_s)
    assert [r.name for r in found.by_instruction] == ["reduce-scatter.1", "all-gather.1"]


def test_gpus_without_the_programs_text_report_kinds_only(tmp_path):
    found = js.read_profile(write(tmp_path / "host.xplane.pb", *gpu_planes(0, 150, 300)))
    assert [s.number for s in found.steps] == [1, 2, 3]
    assert {parts(d.shares) for s in found.steps for d in s.devices} == {(40, 30, 20, 10), (40, 25, 25, 10)}
    assert {(r.kind, r.unit) for r in found.by_unit} == {("all-gather", None), ("reduce-scatter", None)}
    text = str(found)
    assert "By kind only" in text
    assert "Units are unknown" in text
    assert "Steps are counted from 1" in text
    assert "less reliable" in text


def test_kernels_of_nccl_without_an_operation_communicate(tmp_path):
    events = [
        kernel("fusion.1", 0, 10),
        event("ncclDevKernel_AllReduce_Sum_f32_RING_LL", 10, 30),
        event("ncclDevKernel_SendRecv", 40, 50),
        event("gemm_without_operation", 30, 35, hlo_module="step"),
    ]
    found = js.read_profile(write(tmp_path / FILE, plane("/device:GPU:0", {"Stream #14(Compute)": events})))
    assert parts(found.shares) == (15, 30, 0, 5)
    assert {r.kind: r.exposed_s for r in found.by_kind} == {
        "all-reduce": pytest.approx(20e-6),
        "send or recv": pytest.approx(10e-6),
    }


def tpu_plane(*, runs=((0, 100), (120, 220)), name="/device:TPU:0"):
    lines = {"Steps": [], "XLA Modules": [], "XLA Ops": [], "Async XLA Ops": []}
    for number, (at, end) in enumerate(runs):
        lines["Steps"].append(event(str(number), at, end))
        lines["XLA Modules"].append(event("step(77)", at, end, run_id=number))
        lines["XLA Ops"] += [
            event("%all-gather-start.1 = (f32[1]) all-gather-start(%x)", at, at + 1),
            event("%fusion.1 = f32[] fusion(%y)", at + 1, at + 30),
            event("%all-gather-done.1 = f32[] all-gather-done(%z)", at + 30, at + 45),  # waits
            event("%while.1 = (s32[]) while(%t)", at + 45, at + 95),
            event("%fusion.2 = f32[] fusion(%y)", at + 50, at + 70),
            event("%fusion.3 = f32[] fusion(%y)", at + 75, at + 95),
        ]
        lines["Async XLA Ops"] += [
            event("%all-gather-start.1", at, at + 1, flow=number, hlo_op="all-gather-start.1"),
            event("%all-gather-done.1", at + 40, at + 45, flow=number, hlo_op="all-gather-done.1"),
            event("%copy-start.3", at + 60, at + 80),
        ]
    return plane(name, lines)


def test_tpus_by_their_lines(tmp_path):
    found = js.read_profile(
        write(tmp_path / "host.xplane.pb", tpu_plane(), tpu_plane(name="/device:TPU:1"), marks(4, 5))
    )
    assert (found.platform, [s.number for s in found.steps]) == ("tpu", [4, 5])
    # The loop is what it holds: idle are 45..50, 95..100, and 70..75 though memory is copied meanwhile.
    assert {parts(d.shares) for s in found.steps for d in s.devices} == {(40, 16, 29, 15)}
    (row,) = found.by_instruction
    assert (row.kind, row.name, row.runs, round(row.in_flight_s * 1e6)) == ("all-gather", "all-gather.1", 1, 45)


def cpu_run(at, run, device=0):
    return [
        thunk("all_gather.1", at, at + 10, run=run, device=device),
        thunk("while.1", at + 10, at + 50, run=run, device=device),
        thunk("dot.1", at + 12, at + 30, run=run, device=device),
        thunk("reduce_scatter.1", at + 30, at + 45, run=run, device=device),
    ]


def test_cpus_by_operations_of_threads(tmp_path):
    """A loop is what it holds, and an operation that other threads finish ends with them."""
    pool = [thunk("big_fusion", 60, 61, run=5, _p=99)]
    ends = [event("end: big_fusion", 80, 81, _c=99), event("Rendezvous", 30, 45), event("Wait: 3/8", 0, 90)]
    other = [*cpu_run(0, 5, device=2048), thunk("big_fusion", 60, 80, run=5, device=2048)]
    lines = {"worker/1": cpu_run(0, 5), "worker/2": [*pool, *ends], "worker/3": other}
    found = js.read_profile(write(tmp_path / FILE, plane("/host:CPU", lines)))
    assert found.devices == ("cpu:0", "cpu:1")
    assert {parts(d.shares) for d in found.steps[0].devices} == {(18 + 20, 25, 0, 17)}
    assert "CPU devices are threads" in str(found)


def test_an_operation_has_ended_when_its_thread_begins_the_next_ones(tmp_path):
    """A CPU's thread says that an operation ended only after what comes next, here a collective that waits."""
    pool = [thunk("dot.1", 0, 1000, run=5, _p=99), event("ThunkExecutor::Execute", 2000, 9000)]
    pool += [thunk("all_gather.1", 2000, 8999, run=5), event("end: dot.1", 9001, 9001, _c=99)]
    found = js.read_profile(write(tmp_path / FILE, plane("/host:CPU", {"worker/1": pool})))
    shares = found.steps[0].shares
    assert shares.both_s == 0.0 and shares.computing_s == pytest.approx(shares.step_s * 2 / 9, rel=1e-3)


def test_what_other_programs_do_in_a_step_counts_and_bounds_nothing(tmp_path):
    lines = {"worker/1": [*cpu_run(0, 5), thunk("copy.7", 50, 90, run=6, module="other")]}
    lines["worker/1"] += [*cpu_run(200, 7), thunk("copy.7", 245, 250, run=8, module="other")]
    found = js.read_profile(write(tmp_path / FILE, plane("/host:CPU", lines), marks(3, 4)))
    assert found.program == "step"
    assert [parts(s.shares) for s in found.steps] == [(18, 25, 0, 7), (18 + 5, 25, 0, 2)]


def test_collectives_of_a_loop_are_of_their_unit(tmp_path):
    text = program(
        *loop("layers", 3),
        dot("fusion.9"),
        computations=body("layers", gather("ag.1", 1, unit="blocks/*"), gathered("full", "ag.1"), dot("dot.1")),
    )
    events = [thunk("layers_loop", 0, 100, run=1), thunk("fusion.9", 100, 110, run=1)]
    for at in (0, 30, 60):
        events += [thunk("ag.1", at, at + 10, run=1), thunk("dot.1", at + 10, at + 30, run=1)]
    path = write(tmp_path / FILE, plane("/host:CPU", {"worker": events}), program=text)
    found = js.read_profile(path)
    assert parts(found.shares) == (70, 30, 0, 10)
    (row,) = found.by_unit
    assert (row.unit, row.runs, round(row.exposed_s * 1e6)) == ("blocks/*", 3, 30)


def test_a_text_of_another_compilation_is_noticed(tmp_path):
    lines = {"worker": [*cpu_run(0, 1), thunk("all-gather-start.1", 50, 60, run=1)]}
    found = js.read_profile(write(tmp_path / FILE, plane("/host:CPU", lines), program=PROGRAM))
    assert any("lacks 2 collectives, such as all_gather.1" in note for note in found.notes)


def test_the_timeline_of_a_step(tmp_path):
    found = js.read_profile(write(tmp_path / FILE, *gpu_planes(0, 150, 300), marks(1, 2, 3), program=PROGRAM))
    events = json.loads(found.to_chrome_trace())["traceEvents"]
    lanes = {event["tid"]: event["args"]["name"] for event in events if event["ph"] == "M"}
    drawn = {event["name"]: (lanes[event["tid"]], event["dur"]) for event in events if event["ph"] == "X"}
    gather = drawn["all-gather blocks/0 forward (all-gather.1): 20.0 us"]
    scatter = drawn["reduce-scatter blocks/1 backward (reduce-scatter.1): 30.0 us"]
    assert gather == ("communication", pytest.approx(20)) and scatter == ("communication", pytest.approx(30))
    assert drawn["products: 40.0 us"][0] == "computation"
    waiting = "exposed 15.0 us of reduce-scatter blocks/1 backward (reduce-scatter.1): 30.0 us"
    assert drawn[waiting] == ("communication", pytest.approx(15))
    assert (
        [lane for lane, _ in drawn.values()].count("phase")
        == 2
        == sum(name.startswith("forward: ") for name in drawn) + 1
    )
    page = found.to_html()
    assert all(f'title="{tip}' in page for tip in drawn)
    assert "Step 2 of step on gpu:0, measured" in page  # gpu:1 hides more
    assert "30.0 us; in the step 1 run, 30.0 us, of which 20.0 us exposed" in page
    for card in ("<b>100 us</b>", "<b>62.5 us</b>", "<b>45.0%</b>", "<b>27.5 us</b>", "<b>10.0 us</b>"):
        assert card in page  # step, computing, hidden, exposed, idle: means of both devices


def test_what_computes_has_its_kind_from_the_programs_text(tmp_path):
    """Where two compute at one time the product is shown, which takes the longer; without a text no kind is known."""
    text = program(dot("dot.1"), "%add.1 = f32[8]{0} add(%shard, %shard)")
    events = {"a": [thunk("dot.1", 0, 20, run=1)], "b": [thunk("add.1", 10, 30, run=1)]}
    known = (
        js.read_profile(write(tmp_path / "text" / FILE, plane("/host:CPU", events), program=text)).steps[0].devices[0]
    )
    spans = [(round(span.begin_s * 1e6), round(span.end_s * 1e6), work) for span, work in known.computing]
    assert spans == [(0, 20, "products"), (20, 30, "elementwise")]
    unknown = js.read_profile(write(tmp_path / "plain" / FILE, plane("/host:CPU", events))).steps[0].devices[0]
    assert {work for _, work in unknown.computing} == {""}
    assert parts(known.shares) == parts(unknown.shares) == (30, 0, 0, 0)


@pytest.mark.parametrize(
    ("kind", "names"),
    {
        "all-gather": "all-gather-start.12 all_gather.3",
        "reduce-scatter": "reduce-scatter.4.call-done all-reduce-scatter.1",
        "all-reduce": "psum_invariant.7",
        "collective-permute": "ppermute",
        "ragged-all-to-all": "ragged-all-to-all-start",
        "": "all_gather_convert_fusion.2 reduce.5 fusion.1",
    }.items(),
)
def test_collectives_are_known_by_their_names_where_no_text_is(kind, names):
    assert {Ops(None).of(Event(name, name, 0, 1)).kind for name in names.split()} == {kind}


# ---- whole steps


def test_steps_that_are_cut_off_are_left_out(tmp_path):
    missing = {(0, "all-gather-start.1"), (0, "fusion.1"), (3, "fusion.4")}
    planes = gpu_planes(0, 150, 300, 450, drop=missing)
    found = js.read_profile(write(tmp_path / FILE, *planes, marks(1, 2, 3, 4), program=PROGRAM))
    assert [s.number for s in found.steps] == [2, 3]
    assert "Left out, because the profile does not have all of them: 2 steps." in found.notes
    assert found.between_s == pytest.approx(50e-6)


# ---- files


def test_of_a_run_the_newest_profile_with_the_files_of_all_processes(tmp_path):
    old, new = (tmp_path / "profile" / span for span in ("steps-2-3", "steps-5-6"))
    write(old / "process-0" / "plugins" / "profile" / "t" / "h.xplane.pb", *gpu_planes(0))
    for process in (1, 0):
        write(
            new / f"process-{process}" / "plugins" / "profile" / "t" / "h.xplane.pb", *gpu_planes(0, 150), marks(5, 6)
        )
    (new / "program.txt").write_text(PROGRAM)
    (tmp_path / "checkpoints").mkdir()
    found = js.read_profile(tmp_path)
    assert found.devices == tuple(f"process {p} gpu:{d}" for p in (0, 1) for d in (0, 1))
    assert [s.number for s in found.steps] == [5, 6]
    assert found.has_units
    assert any(note.startswith("The newest of 2 profiles") for note in found.notes)
    assert js.read_profile(tmp_path / "profile" / "steps-2-3").devices == ("gpu:0", "gpu:1")


# ---- errors


LATE = {(0, name) for name in ("fusion.3", "fusion.4", "reduce-scatter-start.1")}


def empty(file):
    file.write_text("")
    return file


MISTAKES = {
    "no such folder": lambda folder: (folder / "nowhere", {}),
    "a run without a profile": lambda folder: (empty(folder / "run.json").parent, {}),
    "another kind of file": lambda folder: (empty(folder / "run.json"), {}),
    "nothing of devices": lambda folder: (
        write(folder / FILE, marks(1, 2, 3), plane("/host:CPU", {"python": [event("sleep", 0, 9)]})),
        {},
    ),
    "one step in part": lambda folder: (write(folder / FILE, *gpu_planes(0, drop=LATE)), {"program": PROGRAM}),
    "another program": lambda folder: (
        write(folder / FILE, *gpu_planes(0, 150), marks(7, 8)),
        {"program": PROGRAM.replace("HloModule step", "HloModule eval")},
    ),
    "other steps": lambda folder: (write(folder / FILE, *gpu_planes(0, 150), marks(7, 8)), {"steps": [8, 9]}),
}
GOLDEN = GoldenTexts("trace_errors.txt", MISTAKES)


@pytest.mark.parametrize("name", MISTAKES)
def test_text(name, tmp_path):
    path, how = MISTAKES[name](tmp_path)
    with pytest.raises((RunError, ShardingError)) as caught:
        js.read_profile(path, **how)
    GOLDEN.check(name, f"{type(caught.value).__name__}: {caught.value}".replace(str(tmp_path), "FOLDER"))


def test_a_truncated_file(tmp_path):
    path = write(tmp_path / FILE, *gpu_planes(0))
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(RunError, match=f"{path.stat().st_size:,} bytes are not a profile, or only a part of one"):
        js.read_profile(path)


# ---- a real profile


@pytest.fixture(scope="module")
def profiled(tmp_path_factory):
    """Three steps of a small model on eight CPU devices, dispatched without waiting, and their program."""
    rngs = nnx.Rngs(0)
    tower = Tower([Residual(64, 128, rngs) for _ in range(2)])
    model = js.fully_shard(tower, units=Residual, mesh=js.mesh())
    optimizer = js.shard_optimizer(model, optax.sgd(1e-3))
    x = js.shard_batch(jnp.ones((64, 64)), js.mesh())
    step = js.train.TrainStep(mean_square, model, optimizer, x)
    jax.block_until_ready(step(x))
    folder = tmp_path_factory.mktemp("profile")
    with jax.profiler.trace(folder):
        for number in (11, 12, 13):
            with jax.profiler.StepTraceAnnotation("train", step_num=number):
                scalars = step(x)
        jax.block_until_ready((scalars, step.model_leaves))
    return folder, step.compiled


@pytest.mark.wide
def test_a_real_profile(profiled):
    """The four shares sum to the step; each collective of the program is there, as often as it runs, with its unit."""
    folder, compiled = profiled
    found = js.read_profile(folder, program=compiled)
    assert (found.platform, len(found.devices), [s.number for s in found.steps]) == ("cpu", 8, [11, 12, 13])
    for device in (d for step in found.steps for d in step.devices):
        shares = device.shares
        four = shares.computing_s, shares.communicating_s, shares.both_s, shares.idle_s
        assert min(four) >= 0
        assert shares.computing_s > 0
        assert sum(four) == pytest.approx(shares.step_s, rel=1e-12)
        exposed_s = sum(time.exposed_s for time in device.collectives)
        assert exposed_s == pytest.approx(shares.communicating_s, rel=1e-9)
        in_flight_s = [time.in_flight_s for time in device.collectives]
        assert max(in_flight_s) - 1e-12 <= shares.communicating_s + shares.both_s <= sum(in_flight_s) + 1e-12
    windows = js.audit(compiled).schedule.windows
    assert {row.name for row in found.by_instruction} == {w.name for w in windows}
    assert {(r.kind, r.unit, r.phase, r.runs) for r in found.by_instruction} == {
        (w.kind, w.unit, w.phase, w.executions) for w in windows
    }
    assert any(row.unit == "blocks/0..1" for row in found.by_unit)
    assert not any("another compilation" in note for note in found.notes)


def test_text_and_json_of_a_real_profile(profiled):
    folder, compiled = profiled
    found = js.read_profile(folder, program=compiled.as_text(), steps=range(12, 14))
    text = str(found)
    assert re.match(r"Measured: 2 steps \(12\.\.13\) of jit_step on 8 CPU devices, [\d.,]+ ms a step", text)
    assert "both: communication that is hidden" in text
    assert "blocks/0..1 backward" in text
    reported = json.loads(found.to_json())
    assert [step["number"] for step in reported["steps"]] == [12, 13]
    assert len(reported["steps"][0]["devices"]) == 8
    for whole in (reported["mean"], *reported["steps"], *reported["steps"][0]["devices"].values()):
        four = (whole[name] for name in ("computing_s", "communicating_s", "both_s", "idle_s"))
        assert sum(four) == pytest.approx(whole["step_s"], rel=1e-9)
    assert sum(row["exposed_s"] for row in reported["by_unit"]) == pytest.approx(
        reported["mean"]["communicating_s"], rel=1e-9
    )
