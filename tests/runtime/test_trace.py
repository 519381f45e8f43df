"""Trace: what it says of each step is what happened, and what is read back or while it grows is what was written."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from spaceport.graphs.contract.faults import InputFault
from spaceport.runtime.decode.draft import Candidates
from spaceport.runtime.decode.sequence import Listener, TokenSequence
from spaceport.runtime.decode.sequence_group import VerifiedStep
from spaceport.runtime.trace import SCHEMA, GrowingTrace, ThreadRows, Trace, TraceRecord, trace_of
from spaceport.tools.report.files import page_of
from support.hash_engine import CHILD, END, FORK, MASKS, HashEngine, Language, advance, request_for
from support.traced import CASES, TOKENIZER, Case, request_of, traced

Path = tuple[int, ...]


def parsed(record: TraceRecord) -> Any:
    """A record as it is read back from JSON."""
    return json.loads(json.dumps(record.as_dict()))


@dataclass
class Diary(Listener):
    """Notes down, when it happens, what a trace works out afterwards."""

    days: list[dict[str, Any]] = field(default_factory=list)

    def on_step(self, step: VerifiedStep) -> None:
        fed = [(part.thread.path, part.tokens.tolist()) for part in step.plan.parts]
        queued = [thread.path for thread in step.request.queue]
        day = {"fed": fed, "queued": queued, "held": step.request.slots.held, "wrote": [], "began": [], "ended": []}
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
    while request.live:
        advance(engine, request, chunk=case.chunk)
    record = trace.record()
    assert days_of(record) == diary.days
    assert record.prompt == case.prompt
    assert record.generated == tuple(tuple(thread.generated) for thread in request.threads)
    assert [(line.path, line.fork, line.start, line.ending) for line in record.threads] == [
        (thread.path, thread.fork, thread.start, thread.ending) for thread in request.threads
    ]
    assert record.steps[0].started[0] == 0
    assert trace_of(parsed(record)) == record


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
    assert trace_of(parsed(record)) == record


def without_ends(step: dict[str, Any]) -> dict[str, Any]:
    """A step without what is known at the end only."""
    rows = [{name: value for name, value in one.items() if name != "pieces"} for one in step["rows"]]
    return {**step, "rows": rows, "ended": ()}


@settings(max_examples=120)
@given(CASES)
def test_the_steps_of_a_growing_trace_are_those_of_the_record(case: Case) -> None:
    trace = Trace()
    engine, request = request_of(case, [trace])
    growing = GrowingTrace(trace, TOKENIZER)
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
    while request.live:
        advance(engine, request)
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
        assert trace_of(parsed(record)) == record
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


_, STORED_TRACE, _ = traced(Case(5, max_threads=2))
STORED: dict[str, Any] = parsed(STORED_TRACE.record(TOKENIZER))


Way = tuple[str | int, ...]
DROP: Any = object()
# The first rows that accepted a candidate and rejected one.
WRITING: Way = next(
    ("steps", number, "rows", index)
    for number, step in enumerate(STORED["steps"])
    for index, rows in enumerate(step["rows"])
    if rows["generated"] > 1 and rows["kinds"].count("candidate") > sum(rows["retained"]) - rows["kinds"].count("known")
)


def at(data: Any, way: Way) -> Any:
    for name in way:
        data = data[name]
    return data


def changed(data: Any, way: Way, value: Any) -> Any:
    """Parsed JSON with another value there; DROP: with none."""
    broken = json.loads(json.dumps(data))
    if value is DROP:
        del at(broken, way[:-1])[way[-1]]
    else:
        at(broken, way[:-1])[way[-1]] = value
    return broken


def row_of(kind: str, retained: bool) -> int:
    found = at(STORED, WRITING)
    return list(zip(found["kinds"], found["retained"], strict=True)).index((kind, retained))


LAST = ("steps", len(STORED["steps"]) - 1, "rows")
LATER = [position + 1 for position in at(STORED, (*LAST, 0, "positions"))]
MASK, REJECTED, ACCEPTED = row_of("mask", False), row_of("candidate", False), row_of("candidate", True)
BREAKS: list[tuple[str, Way, Any]] = [
    (r"trace.schema is 4, this version reads 3: update spaceport", ("schema",), SCHEMA + 1),
    (r"trace.schema is 2, this version reads 3: write the trace again", ("schema",), 2),
    (r"trace.schema is 0: expected a whole number of at least 1", ("schema",), 0),
    (r"trace is .*: expected an object with the entry 'schema'", ("schema",), DROP),
    (r"trace has the unknown 'more': expected .*steps", ("more",), 1),
    (r"trace.tokens.fork is -1", ("tokens", "fork"), -1),
    (r"a name in trace.texts is '-1': expected a token id", ("texts", "-1"), "x"),
    (r"trace.waiting_seconds is nan: expected a number of seconds", ("waiting_seconds",), float("nan")),
    (r"threads\[1\].path is \[\]: expected the root thread, then", ("threads", 1, "path"), []),
    (r"threads\[0\].path is \[0\]: expected the root thread", ("threads", 0, "path"), [0]),
    (r"threads\[1\].fork is 4: expected the position of a \[Fork\]", ("threads", 1, "fork"), 4),
    (r"threads\[0\] starts at 3, fork 2: expected 3, and a fork for all but", ("threads", 0, "fork"), 2),
    (r"steps\[0\] names the thread 99", ("steps", 0, "queued"), [99]),
    (r"steps\[1\]: expected each thread once", ("steps", 0, "ended"), [0]),
    (r"steps\[1\]: expected each thread once", ("steps", 1, "started"), [0]),
    (r"steps\[\d+\]: expected each thread once", LAST, at(STORED, LAST) * 2),
    (r"threads\[1\].fork is \d+: expected the position", ("steps", 0, "rows", 0, "thread"), 1),
    (r"threads start and \d+ end: expected", ("threads", 0, "ending"), None),
    (r"steps\[1\]: expected each thread once", ("steps", 0, "started"), []),
    (r"steps\[0\] has the anchor 0: expected a row before 0", ("steps", 0, "rows", 0, "anchor"), 0),
    (r"steps\[\d+\] generates at position \d+: expected", (*LAST, 0, "positions"), LATER),
    (r"columns of .* rows: expected equal lengths", (*WRITING, "tokens", 0), DROP),
    (r"generates 99 tokens: expected at most", (*WRITING, "generated"), 99),
    (r"pieces: expected one for each of the", (*WRITING, "pieces", 0), DROP),
    (r"has rows in the wrong order", (*WRITING, "kinds", 0), "mask"),
    (r"has rows in the wrong order", (*WRITING, "retained", 0), False),
    (r"retains a mask slot", (*WRITING, "retained", MASK), True),
    (r"retains the candidates", (*WRITING, "retained", REJECTED), True),
    (r"has the parent 1 at row 1: expected a row before it", (*WRITING, "parents", 1), 1),
    (r"has the position 0 at row 1: expected its parent's plus 1", (*WRITING, "positions", 1), 0),
    (r"has the source 'mask' at row 0", (*WRITING, "sources", 0), "mask"),
    (r"has the source None at row", (*WRITING, "sources", ACCEPTED), None),
    (r"has the source .nothing more. at row .*expected names", (*WRITING, "sources", ACCEPTED), "nothing more"),
    (r"limited is 'price': expected budget or not_worth_it or", (*WRITING, "limited"), "price"),
]


@pytest.mark.parametrize(("message", "way", "value"), BREAKS)
def test_a_broken_trace_is_refused_with_what_is_wrong(message: str, way: Way, value: Any) -> None:
    with pytest.raises(InputFault, match=message):
        trace_of(changed(STORED, way, value))


def ways(data: Any, way: Way = ()) -> Iterator[Way]:
    """The way to every value in parsed JSON."""
    if way:
        yield way
    entries = data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ()
    for name, value in entries:
        yield from ways(value, (*way, name))


SMALL = parsed(traced(Case(1, max_tokens=8, total=20))[1].record(TOKENIZER))
SCALARS = st.none() | st.booleans() | st.integers(-2, 60) | st.floats() | st.text(max_size=3)


@settings(max_examples=150)
@given(st.sampled_from([*ways(SMALL)]), SCALARS | st.just([]) | st.just({}) | st.just(DROP))
def test_whatever_is_changed_in_a_trace_it_is_refused_or_can_be_shown(way: Way, value: Any) -> None:
    try:
        record = trace_of(changed(SMALL, way, value))
    except InputFault:
        return
    assert page_of(record, "x").endswith("</html>")
