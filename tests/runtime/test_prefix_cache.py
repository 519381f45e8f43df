"""Prefix cache of a runtime: chats, scores and traces are those without it, and cost less prefill."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from spaceport.graphs.contract.exactness import unmeasured
from spaceport.runtime.backends import open_engine
from spaceport.runtime.bundle import open_bundle
from spaceport.runtime.decoding import Decoding
from spaceport.runtime.engine import EngineOptions, capacity_for
from spaceport.runtime.sampling.sampler import Sampling
from spaceport.runtime.scheduling.request import Completion
from spaceport.runtime.session import Runtime
from support.hash_engine import HashEngine, Language
from support.hash_runtime import hash_runtime
from support.traced import TOKENIZER

LANGUAGE = Language(11, 70, end_every=10**9)
PROMPT = [1, 2, 3, 4] * 10
FEW = Decoding(max_tokens=6)


def cached(completion: Completion) -> int:
    return completion.statistics.cached_tokens


def test_the_next_turn_of_a_chat_reuses_its_history() -> None:
    with (
        hash_runtime(LANGUAGE, 200, prefix_cache=True, requests=2) as runtime,
        hash_runtime(LANGUAGE, 200) as without,
    ):
        history, counts = PROMPT, []
        for turn in range(4):
            answer = runtime.generate(history, FEW)
            expected = without.generate(history, FEW)
            assert answer.tokens == expected.tokens
            counts.append((cached(answer), cached(expected), answer.statistics.prompt_tokens))
            history = [*history, *answer.tokens, turn, 9]
        assert counts == [(0, 0, 40), (45, 0, 48), (53, 0, 56), (61, 0, 64)]
        status = runtime.status()
        assert (status.cached_tokens, status.cache_hits, status.cache_hit_tokens) == (64 + 5, 3, 45 + 53 + 61)
        assert (status.cache_queried_tokens, status.cache_evictions) == (40 + 48 + 56 + 64, 0)
        found = runtime.generate([*history, 5], replace(FEW, trace=True))
        assert found.trace is not None
        assert found.trace.record(TOKENIZER).steps[0].rows[0].positions[0] == cached(found) > 0
        assert without.status().cached_tokens == without.status().cache_queried_tokens == 0


def test_scores_reuse_rows_whose_logits_nobody_needs() -> None:
    with (
        hash_runtime(LANGUAGE, 200, prefix_cache=True) as runtime,
        hash_runtime(LANGUAGE, 200) as without,
    ):
        assert isinstance(runtime.engine, HashEngine)
        for continuation, hits in (([5, 6], 0), ([7], 39), ([5], 78)):
            assert runtime.score(PROMPT, continuation) == without.score(PROMPT, continuation)
            assert runtime.status().cache_hit_tokens == hits
        assert runtime.score(PROMPT) == without.score(PROMPT)
        assert runtime.status().cache_hit_tokens == 78
        assert cached(runtime.generate(PROMPT, FEW)) == 39
        assert runtime.engine.copied == []


@pytest.mark.torch
@pytest.mark.parametrize("requests", [1, 2])
def test_chats_and_scores_of_a_model_are_those_without_a_cache(any_tiny_bundle: Path, requests: int) -> None:
    bundle = open_bundle(any_tiny_bundle)
    options = [
        Decoding(max_tokens=24, mask_slots=0, logprobs=0),
        Decoding(max_tokens=24, draft="chain", logprobs=0),
        Decoding(max_tokens=24, logprobs=0, sampling=Sampling(temperature=1.0, seed=5)),
        Decoding(max_tokens=24, logprobs=0),
    ]
    within = 0 if unmeasured(bundle.manifest).needs_slots_in_order else 1e-4
    sizes = EngineOptions(capacity_for(bundle.manifest, 400), requests, 1)
    with (
        Runtime(bundle, open_engine(bundle, "onnxruntime", sizes), 400, prefix_cache=True) as runtime,
        Runtime(bundle, open_engine(bundle, "onnxruntime", sizes), 400) as without,
    ):
        for system in ("The harbour of the old town.", "A second text that has another beginning."):
            history = runtime.tokens_of(system)
            for turn, decoding in enumerate(options):
                answer, expected = runtime.generate(history, decoding), without.generate(history, decoding)
                assert answer.tokens == expected.tokens
                for one, other in zip(answer.logprobs, expected.logprobs, strict=True):
                    assert abs(one.logprob - other.logprob) <= within
                assert cached(answer) > len(history) // 2 or not turn
                history = [*history, *answer.tokens, 20 + turn, 30]
        assert runtime.status().cache_hits >= 6
        for continuation in (" sea", " boats and the sea", " town"):
            scores = [one.score("The harbour of the old town, the", continuation) for one in (runtime, without)]
            assert scores[0].tokens == scores[1].tokens
            assert scores[0].sum == pytest.approx(scores[1].sum, abs=1e-4)
        assert runtime.status().cache_hits >= 8
