"""What the experiment about overlap asks of CuPy and of NVIDIA's compilers; no GPU is needed."""

import re
import shutil
import subprocess
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from benchmarks.overlap import (
    conclusion,
    cupy_load,
    programs,
)
from benchmarks.overlap.grid import groups
from jshard.cluster.topology import parse_topology, topology_devices
from jshard.errors import RunError
from jshard.inspect.audit import audit
from jshard.occupancy.measure import load_shape
from tests.benchmarks.made_up_overlap import H200, RING
from tests.gpu_compiler import needs_gpu_compiler

# What CuPy launches.


class FakeCupy:
    """As much of CuPy as is used; blocks begin at once, and long ones end 20 ms later by a clock of 1 ms a launch."""

    __version__ = "13.6.0"
    uint32, uint64 = np.uint32, np.uint64

    def __init__(self, registers=lambda wanted, number: wanted, waits=()):
        self.launches, self.registers, self.waits = [], registers, waits
        self.cuda = SimpleNamespace(Stream=self._stream, Device=lambda: SimpleNamespace(synchronize=lambda: None))
        self.now_ns, self.current = 10**9, None

    def _stream(self, *, non_blocking, priority):
        stream = SimpleNamespace(priority=priority, synchronize=lambda: None)
        cupy = self

        class Stream:
            def __enter__(self):
                cupy.current = stream

            def __exit__(self, *_):
                cupy.current = None

            synchronize = staticmethod(lambda: None)

        assert non_blocking
        return Stream()

    def arange(self, number, dtype):
        return np.zeros(4, dtype)

    def zeros(self, number, dtype):
        return np.zeros(number, dtype).view(Array)

    def RawModule(self, *, code, options):
        assert "comm_like" in code and options[0] == "--std=c++17"
        return SimpleNamespace(get_function=lambda name: FakeKernel(self, name, options))


class Array(np.ndarray):
    def get(self):
        return np.asarray(self)


class FakeKernel:
    local_size_bytes = 0

    def __init__(self, cupy, name, options):
        self.cupy, self.name = cupy, name
        numbers = [int(option.split("=")[1]) for option in options[1:]]
        self.wanted = numbers[0]
        self.num_regs = cupy.registers(*numbers) if len(numbers) == 2 else 10

    def __call__(self, grid, block, arguments, *, shared_mem=0):
        cupy = self.cupy
        times = arguments[0] if self.name == "stamp" else arguments[-2]
        cupy.launches.append((self.name, grid, block, shared_mem, cupy.current.priority, arguments))
        begin = cupy.now_ns = cupy.now_ns + 10**6
        if self.name == "probe" and self.wanted in cupy.waits:
            begin += 10**9
        times[::2] = begin
        if self.name != "stamp":
            times[1::2] = begin + 20_000_000
            arguments[-1][:] = np.arange(arguments[-1].size)


@pytest.fixture
def fake_cupy(monkeypatch):
    def use(**settings):
        cupy = FakeCupy(**settings)
        monkeypatch.setattr(cupy_load, "imported", lambda: cupy)
        return cupy

    return use


def test_the_load_is_launched_with_the_blocks_of_the_collective(fake_cupy):
    cupy = fake_cupy()
    comm = cupy_load.CupyLoad(RING.block, RING.ctas, 3e11, 896_000_000)
    assert comm.registers == 96
    comm.launch(896_000_000, "high")
    name, grid, block, smem_bytes, priority, arguments = cupy.launches[-1]
    assert (name, grid, block, smem_bytes, priority) == ("comm_like", (16,), (544,), RING.smem_bytes, -5)
    words, chunks, pace_ns = arguments[2:5]
    assert {type(number) for number in (words, chunks, pace_ns)} == {np.uint64}
    each = 17 * 16 * 544 * 16  # words in flight, bytes of each, threads, blocks
    assert words == 56_000_000 and chunks == round(896e6 / each) and pace_ns == round(each / 300)
    assert comm.trace(0, 0).sms == 16 and comm.trace(0, 0).span_ms == 0
    comm.launch(1, "default")
    assert cupy.launches[-1][4] == 0 and cupy.launches[-1][5][3] == 1


def test_registers_are_sought_until_they_fit(fake_cupy):
    fake_cupy(registers=lambda wanted, number: min(wanted, 4 * number + 22))
    assert cupy_load.CupyLoad(RING.block, 16, 3e11, 2**20).registers == 90  # given out as 96
    fake_cupy(registers=lambda wanted, number: 40)
    with pytest.raises(RunError, match="No comm_like takes 96 registers") as error:
        cupy_load.CupyLoad(RING.block, 16, 3e11, 2**20)
    assert error.value.why.startswith("DEPTH=17: 40 registers, 0 bytes spilled")


@pytest.mark.parametrize(("waits", "verdict"), [((58, 90, 104, 112), "even"), ((112,), "pooled")])
def test_placement_is_read_from_what_began_when(fake_cupy, waits, verdict):
    cupy = fake_cupy(waits=waits)
    comm = cupy_load.CupyLoad(RING.block, 16, 3e11, 2**20)
    found = comm.placement(132, conclusion.long_block(H200))
    assert conclusion.placement_verdict(found, H200).startswith(f'Placement: "{verdict}"')
    assert found.long_ms == 20
    long = [launch for launch in cupy.launches if launch[1] == (132,) and launch[0] == "comm_like"]
    assert {(block, smem_bytes, priority) for _, _, block, smem_bytes, priority, _ in long} == {((544,), 104_832, 0)}


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="nvcc is not installed")
@pytest.mark.parametrize(("define", "registers", "least"), [("DEPTH=17", 96, 89), ("HELD=52", 58, 57)])
def test_the_source_compiles_to_the_registers_that_are_wanted(tmp_path, define, registers, least):
    command = ["nvcc", "-arch=sm_90", "-std=c++17", f"--maxrregcount={registers}", f"-D{define}", "-Xptxas", "-v"]
    command += ["-cubin", "-o", str(tmp_path / "comm.cubin"), str(cupy_load.SOURCE)]
    run = subprocess.run(command, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    used = [int(number) for number in re.findall(r"Used (\d+) registers", run.stderr)]
    assert least <= max(used) <= registers and " 0 bytes spill stores" in run.stderr


# The programs of NVIDIA's compiler.


@needs_gpu_compiler
@pytest.mark.usefixtures("no_stored_programs")
@pytest.mark.parametrize("kind", ["all-reduce", "all-gather", "copies"])
def test_the_load_begins_with_the_second_product(kind):
    count = 1 if kind == "copies" else 8
    mesh = jax.sharding.Mesh(np.array(topology_devices(parse_topology(f"h200:1x{count}"))), (programs.AXIS,))
    split, whole = jax.P(programs.AXIS), jax.P()
    array = lambda spec, *shape, dtype="bfloat16": jax.ShapeDtypeStruct(
        shape, dtype, sharding=jax.NamedSharding(mesh, spec)
    )
    weights = [array(whole, 8192, 8192)] * 2
    setting = groups(H200, RING)[3].settings[-1]
    if kind == "copies":
        buffer, move = array(split, *load_shape(RING, 2**28), dtype="float32"), programs.copies(RING)
    else:
        buffer, move = array(split, 8 * 448_000_000), programs.collective(kind)
    run = programs.two_products(setting, move)
    donate = (3,) if kind == "all-reduce" else ()
    jitted = programs.over(mesh, run, split, whole, whole, split, donate=donate)
    program = jitted.trace(array(split, count * 8192, 8192), *weights, buffer).lower().compile(programs.OPTIONS)
    text = program.as_text()
    assert " copy(" not in text[text.rindex("ENTRY") :]
    if kind == "copies":
        assert '_xla_stream_annotation="1"' in text
        return
    (window,) = audit(program).schedule.windows
    assert (window.kind, window.is_overlapped, window.executions) == (kind, True, 1)
