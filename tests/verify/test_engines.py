"""Engines: everything that can run a bundle is compared with everything else, each pair within its tolerance."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from spaceport.graphs.contract.faults import MissingDependency
from spaceport.graphs.contract.signature import Precision
from spaceport.runtime.bundle import Bundle
from spaceport.runtime.engine import Batch, EngineFault
from spaceport.tools.cli import run
from spaceport.verify.accuracy import ComparedEngine, ComparedPair, compare, compare_logits, merged
from spaceport.verify.cases import CheckOptions, RecordedCall
from spaceport.verify.check import select_engines
from support.hash_engine import HashEngine, Language
from support.paths import TINY
from support.small_bundle import fill

Logits = NDArray[np.float32]
CASES = ("first", "first", "second", "third")


def logits(*rows: list[float]) -> Logits:
    return np.array([rows], np.float32)


def test_a_difference_counts_disagreements_and_has_the_smallest_margin() -> None:
    expected = logits([1.0, 3.0, 2.5], [0.0, 4.0, 1.0], [2.0, 2.25, 0.0])
    got = logits([1.0, 2.0, 2.5], [0.0, 4.0, 1.0], [2.5, 2.25, 0.0])
    found = compare_logits("case", expected, got, 0.1)
    assert (found.rows, found.disagreements, found.max_error, found.margin) == (3, 2, 1.0, 0.25)
    assert not found.passed
    correct = compare_logits("case", expected, expected, 0.1)
    assert correct.passed
    assert correct.margin is None
    broken = compare_logits("case", logits([1.0, 2.0]), logits([1.0, float("nan")]), 0.1)
    assert not broken.passed
    assert not merged([correct, broken]).passed
    assert not merged([broken, correct]).passed


def pair_with(error: Logits, native: bool, experts: bool = False) -> ComparedPair:
    """Two engines whose logits (100 rows, the largest 1) differ by an error in each row."""
    expected = np.ones((1, 100, 4), np.float32)
    found = compare_logits("case", expected, expected + error[None, :, None], 0.2)
    return ComparedPair("a", "b", "float32", (found,), 0.2, native, experts)


@pytest.mark.parametrize(
    ("rows", "error", "others", "native", "experts", "passed"),
    [
        (1, 0.19, 0.0, True, False, True),
        (1, 0.3, 0.0, True, False, False),
        (8, 0.3, 0.0, True, True, False),  # their mean
        (6, 0.3, 0.0, True, True, True),
        (9, 0.21, 0.0, True, True, False),  # their number
        (1, np.nan, 0.0, True, True, False),
        (0, 0.0, 0.019, True, False, True),
        (0, 0.0, 0.03, True, False, False),
        (0, 0.0, 0.03, False, False, True),
    ],
)
def test_rounding_explains_small_errors_on_average_and_other_experts_of_few_rows(
    rows: int, error: float, others: float, native: bool, experts: bool, passed: bool
) -> None:
    errors = np.full(100, others, np.float32)
    errors[:rows] = error
    assert pair_with(errors, native, experts).passed == passed


def calls() -> list[RecordedCall]:
    """Four calls of three cases, whose logits rise from call to call."""
    logits = np.arange(12, dtype=np.float32).reshape(1, 3, 4)
    mask = np.ones((1, 1, 3, 64), np.bool_)
    return [
        RecordedCall(case, Batch(0, *[np.full((1, 3), number)] * 3, mask, np.zeros((1, 3), np.int64)), logits + number)
        for number, case in enumerate(CASES)
    ]


def unchanged(number: int, logits: Logits) -> Logits:
    return logits


open_now: list[HashEngine] = []


@dataclass
class ChangedEngine(HashEngine):
    """An engine that returns the recorded logits, changed; no two are open at a time."""

    change: Callable[[int, Logits], Logits] = unchanged

    def __post_init__(self) -> None:
        super().__post_init__()
        assert not open_now
        open_now.append(self)

    def run(self, batch: Batch) -> Logits:
        number = int(batch.input_ids[0, 0])
        return self.change(number, calls()[number].expected)

    def close(self) -> None:
        open_now.remove(self)


def changed_engine(
    name: str, change: Callable[[int, Logits], Logits] = unchanged, dtype: Precision = "float32"
) -> ComparedEngine:
    return ComparedEngine(name, dtype, lambda: ChangedEngine(Language(1), 64, 1, change=change))


def fail(*_: object) -> Logits:
    raise EngineFault("onnxruntime failed in a step")


def test_each_pair_has_the_tolerance_of_its_coarser_type() -> None:
    engines = [
        changed_engine("a", fail),  # the one that the calls were recorded on does not run again
        changed_engine("b", lambda number, logits: logits + np.float32(0.01), "float16"),
        changed_engine("c", lambda number, logits: logits + np.float32(0.01)),
        changed_engine("d", dtype="bfloat16"),
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
    assert open_now == []


def test_an_engine_that_fails_in_one_case_fails_that_case_with_its_message() -> None:
    numbers: list[int] = []  # calls that the engine was run on

    def fail_first(number: int, logits: Logits) -> Logits:
        numbers.append(number)
        return fail() if number == 0 else logits

    pairs = compare([changed_engine("a"), changed_engine("b", fail_first), changed_engine("c")], calls())
    assert [[difference.passed for difference in pair.differences] for pair in pairs] == [
        [False, True, True],
        [True, True, True],
        [False, True, True],
    ]
    assert {pair.worst.fault for pair in pairs} == {"b: onnxruntime failed in a step", None}
    assert len(numbers) == 3, "after a failure the rest of the case is not run"
    assert json.dumps(pairs[0].as_dict(), allow_nan=False)


def test_what_cannot_be_compared_is_refused(
    tiny_bundle: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for flags, message in (
        ((), "only onnxruntime float32 runs it here, expected two engines to compare: name the CHECKPOINT"),
        (("--layers",), "--layers compares with the PyTorch model: expected a CHECKPOINT"),
    ):
        assert run(["check", str(tiny_bundle), *flags]) == 2
        assert message in capsys.readouterr().err
    manifest = fill(tmp_path)
    bundle = Bundle(
        tmp_path, replace(manifest, format="bfloat16", signature=replace(manifest.signature, dtype="bfloat16"))
    )
    with pytest.raises(MissingDependency, match=r"no backend runs it here: .*its format is bfloat16"):
        select_engines(bundle, CheckOptions(TINY, backends=()))
