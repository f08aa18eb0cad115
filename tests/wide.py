"""Further combinations of what a test that always runs has proved: `pytest -m wide` and `.ci/run` have them."""

from typing import Any

import pytest


def wide(*values: Any) -> Any:
    """One more set of parameters of a test, for `-m wide`."""
    return pytest.param(*values, marks=pytest.mark.wide)


def slow(*values: Any) -> Any:
    """One more set of parameters of a test, for `-m slow`: what a change of the thing itself should be tried on."""
    return pytest.param(*values, marks=pytest.mark.slow)
