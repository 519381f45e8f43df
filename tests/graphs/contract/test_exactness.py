"""Exactness: the default drafts and the words that follow from measured noise."""

from __future__ import annotations

import pytest

from spaceport.graphs.contract.exactness import Exactness
from spaceport.runtime.decoding import Decoding


@pytest.mark.parametrize(
    ("rows", "slots", "tolerated", "words"),
    [
        (0, 0, 0, "bit-identical: draft trees, threads in parallel"),
        (0, 1e-6, 1e-5, "equal up to near-ties (noise 1e-06): draft trees, threads in parallel"),
        (2e-6, 1e-6, 1e-5, "equal up to near-ties (noise 2e-06): draft trees, threads in parallel"),
        (0, 4e-4, 0, "bit-identical in chains (noise 4e-04 in other layouts): draft chains, one thread at a time"),
        (3e-7, 0, 0, "not exact (noise 3e-07 with the number of rows): no drafts unless they are requested"),
        (3e-5, 0, 1e-5, "not exact (noise 3e-05 with the number of rows): no drafts unless they are requested"),
        (1e-6, 2e-5, 1e-5, "equal up to near-ties (noise 2e-05): draft chains, one thread at a time"),
    ],
)
def test_a_guarantee_is_put_into_words(rows: float, slots: float, tolerated: float, words: str) -> None:
    assert str(Exactness(rows, slots, tolerated, (2, 9))) == words
    assert Exactness(rows, slots, tolerated).guarantee == "not measured"


@pytest.mark.parametrize("noise", [-1e-9, float("nan"), float("inf")])
def test_noise_is_a_number(noise: float) -> None:
    with pytest.raises(ValueError, match="expected noise of at least 0"):
        Exactness(noise, 0.0, 0.0)


@pytest.mark.parametrize(
    ("exactness", "config", "threads"),
    [
        (Exactness(0.0, 1e-6, 1e-5, (2,)), (5, 3, 16), 16),
        (Exactness(0.0, 1e-6, 0.0, (2,)), (5, 1, 16), 1),
        (Exactness(1e-6, 1e-6, 0.0, (2,)), (0, 1, 0), 1),
    ],
)
def test_defaults_follow_from_the_exactness(exactness: Exactness, config: tuple[int, ...], threads: int) -> None:
    drafts = Decoding().draft_config(5, exactness.drafts)
    assert (drafts.mask_slots, drafts.siblings, drafts.lookup) == config
    assert Decoding().threads(exactness.parallel_threads) == threads
    requested = Decoding(mask_slots=4, lookup=3, draft_siblings=2, max_threads=7)
    wide = requested.draft_config(5, exactness.drafts)
    assert (wide.mask_slots, wide.siblings, wide.lookup) == (4, 2, 3)
    assert requested.threads(exactness.parallel_threads) == 7
    assert Decoding(draft="chain").draft_config(5, exactness.drafts).mask_slots == 5
