"""What is known of a path before it is written."""

import errno
import os
from pathlib import Path


def check_may_write(path: Path) -> None:
    """Raises the error with which creating a file or folder would fail. The disk stays as it is.

    A full disk, or a quota, shows only while writing.

    Args:
        path: of the file or folder; missing parents count as made on the way.

    Raises:
        OSError: a parent is a file, or may not be written; also on a file system that is mounted read-only.
    """
    existing = path.absolute()
    while not os.path.lexists(existing):
        existing = existing.parent
    if existing != path.absolute() and not existing.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(existing))
    needed = os.W_OK | os.X_OK if existing.is_dir() else os.W_OK
    if not os.access(existing, needed):
        is_read_only = os.statvfs(existing).f_flag & os.ST_RDONLY
        number = errno.EROFS if is_read_only else errno.EACCES
        raise OSError(number, os.strerror(number), str(existing))
