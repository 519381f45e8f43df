"""Partial answers: the file beside the output that stores the answers of a run until all are there."""

from __future__ import annotations

import errno
import fcntl
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from spaceport.graphs.contract.atomic_file import replace_text
from spaceport.graphs.contract.faults import InputFault

SCHEMA = 1

_LONGEST_HEADER = 2**16  # bytes
_BUSY = (errno.EAGAIN, errno.EACCES)


@dataclass(frozen=True)
class RunHeader:
    """What the answers of a run depend on: the first line of the file."""

    bundle: str  # SHA-256 of the bundle's manifest without its engines
    prompts: str  # SHA-256 of the prompt file
    max_tokens: int
    max_seq_len: int
    schema: int = SCHEMA


def partial_file(out: Path) -> Path:
    """The file that stores the answers until the output is complete."""
    return out.with_name(f"{out.name}.partial")


@contextmanager
def opened_partial(out: Path, header: RunHeader, overwrite: bool) -> Iterator[Path]:
    """The partial file of an output, locked for this process; a new one, or that of an interrupted run with this header."""
    file = partial_file(out)
    if not file.exists() or (overwrite and _difference(file, header)):
        replace_text(file, json.dumps(asdict(header)) + "\n")
    with file.open("rb") as stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:  # other errors: a network file system that cannot lock
            if error.errno in _BUSY:
                raise InputFault(
                    f"{file}: another process writes it: wait for its end, or choose another output"
                ) from error
        if difference := _difference(file, header):
            raise InputFault(
                f"{file}: {difference}: repeat the command of that run to continue it, or begin anew with --overwrite"
            )
        yield file


def _difference(file: Path, header: RunHeader) -> str | None:
    """How the header of a file differs from this one; None if they are equal."""
    try:
        with file.open("rb") as stream:
            found = json.loads(stream.readline(_LONGEST_HEADER).decode("utf-8"))
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict) or "schema" not in found:
        return "has no header of `spaceport distill`"
    if found["schema"] != SCHEMA:
        return f"has schema {found['schema']!r}, expected {SCHEMA}: another version of spaceport began it"
    for name, expected in asdict(header).items():
        if (stored := found.get(name)) != expected:
            return f"was begun with {_described(name, stored)}, this command has {_described(name, expected)}"
    return None


def _described(name: str, value: object) -> str:
    if name in ("bundle", "prompts"):
        what = "the bundle" if name == "bundle" else "the prompts"
        return f"{what} {str(value)[:12]}…"
    return f"--{name.replace('_', '-')} {value}"
