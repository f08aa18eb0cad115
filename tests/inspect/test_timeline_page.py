"""Pages of timelines: one colour per kind, axes that say what they show and fit a telephone, waits where they are."""

import dataclasses
import html.parser
import re

import pytest

from jshard.inspect.timeline_page import Card, Panel, Section, html_page
from jshard.inspect.timelines import Bar, exposed_bars, exposure_text

GATHER = Bar("communication", 1.0, 4.0, "all-gather", "blocks/0", "all-gather blocks/0: 3.00 s", "1.0 MiB")
PRODUCT = Bar("computation", 0.0, 2.0, "products", "", "dot.1: 2.00 s", "products")
WIDTH_PX = 390 - 2 * 16  # of a telephone, without the margins
DIGIT_PX = 7  # of the axis, whose text has 11 px


@dataclasses.dataclass
class Element:
    tag: str
    attributes: dict[str, str | None]
    inside: list[str]  # tags around it
    text: str = ""

    def percent(self, name: str) -> float:
        style = re.search(rf"{name}:([0-9.]+)%", self.attributes["style"] or "")
        assert style is not None
        return float(style[1])


class Elements(html.parser.HTMLParser):
    """All elements of a page, in order."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.all: list[Element] = []
        self._open: list[Element] = []
        self.feed(page)
        assert not self._open  # what is opened is closed

    def handle_starttag(self, tag, attrs):
        element = Element(tag, dict(attrs), [outer.tag for outer in self._open])
        self.all.append(element)
        if tag != "meta":
            self._open.append(element)

    def handle_endtag(self, tag):
        assert self._open.pop().tag == tag

    def handle_data(self, data):
        if self._open:
            self._open[-1].text += data

    def of_class(self, name: str) -> list[Element]:
        return [element for element in self.all if name in (element.attributes.get("class") or "").split()]

    def bars(self) -> list[Element]:
        return [element for element in self.all if element.tag == "i" and "title" in element.attributes]


def page_of(*bars: Bar, **changes) -> str:
    section = Section((), (Panel("All", "0 to 4 s", bars),))
    return html_page("Title", "Subtitle", [dataclasses.replace(section, **changes)], "the <report>")


def test_waits_are_marked_over_the_collective_that_they_wait_for():
    waits = [(0.5, 1.5), (3.0, 9.0)]
    marks = exposed_bars([GATHER, dataclasses.replace(GATHER, begin_s=20.0, end_s=21.0)], waits)
    assert [(mark.lane, mark.begin_s, mark.end_s) for mark in marks] == [
        ("communication", 1.0, 1.5),
        ("communication", 3.0, 4.0),
    ]
    page = Elements(page_of(PRODUCT, GATHER, *marks))
    *bars, first, last = page.bars()
    assert [bar.attributes["class"] for bar in bars] == ["products", "all-gather"]
    assert (first.percent("left"), first.percent("width")) == (25.0, 12.5)
    assert last.attributes["title"] == "exposed 1.00 s of all-gather blocks/0: 3.00 s; 1.0 MiB"


def test_how_much_is_exposed_is_told():
    assert exposure_text(32, 1.0, 0.25) == "in the step 32 runs, 1.00 s, of which 250 ms exposed"
    assert exposure_text(1, 1.0, 1e-18) == "in the step 1 run, 1.00 s, all of it hidden"


def test_a_kind_has_one_colour_on_every_page():
    one = page_of(PRODUCT, GATHER)
    other = page_of(GATHER, Bar("communication", 0, 1, "all-reduce", "", ""), PRODUCT)
    style = re.compile(r"<style>.*</style>", re.DOTALL)
    assert style.findall(one) == style.findall(other)
    for scheme in style.findall(one)[0].split("@media (prefers-color-scheme: dark)")[-2:]:
        colors = re.findall(r"^\.[a-z-]+ \{ background: (#\w+); color: #\w+; \}$", scheme, re.MULTILINE)
        assert len(colors) == len(set(colors)) >= 8


def test_the_legend_has_the_kinds_that_are_drawn():
    permute = dataclasses.replace(GATHER, kind="collective-permute")
    page = Elements(page_of(PRODUCT, permute, *exposed_bars([permute], [(1.0, 2.0)])))
    legend = [
        element.attributes["class"] for element in page.all if element.tag == "i" and element.inside[-1] == "span"
    ]
    assert legend == ["products", "other", "exposed"]
    # Phases of a save have no colour of their own, and get different ones.
    saves = Elements(page_of(*(Bar("process 0", at, at + 1, f"phase {at}", "", "") for at in range(5))))
    assert len({bar.attributes["class"] for bar in saves.bars()}) == 5


@pytest.mark.parametrize("length_s", [3.1e-7, 1e-6, 4e-5, 99e-5, 1e-3, 0.0123, 0.25, 0.6, 1.0, 7.3, 60.0, 2999.0])
def test_the_numbers_of_an_axis_have_room_on_a_telephone(length_s):
    page = Elements(page_of(dataclasses.replace(GATHER, begin_s=0.0, end_s=length_s)))
    marks = [element for element in page.all if element.tag == "u"]
    assert 3 <= len(marks) <= 7
    end_px = -1.0
    for mark in marks:
        text_px = DIGIT_PX * len(mark.text)
        at_px = mark.percent("left") / 100 * WIDTH_PX
        shift = 0.5
        if mark is marks[0]:
            shift = 0.0
        elif mark.attributes.get("class") == "end":
            shift = 1.0
        assert at_px - shift * text_px > end_px
        end_px = at_px + (1 - shift) * text_px
        number = float(mark.text.removesuffix(" us").removesuffix(" ms").removesuffix(" s"))
        unit_s = {"us": 1e-6, "ms": 1e-3, "s": 1.0}[marks[0].text.split()[1]]
        assert number * unit_s == pytest.approx(mark.percent("left") / 100 * length_s, rel=1e-3)
    assert end_px <= WIDTH_PX + DIGIT_PX


def test_parts_of_a_step_are_drawn_below_the_whole_and_short_ones_are_folded():
    loop = Panel("One of 32 rounds", "0 to 4 s of 129 s", (PRODUCT, GATHER), rounds=32, label="backward x 32")
    short = Panel("Update", "from 128 s on", (dataclasses.replace(PRODUCT, end_s=1.0),), label="update")
    page = Elements(page_of(panels=(loop, short)))
    assert [element.text for element in page.all if element.tag == "h3"] == [
        "The whole step",
        "One of 32 rounds",
        "Update",
    ]
    titles = {element.text: element.inside for element in page.all if element.tag == "h3"}
    assert "details" in titles["Update"] and "details" not in titles["One of 32 rounds"]
    rounds, update = page.of_class("neutral")
    assert rounds.percent("width") == pytest.approx(100 * 128 / 129, abs=1e-3)
    assert update.attributes["title"] == "Update: from 128 s on"


def test_numbers_are_cards_and_the_text_is_folded():
    text = page_of(GATHER, cards=(Card("memory", "9 GiB", "does not fit", mood="bad"), Card("<step>", "1 s")))
    page = Elements(text)
    memory, step = page.of_class("card")
    assert memory.attributes["class"] == "card bad" and step.attributes["class"] == "card "
    assert [element.text for element in page.all if element.tag == "b"] == ["9 GiB", "1 s"]
    (report,) = (element for element in page.all if element.tag == "pre")
    assert report.text == "the <report>" and report.inside[-1] == "details"
    assert not any(external in text for external in ("http:", "https:", "href", "src=", "url("))
