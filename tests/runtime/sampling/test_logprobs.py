"""Log probabilities of generated tokens: those of the model's own logits, whatever drafts, forks and cuts there are."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM

from spaceport.graphs.contract.faults import OptionFault
from spaceport.graphs.contract.signature import LOWERINGS, STEP_ROWS, Lowering
from spaceport.runtime.bundle import open_bundle
from spaceport.runtime.decode.draft import DraftConfig
from spaceport.runtime.decode.request import Request
from spaceport.runtime.decode.selector import NotANumber
from spaceport.runtime.decode.step import PREFILL_ROWS, StepInput, step
from spaceport.runtime.decoding import Decoding
from spaceport.runtime.sampling.logprobs import Logprobs, TokenLogprob, logprob_of, most_probable
from spaceport.runtime.scheduling.generation import Completion
from spaceport.runtime.session import Runtime
from spaceport.tools.reference import open_reference_runtime
from support.hash_engine import CHILD, END, FORK, MASKS, VOCAB, HashEngine, Language, request_for
from support.hash_runtime import BrokenEngine, expected_logprobs, hash_runtime, same
from support.paths import DOCS, TINY

PAGE = (DOCS / "logprobs.md").read_text("utf-8")
PROMPT = "import json\n\ndef"

LANGUAGES = st.builds(
    Language,
    seed=st.integers(0, 10**6),
    quality=st.sampled_from((0, 60, 100)),
    end_every=st.sampled_from((6, 30)),
    fork_every=st.sampled_from((4, 9)),
    window=st.none() | st.integers(1, 30),
)
DRAFT_CONFIGS = st.builds(
    DraftConfig,
    mask_slots=st.integers(0, 5),
    shape=st.sampled_from(("chain", "tree")),
    rows=st.integers(1, 40),
    lookup=st.sampled_from((0, 6)),
)
PROMPTS = st.lists(st.integers(0, END - 1), min_size=1, max_size=20)
Noted = dict[tuple[int, ...], list[TokenLogprob]]


def noted(engine: HashEngine, requests: list[Request], chunk: int = PREFILL_ROWS) -> list[Noted]:
    """Run requests side by side; what the observer of each of them noted of its threads."""
    while live := [StepInput(request, index, chunk) for index, request in enumerate(requests) if request.live]:
        step(engine, live)
    observers = [one for request in requests for one in request.observers if isinstance(one, Logprobs)]
    return [
        {thread.path: [observer.at(thread.path, i) for i in range(len(thread.generated))] for thread in request.threads}
        for request, observer in zip(requests, observers, strict=True)
    ]


@settings(max_examples=100)
@given(
    language=LANGUAGES,
    prompts=st.lists(PROMPTS, min_size=1, max_size=3),
    draft_config=DRAFT_CONFIGS,
    chunk=st.integers(1, 20),
    max_threads=st.sampled_from((1, 3, 16)),
    max_depth=st.integers(0, 2),
    total=st.integers(1, 80),
    top=st.integers(0, VOCAB),
    lowering=st.sampled_from(LOWERINGS),
)
def test_each_token_is_as_likely_as_the_network_says(
    language: Language,
    prompts: list[list[int]],
    draft_config: DraftConfig,
    chunk: int,
    max_threads: int,
    max_depth: int,
    total: int,
    top: int,
    lowering: Lowering,
) -> None:
    engine = HashEngine(language, 20 + total + 2 * STEP_ROWS, len(prompts), lowering)
    requests = [
        request_for(
            engine,
            prompt,
            25,
            draft_config,
            max_threads=max_threads,
            max_depth=max_depth,
            total=total,
            observers=[Logprobs(top)],
        )
        for prompt in prompts
    ]
    for request, found in zip(requests, noted(engine, requests, chunk), strict=True):
        for thread in request.threads:
            assert same(found[thread.path], expected_logprobs(language, thread.tokens, thread.start, top))
        plain_engine = HashEngine(language, engine.capacity, 1)
        prompt = request.threads[0].tokens[: request.threads[0].start]
        plain = request_for(
            plain_engine,
            prompt,
            25,
            0,
            max_threads=STEP_ROWS,
            max_depth=max_depth,
            total=2000,
            observers=[Logprobs(top)],
        )
        if any(thread.ending == "total" for thread in request.threads):
            continue  # which threads come how far depends on their order
        assert noted(plain_engine, [plain]) == [found]


@settings(max_examples=100)
@given(
    language=LANGUAGES,
    prompt=PROMPTS,
    max_tokens=st.integers(1, 30),
    max_total_tokens=st.integers(1, 60),
    stop=st.lists(st.text("abcdef", min_size=1, max_size=2), max_size=2),
    mask_slots=st.integers(0, 5),
    max_depth=st.integers(0, 2),
    top=st.integers(0, 4),
)
def test_what_is_cut_off_has_no_log_probability_and_all_else_has_one(
    language: Language,
    prompt: list[int],
    max_tokens: int,
    max_total_tokens: int,
    stop: list[str],
    mask_slots: int,
    max_depth: int,
    top: int,
) -> None:
    decoding = Decoding(
        max_tokens=max_tokens,
        max_total_tokens=max_total_tokens,
        stop=stop,
        mask_slots=mask_slots,
        max_depth=max_depth,
        logprobs=top,
    )
    with hash_runtime(language, 64, 128) as runtime:
        stream = runtime.stream(prompt, decoding)
        pieces = list(stream)
        completion = stream.completion()
        assert without(completion) == without(runtime.generate(prompt, replace(decoding, logprobs=None)))
    assert tuple(one.token for one in completion.logprobs) == completion.tokens
    texts = {thread.path: thread for thread in completion.threads}
    for path, thread in texts.items():
        assert tuple(one.token for one in thread.logprobs) == thread.tokens
        before = list(prompt)
        for depth in range(len(path)):
            fork = texts[path[: depth + 1]].fork
            assert fork is not None
            before += [*texts[path[:depth]].tokens[: fork + 1], CHILD]
        expected = expected_logprobs(language, [*before, *thread.tokens], len(before), top)
        assert same(thread.logprobs, expected)
        reported = [piece.logprob for piece in pieces if piece.thread == path and piece.logprob is not None]
        assert tuple(reported[: len(thread.tokens)]) == thread.logprobs
    apart = [one for thread in completion.threads for one in thread.logprobs if one.token != FORK]
    assert sorted(completion.logprobs, key=repr) == sorted(apart, key=repr)
    assert all(piece.logprob is None or piece.logprob.token == piece.token for piece in pieces)


def test_an_infinite_logit_is_reported_at_its_position() -> None:
    """Selecting a token works with it; its log-probability does not."""
    language = Language(seed=1, end_every=10**9)
    with hash_runtime(language) as like:
        engine = BrokenEngine(language, like.engine.capacity, 1, at=7, number=np.inf)
        with Runtime(like.bundle, engine, 64) as runtime:
            assert len(runtime.generate([1, 2, 3], Decoding(max_tokens=9, mask_slots=0)).tokens) == 9
            with pytest.raises(NotANumber, match="at position 8 "):
                runtime.generate([1, 2, 3], Decoding(max_tokens=9, mask_slots=0, logprobs=0))


def without(completion: Completion) -> object:
    """What a text comes to but for log-probabilities and times."""
    threads = [replace(thread, logprobs=()) for thread in completion.threads]
    return completion.text, completion.tokens, completion.ending, threads, completion.statistics.steps


def test_log_probabilities_are_reported_only_on_request() -> None:
    with hash_runtime(Language(seed=1)) as runtime:
        stream = runtime.stream([1, 2, 3])
        assert all(piece.logprob is None for piece in stream)
        completion = stream.completion()
    assert completion.tokens
    assert completion.logprobs == ()
    assert [thread.logprobs for thread in completion.threads] == [()]


def test_no_candidates_means_only_the_tokens_own() -> None:
    with hash_runtime(Language(seed=1)) as runtime:
        completion = runtime.generate([1, 2, 3], Decoding(logprobs=0))
    assert completion.logprobs
    assert all(one.top == () and one.logprob <= 0 for one in completion.logprobs)


def test_banned_tokens_are_reported_with_their_own_log_probability() -> None:
    with hash_runtime(Language(seed=1)) as runtime:
        completion = runtime.generate([1, 2, 3], Decoding(logprobs=1))
    likelier = {one.top[0].token for one in completion.logprobs if one.top[0].token != one.token}
    assert likelier & set(MASKS)


@pytest.mark.parametrize(("top", "message"), [(-1, "expected at least 0"), (16, "expected 0 to 15, the size of")])
def test_more_top_tokens_than_the_vocabulary_has_are_refused(top: int, message: str) -> None:
    with hash_runtime(Language(seed=1)) as runtime, pytest.raises(OptionFault, match=f"logprobs is {top}: {message}"):
        runtime.generate([1], Decoding(logprobs=top))


@settings(max_examples=100)
@given(
    size=st.integers(1, 3000), seed=st.integers(0, 10**6), share=st.floats(0, 1), spread=st.sampled_from((0, 3, 1000))
)
def test_the_most_probable_tokens_are_found_without_sorting_all(
    size: int, seed: int, share: float, spread: int
) -> None:
    line = np.random.default_rng(seed).integers(-spread, spread + 1, size).astype(np.float32)
    count = min(size, round(size * share**4))
    assert most_probable(line, count) == sorted(range(size), key=lambda token: (-line[token], token))[:count]


@given(seed=st.integers(0, 10**6), size=st.integers(1, 3000), shift=st.sampled_from((-3e4, 0, 3e4)))
def test_log_probabilities_are_exact_to_six_digits_however_large_the_logits(seed: int, size: int, shift: float) -> None:
    random = np.random.default_rng(seed)
    line = (random.standard_normal(size) * 20 + shift).astype(np.float32)
    token = int(random.integers(size))
    exact = line.astype(np.longdouble) - line.max()
    exact -= np.log(np.exp(exact).sum())
    assert abs(logprob_of(line, token, 0, 0).logprob - float(exact[token])) < 1e-6


def test_an_impossible_token_has_no_probability_at_all() -> None:
    assert logprob_of(np.array([0, -np.inf], np.float32), 1, 0, 0).logprob == -np.inf


@pytest.fixture(scope="module", params=LOWERINGS)
def tiny(request: pytest.FixtureRequest, tiny_bundle: Path, tiny_append_bundle: Path) -> Iterator[Runtime]:
    with Runtime.open(tiny_append_bundle if request.param == "append" else tiny_bundle, threads=1) as opened:
        yield opened


@torch.no_grad()
def test_they_are_those_of_the_model_in_transformers(tiny: Runtime) -> None:
    model = AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float32)
    plain = tiny.generate(PROMPT, Decoding(max_tokens=60, mask_slots=0, logprobs=5))
    tokens = (*plain.prompt_tokens, *plain.tokens)
    lines = torch.log_softmax(model(torch.tensor([tokens])).logits[0].double(), dim=-1)[len(plain.prompt_tokens) - 1 :]
    for mask_slots in (0, 3, 5):
        found = tiny.generate(PROMPT, Decoding(max_tokens=60, mask_slots=mask_slots, logprobs=5))
        assert found.tokens == plain.tokens
        assert same(found.logprobs, plain.logprobs, within=1e-4)
        for line, one in zip(lines, found.logprobs, strict=False):
            assert abs(one.logprob - float(line[one.token])) < 1e-4
            assert [each.token for each in one.top] == line.topk(5).indices.tolist()
    again = tiny.score(plain.prompt_tokens, plain.tokens, top=5)
    assert same(again.logprobs, plain.logprobs, within=1e-4)


def test_those_of_an_int8_bundle_are_the_references_whatever_is_drafted(tiny_int8_bundle: Path) -> None:
    with open_reference_runtime(open_bundle(tiny_int8_bundle), TINY, 256) as reference:
        expected = reference.generate(PROMPT, Decoding(max_tokens=60, mask_slots=0, logprobs=5))
    with Runtime.open(tiny_int8_bundle, max_seq_len=256, threads=1) as runtime:
        plain = runtime.generate(PROMPT, Decoding(max_tokens=60, mask_slots=0, logprobs=5))
        # 2e-3 of the largest logit, as for `check`; the largest is about 20
        assert same(plain.logprobs, expected.logprobs, within=4e-2)
        scores = [runtime.score(plain.prompt_tokens, plain.tokens, top=5).logprobs]
        scores.append(runtime.score([*plain.prompt_tokens, *plain.tokens], top=5).logprobs[-60:])
        assert scores == [plain.logprobs] * 2  # to the bit: they stand in the same slots
        for drafts in ({"draft": "chain"}, {}, {"mask_slots": 2, "lookup": 6}):
            found = runtime.generate(PROMPT, Decoding(max_tokens=60, logprobs=5, **drafts))
            assert found.tokens == plain.tokens


def test_the_programs_of_the_page_print_what_stands_behind_them(
    tiny_bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny.bundle").symlink_to(tiny_bundle)
    programs = re.findall(r"^```python\n(.*?)^```\n\n```text\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
    assert len(programs) == 3
    for program, printed in programs:
        exec(compile(program, "logprobs.md", "exec"), {})
        assert capsys.readouterr().out == printed
