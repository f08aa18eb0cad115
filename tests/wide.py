"""Further combinations of what a test that always runs has proved: `.ci/run` has them, and `pytest -m wide`."""

from typing import Any

import pytest


def wide(*values: Any) -> Any:
    """One more set of parameters of a test, for `-m wide`."""
    return pytest.param(*values, marks=pytest.mark.wide)
