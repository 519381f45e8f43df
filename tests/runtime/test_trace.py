"""Trace: what it says of each step is what happened, and what is stored, or read while it grows, is the same."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from numpy.typing import NDArray

from spaceport.runtime.decode.draft import Candidates
from spaceport.runtime.decode.sequence import Listener, TokenSequence
from spaceport.runtime.decode.sequence_group import RequestStep
from spaceport.runtime.trace import ThreadRows, Trace, TraceReader, TraceRecord
from support.hash_engine import CHILD, END, FORK, MASKS, HashEngine, Language, advance, completed, request_for
from support.traced import CASES, TOKENIZER, Case, request_of, traced

Path = tuple[int, ...]


def check_rows(record: TraceRecord) -> None:
    """Every row follows its parent, and the chosen tokens are the retained candidates and one more."""
    for rows in (rows for step in record.steps for rows in step.rows):
        columns = (rows.parents, rows.positions, rows.kinds, rows.sources, rows.retained)
        assert {len(column) for column in columns} == {len(rows.tokens)}
        assert all(kind == "known" and rows.retained[row] for row, kind in enumerate(rows.kinds[: rows.known]))
        for row, parent in enumerate(rows.parents):
            assert parent is None or (parent < row and rows.positions[row] == rows.positions[parent] + 1)
            assert (rows.sources[row] is None) == (rows.kinds[row] != "candidate")
            assert not (rows.retained[row] and rows.kinds[row] == "mask")
        assert tuple(rows.tokens[row] for row in rows.candidates if rows.retained[row]) == rows.chosen[:-1]
        assert rows.generated <= len(rows.chosen)
        assert len(rows.pieces) in (0, rows.generated)


def check_json(record: TraceRecord) -> None:
    """A record is the same after it was stored as JSON."""
    stored = json.loads(json.dumps(record.as_dict(), allow_nan=False))
    assert msgspec.convert(stored, TraceRecord, str_keys=True) == record


@dataclass
class Diary(Listener):
    """Notes down, when it happens, what a trace works out afterwards."""

    days: list[dict[str, Any]] = field(default_factory=list)

    def on_step(self, step: RequestStep) -> None:
        fed = [(part.thread.path, part.tokens.tolist()) for part in step.parts]
        queued = [thread.path for thread in step.sequences.queue]
        day = {"fed": fed, "queued": queued, "held": step.sequences.slots.held, "wrote": [], "began": [], "ended": []}
        self.days.append(day)

    def on_token(self, thread: TokenSequence, token: int, drafted: bool, source: str | None = None) -> bool:
        self.days[-1]["wrote"].append((thread.path, token, drafted))
        return False

    def on_fork(self, parent: TokenSequence, child: TokenSequence) -> None:
        self.days[-1]["began"].append(child.path)

    def on_end(self, thread: TokenSequence) -> None:
        self.days[-1]["ended"] = sorted([*self.days[-1]["ended"], thread.path])  # threads end in any order


def days_of(record: TraceRecord) -> list[dict[str, Any]]:
    """What a diary would hold."""
    path = [line.path for line in record.threads]
    return [
        {
            "fed": [(path[rows.thread], list(rows.tokens)) for rows in step.rows],
            "queued": [path[thread] for thread in step.queued],
            "held": step.kv_slots,
            "wrote": [
                (path[rows.thread], *each) for rows in step.rows for each in zip(rows.text, drafted(rows), strict=True)
            ],
            "began": [path[thread] for thread in step.started if path[thread]],
            "ended": sorted(path[thread] for thread in step.ended),
        }
        for step in record.steps
    ]


def drafted(rows: ThreadRows) -> list[bool]:
    return [position < rows.accepted for position in range(len(rows.text))]


@settings(max_examples=120)
@given(CASES)
def test_a_trace_tells_what_happened_in_each_step(case: Case) -> None:
    trace, diary = Trace(), Diary()
    engine, request = request_of(case, [trace, diary], diary)
    completed(engine, request, case.chunk)
    record = trace.record()
    assert days_of(record) == diary.days
    assert record.prompt == case.prompt
    assert record.generated == tuple(tuple(thread.generated) for thread in request.threads)
    assert [(line.path, line.fork, line.start, line.ending) for line in record.threads] == [
        (thread.path, thread.fork, thread.start, thread.ending) for thread in request.threads
    ]
    assert record.steps[0].started[0] == 0
    check_rows(record)
    check_json(record)


def pieces_of(record: TraceRecord, thread: int) -> list[str]:
    return [piece for step in record.steps for rows in step.rows if rows.thread == thread for piece in rows.pieces]


@settings(max_examples=100)
@given(CASES)
def test_the_pieces_of_a_trace_are_the_text_that_is_read(case: Case) -> None:
    _, trace, reading = traced(case)
    record = trace.record(TOKENIZER)
    for text in reading.finished():
        (thread,) = (position for position, line in enumerate(record.threads) if line.path == text.path)
        assert "".join(pieces_of(record, thread)) == text.text
        assert len(pieces_of(record, thread)) == len(record.generated[thread])
    check_json(record)


def without_ends(step: dict[str, Any]) -> dict[str, Any]:
    """A step without what is known at the end only."""
    rows = [{name: value for name, value in one.items() if name != "pieces"} for one in step["rows"]]
    return {**step, "rows": rows, "ended": ()}


@settings(max_examples=120)
@given(CASES)
def test_the_steps_of_a_growing_trace_are_those_of_the_record(case: Case) -> None:
    trace = Trace()
    engine, request = request_of(case, [trace])
    growing = TraceReader(trace, TOKENIZER)
    steps: list[dict[str, Any]] = []
    threads: list[dict[str, Any]] = []
    texts: dict[str, str] = {}
    assert growing.fresh() is None
    while request.live:
        advance(engine, request, chunk=case.chunk)
        request.statistics.outside_seconds += 0.25 * (1 + request.statistics.rows % 4)
        if request.live and len(trace._steps) % 3:
            continue
        if (found := growing.fresh()) is not None:
            steps += found["steps"]
            threads += found["threads"]
            assert not texts.keys() & found["texts"].keys()
            texts |= found["texts"]
        assert len(steps) == len(trace._steps) - bool(request.live)
    assert growing.fresh() is None
    record = trace.record(TOKENIZER)
    assert [without_ends(step) for step in steps] == [without_ends(asdict(step)) for step in record.steps]
    assert [one | {"ending": None} for one in threads] == [asdict(one) | {"ending": None} for one in record.threads]
    assert texts == {str(token): text for token, text in record.texts.items()}
    for index in range(len(record.threads)):
        rows = [one for step in steps for one in step["rows"] if one["thread"] == index]
        grown = "".join(piece for one in rows for piece in one["pieces"])
        assert "".join(pieces_of(record, index)).replace("\ufffd", "") == grown.replace("\ufffd", "")


@dataclass
class Script:
    """Chooses what is written down for each thread, and proposes the same but for one wrong token."""

    says: dict[Path, tuple[int, ...]]
    wrong: int = -1  # index of the root's own token that is proposed wrong

    def token(self, logits: NDArray[np.float32], thread: TokenSequence, ahead: Sequence[int]) -> int:
        says, position = self.says[thread.path], len(thread.generated) + len(ahead)
        return says[position] if position < len(says) else END

    def candidates(
        self, logits: NDArray[np.float32], thread: TokenSequence, position: int, most: int
    ) -> tuple[Candidates, ...]:
        first = position - thread.start
        own = [token if at != self.wrong else 9 for at, token in enumerate(self.says[thread.path])]
        return tuple(Candidates((token,), (1.0,)) for token in own[first : first + len(logits)])


def test_the_rows_of_a_step_are_recorded_one_by_one() -> None:
    """Two mask slots; the second step accepts both candidates, the third the first of two and begins a thread."""
    engine, trace = HashEngine(Language(1), 200, 1), Trace()
    script = Script({(): (1, 2, 3, FORK, 4, 5, 6, END), (0,): (5, END)}, wrong=5)
    request = request_for(engine, [7, 8], 20, 2, max_threads=4, max_depth=1, selector=script, observers=[trace])
    completed(engine, request)
    record = trace.record(TOKENIZER)
    m = MASKS[0]
    assert record.steps[1].rows == (
        ThreadRows(
            thread=0,
            anchor=None,
            tokens=(1, m, m, 2, m, m, 3, m, m),
            parents=(None, 0, 1, 0, 3, 4, 3, 6, 7),
            positions=(2, 3, 4, 3, 4, 5, 4, 5, 6),
            kinds=("known", "mask", "mask", "candidate", "mask", "mask", "candidate", "mask", "mask"),
            sources=(None, None, None, "mask", None, None, "mask", None, None),
            retained=(True, False, False, True, False, False, True, False, False),
            chosen=(2, 3, FORK),
            generated=3,
            pieces=("", "\ufffd\ufffd\ufffd", ""),  # three bytes that are no character, as the [Fork] shows
        ),
    )
    root, child = record.steps[2].rows
    assert (root.tokens, root.chosen, root.generated) == ((FORK, m, m, 4, m, m, 9, m, m), (4, 5), 2)
    assert root.retained == (True, False, False, True, *[False] * 5)
    assert (child.tokens, child.parents, child.positions) == ((CHILD, m, m), (None, 0, 1), (6, 7, 8))
    assert (child.anchor, child.chosen, child.thread) == (0, (5,), 1)
    assert [(step.started, step.queued, step.ended) for step in record.steps] == [
        ((0,), (), ()),
        ((1,), (), ()),
        ((), (), ()),
        ((), (), (0, 1)),
    ]
    assert (record.texts[4], record.texts[FORK], record.prompt_text) == ("a", "[Fork]", "\n<")


def test_a_text_that_is_under_way_has_a_record_with_the_times_of_its_steps() -> None:
    trace = Trace()
    record = trace.record(TOKENIZER)
    assert (record.steps, record.threads, record.prompt) == ((), (), ())
    engine, request = request_of(Case(3), [trace])
    outside: list[float] = []
    engine_seconds = [0.0]
    while request.live:
        record = trace.record(TOKENIZER)
        assert len(record.steps) == len(outside)
        assert record.generated == tuple(tuple(thread.generated) for thread in request.threads)[: len(record.threads)]
        check_json(record)
        advance(engine, request)
        outside.append(0.001 * (1 + len(outside) % 5))
        request.statistics.outside_seconds += outside[-1]
        engine_seconds.append(request.statistics.engine_seconds)
    request.statistics.waiting_seconds = 2.5
    record = trace.record()
    assert len(record.steps) > 5
    assert [step.outside_seconds for step in record.steps] == pytest.approx(outside)
    assert [step.engine_seconds for step in record.steps] == pytest.approx(np.diff(engine_seconds).tolist())
    assert record.waiting_seconds == 2.5


def test_a_trace_is_of_one_request_from_its_first_step() -> None:
    trace = Trace()
    engine, request = request_of(Case(3), [trace])
    advance(engine, request)
    _, other = request_of(Case(4), [trace])
    with pytest.raises(ValueError, match="a Trace records one request from its first step on"):
        advance(HashEngine(Language(4), 400, 1), other)
    request.observers = (Trace(),)  # one that has missed the first step
    with pytest.raises(ValueError, match="a Trace records one request from its first step on"):
        advance(engine, request)
