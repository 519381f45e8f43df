"""Arrival strategies: random requests and languages for properties of the scheduler."""

from __future__ import annotations

from hypothesis import strategies as st

from spaceport.runtime.decode.draft import DraftConfig
from support.arrivals import Arrival
from support.hash_engine import END, LAYOUTS, Language, Tree

ARRIVALS = st.builds(
    Arrival,
    prompt=st.lists(st.integers(0, END - 1), min_size=1, max_size=25),
    at=st.integers(0, 12),
    max_tokens=st.integers(1, 20),
    draft_config=st.builds(
        DraftConfig,
        mask_slots=st.integers(0, 3),
        shape=st.sampled_from(("chain", "tree")),
        rows=st.integers(1, 16),
        lookup=st.sampled_from((0, 4)),
    ),
    max_threads=st.sampled_from((1, 2, 16)),
    max_depth=st.integers(0, 2),
    cancelled=st.none() | st.integers(0, 15),
    patience=st.none() | st.integers(0, 15),
    trouble=st.sampled_from((None, None, None, "on_token", "on_end", "choice", "number", "observer", "progress")),
    when=st.integers(0, 8),
)
LANGUAGES = st.builds(
    Language,
    seed=st.integers(0, 10**6),
    quality=st.sampled_from((0, 60, 100)),
    end_every=st.sampled_from((6, 20)),
    fork_every=st.sampled_from((4, 10)),
    window=st.none() | st.integers(1, 20),
    mask_layout=st.sampled_from(LAYOUTS),
)


def begins(text: Tree, alone: Tree) -> bool:
    """Whether each thread has written a beginning of what it would have written."""
    return all(alone[path][: len(tokens)] == tokens for path, tokens in text.items())
