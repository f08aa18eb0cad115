"""Numbers and names as text: bytes, counts, times, names that differ in a number; kernel names in programs."""

import math
import re
from collections.abc import Iterable

# Numbers.


def human_bytes(count: float, digits: int = 2) -> str:
    """Returns bytes as text, in B, KiB, MiB, GiB or TiB."""
    if count < 1024:
        return f"{count:.0f} B"
    for unit in ("KiB", "MiB", "GiB"):
        count /= 1024
        if count < 1024:
            return f"{count:.{digits}f} {unit}"
    return f"{count / 1024:.{digits}f} TiB"


def human_count(count: float) -> str:
    """Returns a number of parameters as text: 1.23M."""
    if count < 1000:
        return f"{count:.0f}"
    for unit in ("K", "M"):
        count /= 1000
        if count < 1000:
            return f"{count:.2f}{unit}"
    return f"{count / 1000:.2f}B"


def three_digits(value: float) -> str:
    """Returns a positive number as text, to three significant digits, at most as many after the point."""
    if not 0 < value < math.inf:
        return f"{value:.0f}"
    magnitude = math.floor(math.log10(value))  # 0 for 1 to 9.99, 1 for 10 to 99.9
    digits = min(3, max(0, 2 - magnitude))
    return f"{value:.{digits}f}"


def loss_text(value: float) -> str:
    """Returns a loss or metric as text: four digits after the point, or four significant ones for small values."""
    if value == 0 or 1e-2 <= abs(value) < 1e5:
        return f"{value:.4f}"
    return f"{value:.4g}"


_IRREGULAR = {"leaf": "leaves", "process": "processes", "batch": "batches", "entry": "entries", "copy": "copies"}


def counted(count: int, singular: str, plural: str | None = None) -> str:
    """Returns a number with its noun: 1 leaf, 2 leaves.

    Args:
        count: the number.
        singular: the noun for a single thing, or a clause that begins with it: "leaf", "leaf differs".
        plural: the same for several; by default the plural of the last word of `singular`.
    """
    if count == 1:
        return f"1 {singular}"
    if plural is None:
        *adjectives, noun = singular.split(" ")
        plural = " ".join([*adjectives, _IRREGULAR.get(noun, f"{noun}s")])
    return f"{count} {plural}"


# Times.


def duration(seconds: float) -> str:
    """Returns a time as text: three digits, in s, ms or us."""
    if seconds >= 1 or seconds == 0:
        return f"{three_digits(seconds)} s"
    if seconds >= 1e-3:
        return f"{three_digits(seconds / 1e-3)} ms"
    return f"{three_digits(seconds / 1e-6)} us"


def clock_text(seconds: float) -> str:
    """Returns a time as text, as on a clock: 0:50, 1:02:03, 2d 03:00:00."""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{days}d {hours:02}:{minutes:02}:{seconds:02}"
    if hours:
        return f"{hours}:{minutes:02}:{seconds:02}"
    return f"{minutes}:{seconds:02}"


# Names that differ in the number of a layer.

_LAYER_DIGITS = 9
_NUMBER_IN_PATH = re.compile(rf"(?<=[/_])\d{{1,{_LAYER_DIGITS}}}(?=/|$)")


def is_layer(key: str) -> bool:
    """Returns whether a key of a path may be the number of a layer; `int` fails on thousands of digits."""
    return key.isdecimal() and len(key) <= _LAYER_DIGITS


def name_pattern(name: str) -> tuple[str, int | None]:
    """Returns `blocks/*/mlp` and 3 for `blocks/3/mlp`, `block_*` and 3 for `block_3`: the last number in a path varies.

    A name without a number, or of several units joined by `+`, is its own pattern, with None.
    """
    # The last one: layers are the innermost loop of `stages/1/blocks/3/mlp`.
    numbers = list(_NUMBER_IN_PATH.finditer(name))
    if not numbers or "+" in name:
        return name, None
    last = numbers[-1]
    return f"{name[: last.start()]}*{name[last.end() :]}", int(last.group())


def joined_name(pattern: str, indices: Iterable[int | None]) -> str:
    """Returns `blocks/0..2,5` for `blocks/*` and 0, 1, 2, 5."""
    numbers = sorted(index for index in indices if index is not None)
    if not numbers:  # `blocks/*` of a loop over stacked layers is already a name
        return pattern
    runs: list[list[int]] = []  # of each the first and the last number
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return pattern.replace("*", ",".join(_run_text(first, last) for first, last in runs))


def _run_text(first: int, last: int) -> str:
    return str(first) if first == last else f"{first}..{last}"


def folded_names(names: Iterable[str]) -> list[str]:
    """Returns names with those that differ in their last number folded into one."""
    indices: dict[str, list[int | None]] = {}
    for name in dict.fromkeys(names):
        pattern, index = name_pattern(name)
        indices.setdefault(pattern, []).append(index)
    return [joined_name(pattern, of_pattern) for pattern, of_pattern in indices.items()]


def shortened(texts: list[str], most: int, kind: str = "") -> list[str]:
    """Returns the first texts, and how many more there are: `and 3 more lines` for the kind " lines"."""
    num_more = len(texts) - most
    if num_more <= 0:
        return texts
    return [*texts[:most], f"and {num_more} more{kind}"]


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
    """Returns the scope of all operations of a kernel in one form: "mosaic", "interpret" or "xla"."""
    return f"jshard.kernels.{kernel}[{form}]"


def kernels_of(place: str) -> list[tuple[str, str]]:
    """Returns names and forms of the kernels whose scopes are in a text, outermost first."""
    return _SCOPE.findall(place)
