"""Attention over 8-bit keys and values, against numpy, and rows against themselves in other slots and other company."""

import numpy as np
import pytest
from numpy.typing import NDArray

from support.native_operators import Operator, available_sets, library, require_function_near, run
from support.operator_reference import CASES, Case

pytestmark = pytest.mark.skipif(library() is None, reason="no C++ compiler")

CLOSE = 1e-5  # of the largest output: a weight may be rounded to a neighbour


@pytest.mark.parametrize("name", CASES)
def test_attend_is_attention_over_what_it_stored_on_all_sets(name: str) -> None:
    case = CASES[name]
    feeds = case.feeds(np.random.default_rng(3))
    expected = case.expected(feeds)
    first = None
    for set_name in available_sets():
        got = run("Attend", feeds, case.attributes, set_name=set_name, threads=2)
        first = first or got
        for ours, theirs in zip(got, first, strict=True):
            assert ours.tobytes() == theirs.tobytes(), set_name
    assert first is not None
    for got, stored in zip(first[1:3], expected[1:3], strict=True):
        # A sum of a norm may move a code to its neighbour.
        assert np.abs(got.astype(int) - stored).max() <= int(case.norms)
    assert np.allclose(first[3], expected[3], rtol=1e-5)
    assert np.abs(first[0] - expected[0]).max() <= CLOSE * np.abs(expected[0]).max() * (200 if case.norms else 1)
    require_function_near("Attend", feeds, case.attributes)


def test_a_row_that_sees_no_slot_is_zero() -> None:
    feeds = Case().feeds(np.random.default_rng(0))
    feeds["visible"][0, 0, 2] = False
    for set_name in available_sets():
        y = run("Attend", feeds, Case().attributes, set_name=set_name)[0]
        assert not y[2].any()
        assert y[[0, 1, 3, 4]].any(axis=1).all()


def test_what_a_row_does_not_see_changes_no_bit_of_it() -> None:
    """Other rows, hidden slots with huge and undefined values, and the slots behind the last seen one."""
    case = Case(rows=6, slots=200, seen=150)
    dice = np.random.default_rng(5)
    feeds = case.feeds(dice)
    hidden = ~feeds["visible"][0, 0, 2]
    other = {name: value.copy() for name, value in feeds.items()}
    others = np.arange(6) != 2
    other["qkv"][others] *= 100
    other["visible"][0, 0, others] ^= True
    hidden_slots = np.flatnonzero(hidden)
    untouched = np.setdiff1d(hidden_slots, feeds["slots"])
    other["keys"][:, :, untouched], other["scales"][:, :, untouched] = -128, np.nan
    other["values"][:, :, 150:] = 127
    feeds["visible"][0, 0, 2, feeds["slots"][0, others]] = False
    other["visible"][0, 0, 2] = feeds["visible"][0, 0, 2]
    for set_name in available_sets():
        one, two = (run("Attend", given, case.attributes, set_name=set_name)[0] for given in (feeds, other))
        assert one[2].tobytes() == two[2].tobytes(), set_name
        assert np.isfinite(one[2]).all()


@pytest.mark.parametrize("count", [1, 7, 30])
def test_rows_have_the_same_bytes_one_by_one_and_in_any_slots(count: int) -> None:
    """A chain of rows, stored as one step or as several, in order or in shuffled slots."""
    case = Case(rows=30, slots=300, seen=300, heads=7, kv_heads=1)
    dice = np.random.default_rng(9)
    feeds = case.feeds(dice)
    empty = {"keys": np.zeros_like(feeds["keys"]), "values": np.zeros_like(feeds["values"])}

    def chained(slots: NDArray[np.int64], step: int, set_name: str) -> NDArray[np.float32]:
        first = feeds | {"qkv": feeds["qkv"][:1]} | empty
        operator = Operator("Attend", first, case.attributes, set_name, threads=2)
        state, outputs = [empty["keys"], empty["values"], np.zeros_like(feeds["scales"])], []
        for start in range(0, 30, step):
            rows = slice(start, start + step)
            visible = np.zeros((30, 300), bool)
            for row in range(30):
                visible[row, slots[: row + 1]] = True
            given = {name: feeds[name][rows] for name in ("qkv", "cos", "sin")}
            given |= {"slots": slots[None, rows], "visible": visible[None, None, rows]}
            given |= dict(zip(("keys", "values", "scales"), state, strict=True))
            y, *state = operator(given)
            outputs.append(y)
        return np.concatenate(outputs)

    expected = chained(np.arange(30), 30, "portable")
    for set_name in available_sets():
        assert chained(np.arange(30), count, set_name).tobytes() == expected.tobytes(), set_name
        assert chained(dice.permutation(300)[:30], count, set_name).tobytes() == expected.tobytes(), set_name


def test_rows_of_several_requests_are_the_same_as_apart() -> None:
    """Rows that see disjoint slots go into groups of their own."""
    case = Case(rows=8, slots=640, seen=640)
    feeds = case.feeds(np.random.default_rng(2))
    for row in range(8):
        feeds["visible"][0, 0, row] = np.arange(640) // 160 == row % 4
        feeds["slots"][0, row] = row % 4 * 160 + row
    together = run("Attend", feeds, case.attributes)
    for row in range(8):
        apart = {name: feeds[name][row : row + 1] for name in ("qkv", "cos", "sin")}
        apart |= {"slots": feeds["slots"][:, row : row + 1], "visible": feeds["visible"][:, :, row : row + 1]}
        apart |= {name: together[i].copy() for i, name in enumerate(("keys", "values", "scales"), 1)}
        assert run("Attend", apart, case.attributes)[0].tobytes() == together[0][row : row + 1].tobytes()


def test_requests_with_buffers_of_their_own_are_the_same_as_apart() -> None:
    case = Case(rows=4, slots=60, seen=50)
    dice = np.random.default_rng(6)
    apart = [case.feeds(dice) for _ in range(3)]
    together = {name: np.concatenate([feeds[name] for feeds in apart]) for name in apart[0]}
    require_function_near("Attend", together, case.attributes)
    for set_name in available_sets():
        expected = [run("Attend", feeds, case.attributes, set_name=set_name) for feeds in apart]
        got = run("Attend", together, case.attributes, set_name=set_name, threads=2)
        for ours, theirs in zip(got, zip(*expected, strict=True), strict=True):
            assert ours.tobytes() == np.concatenate(theirs).tobytes(), set_name


def test_equal_weights_over_many_slots_do_not_overflow() -> None:
    """The largest weight and the largest value in 40,000 slots."""
    slots = 40_000
    case = Case(rows=1, heads=1, kv_heads=1, size=8, slots=slots, seen=slots)
    feeds = case.feeds(np.random.default_rng(0))
    feeds["visible"][:] = True
    feeds["keys"][:] = 0
    feeds["values"][:], feeds["scales"][:] = 127, 1
    feeds["values"][..., 3] = -127
    feeds["qkv"][:] = 0
    feeds["qkv"][0, 16:] = 127.0
    feeds["qkv"][0, 19] = -127.0
    for set_name in available_sets():
        y = run("Attend", feeds, case.attributes, set_name=set_name)[0]
        assert np.allclose(y[0], [127, 127, 127, -127, 127, 127, 127, 127], rtol=1e-5), set_name


@pytest.mark.parametrize("part", ["query", "key", "value"])
@pytest.mark.parametrize("cap", [0.0, 2.0])
def test_rows_that_see_what_is_not_finite_are_nan_and_others_unchanged(part: str, cap: float) -> None:
    """A NaN or infinity in one row: its query spoils one head of the row, its key or value all that see it."""
    case = Case(rows=9, slots=120, seen=110, cap=cap)
    feeds = case.feeds(np.random.default_rng(8))
    channel = {"query": 64 * 4 + 3, "key": 64 * 7 + 50, "value": 64 * 9 + 63}[part]  # of head 4, and of KV head 1
    for value in (np.nan, np.inf):
        spoilt = feeds | {"qkv": feeds["qkv"].copy()}
        spoilt["qkv"][5, channel] = value
        require_function_near("Attend", spoilt, case.attributes)
        sees = np.arange(9) == 5 if part == "query" else feeds["visible"][0, 0, :, feeds["slots"][0, 5]]
        assert 0 < sees.sum() < 9
        heads = slice(4, 5) if part == "query" else slice(3, 6)
        for set_name in available_sets():
            good, got = (run("Attend", given, case.attributes, set_name=set_name) for given in (feeds, spoilt))
            expected = np.zeros((9, 6, 64), bool)
            expected[sees, heads] = True
            assert np.array_equal(np.isnan(got[0].reshape(expected.shape)), expected), set_name
            clean = ~expected.reshape(9, -1)
            assert got[0][clean].tobytes() == good[0][clean].tobytes(), set_name
            # The slot of the row keeps it, for the rows of later steps.
            later = feeds | dict(zip(("keys", "values", "scales"), got[1:], strict=True))
            later |= {"slots": np.setdiff1d(np.arange(110), feeds["slots"])[None, :9], "qkv": good_rows(feeds)}
            again = run("Attend", later, case.attributes, set_name=set_name)[0].reshape(9, 6, 64)
            assert np.array_equal(np.isnan(again), expected & (part != "query")), set_name


def good_rows(feeds: dict[str, NDArray[np.float32]]) -> NDArray[np.float32]:
    return np.ascontiguousarray(feeds["qkv"][::-1])
