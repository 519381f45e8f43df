"""Rows: prepared samples as lines of a file, for those who want to see what a model is taught."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from spaceport.graphs.contract.atomic_file import replacing
from spaceport.graphs.contract.faults import InputFault
from spaceport.tools.tune.conversations import Conversation
from spaceport.tools.tune.samples import Sample, prepare
from spaceport.tools.tune.spelling import ConversationSpelling, SpellingError


def rows_of(
    data: Path, conversations: Sequence[Conversation], spelling: ConversationSpelling, cutoff: int
) -> tuple[list[Sample], Counter[str]]:
    """Each conversation of a file as it is learned, forked where it can be, in the file's order; and what was counted."""
    try:
        prepared = prepare(conversations, spelling, cutoff)
    except SpellingError as error:
        raise InputFault(f"{data} {error}") from error
    return sorted([*prepared.forked, *prepared.whole], key=lambda sample: sample.line), prepared.counts


def check_target(target: Path, overwrite: bool) -> None:
    """Raise if rows could not be written to `target`, before any work is done for it."""
    if not target.absolute().parent.is_dir():
        raise InputFault(f"{target.absolute().parent}: no such folder: make it first")
    if os.path.lexists(target) and (target.is_symlink() or not target.is_file()):
        raise InputFault(f"{target}: exists and is not a file: choose another name")
    if target.exists() and not overwrite:
        raise InputFault(f"{target}: is there already: say --overwrite to replace it")


def write_rows(target: Path, samples: Sequence[tuple[Path, Sample]], overwrite: bool) -> None:
    """Put rows into a file, which appears when it is whole; until then there is the old one or none."""
    with replacing(target.absolute()) as file:
        for data, sample in samples:
            file.write(json.dumps(_row(data, sample), separators=(",", ":")).encode() + b"\n")
        check_target(target, overwrite)  # again: by now something else may stand there


def _row(data: Path, sample: Sample) -> dict[str, object]:
    return {
        "file": str(data),
        "line": sample.line,
        "ids": sample.ids.tolist(),
        "parents": sample.parents.tolist(),
        "learned": sample.learned.tolist(),
    }
