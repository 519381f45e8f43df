"""Traces: what each step of a completion did, as compact JSON data for pages that draw it."""

from __future__ import annotations

from typing import Any

from tokenizers import Tokenizer

from spaceport.runtime.trace.record import Record, StepRecord, ThreadRows
from spaceport.runtime.trace.trace import Trace

MOST_STEPS = 2048  # in a report


def trace_report(trace: Trace, tokenizer: Tokenizer) -> dict[str, Any]:
    """The threads and the first steps of a completion.

    A step has its times and, for each thread that took part, its rows by kind and the text of each token that it
    generated with the token's source: that of an accepted candidate, or "model".
    """
    record: Record = trace.record(tokenizer)
    return {
        "threads": [{"path": list(one.path), "fork": one.fork, "ending": one.ending} for one in record.threads],
        "steps": [_step(step) for step in record.steps[:MOST_STEPS]],
        "steps_left_out": max(0, len(record.steps) - MOST_STEPS),
    }


def _step(step: StepRecord) -> dict[str, Any]:
    return {
        "engine_ms": round(step.engine_seconds * 1e3, 3),
        "outside_ms": round(step.outside_seconds * 1e3, 3),
        "kv_slots": step.kv_slots,
        "threads": [_rows(rows) for rows in step.rows],
    }


def _rows(rows: ThreadRows) -> dict[str, Any]:
    """What one thread did in a step."""
    accepted = [rows.sources[row] for row in rows.candidates if rows.retained[row]]
    sources = [*accepted, "model"]
    return {
        "thread": rows.thread,
        "known": rows.known,
        "candidates": len(rows.candidates),
        "masks": rows.kinds.count("mask"),
        "tokens": [[text, source] for text, source in zip(rows.pieces, sources, strict=False)],
    }
