"""Alone: one process at a time changes a bundle; the lock is the folder itself and leaves nothing behind."""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_NO_LOCKS = (errno.EBADF, errno.ENOLCK, errno.ENOTSUP)  # what file systems of networks say that lock no folders


@contextmanager
def alone_in(folder: Path) -> Iterator[int]:
    """A descriptor of a folder which nobody else who asks for the same has meanwhile, where the file system can tell."""
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
