"""What may be asked of a completion, over a fake engine: every option with every draft and thread, and what is refused."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spaceport.graphs.contract.faults import OptionFault
from spaceport.graphs.contract.manifest import TokenIds
from spaceport.graphs.contract.mask_layout import MaskLayout
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
def test_every_thread_is_that_of_plain_decoding(options: dict[str, Any]) -> None:
    endings: set[str] = set()
    threads = 0
    for seed, drafts in enumerate(DRAFTS * 2):
        language = Language(seed, (100, 60)[seed % 2], end_every=6, fork_every=9)
        with hash_runtime(language, max_seq_len=LIMIT, max_slots=1000) as runtime:
            decoding = Decoding(fork=True, max_depth=2, **options, **drafts)
            completion = runtime.generate(PROMPT, decoding)
        found = {thread.path: (list(thread.tokens), thread.ending) for thread in completion.threads}
        assert found == plain(language, PROMPT, 2, decoding)
        endings |= {ending for _, ending in found.values()}
        threads += len(found)
    assert ("stop" in endings) == ("stop_token_ids" in options)
    assert ("end" in endings) == (not options.get("ignore_eos"))
    assert threads > 10 or FORK in options.get("stop_token_ids", ())


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


@settings(max_examples=80)
@given(
    language=st.builds(
        Language, seed=st.integers(0, 10**6), quality=st.just(80), end_every=st.just(12), fork_every=st.integers(3, 9)
    ),
    prompt=st.lists(st.integers(0, END - 1), min_size=1, max_size=5),
    decoding=st.builds(
        Decoding,
        max_tokens=st.integers(1, 30),
        max_total_tokens=st.none() | st.integers(1, 60),
        stop=st.lists(st.text("abcdefghij", min_size=1, max_size=3), max_size=4),
        mask_slots=st.none() | st.just(0),
        max_threads=st.sampled_from((1, 3, 16)),
        max_depth=st.integers(0, 3),
        logprobs=st.none() | st.just(1),
    ),
)
def test_pieces_threads_and_the_completion_have_the_same_text(
    language: Language, prompt: list[int], decoding: Decoding
) -> None:
    with hash_runtime(language, max_seq_len=100) as runtime, runtime.stream(prompt, decoding) as stream:
        pieces = list(stream)
        found = stream.completion()
    assert "".join(piece.reading for piece in pieces) == found.text
    for thread in found.threads:
        own = [piece.token for piece in pieces if piece.thread == thread.path and piece.token is not None]
        assert tuple(own[: len(thread.tokens)]) == thread.tokens
        assert thread.ending == "stop" or len(own) == len(thread.tokens)  # a stop string may cut what was shown
        assert len(thread.logprobs) == (0 if decoding.logprobs is None else len(thread.tokens))
    wide = {thread.ending for thread in found.threads} & {"total", "deadline", "cancelled"}
    assert found.ending == (wide.pop() if wide else found.threads[0].ending)
    assert found.statistics.tokens <= (decoding.max_total_tokens or 10**6)


def test_a_completion_tells_its_seed_its_times_and_its_trace() -> None:
    drawn = Decoding(sampling=Sampling(temperature=1.0))
    with hash_runtime(Language(3, end_every=10**9)) as runtime:
        first, other = runtime.generate(PROMPT, drawn), runtime.generate(PROMPT, drawn)
        again = runtime.generate(PROMPT, Decoding(sampling=Sampling(temperature=1.0, seed=first.seed)))
        assert (again.tokens, again.seed) == (first.tokens, first.seed)
        assert other.seed != first.seed
        with runtime.stream(PROMPT, Decoding(trace=True)) as stream:
            assert stream.statistics.tokens_per_second == 0.0
            completion = stream.completion()
        found = completion.statistics
        assert 0 < found.waiting_seconds < found.first_token_seconds < found.seconds
        assert found.engine_seconds + found.outside_seconds <= found.seconds - found.waiting_seconds + 0.001
        assert found.tokens_per_second == pytest.approx(found.tokens / (found.seconds - found.waiting_seconds))
        assert completion.trace is not None
        record = completion.trace.record(runtime.tokenizer)
        assert sum(map(len, record.generated)) == len(completion.tokens)
        assert len(record.steps) == found.steps + found.prompt_steps
        only = runtime.generate(PROMPT, Decoding(max_tokens=1))
        assert only.statistics.first_token_seconds == only.statistics.seconds
        assert (only.trace, only.seed) == (None, None)


def test_a_stream_that_two_read_ends_for_both() -> None:
    with hash_runtime(Language(3, end_every=10**9)) as runtime, ThreadPoolExecutor(2) as readers:
        stream = runtime.stream(PROMPT, Decoding(max_tokens=40))
        read = [future.result(timeout=60) for future in [readers.submit(list, stream) for _ in range(2)]]
    assert sum(map(len, read)) >= 40


def test_a_draft_may_verify_all_mask_slots_and_have_them_behind_one_token() -> None:
    block = MaskLayout(shift=False, group="block")
    assert Decoding().draft_config(5).rows == Decoding().draft_config(11, mask_layout=block).rows == 24
    assert Decoding().draft_config(30).rows == 61
    assert Decoding().draft_config(30, mask_layout=block).rows == 62
    assert Decoding(draft_rows=9).draft_config(30, mask_layout=block).rows == 9


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"max_tokens": 0}, "max_tokens is 0: expected at least 1"),
    ({"max_total_tokens": 0}, "max_total_tokens is 0: expected at least 1"),
    ({"max_depth": -1}, "max_depth is -1: expected at least 0"),
    ({"max_threads": 0}, "max_threads is 0: expected 1 to 128"),
    ({"max_threads": 129}, "max_threads is 129: expected 1 to 128"),
    ({"timeout": 0.0}, "timeout is 0.0: expected a number of seconds above 0"),
    ({"timeout": float("nan")}, "timeout is nan: expected a number of seconds above 0"),
    ({"stop": [""]}, "expected strings of at least one character"),
    ({"draft": "bush"}, "draft shape is 'bush': expected chain or tree"),
    ({"draft_rows": 0}, "draft_rows is 0: expected at least 1"),
    ({"draft_siblings": 0}, "draft_siblings is 0: expected at least 1"),
    ({"lookup": -1}, "lookup is -1: expected at least 0"),
    ({"draft": "chain", "lookup": 3}, "lookup is 3 with draft='chain': it applies to draft='tree' only"),
    ({"draft": "chain", "draft_rows": 3}, "draft_rows is 3 with draft='chain': it applies to"),
    ({"draft": "chain", "draft_siblings": 3}, "draft_siblings is 3 with draft='chain': it applies to"),
    ({"max_tokens": 5.5}, "max_tokens is 5.5: expected a whole number"),
    ({"max_tokens": True}, "max_tokens is True: expected a whole number"),
    ({"draft_siblings": "3"}, "draft_siblings is '3': expected a whole number"),
    ({"logprobs": 1.5}, "logprobs is 1.5: expected a whole number"),
    ({"timeout": "5"}, "timeout is '5': expected a number of seconds"),
    ({"stop": 5}, "stop is 5: expected strings"),
    ({"fork": "no"}, "fork is 'no': expected True, False or None"),
    ({"trace": "t.json"}, "trace is 't.json': expected True or False"),
    ({"sampling": 0.7}, "sampling is 0.7: expected a Sampling"),
    ({"grammar": "[a-z]"}, r"grammar is .* expected a Grammar"),
    ({"fork": True, "grammar": Grammar(regex="a")}, "fork is True with a grammar: a constrained completion cannot"),
    ({"stop_token_ids": "5"}, "stop_token_ids is '5': expected token ids"),
    ({"stop_token_ids": (True,)}, "expected token ids"),
    ({"stop_token_ids": (-1,)}, "expected token ids"),
    ({"stop_token_ids": 5}, "expected token ids"),
    ({"min_tokens": -1}, "min_tokens is -1: expected at least 0"),
    ({"min_tokens": None}, "expected a whole number"),
    ({"min_tokens": 9, "max_tokens": 8}, "min_tokens is 9: expected at most max_tokens, 8"),
    ({"ignore_eos": 1}, "ignore_eos is 1: expected True or False"),
    ({"ignore_eos": True, "grammar": Grammar(regex="a")}, "ignore_eos is True with a grammar"),
    ({"cache_salt": "x" * 257}, "cache_salt has 257 characters: expected at most 256"),
    ({"cache_salt": None}, "cache_salt is None: expected text"),
]


@pytest.mark.parametrize(("asked", "reported"), REFUSED)
def test_what_cannot_be_meant_is_refused_at_once(asked: dict[str, Any], reported: str) -> None:
    with pytest.raises(OptionFault, match=reported):
        Decoding(**asked)


def test_what_a_bundle_cannot_do_is_refused_before_anything_is_written() -> None:
    with hash_runtime(Language(1)) as runtime:
        options: list[tuple[dict[str, Any], str]] = [
            ({"max_tokens": 500}, "max_tokens 500 make"),
            ({"max_total_tokens": 500}, "lower max_total_tokens to"),
            ({"mask_slots": 6}, "mask_slots is 6: expected 0 to 5"),
            ({"sampling": Sampling(banned=(10**6,))}, "banned holds the token id 1000000: expected ids from 0 to"),
            ({"stop_token_ids": (15,)}, "stop_token_ids holds the token id 15: expected ids from 0 to 14"),
        ]
        for asked, reported in options:
            with pytest.raises(OptionFault, match=reported):
                runtime.stream(PROMPT, Decoding(**asked))
        prompts: list[Any] = [5, None, b"abc", [True, 2], "", [], [1.5], {"role": "user"}]
        for prompt in (*prompts, [5, {"role": "user", "content": "a"}]):
            with pytest.raises(OptionFault, match="expected"):
                runtime.stream(prompt)
        with pytest.raises(OptionFault, match=r"decoding is \{'max_tokens': 3\}: expected a Decoding"):
            runtime.stream(PROMPT, {"max_tokens": 3})  # type: ignore[arg-type]
        manifest = replace(runtime.bundle.manifest, tokens=TokenIds(mask=MASKS, end=(END,)))
        line = Runtime(replace(runtime.bundle, manifest=manifest), runtime.engine, 64)
        with pytest.raises(OptionFault, match="expected a bundle with a fork token, this one has none"):
            line.stream(PROMPT, Decoding(fork=True))
        limited = Runtime(runtime.bundle, runtime.engine, 64, limits=Limits(banned_tokens=2))
        with pytest.raises(OptionFault, match="stop_token_ids has 3 entries: expected at most 2"):
            limited.generate(PROMPT, Decoding(stop_token_ids=(1, 2, 3)))
        assert runtime.generate(PROMPT, Decoding(max_tokens=1)).statistics.tokens == 1
