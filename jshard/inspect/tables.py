"""Output of reports: tables as text that fit the terminal, and records as values of JSON."""

import dataclasses
import io
import shlex
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
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
    console.print(renderable, crop=False)  # a path or a command is whole, however long it is: see `whole_line`
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
            text = printable(thing, keep="\n\t") if isinstance(thing, str) else printed(thing)
            print(text, flush=True)


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
    style: str | None  # of rich, such as `bold`
    end_section: bool  # a line is drawn below it


@dataclasses.dataclass(frozen=True)
class _Column:
    """A column of a table."""

    index: int  # among all columns, those that are not shown included
    name: str  # without marks
    is_number: bool  # its cells are numbers, aligned on the right and never cut
    omission_rank: int  # of several columns that may be omitted the highest is the first; one with 0 is not omitted

    @classmethod
    def of(cls, index: int, marked_name: str) -> "_Column":
        """Returns the column of a name with its marks, as in `FittedTable`."""
        name = marked_name.rstrip(">?")
        marks = marked_name[len(name) :]
        return cls(index, name, ">" in marks, marks.count("?"))


class _FittedColumns(NamedTuple):
    """How a table is fitted into some room."""

    widths: dict[_Column, int]  # of the columns that are shown
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
        self._columns = [_Column.of(index, name) for index, name in enumerate(columns)]
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
        omitted = [column.name for column in self._columns if column not in layout.widths]
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
        for column, column_width in layout.widths.items():
            justify = "right" if column.is_number else "left"
            fixed = column_width if layout.is_tight else None
            table.add_column(Text(column.name), justify=justify, width=fixed, overflow="fold")
        for row in self._rows:
            cells = [Text(row.cells[column.index]) for column in layout.widths]
            table.add_row(*cells, style=row.style, end_section=row.end_section)
        yield table

    def _layout(self, room: int) -> _FittedColumns:
        """Chooses the columns that are shown, and their widths.

        Args:
            room: characters of a line.
        """
        full = {column: self._full_width(column) for column in self._columns}
        # Between columns, a space on each side and one in the middle.
        if sum(full.values()) + 3 * len(full) - 1 <= room:
            return _FittedColumns(full, is_tight=False)

        least = {column: self._least_width(column) for column in self._columns}
        for column in self._columns_to_omit():
            if sum(least.values()) + 2 * len(least) <= room:
                break
            del least[column]
        room -= 2 * len(least)
        widths = {column: full[column] for column in least}
        # The first column identifies the row: it is shrunk only if shrinking the others is not enough.
        first = next(iter(least))
        widths = _squeezed(widths, least | {first: full[first]}, room)
        widths = _squeezed(widths, least, room)
        return _FittedColumns(widths, is_tight=True)

    def _columns_to_omit(self) -> list[_Column]:
        """Returns the columns that may be omitted, in the order in which they are: of equal ones the last first."""
        optional = [column for column in self._columns if column.omission_rank]
        return sorted(optional, key=lambda column: (-column.omission_rank, -column.index))

    def _cells(self, column: _Column) -> list[str]:
        return [row.cells[column.index] for row in self._rows]

    def _full_width(self, column: _Column) -> int:
        """Returns the width at which a column wraps no line."""
        longest_line = max(map(_longest_line, self._cells(column)), default=0)
        return max(_longest_line(column.name), longest_line)

    def _least_width(self, column: _Column) -> int:
        """Returns the width at which a column cuts no number, and otherwise only long words."""
        name_width = _longest_word(column.name)
        if column.is_number:
            longest_line = max(map(_longest_line, self._cells(column)), default=0)
            return max(name_width, longest_line)
        longest_word = max(map(_longest_word, self._cells(column)), default=0)
        return max(name_width, min(_LONG, longest_word))


def made_table(title: str, *columns: str, caption: str = "") -> FittedTable:
    """Returns a table; see `FittedTable` for the names of columns."""
    return FittedTable(title, columns, caption)


def add_row(
    table: FittedTable, *cells: str | Sequence[str], style: str | None = None, end_section: bool = False
) -> None:
    """Adds a row of plain text, a cell as a text or as its lines: no markup in paths and shapes."""
    table.add_row(*cells, style=style, end_section=end_section)


def _squeezed(widths: Mapping[_Column, int], least: Mapping[_Column, int], room: int) -> dict[_Column, int]:
    """Returns widths that fit the room, if possible: the widest shrink first."""
    squeezed = dict(widths)
    while sum(squeezed.values()) > room:
        shrinkable = [column for column in squeezed if squeezed[column] > least[column]]
        if not shrinkable:
            break
        widest = max(shrinkable, key=lambda column: squeezed[column])
        squeezed[widest] -= 1
    return squeezed


def _longest_line(text: str) -> int:
    return max(map(len, text.splitlines()), default=0)


def _longest_word(text: str) -> int:
    return max(map(len, text.split()), default=0)
