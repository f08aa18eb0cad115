"""Every Python block in the README and in docs/ runs; tables are complete, links lead somewhere."""

import dataclasses
import pathlib
import re
import subprocess
import sys

import numpy as np
import pytest

import jshard as js
from jshard.train import Recipe
from tests.compiling import environment
from tests.wide import wide

ROOT = pathlib.Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
# Their blocks are files and commands: test_your_model.py.
FOLLOWED = ("your_model.md", "loss_and_data.md", "own_loop.md")
READ_FIRST = ("README.md",)


def blocks(page):
    return re.findall(r"^```python\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)


WITH_CODE = [page for page in PAGES if blocks(page) and page.name not in FOLLOWED]


@pytest.mark.parametrize(
    "page", [page if page.name in READ_FIRST else wide(page) for page in WITH_CODE], ids=lambda page: page.name
)
def test_a_page_runs_on_one_device_in_an_empty_folder(page, tmp_path):
    """As a reader would run it; the page's own assertions, and whatever its blocks raise, are the test."""
    folder = tmp_path / "empty"
    folder.mkdir()
    (folder / "page.py").write_text("\n\n".join(blocks(page)))
    env = environment(programs=tmp_path / "programs")
    done = subprocess.run([sys.executable, "page.py"], cwd=folder, env=env, capture_output=True, text=True)
    assert done.returncode == 0 and "Traceback" not in done.stderr, done.stdout + done.stderr
    assert [text for text in printed(page) if text not in done.stdout] == []


def test_every_public_name_is_in_the_reference_once():
    page = (ROOT / "docs" / "reference.md").read_text()
    for module in (js, js.checkpoint, js.kernels, js.train):
        names = getattr(module, "__all__", None) or [name for name in dir(module) if name[0] != "_"]
        found = [getattr(module, name) for name in names if name != "Batch"]
        own = [one for one in found if getattr(one, "__module__", "jshard").startswith("jshard") and callable(one)]
        missing = [one for one in own if page.count(f"::: {one.__module__}.{one.__name__}\n") != 1]
        assert not missing
    own = [name for name, one in vars(js.parallel).items() if getattr(one, "__module__", "") == "jshard.parallel"]
    assert {f"jshard.parallel.{name}" for name in own if name[0] != "_"} <= set(re.findall("::: (.*)", page))


def test_the_site_is_built_without_a_warning(tmp_path):
    pytest.importorskip("mkdocs", reason="needs the extra docs")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--config-file", ROOT / "docs" / "mkdocs.yml"]
    done = subprocess.run([*command, "--site-dir", tmp_path / "site"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "fully_shard" in (tmp_path / "site" / "reference" / "index.html").read_text()


def printed(page):
    """What the page says its first block prints."""
    return re.findall(r"^losses: .*?(?=^```)", page.read_text(), re.MULTILINE | re.DOTALL)


def test_the_readmes_losses_are_those_of_the_plain_model():
    snippet, *_ = blocks(ROOT / "README.md")
    snippet = snippet.replace('jax.config.update("jax_num_cpu_devices", 8)', "")  # the tests have them
    plain = "\n".join(line for line in snippet.splitlines() if "js." not in line and "jshard" not in line)
    added = [line for line in snippet.splitlines() if line not in plain.splitlines()]
    assert len(added) == 3, added
    found, wanted = {}, {}
    exec(snippet, found)
    exec(plain, wanted)
    np.testing.assert_allclose(found["losses"], wanted["losses"], rtol=1e-5)
    (said,) = printed(ROOT / "README.md")
    shown = [float(loss) for loss in said.splitlines()[0].split()[1:]]
    np.testing.assert_allclose(found["losses"], shown, atol=0.005001)
    assert len(found["kernel"].sharding.device_set) == 8
    assert found["kernel"].addressable_shards[0].data.size * 8 == 128 * 512


def test_the_job_script_of_the_docs_is_the_one_that_is_tried():
    (shown,) = re.findall(r"^```sh\n(#!/bin/bash\n.*?)^```", (ROOT / "docs" / "slurm.md").read_text(), re.M | re.S)
    assert shown == (ROOT / "launch" / "train.slurm").read_text()


def first_column(page, title):
    """The names in the first column of the table under a title."""
    section = re.search(rf"^## {title}\n(.*?)(?=^## |\Z)", page.read_text(), re.MULTILINE | re.DOTALL)[1]
    rows = re.findall(r"^\| (`.*?) \|", section, re.MULTILINE)
    return {name for row in rows for name in re.findall(r"`([^` ]+)[^`]*`", row)}


def test_the_table_of_settings_has_all_of_them():
    fields = {field.name for field in dataclasses.fields(Recipe)}
    assert first_column(ROOT / "docs" / "training.md", "Settings") == fields


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_links_lead_to_a_file_and_a_title(page):
    prose = re.sub(r"^```.*?^```|`[^`\n]*`", "code", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    for link in re.findall(r"\]\(([^):]+)\)", prose):
        name, _, anchor = link.partition("#")
        target = page.parent / name if name else page
        assert target.is_file(), link
        titles = re.findall(r"^#+ (.+)$", target.read_text(), re.MULTILINE)
        anchors = {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}
        assert not anchor or anchor in anchors, link
