"""Rows file: training samples as JSONL, for inspection."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from spaceport.graphs.contract.atomic_file import replacing
from spaceport.graphs.contract.faults import InputFault
from spaceport.tools.tune.conversation_encoder import ConversationEncoder, ConversationError
from spaceport.tools.tune.conversations import Conversation
from spaceport.tools.tune.samples import Sample, prepare


def rows_of(
    data: Path, conversations: Sequence[Conversation], encoder: ConversationEncoder, cutoff: int
) -> tuple[list[Sample], Counter[str]]:
    """Training samples of a file in its order, forked where possible, and their counts."""
    try:
        prepared = prepare(conversations, encoder, cutoff)
    except ConversationError as error:
        raise InputFault(f"{data} {error}") from error
    return sorted([*prepared.forked, *prepared.whole], key=lambda sample: sample.line), prepared.counts


def check_target(target: Path, overwrite: bool) -> None:
    """Raise if rows cannot be written to `target`."""
    if not target.absolute().parent.is_dir():
        raise InputFault(f"{target.absolute().parent}: no such folder: create it first")
    if os.path.lexists(target) and (target.is_symlink() or not target.is_file()):
        raise InputFault(f"{target}: exists and is not a file: choose another name")
    if target.exists() and not overwrite:
        raise InputFault(f"{target}: exists already: use --overwrite to replace it")


def write_rows(target: Path, samples: Sequence[tuple[Path, Sample]], overwrite: bool) -> None:
    """Write rows to a file, atomically."""
    with replacing(target.absolute()) as file:
        for data, sample in samples:
            file.write(json.dumps(_row(data, sample), separators=(",", ":")).encode() + b"\n")
        check_target(target, overwrite)  # again: the target may have appeared meanwhile


def _row(data: Path, sample: Sample) -> dict[str, object]:
    return {
        "file": str(data),
        "line": sample.line,
        "ids": sample.ids.tolist(),
        "parents": sample.parents.tolist(),
        "learned": sample.learned.tolist(),
    }
