"""Acceptance: known text is generated in the steps that its predictions allow, and samples become prompts and segments."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from spaceport.exporter.checkpoint import TokenFlags, load_tokenizer, open_checkpoint
from spaceport.graphs.contract.draft_methods import LOOKUP_KINDS
from spaceport.graphs.contract.manifest import TokenIds
from spaceport.runtime.bundle import Bundle
from spaceport.runtime.decode.sources import Acceptance, Continuation, Lookup, common
from spaceport.runtime.decoding import Decoding
from spaceport.runtime.session import Runtime
from spaceport.training.acceptance import (
    AnswerSegment,
    LookupTally,
    ReferenceAnswer,
    along_segment,
    conversation_encoder_for,
    measure,
    reference_answers,
    segments_of,
)
from spaceport.training.conversation_encoder import conversation_encoder
from spaceport.training.conversations import Conversation, Turn
from spaceport.training.samples import Prepared, Sample, prepare
from support.hash_engine import CHILD as HASH_CHILD
from support.hash_engine import END, FORK, LAYOUTS, MASKS, Cell, HashEngine, Language
from support.paths import TINY
from support.small_bundle import fill

CAPACITY = 400
CHILD = 631


def runtime_over(language: Language, tokens: TokenIds, folder: Path) -> Runtime:
    """A runtime whose model is a hash."""
    engine = HashEngine(language, CAPACITY, 1)
    manifest = fill(folder)
    drafts = replace(manifest.drafts, layout=language.mask_layout, max_tokens=6)
    drafts = replace(drafts, predictor="head") if language.heads else drafts
    return Runtime(
        Bundle(folder, replace(manifest, signature=engine.signature, tokens=tokens, drafts=drafts)), engine, 128
    )


def writable(logits: NDArray[np.float32], tokens: TokenIds, child: bool) -> int:
    """The most probable token that a draft may contain."""
    banned = {*tokens.forbidden, *(tokens.fork_ids if child else ())}
    return max((token for token in range(logits.size) if token not in banned), key=lambda token: float(logits[token]))


def expected(
    language: Language, tokens: TokenIds, segment: AnswerSegment, slots: int
) -> tuple[int, list[int], list[int]]:
    """Steps, and drafted and accepted tokens by depth, from the predictions before each token."""
    cells: list[Cell] = []
    for token in segment.prefix:
        cells.append(language.follow(cells, token))
    predictions: list[list[int]] = []
    for token in segment.tokens:
        drafted = [writable(language.draft(cells, depth), tokens, segment.child) for depth in range(slots)]
        predictions.append(drafted)
        cells.append(language.follow(cells, token))
    steps, last, drafted_by_depth, accepted_by_depth = 1, 0, [0] * slots, [0] * slots
    while last < len(segment.tokens) - 1:
        following = segment.tokens[last + 1 :]
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
    prefix=st.lists(st.integers(0, END - 1), min_size=1, max_size=12).map(tuple),
    answer=st.lists(st.integers(0, 2) | st.integers(0, END), min_size=1, max_size=30).map(tuple),
    follows=st.integers(0, 20),
    child=st.booleans(),
    seed=st.integers(0, 10**6),
    layout=st.sampled_from(LAYOUTS),
    heads=st.sampled_from((0, 6)),
    slots=st.integers(1, 6),
)
def test_known_text_takes_the_steps_that_its_predictions_allow(
    tmp_path_factory: pytest.TempPathFactory,
    prefix: tuple[int, ...],
    answer: tuple[int, ...],
    follows: int,
    child: bool,
    seed: int,
    layout: object,
    heads: int,
    slots: int,
) -> None:
    language = Language(seed, 80, mask_layout=layout, heads=heads)  # type: ignore[arg-type]
    tokens = TokenIds(MASKS * 4, FORK, HASH_CHILD, (END,))
    with runtime_over(language, tokens, tmp_path_factory.mktemp("bundle")) as runtime:
        if follows:  # the model's own text, whose drafts are accepted, in front of any other
            own = runtime.generate(prefix, Decoding(max_tokens=follows, mask_slots=0, lookup=0, fork=False)).tokens
            answer = (*own, *answer)
        segment = AnswerSegment(prefix, answer, child)
        found = along_segment(runtime, segment, slots)
    steps, drafted, accepted = expected(language, tokens, segment, slots)
    assert found.tokens == len(answer)
    assert found.steps == steps
    missing = slots - len(found.drafted_by_depth)
    assert found.drafted_by_depth + [0] * missing == drafted
    assert found.accepted_by_depth + [0] * missing == accepted


def test_own_answers_are_measured_as_they_are_generated_and_kinds_apart(tiny_bundle: Path) -> None:
    with Runtime.open(tiny_bundle, max_seq_len=512, threads=1, step_costs="free") as runtime:
        prompts = [tuple(runtime.tokens_of(text)) for text in ("import json\n", "def scan(", "The old bridge")]
        samples = [
            ReferenceAnswer(prompt, (), kind) for prompt, kind in zip(prompts, ("code", "code", "text"), strict=True)
        ]
        own = measure(runtime, samples, 24)
        plain = [runtime.generate(prompt, Decoding(max_tokens=24, mask_slots=0, lookup=0)).tokens for prompt in prompts]
        segments = [
            ReferenceAnswer(prompt, (AnswerSegment(prompt, tokens),), kind)
            for prompt, tokens, kind in zip(prompts, plain, ("code", "code", "text"), strict=True)
        ]
        known = measure(runtime, segments, None)
    assert own.as_dict() == known.as_dict()
    assert (own.all.answers, own.kinds["code"].answers, own.kinds["text"].answers) == (3, 2, 1)
    assert own.all.steps == own.kinds["code"].steps + own.kinds["text"].steps < own.all.tokens
    assert own.kinds["code"].acceptance[0] != own.kinds["text"].acceptance[0]
    assert sum(own.lookup.tokens) > 0 == sum(known.lookup.tokens)


def test_a_sample_with_forks_becomes_its_root_and_its_children() -> None:
    #                     0  1  2  3     4      5  6  7     8      9  10
    ids = np.array([1, 2, 9, FORK, CHILD, 7, 8, FORK, CHILD, 6, 5])
    parents = np.array([-1, 0, 1, 2, 3, 4, 3, 6, 7, 8, 7])
    learned = np.array([0, 0, 1, 1, 0, 1, 1, 1, 0, 1, 1], np.bool_)
    sample = Sample(1, ids, parents, learned)
    assert segments_of(sample, TokenIds(mask=(4,), fork=FORK, child=CHILD)) == [
        AnswerSegment((1, 2), (9, FORK, 8, FORK, 5)),
        AnswerSegment((1, 2, 9, FORK, CHILD), (7,), child=True),
        AnswerSegment((1, 2, 9, FORK, 8, FORK, CHILD), (6,), child=True),
    ]


def test_every_answer_of_a_chat_is_measured_and_the_last_one_is_generated_again() -> None:
    chat = Sample(1, np.arange(10, 16), np.arange(-1, 5), np.array([0, 1, 0, 0, 1, 1], np.bool_))
    turns = Conversation(1, (Turn("user", "a"),), kind="chat")
    (found,) = reference_answers(Prepared(whole=[chat]), [turns], TokenIds())
    assert found.segments == (AnswerSegment((10,), (11,)), AnswerSegment((10, 11, 12, 13), (14, 15)))
    assert (found.prompt, found.kind) == ((10, 11, 12, 13), "chat")
    for size, prompt in ((7, 3), (63, 31), (100, 32)):  # the first tokens of a plain text count as its prompt
        text = Sample(3, np.arange(size), np.arange(-1, size - 1), np.arange(size) > 0)
        (found,) = reference_answers(Prepared(whole=[text]), [Conversation(3, (Turn("text", "a"),))], TokenIds())
        assert found.prompt == tuple(range(prompt))
        assert found.segments == (AnswerSegment(tuple(range(prompt)), tuple(range(prompt, size))),)


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


CONVERSATIONS = (
    Conversation(1, (Turn("user", "How does json/scanner.py begin?"), Turn("assistant", "import re\n"))),
    Conversation(2, (Turn("system", "Be brief."), Turn("user", "a"), Turn("assistant", " b "))),
    Conversation(3, (Turn("user", "a"), Turn("assistant", "b"), Turn("user", "c"), Turn("assistant", "d"))),
    Conversation(4, (Turn("text", "import re\n\nNaN = float('nan')\n"),)),
)


def test_a_bundle_tokenizes_conversations_as_training_does(tiny_bundle: Path) -> None:
    checkpoint = open_checkpoint(TINY, TokenFlags())
    training = prepare(CONVERSATIONS, conversation_encoder(load_tokenizer(checkpoint), checkpoint.tokens), 512)
    with Runtime.open(tiny_bundle, max_seq_len=512, threads=1, step_costs="free") as runtime:
        bundle = prepare(CONVERSATIONS, conversation_encoder_for(runtime), 512)
    assert training.counts == bundle.counts
    assert len(training.whole) == 4
    for one, other in zip(training.whole, bundle.whole, strict=True):
        assert one.ids.tolist() == other.ids.tolist()
        assert one.learned.tolist() == other.learned.tolist()
