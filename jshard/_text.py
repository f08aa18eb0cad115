"""Numbers and names as text: bytes, counts, times, names that differ in a number; kernel names in programs."""

import math
import re
from collections.abc import Iterable


def human_bytes(count: float, digits: int = 2) -> str:
    """Bytes as text, in B, KiB, MiB, GiB or TiB."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} B" if unit == "B" else f"{count:.{digits}f} {unit}"
        count /= 1024
    return f"{count:.{digits}f} TiB"


_IRREGULAR = {"leaf": "leaves", "process": "processes", "batch": "batches", "entry": "entries", "copy": "copies"}


def counted(count: int, one: str, many: str | None = None) -> str:
    """A number with its noun: 1 leaf, 2 leaves.

    Args:
        count: the number.
        one: the noun for a single thing, or a clause that begins with it: "leaf", "leaf differs".
        many: the same for several; by default the plural of the last word of `one`.
    """
    if count == 1:
        return f"1 {one}"
    if many is None:
        *adjectives, word = one.split(" ")
        many = " ".join([*adjectives, _IRREGULAR.get(word, f"{word}s")])
    return f"{count} {many}"


def human_count(count: float) -> str:
    """A number of parameters as text: 1.23M."""
    for unit in ("", "K", "M"):
        if count < 1000:
            return f"{count:.0f}" if not unit else f"{count:.2f}{unit}"
        count /= 1000
    return f"{count:.2f}B"


def duration(seconds: float) -> str:
    """A time as text: three digits, in s, ms or us."""
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= size or not seconds:
            return f"{three_digits(seconds / size)} {unit}"
    return f"{three_digits(seconds / 1e-6)} us"


def clock_text(seconds: float) -> str:
    """A time as text, as on a clock: 0:50, 1:02:03, 2d 03:00:00."""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{days}d {hours:02}:{minutes:02}:{seconds:02}"
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"


def three_digits(value: float) -> str:
    """A positive number as text, to three significant digits, at most as many after the point."""
    return f"{value:.{min(3, max(0, 2 - math.floor(math.log10(value))))}f}" if 0 < value < math.inf else f"{value:.0f}"


def loss_text(value: float) -> str:
    """A loss or metric as text: four digits after the point, or four significant ones for small values."""
    return f"{value:.4f}" if value == 0 or 1e-2 <= abs(value) < 1e5 else f"{value:.4g}"


def is_layer(key: str) -> bool:
    """Whether a key of a path may be the number of a layer; `int` fails on thousands of digits."""
    return key.isdecimal() and len(key) <= _LAYER_DIGITS


_LAYER_DIGITS = 9


def name_pattern(name: str) -> tuple[str, int | None]:
    """`blocks/3/mlp` as `blocks/*/mlp` and 3, `block_3` as `block_*` and 3: the last number in a path may vary."""
    numbers = list(re.finditer(r"(?<=[/_])\d{1,9}(?=/|$)", name))
    if not numbers or "+" in name:
        return name, None
    last = numbers[-1]
    return f"{name[: last.start()]}*{name[last.end() :]}", int(last.group())


def joined_name(pattern: str, indices: Iterable[int | None]) -> str:
    """`blocks/0..2,5` of `blocks/*` and 0, 1, 2, 5."""
    numbers = sorted(i for i in indices if i is not None)
    if not numbers:  # `blocks/*` of a loop over stacked layers is already a name
        return pattern
    runs: list[list[int]] = []
    for i in numbers:
        if runs and i == runs[-1][1] + 1:
            runs[-1][1] = i
        else:
            runs.append([i, i])
    return pattern.replace("*", ",".join(str(a) if a == b else f"{a}..{b}" for a, b in runs))


def folded_names(names: Iterable[str]) -> list[str]:
    """Names with those that differ in their last number folded into one."""
    groups: dict[str, list[int | None]] = {}
    for name in dict.fromkeys(names):
        pattern, index = name_pattern(name)
        groups.setdefault(pattern, []).append(index)
    return [joined_name(pattern, indices) for pattern, indices in groups.items()]


# The names of the kernels of `jshard.kernels` in traced and compiled programs.

PREFIX = "jshard_"
"""The prefix of every kernel's name."""

PRODUCT = "jshard.kernels product"
"""The name of their products' results, for `jax.checkpoint` policies, which do not see a kernel's products."""

CONTEXT = "context"
"""The name of attention's result, here and in MaxText."""

ATTENTION = "dot_product_attention_fwd_wrapper"
"""JAX's operation for cuDNN attention; its results are the context, and further residuals for backward."""

_SCOPE = re.compile(r"jshard\.kernels\.(\w+)\[(\w+)\]")


def scope(kernel: str, form: str) -> str:
    """The scope of all operations of a kernel in one form: "mosaic", "interpret" or "xla"."""
    return f"jshard.kernels.{kernel}[{form}]"


def kernels_of(place: str) -> list[tuple[str, str]]:
    """Names and forms of the kernels whose scopes are in a text, outermost first."""
    return _SCOPE.findall(place)


def shortened(texts: list[str], most: int, kind: str = "") -> list[str]:
    """Returns the first texts, and how many more there are: `and 3 more lines` for the kind " lines"."""
    more = len(texts) - most
    if more <= 0:
        return texts
    return [*texts[:most], f"and {more} more{kind}"]
