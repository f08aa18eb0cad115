"""Works out the instructions of a compiled program that compute: their matrix products, and their memory traffic.

Matrix products are `dot`s, convolutions, and calls of libraries and kernels, whose products follow from the shapes of
their operands. All else is so little arithmetic that its time is that of its memory traffic.
"""

import dataclasses
import math
import re
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from jshard._text import PREFIX
from jshard.inspect.hlo.memory_traffic import FREE_OPCODES, fusion_bytes, instruction_bytes
from jshard.inspect.hlo.module import Computation, HloArray, Instruction, Module
from jshard.inspect.hlo.work import EqualProducts, OpWork, added

CUDNN = "__cudnn$fmha"
"""The target of cuDNN's attention."""

TPU_KERNEL = "tpu_custom_call"
"""The target of any kernel of Pallas on a TPU."""

MOSAIC = "mosaic_gpu"
"""The target of any kernel of Pallas on a GPU."""

_OWN_KERNEL = f"/{PREFIX}"  # in the names of kernels of `jshard.kernels`
_LIBRARY_PRODUCTS = ("__cublas", "__onednn$matmul", "__triton_gemm")
_NUM_PRODUCTS_OF_SPLASH = {"splash_mha_fwd": 2, "splash_mha_dq": 3, "splash_mha_dkv": 4}  # JAX's kernels on TPUs
_FREE_TARGETS = ("AllocateBuffer", "AsyncCollective", "ConcatBitcast", "AssumeGatherIndicesInBound", "GatherScatter")

_COPIES = ("ZeroCrop",)  # they move data, and compute nothing

_ASYNC_FUSIONS = ("fusion-start", "fusion-done")
_HOST = "S(5)"  # XLA's name of the host's memory


class Worker:
    """Works out the instructions of a module that compute; loops, calls and collectives are for its caller."""

    def __init__(self, module: Module) -> None:
        self._module = module
        self._products_in: dict[str, OpWork] = {}  # by name of the computation

    def work(self, home: Computation, instruction: Instruction) -> OpWork:
        """Returns the work of one instruction of a computation."""
        if instruction.opcode in FREE_OPCODES or _target(instruction).startswith(_FREE_TARGETS):
            return OpWork()
        if instruction.opcode in _ASYNC_FUSIONS and _is_hosts(home, instruction):
            return OpWork()  # a copy between device and host
        if instruction.opcode == "fusion":
            memory_bytes = sum(fusion_bytes(self._module, body) for body in self._module.callees(instruction))
        else:
            memory_bytes = instruction_bytes(home, instruction)
        return dataclasses.replace(self.products(home, instruction), memory_bytes=memory_bytes)

    def products(self, home: Computation, instruction: Instruction) -> OpWork:
        """Returns the matrix products of an instruction, and of the computations it calls."""
        if instruction.opcode == "dot":
            return _dot(home, instruction)
        if instruction.opcode == "convolution":
            return _convolution(home, instruction)
        if instruction.opcode == "custom-call":
            return _custom_call(home, instruction)
        return added(self._products_within(body) for body in self._module.callees(instruction))

    def _products_within(self, body: Computation) -> OpWork:
        if body.name not in self._products_in:  # several fusions may call one computation
            parts = [self.products(body, instruction) for instruction in body.instructions]
            self._products_in[body.name] = added(parts)
        return self._products_in[body.name]


def _is_hosts(home: Computation, instruction: Instruction) -> bool:
    """Returns whether an instruction has to do with the host's memory."""
    values = [instruction, *home.operands(instruction)]
    return any(value is not None and _HOST in value.shape for value in values)


# ---- arrays and attributes


def _array(instruction: Instruction | None) -> HloArray:
    """Returns the array that an instruction results in, the first of several; a scalar if it is not in the text."""
    if instruction is None or not instruction.arrays:
        return HloArray("f32", ())
    return instruction.arrays[0]


def _operand_arrays(home: Computation, instruction: Instruction) -> list[HloArray]:
    return [_array(operand) for operand in home.operands(instruction)]


def _target(call: Instruction) -> str:
    """Returns the target of a custom call; empty for other instructions."""
    if call.opcode != "custom-call":
        return ""
    target = re.search(r'custom_call_target="([^"]*)"', call.attributes)
    return target[1] if target else ""


def _dims(text: str, key: str) -> list[int]:
    """Returns the numbers in `key={0,1}` or `"key":["0","1"]`."""
    numbers = re.search(rf'{key}"?[=:][{{\[]([^}}\]]*)[}}\]]', text)
    if numbers is None:
        return []
    return [int(number) for number in re.findall(r"\d+", numbers[1])]


def _size_along(array: HloArray, dims: list[int]) -> int:
    size = 1
    for dim in dims:
        if dim < len(array.dims):
            size *= array.dims[dim]
    return size


# ---- matrix products


def _product(dtype: str, batch: float, rows: float, columns: float, contracted: float) -> OpWork:
    """Returns the work of one product, or of a batch of them; none if a size is 0."""
    sizes = (batch, rows, columns, contracted)
    flops = 2.0 * math.prod(sizes)
    if not flops:
        return OpWork()
    return OpWork((EqualProducts(dtype, flops, sizes=sizes),))


def _dot(home: Computation, dot: Instruction) -> OpWork:
    left = _array(home.operand(dot, 0))
    batch = float(_size_along(left, _dims(dot.attributes, "lhs_batch_dims")))
    contracted = float(_size_along(left, _dims(dot.attributes, "lhs_contracting_dims")))
    rows = left.num_elements / (batch * contracted or 1)  # a size may be 0
    columns = _array(dot).num_elements / (batch * rows or 1)
    return _product(left.dtype, batch, rows, columns, contracted)


class _ProductSizes(NamedTuple):
    """The sizes of one product."""

    rows: float
    columns: float
    contracted: float

    @classmethod
    def of(cls, left: float, right: float, out: float) -> "_ProductSizes":
        """Returns the sizes from the numbers of elements of the three matrices.

        These are rows x contracted, contracted x columns, and rows x columns: three equations for three unknowns.
        """
        if not left * right * out:
            return cls(0.0, 0.0, 0.0)
        return cls(
            rows=math.sqrt(left * out / right),
            columns=math.sqrt(right * out / left),
            contracted=math.sqrt(left * right / out),
        )


# ---- custom calls


def _custom_call(home: Computation, call: Instruction) -> OpWork:
    target = _target(call)
    if target.startswith(_LIBRARY_PRODUCTS):
        return _library_product(home, call)
    if target.startswith(CUDNN):
        return _cudnn_attention(home, call, is_backward="Backward" in target)
    if target == TPU_KERNEL:
        for name, num_products in _NUM_PRODUCTS_OF_SPLASH.items():
            if name in call.name:
                return _splash_attention(home, call, num_products)
    if target.startswith(MOSAIC) and _OWN_KERNEL in call.op_name:
        return _own_kernel(home, call)
    if target.startswith((*_FREE_TARGETS, *_COPIES)):
        return OpWork()
    return OpWork(uncounted=(target,))  # the report says so: a silent 0 would look like a fast program


def _library_product(home: Computation, call: Instruction) -> OpWork:
    """Returns the work of a product of a library.

    Its contracted dims are in the backend's own format; they also follow from the sizes.
    """
    left = _array(home.operand(call, 0))
    right = _array(home.operand(call, 1))
    out = _array(call)
    batch = _size_along(left, _dims(call.attributes, "lhs_batch_dimensions"))
    sizes = _ProductSizes.of(left.num_elements / batch, right.num_elements / batch, out.num_elements / batch)
    return _product(left.dtype, batch, *sizes)


def _own_kernel(home: Computation, call: Instruction) -> OpWork:
    """Returns the work of a kernel of `jshard.kernels`: products of the first operand with every other matrix.

    Norms have none.
    """
    _, _, kernel = call.op_name.rpartition(_OWN_KERNEL)
    if "_norm" in kernel:
        return OpWork()
    left, *operands = _operand_arrays(home, call)
    out = _array(call)
    products = []
    for right in operands:
        if len(right.dims) == 2:
            sizes = _ProductSizes.of(left.num_elements, right.num_elements, out.num_elements)
            products.append(_product(left.dtype, 1, *sizes))
    return added(products)


def _cudnn_attention(home: Computation, call: Instruction, *, is_backward: bool) -> OpWork:
    """Returns the work of attention: two matrix products forward, five backward; half of them behind a causal mask."""
    query = _array(home.operand(call, 0))
    key = _array(home.operand(call, 1))
    if len(query.dims) != 4 or len(key.dims) != 4:
        return OpWork(uncounted=(CUDNN,))
    num_products = 5 if is_backward else 2
    flops = num_products * 2.0 * query.num_elements * key.dims[1]  # each query with each key
    if "CAUSAL" in call.attributes:
        flops /= 2
    return OpWork((EqualProducts(query.dtype, flops, num_products, is_attention=True),))


def _splash_attention(home: Computation, call: Instruction, num_products: int) -> OpWork:
    """Returns the work of JAX's splash attention: all blocks, or those that reach below a causal mask's diagonal.

    The mask is causal where positions are among the operands. (One that also ends, a sliding window, has fewer.)
    """
    operands = _operand_arrays(home, call)
    matrices = _queries_and_keys(operands)
    if matrices is None:
        return OpWork(uncounted=(call.name,))
    query, key = matrices
    num_keys = key.dims[-2]
    flops = 2.0 * num_products * query.num_elements * num_keys  # each query with each key
    has_positions = any(array.dtype == "s32" and len(array.dims) == 2 for array in operands)
    if has_positions:
        num_blocks = operands[0].dims[-1]  # the first operand is the grid of blocks, queries by keys
        flops *= (num_blocks + 1) / (2 * num_blocks)  # those on the diagonal and on one side of it
    return OpWork((EqualProducts(query.dtype, flops, num_products, is_attention=True),))


def _queries_and_keys(operands: list[HloArray]) -> tuple[HloArray, HloArray] | None:
    """Returns the first operands of splash attention that are matrices of numbers for every head; None without them."""
    # Without the dim of the batch where a device has one sequence: libtpu drops dims of size 1.
    for num_dims in (4, 3):
        matrices = []
        for array in operands:
            # The blocks of a mask have as many dims, but are integers.
            if len(array.dims) == num_dims and array.dtype.startswith(("f", "bf")):
                matrices.append(array)
        if len(matrices) >= 2:
            return matrices[0], matrices[1]
    return None


# ---- convolutions


def _convolution(home: Computation, convolution: Instruction) -> OpWork:
    """Returns the work of a convolution: of the pairs of input and kernel places that meet.

    The others are padding; and a TPU writes batched products as convolutions in which most pairs do not meet.
    """
    labels = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", convolution.attributes)
    if labels is None:
        return OpWork()
    image = _array(home.operand(convolution, 0))
    image_sizes = _sizes_by_label(labels[1], image)
    kernel_sizes = _sizes_by_label(labels[2], _array(home.operand(convolution, 1)))
    out_sizes = _sizes_by_label(labels[3], _array(convolution))
    window_text = re.search(r"window=\{([^}]*)\}", convolution.attributes)
    window: dict[str, str] = {}
    if window_text:
        window = dict(re.findall(r"(\w+)=([\w\-]+)", window_text[1]))

    num_pairs = 1
    spatial_dims = sorted(label for label in kernel_sizes if label.isdigit())
    for i, dim in enumerate(spatial_dims):
        num_pairs *= _num_pairs(window, i, image_sizes.get(dim, 1), kernel_sizes[dim], out_sizes.get(dim, 1))
    flops = 2.0 * out_sizes.get("b", 1) * out_sizes.get("f", 1) * kernel_sizes.get("i", 1) * num_pairs
    if not flops:
        return OpWork()
    return OpWork((EqualProducts(image.dtype, flops),))


def _sizes_by_label(labels: str, array: HloArray) -> dict[str, int]:
    """Returns the sizes of an array by the labels of its dims: `b` batch, `f` features, `i` and `o`, digits spatial."""
    return dict(zip(labels, array.dims, strict=False))


def _num_pairs(window: Mapping[str, str], dim: int, image_size: int, kernel_size: int, out_size: int) -> int:
    """Counts the kernel's places that meet an element of the image, over all places of the output, in a spatial dim."""
    stride = _window_setting(window, "stride", dim, default=1)
    padding = _window_setting(window, "pad", dim, default=0)
    image_dilation = _window_setting(window, "lhs_dilate", dim, default=1)
    kernel_dilation = _window_setting(window, "rhs_dilate", dim, default=1)
    # In the dilated image, which has zeros between its elements.
    positions = np.arange(out_size)[:, None] * stride + np.arange(kernel_size) * kernel_dilation - padding
    is_within = (positions >= 0) & (positions <= (image_size - 1) * image_dilation)
    return int((is_within & (positions % image_dilation == 0)).sum())


def _window_setting(window: Mapping[str, str], name: str, dim: int, *, default: int) -> int:
    """Returns the number of a spatial dim in `stride=2x2`, or the lower one in `pad=1_1x1_1`."""
    if name not in window:
        return default
    of_dim = window[name].split("x")[dim]
    return int(of_dim.split("_")[0])
