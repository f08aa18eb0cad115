"""The guide to adding a rule: its tests fail without the record that it adds, and pass with it."""

import pathlib
import re

import pytest

from jshard.engine.rules import PRIMITIVES

PAGE = pathlib.Path(__file__).parents[2] / "docs" / "adding_a_rule.md"


def test_the_guides_tests_fail_before_its_rule_and_pass_after() -> None:
    blocks = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    primitive, tests, record, _ = blocks
    primitive = primitive.replace('jax.config.update("jax_num_cpu_devices", 8)', "")  # the tests have them
    names: dict = {"__name__": "adding_a_rule"}
    exec(primitive, names)
    exec(tests, names)
    checks = [function for name, function in names.items() if name.startswith("test_")]
    assert len(checks) == 4
    for check in checks:
        with pytest.raises(AssertionError, match=r"whole|sum"):
            check()
    try:
        exec(record, names)
        for check in checks:
            check()
    finally:
        PRIMITIVES.pop("rotate_half", None)
