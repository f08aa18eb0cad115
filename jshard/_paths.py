"""Paths as users give them."""

import os
from pathlib import Path


def expanded(path: str | os.PathLike[str]) -> Path:
    """Returns the path with the home folder in place of a leading `~` or `~user`, as in a shell.

    Everything that takes a path from a user calls it first. A shell does not expand the `~` in `--out=~/runs`, in a
    configuration or in Python, and a folder named `~` would be created. As in a shell, an unknown user's `~` stays,
    and `./~` is a folder of that name.
    """
    home = Path(os.path.expanduser(path))
    if home.parts[:1] and home.parts[0].startswith("~"):
        return Path.cwd() / home  # `Path` drops the "./", and the next call would expand what is left
    return home
