"""Log probabilities of generated and of given tokens: those of the model's own logits, whatever drafts, forks and cuts there are."""

from __future__ import annotations

import math
import time
import tracemalloc
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

from spaceport.graphs.contract.faults import OptionFault
from spaceport.graphs.contract.manifest import TokenIds
from spaceport.graphs.contract.signature import LOGIT_BYTES, LOWERINGS
from spaceport.runtime.decode.sequence import NotANumber
from spaceport.runtime.decoding import Decoding
from spaceport.runtime.engine import Batch
from spaceport.runtime.sampling.logprobs import numbers_of
from spaceport.runtime.sampling.sampler import most_probable
from spaceport.runtime.scheduling.request import Completion
from spaceport.runtime.session import Runtime
from spaceport.runtime.text.prompt import ControlTokens
from spaceport.runtime.text.tokenizer import encode
from support.hash_engine import CHILD, END, FORK, VOCAB, HashEngine, Language
from support.hash_runtime import WORDS, expected_logprobs, hash_runtime, same
from support.paths import TINY
from support.small_tokenizers import BROKEN, BYTES, FALLBACK, full

PROMPT = "import json\n\ndef"
TOKENS = st.lists(st.integers(0, END - 1), min_size=1, max_size=20)
SEEDS, WINDOWS = st.integers(0, 10**6), st.none() | st.integers(1, 30)
ROWS = st.fixed_dictionaries({"prompt_rows": st.integers(1, 45), "lowering": st.sampled_from(LOWERINGS)})


def without(completion: Completion) -> object:
    """What a text comes to but for log-probabilities and times."""
    threads = [replace(thread, logprobs=()) for thread in completion.threads]
    return completion.text, completion.tokens, completion.ending, threads


@settings(max_examples=60)
@given(
    language=st.builds(
        Language,
        seed=SEEDS,
        quality=st.sampled_from((0, 60, 100)),
        end_every=st.sampled_from((6, 30)),
        fork_every=st.sampled_from((4, 9)),
        window=WINDOWS,
    ),
    prompts=st.lists(TOKENS, min_size=1, max_size=3),
    decoding=st.builds(
        Decoding,
        max_tokens=st.integers(1, 30),
        max_total_tokens=st.integers(1, 60),
        stop=st.lists(st.text("abcdef", min_size=1, max_size=2), max_size=2),
        mask_slots=st.integers(0, 5),
        lookup=st.sampled_from((0, 6)),
        max_threads=st.sampled_from((1, 3, 16)),
        max_depth=st.integers(0, 2),
        logprobs=st.integers(0, VOCAB),
    ),
    rows=ROWS,
)
def test_each_token_that_is_not_cut_off_is_as_likely_as_the_network_says(
    language: Language, prompts: list[list[int]], decoding: Decoding, rows: dict[str, Any]
) -> None:
    assert decoding.logprobs is not None
    with hash_runtime(language, 64, 128, requests=2, **rows) as runtime:
        streams = [runtime.stream(prompt, decoding) for prompt in prompts]
        written = [(list(stream), stream.completion()) for stream in streams]
        plain = runtime.generate(prompts[0], replace(decoding, logprobs=None))
    assert without(written[0][1]) == without(plain)
    assert plain.logprobs == ()
    for prompt, (pieces, completion) in zip(prompts, written, strict=True):
        assert tuple(one.token for one in completion.logprobs) == completion.tokens
        assert "".join(piece.reading for piece in pieces) == completion.text
        wide = {thread.ending for thread in completion.threads} & {"total", "deadline", "cancelled"}
        assert completion.ending == (wide.pop() if wide else completion.threads[0].ending)
        texts = {thread.path: thread for thread in completion.threads}
        for path, thread in texts.items():
            before = list(prompt)
            for depth in range(len(path)):
                fork = texts[path[: depth + 1]].fork
                assert fork is not None
                before += [*texts[path[:depth]].tokens[: fork + 1], CHILD]
            expected = expected_logprobs(language, [*before, *thread.tokens], len(before), decoding.logprobs)
            assert same(thread.logprobs, expected)
            reported = [piece.logprob for piece in pieces if piece.thread == path and piece.logprob is not None]
            assert tuple(reported[: len(thread.tokens)]) == thread.logprobs
        apart = [one for thread in completion.threads for one in thread.logprobs if one.token != FORK]
        assert sorted(completion.logprobs, key=repr) == sorted(apart, key=repr)
        assert all(piece.logprob is None or piece.logprob.token == piece.token for piece in pieces)


def test_log_probabilities_that_nobody_reads_take_a_tenth_of_their_objects() -> None:
    tracemalloc.start()
    try:
        decoding = Decoding(max_tokens=1000, mask_slots=0, lookup=0, logprobs=5)
        with hash_runtime(Language(seed=10, end_every=10**9), 1024) as runtime, runtime.stream([1], decoding) as stream:
            while not stream.request.done:
                time.sleep(0.01)
            everything = tracemalloc.take_snapshot()
    finally:
        tracemalloc.stop()
    # Whatever else this process does at the same time, it builds no log probabilities.
    kept = everything.filter_traces([tracemalloc.Filter(True, "*/sampling/logprobs.py")]).statistics("filename")
    assert 16 * 6 * 1000 <= sum(each.size for each in kept) < 200 * 1000


@pytest.mark.parametrize("number", [math.nan, math.inf])
@pytest.mark.parametrize("at", [0, 7, 19])
def test_what_is_no_number_fails_that_text_and_no_other(at: int, number: float) -> None:
    def broken(batch: Batch, logits: NDArray[np.float32]) -> None:
        logits[0, batch.position_ids[0][batch.logit_rows[0]] == at, 3] = number

    language = Language(seed=10, end_every=10**9)
    with hash_runtime(language, prompt_rows=8, after=broken) as opened:
        with pytest.raises(NotANumber, match=f"at position {at + 1} "):
            opened.score([1] * 20)
        how = Decoding(max_tokens=30, mask_slots=0)
        for decoding in (how, replace(how, logprobs=0)):
            with pytest.raises(NotANumber, match=f"at position {at + 1} "):
                opened.generate([1], decoding)
        assert isinstance(opened.engine, HashEngine)
        opened.engine.after = None
        assert same(opened.score([1] * 20).logprobs, expected_logprobs(language, [1] * 20, 1, 0))


@settings(max_examples=100)
@given(
    size=st.integers(1, 3000), seed=st.integers(0, 10**6), share=st.floats(0, 1), spread=st.sampled_from((0, 3, 1000))
)
def test_the_most_probable_tokens_are_found_without_sorting_all(
    size: int, seed: int, share: float, spread: int
) -> None:
    line = np.random.default_rng(seed).integers(-spread, spread + 1, size).astype(np.float32)
    count = min(size, round(size * share**4))
    assert most_probable(line, count).tolist() == sorted(range(size), key=lambda token: (-line[token], token))[:count]


@given(seed=st.integers(0, 10**6), size=st.integers(1, 3000), shift=st.sampled_from((-3e4, 0, 3e4)))
def test_log_probabilities_are_exact_to_six_digits_however_large_the_logits(seed: int, size: int, shift: float) -> None:
    random = np.random.default_rng(seed)
    line = (random.standard_normal(size) * 20 + shift).astype(np.float32)
    token = int(random.integers(size))
    exact = line.astype(np.longdouble) - line.max()
    exact -= np.log(np.exp(exact).sum())
    assert abs(numbers_of(line, token, 0, 0)[1][0] - float(exact[token])) < 1e-6
    assert numbers_of(np.array([0, -np.inf], np.float32), 1, 0, 0)[1] == [-np.inf]


# Scores of given texts


@settings(max_examples=100)
@given(
    language=st.builds(Language, seed=SEEDS, window=WINDOWS),
    tokens=TOKENS,
    more=TOKENS,
    top=st.integers(0, VOCAB),
    rows=ROWS,
)
def test_a_text_is_as_likely_as_the_network_says_wherever_chunks_end(
    language: Language, tokens: list[int], more: list[int], top: int, rows: dict[str, Any]
) -> None:
    both = [*tokens, *more]
    with hash_runtime(language, 64, **rows) as runtime:
        score, part = runtime.score(both, top=top), runtime.score(tokens, more, top=top)
        following = runtime.generate(both, Decoding(max_tokens=1))
    expected = expected_logprobs(language, both, 1, top)
    assert same(score.logprobs, expected)
    assert (score.tokens, score.start, part.start) == (tuple(both), 1, len(tokens))
    assert math.isclose(score.sum, sum(one.logprob for one in expected), abs_tol=1e-5)
    best = expected_logprobs(language, both, 1, 1)
    for one in (score, part):
        assert one.greedy == all(each.token == each.top[0].token for each in best[one.start - 1 :])
    assert part.logprobs == score.logprobs[len(tokens) - 1 :]
    assert (part.tokens, part.following) == (score.tokens, score.following)
    assert following.tokens == (() if score.following.token == END else (score.following.token,))


@pytest.mark.parametrize("vocab_size", [32_000, 262_144, 10**7])
def test_a_long_text_needs_little_memory_for_logits(vocab_size: int) -> None:
    language = Language(seed=5)
    tokens = language.write([1, 2], 1) + [token % END for token in range(300)]
    like, lines = hash_runtime(language, max_seq_len=600), list[tuple[int, ...]]()
    engine = HashEngine(language, like.engine.capacity, 1, before=lambda batch: lines.append(batch.logit_rows.shape))
    engine.signature = replace(engine.signature, vocab_size=vocab_size)
    with Runtime(like.bundle, engine, 600) as runtime:
        score = runtime.score(tokens)
        assert max(count * rows for count, rows in lines) == min(
            301, engine.costs.prompt_rows, max(1, LOGIT_BYTES // 4 // vocab_size)
        )
        assert same(score.logprobs, expected_logprobs(language, tokens, 1, 0))
        lines.clear()
        part = runtime.score(tokens[:290], tokens[290:])
        assert part.logprobs == score.logprobs[289:]
        assert sum(rows for _, rows in lines) <= 14  # of the prompt nobody wants any; a call gives one at least


@pytest.mark.parametrize("tokenizer", [BYTES, FALLBACK], ids=["byte_level", "byte_fallback"])
@given(prompt=st.text("ab the你é😀\n", min_size=1, max_size=12), more=st.text("ab the你é😀\n", min_size=1, max_size=12))
def test_a_token_across_the_border_is_the_continuations(tokenizer: Tokenizer, prompt: str, more: str) -> None:
    encoded = ControlTokens(tokenizer, TokenIds()).encode(prompt + more, special=True)
    tokens, start = encoded.ids, next((i for i, end in enumerate(encoded.ends) if end > len(prompt)), len(encoded.ids))
    assert tokens == encode(tokenizer, prompt + more, special=True)
    before, after = full(tokenizer, tokens[:start]), full(tokenizer, tokens[: start + 1])
    assert prompt.startswith(before.rstrip(BROKEN))
    assert start < len(tokens)
    assert len(after.rstrip(BROKEN)) > len(prompt) or after.endswith(BROKEN)
    alone = encode(tokenizer, prompt, special=True)
    if tokens[: len(alone)] == alone:
        assert start == len(alone)  # where a harness cuts that encodes the prompt by itself


@pytest.fixture(scope="module")
def runtime() -> Iterator[Runtime]:
    with hash_runtime(Language(seed=1), max_seq_len=8) as opened:
        yield opened


@pytest.mark.parametrize(
    ("prompt", "continuation", "top", "message"),
    [
        ("", None, 0, "the prompt is empty: expected at least one character"),
        ("ab", "", 0, "the continuation is empty: expected at least one token, or None to score the prompt"),
        ([1], [], 0, "the continuation is empty: expected"),
        ([1], "a", 0, "the prompt is token ids and the continuation is text: expected both as ids or both as text"),
        ("a", "x", 0, "the prompt has no token of its own: expected a longer text, or both as token ids"),
        ("a", "?", 0, "the continuation has no token of its own: expected a longer text, or both as token ids"),
        ("b", "x", 0, "the prompt holds the token id 15: expected ids from 0 to 14"),
        ([1], [-1], 0, "the prompt holds the token id -1: expected ids from 0 to 14"),
        ("abcdefghi", None, 0, "the text has 9 tokens, max_seq_len is 8: shorten the text, or raise max_seq_len"),
        ("ab", None, -1, "top is -1: expected 0 to 15, the size of the vocabulary"),
        ("a\ud83d", "b", 0, "half of a surrogate pair"),
    ],
)
def test_what_cannot_be_scored_is_refused_before_it_is_queued(
    runtime: Runtime, prompt: str | list[int], continuation: str | list[int] | None, top: int, message: str
) -> None:
    with pytest.raises(OptionFault, match=message):
        runtime.score(prompt, continuation, top=top)


def test_a_scored_text_has_one_token_to_max_seq_len(runtime: Runtime) -> None:
    assert len(runtime.score(WORDS[:8]).logprobs) == 7
    one = runtime.score("a")
    assert (one.logprobs, one.sum, one.greedy, one.tokens) == ((), 0.0, True, (0,))


@pytest.mark.parametrize(("top", "message"), [(-1, "a whole number of at least 0"), (16, "0 to 15, the size of")])
def test_a_token_has_no_more_log_probabilities_than_the_vocabulary(runtime: Runtime, top: int, message: str) -> None:
    with pytest.raises(OptionFault, match=f"logprobs is {top}: expected {message}"):
        runtime.generate([1], Decoding(logprobs=top))


# Trained models


@pytest.fixture(scope="module", params=LOWERINGS)
def tiny(request: pytest.FixtureRequest, tiny_bundle: Path, tiny_append_bundle: Path) -> Iterator[Runtime]:
    with Runtime.open(tiny_append_bundle if request.param == "append" else tiny_bundle, threads=1) as opened:
        yield opened


@torch.no_grad()
def test_they_are_those_of_the_model_in_transformers(tiny: Runtime) -> None:
    model = AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float32)
    plain = tiny.generate(PROMPT, Decoding(max_tokens=60, mask_slots=0, logprobs=5))
    tokens = (*plain.prompt_tokens, *plain.tokens)
    lines = torch.log_softmax(model(torch.tensor([tokens])).logits[0].double(), dim=-1)
    found = [
        *(tiny.generate(PROMPT, Decoding(max_tokens=60, mask_slots=slots, logprobs=5)).logprobs for slots in (0, 3, 5)),
        tiny.score(plain.prompt_tokens, plain.tokens, top=5).logprobs,
        tiny.score(tokens, top=5).logprobs[-60:],
    ]
    for logprobs in found:
        assert tuple(one.token for one in logprobs) == plain.tokens
        assert same(logprobs, plain.logprobs, within=1e-4)
        for line, one in zip(lines[len(plain.prompt_tokens) - 1 :], logprobs, strict=False):
            assert abs(one.logprob - float(line[one.token])) < 1e-4
            assert [each.token for each in one.top] == line.topk(5).indices.tolist()


def test_a_chats_answer_is_scored_behind_its_template(tiny: Runtime) -> None:
    chat = [{"role": "user", "content": "How does json/scanner.py begin?"}]
    answer = tiny.generate(chat, Decoding(max_tokens=20))
    score = tiny.score(chat, answer.text)
    assert score.tokens == (*answer.prompt_tokens, *answer.tokens)
    assert score.start == len(answer.prompt_tokens)
    assert score.greedy
