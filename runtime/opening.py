"""Opening: a bundle with its engine, opened again if its folder is replaced meanwhile."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import NamedTuple

from spaceport.runtime.backends import Resolved, resolve
from spaceport.runtime.backends.engine_options import EngineOptions
from spaceport.runtime.bundle import Bundle, BundleError, ChangedWhileOpening, open_bundle

_ATTEMPTS = 4  # an export replaces a folder in one step, so the second one nearly always succeeds


class Opened(NamedTuple):
    """An open bundle and its engine."""

    bundle: Bundle
    resolved: Resolved
    options: EngineOptions
    verify_seconds: float  # until the hashes of all files were verified
    engine_seconds: float  # until the engine was opened


def open_with_engine(
    path: str | os.PathLike[str],
    backend: str,
    options_for: Callable[[Bundle], EngineOptions],
    *,
    allow_links: bool = False,
    copy_weights: bool = False,
    require_signature: str | os.PathLike[str] | None = None,
) -> Opened:
    """The bundle in a folder, and its engine with the options that this bundle gets."""
    open_again = partial(
        open_bundle, path, allow_links=allow_links, copy_weights=copy_weights, require_signature=require_signature
    )
    for _ in range(_ATTEMPTS - 1):
        before = _identity(path)
        try:
            return _open(open_again, backend, options_for)
        except ChangedWhileOpening:
            continue
        except BundleError:
            if _identity(path) == before:
                raise
    return _open(open_again, backend, options_for)


def _open(open_again: Callable[[], Bundle], backend: str, options_for: Callable[[Bundle], EngineOptions]) -> Opened:
    started = perf_counter()
    bundle = open_again()
    verified = perf_counter()
    options = options_for(bundle)
    resolved = resolve(bundle, backend, options)
    return Opened(bundle, resolved, options, verified - started, perf_counter() - verified)


def _identity(path: str | os.PathLike[str]) -> tuple[int, int] | None:
    """Device and inode of a folder; None if there is none."""
    try:
        status = Path(path).stat()
    except OSError:
        return None
    return status.st_dev, status.st_ino
