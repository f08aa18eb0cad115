"""Pieces of a picture of a step, as self-contained SVG: boxes in lanes, texts, the legend, the page around it."""

import dataclasses
import html
from collections.abc import Iterable, Iterator, Mapping

LANE, CHAR = 34, 6.2  # height of a lane; width of a letter
LEAST = 0.4  # narrower pieces are merged with their neighbours
COLORS = {
    "matmul": "#3b6ea5",
    "other": "#a9c3dd",
    "exposed": "#d1495b",
    "all-gather": "#2f9e6e",
    "reduce-scatter": "#e09f3e",
    "all-reduce": "#8e6bbf",
}
OTHER_KIND = "#7a7a7a"
_PAGE = """<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><title>{title}</title>
<style>body {{ font-family: sans-serif; margin: 2em; }} pre {{ font-size: 13px; line-height: 1.35; }}</style></head>
<body><h1>{title}</h1>
<p>{subtitle}</p>
{picture}
<pre>{report}</pre>
</body></html>
"""


@dataclasses.dataclass(frozen=True)
class Box:
    """A rectangle of the picture before it is written.

    Args:
        begin_s: seconds from the begin of its part of the picture.
        end_s: likewise.
        color: that it is filled with.
        label: written into it, if there is room.
        tip: shown when the pointer rests on it.
    """

    begin_s: float
    end_s: float
    color: str
    label: str
    tip: str


def merged(boxes: Iterable[Box], least_s: float) -> Iterator[Box]:
    """Joins neighbours of which one is too narrow to be seen; the longer one gives color and text."""
    last: Box | None = None
    for box in boxes:
        if last is None:
            last = box
        elif box.begin_s - last.end_s < least_s and min(box.end_s - box.begin_s, last.end_s - last.begin_s) < least_s:
            longer = max(last, box, key=lambda b: b.end_s - b.begin_s)
            last = dataclasses.replace(longer, begin_s=last.begin_s, end_s=box.end_s)
        else:
            yield last
            last = box
    if last is not None:
        yield last


def rectangle(box: Box, left: float, top: float, scale: float) -> str:
    """A box in a lane, `scale` pixels for a second."""
    x, width = left + box.begin_s * scale, (box.end_s - box.begin_s) * scale
    shape = f'<rect x="{x:.1f}" y="{top:g}" width="{max(width, 0.3):.1f}" height="{LANE}" fill="{box.color}"'
    if box.label:
        shape += ' stroke="#fff" stroke-width="0.6"'
    drawn = f"{shape}><title>{html.escape(box.tip)}</title></rect>"
    if box.label and width > CHAR * len(box.label) + 6:
        drawn += text_at(x + 3, top + 21, box.label, fill="#fff")
    return drawn


def legend(labels: Mapping[str, str], left: float, top: float) -> Iterator[str]:
    """Colors and what they mean, in a row."""
    for color, label in labels.items():
        yield f'<rect x="{left:.1f}" y="{top:g}" width="12" height="12" fill="{color}"/>'
        yield text_at(left + 17, top + 10, label)
        left += 34 + CHAR * len(label)


def opened(width: int, height: float, title: str) -> str:
    """The first line of a picture; its last one is `</svg>`."""
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height:g}"'
        f' viewBox="0 0 {width} {height:g}"'
        f' font-family="system-ui, sans-serif" font-size="12" role="img"><title>{html.escape(title)}</title>'
        f'<rect width="{width}" height="{height:g}" fill="#fff"/>'
    )


def text_at(x: float, y: float, text: str, *, fill: str = "#222", weight: str = "normal") -> str:
    """A line of text."""
    return f'<text x="{x:.1f}" y="{y:g}" fill="{fill}" font-weight="{weight}">{html.escape(text)}</text>'


def page(title: str, subtitle: str, picture: str, report: str) -> str:
    """One page that needs nothing else: a picture, and a report below it."""
    escaped = {"title": html.escape(title), "subtitle": html.escape(subtitle), "report": html.escape(report)}
    return _PAGE.format(**escaped, picture=picture)
