"""The work of instructions of a compiled program, as values: floating-point operations, and bytes of device memory."""

import collections
import dataclasses
from collections.abc import Iterable


@dataclasses.dataclass(frozen=True)
class EqualProducts:
    """Equal matrix products: their dtype and sizes decide how much of the peak they reach."""

    dtype: str  # of the operands
    flops: float  # of all of them
    count: int = 1
    sizes: tuple[float, ...] = ()  # batch, rows, columns, contracted; empty where they are not those of one product
    is_attention: bool = False  # a kernel that does all of it at once

    def times(self, rounds: int) -> "EqualProducts":
        """Returns the same products again and again."""
        return dataclasses.replace(self, flops=self.flops * rounds, count=self.count * rounds)


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
        flops: dict[str, float] = collections.defaultdict(float)
        for product in self.products:
            flops[product.dtype] += product.flops
        return tuple(sorted(flops.items()))

    @property
    def matmuls(self) -> int:
        """How many products there are."""
        return sum(product.count for product in self.products)

    @property
    def total_flops(self) -> float:
        """Floating-point operations of all dtypes."""
        return sum(product.flops for product in self.products)

    @property
    def kind(self) -> str:
        """What it is mostly: `attention`, `products`, or `elementwise` if nothing is multiplied."""
        if any(product.is_attention for product in self.products):
            return "attention"
        return "products" if self.products else "elementwise"

    @property
    def is_nothing(self) -> bool:
        """Whether it takes no time."""
        return not (self.products or self.memory_bytes)

    def times(self, rounds: int) -> "OpWork":
        """Returns the same work again and again."""
        products = tuple(product.times(rounds) for product in self.products)
        return OpWork(products, self.memory_bytes * rounds, self.uncounted)


def added(parts: Iterable[OpWork]) -> OpWork:
    """Returns the sum, with equal products together."""
    equal: dict[tuple[str, tuple[float, ...], bool], list[EqualProducts]] = collections.defaultdict(list)
    memory_bytes = 0.0
    uncounted: dict[str, None] = {}  # a set that keeps the order
    for part in parts:
        for product in part.products:
            equal[product.dtype, product.sizes, product.is_attention].append(product)
        memory_bytes += part.memory_bytes
        uncounted.update(dict.fromkeys(part.uncounted))
    sums = []
    for products in equal.values():
        together = OpWork(tuple(products))
        sums.append(dataclasses.replace(products[0], flops=together.total_flops, count=together.matmuls))
    return OpWork(tuple(sums), memory_bytes, tuple(uncounted))
