"""`js.overlap`: what is left to collectives, what the compiler and NCCL are reported, and what each choice rests on."""

import ast
import dataclasses
import json
import pathlib

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractDevice, AbstractMesh

import jshard as js
from jshard import _compat, _processes
from jshard.errors import RunError
from jshard.kernels import Occupancy
from jshard.occupancy import cache, footprint, gpu
from jshard.occupancy import shape as shaping
from jshard.occupancy.candidates import Timing, choose
from jshard.occupancy.products import _walk, by_shape, products_of
from jshard.occupancy.result import UnitTimes, best_reserve
from jshard.occupancy.shape import overlap
from tests.helpers import Config, abstract, loss_fn

CONFIG = Config(layers=3, width=256, hidden=1024)
HALF = js.MixedPrecision(param="bfloat16", reduce="float32")
H200, NORMS, PRODUCTS = gpu("h200"), ("rms_norm", "layer_norm"), ("matmul", "mlp")
CHANNELS = "xla_gpu_nccl_collective_max_nchannels"
SYMMETRIC = "xla_gpu_experimental_enable_nccl_symmetric_buffers"
BATCH = 2 * (jax.ShapeDtypeStruct((16, 32), jnp.int32),)
TOKENS = 16 * 32 // 8


@pytest.fixture(autouse=True)
def cache_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr("sys.platform", "linux")
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


def test_of_a_plan_alone_all_that_a_ring_fills_is_left(plan):
    shaped = overlap(plan, device="h200")
    for name in PRODUCTS:
        assert shaped.occupancy[name] == Occupancy(reserved_sms=16)
    for name in NORMS:
        assert not shaped.occupancy[name].persistent
    assert {reason.origin for reason in shaped.reasons if reason.what in PRODUCTS} == {"model"}
    assert set(shaped.backends.values()) == {"auto"}
    assert "That a collective has 16 blocks is an assumption" in str(shaped)
    assert "is an assumption" not in str(overlap(plan, device="h200", comm=footprint("ring", gpu=H200, ctas=12)))
    assert shaped.compiler_options[CHANNELS] == 16 and shaped.environment == {} and shaped.exports == ()
    assert any("nothing measured was used" in note for note in shaped.notes)
    assert overlap(plan, device="h200", loss=loss_fn, batch=BATCH).notes == shaped.notes  # a plan has no products


@pytest.mark.parametrize("comm", ["ring", "tree", "nvls", "pat", "p2p", "symmetric", "copy-engine"])
def test_every_option_has_its_reason(plan, comm):
    shaped = overlap(plan, device="h200", comm=comm)
    reported = {reason.what: reason.chosen for reason in shaped.reasons}
    settings = {**shaped.compiler_options, **shaped.environment}
    assert {name: reported[name] for name in settings} == {name: str(value) for name, value in settings.items()}
    assert reported.keys() == settings.keys() | shaped.occupancy.keys()
    assert all(0 <= knobs.reserved_sms < H200.num_sms for knobs in shaped.occupancy.values())


def test_what_each_kind_of_collective_needs(plan):
    tree = overlap(plan, device="h200", comm="tree")
    assert tree.comm is not None and tree.comm.threads == 640 and tree.occupancy["mlp"].reserved_sms == 16
    symmetric = overlap(plan, device="h200", comm="symmetric")
    assert symmetric.compiler_options[SYMMETRIC] is True and "illegal-memory errors" in symmetric.notes[-1]
    sends = overlap(plan, device="h200", comm="p2p").compiler_options
    assert sends["xla_gpu_nccl_p2p_max_nchannels"] == 16 and CHANNELS not in sends
    assert SYMMETRIC not in sends


def test_copy_engines_are_left_nothing_and_it_says_so(plan):
    shaped = overlap(plan, device="h200", comm="copy-engine")
    assert not any(knobs.reserved_sms or knobs.smem_pad_bytes for knobs in shaped.occupancy.values())
    assert shaped.exports == ("export NCCL_CTA_POLICY=ZERO",)
    assert shaped.compiler_options[SYMMETRIC] is True and CHANNELS not in shaped.compiler_options
    text = str(shaped)
    assert "nothing is to be left to them" in text and "Reduce-scatters and all-reduces compute" in text


def test_fewer_threads_are_a_line_for_the_shell_and_fill_fewer_multiprocessors(plan):
    shaped = overlap(plan, device="h200", comm=footprint("ring", gpu=H200, version="2.28.9", nccl_nthreads=256))
    assert shaped.exports == ("export NCCL_NTHREADS=256",)
    assert shaped.occupancy["matmul"].reserved_sms == 8 and shaped.compiler_options[CHANNELS] == 16
    assert "Not chosen, as nobody measured it: with NCCL_NTHREADS=256" in str(
        overlap(plan, device="h200", nccl="2.28.9")
    )
    # Of a newer one shared memory is the limit: two blocks do not fit, however few threads they have.
    assert "NCCL_NTHREADS" not in str(overlap(plan, device="h200", nccl="2.30.7"))


def test_norms_are_padded_only_where_more_than_half_of_their_blocks_are_left(plan, monkeypatch):
    shaped = overlap(plan, device="h200")
    reasons = {reason.what: reason.why for reason in shaped.reasons}
    assert shaped.occupancy["rms_norm"].smem_pad_bytes == 0
    assert "it would lose more time than a collective waits" in reasons["rms_norm"]
    kernels = tuple(dataclasses.replace(kernel, registers=32) for kernel in shaping.shipped_kernels(H200))
    monkeypatch.setattr(shaping, "shipped_kernels", lambda gpu: kernels)
    best = dataclasses.replace(shaping.plans(H200, kernels[-1].block, footprint(gpu=H200))[0], blocks_per_sm=9)
    monkeypatch.setattr(shaping, "plans", lambda *_: (dataclasses.replace(best, smem_pad_bytes=2048),))
    assert overlap(plan, device="h200").occupancy["rms_norm"] == Occupancy(persistent=False, smem_pad_bytes=2048)


# ---- what pays ---------------------------------------------------------------------------------------------------


def layers(compute_s, communication_s, *, count=10):
    return UnitTimes(unit="blocks", count=count, compute_s=compute_s, communication_s=communication_s)


@pytest.mark.parametrize(
    ("units", "expected"),
    [
        ([layers((1.0, 2.0), (0.01, 0.02))], lambda r: 0 <= r <= 1),  # hardly anything to hide
        ([layers((1.0, 2.0), (1.5, 3.0))], lambda r: r == 16),  # more than there is to hide behind
        ([layers((1.0, 2.0), (0.3, 0.6), count=1000)], lambda r: 3 <= r <= 8),  # some of its blocks are enough
    ],
)
def test_no_more_is_left_than_pays(units, expected):
    reserved, times = best_reserve(units, needed=16, sms=132)
    assert expected(reserved) and times[reserved] == min(times.values())


# ---- products ----------------------------------------------------------------------------------------------------


def test_products_are_those_of_one_device(products):
    found = {(p.m, p.n, p.k, p.dtype): sum(each.count for each in same) for p, same in by_shape(products).items()}
    of = lambda n, k, dtype="bfloat16": (TOKENS, n, k, dtype)
    head = {of(CONFIG.vocab, 256, "float32"): 1}  # the decoder embeds, and scores, in the table's own dtype
    assert found == {of(768, 256): 3, of(256, 256): 3, of(1024, 256): 3, of(256, 1024): 3} | head
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


@pytest.mark.parametrize("is_gpu", [False, True])
def test_products_of_kernels_are_those_of_their_plain_forms(is_gpu):
    """On a GPU the trace has kernels, which work on tiles."""

    def run(x, up, gate, down, w):
        return js.kernels.matmul(js.kernels.mlp(x, up, down, w_gate=gate, activation="silu"), w)

    of = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.bfloat16)
    device = AbstractDevice("NVIDIA H200", 132, "gpu") if is_gpu else None
    with jax.sharding.use_abstract_mesh(AbstractMesh((), (), abstract_device=device)):
        jaxpr = jax.make_jaxpr(run)(of(2, 50, 64), of(64, 100), of(64, 100), of(100, 64), of(64, 70)).jaxpr
    assert ("[mosaic]" in str(jaxpr.eqns[1].source_info.name_stack)) == is_gpu
    assert sorted((p.kernel, p.shape) for p in _walk(jaxpr, inside=True, around="")) == [
        ("matmul", "100x70x64"),
        ("mlp", "100x100x64"),
        ("mlp", "100x100x64"),
        ("mlp", "100x64x100"),
    ]


def test_with_the_loss_the_choice_is_an_estimate(model):
    shaped = overlap(model, device="h200", loss=loss_fn, batch=BATCH)
    reason = next(reason for reason in shaped.reasons if reason.what == "matmul")
    assert reason.origin == "estimate" and reason.why.count(" us") >= 2
    assert all(unit.compute_s is not None for unit in shaped.units)
    reserved = shaped.occupancy["matmul"].reserved_sms
    assert shaped.compiler_options.get(CHANNELS, 0) == reserved  # one block on each, or no limit where it waits
    # A tiny model sends more than it computes: all blocks, and they are many for so little.
    assert shaped.occupancy["matmul"].reserved_sms <= 16


# ---- devices -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("device", "comm"),
    [("a100-80", True), ("b200", True), ("a40", True), ("v5p", False), (None, False)],
)
def test_where_the_kernels_do_not_run_nothing_is_left(plan, device, comm):
    shaped = overlap(plan, device=device)
    assert not any(knobs.reserved_sms or knobs.smem_pad_bytes for knobs in shaped.occupancy.values())
    assert (shaped.comm is not None) == comm
    assert CHANNELS not in shaped.compiler_options
    assert "not a Hopper GPU" in next(reason.why for reason in shaped.reasons if reason.what == "mlp")
    assert shaped.occupancy.keys() == {*PRODUCTS, *NORMS}


def test_links_are_those_of_the_cluster_that_is_named(plan):
    time = lambda device: overlap(plan, device=device).units[1].communication_s[0]
    assert time("h200:8x1") > 2 * time("h200:1x8") and time("h200") == time("h200:1x8")


def test_nothing_is_left_where_nothing_is_sent():
    alone = abstract(CONFIG, js.mesh(fsdp=1, devices=1))
    shaped = overlap(alone, device="h200")
    assert shaped.occupancy["matmul"].reserved_sms == 0
    assert "nothing is sent on this mesh" in str(shaped)


# ---- measurements ------------------------------------------------------------------------------------------------

BEST, OTHER = Occupancy(reserved_sms=8), Occupancy(persistent=False, tile_m=64, smem_pad_bytes=25_600)


def measured(product, comm, *, best_ns=100, dot_ns=200, alone_ns=90):
    timings = (
        Timing(setting=None, alone_ns=90, both_ns=dot_ns),
        Timing(setting=BEST, alone_ns=alone_ns, both_ns=best_ns),
        Timing(setting=OTHER, alone_ns=95, both_ns=best_ns + 50),
    )
    names = {"kernel": product.kernel, "shape": product.shape, "dtype": product.dtype, "device": "NVIDIA H200"}
    names |= {"jax": _compat.jax_version(), "footprint": cache.footprint_text(comm)}
    return {cache.Key(**names): cache.TuningEntry(choice=choose(timings), timings=timings, load_bytes=1)}


@pytest.fixture(scope="module")
def ring():
    return footprint("ring", gpu=H200)


def shaped_with(model, path, **settings):
    return overlap(model, device="h200", loss=loss_fn, batch=BATCH, cache=path, **settings)


def test_what_was_measured_counts_for_more_than_the_model(model, products, ring, tmp_path):
    path = tmp_path / "tuning.json"
    for product in by_shape(products):
        cache.store(path, measured(product, ring))
    shaped = shaped_with(model, path)
    assert shaped.occupancy["matmul"] == dataclasses.replace(BEST, latency_ns=90)
    reason = next(reason for reason in shaped.reasons if reason.what == "matmul")
    assert reason.origin == "measured" and reason.why.startswith("4 of 4 shapes measured")
    assert shaped.compiler_options[CHANNELS] == 16  # as beside the load, though 8 multiprocessors are left
    assert next(reason for reason in shaped.reasons if reason.what == "mlp").origin == "estimate"
    assert shaped_with(model, path, comm="tree").occupancy["matmul"].latency_ns is None


def test_measurements_of_something_else_are_not_used(model, products, ring, tmp_path):
    first = next(iter(by_shape(products)))
    for key in ({"device": "NVIDIA H100 80GB HBM3"}, {"device": "thing"}, {"jax": "0"}, {"dtype": "float16"}):
        path = tmp_path / f"{next(iter(key.values()))}.json"
        (entry,) = measured(first, ring).items()
        cache.store(path, {dataclasses.replace(entry[0], **key): entry[1]})
        assert {reason.origin for reason in shaped_with(model, path).reasons} <= {"estimate", "model", "fact"}


def test_where_xla_was_quicker_the_kernel_is_not_used(model, products, ring, tmp_path):
    path = tmp_path / "tuning.json"
    cache.store(path, measured(next(iter(by_shape(products))), ring, best_ns=300))
    shaped = shaped_with(model, path)
    assert shaped.backends["matmul"] == "xla" and shaped.backends["mlp"] == "auto"
    assert "1 of 4 shapes measured" in str(shaped)


def test_one_time_is_stated_only_where_all_calls_take_about_as_long(model, products, ring, tmp_path):
    path = tmp_path / "tuning.json"
    for i, product in enumerate(by_shape(products)):
        cache.store(path, measured(product, ring, alone_ns=90 - 30 * (i % 2)))
    shaped = shaped_with(model, path)
    assert shaped.occupancy["matmul"] == BEST
    assert "the scheduler has estimates" in next(r.why for r in shaped.reasons if r.what == "matmul")


def test_a_file_of_the_user_that_cannot_be_read_is_told_once_and_left(model, plan, cache_folder):
    path = cache.default_path()
    assert path == cache_folder / "jshard" / "tuning.json"
    path.parent.mkdir()
    path.write_text("{}")
    with pytest.warns(UserWarning, match="were not used: its format is None") as caught:
        shaped = overlap(plan, device="h200")
    assert len(caught) == 1 and "were not used" in shaped.notes[0] and path.read_text() == "{}"
    with pytest.raises(cache.CacheError, match="no record of measurements"):
        shaped_with(model, path)


def test_in_several_processes_the_first_ones_measurements_count(model, products, ring, tmp_path, monkeypatch):
    entries = {key: entry for product in by_shape(products) for key, entry in measured(product, ring).items()}
    heard = {"first": [[None, cache.text_of(entries)], [None, ""]]}
    monkeypatch.setattr(cache, "is_primary", lambda: False)
    monkeypatch.setattr(_processes, "exchange", lambda topic, value, timeout_s: heard["first"])
    assert shaped_with(model, tmp_path / "no such file").occupancy["matmul"].latency_ns == 90
    heard["first"][0] = [
        {"kind": "CacheError", "is_request": True, "what": "bad", "why": "", "where": [], "do": ""},
        "",
    ]
    with pytest.raises(RunError, match="CacheError: bad"):
        shaped_with(model, tmp_path / "no such file")


# ---- texts -------------------------------------------------------------------------------------------------------


def test_it_prints_itself_and_is_json(model):
    shaped = overlap(model, device="h200", loss=loss_fn, batch=BATCH)
    text = str(shaped)
    assert text.startswith("NVIDIA H200, beside NCCL 2.32.3 ring: 16 blocks of 544 threads x 96 registers, 120,064 B\n")
    assert "blocks/0..2  x3" in text and "jshard tune" in text and repr(shaped) == text
    assert max(map(len, text.splitlines())) <= 110
    found = json.loads(shaped.to_json())
    assert found["occupancy"]["matmul"]["persistent"] and found["compiler_options"] == dict(shaped.compiler_options)
    assert {reason["origin"] for reason in found["reasons"]} <= {"fact", "model", "estimate", "measured"}


def test_nothing_slow_is_imported_with_it():
    for path in pathlib.Path(shaping.__file__).parent.glob("*.py"):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.Import | ast.ImportFrom):
                assert "pallas" not in ast.unparse(node) and "kernels.mosaic" not in ast.unparse(node), path
