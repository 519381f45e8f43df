"""Selection: the best tokens of rows stand for their logits wherever a greedy choice is made, and say where they cannot."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np
import onnxruntime as ort
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from spaceport.exporter.to_onnx import write_selection
from spaceport.graphs.contract.signature import BEST_TOKENS, selection_width
from spaceport.runtime.decode.sequence import NotANumber, TokenSequence, root_sequence
from spaceport.runtime.engine import SelectedRows, selected_rows
from spaceport.runtime.sampling.choice import Greedy
from support.hash_engine import greedy

SIZES = (5, BEST_TOKENS, 17, 300)
Logits = NDArray[np.float32]


@pytest.fixture(scope="module")
def session(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], ort.InferenceSession]:
    @cache
    def opened(size: int) -> ort.InferenceSession:
        file: Path = tmp_path_factory.mktemp("selection") / "selection.onnx"
        write_selection(file, size)
        return ort.InferenceSession(str(file), providers=["CPUExecutionProvider"])

    return opened


def by_torch(logits: Logits) -> Logits:
    torch = pytest.importorskip("torch")
    from spaceport.runtime.backends.on_tensorrt import selection

    packed: Logits = selection(torch.from_numpy(logits)).numpy()
    return packed


def rows_of(packed: Logits, logits: Logits) -> SelectedRows:
    (rows,) = selected_rows(packed, lambda: logits, logits.shape[1])
    return rows


def thread() -> TokenSequence:
    return root_sequence([1, 2, 3], 8)


def reported(selector: Greedy, rows: Logits | SelectedRows, index: int) -> int | str:
    try:
        return selector.token(rows[index], thread(), ())
    except NotANumber as error:
        return str(error)


@st.composite
def lines(draw: st.DrawFn) -> tuple[Logits, frozenset[int]]:
    """Logits with many ties, some of them no numbers, and tokens that may not be written, often the best ones."""
    size, dice = draw(st.sampled_from(SIZES)), np.random.default_rng(draw(st.integers(0, 1000)))
    logits = np.round(dice.normal(size=(1, 4, size)) * draw(st.sampled_from([0.3, 2, 9]))).astype(np.float32)
    if (spoilt := draw(st.sampled_from([None, np.nan, np.inf, -np.inf]))) is not None:
        logits[0, 0, dice.integers(size)] = spoilt
    best = np.argsort(-logits[0, 1])[: draw(st.integers(0, min(size - 1, 20)))]
    return logits, frozenset(best.tolist())


@pytest.mark.torch
@settings(max_examples=150)
@given(case=lines())
def test_greedy_tokens_are_those_of_the_logits(
    session: Callable[[int], ort.InferenceSession], case: tuple[Logits, frozenset[int]]
) -> None:
    logits, banned = case
    selector = greedy(banned)
    packed = session(logits.shape[-1]).run(None, {"logits": logits})[0]
    assert packed.shape == (1, 4, selection_width(logits.shape[-1]))
    for rows in (rows_of(packed, logits), rows_of(by_torch(logits), logits)):
        for index in range(4):
            assert reported(selector, rows, index) == reported(selector, logits[0], index)
    rows = rows_of(packed, logits)
    plain, selected = (selector.candidates(found, thread(), 3, 1) for found in (logits[0, 1:], rows[1:]))
    assert selected == plain


def test_candidates_have_their_probability(session: Callable[[int], ort.InferenceSession]) -> None:
    logits = np.zeros((1, 1, 300), np.float32)
    logits[0, 0, [9, 4, 6]] = 12, 10, 8
    weights = np.exp(logits[0, 0].astype(np.float64))
    exact = weights / (weights.sum() - weights[4])  # without the banned token
    (candidate,) = greedy([4]).candidates(
        rows_of(session(300).run(None, {"logits": logits})[0], logits), thread(), 3, 3
    )
    assert candidate.tokens == (9, 6)
    assert candidate.probabilities == pytest.approx([exact[9], exact[6]], rel=1e-5)


def test_rows_that_only_fill_up_a_call_are_left_out() -> None:
    packed, logits = np.zeros((2, 4, 11), np.float32), np.arange(40, dtype=np.float32).reshape(2, 4, 5)
    first, second = selected_rows(packed, lambda: logits, 3)
    assert first.logits.shape == second.logits.shape == (3, 5)
    assert (second[1:].logits == logits[1, 1:3]).all()
    assert (second[2].logits == logits[1, 2:3]).all()
