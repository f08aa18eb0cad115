"""The work of an instruction of a compiled program: floating-point operations, and bytes of device memory."""

import collections
import dataclasses
import functools
import math
import re
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from jshard._text import PREFIX
from jshard.inspect.hlo.module import Computation, Instruction, Module, arrays, item_bytes

# They move no data, or move it beside the computation.
_FREE = frozenset(
    "parameter constant tuple get-tuple-element bitcast after-all partition-id replica-id copy-start copy-done"
    " slice-start slice-done iota add-dependency opt-barrier optimization-barrier domain".split()
)
_BESIDE, _HOST = ("fusion-start", "fusion-done"), "S(5)"  # asynchronous fusions; XLA's name of the host's memory
_SLICES = ("dynamic-slice", "slice", "gather")
_GEMMS = "__cublas", "__onednn$matmul", "__triton_gemm"
CUDNN = "__cudnn$fmha"  # its attention
TPU_KERNEL = "tpu_custom_call"  # any of Pallas on a TPU
_SPLASH = {"splash_mha_fwd": 2, "splash_mha_dq": 3, "splash_mha_dkv": 4}  # JAX's, on TPUs: matrix products of each
MOSAIC, _KERNEL = "mosaic_gpu", f"/{PREFIX}"  # kernels of Pallas on GPUs, and the names of those in jshard.kernels
_NOTHING = "AllocateBuffer", "AsyncCollective", "ConcatBitcast", "AssumeGatherIndicesInBound"


@dataclasses.dataclass(frozen=True)
class EqualProducts:
    """Equal matrix products: their dtype and sizes decide how much of the peak they reach."""

    dtype: str  # of the operands
    flops: float  # of all of them
    count: int = 1
    sizes: tuple[float, ...] = ()  # batch, rows, columns, contracted; empty where they are not those of one product
    is_attention: bool = False  # a kernel that does all of it at once


@dataclasses.dataclass(frozen=True)
class OpWork:
    """The work of an instruction, of a computation, or of several together."""

    products: tuple[EqualProducts, ...] = ()  # matrix products and convolutions
    memory_bytes: float = 0.0  # read from and written to device memory
    # Custom calls whose operations are unknown: only their memory traffic is counted.
    uncounted: tuple[str, ...] = ()

    @property
    def flops(self) -> tuple[tuple[str, float], ...]:
        """Floating-point operations of the products, by dtype."""
        found = collections.Counter[str]()
        for one in self.products:
            found[one.dtype] += one.flops  # type: ignore[assignment]
        return tuple(sorted(found.items()))

    @property
    def matmuls(self) -> int:
        """How many products there are."""
        return sum(one.count for one in self.products)

    @property
    def total_flops(self) -> float:
        """Floating-point operations of all dtypes."""
        return sum(one.flops for one in self.products)

    @property
    def is_nothing(self) -> bool:
        """Whether it takes no time."""
        return not (self.products or self.memory_bytes)

    def times(self, rounds: int) -> "OpWork":
        """The same work again and again."""
        again = (dataclasses.replace(p, flops=p.flops * rounds, count=p.count * rounds) for p in self.products)
        return OpWork(tuple(again), self.memory_bytes * rounds, self.uncounted)


def added(parts: Iterable[OpWork]) -> OpWork:
    """The sum."""
    alike: dict[tuple[Any, ...], list[EqualProducts]] = collections.defaultdict(list)
    memory_bytes, uncounted = 0.0, []
    for part in parts:
        for one in part.products:
            alike[one.dtype, one.sizes, one.is_attention].append(one)
        memory_bytes += part.memory_bytes
        uncounted += part.uncounted
    products = (
        dataclasses.replace(them[0], flops=sum(p.flops for p in them), count=sum(p.count for p in them))
        for them in alike.values()
    )
    return OpWork(tuple(products), memory_bytes, tuple(dict.fromkeys(uncounted)))


class Worker:
    """Works out the instructions of a module that compute; loops, calls and collectives are for its caller."""

    def __init__(self, module: Module) -> None:
        self._module = module
        self._inside: dict[str, OpWork] = {}

    def work(self, home: Computation, instruction: Instruction) -> OpWork:
        """The work of one instruction of a computation."""
        if instruction.opcode in _FREE or _target(instruction).startswith(_NOTHING):
            return OpWork()
        if instruction.opcode in _BESIDE and _is_hosts(home, instruction):
            return OpWork()  # a copy between device and host
        arithmetic = self._arithmetic(home, instruction)
        if instruction.opcode == "fusion":
            touched = sum(_fusion_bytes(body) for body in self._module.callees(instruction))
        else:
            touched = _plain_bytes(home, instruction)
        return dataclasses.replace(arithmetic, memory_bytes=touched)

    def _arithmetic(self, home: Computation, instruction: Instruction) -> OpWork:
        """The matrix products of an instruction, and of the computations it calls."""
        opcode = instruction.opcode
        if opcode == "dot":
            return _product(_dtype(home, instruction), *_dot_sizes(home, instruction))
        if opcode == "convolution":
            flops = _convolution_flops(home, instruction)
            return OpWork((EqualProducts(_dtype(home, instruction), flops),)) if flops else OpWork()
        if opcode == "custom-call":
            return _custom_call(home, instruction)
        return added(self._within(body) for body in self._module.callees(instruction))

    def _within(self, body: Computation) -> OpWork:
        if body.name not in self._inside:
            self._inside[body.name] = added(self._arithmetic(body, i) for i in body.instructions)
        return self._inside[body.name]


def _is_hosts(home: Computation, instruction: Instruction) -> bool:
    """Whether an instruction has to do with the host's memory."""
    given = [home.operand(instruction, i) for i in range(len(instruction.operands))]
    return any(_HOST in one.shape for one in (instruction, *given) if one is not None)


def _product(dtype: str, *sizes: float) -> OpWork:
    flops = 2.0 * math.prod(sizes)
    return OpWork((EqualProducts(dtype, flops, sizes=sizes),)) if flops else OpWork()


def _dtype(home: Computation, instruction: Instruction) -> str:
    return _array(home.operand(instruction, 0))[0]


def _array(instruction: Instruction | None) -> tuple[str, tuple[int, ...]]:
    found = instruction.arrays if instruction is not None else ()
    return found[0] if found else ("f32", ())


def _places(text: str, key: str) -> list[int]:
    """The numbers in `key={0,1}` or `"key":["0","1"]`."""
    found = re.search(rf'{key}"?[=:][{{\[]([^}}\]]*)[}}\]]', text)
    return [int(n) for n in re.findall(r"\d+", found.group(1))] if found else []


def _dot_sizes(home: Computation, dot: Instruction) -> tuple[float, float, float, float]:
    """Batch, rows, columns, contracted."""
    left = _array(home.operand(dot, 0))[1]
    along = lambda key: float(math.prod(left[d] for d in _places(dot.attributes, key) if d < len(left)))
    batch, contracted = along("lhs_batch_dims"), along("lhs_contracting_dims")
    rows = math.prod(left) / (batch * contracted or 1)
    return batch, rows, math.prod(_array(dot)[1]) / (batch * rows or 1), contracted


def _custom_call(home: Computation, call: Instruction) -> OpWork:
    name = _target(call)
    if name.startswith(_GEMMS):
        # The contracted dims are in the backend's own format; they also follow from the sizes.
        (dtype, left), (_, right), (_, out) = (_array(x) for x in (home.operand(call, 0), home.operand(call, 1), call))
        batch = math.prod(left[d] for d in _places(call.attributes, "lhs_batch_dimensions") if d < len(left))
        return _product(dtype, batch, *_sides(*(math.prod(dims) / batch for dims in (left, right, out))))
    if name.startswith(CUDNN):
        return _attention(home, call, backward="Backward" in name)
    if name == TPU_KERNEL and (count := next((n for key, n in _SPLASH.items() if key in call.name), 0)):
        return _splash(home, call, count)
    if name.startswith(MOSAIC) and _KERNEL in call.op_name:
        return _kernel(home, call)
    return OpWork() if name.startswith(_NOTHING) else OpWork(uncounted=(name,))


def _kernel(home: Computation, call: Instruction) -> OpWork:
    """Our own kernels: products of the first operand with every other matrix; or norms, which have none."""
    operands = [_array(home.operand(call, i)) for i in range(len(call.operands))]
    if "_norm" in call.op_name.rpartition(_KERNEL)[2]:
        return OpWork()
    (dtype, left), *others = operands
    out = math.prod(_array(call)[1])
    rights = [math.prod(dims) for _, dims in others if len(dims) == 2]
    return added(_product(dtype, 1, *_sides(math.prod(left), right, out)) for right in rights)


def _sides(left: float, right: float, out: float) -> tuple[float, float, float]:
    """Rows, columns and the contracted dim, from the sizes of three matrices."""
    if not left * right * out:
        return 0.0, 0.0, 0.0
    return math.sqrt(left * out / right), math.sqrt(right * out / left), math.sqrt(left * right / out)


def _target(call: Instruction) -> str:
    """The target of a custom call; empty for other instructions."""
    found = re.search(r'custom_call_target="([^"]*)"', call.attributes) if call.opcode == "custom-call" else None
    return found.group(1) if found else ""


def _attention(home: Computation, call: Instruction, *, backward: bool) -> OpWork:
    """Two matrix products forward, five backward; half of them behind a causal mask."""
    (dtype, query), (_, key) = (_array(home.operand(call, i)) for i in (0, 1))
    if len(query) != 4 or len(key) != 4:
        return OpWork(uncounted=(CUDNN,))
    count = (5 if backward else 2) * 2.0 * math.prod(query) * key[1]
    causal = "CAUSAL" in call.attributes
    done = count / 2 if causal else count
    return OpWork((EqualProducts(dtype, done, 5 if backward else 2, is_attention=True),))


def _splash(home: Computation, call: Instruction, products: int) -> OpWork:
    """Of JAX's splash attention: all blocks, or those that reach below the diagonal of a causal mask.

    The mask is causal where positions are among the operands. (One that also ends, a sliding window, has fewer.)
    """
    operands = [_array(home.operand(call, i)) for i in range(len(call.operands))]
    (dtype, query), (_, key) = [one for one in operands if len(one[1]) == 4][:2]
    count = 2.0 * products * math.prod(query) * key[2]
    if any(name == "s32" and len(dims) == 2 for name, dims in operands):
        blocks = operands[0][1][-1]
        count *= (blocks + 1) / (2 * blocks)
    return OpWork((EqualProducts(dtype, count, products, is_attention=True),))


def _convolution_flops(home: Computation, convolution: Instruction) -> float:
    """Counts the pairs of input and kernel places that meet: a TPU writes batched products as convolutions."""
    labels = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", convolution.attributes)
    if labels is None:
        return 0.0
    operands = home.operand(convolution, 0), home.operand(convolution, 1), convolution
    sizes = [dict(zip(label, _array(x)[1], strict=False)) for label, x in zip(labels.groups(), operands, strict=True)]
    left, kernel, out = sizes
    found = re.search(r"window=\{([^}]*)\}", convolution.attributes)
    window = dict(re.findall(r"(\w+)=([\w\-]+)", found.group(1))) if found else {}
    spatial = enumerate(sorted(d for d in kernel if d.isdigit()))
    pairs = math.prod(_pairs(window, i, left.get(d, 1), kernel[d], out.get(d, 1)) for i, d in spatial)
    return 2.0 * out.get("b", 1) * out.get("f", 1) * kernel.get("i", 1) * pairs


def _pairs(window: Mapping[str, str], place: int, size: int, kernel: int, out: int) -> int:
    """Places of the kernel that meet an element of the input, over all places of the output, in one spatial dim."""
    stride, low, dilation, apart = (
        int(window[key].split("x")[place].split("_")[0]) if key in window else default
        for key, default in (("stride", 1), ("pad", 0), ("lhs_dilate", 1), ("rhs_dilate", 1))
    )
    at = np.arange(out)[:, None] * stride + np.arange(kernel) * apart - low
    return int(((at >= 0) & (at <= (size - 1) * dilation) & (at % dilation == 0)).sum())


@functools.lru_cache(maxsize=4096)
def shape_bytes(shape: str) -> float:
    """Bytes of a shape, tuples added up; an unknown element type counts as four bytes."""
    total = 0.0
    for dtype, dims in arrays(shape):
        try:
            total += math.prod(dims) * item_bytes(dtype)
        except KeyError:
            total += math.prod(dims) * 4
    return total


def _plain_bytes(home: Computation, instruction: Instruction) -> float:
    """Operands and result; of a slice, or an update in place, only the part."""
    if instruction.opcode in _SLICES:
        return 2 * shape_bytes(instruction.shape)
    if instruction.opcode == "dynamic-update-slice":
        return 2 * _size(home.operand(instruction, 1))
    inputs = (home.by_name.get(name) for name in instruction.operands)
    return shape_bytes(instruction.shape) + sum(map(_size, inputs))


def _size(instruction: Instruction | None) -> float:
    return shape_bytes(instruction.shape) if instruction is not None else 0.0


def _fusion_bytes(body: Computation) -> float:
    """The bytes that a fusion reads and writes: values inside cost nothing, slices count by their own size."""
    if "async_collective_fusion" in body.name:
        return _async_fusion_bytes(body)
    parameters = (i for i in body.instructions if i.opcode == "parameter")
    return sum(_read_bytes(body, p) for p in parameters) + _written_bytes(body, body.root)


def _read_bytes(body: Computation, value: Instruction) -> float:
    """The bytes that a fusion reads of one of its inputs."""
    users = body.users.get(value.name, [])
    whole = shape_bytes(value.shape)
    parts = 0.0
    for user in users:
        if user.opcode in _SLICES:
            parts += shape_bytes(user.shape)
        elif user.opcode == "dynamic-update-slice" and user.operands[0] == value.name:
            continue  # updated in place
        elif user.opcode == "bitcast":
            parts += _read_bytes(body, user)
        else:
            return whole
    return min(whole, parts) if users else whole


def _written_bytes(body: Computation, result: Instruction | None) -> float:
    if result is None:
        return 0.0
    if result.opcode == "dynamic-update-slice":
        return 2 * _size(body.operand(result, 1))
    if result.opcode == "bitcast":
        return _written_bytes(body, body.operand(result, 0))
    if result.opcode == "tuple":
        return sum(_written_bytes(body, body.by_name.get(name)) for name in result.operands)
    return shape_bytes(result.shape)


def _async_fusion_bytes(body: Computation) -> float:
    """A TPU's fusion that also carries the buffers of a collective in flight: only what its own compute touches."""
    computing = {
        i.name
        for i in body.instructions
        if i.opcode not in _FREE and i.opcode != "custom-call" and not i.opcode.startswith(("all-", "reduce-scatter"))
    }
    sources = [body.source(body.by_name.get(a)) for name in computing for a in body.by_name[name].operands]
    read = {s.name: s for s in sources if s is not None and s.opcode == "parameter"}
    results = body.root.operands if body.root is not None and body.root.opcode == "tuple" else ()
    written = [body.source(body.by_name.get(name)) for name in results or ([body.root.name] if body.root else [])]
    return sum(map(_size, read.values())) + sum(_size(w) for w in written if w is not None and w.name in computing)
