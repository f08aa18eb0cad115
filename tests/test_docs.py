"""Every Python block in the README and in docs/ runs; the README's losses are those of the plain model."""

import pathlib
import re

import numpy as np
import pytest

ROOT = pathlib.Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def blocks(page):
    return re.findall(r"^```python\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("page", [p for p in PAGES if blocks(p)], ids=lambda p: p.name)
def test_code_blocks_run(page, tmp_path, monkeypatch, capsys):
    """A page's own assertions, and whatever its blocks raise, are the test; each page is about jshard."""
    monkeypatch.chdir(tmp_path)
    namespace = {"__name__": "docs"}
    for block in blocks(page):
        exec(compile(block, page.name, "exec"), namespace)
    assert namespace["js"].__name__ == "jshard"


def test_the_readmes_losses_are_those_of_the_plain_model():
    (snippet,) = blocks(ROOT / "README.md")
    plain = "\n".join(line for line in snippet.splitlines() if "js." not in line and "jshard" not in line)
    added = [line for line in snippet.splitlines() if line not in plain.splitlines()]
    assert len(added) == 3, added
    found, wanted = {}, {}
    exec(snippet, found)
    exec(plain, wanted)
    np.testing.assert_allclose(found["losses"], wanted["losses"], rtol=1e-5)
    assert len(found["model"].blocks[0].up.kernel[...].sharding.device_set) == 8
    assert found["model"].blocks[0].up.kernel[...].addressable_shards[0].data.size * 8 == 128 * 512
