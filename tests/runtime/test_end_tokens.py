"""Stop tokens, minimum lengths and ignored end tokens: with all drafts and threads, the output is that of plain decoding."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from spaceport.graphs.contract.faults import OptionFault
from spaceport.runtime.decode.threads import Ending
from spaceport.runtime.decoding import Decoding
from spaceport.runtime.limits import Limits
from spaceport.runtime.sampling.grammar import Grammar
from spaceport.runtime.sampling.sampler import Sampling
from spaceport.runtime.session import Runtime
from support.hash_engine import CHILD, END, FORK, MASKS, Cell, Language
from support.hash_runtime import hash_runtime

PROMPT = [1, 2, 3]
LIMIT = 30  # tokens of a thread, prompt included
Found = dict[tuple[int, ...], tuple[list[int], Ending]]

OPTIONS: list[dict[str, Any]] = [
    {"stop_token_ids": (4,)},
    {"stop_token_ids": (4, 7, END)},
    {"min_tokens": 6},
    {"min_tokens": 6, "stop_token_ids": (2, 4)},
    {"ignore_eos": True},
    {"ignore_eos": True, "stop_token_ids": (5, END), "min_tokens": 4},
    {"stop_token_ids": (FORK,)},
]
DRAFTS: list[dict[str, Any]] = [
    {"mask_slots": 0},
    {},
    {"draft": "chain"},
    {"mask_slots": 0, "lookup": 8},
    {"draft_rows": 40, "max_threads": 1},
]


def plain(
    language: Language, tokens: Sequence[int], depth: int, options: Decoding, path: tuple[int, ...] = ()
) -> Found:
    """The output of every thread, token by token, without engine, drafts and shared steps."""
    cells: list[Cell] = []
    for token in tokens:
        cells.append(language.follow(cells, token))
    text: list[int] = []
    found: Found = {path: (text, "length")}
    ends = {*(() if options.ignore_eos else (END,))}
    while len(cells) < LIMIT:
        logits = language.logits(cells[-1].state)
        logits[[*MASKS, CHILD]] = -1
        if len(path) >= depth or cells[-1].token in (FORK, CHILD):
            logits[FORK] = -1
        if len(cells) < len(PROMPT) + options.min_tokens:
            logits[[*ends, *options.stop_token_ids]] = -1
        token = int(logits.argmax())
        if token in ends or token in options.stop_token_ids:
            found[path] = (text, "end" if token in ends else "stop")
            break
        text.append(token)
        cells.append(language.follow(cells, token))
        if token == FORK:
            child = (*path, text.count(FORK) - 1)
            found |= plain(language, [*(cell.token for cell in cells), CHILD], depth, options, child)
    return found


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("drafts", DRAFTS, ids=str)
@pytest.mark.parametrize("quality", [100, 60])
def test_every_thread_is_that_of_plain_decoding(options: dict[str, Any], drafts: dict[str, Any], quality: int) -> None:
    endings: set[str] = set()
    threads = 0
    for seed in range(6):
        language = Language(seed, quality, end_every=6, fork_every=9)
        with hash_runtime(language, max_seq_len=LIMIT, max_slots=1000) as runtime:
            decoding = Decoding(fork=True, max_depth=2, **options, **drafts)
            completion = runtime.generate(PROMPT, decoding)
        found = {thread.path: (list(thread.tokens), thread.ending) for thread in completion.threads}
        assert found == plain(language, PROMPT, 2, decoding)
        endings |= {ending for _, ending in found.values()}
        threads += len(found)
    assert ("stop" in endings) == ("stop_token_ids" in options)
    assert ("end" in endings) == (not options.get("ignore_eos"))
    assert threads > 6 or FORK in options.get("stop_token_ids", ())


@pytest.mark.parametrize("drafts", DRAFTS, ids=str)
def test_sampled_tokens_obey_the_same_rules(drafts: dict[str, Any]) -> None:
    sampling = Sampling(temperature=1.5, seed=7)
    rules: dict[str, Any] = {"min_tokens": 12, "stop_token_ids": (4, 6), "sampling": sampling}
    with hash_runtime(Language(2, end_every=3), max_seq_len=60) as runtime:
        expected = runtime.generate(PROMPT, Decoding(mask_slots=0, **rules))
        found = runtime.generate(PROMPT, Decoding(**drafts, **rules))
        free = runtime.generate(PROMPT, Decoding(**drafts, **rules | {"min_tokens": 0}))
    assert (found.tokens, found.ending) == (expected.tokens, expected.ending)
    assert len(found.tokens) >= 12 > len(free.tokens)
    assert not {4, 6} & set(found.tokens)


def test_a_stop_string_and_a_limit_end_a_text_before_its_minimum() -> None:
    with hash_runtime(Language(1, end_every=10**9), max_seq_len=60) as runtime:
        whole = runtime.generate(PROMPT, Decoding(max_tokens=20))
        stopped = runtime.generate(PROMPT, Decoding(max_tokens=20, min_tokens=20, stop=whole.text[5]))
        limited = runtime.generate(PROMPT, Decoding(max_total_tokens=4, min_tokens=20))
    assert (stopped.ending, limited.ending) == ("stop", "total")
    assert len(stopped.tokens) <= 6


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"stop_token_ids": "5"}, "stop_token_ids is '5': expected token ids"),
        ({"stop_token_ids": (True,)}, "expected token ids"),
        ({"stop_token_ids": (-1,)}, "expected token ids"),
        ({"stop_token_ids": 5}, "expected token ids"),
        ({"min_tokens": -1}, "min_tokens is -1: expected at least 0"),
        ({"min_tokens": None}, "expected a whole number"),
        ({"min_tokens": 9, "max_tokens": 8}, "min_tokens is 9: expected at most max_tokens, 8"),
        ({"ignore_eos": 1}, "ignore_eos is 1: expected True or False"),
        ({"ignore_eos": True, "grammar": Grammar(regex="a")}, "ignore_eos is True with a grammar"),
    ],
)
def test_impossible_rules_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionFault, match=message):
        Decoding(**options)


def test_stop_tokens_are_bounded_and_of_the_vocabulary() -> None:
    with hash_runtime(Language(1)) as like:
        with pytest.raises(OptionFault, match="stop_token_ids holds the token id 15: expected ids from 0 to 14"):
            like.generate(PROMPT, Decoding(stop_token_ids=(15,)))
        runtime = Runtime(like.bundle, like.engine, like.max_seq_len, limits=Limits(banned_tokens=2))
    with pytest.raises(OptionFault, match="stop_token_ids has 3 entries: expected at most 2"):
        runtime.generate(PROMPT, Decoding(stop_token_ids=(1, 2, 3)))
