"""Acceptance: answers are generated in the steps that the predictions allow, and lookup is counted as the runtime learns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spaceport.graphs.contract.draft_methods import LOOKUP_KINDS, MaskLayout
from spaceport.graphs.contract.faults import InputFault
from spaceport.graphs.contract.manifest import TokenIds
from spaceport.runtime.bundle import Bundle
from spaceport.runtime.decode.sources import Acceptance, Continuation, Lookup, common
from spaceport.runtime.decoding import Decoding
from spaceport.runtime.sampling.sampler import Sampling
from spaceport.runtime.session import Runtime
from spaceport.training.acceptance import DraftPrompt, LookupTally, draft_prompts, measure
from spaceport.verify.prompts import AuditPrompt
from support.hash_engine import END, LAYOUTS, MASKS, VOCAB, Cell, HashEngine, Language
from support.small_bundle import fill

CAPACITY = 400


def runtime_over(language: Language, tokens: TokenIds, slots: int, folder: Path) -> Runtime:
    """A runtime whose model is a hash."""
    engine = HashEngine(language, CAPACITY, 1)
    manifest = fill(folder)
    drafts = replace(manifest.drafts, layout=language.mask_layout, max_tokens=slots)
    drafts = replace(drafts, predictor="head") if language.heads else drafts
    return Runtime(
        Bundle(folder, replace(manifest, signature=engine.signature, tokens=tokens, drafts=drafts)), engine, 128
    )


def expected(
    language: Language, tokens: TokenIds, prompt: Sequence[int], answer: Sequence[int], slots: int
) -> tuple[int, list[int], list[int]]:
    """Steps, and drafted and accepted tokens by depth, from the predictions before each token."""
    allowed = [token for token in range(VOCAB) if token not in tokens.forbidden]
    cells: list[Cell] = []
    for token in prompt:
        cells.append(language.follow(cells, token))
    predictions: list[list[int]] = []
    for token in answer:
        logits = [language.draft(cells, depth) for depth in range(slots)]
        predictions.append([max(allowed, key=lambda token: float(row[token])) for row in logits])
        cells.append(language.follow(cells, token))
    steps, last, drafted_by_depth, accepted_by_depth = 1, 0, [0] * slots, [0] * slots
    while last < len(answer) - 1:
        following = answer[last + 1 :]
        count = min(slots, len(following) - 1)  # the last token of a limited text is never drafted
        right = 0
        for depth in range(count):
            drafted_by_depth[depth] += 1
            if right == depth and predictions[last][depth] == following[depth]:
                right += 1
                accepted_by_depth[depth] += 1
        steps, last = steps + 1, last + right + 1
    return steps, drafted_by_depth, accepted_by_depth


@settings(max_examples=60, deadline=None)
@given(
    prompt=st.lists(st.integers(0, END - 1), min_size=1, max_size=12).map(tuple),
    length=st.integers(1, 30),
    seed=st.integers(0, 10**6),
    layout=st.sampled_from(LAYOUTS),
    heads=st.booleans(),
    slots=st.integers(1, 6),
)
def test_an_answer_takes_the_steps_that_its_predictions_allow(
    tmp_path_factory: pytest.TempPathFactory,
    prompt: tuple[int, ...],
    length: int,
    seed: int,
    layout: MaskLayout,
    heads: bool,
    slots: int,
) -> None:
    language = Language(seed, 80, mask_layout=layout, heads=slots if heads else 0)
    tokens = TokenIds(MASKS * 4)  # no end token: an answer ends at its limit
    with runtime_over(language, tokens, slots, tmp_path_factory.mktemp("bundle")) as runtime:
        answer = runtime.generate(prompt, Decoding(max_tokens=length, mask_slots=0, lookup=0)).tokens
        found = measure(runtime, [DraftPrompt(prompt)], length).all
    steps, drafted, accepted = expected(language, tokens, prompt, answer, slots)
    assert (found.answers, found.tokens, found.steps) == (1, length, steps)
    missing = [0] * (slots - len(found.drafted))
    assert found.drafted + missing == drafted
    assert found.accepted + missing == accepted


def test_kinds_are_measured_apart_and_a_plain_text_is_a_prompt_by_its_first_tokens(
    tiny_bundle: Path, tmp_path: Path
) -> None:
    message = ({"role": "user", "content": "import json"},)
    long = "import json\n" * 40
    texts = [AuditPrompt(1, message, kind="code"), AuditPrompt(2, long, kind="text"), AuditPrompt(3, "import json\n")]
    with Runtime.open(tiny_bundle, max_seq_len=128, threads=1, step_costs="free") as runtime:
        prompts = draft_prompts(runtime, texts, tmp_path)
        whole = [tuple(runtime.tokens_of(one.prompt)) for one in texts]
        assert [one.tokens for one in prompts] == [whole[0], whole[1][:32], whole[2][: len(whole[2]) // 2]]
        with pytest.raises(InputFault, match="none of its 1 prompts has less than 128 tokens"):
            draft_prompts(runtime, [AuditPrompt(1, ({"role": "user", "content": long},))], tmp_path)
        found = measure(runtime, prompts, 24)
        apart = [measure(runtime, [one], 24).all for one in prompts]
    assert found.kinds == {"code": apart[0], "text": apart[1]}
    assert found.all.answers == 3
    assert found.all.steps == sum(one.steps for one in apart) < found.all.tokens
    assert sum(found.lookup.tokens) > 0


def test_sampled_answers_are_those_of_plain_decoding_at_that_temperature(tiny_bundle: Path) -> None:
    with Runtime.open(tiny_bundle, max_seq_len=128, threads=1, step_costs="free") as runtime:
        prompt = tuple(runtime.tokens_of("import json\nimport"))
        counted = {}
        for temperature in (0.0, 1.0):
            decoding = Decoding(max_tokens=48, sampling=Sampling(temperature=temperature, seed=0)).without_drafts()
            counted[temperature] = LookupTally()
            counted[temperature].add(prompt, runtime.generate(prompt, decoding).tokens)
            assert measure(runtime, [DraftPrompt(prompt)], 48, temperature).lookup == counted[temperature]
    assert counted[0.0] != counted[1.0]


@settings(max_examples=200)
@given(
    prefix=st.lists(st.integers(0, 3), min_size=1, max_size=30),
    answer=st.lists(st.integers(0, 3), max_size=60),
    most=st.integers(1, 8),
)
def test_lookup_tokens_are_counted_in_the_kinds_from_which_the_runtime_learns(
    prefix: list[int], answer: list[int], most: int
) -> None:
    tally = LookupTally()
    tally.add(prefix, answer, most)
    learned = Acceptance(0)
    lookup, text, copied = Lookup(), list(prefix), 0
    expected, correct = [0] * LOOKUP_KINDS, 0
    while len(text) < len(prefix) + len(answer):
        found, equal = lookup.following(text, most)
        written = answer[len(text) - len(prefix) :][: len(found) + 1]
        learned.lookup[:] = [kind / 10 for kind in range(LOOKUP_KINDS)]
        lookup.copied, lookup.copied_until = copied, len(text)
        proposal = Continuation(found, equal, lookup, len(text), learned)
        kinds = [round(10 * proposal.behind(depth, (0,))[0][0]) for depth in range(len(found))]
        proposal.learn(written, 0.0)
        right = common(found, written)
        for kind in kinds[: min(right + 1, len(written))]:
            expected[kind] += 1
        correct += right
        copied = copied + right if right and right == min(len(found), len(written)) else 0
        text += written[: right + 1]
    assert tally.tokens == expected
    assert sum(tally.accepted) == correct
    assert all(good <= count for good, count in zip(tally.accepted, tally.tokens, strict=True))
