"""Numbers: the statistics of a recorded generation, counted from its steps."""

from __future__ import annotations

from spaceport.runtime.decode.sequence_group import MOST_STEPS, Statistics
from spaceport.runtime.trace.record import StepRecord, ThreadRows, TraceRecord


def statistics_of(record: TraceRecord) -> Statistics:
    """The statistics of the request at its end, without padding rows, which belong to calls of several requests."""
    found = Statistics(prompt_tokens=len(record.prompt), threads=len(record.threads))
    found.waiting_seconds = record.waiting_seconds
    for step in record.steps:
        _count(found, step)
        before = sum(found.accepted_by_depth)
        for rows in step.rows:
            _count_drafts(found, rows)
        if any(rows.chosen for rows in step.rows) and len(found.drafted_by_step) < MOST_STEPS:
            found.drafted_by_step.append(sum(len(rows.candidates) for rows in step.rows))
            found.accepted_by_step.append(sum(found.accepted_by_depth) - before)
    return found


def _count(found: Statistics, step: StepRecord) -> None:
    found.rows += sum(len(rows.tokens) for rows in step.rows)
    found.peak_slots = max(found.peak_slots, step.kv_slots)
    found.peak_threads = max(found.peak_threads, len(step.rows))
    found.engine_seconds += step.engine_seconds
    found.outside_seconds += step.outside_seconds
    if any(rows.chosen for rows in step.rows):
        found.steps += 1
    else:
        found.prompt_steps += 1


def _count_drafts(found: Statistics, rows: ThreadRows) -> None:
    found.tokens += rows.generated
    found.candidate_rows += len(rows.candidates)
    found.mask_rows += rows.kinds.count("mask")
    if rows.limited is not None:
        found.drafts_limited[rows.limited] = found.drafts_limited.get(rows.limited, 0) + 1
    accepted = [row for row in rows.candidates if rows.retained[row]][: rows.accepted]
    for row in rows.candidates:
        depth, source = rows.positions[row] - rows.position, rows.sources[row]
        assert source is not None
        while len(found.drafted_by_depth) <= depth:
            found.drafted_by_depth.append(0)
            found.accepted_by_depth.append(0)
        found.drafted_by_depth[depth] += 1
        found.drafted_by_source[source] = found.drafted_by_source.get(source, 0) + 1
        if row in accepted:
            found.accepted_by_depth[depth] += 1
            found.accepted_by_source[source] = found.accepted_by_source.get(source, 0) + 1
