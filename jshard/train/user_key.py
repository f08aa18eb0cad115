"""A secret of the user: what is signed with it was made by this user, and did not come with a folder from elsewhere."""

from __future__ import annotations

import contextlib
import os
import secrets
from pathlib import Path

_KEY_BYTES = 32


def user_key(*, is_needed: bool = True) -> bytes | None:
    """Returns the key of this user; None if there is none, or it is not this user's alone.

    Args:
        is_needed: whether to create it.
    """
    try:
        file = _key_file()
        if is_needed and not file.exists():
            _create_key(file)
        status = file.stat()
        key = file.read_bytes()
    except (OSError, RuntimeError):  # no home, or one that cannot be written
        return None
    is_private = status.st_uid == os.geteuid() and not status.st_mode & 0o077
    if not is_private or len(key) != _KEY_BYTES:
        return None
    return key


def _create_key(file: Path) -> None:
    file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    draft = file.with_name(f"{file.name}.{secrets.token_hex(8)}")
    try:
        descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "wb") as stream:
            stream.write(secrets.token_bytes(_KEY_BYTES))
        # A link, not a rename: it never replaces a key with which something may be signed already.
        with contextlib.suppress(FileExistsError):  # another process was faster: its key counts
            os.link(draft, file)
    finally:
        draft.unlink(missing_ok=True)


def _key_file() -> Path:
    state = os.environ.get("XDG_STATE_HOME")
    folder = Path(state) if state else Path.home() / ".local" / "state"
    return folder / "jshard" / "key"
