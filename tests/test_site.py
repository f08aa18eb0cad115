"""The built site: each public name with its example and links, no link to a dead end, and words that readers look for.

It is built once for all tests of this file; `BUILT_SITE` names one that is there already.
"""

import functools
import html
import inspect
import json
import os
import pathlib
import pydoc
import re
import subprocess
import sys
import typing
import urllib.parse
import zlib

import pytest

from tests.public_names import public_names

ROOT = pathlib.Path(__file__).parent.parent
SEARCHED_FOR = {
    "multi-node": "processes/",
    "flash attention": "kernels/",
    "SFT": "fine_tuning/",
    "early stopping": "training/",
    "FSDP2": "from_fsdp2/",
    "migrate": "from_fsdp2/",
}


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> pathlib.Path:
    pytest.importorskip("mkdocs", reason="needs the extra docs")
    if built := os.environ.get("BUILT_SITE"):
        return ROOT / built
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--config-file", ROOT / "docs" / "mkdocs.yml"]
    done = subprocess.run([*command, "--site-dir", folder], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return folder


class Page:
    """What a page links to, and what can be linked to in it."""

    def __init__(self, text: str) -> None:
        self.links = {html.unescape(link) for link in re.findall(r'\s(?:href|src)="([^"]+)"', text)}
        self.anchors = {"", *re.findall(r'\sid="([^"]+)"', text)}


@functools.cache
def read(path: pathlib.Path) -> Page:
    return Page(path.read_text())


def test_the_help_of_commands_is_on_the_site(site):
    assert "--stall-timeout" in (site / "cli" / "index.html").read_text()


def dead_links(site: pathlib.Path, path: pathlib.Path) -> list[str]:
    dead = []
    for link in read(path).links:
        parts = urllib.parse.urlsplit(link)
        if parts.scheme or parts.netloc:
            continue
        target = path.parent / urllib.parse.unquote(parts.path) if parts.path else path
        target = target / "index.html" if target.is_dir() else target
        is_there = target.is_file() and target.resolve().is_relative_to(site.resolve())
        has_anchor = target.suffix != ".html" or urllib.parse.unquote(parts.fragment) in read(target.resolve()).anchors
        if not is_there or not has_anchor:
            dead.append(link)
    return dead


def test_no_link_of_the_site_is_dead(site):
    pages = [path.resolve() for path in site.rglob("*.html") if path.name != "404.html"]  # its links begin with /
    assert len(pages) > 120  # also those of tests, reports and notebooks
    dead = {str(path.relative_to(site.resolve())): dead_links(site, path) for path in pages}
    assert {name: links for name, links in dead.items() if links} == {}


def test_each_tick_leads_to_its_test(site):
    page = (site / "support" / "index.html").read_text()
    ticks = re.findall(r'<a href="([^"]+)">✓</a>', page)
    assert len(ticks) == page.count("✓") > 80
    assert all(re.search(r"files/tests/.+/#test_\w+$", tick) for tick in ticks)


def test_reports_and_notebooks_are_pages(site):
    reports = {path.stem for path in (ROOT / "benchmarks" / "results").glob("*.md")}
    assert {path.name for path in (site / "files" / "benchmarks" / "results").iterdir() if path.is_dir()} == reports
    for notebook in (ROOT / "docs" / "notebooks").glob("*.ipynb"):
        page = (site / "notebooks" / notebook.stem / "index.html").read_text()
        code = [cell for cell in json.loads(notebook.read_text())["cells"] if cell["cell_type"] == "code"]
        assert page.count('<div class="language-python highlight">') == len(code)


def entries(site: pathlib.Path) -> dict[str, str]:
    """The part of a page that documents a name, by the name's path."""
    parts: dict[str, str] = {}
    for path in (site / "reference").glob("*/index.html"):
        heading = r'<h3 id="([\w.]+)" class="doc doc-heading">'
        _, *pieces = re.split(heading, path.read_text())
        parts.update(zip(pieces[::2], pieces[1::2], strict=True))
    return parts


def test_every_public_name_has_its_entry_and_its_example(site):
    parts = entries(site)
    assert [name for name in public_names() if name not in parts] == []
    for name in public_names():
        is_documented = inspect.isclass(pydoc.locate(name)) or inspect.isroutine(pydoc.locate(name))
        if is_documented and ">>> " in (inspect.getdoc(pydoc.locate(name)) or ""):
            assert '<span class="gp">&gt;&gt;&gt; </span>' in parts[name], name
            assert '<div class="language-pycon highlight">' in parts[name], name
        assert "<blockquote>" not in parts[name] and "&gt;&gt;&gt; js" not in parts[name], name


def test_what_is_returned_is_one_row(site):
    for name, part in entries(site).items():
        if name in public_names() and inspect.isfunction(pydoc.locate(name)):
            for table in re.findall(r"Returns:</span>.*?<tbody>(.*?)</tbody>", part, re.DOTALL):
                assert table.count("<tr") == 1, name


def test_public_paths_are_in_the_inventory(site):
    """Other projects' documentation links by it."""
    _, _, packed = (site / "objects.inv").read_bytes().partition(b"zlib.\n")
    listed = {line.split()[0] for line in zlib.decompress(packed).decode().splitlines()}
    assert [name for name in public_names() if name not in listed] == []


def test_every_type_of_jshard_in_a_signature_is_a_link(site):
    """What is not linked is a constant, a type variable or a field."""
    parts = "".join(part for name, part in entries(site).items() if name in public_names())
    assert parts.count('<a class="autorefs autorefs-internal" title="jshard.') > 100
    unlinked = set(re.findall(r'<span title="(jshard\.[\w.]+)">', parts))
    assert [name for name in unlinked if is_type(name)] == []


def is_type(path: str) -> bool:
    if inspect.isclass(pydoc.locate(path.rpartition(".")[0])):
        return False  # a field
    value = pydoc.locate(path)
    return inspect.isclass(value) or typing.get_origin(value) is not None or value is typing.Any


def test_readers_find_their_words(site):
    index = json.loads((site / "search" / "search_index.json").read_text())["docs"]
    for words, page in SEARCHED_FOR.items():
        places = [entry["location"] for entry in index if words.lower() in f"{entry['title']} {entry['text']}".lower()]
        assert any(place.startswith(page) for place in places), words
    assert not [entry for entry in index if entry["location"].startswith("files/")]  # they would hide the pages


def test_figures_take_the_colours_of_the_page(site):
    figures = list((ROOT / "docs" / "figures").glob("*.svg"))
    pages = "".join(path.read_text() for path in site.glob("*/index.html"))
    assert pages.count('<figure class="drawing"') == len(figures) >= 5
    # Drawn for a phone: so narrow that text is not made smaller there.
    assert all(int(re.search(r'viewBox="0 0 (\d+) ', path.read_text())[1]) <= 400 for path in figures)
