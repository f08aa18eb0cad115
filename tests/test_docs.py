"""Every Python block in the README and docs/ runs, every command is one; tables are complete, links lead somewhere."""

import ast
import dataclasses
import functools
import importlib.util
import json
import pathlib
import re
import shlex
import subprocess
import sys
import tomllib

import numpy as np
import pytest
import tyro

import jshard as js
from jshard import cli
from jshard.cli import ckpt
from jshard.train import Recipe
from tests.compiling import environment
from tests.public_names import public_names
from tests.wide import wide

ROOT = pathlib.Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
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


@pytest.mark.parametrize("path", sorted((ROOT / "docs" / "notebooks").glob("*.ipynb")), ids=lambda path: path.name)
def test_a_notebook_runs_and_is_stored_without_outputs(path, tmp_path):
    cells = json.loads(path.read_text())["cells"]
    assert not [cell for cell in cells if cell.get("outputs") or cell.get("execution_count")]
    links = re.findall(r"\]\(([^):]+)\)", "".join(line for cell in cells for line in cell["source"]))
    assert links and all((path.parent / link).is_file() for link in links)
    for package in ("nbclient", "ipykernel"):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed: the extra docs has it")
    run = "import nbclient, nbformat, sys; nbclient.execute(nbformat.read(sys.argv[1], 4), timeout=600)"
    env = environment(programs=tmp_path / "programs")
    done = subprocess.run([sys.executable, "-c", run, path], cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_every_public_name_is_in_the_reference_once():
    pages = sorted((ROOT / "docs" / "reference").glob("*.md"))
    names = re.findall(
        r"^::: (\S+)$", "".join(page.read_text() for page in pages if page.stem != "types"), re.MULTILINE
    )
    assert sorted(names) == sorted(public_names())


def printed(page):
    """What the page says its first block prints."""
    return re.findall(r"^losses: .*?(?=^```)", page.read_text(), re.MULTILINE | re.DOTALL)


@pytest.mark.wide
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
        assert not anchor or anchor in anchors(target), link


@functools.cache
def anchors(target):
    """What a link may name after `#`: titles and entries of a page, tests of a file."""
    if target.suffix == ".py":
        return set(re.findall(r"^def (test_\w+)", target.read_text(), re.MULTILINE))
    titles = re.findall(r"^#+ (.+)$", target.read_text(), re.MULTILINE)
    entries = re.findall(r"^::: (\S+)$", target.read_text(), re.MULTILINE)  # of the reference
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles} | set(entries)


def test_the_manifests_of_the_docs_are_those_that_are_tried():
    shown = re.findall(r"^```yaml\n(.*?)^```", (ROOT / "docs" / "kubernetes.md").read_text(), re.M | re.S)
    assert shown == [(ROOT / "launch" / name).read_text() for name in ("train.yaml", "train-job.yaml")]


def test_each_tick_of_the_matrix_names_its_test():
    """That the test exists, the test of links has shown."""
    page = (ROOT / "docs" / "support.md").read_text()
    ticks = page.count("✓")
    assert ticks > 80 and len(re.findall(r"\[✓\]\([\w./]+\.py#test_\w+\)", page)) == ticks


def test_every_report_is_listed():
    listed = set(re.findall(r"results/([\w-]+\.md)", (ROOT / "docs" / "benchmarks.md").read_text()))
    assert listed == {path.name for path in (ROOT / "benchmarks" / "results").glob("*.md")}


def test_the_version_of_the_package_has_its_changes():
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    changes = (ROOT / "CHANGELOG.md").read_text()
    assert re.search(rf"^## \[{re.escape(version)}\] - \d{{4}}-\d\d-\d\d$", changes, re.MULTILINE)
    assert js.__version__ == version


def test_every_page_is_in_the_menu():
    menu = re.findall(r": ((?:reference/)?\w+\.md)$", (ROOT / "docs" / "mkdocs.yml").read_text(), re.MULTILINE)
    pages = [*(ROOT / "docs").glob("*.md"), *(ROOT / "docs" / "reference").glob("*.md")]
    assert sorted(menu) == sorted(str(page.relative_to(ROOT / "docs")) for page in pages)


def texts_of_the_library():
    """Each text in the library's source; `...` stands for what is filled in."""
    for path in (ROOT / "jshard").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.JoinedStr):
                yield "".join(part.value if isinstance(part, ast.Constant) else "..." for part in node.values)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield node.value


def test_the_messages_of_the_index_are_in_the_source():
    found = "\n".join(texts_of_the_library())
    listed = re.findall(r"^\| `(.+?)` \|", (ROOT / "docs" / "errors.md").read_text(), re.MULTILINE)
    assert len(listed) > 50 and [message for message in listed if message not in found] == []


def test_every_command_has_its_help_on_the_page():
    shown = re.findall(r"^::: jshard (.+)$", (ROOT / "docs" / "cli.md").read_text(), re.MULTILINE)
    assert shown == [
        name
        for command in cli.COMMANDS
        for name in ([f"ckpt {n}" for n in ckpt.COMMANDS] if command == "ckpt" else [command])
    ]


class ParsedError(Exception):
    """Ends a command when its arguments are read."""


def commands(page):
    """The lines that begin with `jshard`, in blocks that are no Python; where some begin with `$`, those."""
    for language, block in re.findall(r"^```(\w*)\n(.*?)^```", page.read_text().replace("\\\n", ""), re.M | re.S):
        prompt = r"\$ " if block.startswith("$ ") else ""
        yield from re.findall(rf"^{prompt}jshard (.+)$", block, re.MULTILINE) if language != "python" else ()


@pytest.mark.parametrize("page", [page for page in PAGES if list(commands(page))], ids=lambda p: p.name)
def test_the_parser_takes_every_command(page, monkeypatch):
    parse = tyro.cli

    def parsed(*args, **kwargs):
        parse(*args, **kwargs)
        raise ParsedError

    monkeypatch.setattr(tyro, "cli", parsed)
    for command in commands(page):
        with pytest.raises(ParsedError):
            cli._run(shlex.split(re.split(" [>#] ", command)[0]))
