"""The tuner: what it chooses by given times, what it keeps, when it refuses, and what it says without a GPU."""

import dataclasses
import functools
import json
import os
import statistics
import types
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractDevice, AbstractMesh

import jshard as js
from benchmarks.kernels.launches import launches
from jshard import _processes, cli
from jshard.cli import tune as tune_command
from jshard.errors import RunError
from jshard.kernels import Occupancy
from jshard.occupancy import COPY_ENGINE, cache, footprint, gpu
from jshard.occupancy import measure as measuring
from jshard.occupancy.candidates import MOST_SLOWER, Timing, candidates, choose, together
from jshard.occupancy.device import device_named
from jshard.occupancy.measure import GpuBench, load, load_shape, measure, program_of
from jshard.occupancy.products import MatrixProduct, by_shape, products_of
from jshard.occupancy.shape import overlap
from jshard.occupancy.tune import NOT_MEASURED, TuneError, key_of, rank, tune
from tests.helpers import Config, abstract, loss_fn
from tests.wide import wide

H200 = gpu("h200")
HERE = dataclasses.replace(device_named("h200"), kind="NVIDIA H200")
RING = footprint("ring", gpu=H200)
A, B, C = Occupancy(reserved_sms=8), Occupancy(reserved_sms=16), Occupancy(persistent=False, smem_pad_bytes=2048)
CONFIG = Config(layers=2, width=256, hidden=1024, attends=False)
BATCH = 2 * (jax.ShapeDtypeStruct((16, 64), jnp.int32),)
HALF = js.MixedPrecision(param="bfloat16", reduce="float32")
GPT = str(Path(__file__).parents[2] / "models" / "gpt.py")


def timed(setting, alone_ns, both_ns):
    return Timing(setting=setting, alone_ns=alone_ns, both_ns=both_ns)


# ---- choosing ----------------------------------------------------------------------------------------------------


def test_the_least_time_beside_the_load_wins():
    choice = choose([timed(None, 100, 200), timed(A, 110, 150), timed(B, 90, 151), timed(C, 100, 190)])
    assert choice.setting == dataclasses.replace(A, latency_ns=110)
    assert (choice.both_ns, choice.plain_both_ns) == (150, 200)
    assert choice.why == "0.75 x XLA's time beside the load, 1.10 x alone"
    assert choose([timed(A, 100, 200), timed(None, 100, 200)]).setting is None  # of equals XLA's is kept


def test_what_is_too_slow_alone_is_dropped_however_well_it_overlaps():
    limit = round(100 * MOST_SLOWER)
    assert MOST_SLOWER == 1.15
    kept = choose([timed(None, 100, 200), timed(A, limit, 120)])
    assert kept.setting == dataclasses.replace(A, latency_ns=limit)
    dropped = choose([timed(None, 100, 200), timed(A, limit + 1, 120), timed(B, 100, 190)])
    assert dropped.setting == dataclasses.replace(B, latency_ns=100)
    assert dropped.why.endswith("; 1 dropped, over 1.15 x XLA's alone")
    none_left = choose([timed(None, 100, 200), timed(A, limit + 1, 120)])
    assert none_left.setting is None and none_left.both_ns == 200
    assert none_left.why.startswith("nothing was quicker beside the load than XLA's own")


@pytest.mark.parametrize("timings", [[timed(A, 1, 1)], [timed(None, 0, 5)], [timed(None, 5, 5), timed(A, -1, 3)]])
def test_measurements_that_say_nothing_are_refused(timings):
    with pytest.raises(RunError, match="The measurements say nothing"):
        choose(timings)


def test_one_setting_for_several_shapes_is_the_best_of_all_their_calls():
    first = [timed(None, 100, 300), timed(A, 100, 100), timed(B, 100, 200)]
    second = [timed(None, 100, 300), timed(A, 100, 290), timed(B, 100, 200)]
    one = together({"first": (first, 1), "second": (second, 1)})
    assert one is not None and one.setting == dataclasses.replace(A, latency_ns=100) and one.both_ns == 390
    many = together({"first": (first, 1), "second": (second, 10)})
    assert many is not None and many.setting == dataclasses.replace(B, latency_ns=100) and many.both_ns == 2200
    longer = [timed(None, 200, 300), timed(A, 200, 201), timed(B, 200, 250)]
    mixed = together({"first": (first, 1), "second": (longer, 1)})
    assert mixed is not None and mixed.setting == A  # no time of a call: they differ too much
    elsewhere = together({"first": ([timed(None, 9, 9), timed(A, 9, 1)], 1), "second": ([timed(None, 9, 9)], 1)})
    assert elsewhere is not None and elsewhere.setting is None
    assert together({}) is None


# ---- the file ----------------------------------------------------------------------------------------------------

KEY = cache.Key(kernel="matmul", shape="8x8x8", dtype="bfloat16", device="NVIDIA H200", jax="0.10.2", footprint="ring")


def entry(both_ns=150):
    timings = (timed(None, 100, 200), timed(A, 100, both_ns))
    return cache.TuningEntry(choice=choose(timings), timings=timings, load_bytes=123, when="2026-11-22T00:00:00+00:00")


def test_what_is_stored_is_read_back_and_the_rest_stays(tmp_path):
    path = tmp_path / "a" / "tuning.json"
    other = dataclasses.replace(KEY, shape="16x8x8")
    assert cache.load(path) == {}
    cache.store(path, {KEY: entry()})
    cache.store(path, {other: entry(300)})
    assert cache.load(path) == {KEY: entry(), other: entry(300)}
    cache.store(path, {KEY: entry(120)})
    assert cache.load(path)[KEY].choice.both_ns == 120 and len(cache.load(path)) == 2
    assert os.listdir(path.parent) == ["tuning.json"]


BAD = {
    "empty": "",
    "half": '{"format": "jshard tuning 1", "entries": [{"key"',
    "a list": "[]",
    "another's": '{"format": "marlin", "entries": []}',
    "of a later version": '{"format": "jshard tuning 2", "entries": []}',
    "an entry without a choice": json.dumps({"format": cache.FORMAT, "entries": [{"key": dataclasses.asdict(KEY)}]}),
    "a knob that no kernel has": cache.text_of({KEY: entry()}).replace('"tile_m": 256', '"tile_m": 7'),
    "a key of other fields": json.dumps({"format": cache.FORMAT, "entries": [{"key": {"x": 1}}]}),
}


@pytest.mark.parametrize("name", BAD)
def test_a_file_that_is_damaged_or_anothers_is_refused_and_left(tmp_path, name):
    path = tmp_path / "tuning.json"
    path.write_text(BAD[name])
    for do in (lambda: cache.load(path), lambda: cache.store(path, {KEY: entry()})):
        with pytest.raises(cache.CacheError) as caught:
            do()
        assert str(caught.value).startswith("The file is no record of measurements that can be read.\n  where: ")
        assert caught.value.why and "--cache" in caught.value.do
    assert path.read_text() == BAD[name] and os.listdir(tmp_path) == ["tuning.json"]


def test_a_write_that_fails_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "tuning.json"
    cache.store(path, {KEY: entry()})
    before = path.read_text()

    def refuse(*_):
        raise OSError("no space left")

    monkeypatch.setattr(os, "replace", refuse)
    with pytest.raises(cache.CacheError, match="no space left"):
        cache.store(path, {KEY: entry(1)})
    assert path.read_text() == before and os.listdir(tmp_path) == ["tuning.json"]


def test_the_folder_is_where_the_system_has_such_things(monkeypatch, tmp_path):
    monkeypatch.setattr("sys.platform", "linux")
    monkeypatch.setattr(Path, "home", lambda: Path("/h"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache.default_path() == tmp_path / "jshard" / "tuning.json"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert cache.default_path() == Path("/h/.cache/jshard/tuning.json")
    monkeypatch.setattr("sys.platform", "darwin")
    assert cache.default_path() == Path("/h/Library/Caches/jshard/tuning.json")
    monkeypatch.setattr("sys.platform", "win32")
    monkeypatch.setenv("LOCALAPPDATA", str(tmp_path))
    assert cache.default_path() == tmp_path / "jshard" / "tuning.json"


# ---- candidates --------------------------------------------------------------------------------------------------


def test_candidates_are_distinct_and_can_run():
    found = candidates(H200, RING, m=8192, n=4096, k=4096, load_ns=50_000)
    settings = [one.setting for one in found]
    assert len(settings) == len(set(settings)) and settings.count(None) == 1
    assert any(setting and setting.reserved_sms == 16 for setting in settings)
    assert any(setting and setting.smem_pad_bytes for setting in settings)
    assert [one.both_ns for one in found] == sorted(one.both_ns for one in found)
    assert all(one.both_ns >= max(one.alone_ns, 50_000) for one in found)
    small = [one.setting for one in candidates(H200, RING, m=64, n=64, k=64, load_ns=1) if one.setting]
    assert all(setting.tile_m <= 128 and setting.tile_n == 64 for setting in small) and len(small) < len(found)


def test_so_few_tiles_that_multiprocessors_are_left_make_nobody_wait():
    found = candidates(H200, RING, m=512, n=512, k=8192, load_ns=40_000)
    persistent = next(one for one in found if one.setting and one.setting == Occupancy())
    assert persistent.both_ns == max(persistent.alone_ns, 40_000)


# ---- measuring ---------------------------------------------------------------------------------------------------


class FakeBench:
    """Times by setting: alone, and beside the load. `calls` says what was asked, in order."""

    def __init__(self, times, failing=()):
        self.times, self.failing, self.calls, self.noise = times, failing, [], iter(range(10**6))

    def prepare(self, setting):
        self.calls.append(("prepare", setting))
        return "it does not fit" if setting in self.failing else ""

    def time_ns(self, setting, *, beside):
        self.calls.append((setting, beside))
        alone_ns, both_ns = self.times(setting) if callable(self.times) else self.times[setting]
        return (both_ns if beside else alone_ns) + (1000 if next(self.noise) % 7 == 0 else 0)


def test_everything_is_timed_in_every_round_and_medians_are_kept():
    bench = FakeBench({None: (100, 300), A: (110, 200), B: (105, 250)}, failing=(C,))
    found = measure(bench, [A, None, C, B], rounds=5)
    assert found.timings == (timed(None, 100, 300), timed(A, 110, 200), timed(B, 105, 250))
    assert found.failed == ((C, "it does not fit"),)
    prepared = [setting for what, setting in bench.calls if what == "prepare"]
    assert prepared == [None, A, C, B]
    rounds = [call for call in bench.calls if call[0] != "prepare"]
    assert rounds == [(setting, beside) for setting in (None, A, B) for beside in (False, True)] * 5
    assert statistics.median([1, 2, 1000]) == 2  # of five times one or two are off by 1000


def never(*_):
    raise AssertionError("nothing is measured here")


@pytest.fixture(scope="module")
def model():
    return abstract(CONFIG, js.mesh(fsdp=8, devices=8), mixed_precision=HALF)


def asked(path, **settings):
    return {"device": HERE, "comm": RING, "path": path} | settings


def times(setting):
    if setting is None:
        return 100_000, 200_000
    return (100_000, 120_000) if setting.reserved_sms == 16 else (105_000, 190_000)


def test_products_are_measured_once_and_kept(model, tmp_path):
    path, made, said = tmp_path / "tuning.json", [], []

    def bench(product, comm, load_bytes):
        made.append((product, load_bytes))
        return FakeBench(times)

    report = tune(model, loss_fn, BATCH, bench=bench, say=said.append, **asked(path))
    products = [p for p in by_shape(products_of(model, loss_fn, BATCH)) if p.dtype == "bfloat16"]
    assert [product for product, _ in made] == products and len(said) == len(products) == 2
    assert cache.load(path).keys() == {key_of(product, HERE, RING) for product in products}
    for row in report.rows:
        assert (row.measured is None) == (row.product.dtype == "float32") == bool(row.left_to_xla)
        if row.measured is not None:
            assert row.measured.choice.setting is not None and row.measured.choice.setting.latency_ns == 100_000
    text = str(report)
    assert "chosen" in text and "0.60 x XLA's time" in text and "left to XLA: matmul" in text and "est.:" not in text
    tune(model, loss_fn, BATCH, bench=bench, **asked(path))
    assert len(made) == 2
    tune(model, loss_fn, BATCH, bench=bench, again=True, **asked(path))
    assert len(made) == 4
    shaped = overlap(model, device="h200", loss=loss_fn, batch=BATCH, cache=path)
    assert shaped.occupancy["matmul"].latency_ns == 100_000 and shaped.occupancy["matmul"].reserved_sms == 16


def test_the_load_has_the_bytes_of_the_layers_collectives(model):
    report = rank(model, loss_fn, BATCH, device=HERE, comm=RING)
    plan = js.plan(model)
    traffic = js.explain(dataclasses.replace(plan, leaves=plan.unit_leaves("blocks/0"))).traffic
    rows = [row for row in report.rows if row.units.startswith("blocks")]
    # Each product of forward has two gradients, and each of the three calls its part of the load.
    moved = sum(3 * row.load_bytes * row.count for row in rows)
    assert moved == pytest.approx(CONFIG.layers * sum(one.wire_bytes for one in traffic), rel=1e-3)
    assert all(row.load_ns > 0 for row in rows)


def test_nothing_is_tuned_inside_a_trace(model, tmp_path):
    def run(x):
        tune(model, loss_fn, BATCH, bench=never, **asked(tmp_path / "tuning.json"))
        return x

    for transformed in (jax.jit(run), jax.grad(lambda x: jax.jit(run)(x))):
        with pytest.raises(TuneError) as caught:
            transformed(1.0)
    assert str(caught.value).startswith(
        "Kernels cannot be tuned while a program is traced.\n  where: tune(...) inside of"
    )
    assert "nothing can be timed" in caught.value.why and caught.value.do.startswith("tune before: jshard tune MODEL;")
    assert not (tmp_path / "tuning.json").exists()


def broken(*_):
    raise RuntimeError("the GPU fell off the bus\nand more")


def test_in_several_processes_the_first_one_measures_for_all_or_all_fail(model, tmp_path, monkeypatch):
    reported = []

    def exchange(topic, value, timeout_s):
        reported.append(value)
        return [reported[0], value]

    monkeypatch.setattr(_processes, "exchange", exchange)
    first = tune(model, loss_fn, BATCH, bench=lambda *_: FakeBench(times), **asked(tmp_path / "first.json"))
    monkeypatch.setattr(cache, "is_primary", lambda: False)
    second = tune(model, loss_fn, BATCH, bench=never, **asked(tmp_path / "second.json"))
    assert [row.measured for row in second.rows] == [row.measured for row in first.rows]
    assert not (tmp_path / "second.json").exists() and len(reported) == 2
    reported.clear()
    for is_first, failure in ((True, RuntimeError), (False, RunError)):
        monkeypatch.setattr(cache, "is_primary", lambda is_first=is_first: is_first)
        with pytest.raises(failure, match="the GPU fell off the bus"):
            tune(model, loss_fn, BATCH, bench=broken, **asked(tmp_path / "a.json"))


# ---- the load ----------------------------------------------------------------------------------------------------


def on_h200(function, *arrays):
    mesh = AbstractMesh((), (), abstract_device=AbstractDevice("NVIDIA H200", 132, "gpu"))
    with jax.sharding.use_abstract_mesh(mesh):
        return jax.jit(function).trace(*arrays).lower(lowering_platforms=("cuda",))


@pytest.mark.parametrize("kind", ["ring", wide("tree"), wide("symmetric")])
def test_the_load_is_like_the_collective(kind):
    comm = footprint(kind, gpu=H200, ctas=12)
    shape = load_shape(comm, 1 << 24)
    found = on_h200(program_of(B, comm), *(jax.ShapeDtypeStruct(s, d) for s, d in _arrays(shape)))
    (launch,) = (each for each in launches(found) if each.name.startswith("jshard_tuning_load"))
    assert launch.num_blocks == 12
    assert 0 <= launch.threads - comm.threads < 128
    assert abs(launch.smem_bytes - comm.smem_bytes) <= 2048 and launch.smem_bytes <= max(comm.smem_bytes, 1024)
    moved = 4 * shape[0] * shape[1] * shape[2] * shape[3]
    assert 1 << 24 <= moved < (1 << 24) + 4 * shape[0] * shape[1] * shape[3]
    assert '_xla_stream_annotation = "1"' in found.as_text() and len(launches(found)) == 4


def _arrays(shape):
    return ((512, 256), jnp.bfloat16), ((256, 512), jnp.bfloat16), (shape, jnp.float32)


def test_the_load_copies_every_element():
    comm = dataclasses.replace(RING, ctas=2, threads=256, registers=24, smem_bytes=2048)
    shape = load_shape(comm, 2 * 2 * 2 * 128 * 8 * 4)
    assert shape == (2, 2, 2, 1024)
    x = jax.random.normal(jax.random.key(0), shape)
    with jax.default_device(jax.devices()[0]):
        assert (load(x, jnp.zeros(8), comm, interpret=True) == x).all()


# ---- the command -------------------------------------------------------------------------------------------------

TINY = ["tune", GPT, "--set", "model.compute_dtype=bfloat16", "--set", "model.n_layer=1"]


def test_without_a_gpu_there_is_a_ranking_that_says_so(capsys, tmp_path):
    path = tmp_path / "tuning.json"
    assert cli.main([*TINY, "--cache", str(path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert (
        lines[0]
        == NOT_MEASURED
        == ("no GPU here: nothing was measured. What follows is an estimate, by the model of occupancy.")
    )
    assert lines[1] == "NVIDIA H200, beside NCCL 2.32.3 ring, 16 blocks"
    heads = [line for line in lines if line.startswith("matmul ")]
    assert len(heads) == 5 and heads[0].startswith("matmul 512x768x192 bfloat16, x1 in blocks/0, beside ")
    assert any("est. alone" in line and "est. beside" in line for line in lines)
    assert sum(line.startswith(" XLA's own ") for line in lines) == 5
    assert "run this on the GPU to know." in lines[-1] and not path.exists()


def test_json_has_every_setting(capsys):
    assert cli.main([*TINY, "--gpu", "h100:4x8", "--footprint", "tree", "--nccl", "2.30.7", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["headline"].startswith("--gpu h100:4x8: nothing was measured.")
    assert found["device"] == "NVIDIA H100 SXM" and found["footprint"]["threads"] == 640
    assert len(found["products"]) == 5
    for product in found["products"]:
        assert product["measured"] is None and len(product["ranked"]) > 3 and product["load_bytes"] > 0


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (["--gpu", "a100-80"], "There is nothing to tune for this GPU."),
        (["--gpu", "h300"], "There is no device 'h300'."),
        (["--footprint", "circle"], "There is no footprint 'circle'."),
        (["--ctas", "99"], "The collective cannot be."),
        (["--mesh", "fsdp=5"], "does not split"),
    ],
)
def test_what_it_cannot_do_it_says(options, text, capsys):
    assert cli.main([*TINY, *options]) == 2
    said = capsys.readouterr().err
    assert text in said and all(f"  {part}" in said for part in ("where:", "why:", "do:"))


def test_on_a_gpu_products_are_measured_and_kept(monkeypatch, capsys, tmp_path):
    path = tmp_path / "tuning.json"
    monkeypatch.setattr(tune_command, "device_named", lambda name: HERE)
    monkeypatch.setattr(tune_command, "tune", functools.partial(tune, bench=lambda *_: FakeBench(times)))
    assert cli.main([*TINY, "--cache", str(path)]) == 0
    said = capsys.readouterr()
    assert said.out.startswith("NVIDIA H200, beside NCCL 2.32.3 ring, 16 blocks\n\nmatmul 512x768x192 bfloat16")
    assert said.out.count(" chosen") == 5 and "measured" not in said.out.splitlines()[0]
    assert said.err.count("measuring matmul ") == 5 and f"kept in {path}" in said.err
    assert len(cache.load(path)) == 5
    assert cli.main([*TINY, "--cache", str(path), "--json"]) == 0
    again = capsys.readouterr()
    assert "measuring" not in again.err and all(p["measured"] for p in json.loads(again.out)["products"])


def test_measurements_are_of_the_very_kind_of_device_that_is_here(monkeypatch):
    named = device_named("h200")
    assert named.is_of("NVIDIA H200") and named.is_of("NVIDIA H200 NVL")
    assert not named.is_of("NVIDIA H100 80GB HBM3") and not named.is_of("a thing")
    assert HERE.is_of("NVIDIA H200") and not HERE.is_of("NVIDIA H200 NVL")
    running = types.SimpleNamespace(platform="gpu", device_kind="NVIDIA H200")
    monkeypatch.setattr(jax, "devices", lambda: [running])
    assert device_named(None) == HERE
    running.device_kind = "NVIDIA H100 PCIe"  # fewer multiprocessors: of the model, nothing is known
    assert device_named(None).gpu is None and "are not known" in device_named(None).why_unshaped


@pytest.mark.gpu
def test_on_a_gpu_everything_is_timed(tmp_path):
    product = MatrixProduct(kernel="matmul", m=1024, n=1024, k=512, dtype="bfloat16")
    settings = [one.setting for one in candidates(H200, RING, m=1024, n=1024, k=512, load_ns=10_000)]
    found = measure(GpuBench(product, RING, 1 << 20), settings, rounds=2)
    assert found.timings[0].setting is None and all(min(t.alone_ns, t.both_ns) > 0 for t in found.timings)
    assert len(found.timings) + len(found.failed) == len(settings)
    assert choose(found.timings).both_ns > 0


@pytest.mark.gpu
def test_on_a_gpu_a_kernel_that_does_not_fit_is_left_out():
    product = MatrixProduct(kernel="matmul", m=512, n=512, k=512, dtype="bfloat16")
    too_much = Occupancy(smem_pad_bytes=200_000)
    found = measure(GpuBench(product, COPY_ENGINE, 0), [too_much, A], rounds=1)
    assert [setting for setting, _ in found.failed] == [too_much] and measuring.ROUNDS > 1
