"""`js.tune_overlap`: what is left to collectives, what the compiler and NCCL are given, and why."""

import ast
import dataclasses
import json
import pathlib

import jax
import jax.numpy as jnp
import pytest

import jshard as js
from jshard import _processes
from jshard.errors import RunError
from jshard.kernels import Occupancy
from jshard.occupancy import footprint, gpu, measured
from jshard.occupancy import overlap as module
from jshard.occupancy.measured import Key, TuningEntry
from jshard.occupancy.products import by_shape, products_in, products_of
from jshard.occupancy.step_times import PhaseTimes, best_reserve
from jshard.occupancy.timings import Timing
from tests.helpers import Config, abstract, loss_fn
from tests.occupancy.absent_gpu import H200 as H200_KIND
from tests.occupancy.absent_gpu import of, on

CONFIG = Config(layers=3, width=256, hidden=1024)
HALF = js.MixedPrecision(param_dtype="bfloat16", reduce_dtype="float32")
H200, NORMS, PRODUCTS = gpu("h200"), ("rms_norm", "layer_norm"), ("matmul", "mlp")
CHANNELS = "xla_gpu_nccl_collective_max_nchannels"
SYMMETRIC = "xla_gpu_experimental_enable_nccl_symmetric_buffers"
BATCH = 2 * (jax.ShapeDtypeStruct((16, 32), jnp.int32),)
TOKENS = 16 * 32 // 8
RING = footprint("ring", gpu=H200)


@pytest.fixture(autouse=True)
def cache_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path


@pytest.fixture(scope="module")
def model():
    return abstract(CONFIG, js.mesh(fsdp=8, devices=8), mixed_precision=HALF)


@pytest.fixture(scope="module")
def plan(model):
    return js.plan(model)


@pytest.fixture(scope="module")
def products(model):
    return products_of(model, loss_fn, BATCH)


def why(shaped, what):
    return next(reason for reason in shaped.reasons if reason.what == what)


def test_of_a_plan_alone_all_that_a_ring_fills_is_left(plan):
    shaped = js.tune_overlap(plan, device="h200")
    for name in PRODUCTS:
        assert shaped.occupancy[name] == Occupancy(reserved_sms=16) and why(shaped, name).origin == "model"
    for name in NORMS:
        assert shaped.occupancy[name] == Occupancy(persistent=False)
    assert set(shaped.backends.values()) == {"auto"}
    assert "The 16 blocks of a collective are an assumption" in str(shaped)
    assert "are an assumption" not in str(
        js.tune_overlap(plan, device="h200", comm=footprint("ring", gpu=H200, ctas=12))
    )
    assert shaped.compiler_options[CHANNELS] == 16 and shaped.environment == {} and shaped.exports == ()
    assert any("no measurement was used" in note for note in shaped.notes)
    assert (
        js.tune_overlap(plan, device="h200", loss_fn=loss_fn, batch=BATCH).notes == shaped.notes
    )  # a plan has no products


@pytest.mark.parametrize("comm", ["ring", "p2p", "symmetric", "copy-engine"])
def test_every_option_has_its_reason(plan, comm):
    shaped = js.tune_overlap(plan, device="h200", comm=comm)
    reported = {reason.what: reason.chosen for reason in shaped.reasons}
    settings = {**shaped.compiler_options, **shaped.environment}
    assert {name: reported[name] for name in settings} == {name: str(value) for name, value in settings.items()}
    assert reported.keys() == settings.keys() | shaped.occupancy.keys()
    assert (settings.get("xla_gpu_nccl_p2p_max_nchannels") == 16) == (comm == "p2p")
    assert (SYMMETRIC in settings) == (comm in ("symmetric", "copy-engine")) == ("illegal-memory" in str(shaped))


def test_copy_engines_are_left_nothing_and_it_says_so(plan):
    shaped = js.tune_overlap(plan, device="h200", comm="copy-engine")
    assert (
        not any(knobs.reserved_sms for knobs in shaped.occupancy.values()) and CHANNELS not in shaped.compiler_options
    )
    assert shaped.exports == ("export NCCL_CTA_POLICY=ZERO",) and "Reduce-scatters and all-reduces compute" in str(
        shaped
    )


def test_fewer_threads_are_a_line_for_the_shell_and_fill_fewer_multiprocessors(plan):
    shaped = js.tune_overlap(plan, device="h200", comm=footprint("ring", gpu=H200, version="2.28.9", nccl_nthreads=256))
    assert shaped.exports == ("export NCCL_NTHREADS=256",)
    assert shaped.occupancy["matmul"].reserved_sms == 8 and shaped.compiler_options[CHANNELS] == 16


@pytest.mark.parametrize(
    ("times", "least", "most"),
    [
        ((PhaseTimes(1.0, 0.01, 0), PhaseTimes(2.0, 0.02, 0)), 0, 1),  # hardly anything to hide
        ((PhaseTimes(1.0, 1.5, 0.1), PhaseTimes(2.0, 3.0, 0.1)), 16, 16),  # more than there is to hide behind
        ((PhaseTimes(1.0, 0.3, 0), PhaseTimes(2.0, 0.6, 0)), 3, 8),  # some of its blocks are enough
        ((PhaseTimes(1.0, 0, 1.0), PhaseTimes(2.0, 0, 1.0)), 0, 0),  # nothing can hide it
    ],
)
def test_no_more_is_left_than_pays(times, least, most):
    reserved, seconds = best_reserve(times, needed=16, sms=132)
    assert least <= reserved <= most and seconds[reserved] == min(seconds.values())


def test_with_the_loss_the_choice_is_an_estimate(model):
    shaped = js.tune_overlap(model, device="h200", loss_fn=loss_fn, batch=BATCH)
    reserved = shaped.occupancy["matmul"].reserved_sms
    assert why(shaped, "matmul").origin == "estimate" and why(shaped, "matmul").why.count(" us") >= 2
    assert shaped.compiler_options.get(CHANNELS, 0) == reserved <= 16  # one block on each
    slower = js.tune_overlap(model, device="h200:8x1", loss_fn=loss_fn, batch=BATCH)  # by the links of the cluster
    assert why(slower, "matmul").why != why(shaped, "matmul").why


# Products.


def test_products_are_those_of_one_device(products):
    found = {(p.m, p.n, p.k, p.dtype): sum(each.count for each in same) for p, same in by_shape(products).items()}
    wanted = lambda n, k, dtype="bfloat16": (TOKENS, n, k, dtype)
    head = {wanted(CONFIG.vocab, 256, "float32"): 1}  # the decoder embeds, and scores, in the table's own dtype
    assert found == {wanted(768, 256): 3, wanted(256, 256): 3, wanted(1024, 256): 3, wanted(256, 1024): 3} | head
    assert {p.unit for p in products} == {"(root)", "blocks/0", "blocks/1", "blocks/2"}
    assert {p.kernel for p in products} == {"matmul"}


def test_products_in_a_scan_count_for_every_layer(products):
    model = abstract(dataclasses.replace(CONFIG, scanned=True), js.mesh(fsdp=8, devices=8))
    found = products_of(model, loss_fn, BATCH)
    count = lambda each, shape: sum(p.count for p in each if p.shape == shape)
    assert all(count(found, p.shape) == count(products, p.shape) for p in products)
    assert {p.unit for p in found} == {unit.name for unit in js.plan(model).units}


def test_products_on_one_device_are_those_of_the_whole_batch(products):
    """Seen to fail where a region was known by its shard_map, which one device has none of: there were no products."""
    found = products_of(abstract(CONFIG, js.mesh(fsdp=1, devices=1)), loss_fn, BATCH)
    counts = lambda each, tokens: {(p.unit, p.m // tokens, p.n, p.k): p.count for p in each}
    assert counts(found, 8 * TOKENS) == counts(products, TOKENS)


@pytest.mark.parametrize("device", [H200_KIND, ("cpu", "cpu", None)], ids=["kernels", "plain"])
def test_products_of_kernels_are_those_of_their_plain_forms(device):
    """On a GPU the trace has kernels, which work on tiles."""

    def run(x, up, gate, down, w):
        return js.kernels.matmul(js.kernels.mlp(x, up, down, w_gate=gate, activation="silu"), w)

    with on(device):
        jaxpr = jax.make_jaxpr(run)(of(2, 50, 64), of(64, 100), of(64, 100), of(100, 64), of(64, 70)).jaxpr
    assert ("[mosaic]" in str(jaxpr.eqns[1].source_info.name_stack)) == (device == H200_KIND)
    found = sorted((p.kernel, p.shape) for p in products_in(jaxpr, in_region=True))
    assert found == [("matmul", "100x70x64"), *2 * [("mlp", "100x100x64")], ("mlp", "100x64x100")]


# Devices.


@pytest.mark.parametrize(("device", "comm"), [("b200", True), ("mi300x", False), ("v5p", False), (None, False)])
def test_where_the_kernels_do_not_run_nothing_is_left(plan, device, comm):
    shaped = js.tune_overlap(plan, device=device)
    assert not any(knobs.reserved_sms or knobs.smem_pad_bytes for knobs in shaped.occupancy.values())
    assert (shaped.comm is not None) == comm
    assert CHANNELS not in shaped.compiler_options and "not a Hopper or Ampere GPU" in why(shaped, "mlp").why
    assert shaped.occupancy.keys() == {*PRODUCTS, *NORMS}


@pytest.mark.parametrize("device", ["a100-80", "a40"])
def test_on_ampere_as_much_is_left_as_on_hopper_if_jax_compiles_the_kernels(plan, device, monkeypatch):
    monkeypatch.setattr("jshard._compat.COMPILES_FOR_AMPERE", True)
    shaped = js.tune_overlap(plan, device=device, nccl="2.30.7")
    assert {shaped.occupancy[name].reserved_sms for name in PRODUCTS} == {16}
    monkeypatch.setattr("jshard._compat.COMPILES_FOR_AMPERE", False)
    older = js.tune_overlap(plan, device=device, nccl="2.30.7")
    assert not any(knobs.reserved_sms for knobs in older.occupancy.values())
    assert "on Ampere GPUs the kernels need jax 0.12 or newer" in why(older, "mlp").why


def test_nothing_is_left_where_nothing_is_sent():
    shaped = js.tune_overlap(abstract(CONFIG, js.mesh(fsdp=1, devices=1)), device="h200")
    assert shaped.occupancy["matmul"].reserved_sms == 0 and "nothing is sent on this mesh" in str(shaped)


# Measurements.

BEST, OTHER = Occupancy(reserved_sms=8), Occupancy(persistent=False, tile_m=64, smem_pad_bytes=25_600)


def entry(product, *, best_ns=100, alone_ns=90, **other):
    timings = (
        Timing(setting=None, alone_ns=90, both_ns=200),
        Timing(setting=BEST, alone_ns=alone_ns, both_ns=best_ns),
        Timing(setting=OTHER, alone_ns=95, both_ns=best_ns + 50),
    )
    names = {"kernel": product.kernel, "shape": product.shape, "dtype": product.dtype, "device": "NVIDIA H200"}
    key = Key(**names | {"footprint": measured.footprint_text(RING)} | other)
    return {key: TuningEntry(timings=timings, load_bytes=1)}


@pytest.fixture
def shaped_with(model, products, tmp_path):
    """Makes a file of measurements, one for each shape, and shapes the step with it."""

    def shape(make, **settings):
        entries = [make(i, product) for i, product in enumerate(by_shape(products))]
        path = tmp_path / "measured.json"
        measured.store(path, {key: value for each in entries for key, value in each.items()})
        return js.tune_overlap(model, device="h200", loss_fn=loss_fn, batch=BATCH, cache=path, **settings)

    return shape


def test_what_was_measured_counts_for_more_than_the_model(shaped_with):
    shaped = shaped_with(lambda i, product: entry(product))
    assert shaped.occupancy["matmul"] == dataclasses.replace(BEST, latency_ns=90)
    assert why(shaped, "matmul").origin == "measured" and why(shaped, "matmul").why.startswith("4 of 4 shapes measured")
    assert shaped.compiler_options[CHANNELS] == 16  # as beside the load, though 8 multiprocessors are left
    assert why(shaped, "mlp").origin == "estimate"
    other = shaped_with(lambda i, product: entry(product), comm="tree")
    assert why(other, "matmul").origin == "estimate"


@pytest.mark.parametrize("key", [{"device": "NVIDIA H100 80GB HBM3"}, {"jax": "0"}], ids=str)
def test_measurements_of_something_else_are_not_used(shaped_with, key):
    assert why(shaped_with(lambda i, product: entry(product, **key)), "matmul").origin == "estimate"


def test_where_xla_was_quicker_the_kernel_is_not_used(shaped_with):
    shaped = shaped_with(lambda i, product: {} if i else entry(product, best_ns=300))
    assert shaped.backends["matmul"] == "xla" and shaped.backends["mlp"] == "auto"
    assert "1 of 4 shapes measured" in str(shaped)


def test_one_time_is_stated_only_where_all_calls_take_about_as_long(shaped_with):
    shaped = shaped_with(lambda i, product: entry(product, alone_ns=90 - 30 * (i % 2)))
    assert shaped.occupancy["matmul"] == BEST and "the scheduler gets estimates" in why(shaped, "matmul").why


def test_a_file_of_the_user_that_cannot_be_read_is_named_once_and_left(plan, cache_folder):
    path = measured.default_path()
    assert path == cache_folder / "jshard" / "tuning.json"
    path.parent.mkdir()
    path.write_text('{"format": "other"}')
    with pytest.warns(UserWarning, match="were not used: its format is 'other'") as caught:
        shaped = js.tune_overlap(plan, device="h200")
    assert len(caught) == 1 and "were not used" in shaped.notes[0] and "other" in path.read_text()
    with pytest.raises(measured.CacheError, match="not a readable record of measurements"):
        js.tune_overlap(plan, device="h200", cache=path)


def test_in_several_processes_the_first_ones_measurements_count(model, products, tmp_path, monkeypatch):
    entries = {key: each for product in by_shape(products) for key, each in entry(product).items()}
    heard = [[None, measured.text_of(entries)], [None, ""]]
    monkeypatch.setattr(measured, "is_primary", lambda: False)
    monkeypatch.setattr(_processes, "exchange", lambda topic, value, **how: heard)
    monkeypatch.setattr(_processes, "all_processes", lambda: _processes.ProcessGroup((0, 1)))
    how = {"device": "h200", "loss_fn": loss_fn, "batch": BATCH, "cache": tmp_path / "no such file"}
    assert js.tune_overlap(model, **how).occupancy["matmul"].latency_ns == 90
    failure = {"kind": "CacheError", "is_request": True, "what": "bad", "why": "", "where": [], "do": ""}
    heard[0] = [failure, ""]
    with pytest.raises(RunError, match="CacheError: bad"):
        js.tune_overlap(model, **how)


def test_it_prints_itself_and_is_json(model):
    shaped = js.tune_overlap(model, device="h200", loss_fn=loss_fn, batch=BATCH)
    text = str(shaped)
    assert text.startswith("NVIDIA H200, beside NCCL 2.32.3 ring: 16 blocks of 544 threads x 96 registers, 120,064 B\n")
    assert "jshard tune" in text and repr(shaped) == text and max(map(len, text.splitlines())) <= 110
    found = json.loads(shaped.to_json())
    assert found["occupancy"]["matmul"]["persistent"] and found["compiler_options"] == dict(shaped.compiler_options)
    assert {reason["origin"] for reason in found["reasons"]} <= {"fact", "model", "estimate", "measured"}


def test_nothing_slow_is_imported_with_it():
    for path in pathlib.Path(module.__file__).parent.glob("*.py"):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.Import | ast.ImportFrom):
                assert "pallas" not in ast.unparse(node) and "kernels.mosaic" not in ast.unparse(node), path
