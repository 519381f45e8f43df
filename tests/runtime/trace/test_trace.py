"""Trace: what it says of each step is what happened, and what is read back is what was written."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from spaceport.graphs.contract.faults import InputFault
from spaceport.runtime.decode.draft import Candidates, Source
from spaceport.runtime.decode.request import Request, VerifiedStep
from spaceport.runtime.decode.threads import Thread
from spaceport.runtime.trace.reader import trace_of
from spaceport.runtime.trace.record import SCHEMA, Record, StepRecord, ThreadRecord, ThreadRows
from spaceport.runtime.trace.trace import Trace
from spaceport.tools.report.page import page_of
from support.hash_engine import CHILD, END, FORK, MASKS, HashEngine, Language, advance, request_for
from support.paths import DOCS
from support.traced import CASES, TOKENIZER, Case, request_of, traced

Path = tuple[int, ...]


@dataclass
class Day:
    """What happened in one step."""

    fed: list[tuple[Path, list[int]]]
    queued: list[Path]
    held: int
    wrote: list[tuple[Path, int, bool]] = field(default_factory=list)
    began: list[Path] = field(default_factory=list)
    ended: list[Path] = field(default_factory=list)


@dataclass
class Diary:
    """Notes down, when it happens, what a trace works out afterwards."""

    days: list[Day] = field(default_factory=list)

    def on_step(self, step: VerifiedStep) -> None:
        fed = [(part.thread.path, part.tokens.tolist()) for part in step.plan.parts]
        queued, slots = step.request.queue, step.request.slots
        self.days.append(Day(fed, [thread.path for thread in queued], slots.held))

    def on_token(self, thread: Thread, token: int, drafted: bool, source: Source | None = None) -> bool:
        self.days[-1].wrote.append((thread.path, token, drafted))
        return False

    def on_fork(self, parent: Thread, child: Thread) -> None:
        self.days[-1].began.append(child.path)

    def on_end(self, thread: Thread) -> None:
        self.days[-1].ended.append(thread.path)

    def is_cut_off(self, thread: Thread) -> bool:
        return False


def days_of(record: Record) -> list[Day]:
    """What a diary would hold."""
    paths = [line.path for line in record.threads]
    days = []
    for step_ in record.steps:
        wrote = [
            (paths[rows.thread], token, position < rows.accepted)
            for rows in step_.rows
            for position, token in enumerate(rows.text)
        ]
        days.append(
            Day(
                [(paths[rows.thread], list(rows.tokens)) for rows in step_.rows],
                [paths[thread] for thread in step_.queued],
                step_.kv_slots,
                wrote,
                [paths[thread] for thread in step_.started if paths[thread]],
                [paths[thread] for thread in step_.ended],
            )
        )
    return days


def in_order(days: list[Day]) -> list[Day]:
    """In a step, threads end in any order."""
    return [Day(d.fed, d.queued, d.held, d.wrote, sorted(d.began), sorted(d.ended)) for d in days]


@settings(max_examples=150)
@given(case=CASES)
def test_a_trace_tells_what_happened_in_each_step(case: Case) -> None:
    trace, diary = Trace(), Diary()
    engine, request = request_of(case, [trace, diary], diary)
    while request.live:
        advance(engine, request, chunk=case.chunk)
    record = trace.record()
    assert in_order(days_of(record)) == in_order(diary.days)
    assert record.prompt == case.prompt
    assert record.generated == tuple(tuple(thread.generated) for thread in request.threads)
    assert [(line.path, line.fork, line.start, line.ending) for line in record.threads] == [
        (thread.path, thread.fork, thread.start, thread.ending) for thread in request.threads
    ]
    assert record.steps[0].started[0] == 0


@settings(max_examples=60)
@given(case=CASES, tokenizer=st.sampled_from((None, TOKENIZER)))
def test_a_trace_is_read_back_as_it_was(case: Case, tokenizer: Any) -> None:
    _, trace, _ = traced(case)
    record = trace.record(tokenizer)
    assert trace_of(json.loads(json.dumps(trace.as_dict(tokenizer)))) == record


@settings(max_examples=150)
@given(case=CASES)
def test_the_pieces_of_a_trace_are_the_text_that_is_read(case: Case) -> None:
    _, trace, reading = traced(case)
    record = trace.record(TOKENIZER)
    for text in reading.finished():
        (thread,) = (position for position, line in enumerate(record.threads) if line.path == text.path)
        pieces = [
            piece for each in record.steps for rows in each.rows if rows.thread == thread for piece in rows.pieces
        ]
        assert "".join(pieces) == text.text
        assert len(pieces) == len(record.generated[thread])


@dataclass
class Script:
    """Chooses what is written down for each thread, and proposes the same but for one wrong token."""

    says: dict[Path, tuple[int, ...]]
    wrong: int = -1  # index of the root's own token that is proposed wrong

    def token(self, logits: NDArray[np.float32], thread: Thread, ahead: Sequence[int]) -> int:
        says, position = self.says[thread.path], len(thread.generated) + len(ahead)
        return says[position] if position < len(says) else END

    def candidates(
        self, logits: NDArray[np.float32], thread: Thread, position: int, most: int
    ) -> tuple[Candidates, ...]:
        first = position - thread.start
        own = [token if at != self.wrong else 9 for at, token in enumerate(self.says[thread.path])]
        return tuple(Candidates((token,), (1.0,)) for token in own[first : first + len(logits)])


def scripted(script: Script, mask_slots: int = 2, total: int = 20) -> tuple[Request, Record]:
    engine = HashEngine(Language(1), 200, 1)
    trace = Trace()
    request = request_for(
        engine, [7, 8], 20, mask_slots, max_depth=1, max_threads=4, total=total, selector=script, observers=[trace]
    )
    while request.live:
        advance(engine, request)
    return request, trace.record(TOKENIZER)


def test_the_rows_of_a_step_are_recorded_one_by_one() -> None:
    """Two mask slots; the second step accepts both candidates, the third the first of two and begins a thread."""
    script = Script({(): (1, 2, 3, FORK, 4, 5, 6, END), (0,): (5, END)}, wrong=5)
    _, record = scripted(script)
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


def test_what_stands_behind_the_end_is_chosen_and_not_written() -> None:
    _, record = scripted(Script({(): (1, 2, END, 3)}))
    (rows,) = record.steps[1].rows
    assert (rows.chosen, rows.generated, rows.accepted, rows.text) == ((2, END, 3), 1, 1, (2,))
    assert sum(rows.retained[row] for row in rows.candidates) == 2


def test_what_is_beyond_the_limit_of_all_threads_is_not_even_drafted() -> None:
    _, record = scripted(Script({(): (1, 2, 3, 4, 5)}), total=2)
    (rows,) = record.steps[1].rows
    assert (rows.chosen, rows.generated, rows.accepted) == ((2,), 1, 0)
    assert not rows.candidates
    assert record.threads[0].ending == "total"


def test_a_character_is_a_piece_of_the_token_that_completes_it() -> None:
    """0 1 are the bytes of é; 2 alone is no character, which shows when no more can follow it."""
    _, record = scripted(Script({(): (4, 0, 1, 2, FORK, 0, 5, END), (0,): (1, 6, END)}))
    pieces: dict[int, str] = {0: "", 1: ""}
    for step_ in record.steps:
        for rows in step_.rows:
            pieces[rows.thread] += "|".join(("", *rows.pieces))
    assert pieces == {0: "|a||é|\ufffd|||\ufffdb", 1: "||\ufffd "}
    assert record.texts[4] == "a"
    assert record.texts[FORK] == "[Fork]"
    assert record.prompt_text == "\n<"


def test_a_queued_thread_that_never_got_its_turn_ends_where_the_request_does() -> None:
    engine = HashEngine(Language(1), 200, 1)
    trace, script = Trace(), Script({(): (1, FORK, 2, FORK, 3)})
    request = request_for(
        engine, [7, 8], 20, 0, max_depth=1, max_threads=1, total=6, selector=script, observers=[trace]
    )
    while request.live:
        advance(engine, request)
    record = trace.record()
    assert [step.queued for step in record.steps] == [(), (), (1,), (1,)]
    assert [step.ended for step in record.steps] == [(), (), (), (0, 1, 2)]
    assert [line.ending for line in record.threads] == ["total"] * 3
    assert trace_of(json.loads(json.dumps(record.as_dict()))) == record


def test_the_time_of_a_step_is_what_the_statistics_grew_by() -> None:
    trace = Trace()
    engine, request = request_of(Case(3), [trace])
    outside: list[float] = []
    engine_seconds = [0.0]
    while request.live:
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


def test_a_text_that_is_under_way_has_a_record() -> None:
    trace = Trace()
    engine, request = request_of(Case(3), [trace])
    seen = 0
    while request.live:
        record = trace.record(TOKENIZER)
        assert len(record.steps) == seen
        assert record.generated == tuple(tuple(thread.generated) for thread in request.threads)[: len(record.threads)]
        assert trace_of(json.loads(json.dumps(record.as_dict()))) == record
        advance(engine, request)
        seen += 1
    assert seen > 5


def test_a_text_that_nobody_wants_ends_in_its_last_step() -> None:
    trace = Trace()
    engine, request = request_of(Case(3, end_every=10**9), [trace])
    for _ in range(4):
        advance(engine, request)
    request.finish("cancelled")
    record = trace.record()
    assert record.steps[-1].ended == tuple(range(len(record.threads)))
    assert {line.ending for line in record.threads} == {"cancelled"}


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


def test_the_record_of_nothing_is_empty() -> None:
    record = Trace().record(TOKENIZER)
    assert (record.steps, record.threads, record.prompt) == ((), (), ())
    assert trace_of(json.loads(json.dumps(record.as_dict()))) == record


STORED: dict[str, Any] = json.loads(json.dumps(traced(Case(5, max_threads=2))[1].as_dict(TOKENIZER)))


def test_the_stored_trace_has_what_a_broken_one_could_get_wrong() -> None:
    assert len(STORED["threads"]) > 3
    assert any(step["queued"] for step in STORED["steps"])
    assert any(rows["anchor"] is not None for step in STORED["steps"] for rows in step["rows"])


def writing(data: dict[str, Any]) -> Any:
    """Rows that accepted a candidate and rejected one."""
    return next(
        rows
        for step in data["steps"]
        for rows in step["rows"]
        if rows["generated"] > 1
        and rows["kinds"].count("candidate") > sum(rows["retained"]) - rows["kinds"].count("known")
    )


def row_of(rows: Any, kind: str, retained: bool) -> int:
    return next(
        row for row, pair in enumerate(zip(rows["kinds"], rows["retained"], strict=True)) if pair == (kind, retained)
    )


def shift(rows: Any) -> None:
    rows["positions"] = [position + 1 for position in rows["positions"]]


def put(data: Any, name: Any, value: Any) -> None:
    data[name] = value


BREAKS: list[tuple[str, Callable[[dict[str, Any]], object]]] = [
    (r"trace.schema is 3, this version reads up to 2: update spaceport", lambda d: put(d, "schema", SCHEMA + 1)),
    (r"trace.schema is 0: expected a whole number of at least 1", lambda d: put(d, "schema", 0)),
    (r"trace is .*: expected an object with the entry 'schema'", lambda d: d.pop("schema")),
    (r"trace lacks 'steps': expected .*steps", lambda d: d.pop("steps")),
    (r"trace has the unknown 'more': expected .*steps", lambda d: put(d, "more", 1)),
    (r"trace.tokens.fork is -1", lambda d: put(d["tokens"], "fork", -1)),
    (r"trace.prompt\[0\] is True: expected a whole number", lambda d: put(d["prompt"], 0, True)),
    (r"trace.prompt\[0\] is 1.5", lambda d: put(d["prompt"], 0, 1.5)),
    (r"trace.prompt_text is None: expected text", lambda d: put(d, "prompt_text", None)),
    (r"a name in trace.texts is '-1': expected a token id", lambda d: put(d["texts"], "-1", "x")),
    (r"trace.texts.1 is 1: expected text", lambda d: put(d["texts"], "1", 1)),
    (r"trace.waiting_seconds is nan: expected a number of seconds", lambda d: put(d, "waiting_seconds", float("nan"))),
    (r"trace.steps\[0\].engine_seconds is -1", lambda d: put(d["steps"][0], "engine_seconds", -1)),
    (r"trace.steps is {}: expected a list", lambda d: put(d, "steps", {})),
    (r"threads\[0\].ending is 'over': expected end or stop or", lambda d: put(d["threads"][0], "ending", "over")),
    (r"threads\[1\].path is \[\]: expected the root thread, then", lambda d: put(d["threads"][1], "path", [])),
    (r"threads\[1\].path is \[7, 7\]: expected the root thread, then", lambda d: put(d["threads"][1], "path", [7, 7])),
    (r"threads\[2\].path is \[0\]: expected the root thread", lambda d: put(d["threads"][2], "path", [0])),
    (r"threads\[0\].path is \[0\]: expected the root thread", lambda d: put(d["threads"][0], "path", [0])),
    (r"threads\[1\].fork is 4: expected the position of a \[Fork\]", lambda d: put(d["threads"][1], "fork", 4)),
    (r"threads\[1\].fork is None: expected the position", lambda d: put(d["threads"][1], "fork", None)),
    (r"threads\[1\] starts at 99", lambda d: put(d["threads"][1], "start", 99)),
    (
        r"threads\[0\] starts at 3, fork 2: expected 3, and a fork for all but the root thread",
        lambda d: put(d["threads"][0], "fork", 2),
    ),
    (r"steps\[0\] names the thread 99", lambda d: put(d["steps"][0], "queued", [99])),
    (r"steps\[1\]: expected each thread once", lambda d: put(d["steps"][0], "ended", [0])),
    (r"steps\[1\]: expected each thread once", lambda d: put(d["steps"][1], "started", [0])),
    (r"steps\[\d+\]: expected each thread once", lambda d: put(d["steps"][-1], "rows", d["steps"][-1]["rows"] * 2)),
    (r"threads\[1\].fork is \d+: expected the position", lambda d: put(d["steps"][0]["rows"][0], "thread", 1)),
    (r"threads start and \d+ end: expected", lambda d: put(d["threads"][0], "ending", None)),
    (r"steps\[1\]: expected each thread once", lambda d: put(d["steps"][0], "started", [])),
    (r"steps\[0\] has the anchor 0: expected a row before 0", lambda d: put(d["steps"][0]["rows"][0], "anchor", 0)),
    (r"steps\[\d+\] generates at position \d+: expected", lambda d: shift(d["steps"][-1]["rows"][0])),
    (r"columns of .* rows: expected equal lengths", lambda d: writing(d)["tokens"].pop()),
    (r"retains the candidates", lambda d: put(writing(d)["chosen"], 0, 99)),
    (r"generates 99 tokens: expected at most", lambda d: put(writing(d), "generated", 99)),
    (r"pieces: expected one for each of the", lambda d: writing(d)["pieces"].pop()),
    (r"kinds\[0\] is 'unknown': expected known or candidate or mask", lambda d: put(writing(d)["kinds"], 0, "unknown")),
    (r"has rows in the wrong order", lambda d: put(writing(d)["kinds"], 0, "mask")),
    (r"has rows in the wrong order", lambda d: put(writing(d)["retained"], 0, False)),
    (r"has rows in the wrong order", lambda d: put(writing(d)["kinds"], -1, "known")),
    (r"retains a mask slot", lambda d: put(writing(d)["retained"], row_of(writing(d), "mask", False), True)),
    (r"retains the candidates", lambda d: put(writing(d)["retained"], row_of(writing(d), "candidate", False), True)),
    (r"has the parent 1 at row 1: expected a row before it", lambda d: put(writing(d)["parents"], 1, 1)),
    (r"has the position 0 at row 1: expected its parent's plus 1", lambda d: put(writing(d)["positions"], 1, 0)),
    (r"has the source 'mask' at row 0", lambda d: put(writing(d)["sources"], 0, "mask")),
    (r"has the source None at row", lambda d: put(writing(d)["sources"], row_of(writing(d), "candidate", True), None)),
    (r"limited is 'price': expected budget or not_worth_it or", lambda d: put(writing(d), "limited", "price")),
    (r"retained\[0\] is 1: expected true or false", lambda d: put(writing(d)["retained"], 0, 1)),
]


SINCE_SCHEMA_1 = {"started": "began", "kv_slots": "held", "retained": "kept", "generated": "written"}


def as_schema_1(data: Any) -> Any:
    """A trace as version 1 of the schema had it."""
    if isinstance(data, dict):
        older = {SINCE_SCHEMA_1.get(name, name): as_schema_1(value) for name, value in data.items()}
        return older | ({"schema": 1} if "schema" in older else {})
    return [as_schema_1(value) for value in data] if isinstance(data, list) else data


def test_a_trace_of_schema_1_can_still_be_read() -> None:
    older = as_schema_1(STORED)
    assert older["schema"] == 1
    assert {"began", "held"} <= {*older["steps"][0]}
    assert trace_of(older) == trace_of(STORED)


def test_a_trace_without_reasons_of_narrow_drafts_can_still_be_read() -> None:
    older = json.loads(json.dumps(STORED))
    for step_ in older["steps"]:
        for rows in step_["rows"]:
            del rows["limited"]
    limited = [rows.limited for step_ in trace_of(STORED).steps for rows in step_.rows]
    assert any(limited)
    record = trace_of(older)
    assert all(rows.limited is None for step_ in record.steps for rows in step_.rows)
    assert record.generated == trace_of(STORED).generated


def test_a_trace_has_the_reason_of_each_narrow_draft() -> None:
    request, trace, _ = traced(Case(5, max_threads=2))
    record = trace_of(json.loads(json.dumps(trace.as_dict())))
    found = Counter(rows.limited for step_ in record.steps for rows in step_.rows)
    assert {reason: count for reason, count in found.items() if reason} == request.statistics.drafts_limited
    assert len(found) > 1


@pytest.mark.parametrize(("message", "spoil"), BREAKS)
def test_a_broken_trace_is_refused_with_what_is_wrong(message: str, spoil: Callable[[dict[str, Any]], object]) -> None:
    broken = json.loads(json.dumps(STORED))
    spoil(broken)
    with pytest.raises(InputFault, match=message):
        trace_of(broken)


@pytest.mark.parametrize("data", [None, [], 1, "trace", {}, {"schema": None}, {"schema": 1}])
def test_what_is_no_trace_is_refused(data: object) -> None:
    with pytest.raises(InputFault, match="expected"):
        trace_of(data)


def ways(data: Any, way: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The way to every value in parsed JSON."""
    yield way
    if isinstance(data, dict):
        for name, value in data.items():
            yield from ways(value, (*way, name))
    elif isinstance(data, list):
        for position, value in enumerate(data):
            yield from ways(value, (*way, position))


SMALL = json.loads(json.dumps(traced(Case(1, max_tokens=8, total=20))[1].as_dict(TOKENIZER)))
WAYS = [way for way in ways(SMALL) if way]


@settings(max_examples=400)
@given(
    way=st.sampled_from(WAYS),
    value=st.none()
    | st.booleans()
    | st.integers(-2, 60)
    | st.floats()
    | st.text(max_size=3)
    | st.just([])
    | st.just({}),
    drop=st.booleans(),
)
def test_whatever_is_changed_in_a_trace_it_is_refused_or_can_be_shown(
    way: tuple[Any, ...], value: Any, drop: bool
) -> None:
    broken = json.loads(json.dumps(SMALL))
    holder = broken
    for name in way[:-1]:
        holder = holder[name]
    if drop:
        del holder[way[-1]]
    else:
        holder[way[-1]] = value
    try:
        record = trace_of(broken)
    except InputFault:
        return
    assert page_of(record, "x").endswith("</html>")


def test_the_documentation_has_every_entry_of_a_trace() -> None:
    text = (DOCS / "trace.md").read_text("utf-8")
    documented = set(re.findall(r"`(\w+)`", "\n".join(line for line in text.splitlines() if line.startswith("| `"))))
    names = {part.name for kind in (Record, ThreadRecord, StepRecord, ThreadRows) for part in fields(kind)}
    assert names - documented == set()
