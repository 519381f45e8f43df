"""Folder lock: an exclusive lock on a folder for the process that changes it, without a lock file."""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

_NO_LOCKS = (errno.EBADF, errno.ENOLCK, errno.ENOTSUP)  # errors of network file systems without folder locks


@contextmanager
def locked_folder(folder: Path, on_wait: Callable[[], None] = lambda: None) -> Iterator[int]:
    """Lock a folder for the block and yield its descriptor; without effect on file systems that cannot lock folders.

    `on_wait` is called if another process has the lock.
    """
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            on_wait()
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
        yield descriptor
    finally:
        os.close(descriptor)
