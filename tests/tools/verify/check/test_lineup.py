"""Pairs: everything that can run a bundle is compared with everything else, or it is said why it is not."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from spaceport.graphs.contract.faults import MissingDependency
from spaceport.graphs.contract.manifest import TokenIds
from spaceport.graphs.contract.signature import Precision
from spaceport.runtime.backends import by_reason
from spaceport.runtime.bundle import Bundle
from spaceport.runtime.engine import EngineFault
from spaceport.tools.cli import run
from spaceport.tools.verify.accuracy import Call, CallFailed, ComparedSide, Feed, compare, recorded
from spaceport.tools.verify.check.cases import REQUESTS, Room, record
from spaceport.tools.verify.check.lineup import SHORTEST, CheckOptions, failing, line_up, room_of
from support.hash_engine import CHILD, END, FORK, MASKS, HashEngine, Language
from support.paths import TINY
from support.small_bundle import RECORD, fill

CASES = ("first", "first", "second", "third")


def feeds() -> list[Feed]:
    """Four calls of three cases, whose logits rise from call to call."""
    logits = np.arange(12, dtype=np.float32).reshape(1, 3, 4)
    return [
        Feed(case, {"input_ids": np.full((1, 3), number)}, logits + np.float32(number))
        for number, case in enumerate(CASES)
    ]


def side(
    name: str, change: Callable[[int, NDArray[np.float32]], NDArray[np.float32]], dtype: Precision = "float32"
) -> ComparedSide:
    """A side that answers each call with what was recorded, changed."""

    @contextmanager
    def opened() -> Iterator[Call]:
        def call(arrays: Any) -> NDArray[np.float32]:
            number = int(arrays["input_ids"][0, 0])
            return change(number, feeds()[number].expected)

        yield call

    return ComparedSide(name, dtype, opened)


def test_each_pair_has_the_tolerance_of_its_coarser_type() -> None:
    sides = [
        recorded("a", "float32", feeds()),
        side("b", lambda number, logits: logits + np.float32(0.01), "float16"),
        side("c", lambda number, logits: logits + np.float32(0.01)),
        side("d", lambda number, logits: logits, "bfloat16"),
    ]
    pairs = compare(sides, feeds())
    assert [(pair.first + pair.second, pair.dtype, pair.passed) for pair in pairs] == [
        ("ab", "float16", True),
        ("ac", "float32", False),
        ("ad", "bfloat16", True),
        ("bc", "float16", True),
        ("bd", "bfloat16", True),
        ("cd", "bfloat16", True),
    ]


def test_the_worst_case_of_a_pair_is_the_one_furthest_beyond_its_tolerance() -> None:
    changed = side("b", lambda number, logits: logits + np.float32((0, 0.02, 0.01, 0.001)[number]))
    (pair,) = compare([recorded("a", "float32", feeds()), changed], feeds())
    assert [difference.case for difference in pair.differences] == ["first", "second", "third"]
    assert [difference.rows for difference in pair.differences] == [6, 3, 3]
    assert [difference.passed for difference in pair.differences] == [False, False, True]
    assert pair.worst.case == "first"
    assert pair.worst.max_error == pytest.approx(0.02, rel=1e-3)
    assert pair.agreement == 1.0


def test_sides_run_one_after_the_other() -> None:
    open_now: list[str] = []

    def alone(name: str) -> ComparedSide:
        def opened() -> AbstractContextManager[Call]:
            @contextmanager
            def held() -> Iterator[Call]:
                open_now.append(name)
                assert open_now == [name]
                with side(name, lambda number, logits: logits).opened() as call:
                    yield call
                open_now.remove(name)

            return held()

        return ComparedSide(name, "float32", opened)

    assert all(pair.passed for pair in compare([alone("a"), alone("b"), alone("c")], feeds()))
    assert open_now == []


def test_an_engine_that_fails_in_a_case_fails_in_that_case_with_its_words() -> None:
    def change(number: int, logits: NDArray[np.float32]) -> NDArray[np.float32]:
        if number == 0:
            raise CallFailed("out of memory")
        return logits

    calls: list[int] = []

    def counted(number: int, logits: NDArray[np.float32]) -> NDArray[np.float32]:
        calls.append(number)
        return change(number, logits)

    sides = [recorded("a", "float32", feeds()), side("b", counted), side("c", lambda number, logits: logits)]
    pairs = compare(sides, feeds())
    assert [[difference.passed for difference in pair.differences] for pair in pairs] == [
        [False, True, True],
        [True, True, True],
        [False, True, True],
    ]
    assert {pair.worst.fault for pair in pairs} == {"b: out of memory", None}
    assert len(calls) == 3, "the rest of a case in which it failed is not asked for"
    assert json.dumps(pairs[0].as_dict(), allow_nan=False)


def test_a_fault_of_an_engine_is_told_in_its_own_words() -> None:
    def broken(arrays: Any) -> NDArray[np.float32]:
        raise EngineFault("onnxruntime failed in a step")

    with pytest.raises(CallFailed, match="onnxruntime failed in a step"):
        failing(broken)({})


@pytest.mark.parametrize(("requests", "left_out"), [(REQUESTS, 0), (2, 1), (1, 3)])
def test_the_cases_keep_to_the_room_of_all_engines(requests: int, left_out: int, tmp_path: Path) -> None:
    engine = HashEngine(Language(1, 70), 1024, REQUESTS, "append")
    tokens = TokenIds(MASKS, FORK, CHILD, (END,))
    manifest = replace(fill(tmp_path), signature=engine.signature, tokens=tokens, max_mask_slots=len(MASKS))
    found = record(engine, manifest, Room(64, 320, requests, 16))
    assert len(found.left_out) == left_out
    for feed in found.feeds:
        assert feed.arrays["slot_ids"].max() < 320
        assert int(feed.arrays["first"][0]) + len(feed.arrays["input_ids"]) <= requests
    rows = [feed.arrays["input_ids"].shape[1] for feed in found.feeds if feed.case.startswith("long context")]
    assert rows[:3] == [16, 16, 16]


def test_the_room_is_what_the_engines_were_built_for(tmp_path: Path) -> None:
    manifest = fill(tmp_path)
    manifest = replace(manifest, signature=replace(manifest.signature, lowering="append"))
    none = room_of(manifest, None, [])
    assert (none.length, none.requests, none.rows) == (1024, REQUESTS, 512)
    small = replace(RECORD, capacity=896, requests=1, prompt_rows=128)
    room = room_of(manifest, None, [RECORD, small])
    assert (room.capacity, room.requests, room.rows) == (896, 1, 128)
    assert room_of(manifest, room.length + 1, [small]).capacity > 896, "what is asked for is not cut in silence"
    assert room_of(manifest, None, [replace(RECORD, capacity=64)]).length == SHORTEST


def test_without_a_checkpoint_one_engine_has_nothing_to_be_compared_with(
    tiny_bundle: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["check", str(tiny_bundle)]) == 2
    error = capsys.readouterr().err
    assert "onnxruntime float32 alone runs it here, expected two engines to compare: name the CHECKPOINT" in error


def test_a_model_that_only_pytorch_runs_here_is_not_called_checked(tmp_path: Path) -> None:
    manifest = fill(tmp_path)
    bundle = Bundle(tmp_path, replace(manifest, signature=replace(manifest.signature, dtype="bfloat16")))
    with pytest.raises(MissingDependency, match=r"nothing runs it here: .*its graph is in bfloat16"):
        line_up(bundle, CheckOptions(TINY, backends=()))


def test_backends_that_share_a_reason_share_a_line() -> None:
    absent = {
        "tensorrt": "backend tensorrt needs an NVIDIA GPU: no driver",
        "tensorrt-rtx": "backend tensorrt-rtx needs an NVIDIA GPU: no driver",
        "onnxruntime": "the graph is in bfloat16",
    }
    assert by_reason(absent) == [
        "tensorrt, tensorrt-rtx: needs an NVIDIA GPU: no driver",
        "onnxruntime: the graph is in bfloat16",
    ]
