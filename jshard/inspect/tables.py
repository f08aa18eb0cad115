"""Output of reports: tables as text that fit the terminal, and records as values of JSON."""

import dataclasses
import io
import shlex
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, ClassVar, NamedTuple, Protocol

from rich import box
from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from jshard.errors import printable

_PIPED_WIDTH = 110  # of output that no terminal shows
_LONG = 24  # characters of a word that may be broken as a last resort


class _PlainConsole(Console):
    """A console that escapes the control characters in what it prints: only its own colours reach the terminal.

    Every report passes here, and any text in one may come from a file that somebody else wrote.
    """

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterator[Segment]:
        for segment in super().render(renderable, options):
            if segment.control:
                yield segment
            else:
                yield segment._replace(text=printable(segment.text, keep="\n"))


def width() -> int:
    """Returns the characters of a line: those of the terminal, if standard output is one."""
    if not _is_terminal():
        return _PIPED_WIDTH
    return Console(file=sys.stdout).width


def printed(renderable: object) -> str:
    """Renders an object by `rich`, as plain text."""
    file = io.StringIO()
    console = _PlainConsole(file=file, width=width(), color_system=None, legacy_windows=False)
    console.print(renderable, crop=False)
    return _without_trailing_spaces(file.getvalue().splitlines())


def _without_trailing_spaces(lines: Iterable[str]) -> str:
    return "\n".join(line.rstrip() for line in lines)


class Printed:
    """A base for objects that `print`, the console and notebooks show by their `__rich__`."""

    def __str__(self) -> str:
        return printed(self)

    __repr__ = __str__


class _Record(Protocol):
    """A dataclass."""

    __dataclass_fields__: ClassVar[dict[str, dataclasses.Field[Any]]]


def dicts_of(records: Iterable[_Record]) -> list[dict[str, Any]]:
    """Returns dataclasses as values of JSON."""
    return [dataclasses.asdict(record) for record in records]


def show(*things: object) -> None:
    """Prints texts and objects that `rich` can print: in colour on a terminal, as plain text elsewhere.

    On a terminal lines end between words; elsewhere the lines of a text stay whole.
    """
    for thing in things:
        if _is_terminal():
            plain = Text(thing) if isinstance(thing, str) else thing
            _PlainConsole(file=sys.stdout, highlight=False).print(plain, crop=False)
        else:
            print(printable(thing, keep="\n\t") if isinstance(thing, str) else printed(thing), flush=True)


def _is_terminal() -> bool:
    return sys.stdout is not None and not sys.stdout.closed and sys.stdout.isatty()


def whole_line(text: str) -> Text:
    """Returns a line that is not broken, so that it can be copied: a path, a command."""
    return Text(text, no_wrap=True, overflow="ignore")


def broken_line(command: str) -> str:
    """Returns a long command in several lines, broken before options, so that it can be pasted as printed."""
    longest = width() / 2
    lines = [""]
    for word in shlex.split(command):
        part = shlex.quote(word)
        if word.startswith("--") and len(lines[-1]) > longest:
            lines[-1] += "\\"
            lines.append("    ")
        lines[-1] += f"{part} "
    return _without_trailing_spaces(lines)


class _TableRow(NamedTuple):
    """A row of a table."""

    cells: list[str]  # a cell may have several lines
    style: str | None
    end_section: bool


@dataclasses.dataclass(frozen=True)
class _Column:
    """A column of a table."""

    name: str
    is_number: bool
    omission_rank: int  # of several columns that may be omitted the highest is the first; one with 0 is not omitted

    @classmethod
    def of(cls, marked_name: str) -> "_Column":
        """Returns the column of a name with its marks, as in `FittedTable`."""
        name = marked_name.rstrip(">?")
        marks = marked_name[len(name) :]
        return cls(name, ">" in marks, marks.count("?"))


class _FittedColumns(NamedTuple):
    """How a table is fitted into some room."""

    shown: list[int]  # indices of the columns
    widths: list[int]  # of these
    is_tight: bool  # columns are close together, and their widths fixed


class FittedTable:
    """A table that fits the given width without cutting a number or a word.

    If there is too little room, texts are wrapped between words. If that is not enough, columns are omitted,
    and the caption names them; then long words are broken. A column whose name ends in > holds numbers; one that ends
    in ? may be omitted, and in ?? before the others.
    """

    def __init__(self, title: str, columns: Sequence[str], caption: str = "") -> None:
        self.title = title
        self.caption = caption
        self._columns = [_Column.of(name) for name in columns]
        self._rows: list[_TableRow] = []

    def add_row(self, *cells: str | Sequence[str], style: str | None = None, end_section: bool = False) -> None:
        """Adds a row of plain text, a cell as a text or as its lines: no control characters in paths and shapes."""
        texts = []
        for cell in cells:
            lines = [cell] if isinstance(cell, str) else cell
            texts.append("\n".join(map(printable, lines)))
        self._rows.append(_TableRow(texts, style, end_section))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        layout = self._layout(options.max_width)
        caption = self.caption
        omitted = [column.name for i, column in enumerate(self._columns) if i not in layout.shown]
        if any(omitted):  # a column without a name is not mentioned
            caption = f"{caption} Left out at this width: {', '.join(omitted)}.".strip()
        table = Table(
            title=Text(self.title, style="bold") if self.title else None,
            title_justify="left",
            caption=Text(caption, style="table.caption") if caption else None,
            caption_justify="left",
            box=box.SIMPLE_HEAD,
            pad_edge=False,
            collapse_padding=layout.is_tight,
        )
        for i, column_width in zip(layout.shown, layout.widths, strict=True):
            column = self._columns[i]
            justify = "right" if column.is_number else "left"
            fixed = column_width if layout.is_tight else None
            table.add_column(Text(column.name), justify=justify, width=fixed, overflow="fold")
        for row in self._rows:
            cells = [Text(row.cells[i]) for i in layout.shown]
            table.add_row(*cells, style=row.style, end_section=row.end_section)
        yield table

    def _layout(self, room: int) -> _FittedColumns:
        """Chooses the columns that are shown, and their widths.

        Args:
            room: characters of a line.
        """
        shown = list(range(len(self._columns)))
        full = [self._full_width(i) for i in shown]
        if sum(full) + 3 * len(shown) - 1 <= room:  # between columns, a space on each side and one in the middle
            return _FittedColumns(shown, full, is_tight=False)

        least = [self._least_width(i) for i in shown]
        needed = sum(least) + 2 * len(shown)
        for i in self._columns_to_omit():
            if needed <= room:
                break
            shown.remove(i)
            needed -= least[i] + 2
        room -= 2 * len(shown)
        widths = [full[i] for i in shown]
        least_shown = [least[i] for i in shown]
        # The first column identifies the row: it is shrunk only if shrinking the others is not enough.
        widths = _squeezed(widths, [full[shown[0]], *least_shown[1:]], room)
        widths = _squeezed(widths, least_shown, room)
        return _FittedColumns(shown, widths, is_tight=True)

    def _columns_to_omit(self) -> list[int]:
        """Returns the columns that may be omitted, in the order in which they are: of equal ones the last first."""
        optional = [i for i, column in enumerate(self._columns) if column.omission_rank]
        return sorted(optional, key=lambda i: (-self._columns[i].omission_rank, -i))

    def _cells(self, i: int) -> list[str]:
        return [row.cells[i] for row in self._rows]

    def _full_width(self, i: int) -> int:
        """Returns the width at which a column wraps no line."""
        longest_line = max(map(_longest_line, self._cells(i)), default=0)
        return max(_longest_line(self._columns[i].name), longest_line)

    def _least_width(self, i: int) -> int:
        """Returns the width at which a column cuts no number, and otherwise only long words."""
        column = self._columns[i]
        name_width = _longest_word(column.name)
        if column.is_number:
            longest_line = max(map(_longest_line, self._cells(i)), default=0)
            return max(name_width, longest_line)
        longest_word = max(map(_longest_word, self._cells(i)), default=0)
        return max(name_width, min(_LONG, longest_word))


def made_table(title: str, *columns: str, caption: str = "") -> FittedTable:
    """Returns a table; see `FittedTable` for the names of columns."""
    return FittedTable(title, columns, caption)


def add_row(
    table: FittedTable, *cells: str | Sequence[str], style: str | None = None, end_section: bool = False
) -> None:
    """Adds a row of plain text, a cell as a text or as its lines: no markup in paths and shapes."""
    table.add_row(*cells, style=style, end_section=end_section)


def _squeezed(widths: Sequence[int], least: Sequence[int], room: int) -> list[int]:
    """Returns widths that fit the room, if possible: the widest shrink first."""
    squeezed = list(widths)
    while sum(squeezed) > room:
        shrinkable = [i for i in range(len(squeezed)) if squeezed[i] > least[i]]
        if not shrinkable:
            break
        widest = max(shrinkable, key=lambda i: squeezed[i])
        squeezed[widest] -= 1
    return squeezed


def _longest_line(text: str) -> int:
    return max(map(len, text.splitlines()), default=0)


def _longest_word(text: str) -> int:
    return max(map(len, text.split()), default=0)
