"""Growing trace: the steps that are read while a request runs are those of the record at its end."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings

from spaceport.runtime.trace.growing import GrowingTrace
from spaceport.runtime.trace.trace import Trace
from support.hash_engine import advance
from support.traced import CASES, TOKENIZER, Case, request_of


def without_ends(step: dict[str, Any]) -> dict[str, Any]:
    """A step without what is known at the end only."""
    rows = [{name: value for name, value in one.items() if name != "pieces"} for one in step["rows"]]
    return {**step, "rows": rows, "ended": ()}


@settings(max_examples=200)
@given(CASES)
def test_steps_are_those_of_the_record(case: Case) -> None:
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
        if len(trace._seen) % 3:
            continue
        found = growing.fresh()
        if found is not None:
            steps += found["steps"]
            threads += found["threads"]
            assert not texts.keys() & found["texts"].keys()
            texts |= found["texts"]
        assert len(steps) == len(trace._seen) - request_is_live(trace)
    if (found := growing.fresh()) is not None:
        steps, threads, texts = steps + found["steps"], threads + found["threads"], texts | found["texts"]
    assert growing.fresh() is None
    record = trace.record(TOKENIZER)
    assert [without_ends(step) for step in steps] == [without_ends(step.as_dict()) for step in record.steps]
    assert [one | {"ending": None} for one in threads] == [one.as_dict() | {"ending": None} for one in record.threads]
    assert texts == {str(token): text for token, text in record.texts.items()}
    for index in range(len(record.threads)):
        grown = "".join(
            piece for step in steps for one in step["rows"] if one["thread"] == index for piece in one["pieces"]
        )
        whole = "".join(
            piece for step in record.steps for one in step.rows if one.thread == index for piece in one.pieces
        )
        assert whole.replace("\ufffd", "") == grown.replace("\ufffd", "")


def request_is_live(trace: Trace) -> bool:
    return trace.request is not None and bool(trace.request.live)
