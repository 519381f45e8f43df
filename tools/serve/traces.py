"""Traces: what each step of a completion did, as data of an answer."""

from __future__ import annotations

from typing import Any

from tokenizers import Tokenizer

from spaceport.runtime.trace.trace import Trace

MOST_STEPS = 2048  # in a report


def trace_report(trace: Trace, tokenizer: Tokenizer) -> dict[str, Any]:
    """The content of a trace file, with the first steps only if there are more than `MOST_STEPS`."""
    record = trace.as_dict(tokenizer)
    left_out = len(record["steps"]) - MOST_STEPS
    return record if left_out <= 0 else record | {"steps": record["steps"][:MOST_STEPS], "steps_left_out": left_out}
