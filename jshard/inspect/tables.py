"""How tables are printed."""

import io
import shlex
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from rich import box
from rich.console import Console, ConsoleOptions, RenderableType
from rich.table import Table
from rich.text import Text

from jshard.errors import printable

_PIPED_WIDTH = 110  # of what no terminal shows
_LONG = 24  # characters of a word that may be broken, where nothing else helps


def width() -> int:
    """Characters of a line: those of the terminal, if standard output is one."""
    return Console(file=sys.stdout).width if _is_terminal() else _PIPED_WIDTH


def printed(renderable: Any) -> str:
    """What `rich` makes of something, as plain text."""
    console = Console(file=io.StringIO(), width=width(), color_system=None, legacy_windows=False)
    console.print(renderable, crop=False)
    lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    return "\n".join(line.rstrip() for line in lines)


class Printed:
    """A base of what `print`, the console and notebooks show as its `__rich__` says."""

    def __str__(self) -> str:
        return printed(self)

    __repr__ = __str__


def show(*things: Any) -> None:
    """Prints texts, and what `rich` can print: in colour on a terminal, as plain text elsewhere.

    On a terminal lines end between words; elsewhere the lines of a text stay whole.
    """
    for thing in things:
        if _is_terminal():
            plain = Text(thing) if isinstance(thing, str) else thing
            Console(file=sys.stdout, highlight=False).print(plain, crop=False)
        else:
            print(thing if isinstance(thing, str) else printed(thing), flush=True)


def _is_terminal() -> bool:
    return sys.stdout is not None and not sys.stdout.closed and sys.stdout.isatty()


def whole_line(text: str) -> Text:
    """A line that is not broken, as it is to be copied: a path, a command."""
    return Text(text, no_wrap=True, overflow="ignore")


def broken_line(command: str) -> str:
    """A long command line in several, broken before options, such that it can be pasted as it is printed."""
    lines, longest = [""], width() / 2
    for word in shlex.split(command):
        part = shlex.quote(word)
        if word.startswith("--") and len(lines[-1]) > longest:
            lines[-1] += "\\"
            lines.append("    ")
        lines[-1] += f"{part} "
    return "\n".join(line.rstrip() for line in lines)


class FittedTable:
    """A table that takes the width it is given, and cuts neither a number nor a word.

    Where there is too little room, texts are wrapped between words. Where that does not suffice, columns are left out,
    and the caption names them; then long words are broken. A column whose name ends in > holds numbers; one that ends
    in ? may be left out, and in ?? before the others.
    """

    def __init__(self, title: str, columns: Sequence[str], caption: str = "") -> None:
        self.title, self.caption = title, caption
        self._names = [column.rstrip(">?") for column in columns]
        self._is_number = [">" in column[len(name) :] for name, column in zip(self._names, columns, strict=True)]
        self._spare = [column[len(name) :].count("?") for name, column in zip(self._names, columns, strict=True)]
        self._rows: list[tuple[list[str], str | None, bool]] = []

    def add_row(self, *cells: str | Sequence[str], style: str | None = None, end_section: bool = False) -> None:
        """Adds a row of plain text, a cell as a text or as its lines: no control characters in paths and shapes."""
        texts = ["\n".join(map(printable, [cell] if isinstance(cell, str) else cell)) for cell in cells]
        self._rows.append((texts, style, end_section))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        shown, widths, is_tight = self._layout(options.max_width)
        left_out = ", ".join(name for i, name in enumerate(self._names) if i not in shown)
        caption = f"{self.caption} Left out at this width: {left_out}.".strip() if left_out else self.caption
        table = Table(
            title=Text(self.title, style="bold") if self.title else None,
            title_justify="left",
            caption=Text(caption, style="table.caption") if caption else None,
            caption_justify="left",
            box=box.SIMPLE_HEAD,
            pad_edge=False,
            collapse_padding=is_tight,
        )
        for i, room in zip(shown, widths, strict=True):
            justify = "right" if self._is_number[i] else "left"
            fixed = room if is_tight else None
            table.add_column(Text(self._names[i]), justify=justify, width=fixed, overflow="fold")
        for cells, style, end_section in self._rows:
            table.add_row(*(Text(cells[i]) for i in shown), style=style, end_section=end_section)
        yield table

    def _layout(self, room: int) -> tuple[list[int], list[int], bool]:
        """The columns that are shown, their widths, and whether they stand close together."""
        shown = list(range(len(self._names)))
        most = [max(_longest_line(text) for text in self._texts(i)) for i in shown]
        if sum(most) + 3 * len(shown) - 1 <= room:
            return shown, most, False
        least = [self._least(i) for i in shown]
        for spare in sorted((i for i in shown if self._spare[i]), key=lambda i: (-self._spare[i], -i)):
            if sum(least[i] for i in shown) + 2 * len(shown) <= room:
                break
            shown.remove(spare)
        room -= 2 * len(shown)
        widths = [most[i] for i in shown]
        first_whole = [most[shown[0]], *(least[i] for i in shown[1:])]  # it says what a row is about
        for limits in (first_whole, [least[i] for i in shown]):
            widths = _squeezed(widths, limits, room)
        return shown, widths, True

    def _texts(self, i: int) -> list[str]:
        return [self._names[i], *(cells[i] for cells, _, _ in self._rows)]

    def _least(self, i: int) -> int:
        """The width at which a column cuts no number, and of other texts only long words."""
        name, *cells = self._texts(i)
        if self._is_number[i]:
            return max((_longest_word(name), *map(_longest_line, cells)))
        return max(_longest_word(name), min(_LONG, max(map(_longest_word, cells), default=0)))


def made_table(title: str, *columns: str, caption: str = "") -> FittedTable:
    """A table; see `FittedTable` for what the names of columns say."""
    return FittedTable(title, columns, caption)


def add_row(
    table: FittedTable, *cells: str | Sequence[str], style: str | None = None, end_section: bool = False
) -> None:
    """Adds a row of plain text, a cell as a text or as its lines: no markup in paths and shapes."""
    table.add_row(*cells, style=style, end_section=end_section)


def _squeezed(widths: Sequence[int], least: Sequence[int], room: int) -> list[int]:
    """Widths that need no more room, if that can be: the widest give first."""
    found = list(widths)
    while sum(found) > room:
        can = [i for i in range(len(found)) if found[i] > least[i]]
        if not can:
            break
        found[max(can, key=lambda i: found[i])] -= 1
    return found


def _longest_line(text: str) -> int:
    return max(map(len, text.splitlines()), default=0)


def _longest_word(text: str) -> int:
    return max(map(len, text.split()), default=0)
