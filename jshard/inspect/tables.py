"""How tables are printed, and how names that differ in a number are folded into one."""

import io
import re
import shlex
from collections.abc import Iterable
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from jshard._errors import printable

_WIDTH = 110


def printed(renderable: Any) -> str:
    """What `rich` makes of something, as plain text."""
    console = Console(file=io.StringIO(), width=_WIDTH, color_system=None, legacy_windows=False)
    console.print(renderable)
    lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    return "\n".join(line.rstrip() for line in lines)


def broken_line(command: str) -> str:
    """A long command line in several, broken before options, such that it can be pasted as it is printed."""
    lines = [""]
    for word in shlex.split(command):
        part = shlex.quote(word)
        if word.startswith("--") and len(lines[-1]) > _WIDTH / 2:
            lines[-1] += "\\"
            lines.append("    ")
        lines[-1] += f"{part} "
    return "\n".join(line.rstrip() for line in lines)


def made_table(title: str, *columns: str, caption: str = "") -> Table:
    """A table; columns whose name ends in > hold numbers."""
    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, pad_edge=False)
    table.caption, table.caption_justify = caption or None, "left"
    for i, column in enumerate(columns):
        number = column.endswith(">")
        justify = "right" if number else "left"
        table.add_column(column.rstrip(">"), justify=justify, no_wrap=number or not i, overflow="fold")
    return table


def add_row(table: Table, *cells: str, style: str | None = None, end_section: bool = False) -> None:
    """Adds a row of plain text: no markup and no control characters in paths and shapes."""
    table.add_row(*(Text(printable(cell)) for cell in cells), style=style, end_section=end_section)


def name_pattern(name: str) -> tuple[str, int | None]:
    """`blocks/3/mlp` as `blocks/*/mlp` and 3, `block_3` as `block_*` and 3: the last number in a path may differ."""
    numbers = list(re.finditer(r"(?<=[/_])\d+(?=/|$)", name))
    if not numbers or "+" in name:
        return name, None
    last = numbers[-1]
    return f"{name[: last.start()]}*{name[last.end() :]}", int(last.group())


def joined_name(pattern: str, indices: Iterable[int | None]) -> str:
    """`blocks/0..2,5` of `blocks/*` and 0, 1, 2, 5."""
    numbers = sorted(i for i in indices if i is not None)
    if not numbers:  # `blocks/*` of a loop over stacked layers is a name as it is
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


def human_bytes(count: float) -> str:
    """Bytes as text, in B, KiB, MiB, GiB or TiB."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} B" if unit == "B" else f"{count:.2f} {unit}"
        count /= 1024
    return f"{count:.2f} TiB"


def human_count(count: float) -> str:
    """A number of parameters as text: 1.23M."""
    for unit in ("", "K", "M"):
        if count < 1000:
            return f"{count:.0f}" if not unit else f"{count:.2f}{unit}"
        count /= 1000
    return f"{count:.2f}B"
