"""Sampling: filters, penalties and noise against slow rules, probabilities of samples, and one text for a seed."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from spaceport.graphs.contract.faults import OptionFault
from spaceport.graphs.contract.signature import LOWERINGS, STEP_ROWS, Lowering
from spaceport.runtime.decode.draft import DraftConfig
from spaceport.runtime.decode.sequence import NotANumber, TokenSelector, TokenSequence
from spaceport.runtime.sampling.choice import Bans, Greedy
from spaceport.runtime.sampling.sampler import Sampling, chooser, gumbels, noise_key, survivors
from support.arrivals import DRAFT_CONFIGS, LANGUAGES
from support.hash_engine import CHILD, END, FORK, MASKS, Cell, HashEngine, Language, Tree, completed, request_for


def scores_slowly(
    logits: Sequence[float], sampling: Sampling, prompt: Sequence[int], text: Sequence[int], banned: Collection[int]
) -> list[float]:
    """Logits with bias, penalties and bans."""
    scores = []
    for token, logit in enumerate(logits):
        score = logit + sampling.logit_bias.get(token, 0)
        if token in prompt or token in text:
            penalty = sampling.repetition_penalty
            score = score * penalty if score < 0 else score / penalty
        score -= sampling.frequency_penalty * text.count(token)
        if token in text:
            score -= sampling.presence_penalty
        scores.append(-math.inf if token in banned else score)
    return scores


def survivors_slowly(scores: Sequence[float], sampling: Sampling) -> list[int]:
    """The tokens that pass the filters, given unnormalized log probabilities."""
    ranked = sorted(range(len(scores)), key=lambda token: (-scores[token], token))
    if sampling.top_k:
        ranked = ranked[: sampling.top_k]
    weights = [math.exp(scores[token] - max(scores)) for token in ranked]
    if sampling.top_p < 1:
        count = 1
        while count < len(ranked) and math.fsum(weights[:count]) < sampling.top_p * math.fsum(weights):
            count += 1
        ranked = ranked[:count]
    least = math.log(sampling.min_p) if sampling.min_p else -math.inf
    return sorted(token for token in ranked if scores[token] - max(scores) >= least)


def noise_at(seed: int, path: tuple[int, ...], position: int) -> list[float]:
    """The noise of each token at a position."""
    return gumbels(noise_key(seed, path, position), np.arange(VOCAB)).tolist()


NO_BANS = Bans(frozenset())
VOCAB = 12
TOKENS = st.integers(0, VOCAB - 1)
LINES = st.lists(
    st.integers(-6, 6).map(lambda step: step / 2) | st.just(-math.inf) | st.floats(-9, 9, width=32),  # ties and none
    min_size=VOCAB,
    max_size=VOCAB,
).filter(lambda line: max(line) > -math.inf)
FILTERS: dict[str, st.SearchStrategy[Any]] = {
    "top_k": st.integers(0, VOCAB + 1),
    "top_p": st.sampled_from((0, 0.25, 0.5, 1)) | st.floats(0, 1),
    "min_p": st.sampled_from((0, 1)) | st.floats(0, 1),
}
PENALTIES: dict[str, st.SearchStrategy[Any]] = {
    "repetition_penalty": st.sampled_from((1, 1.3, 0.7)),
    "presence_penalty": st.sampled_from((0, 1.5, -0.5)),
    "frequency_penalty": st.sampled_from((0, 0.25, -0.5)),
}


SAMPLINGS = st.builds(
    Sampling,
    temperature=st.sampled_from((0, 0.3, 1, 1.7)),
    logit_bias=st.dictionaries(TOKENS, st.floats(-3, 3), max_size=3),
    banned=st.sets(TOKENS, max_size=3),
    seed=st.integers(0, 2**64 - 1),
    **FILTERS,
    **PENALTIES,
)


def thread_of(prompt: Sequence[int], path: tuple[int, ...] = ()) -> TokenSequence:
    return TokenSequence(path, list(prompt), len(prompt), np.zeros(1, np.bool_))


def line(*logits: float) -> NDArray[np.float32]:
    return np.array(logits, np.float32)


@settings(max_examples=400)
@given(logits=LINES, temperature=st.sampled_from((0.5, 1, 2)), filters=st.fixed_dictionaries(FILTERS))
def test_filters_leave_what_slow_filters_leave(logits: list[float], temperature: float, filters: Any) -> None:
    sampling = Sampling(temperature, **filters)
    scores = (np.array(logits) - max(logits)) / temperature
    tokens, left = survivors(scores, **filters)
    assert tokens.tolist() == survivors_slowly(scores.tolist(), sampling)
    assert left.tolist() == scores[tokens].tolist()


@pytest.mark.slow
@pytest.mark.parametrize("filters", [{"top_k": 40}, {"top_k": 400}, {"top_p": 0.9}, {"top_p": 0.3, "min_p": 0.01}])
def test_short_cuts_of_large_vocabularies_leave_the_same(filters: Any) -> None:
    how = Sampling(1.0, **filters)
    for spread in (0, 3, 12):
        drawn = np.random.default_rng(7).normal(0, spread, 3000).round(1)
        for scores in (drawn - drawn.max(), np.linspace(0, -30 * spread, 3000)):
            found, _ = survivors(scores, how.top_k, how.top_p, how.min_p)
            assert found.tolist() == survivors_slowly(scores.tolist(), how)


@pytest.mark.slow
@settings(max_examples=400)
@given(
    logits=LINES,
    sampling=SAMPLINGS,
    parts=st.tuples(st.lists(TOKENS, min_size=1, max_size=6), *[st.lists(TOKENS, max_size=6)] * 2),
    path=st.lists(st.integers(0, 3), max_size=2).map(tuple),
)
def test_the_token_is_the_best_by_slow_rules(
    logits: list[float], sampling: Sampling, parts: tuple[list[int], list[int], list[int]], path: tuple[int, ...]
) -> None:
    prompt, text, ahead = parts
    choose = chooser(sampling, Bans(frozenset({0})), len(prompt))
    thread = thread_of(prompt + text, path)
    scores = scores_slowly(line(*logits).tolist(), sampling, prompt, text + ahead, {0, *sampling.banned})
    if max(scores) == -math.inf:
        if not isinstance(choose, Greedy):
            position = len(prompt + text + ahead)
            with pytest.raises(OptionFault, match=f"all tokens are banned or impossible at position {position}"):
                choose.token(line(*logits), thread, ahead)
        return
    token = choose.token(line(*logits), thread, ahead)
    if sampling.temperature == 0:
        assert scores[token] == pytest.approx(max(scores), abs=1e-9)
        return
    scores = [(score - max(scores)) / sampling.temperature for score in scores]
    assert sampling.seed is not None
    position = len(prompt + text + ahead)
    noise = noise_at(sampling.seed, path, position)
    assert token == max(survivors_slowly(scores, sampling), key=lambda j: scores[j] + noise[j])


@pytest.mark.torch
def test_filters_and_penalties_mean_what_they_mean_in_transformers() -> None:
    import torch
    from transformers import (
        MinPLogitsWarper,
        RepetitionPenaltyLogitsProcessor,
        TemperatureLogitsWarper,
        TopKLogitsWarper,
        TopPLogitsWarper,
    )

    random = np.random.default_rng(11)
    for _ in range(100):
        logits = random.normal(0, 3, 60).astype(np.float32)  # no ties: there transformers keeps more, or any
        top_k, top_p, min_p = int(random.integers(1, 60)), random.uniform(0.3, 1), random.uniform(0, 0.1)
        sampling = Sampling(0.7, top_k, top_p, min_p, repetition_penalty=1.3)
        text = random.integers(0, 60, 20).tolist()
        theirs = torch.tensor(logits)[None]
        for warp in (
            RepetitionPenaltyLogitsProcessor(1.3),
            TemperatureLogitsWarper(0.7),
            TopKLogitsWarper(top_k),
            TopPLogitsWarper(top_p),
            MinPLogitsWarper(min_p),
        ):
            theirs = warp(torch.LongTensor([text]), theirs)
        ours = np.array(scores_slowly(logits.tolist(), sampling, text, [], ())) / 0.7
        left = survivors_slowly(ours.tolist(), sampling)
        ours = np.exp(ours - ours.max()) * np.isin(np.arange(60), left)
        np.testing.assert_allclose(theirs.softmax(-1)[0].numpy(), ours / ours.sum(), atol=1e-6)


@settings(max_examples=100)
@given(sampling=SAMPLINGS, steps=st.lists(st.tuples(TOKENS, st.lists(TOKENS, max_size=3)), min_size=1, max_size=12))
def test_what_is_counted_once_is_as_if_counted_anew(sampling: Sampling, steps: list[tuple[int, list[int]]]) -> None:
    """Whatever was asked about drafts, other threads and other texts on the same path in between."""
    logits = np.random.default_rng(2).normal(0, 2, VOCAB).astype(np.float32)
    choose = chooser(sampling, NO_BANS, 2)
    thread, other = thread_of([1, 2]), thread_of([1, 2, 3, 3, 3])
    for token, ahead in steps:
        thread.tokens.append(token)
        child = thread_of([*thread.tokens, 5], (0,))
        for asked in (thread, child, other) if token < 3 else (thread,):
            anew = chooser(sampling, NO_BANS, 2)
            assert choose.token(logits, asked, ahead) == anew.token(logits, asked, ahead)
            assert choose.candidates(logits[None], asked, 9, 3) == anew.candidates(logits[None], asked, 9, 3)


@settings(max_examples=200)
@example(logits=[-1.7431706078596676e-10, *[0.0] * (VOCAB - 1)], sampling=Sampling())  # their softmax weights are equal
@given(logits=st.lists(st.floats(-2, 2, width=32), min_size=VOCAB, max_size=VOCAB), sampling=SAMPLINGS)
def test_a_mask_slot_with_the_logits_of_the_model_proposes_its_token(logits: list[float], sampling: Sampling) -> None:
    choose, thread = chooser(sampling, NO_BANS, 1), thread_of([1, 2, 2], (1,))
    token = choose.token(line(*logits), thread, ())
    (one,) = choose.candidates(line(*logits)[None], thread, 3, 1)
    (many,) = choose.candidates(line(*logits)[None], thread, 3, 4)
    assert one.tokens == (token,) == many.tokens[:1]
    assert len(many.tokens) == len(many.probabilities) == len(set(many.tokens)) <= 4
    assert not set(sampling.banned) & set(many.tokens)
    assert list(many.probabilities) == sorted(many.probabilities, reverse=True)
    assert all(0 <= probabilities <= 1 for probabilities in many.probabilities)


def test_probabilities_of_candidates_are_those_of_logits_with_noise_times_the_temperature() -> None:
    logits = line(0, 2, 1, -1, -30)
    sampling = Sampling(0.5, top_k=3, seed=9)
    (candidate,) = chooser(sampling, NO_BANS, 1).candidates(logits[None], thread_of([1], (4,)), 7, 5)
    weights = np.exp(logits[:4] + 0.5 * np.array(noise_at(9, (4,), 7)[:4]))
    probabilities = weights / weights.sum()
    assert set(candidate.tokens) == {0, 1, 2}
    assert candidate.probabilities == pytest.approx(probabilities[list(candidate.tokens)])


@pytest.mark.parametrize("temperature", [0.0, 1e-320, 0.7])
def test_extreme_logits_have_their_limits_and_a_broken_mask_slot_breaks_no_text(temperature: float) -> None:
    choose = chooser(Sampling(temperature, seed=1 if temperature else None, logit_bias={0: 1.0}), NO_BANS, 1)
    thread = thread_of([1])
    assert choose.token(line(-3e38, 3e38, -math.inf), thread, ()) == 1
    for selector in (choose, Greedy(NO_BANS)):
        for broken_line in (line(0, math.nan, 1), line(3e38, -math.inf, math.inf), line(-math.inf, -math.inf)):
            with pytest.raises(NotANumber, match="position 2 hold NaN"):
                selector.token(broken_line, thread, [1])
    broken = np.array([[math.nan, 0], [-math.inf, -math.inf], [0, math.inf]], np.float32)
    assert [one.probabilities for one in choose.candidates(broken, thread, 1, 2)] == [(0.0,)] * 3


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"temperature": -0.1}, "temperature is -0.1: expected a number from 0 to 100$"),
        ({"temperature": math.nan}, "temperature is nan"),
        ({"top_k": -1}, "top_k is -1: expected a whole number of at least 0"),
        ({"top_p": 1.01}, "top_p is 1.01: expected a number from 0 to 1$"),
        ({"repetition_penalty": 0}, "repetition_penalty is 0: expected a number from 0.01 to 100"),
        ({"presence_penalty": math.inf}, "presence_penalty is inf: expected a number from -2 to 2"),
        ({"logit_bias": [1]}, "logit_bias is .1.: expected token ids with biases"),
        ({"logit_bias": {"1": 2}}, "a token id in logit_bias is '1': expected a whole number"),
        ({"logit_bias": {1: math.nan}}, "the logit_bias of token 1 is nan: expected a number from -100 to 100"),
        ({"banned": 3}, "banned is 3: expected token ids"),
        ({"banned": [-1]}, "a token id in banned is -1"),
        ({"seed": -1}, "seed is -1: expected a whole number from 0 to 2..64 - 1"),
    ],
)
def test_options_that_cannot_be_meant_are_refused(options: dict[str, Any], says: str) -> None:
    with pytest.raises(OptionFault, match=says):
        Sampling(**options)


def test_greedy_decoding_ignores_a_seed() -> None:
    assert Sampling(temperature=0, seed=3) == Sampling()
    assert Sampling(temperature=1, seed=3) != Sampling(temperature=1)


def test_tokens_that_a_vocabulary_lacks_are_refused() -> None:
    Sampling(banned=[9], logit_bias={9: 1}).check(10)
    with pytest.raises(OptionFault, match="banned holds the token id 10: expected ids from 0 to 9"):
        Sampling(banned=[12, 10]).check(10)
    with pytest.raises(OptionFault, match="logit_bias holds the token id 10"):
        Sampling(logit_bias={10: 1}).check(10)
    with pytest.raises(OptionFault, match="banned holds all 3 tokens"):
        Sampling(banned=range(3)).check(3)


def test_noise_never_changes() -> None:
    assert noise_key(0, (), 0) == 0x1D2BA7DAB6544E13
    assert noise_key(42, (0, 2), 17) == 0xE1E7C0664B1CB734
    assert noise_key(2**64 - 1, (3,), 2) == 0x6EAEE5B0A2650853
    noise = gumbels(0xE1E7C0664B1CB734, np.array([0, 1, 31999, 151999])).tolist()
    assert noise == pytest.approx(
        [-1.02654326453006, 1.07466523248461, 0.8479272461572842, 0.294170449021082], rel=1e-13
    )
    # the published first outputs of SplitMix64 for this seed
    published = (6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431)
    expected = [-math.log(-math.log(((output >> 12) + 0.5) / 2**52)) for output in published]
    assert gumbels(1234567, np.arange(4)).tolist() == pytest.approx(expected, rel=1e-13)


UNFORKED = Bans(frozenset((*MASKS, CHILD)), FORK, CHILD, 0)


def write(
    language: Language, prompt: Sequence[int], choose: TokenSelector, limit: int, path: tuple[int, ...] = ()
) -> Tree:
    """The text of every thread, with no engine, no slots and no drafts; none is longer than `limit`."""
    thread = TokenSequence(path, list(prompt), len(prompt), np.zeros(1, np.bool_))
    cells: list[Cell] = []
    for token in prompt:
        cells.append(language.follow(cells, token))
    found: Tree = {path: (text := [])}
    while len(cells) < limit and (token := choose.token(language.logits(cells[-1].state), thread, ())) != END:
        text.append(token)
        thread.tokens.append(token)
        cells.append(language.follow(cells, token))
        if token == FORK:
            child = (*path, text.count(FORK) - 1)
            found |= write(language, [*thread.tokens, CHILD], choose, limit, child)
    return found


@settings(max_examples=200)
@given(
    language=LANGUAGES,
    prompt=st.lists(st.integers(0, 9), min_size=1, max_size=8),
    max_tokens=st.integers(1, 16),
    sampling=SAMPLINGS,
    draft_config=DRAFT_CONFIGS,
    chunk=st.integers(1, 10),
    limits=st.tuples(st.integers(1, 3), st.integers(0, 2)),
    lowering=st.sampled_from(LOWERINGS),
)
def test_a_seed_writes_the_same_with_any_drafts_or_none(
    language: Language,
    prompt: list[int],
    max_tokens: int,
    sampling: Sampling,
    draft_config: DraftConfig,
    chunk: int,
    limits: tuple[int, int],
    lowering: Lowering,
) -> None:
    max_threads, max_depth = limits
    choose = chooser(sampling, replace(UNFORKED, depth=max_depth), len(prompt))
    expected = write(language, prompt, choose, len(prompt) + max_tokens)
    most = len(prompt) + sum(len(text) + 1 for text in expected.values())
    engine = HashEngine(language, most + STEP_ROWS + 1, 1, lowering)
    # the same selector: what it counted for other threads on the same paths does not matter
    request = request_for(
        engine, prompt, max_tokens, draft_config, MASKS[:1], max_threads, max_depth, 10**6, selector=choose
    )
    assert {thread.path: thread.generated for thread in completed(engine, request, chunk).threads} == expected
