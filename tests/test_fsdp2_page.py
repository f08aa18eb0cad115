"""The script of docs/from_fsdp2.md, in a process that stops and another that resumes: the losses are those of one."""

import json
import re
import subprocess
from pathlib import Path

import pytest

from tests.compiling import environment, python

PAGE = Path(__file__).parent.parent / "docs" / "from_fsdp2.md"
RUN = "import json, sys, train; print(json.dumps(train.train(sys.argv[1], until=int(sys.argv[2]))))"
TIMEOUT_S = 400


def losses_of(folder: Path, run: str, until: int) -> dict[str, float]:
    """Runs the script in a process of its own."""
    variables = environment(programs=folder / "programs")
    command = python(RUN, run, until)
    done = subprocess.run(command, cwd=folder, env=variables, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.timeout(TIMEOUT_S)
def test_a_second_process_resumes_bit_for_bit(tmp_path):
    script = "\n\n".join(re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL))
    (tmp_path / "train.py").write_text(script)
    whole = losses_of(tmp_path, "whole", 20)
    first = losses_of(tmp_path, "stopped", 10)
    rest = losses_of(tmp_path, "stopped", 20)
    assert [*first, *rest] == [str(step) for step in range(20)]
    assert {**first, **rest} == whole
    assert list((tmp_path / "stopped" / "tensorboard").iterdir())
