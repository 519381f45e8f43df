"""Scoring: a given text is as likely as the model says, however it is cut into chunks and whatever other requests are served."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

from spaceport.graphs.contract.faults import OptionFault
from spaceport.graphs.contract.manifest import TokenIds
from spaceport.graphs.contract.signature import LOGIT_BYTES, LOWERINGS, Lowering
from spaceport.runtime.decode.draft import Draft
from spaceport.runtime.decode.plan import plan_thread
from spaceport.runtime.decode.selector import NotANumber
from spaceport.runtime.decode.threads import new_thread
from spaceport.runtime.decoding import Decoding
from spaceport.runtime.sampling.scoring import Score
from spaceport.runtime.scheduling.worker import RuntimeClosed
from spaceport.runtime.session import Runtime
from spaceport.runtime.text.control_tokens import ControlTokens
from spaceport.runtime.text.tokenizer import encode
from support.hash_engine import END, MASKS, VOCAB, Language
from support.hash_runtime import (
    WORDS,
    BrokenEngine,
    counting_runtime,
    expected_logprobs,
    hash_runtime,
    same,
    slow_runtime,
)
from support.paths import TINY
from support.small_tokenizers import BROKEN, BYTES, FALLBACK, full

TEXT = 'class JSONDecoder(object):\n    """Simple JSON <https://json.org> decoder\n\n    Performs the following'

LANGUAGES = st.builds(Language, seed=st.integers(0, 10**6), window=st.none() | st.integers(1, 30))
TOKENS = st.lists(st.integers(0, END - 1), min_size=1, max_size=40)


@settings(max_examples=80)
@given(
    language=LANGUAGES,
    tokens=TOKENS,
    top=st.integers(0, VOCAB),
    prompt_rows=st.integers(1, 45),
    lowering=st.sampled_from(LOWERINGS),
)
def test_a_text_is_as_likely_as_the_network_says_wherever_chunks_end(
    language: Language, tokens: list[int], top: int, prompt_rows: int, lowering: Lowering
) -> None:
    with hash_runtime(language, max_seq_len=len(tokens) + 1, prompt_rows=prompt_rows, lowering=lowering) as runtime:
        score = runtime.score(tokens, top=top)
        assert score == runtime.score(tokens, top=top)
    expected = expected_logprobs(language, tokens, 1, top)
    assert same(score.logprobs, expected)
    assert (score.tokens, score.start) == (tuple(tokens), 1)
    assert math.isclose(score.sum, sum(one.logprob for one in expected), abs_tol=1e-5)
    best = expected_logprobs(language, tokens, 1, 1)
    assert score.greedy == all(one.token == one.top[0].token for one in best)
    with hash_runtime(language, max_seq_len=len(tokens) + 1) as whole:
        assert whole.score(tokens, top=top) == score


@settings(max_examples=80)
@given(language=LANGUAGES, tokens=TOKENS, more=TOKENS, prompt_rows=st.integers(1, 45), top=st.integers(0, 3))
def test_a_continuation_is_scored_as_the_end_of_the_whole(
    language: Language, tokens: list[int], more: list[int], prompt_rows: int, top: int
) -> None:
    with hash_runtime(language, max_seq_len=100, prompt_rows=prompt_rows) as runtime:
        whole = runtime.score([*tokens, *more], top=top)
        part = runtime.score(tokens, more, top=top)
        following = runtime.generate([*tokens, *more], Decoding(max_tokens=1))
    assert part.start == len(tokens)
    assert part.logprobs == whole.logprobs[len(tokens) - 1 :]
    assert (part.tokens, part.following) == (whole.tokens, whole.following)
    assert following.tokens in ((whole.following.token,), ())
    assert bool(following.tokens) == (whole.following.token != END)


@settings(max_examples=80)
@given(language=LANGUAGES, tokens=TOKENS, more=st.integers(1, 10), wrong=st.none() | st.integers(0, 9))
def test_what_a_model_would_write_is_greedy_and_nothing_else_is(
    language: Language, tokens: list[int], more: int, wrong: int | None
) -> None:
    with hash_runtime(language, max_seq_len=100) as runtime:
        text: list[int] = []
        while len(text) < more and (best := runtime.score([*tokens, *text], top=1).following.top[0].token) not in MASKS:
            text.append(best)
        assume(text)
        if wrong is not None and wrong < len(text):
            text[wrong] = (text[wrong] + 1) % END
        assert runtime.score(tokens, text).greedy == (wrong is None or wrong >= len(text))


@given(
    fed=st.integers(0, 20),
    pending=st.integers(1, 20),
    chunk=st.integers(1, 25),
    masks=st.integers(0, 3),
    echo=st.none() | st.integers(0, 45),
)
def test_from_a_position_on_the_logits_of_all_rows_are_needed(
    fed: int, pending: int, chunk: int, masks: int, echo: int | None
) -> None:
    thread = new_thread([1] * (fed + pending), 1)
    thread.fed = fed
    part = plan_thread(thread, Draft(masks=(masks,)), TokenIds(mask=(2,)), chunk, echo=echo)
    expected = set(part.layout.wanted.tolist()) if pending <= chunk else set()
    if echo is not None:
        expected |= {row for row, position in enumerate(part.positions.tolist()) if position >= echo}
    assert part.rows_wanted.tolist() == sorted(expected)
    assert part.wanted == len(expected)


@pytest.mark.parametrize("vocab_size", [32_000, 128_256, 262_144, 10**7])
def test_a_long_text_needs_little_memory_for_logits(vocab_size: int) -> None:
    language = Language(seed=5)
    tokens = language.write([1, 2], 1) + [token % END for token in range(300)]
    runtime, engine = counting_runtime(language, vocab_size, 1)
    with runtime:
        score = runtime.score(tokens)
        assert max(count * rows for count, rows in engine.lines) == min(
            301, engine.costs.prompt_rows, max(1, LOGIT_BYTES // 4 // vocab_size)
        )
        assert same(score.logprobs, expected_logprobs(language, tokens, 1, 0))
        engine.lines.clear()
        part = runtime.score(tokens[:290], tokens[290:])
        assert part.logprobs == score.logprobs[289:]
        assert sum(rows for _, rows in engine.lines) <= 14  # of the prompt nobody wants any; a call gives one at least


def test_many_texts_at_once_need_no_more() -> None:
    language = Language(seed=6)
    texts = [[(token * 7 + number) % END for token in range(60)] for number in range(12)]
    runtime, engine = counting_runtime(language, 262_144, 4)
    with runtime, ThreadPoolExecutor(12) as pool:
        for tokens, score in zip(texts, pool.map(runtime.score, texts), strict=True):
            assert same(score.logprobs, expected_logprobs(language, tokens, 1, 0))
    assert max(count * rows for count, rows in engine.lines) * 4 * 262_144 <= LOGIT_BYTES


@pytest.mark.parametrize("lowering", LOWERINGS)
def test_scores_and_texts_side_by_side_are_what_they_are_alone(lowering: Lowering) -> None:
    language = Language(seed=7, quality=70, fork_every=9)
    prompts = [[(token * 3 + number) % END for token in range(5 + 4 * number)] for number in range(8)]
    decoding = Decoding(max_tokens=40, max_threads=4)
    with hash_runtime(language, 100, 400, lowering=lowering) as alone:
        texts = [alone.generate(prompt, decoding) for prompt in prompts]
        scores = [alone.score(prompt, top=2) for prompt in prompts]
    with (
        hash_runtime(language, 100, 400, requests=3, lowering=lowering, prompt_rows=9) as runtime,
        ThreadPoolExecutor(16) as pool,
    ):
        written = [pool.submit(runtime.generate, prompt, decoding) for prompt in prompts]
        scored = [pool.submit(runtime.score, prompt, top=2) for prompt in prompts]
        assert [one.result().text for one in written] == [one.text for one in texts]
        assert [one.result().threads for one in written] == [one.threads for one in texts]
        assert [one.result() for one in scored] == scores


def test_scores_are_there_for_asyncio() -> None:
    language = Language(seed=8)
    texts = [[number, 1, 2, 3] for number in range(6)]

    async def ask(runtime: Runtime) -> list[Score]:
        return await asyncio.gather(*(runtime.ascore(text[:2], text[2:], top=1) for text in texts))

    with hash_runtime(language, requests=2) as runtime:
        assert asyncio.run(ask(runtime)) == [runtime.score(text[:2], text[2:], top=1) for text in texts]


def test_a_score_that_nobody_waits_for_any_more_takes_no_further_step() -> None:
    runtime, engine = slow_runtime(Language(seed=9))

    async def begin_and_leave() -> None:
        waiting = asyncio.create_task(runtime.ascore([1] * 60))
        await asyncio.to_thread(engine.began.wait, 60)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting

    with runtime:
        asyncio.run(begin_and_leave())
        engine.leave.set()
        assert len(runtime.score([1, 2]).logprobs) == 1
        assert engine.calls == 2


def test_a_running_score_fails_when_its_runtime_is_closed() -> None:
    runtime, engine = slow_runtime(Language(seed=9))
    with ThreadPoolExecutor(2) as pool:
        waiting = pool.submit(runtime.score, [1] * 60)
        assert engine.began.wait(60)
        closing = pool.submit(runtime.close)
        while not runtime._worker._closing:
            pass
        engine.leave.set()
        with pytest.raises(RuntimeClosed, match="closed before"):
            waiting.result()
        closing.result()


@pytest.mark.parametrize("number", [math.nan, math.inf])
@pytest.mark.parametrize("at", [0, 7, 19])
def test_what_is_no_number_fails_that_text_and_no_other(at: int, number: float) -> None:
    runtime = hash_runtime(Language(seed=10), prompt_rows=8)
    engine = BrokenEngine(Language(seed=10), runtime.engine.capacity, 1, at=at, number=number)
    with Runtime(runtime.bundle, engine, 64, prompt_rows=8) as broken:
        with pytest.raises(NotANumber, match=f"at position {at + 1} "):
            broken.score([1] * 20)
        engine.number = 0.0
        assert same(broken.score([1] * 20).logprobs[at + 1 :], runtime.score([1] * 20).logprobs[at + 1 :])


@pytest.mark.parametrize("tokenizer", [BYTES, FALLBACK], ids=["byte_level", "byte_fallback"])
@given(prompt=st.text("ab the你é😀\n", min_size=1, max_size=12), more=st.text("ab the你é😀\n", min_size=1, max_size=12))
def test_a_token_across_the_border_is_the_continuations(tokenizer: Tokenizer, prompt: str, more: str) -> None:
    encoded = ControlTokens(tokenizer, TokenIds()).encode(prompt + more, special=True)
    tokens, start = encoded.ids, encoded.first_beyond(len(prompt))
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
        ([], None, 0, "no chat template|at least one"),
        ("ab", "", 0, "the continuation is empty: expected at least one token, or None to score the prompt"),
        ([1], [], 0, "the continuation is empty: expected"),
        ([1], "a", 0, "the prompt is token ids and the continuation is text: expected both as ids or both as text"),
        ("a", "x", 0, "the prompt has no token of its own: expected a longer text, or both as token ids"),
        ("a", "?", 0, "the continuation has no token of its own: expected a longer text, or both as token ids"),
        ("b", "x", 0, "the prompt holds the token id 15: expected ids from 0 to 14"),
        ([1, 15], None, 0, "the prompt holds the token id 15: expected ids from 0 to 14"),
        ([1], [-1], 0, "the prompt holds the token id -1: expected ids from 0 to 14"),
        ("abcdefghi", None, 0, "the text has 9 tokens, max_seq_len is 8: shorten the text, or raise max_seq_len"),
        ("abcd", "efghi", 0, "the text has 9 tokens, max_seq_len is 8: shorten the text, or raise max_seq_len"),
        ("ab", None, -1, "top is -1: expected 0 to 15, the size of the vocabulary"),
        ("ab", None, 16, "top is 16: expected 0 to 15"),
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


@pytest.fixture(scope="module", params=LOWERINGS)
def tiny(request: pytest.FixtureRequest, tiny_bundle: Path, tiny_append_bundle: Path) -> Iterator[Runtime]:
    with Runtime.open(tiny_append_bundle if request.param == "append" else tiny_bundle, threads=1) as opened:
        yield opened


@torch.no_grad()
def test_scores_are_those_of_the_model_in_transformers(tiny: Runtime) -> None:
    score = tiny.score(TEXT, top=5)
    model = AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float32)
    lines = torch.log_softmax(model(torch.tensor([score.tokens])).logits[0].double(), dim=-1)
    assert list(score.tokens) == tiny.tokens_of(TEXT)
    assert len(score.logprobs) == len(score.tokens) - 1 > 40
    for line, token, one in zip(lines, score.tokens[1:], score.logprobs, strict=False):
        assert one.token == token
        assert abs(one.logprob - float(line[token])) < 1e-4
        best = line.topk(5)
        assert [each.token for each in one.top] == best.indices.tolist()
        assert np.allclose([each.logprob for each in one.top], best.values, atol=1e-4)
    part = tiny.score(TEXT[:60], TEXT[60:])
    assert part.tokens == score.tokens
    assert abs(part.sum - sum(one.logprob for one in score.logprobs[part.start - 1 :])) < 1e-4


def test_a_chats_answer_is_scored_behind_its_template(tiny: Runtime) -> None:
    chat = [{"role": "user", "content": "How does json/scanner.py begin?"}]
    answer = tiny.generate(chat, Decoding(max_tokens=20))
    score = tiny.score(chat, answer.text)
    assert score.tokens == (*answer.prompt_tokens, *answer.tokens)
    assert score.start == len(answer.prompt_tokens)
    assert score.greedy
