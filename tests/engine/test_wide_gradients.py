"""Where the platform is faster so, products write gradients in the dtype of their sum: rounded once less."""

import dataclasses
from typing import Any

import numpy as np
import pytest
from flax import nnx
from jax.sharding import AbstractMesh, Mesh

import jshard as js
from jshard.engine.schedule import unit_schedule
from jshard.plans.mesh import products_write_sums
from tests.engine.fake_devices import Device
from tests.helpers import Config, Decoder, Scanning, compile_to_read, fresh, loss_fn, token_batch
from tests.parity import flat

CONFIG = Config(layers=3, attends=False)
BATCH = token_batch(CONFIG)
# Not bfloat16: XLA:CPU has no product of it with a wider result.
MIXED = js.MixedPrecision(param_dtype="float16", reduce_dtype="float32")


def lowered(model: Any) -> Any:
    # A new function each time: what was traced for another choice of the platform must not be found.
    return nnx.jit(lambda model, *batch: nnx.value_and_grad(loss_fn)(model, *batch)).lower(model, *BATCH)


@pytest.mark.parametrize(
    ("kind", "expected"),
    [("NVIDIA A100-SXM4-80GB", True), ("NVIDIA H100 80GB HBM3", False), ("AMD Instinct MI300X", False)],
)
def test_before_hopper(kind, expected):
    devices = np.array([Device(kind, id=i) for i in range(4)])
    assert products_write_sums(Mesh(devices, ("fsdp",))) is expected
    assert not products_write_sums(Mesh(devices.reshape(2, 2), ("pipe", "fsdp")))


def test_not_on_cpus_and_not_without_devices():
    assert not products_write_sums(js.mesh(fsdp=8))
    assert not products_write_sums(AbstractMesh((2,), ("fsdp",)))


def sharded(scanned: bool, precision: js.MixedPrecision, **degrees: int) -> Any:
    config = dataclasses.replace(CONFIG, scanned=scanned)
    model = fresh(lambda: (Scanning if scanned else Decoder)(config, nnx.Rngs(0)))
    mesh = js.mesh(**degrees)
    placement = js.PlacementPolicy(min_size=1)
    for block in [model.blocks] if scanned else model.blocks:
        stacked = dataclasses.replace(placement, stacked=int(scanned))
        js.fully_shard(block, mesh=mesh, mixed_precision=precision, placement=stacked)
    return js.fully_shard(model, mesh=mesh, mixed_precision=precision, placement=placement)


def run(model: Any) -> dict[str, np.ndarray]:
    _, gradients = lowered(model).compile()(model, *BATCH)
    return {path: np.asarray(x, np.float64) for path, x in flat(gradients).items()}


def write_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unit_schedule, "products_write_sums", lambda mesh: True)


@pytest.mark.parametrize(
    ("scanned", "degrees"),
    [
        (False, {"fsdp": 8}),
        (True, {"fsdp": 8}),
        pytest.param(True, {"replica": 2, "fsdp": 4}, marks=pytest.mark.wide),
        pytest.param(False, {"fsdp": 4, "tensor": 2}, marks=pytest.mark.wide),
    ],
    ids=str,
)
def test_gradients_are_the_same_but_for_one_rounding_less(monkeypatch, scanned, degrees):
    narrow = run(sharded(scanned, MIXED, **degrees))
    write_sums(monkeypatch)
    model = sharded(scanned, MIXED, **degrees)
    wide = run(model)
    for path, x in narrow.items():
        # The rounding of parts, which XLA:CPU may leave out: 11 binary digits.
        scale = np.abs(x).max()
        np.testing.assert_allclose(wide[path], x, rtol=2.0**-10, atol=2.0**-11 * scale, err_msg=path)
    audit = js.audit(compile_to_read(lowered(model).lowered), model=model)
    assert audit.ok, audit


@pytest.mark.parametrize("scanned", [False, True])
def test_the_product_writes_what_is_reduced(monkeypatch, scanned):
    write_sums(monkeypatch)
    model = sharded(scanned, MIXED, fsdp=8)
    lines = lowered(model).lowered.as_text().splitlines()
    products = [line.split(" : ")[1] for line in lines if "dot_general" in line]
    num_wide = sum("xf16>) -> " in types and types.endswith("xf32>") for types in products)
    # Equal units share one function, which has a product for each kernel of a block; a loop has one in its last trip.
    num_kernels = sum(path.endswith("kernel") for path in flat(nnx.state(model.blocks if scanned else model.blocks[0])))
    assert num_wide >= num_kernels > 0


def test_equal_dtypes_are_left_alone(monkeypatch):
    precision = js.MixedPrecision(param_dtype="bfloat16", reduce_dtype="bfloat16")
    before = lowered(sharded(True, precision, fsdp=8)).lowered.as_text()
    write_sums(monkeypatch)
    assert lowered(sharded(True, precision, fsdp=8)).lowered.as_text() == before
