"""Draws timelines as one self-contained HTML page: numbers as cards, parts of a step, and the printed report.

`jshard plan`, `jshard trace` and `jshard ckpt timeline` share it, so that a kind of work has one colour in all of them.
Bars are elements placed in percent of the width, and not an SVG that is scaled: text keeps its size on a telephone, and
a label that does not fit is left out by the browser.
"""

import dataclasses
import html
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence

from jshard._text import duration
from jshard.inspect.hlo.collectives import OTHERS
from jshard.inspect.timelines import EXPOSED, PHASES, Bar, by_lane, joined_bars, last_end_s

_LEAST_SHARE = 1 / 3000  # of an axis: narrower bars cannot be seen, and are joined with their neighbours
_FOLDED_SHARE = 0.02  # of the step: shorter parts are folded, since each is as wide as the page
_OTHER = "other"


@dataclasses.dataclass(frozen=True)
class _Color:
    """A colour of a kind of work, and of the text on it."""

    light: str  # on a light page
    text: str  # on that
    dark: str  # on a dark page; its text is nearly black


# Computation has the cold colours and communication the warm ones: two lanes of one hue would be read as one.
_COLORS: Mapping[str, _Color] = {
    "products": _Color("#2b6cb0", "#fff", "#5b9bdd"),
    "attention": _Color("#13827c", "#fff", "#3dbdb5"),
    "elementwise": _Color("#a3b8cc", "#111", "#70879f"),
    "update": _Color("#58883a", "#fff", "#8cc474"),
    "computation": _Color("#4a5f8c", "#fff", "#8fa3d1"),  # of an unknown kind
    "all-gather": _Color("#e8a33d", "#111", "#f0b35a"),
    "reduce-scatter": _Color("#b8468f", "#fff", "#de7fbd"),
    "all-reduce": _Color("#c4452d", "#fff", "#ea7560"),
    _OTHER: _Color("#86724a", "#fff", "#bba97f"),
}
_OTHER_COMMUNICATION = frozenset((*OTHERS, "all-to-all", "collective-permute", "send or recv"))

_STYLE = """
:root { color-scheme: light dark; --page: #fff; --text: #1b1f24; --faint: #59636e; --track: #eef1f4; --line: #c9d1d9;
  --neutral: #d5dbe2; --good: #2c7a3f; --bad: #b3261e; }
@media (prefers-color-scheme: dark) { :root { --page: #14181d; --text: #e6eaee; --faint: #9aa5b1; --track: #222a33;
  --line: #3d4752; --neutral: #46525f; --good: #6cc483; --bad: #ff8a80; } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 16px 16px 90px; max-width: 1280px; background: var(--page); color: var(--text);
  font: 15px/1.45 system-ui, sans-serif; overflow-wrap: anywhere; }
h1 { font-size: 22px; line-height: 1.25; margin: 0 0 6px; } h2 { font-size: 18px; margin: 32px 0 8px; }
h3 { font-size: 15px; margin: 20px 0 0; } p { margin: 0 0 10px; } .faint { color: var(--faint); font-size: 13px; }
.cards { display: grid; grid-template-columns: repeat(auto-fit, minmax(150px, 1fr)); gap: 8px; margin: 12px 0; }
.card { border: 1px solid var(--line); border-radius: 8px; padding: 8px 12px; }
.card b { display: block; font-size: 20px; line-height: 1.3; } .card.good b { color: var(--good); }
.card.bad b { color: var(--bad); }
.legend { display: flex; flex-wrap: wrap; gap: 4px 14px; font-size: 13px; margin: 12px 0; }
.legend i { display: inline-block; width: 14px; height: 14px; margin-right: 5px; vertical-align: -2px; }
.lane { font-size: 12px; color: var(--faint); margin-top: 4px; }
.bars { position: relative; height: 34px; background: var(--track); overflow: hidden; }
.bars i { position: absolute; top: 0; height: 100%; container-type: inline-size; font: 12px/22px sans-serif; }
.bars i { background-image: linear-gradient(to right, var(--page) 0 min(1px, 10%), transparent 0); }
.bars i:hover { box-shadow: inset 0 0 0 2px var(--text); z-index: 1; }
i span { display: block; padding: 0 4px; overflow: hidden; text-overflow: ellipsis; white-space: nowrap; }
@container (max-width: 40px) { i span { display: none; } }
.axis { position: relative; height: 20px; margin-top: 2px; border-top: 1px solid var(--line); }
.axis u { position: absolute; font-size: 11px; color: var(--faint); text-decoration: none; transform: translateX(-50%);
  white-space: nowrap; } .axis u:first-child { transform: none; } .axis u.end { transform: translateX(-100%); }
output { position: fixed; bottom: 0; left: 0; right: 0; padding: 8px 16px; background: var(--page); font-size: 14px;
  border-top: 1px solid var(--line); } output:empty { display: none; }
summary { cursor: pointer; margin-top: 20px; } pre { font-size: 12.5px; line-height: 1.35; overflow-x: auto; }
.neutral { background: var(--neutral); color: var(--text); border-left: 1px solid var(--page); }
.exposed, .bars i.exposed { border: 1px solid var(--bad); background: repeating-linear-gradient(45deg, var(--bad) 0 2px,
  var(--page) 2px 5px); }
.bars i.exposed { top: auto; bottom: 0; height: 12px; }
"""

# A pointer has the titles without a script, but late, and a finger has none.
_SCRIPT = """
const details = document.querySelector("output");
const show = event => {
  const bar = event.target.closest(".bars i");
  details.textContent = bar ? bar.title : "";
};
document.addEventListener("pointerover", show);
document.addEventListener("click", show);
"""
_HINT = "Point at a bar or tap it for its name, time and size."


@dataclasses.dataclass(frozen=True)
class Card:
    """A number at the top of a page."""

    name: str  # what it is
    value: str  # with its unit
    note: str = ""  # its range, or of what it is a part
    mood: str = ""  # `good` or `bad`, which has a colour


@dataclasses.dataclass(frozen=True)
class Panel:
    """A part of a step, drawn along a time axis of its own."""

    title: str  # which part
    note: str  # which times the axis shows, and their share of the step
    bars: tuple[Bar, ...]  # seconds from the begin of the part
    rounds: int = 1  # how often the part is in the step
    label: str = ""  # the title in a few letters


@dataclasses.dataclass(frozen=True)
class Section:
    """The cards and the timelines of one step."""

    cards: tuple[Card, ...]
    panels: tuple[Panel, ...]
    title: str = ""  # none if it is the only one of its page


def html_page(title: str, subtitle: str, sections: Sequence[Section], report: str) -> str:
    """Returns a self-contained page, which reads nothing from a network.

    Args:
        title: its heading.
        subtitle: what the figures are: estimated or measured, and under which assumptions.
        sections: the steps that it shows, one below the other.
        report: the text of the terminal, which is folded.
    """
    colors = _color_names(sections)
    body = "\n".join(line for section in sections for line in _section_lines(section, colors))
    return f"""<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>{html.escape(title)}</title>
<style>{_STYLE}{_color_style()}</style></head>
<body><h1>{html.escape(title)}</h1>
<p class="faint">{html.escape(subtitle)}</p>
{body}
<details><summary>The report as text</summary><pre>{html.escape(report)}</pre></details>
<output></output><script>{_SCRIPT}</script>
</body></html>
"""


# ---- colours


def _color_style() -> str:
    """Returns the rules of all kinds: pages differ in their bars, and never in their colours."""
    light = ""
    dark = ""
    for name, color in _COLORS.items():
        light += f".{name} {{ background: {color.light}; color: {color.text}; }}\n"
        dark += f".{name} {{ background: {color.dark}; color: #111; }}\n"
    return f"{light}@media (prefers-color-scheme: dark) {{\n{dark}}}\n"


def _color_names(sections: Iterable[Section]) -> dict[str, str]:
    """Returns the name of the colour of each kind that is drawn, by kind, in the order of the legend."""
    drawn: dict[str, None] = {}
    for section in sections:
        drawn |= _drawn_kinds(section.panels)
    names = {kind: kind for kind in _COLORS if kind in drawn}
    # Kinds without a colour of their own, such as the phases of a save, take those that the page does not use.
    spare = [name for name in _COLORS if name not in names]
    for kind in drawn:
        if kind not in names and kind != EXPOSED:
            names[kind] = _shared_color(kind) or spare[len(names) % len(spare)]
    if EXPOSED in drawn:
        names[EXPOSED] = EXPOSED  # last in the legend
    return names


def _drawn_kinds(panels: Iterable[Panel]) -> dict[str, None]:
    """Returns the kinds of bars, as a set that keeps the order."""
    kinds: dict[str, None] = {}
    for panel in panels:
        kinds |= dict.fromkeys(bar.kind for bar in panel.bars)
    return kinds


def _shared_color(kind: str) -> str:
    """Returns the name of a colour that kinds share; empty for a kind that needs another than the rest."""
    if kind in _OTHER_COMMUNICATION:
        return _OTHER
    return "neutral" if kind in PHASES else ""


def _legend(panels: Iterable[Panel], colors: Mapping[str, str]) -> str:
    drawn = _drawn_kinds(panels)
    kinds = [kind for kind in colors if kind in drawn and kind not in PHASES]
    marks = [f'<span><i class="{colors[kind]}"></i>{html.escape(kind)}</span>' for kind in kinds]
    return f'<div class="legend">{"".join(marks)}<span class="faint">{_HINT}</span></div>'


# ---- sections


def _section_lines(section: Section, colors: Mapping[str, str]) -> Iterator[str]:
    if section.title:
        yield f"<h2>{html.escape(section.title)}</h2>"
    if section.cards:
        yield f'<div class="cards">{"".join(map(_card, section.cards))}</div>'
    if not section.panels:
        return
    yield _legend(section.panels, colors)
    if len(section.panels) > 1:
        yield from _overview_lines(section.panels)
    total_s = _total_s(section.panels)
    folded: list[Panel] = []
    for panel in section.panels:
        if _panel_s(panel) < _FOLDED_SHARE * total_s:
            folded.append(panel)
        else:
            yield from _panel_lines(panel, colors)
    if folded:
        shown = duration(sum(_panel_s(panel) for panel in folded))
        yield f"<details><summary>{len(folded)} shorter parts of the step, {shown} together</summary>"
        for panel in folded:
            yield from _panel_lines(panel, colors)
        yield "</details>"


def _card(card: Card) -> str:
    note = f'<span class="faint">{html.escape(card.note)}</span>' if card.note else ""
    name = f'<span class="faint">{html.escape(card.name)}</span>'
    return f'<div class="card {card.mood}">{name}<b>{html.escape(card.value)}</b>{note}</div>'


def _overview_lines(panels: Sequence[Panel]) -> Iterator[str]:
    """Yields the whole step to scale: the panels are drawn on axes of their own."""
    total_s = _total_s(panels)
    bars: list[Bar] = []
    begin_s = 0.0
    for panel in panels:
        end_s = begin_s + _panel_s(panel)
        bars.append(Bar("parts", begin_s, end_s, "part", panel.label, f"{panel.title}: {panel.note}"))
        begin_s = end_s
    overview = Panel("The whole step", f"0 to {duration(total_s)}, to scale; its parts are drawn below", tuple(bars))
    yield from _panel_lines(overview, {"part": "neutral"})


def _panel_s(panel: Panel) -> float:
    """Returns how long all rounds of a part take."""
    return panel.rounds * last_end_s(panel.bars)


def _total_s(panels: Iterable[Panel]) -> float:
    return sum(_panel_s(panel) for panel in panels)


def _panel_lines(panel: Panel, colors: Mapping[str, str]) -> Iterator[str]:
    length_s = last_end_s(panel.bars) or 1.0  # an empty timeline has an axis, too
    yield '<div class="panel">'
    yield f"<h3>{html.escape(panel.title)}</h3>"
    yield f'<div class="faint">{html.escape(panel.note)}</div>'
    for name, lane in by_lane(panel.bars).items():
        yield f'<div class="lane">{html.escape(name)}</div>'
        yield f'<div class="bars">{"".join(_lane_bars(lane, length_s, colors))}</div>'
    yield _axis(length_s)
    yield "</div>"


def _lane_bars(lane: Sequence[Bar], length_s: float, colors: Mapping[str, str]) -> Iterator[str]:
    """Yields the bars of a lane, and what is exposed of them on top."""
    least_s = length_s * _LEAST_SHARE
    exposed = [bar for bar in lane if bar.kind == EXPOSED]
    for bar in joined_bars([bar for bar in lane if bar.kind != EXPOSED], least_s):
        yield _bar(bar, length_s, colors[bar.kind])
    for bar in joined_bars(exposed, least_s):
        yield _bar(bar, length_s, EXPOSED)


def _bar(bar: Bar, length_s: float, color: str) -> str:
    left_percent = 100 * bar.begin_s / length_s
    width_percent = 100 * (bar.end_s - bar.begin_s) / length_s
    label = f"<span>{html.escape(bar.label)}</span>" if bar.label else ""
    title = html.escape(f"{bar.tip}; {bar.detail}" if bar.detail else bar.tip)
    style = f"left:{left_percent:.3f}%;width:{width_percent:.3f}%"
    return f'<i class="{color}" style="{style}" title="{title}">{label}</i>'


# ---- the axis

_UNITS_S = {"us": 1e-6, "ms": 1e-3, "s": 1.0}
_NEAR_END_PERCENT = 96  # a number there would be cut off at the edge of the page, if it was centred
_MOST_INTERVALS = 6  # of the narrowest page, of 390 px, each is wider than its number


def _axis(length_s: float) -> str:
    """Returns an axis of round times; only the first has its unit, so that numbers are short."""
    unit = "us"
    unit_s = _UNITS_S[unit]
    for name, seconds in _UNITS_S.items():
        if length_s >= seconds:
            unit = name
            unit_s = seconds
    marks = ""
    for tick_s in _ticks(length_s):
        left_percent = 100 * tick_s / length_s
        text = f"{tick_s / unit_s:g}" if marks else f"0 {unit}"
        end = ' class="end"' if left_percent > _NEAR_END_PERCENT else ""
        marks += f'<u{end} style="left:{left_percent:.3f}%">{text}</u>'
    return f'<div class="axis">{marks}</div>'


def _ticks(length_s: float) -> list[float]:
    """Returns round times along an axis, 3 to 7 of them with the 0."""
    magnitude = 10.0 ** math.floor(math.log10(length_s))
    for part in (0.2, 0.5, 1.0, 2.0):
        step_s = magnitude * part
        if length_s <= _MOST_INTERVALS * step_s:
            break
    return [i * step_s for i in range(math.floor(length_s / step_s) + 1)]
