"""The versions of what is installed."""

import importlib.metadata
from collections.abc import Iterable

import jax


def jax_version() -> str:
    """The version of jax, for what was measured under it."""
    return jax.__version__


def versions(packages: Iterable[str]) -> dict[str, str]:
    """The versions of some packages, for what was written by them."""
    return {package: importlib.metadata.version(package) for package in packages}
