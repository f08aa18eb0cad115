"""The tuner: what it chooses by given times, what it keeps, when it refuses, and what it times."""

import dataclasses
import functools
import json
import os
import types
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

import jshard as js
from benchmarks.kernels.launches import launches
from jshard import _processes, cli
from jshard.cli import tune as tune_command
from jshard.kernels import Occupancy
from jshard.kernels.generation import AMPERE
from jshard.occupancy import COPY_ENGINE, footprint, gpu, measured
from jshard.occupancy.device import device_named
from jshard.occupancy.gpu_bench import GpuBench, load, load_shape, program_of
from jshard.occupancy.measured import Key, TuningEntry
from jshard.occupancy.products import MatrixProduct, by_shape, products_of
from jshard.occupancy.timings import MOST_SLOWER, Timing, latency_of, quickest
from jshard.occupancy.tune import TuneError, settings_for, tune
from jshard.occupancy.tuning_bench import ModelBench, measure
from tests.helpers import Config, abstract, loss_fn
from tests.occupancy.absent_gpu import lowered
from tests.wide import wide

H200 = gpu("h200")
HERE = dataclasses.replace(device_named("h200"), kind="NVIDIA H200")
RING = footprint("ring", gpu=H200)
A, B, C = Occupancy(reserved_sms=8), Occupancy(reserved_sms=16), Occupancy(persistent=False, smem_pad_bytes=2048)
CONFIG = Config(layers=2, width=256, hidden=1024, attends=False)
BATCH = 2 * (jax.ShapeDtypeStruct((16, 64), jnp.int32),)
HALF = js.MixedPrecision(param_dtype="bfloat16", reduce_dtype="float32")
GPT = str(Path(__file__).parents[2] / "models" / "gpt.py")


def timed(setting, alone_ns, both_ns):
    return Timing(setting=setting, alone_ns=alone_ns, both_ns=both_ns)


# Choosing.


def test_the_least_time_beside_the_load_wins():
    assert quickest([([timed(None, 100, 200), timed(A, 110, 150), timed(B, 90, 151)], 1)]) == timed(A, 110, 150)
    assert quickest([([timed(A, 100, 200), timed(None, 100, 200)], 1)]).setting is None  # of equals XLA's is kept


def test_what_is_too_slow_alone_is_dropped_however_well_it_overlaps():
    limit = round(100 * MOST_SLOWER)
    assert MOST_SLOWER == 1.15
    assert quickest([([timed(None, 100, 200), timed(A, limit, 120)], 1)]).setting == A
    dropped = [timed(None, 100, 200), timed(A, limit + 1, 120), timed(B, 100, 190)]
    assert quickest([(dropped, 1)]).setting == B and quickest([(dropped[:2], 1)]).setting is None


def test_one_setting_for_several_shapes_is_the_best_of_all_their_calls():
    first = [timed(None, 100, 300), timed(A, 100, 100), timed(B, 100, 200)]
    second = [timed(None, 100, 300), timed(A, 100, 290), timed(B, 100, 200)]
    assert quickest([(first, 1), (second, 1)]) == timed(A, 200, 390)
    assert quickest([(first, 1), (second, 10)]) == timed(B, 1100, 2200)
    assert quickest([([timed(None, 9, 9), timed(A, 9, 1)], 1), ([timed(None, 9, 9)], 1)]).setting is None
    longer = [timed(None, 200, 300), timed(A, 200, 201)]
    assert latency_of(A, [(first, 1), (second, 3)]) == 100
    assert latency_of(A, [(first, 1), (longer, 1)]) is None  # they differ too much


# The file.

KEY = Key(kernel="matmul", shape="8x8x8", dtype="bfloat16", device="NVIDIA H200", jax="0.10.2", footprint="ring")


def entry(both_ns=150):
    timings = (timed(None, 100, 200), timed(A, 100, both_ns))
    return TuningEntry(timings=timings, load_bytes=123, when="2026-11-22T00:00:00+00:00")


def test_what_is_stored_is_read_back_and_the_rest_stays(tmp_path):
    path = tmp_path / "a" / "tuning.json"
    other = dataclasses.replace(KEY, shape="16x8x8")
    assert measured.load(path) == {}
    measured.store(path, {KEY: entry()})
    measured.store(path, {other: entry(300)})
    measured.store(path, {KEY: entry(120)})
    assert measured.load(path) == {KEY: entry(120), other: entry(300)}
    assert os.listdir(path.parent) == ["tuning.json"]


BAD = {
    "empty": "",
    "a list": "[]",
    "another's": '{"format": "marlin", "entries": []}',
    "no times": json.dumps({"format": measured.FORMAT, "entries": [{"key": dataclasses.asdict(KEY)}]}),
    "without XLA's own": measured.text_of({KEY: TuningEntry(timings=(timed(A, 1, 1),), load_bytes=1)}),
    "a knob that no kernel has": measured.text_of({KEY: entry()}).replace('"tile_m": 256', '"tile_m": 7'),
}


@pytest.mark.parametrize("name", BAD)
def test_a_file_that_is_damaged_or_anothers_is_refused_and_left(tmp_path, name):
    path = tmp_path / "tuning.json"
    path.write_text(BAD[name])
    for do in (lambda: measured.load(path), lambda: measured.store(path, {KEY: entry()})):
        with pytest.raises(measured.CacheError, match="The file is not a readable record of measurements") as caught:
            do()
        assert caught.value.why and "--cache" in caught.value.do
    assert path.read_text() == BAD[name] and os.listdir(tmp_path) == ["tuning.json"]


def test_a_write_that_fails_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "tuning.json"
    measured.store(path, {KEY: entry()})
    before = path.read_text()

    def refuse(*_):
        raise OSError("no space left")

    monkeypatch.setattr(os, "replace", refuse)
    with pytest.raises(measured.CacheError, match="no space left"):
        measured.store(path, {KEY: entry(1)})
    assert path.read_text() == before and os.listdir(tmp_path) == ["tuning.json"]


# Measuring.


def test_settings_are_distinct_and_fit_the_product():
    found = settings_for(H200, RING, MatrixProduct(kernel="mlp", m=8192, n=4096, k=4096, dtype="bfloat16"))
    assert len(found) == len(set(found))
    assert any(one.reserved_sms == 16 for one in found) and any(one.smem_pad_bytes for one in found)
    small = settings_for(H200, RING, MatrixProduct(kernel="matmul", m=64, n=64, k=64, dtype="bfloat16"))
    assert all(one.tile_m <= 128 and one.tile_n == 64 for one in small) and len(small) < len(found)


@pytest.mark.parametrize("name", ["a100", "a40"])
def test_settings_of_ampere_are_of_its_own_forms_and_fit_the_gpu(name):
    facts = gpu(name)
    ring = footprint("ring", gpu=facts, version="2.30.7")
    settings = settings_for(facts, ring, MatrixProduct(kernel="mlp", m=8192, n=4096, k=4096, dtype="bfloat16"))
    assert {setting.reserved_sms for setting in settings if setting.persistent} == {0, 16}
    assert any(setting.smem_pad_bytes for setting in settings)
    for setting in settings:
        operands = setting.stages * setting.tile_k * (setting.tile_m + setting.tile_n)
        smem_bytes = 2 * (operands + setting.tile_m * setting.tile_n) + setting.smem_pad_bytes
        assert smem_bytes < facts.smem_per_block_bytes
        assert setting.tile_m * setting.tile_n <= AMPERE.most_sums


class FakeBench:
    """Times by setting: alone, and beside the load. `calls` says what was asked, in order."""

    def __init__(self, times, failing=()):
        self.times, self.failing, self.calls, self.noise = times, failing, [], iter(range(10**6))

    def prepare(self, setting):
        return "it does not fit" if setting in self.failing else ""

    def time_ns(self, setting, *, beside):
        self.calls.append((setting, beside))
        alone_ns, both_ns = self.times(setting)
        return (both_ns if beside else alone_ns) + (1000 if next(self.noise) % 7 == 0 else 0)


def times(setting):
    if setting is None:
        return 100_000, 200_000
    return (100_000, 120_000) if setting.reserved_sms == 16 else (105_000, 190_000)


def test_everything_is_timed_in_every_round_and_medians_are_kept():
    bench = FakeBench(times, failing=(C,))
    timings, failed = measure(bench, [A, C, B], rounds=5)
    assert timings == (timed(None, 100_000, 200_000), timed(A, 105_000, 190_000), timed(B, 100_000, 120_000))
    assert failed == [(C, "it does not fit")]
    assert bench.calls == [(setting, beside) for setting in (None, A, B) for beside in (False, True)] * 5


def test_by_the_model_room_for_the_collective_pays_and_few_tiles_need_none():
    product = MatrixProduct(kernel="matmul", m=8192, n=4096, k=4096, dtype="bfloat16")
    settings = settings_for(H200, RING, product)
    bench = ModelBench(H200, RING, product, 200_000, settings)
    reserved, whole = Occupancy(reserved_sms=16), Occupancy()
    assert bench.time_ns(reserved, beside=False) == bench.time_ns(reserved, beside=True)  # the load is hidden
    assert bench.time_ns(whole, beside=True) == bench.time_ns(whole, beside=False) + 200_000  # it waits
    assert bench.time_ns(reserved, beside=True) < bench.time_ns(None, beside=True)
    few = MatrixProduct(kernel="matmul", m=512, n=512, k=8192, dtype="bfloat16")
    bench = ModelBench(H200, RING, few, 200_000, settings_for(H200, RING, few))
    assert bench.time_ns(whole, beside=True) == max(bench.time_ns(whole, beside=False), 200_000)


def never(*_):
    raise AssertionError("nothing is measured here")


@pytest.fixture(scope="module")
def model():
    return abstract(CONFIG, js.mesh(fsdp=8, devices=8), mixed_precision=HALF)


def tuned(model, path, **settings):
    return tune(model, loss_fn, BATCH, **{"device": HERE, "comm": RING, "path": path} | settings)


def test_products_are_measured_once_and_kept(model, tmp_path):
    path, made, said = tmp_path / "tuning.json", [], []

    def bench(product, comm, load_bytes):
        made.append(product)
        return FakeBench(times)

    report = tuned(model, path, bench=bench, say=said.append)
    products = [p for p in by_shape(products_of(model, loss_fn, BATCH)) if p.dtype == "bfloat16"]
    assert made == products and len(said) == len(products) == 2
    assert {key.shape for key in measured.load(path)} == {product.shape for product in products}
    assert all((not row.timings) == (row.product.dtype == "float32") for row in report.rows)
    text = str(report)
    assert "chosen" in text and "0.60 x XLA's time" in text and "left to XLA: matmul" in text
    tuned(model, path, bench=never)
    tuned(model, path, bench=bench, again=True)
    assert len(made) == 4
    shaped = js.tune_overlap(model, device="h200", loss_fn=loss_fn, batch=BATCH, cache=path)
    assert shaped.occupancy["matmul"].latency_ns == 100_000 and shaped.occupancy["matmul"].reserved_sms == 16


def test_the_load_has_the_bytes_of_the_layers_collectives(model, tmp_path):
    report = tuned(model, tmp_path / "tuning.json", bench=lambda *_: FakeBench(times))
    plan = js.plan(model)
    traffic = js.explain(dataclasses.replace(plan, leaves=plan.unit_leaves("blocks/0"))).traffic
    rows = [row for row in report.rows if row.units.startswith("blocks")]
    # Each product of forward has two gradients, and each of the three calls its part of the load.
    moved = sum(3 * row.load_bytes * row.count for row in rows)
    assert moved == pytest.approx(CONFIG.layers * sum(one.wire_bytes for one in traffic), rel=1e-3)


def test_nothing_is_tuned_inside_a_trace(model, tmp_path):
    with pytest.raises(TuneError, match="Kernels cannot be tuned while a program is traced"):
        jax.jit(lambda x: tuned(model, tmp_path / "tuning.json", bench=never))(1.0)


def test_in_several_processes_the_first_one_measures_for_all(model, tmp_path, monkeypatch):
    reported = []

    def exchange(topic, value, **how):
        reported.append(value)
        return [reported[0], value]

    monkeypatch.setattr(_processes, "exchange", exchange)
    monkeypatch.setattr(_processes, "all_processes", lambda: _processes.ProcessGroup((0, 1)))
    first = tuned(model, tmp_path / "first.json", bench=lambda *_: FakeBench(times))
    monkeypatch.setattr(measured, "is_primary", lambda: False)
    second = tuned(model, tmp_path / "second.json", bench=never)
    assert [row.timings for row in second.rows] == [row.timings for row in first.rows]
    assert not (tmp_path / "second.json").exists() and len(reported) == 2


# The load.


@pytest.mark.parametrize("kind", ["ring", wide("symmetric")])
def test_the_load_is_like_the_collective(kind):
    comm = footprint(kind, gpu=H200, ctas=12)
    shape = load_shape(comm, 1 << 24)
    found = lowered(program_of(B, comm), *(jax.ShapeDtypeStruct(s, d) for s, d in _arrays(shape)))
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


# The command.

TINY = ["tune", GPT, "--set", "model.compute_dtype=bfloat16", "--set", "model.n_layer=1"]


def test_without_a_gpu_there_is_a_ranking_that_says_so(capsys, tmp_path):
    path = tmp_path / "tuning.json"
    assert cli.main([*TINY, "--cache", str(path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("no GPU here: nothing was measured. The following is an estimate")
    assert lines[1] == "NVIDIA H200, beside NCCL 2.32.3 ring, 16 blocks"
    assert sum("est. alone" in line for line in lines) == sum(line.startswith(" XLA's own ") for line in lines) == 5
    assert "run this on the GPU to measure." in lines[-1] and not path.exists()


def test_json_has_every_setting_of_the_gpu_that_is_named(capsys):
    assert cli.main([*TINY, "--gpu", "h100:4x8", "--footprint", "tree", "--nccl", "2.30.7", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["estimated"].startswith("--gpu h100:4x8: nothing was measured.")
    assert found["device"] == "NVIDIA H100 SXM" and found["comm"]["threads"] == 640 and len(found["rows"]) == 5
    for row in found["rows"]:
        assert len(row["timings"]) > 3 and row["load_bytes"] > 0 and row["load_ns"] > 0
        assert all(one["both_ns"] >= max(one["alone_ns"], int(row["load_ns"])) for one in row["timings"])


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (["--gpu", "b200"], "There is nothing to tune for this GPU."),
        (["--gpu", "h300"], "The device 'h300' is unknown."),
        (["--footprint", "circle"], "The footprint 'circle' is unknown."),
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
    assert said.out.startswith("NVIDIA H200, beside NCCL 2.32.3 ring, 16 blocks\n\nmatmul 512x768x192 bfloat16, x1 in")
    assert said.out.count(" chosen") == 5 and len(measured.load(path)) == 5
    assert said.err.count("measuring matmul ") == 5 and f"stored in {path}" in said.err
    assert cli.main([*TINY, "--cache", str(path), "--json"]) == 0
    again = capsys.readouterr()
    assert "measuring" not in again.err and all(row["timings"] for row in json.loads(again.out)["rows"])


def test_measurements_are_of_the_very_kind_of_device_that_is_here(monkeypatch):
    named = device_named("h200")
    assert named.is_of("NVIDIA H200") and named.is_of("NVIDIA H200 NVL")
    assert not named.is_of("NVIDIA H100 80GB HBM3") and not named.is_of("a thing")
    assert HERE.is_of("NVIDIA H200") and not HERE.is_of("NVIDIA H200 NVL")
    running = types.SimpleNamespace(platform="gpu", device_kind="NVIDIA H200")
    monkeypatch.setattr(jax, "devices", lambda: [running])
    assert device_named(None) == HERE
    running.device_kind = "NVIDIA H100 PCIe"  # fewer multiprocessors: of the model, nothing is known
    assert device_named(None).gpu is None and "are unknown" in device_named(None).why_unshaped
    running.device_kind = "AMD Instinct MI300X"
    assert device_named(None).facts is device_named("mi300x").facts  # its compiler options are found by them
    assert "not a Hopper or Ampere GPU (AMD Instinct MI300X)" in device_named(None).why_unshaped


@pytest.mark.gpu
def test_on_a_gpu_everything_is_timed():
    product = MatrixProduct(kernel="matmul", m=1024, n=1024, k=512, dtype="bfloat16")
    settings = settings_for(H200, RING, product)
    timings, failed = measure(GpuBench(product, RING, 1 << 20), [*settings], rounds=2)
    assert timings[0].setting is None and all(min(t.alone_ns, t.both_ns) > 0 for t in timings)
    assert len(timings) + len(failed) == 1 + len(settings)
    too_much = Occupancy(smem_pad_bytes=200_000)
    assert [setting for setting, _ in measure(GpuBench(product, COPY_ENGINE, 0), [too_much, A])[1]] == [too_much]
