"""Folder lock: an exclusive lock on a folder, held by the one process that changes it; it leaves no file behind."""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_NO_LOCKS = (errno.EBADF, errno.ENOLCK, errno.ENOTSUP)  # what file systems of networks say that lock no folders


@contextmanager
def locked_folder(folder: Path) -> Iterator[int]:
    """The descriptor of a folder that is locked for the block; without effect on file systems that lock no folders."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
        yield descriptor
    finally:
        os.close(descriptor)
