"""Engines: everything that can run a bundle is compared with everything else, or skipped with a reason."""

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
from spaceport.tools.verify.accuracy import CallFailed, ComparedEngine, RecordedCall, RunCall, compare, recorded_engine
from spaceport.tools.verify.check.cases import REQUESTS, EngineLimits, record
from spaceport.tools.verify.check.check_options import SHORTEST, CheckOptions
from spaceport.tools.verify.check.engines import limits_of, raising_call_failed, select_engines
from support.hash_engine import CHILD, END, FORK, MASKS, HashEngine, Language
from support.paths import TINY
from support.small_bundle import RECORD, fill

CASES = ("first", "first", "second", "third")


def calls() -> list[RecordedCall]:
    """Four calls of three cases, whose logits rise from call to call."""
    logits = np.arange(12, dtype=np.float32).reshape(1, 3, 4)
    return [
        RecordedCall(case, {"input_ids": np.full((1, 3), number)}, logits + np.float32(number))
        for number, case in enumerate(CASES)
    ]


def changed_engine(
    name: str, change: Callable[[int, NDArray[np.float32]], NDArray[np.float32]], dtype: Precision = "float32"
) -> ComparedEngine:
    """An engine that returns the recorded logits, changed."""

    @contextmanager
    def open_changed() -> Iterator[RunCall]:
        def run_call(arrays: Any) -> NDArray[np.float32]:
            number = int(arrays["input_ids"][0, 0])
            return change(number, calls()[number].expected)

        yield run_call

    return ComparedEngine(name, dtype, open_changed)


def test_each_pair_has_the_tolerance_of_its_coarser_type() -> None:
    engines = [
        recorded_engine("a", "float32", calls()),
        changed_engine("b", lambda number, logits: logits + np.float32(0.01), "float16"),
        changed_engine("c", lambda number, logits: logits + np.float32(0.01)),
        changed_engine("d", lambda number, logits: logits, "bfloat16"),
    ]
    pairs = compare(engines, calls())
    assert [(pair.first + pair.second, pair.dtype, pair.passed) for pair in pairs] == [
        ("ab", "float16", True),
        ("ac", "float32", False),
        ("ad", "bfloat16", True),
        ("bc", "float16", True),
        ("bd", "bfloat16", True),
        ("cd", "bfloat16", True),
    ]


def test_the_worst_case_of_a_pair_exceeds_its_tolerance_the_most() -> None:
    changed = changed_engine("b", lambda number, logits: logits + np.float32((0, 0.02, 0.01, 0.001)[number]))
    (pair,) = compare([recorded_engine("a", "float32", calls()), changed], calls())
    assert [difference.case for difference in pair.differences] == ["first", "second", "third"]
    assert [difference.rows for difference in pair.differences] == [6, 3, 3]
    assert [difference.passed for difference in pair.differences] == [False, False, True]
    assert pair.worst.case == "first"
    assert pair.worst.max_error == pytest.approx(0.02, rel=1e-3)
    assert pair.agreement == 1.0


def test_sides_run_one_after_the_other() -> None:
    open_now: list[str] = []

    def alone(name: str) -> ComparedEngine:
        def open_alone() -> AbstractContextManager[RunCall]:
            @contextmanager
            def opened() -> Iterator[RunCall]:
                open_now.append(name)
                assert open_now == [name]
                with changed_engine(name, lambda number, logits: logits).open() as run_call:
                    yield run_call
                open_now.remove(name)

            return opened()

        return ComparedEngine(name, "float32", open_alone)

    assert all(pair.passed for pair in compare([alone("a"), alone("b"), alone("c")], calls()))
    assert open_now == []


def test_an_engine_that_fails_in_one_case_fails_that_case_with_its_message() -> None:
    def change(number: int, logits: NDArray[np.float32]) -> NDArray[np.float32]:
        if number == 0:
            raise CallFailed("out of memory")
        return logits

    numbers: list[int] = []  # calls that the engine was run on

    def counted(number: int, logits: NDArray[np.float32]) -> NDArray[np.float32]:
        numbers.append(number)
        return change(number, logits)

    engines = [
        recorded_engine("a", "float32", calls()),
        changed_engine("b", counted),
        changed_engine("c", lambda number, logits: logits),
    ]
    pairs = compare(engines, calls())
    assert [[difference.passed for difference in pair.differences] for pair in pairs] == [
        [False, True, True],
        [True, True, True],
        [False, True, True],
    ]
    assert {pair.worst.fault for pair in pairs} == {"b: out of memory", None}
    assert len(numbers) == 3, "after a failure the rest of the case is not run"
    assert json.dumps(pairs[0].as_dict(), allow_nan=False)


def test_a_fault_of_an_engine_keeps_its_message() -> None:
    def broken(arrays: Any) -> NDArray[np.float32]:
        raise EngineFault("onnxruntime failed in a step")

    with pytest.raises(CallFailed, match="onnxruntime failed in a step"):
        raising_call_failed(broken)({})


@pytest.mark.parametrize(("requests", "skipped"), [(REQUESTS, 0), (2, 1), (1, 3)])
def test_the_cases_stay_within_the_limits_of_all_engines(requests: int, skipped: int, tmp_path: Path) -> None:
    engine = HashEngine(Language(1, 70), 1024, REQUESTS, "append")
    tokens = TokenIds(MASKS, FORK, CHILD, (END,))
    manifest = replace(fill(tmp_path), signature=engine.signature, tokens=tokens, max_mask_slots=len(MASKS))
    found = record(engine, manifest, EngineLimits(64, 320, requests, 16))
    assert len(found.skipped) == skipped
    for call in found.calls:
        assert call.arrays["slot_ids"].max() < 320
        assert int(call.arrays["first"][0]) + len(call.arrays["input_ids"]) <= requests
    rows = [call.arrays["input_ids"].shape[1] for call in found.calls if call.case.startswith("long context")]
    assert rows[:3] == [16, 16, 16]


def test_the_limits_are_the_sizes_that_the_engines_were_built_for(tmp_path: Path) -> None:
    manifest = fill(tmp_path)
    manifest = replace(manifest, signature=replace(manifest.signature, lowering="append"))
    none = limits_of(manifest, None, [])
    assert (none.length, none.requests, none.rows) == (1024, REQUESTS, 512)
    small = replace(RECORD, capacity=896, requests=1, prefill_rows=128)
    limits = limits_of(manifest, None, [RECORD, small])
    assert (limits.capacity, limits.requests, limits.rows) == (896, 1, 128)
    assert limits_of(manifest, limits.length + 1, [small]).capacity > 896, "a requested length is never reduced"
    assert limits_of(manifest, None, [replace(RECORD, capacity=64)]).length == SHORTEST


def test_a_single_engine_without_a_checkpoint_is_refused(tiny_bundle: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["check", str(tiny_bundle)]) == 2
    error = capsys.readouterr().err
    assert "only onnxruntime float32 runs it here, expected two engines to compare: name the CHECKPOINT" in error


def test_a_bundle_that_no_backend_runs_here_is_refused_even_with_a_checkpoint(tmp_path: Path) -> None:
    manifest = fill(tmp_path)
    bundle = Bundle(tmp_path, replace(manifest, signature=replace(manifest.signature, dtype="bfloat16")))
    with pytest.raises(MissingDependency, match=r"no backend runs it here: .*its graph is in bfloat16"):
        select_engines(bundle, CheckOptions(TINY, backends=()))


def test_backends_that_share_a_reason_share_a_line() -> None:
    not_compared = {
        "tensorrt": "backend tensorrt needs an NVIDIA GPU: no driver",
        "tensorrt-rtx": "backend tensorrt-rtx needs an NVIDIA GPU: no driver",
        "onnxruntime": "the graph is in bfloat16",
    }
    assert by_reason(not_compared) == [
        "tensorrt, tensorrt-rtx: needs an NVIDIA GPU: no driver",
        "onnxruntime: the graph is in bfloat16",
    ]
