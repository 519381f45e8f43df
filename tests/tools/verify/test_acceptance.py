"""Acceptance: answers are what the model writes, counted steps are the runtime's own, and tables are those worked out by hand."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from spaceport.graphs.contract.draft_methods import LOOKUP_KINDS
from spaceport.graphs.contract.faults import OptionFault
from spaceport.graphs.contract.manifest import TokenIds
from spaceport.graphs.contract.signature import LOWERINGS, STEP_ROWS, Lowering, visible_length
from spaceport.runtime.bundle import Bundle
from spaceport.runtime.decode.sequence_group import Statistics
from spaceport.runtime.decode.sources import Acceptance, Continuation, Lookup
from spaceport.runtime.decoding import Decoding
from spaceport.runtime.session import Runtime
from spaceport.tools.tune.conversations import Conversation, Turn
from spaceport.tools.tune.samples import Prepared, Sample, prepare
from spaceport.tools.tune.tunable_model import checkpoint_encoder
from spaceport.tools.verify.acceptance import (
    ForkTally,
    LookupTally,
    Tally,
    conversation_encoder_for,
    correct_predictions,
    count_drafted,
    count_steps,
    measure,
)
from spaceport.tools.verify.answers import (
    NO_PREDICTION,
    Answer,
    AnswerSegment,
    AnswerThread,
    ReferenceAnswer,
    generate_answer,
    predict_segment,
    reference_answers,
    segments_of,
)
from support.hash_engine import CHILD as HASH_CHILD
from support.hash_engine import END, FORK, LAYOUTS, MASKS, Cell, HashEngine, Language
from support.paths import TINY
from support.small_bundle import fill

PROMPTS: dict[str, str] = json.loads((TINY / "prompts.json").read_text("utf-8"))
PROMPT, MAX_TOKENS = (1, 2, 3), 24  # of the fake engine
CHILD = 631  # an embedding row of the tiny model that no text uses


def runtime_over(engine: HashEngine, folder: Path) -> Runtime:
    """A runtime whose model is a hash."""
    tokens = TokenIds(MASKS, FORK, HASH_CHILD, (END,))
    return Runtime(Bundle(folder, replace(fill(folder), signature=engine.signature, tokens=tokens)), engine, 64)


def expected_threads(language: Language, max_depth: int) -> tuple[AnswerThread, ...]:
    """The threads, each generated alone."""
    limit = len(PROMPT) + MAX_TOKENS
    generated = language.tree(PROMPT, limit, max_depth)
    root = generated.pop(())
    forks = [index for index, token in enumerate(root) if token == FORK]
    threads: list[tuple[tuple[int, ...], list[int], int | None]] = [(PROMPT, root, None)]
    for (child,), tokens in sorted(generated.items()):
        threads.append(((*PROMPT, *root[: forks[child] + 1], HASH_CHILD), tokens, forks[child]))
    return tuple(
        AnswerThread(prefix, (*tokens, END), fork, "end")
        if len(prefix) + len(tokens) < limit
        else AnswerThread(prefix, tuple(tokens), fork, "length")
        for prefix, tokens, fork in threads
    )


@pytest.mark.parametrize("max_depth", [0, 1])
@pytest.mark.parametrize("max_threads", [1, 2, 64])
def test_each_thread_of_an_answer_equals_the_thread_generated_alone(
    max_threads: int, max_depth: int, tmp_path: Path
) -> None:
    engine = HashEngine(Language(0, 70, end_every=12, fork_every=5), 400 + STEP_ROWS + 1, 1)
    runtime = runtime_over(engine, tmp_path)
    endings = set()
    for seed in range(60):
        engine.language.seed = seed
        answer = generate_answer(runtime, PROMPT, MAX_TOKENS, seed % 3, max_threads, max_depth)
        assert answer.threads == expected_threads(engine.language, max_depth)
        assert answer.statistics.tokens == sum(len(thread.text_tokens) for thread in answer.threads)
        endings |= {(thread.fork is None, thread.ending) for thread in answer.threads}
    assert len(endings) == 2 + 2 * max_depth  # root and child threads, each with both endings


def test_in_reading_order_each_child_replaces_its_fork() -> None:
    threads = (
        AnswerThread(PROMPT, (4, FORK, 5, FORK, 6, END), None, "end"),
        AnswerThread((*PROMPT, 4, FORK, HASH_CHILD), (7, 8), 1, "length"),
        AnswerThread((*PROMPT, 4, FORK, 5, FORK, HASH_CHILD), (END,), 3, "end"),
    )
    assert Answer(threads, Statistics()).text_tokens == (4, 7, 8, 5, 6)


def test_an_answer_is_cut_at_the_maximum_context_length_unless_its_threads_do_not_fit(tmp_path: Path) -> None:
    for prompt, remaining in ((64, 0), (63, 1)):
        engine = HashEngine(Language(3, end_every=10**9), 64 + STEP_ROWS + 1, 1)
        (thread,) = generate_answer(runtime_over(engine, tmp_path), [1] * prompt, MAX_TOKENS, 1).threads
        assert (len(thread.tokens), thread.ending, engine.calls) == (remaining, "length", remaining)
    engine = HashEngine(Language(0, end_every=10**9, fork_every=3), 64 + STEP_ROWS + 1, 1)
    message = (
        r"need more than the 61 tokens that fit after its prompt of 3: raise --max-seq-len \(now 64\) or lower "
        r"--max-tokens \(now 50\)"
    )
    with pytest.raises(OptionFault, match=message):
        generate_answer(runtime_over(engine, tmp_path), PROMPT, 50, 0)


@settings(max_examples=100)
@given(
    segment=st.builds(
        AnswerSegment,
        st.lists(st.integers(0, END - 1), min_size=1, max_size=40).map(tuple) | st.just((1, 2, 3) * 45),
        st.lists(st.integers(0, 2) | st.integers(0, END), min_size=1, max_size=40).map(tuple),
        st.booleans(),
    ),
    language=st.builds(
        Language,
        st.integers(0, 10**6),
        st.just(60),
        window=st.none() | st.integers(1, 30),
        mask_layout=st.sampled_from(LAYOUTS),
        heads=st.sampled_from((0, 6)),
    ),
    mask_slots=st.integers(0, 6),
    masks=st.sampled_from((MASKS[:1], MASKS * 4)),
    fork=st.none() | st.integers(0, 2),
    rows=st.sampled_from((7, 40, 500)),
    lowering=st.sampled_from(LOWERINGS),
)
def test_every_mask_slot_or_head_predicts_after_every_token(
    segment: AnswerSegment,
    language: Language,
    mask_slots: int,
    masks: tuple[int, ...],
    fork: int | None,
    rows: int,
    lowering: Lowering,
) -> None:
    engine = HashEngine(language, visible_length(len(segment.prefix) + len(segment.tokens) + 8), 1, lowering)
    engine.rows = rows
    tokens = TokenIds(masks, fork, None if fork is None else HASH_CHILD, (END,))
    predicted = predict_segment(engine, tokens, segment, mask_slots, language.mask_layout)
    cells: list[Cell] = []
    for token in segment.prefix:
        cells.append(language.follow(cells, token))
    for index, token in enumerate(segment.tokens):
        here = {fork} if segment.child or cells[-1].token == fork else set()
        ahead = {fork} if segment.child else set()
        expected = [writable(language.logits(cells[-1].state), tokens, here)]
        expected += [writable(language.draft(cells, depth), tokens, ahead) for depth in range(mask_slots)]
        remaining = len(segment.tokens) - index  # tokens left to predict
        assert predicted[index].tolist() == [*expected[:remaining], *[NO_PREDICTION] * (1 + mask_slots - remaining)]
        cells.append(language.follow(cells, token))


def writable(logits: NDArray[np.float32], tokens: TokenIds, banned: set[int | None]) -> int:
    """The most probable token that may be generated."""
    allowed = [token for token in range(logits.size) if token not in banned | set(tokens.forbidden)]
    return max(allowed, key=lambda token: float(logits[token]))


@pytest.fixture(scope="module")
def runtime(tiny_bundle: Path) -> Iterator[Runtime]:
    with Runtime.open(tiny_bundle, max_seq_len=512, threads=1, step_costs="free") as opened:
        yield opened


def test_counted_steps_of_a_generated_answer_are_those_that_the_runtime_takes(runtime: Runtime) -> None:
    prompt = runtime.tokens_of(PROMPTS["foreign text"])
    root = generate_answer(runtime, prompt, 96, 5).root
    predicted = predict_segment(
        runtime.engine, runtime.bundle.manifest.tokens, AnswerSegment(root.prefix, root.tokens), 5
    )
    tally = Tally(5)
    tally.add(predicted, root.tokens, root.ending == "end")
    assert tuple(predicted[:, 0]) == root.tokens
    for mask_slots in range(6):
        completion = runtime.generate(prompt, Decoding(max_tokens=96, mask_slots=mask_slots, draft="chain"))
        assert root.text_tokens == completion.tokens
        assert tally.steps[mask_slots] == completion.statistics.steps
        assert tally.tokens_per_step[mask_slots] == completion.statistics.tokens_per_step
    # The runtime drafts no last token of a limited answer: the step generates it anyway.
    own = [*completion.statistics.accepted_by_depth, *[0] * 5]
    assert all(0 <= found - accepted <= 1 for found, accepted in zip(tally.accepted, own, strict=False))
    assert sum(tally.accepted) - sum(own) <= 1


def test_steps_with_prompt_lookup_are_those_of_the_runtime(runtime: Runtime) -> None:
    prompts = [tuple(runtime.tokens_of(prompt)) for prompt in list(PROMPTS.values())[:2]]
    counted = count_drafted(runtime, [ReferenceAnswer(1, prompt, ()) for prompt in prompts], 24, 3)
    for found, slots in ((counted["lookup"], 0), (counted["together"], 3)):
        decoding = Decoding(max_tokens=24, mask_slots=slots, lookup=16, prefix_cache=False)
        own = [runtime.generate(prompt, decoding).statistics for prompt in prompts]
        assert (found.tokens, found.steps) == (sum(one.tokens for one in own), sum(one.steps for one in own))
        assert found.tokens_per_step == found.tokens / found.steps
    assert counted["together"].steps < counted["lookup"].steps


# The plain answer has the line break twice in a row. At the other token children would fork again if they could.
BREAK, OTHER = 203, 283


def forking(runtime: Runtime, fork: int) -> Runtime:
    """The runtime with an ordinary token as its [Fork] token, so that its answers fork."""
    tokens = replace(runtime.bundle.manifest.tokens, fork=fork, child=CHILD)
    bundle = replace(runtime.bundle, manifest=replace(runtime.bundle.manifest, tokens=tokens))
    return Runtime(bundle, runtime.engine, runtime.max_seq_len)


@pytest.mark.parametrize(("fork", "mask_slots"), [(BREAK, 0), (OTHER, 2)])
def test_concurrent_threads_generate_the_same_in_fewer_steps(runtime: Runtime, fork: int, mask_slots: int) -> None:
    prompt, forked = runtime.tokens_of(next(iter(PROMPTS.values()))), forking(runtime, fork)
    concurrent = generate_answer(forked, prompt, 40, mask_slots)
    sequential = generate_answer(forked, prompt, 40, mask_slots, max_threads=1)
    assert concurrent.threads == sequential.threads
    counted = 0
    for thread in sequential.threads:
        if thread.tokens:
            segment = AnswerSegment(thread.prefix, thread.tokens, thread.fork is not None)
            predicted = predict_segment(runtime.engine, forked.bundle.manifest.tokens, segment, mask_slots)
            assert tuple(predicted[:, 0]) == thread.tokens
            counted += count_steps(correct_predictions(predicted, thread.tokens), mask_slots)
    assert sequential.statistics.steps == counted
    assert concurrent.statistics.steps < sequential.statistics.steps
    assert concurrent.statistics.peak_threads > sequential.statistics.peak_threads == 1
    if not mask_slots:
        assert concurrent.statistics.steps == 40  # concurrent threads end when the longest path does


def test_no_fork_directly_follows_a_fork_and_threads_are_measured_under_the_same_bans(runtime: Runtime) -> None:
    prompt = tuple(runtime.tokens_of(next(iter(PROMPTS.values()))))
    plain = runtime.generate(prompt, Decoding(max_tokens=40)).tokens
    twice = next(index for index in range(1, 40) if plain[index - 1 : index + 1] == (BREAK, BREAK))
    forked = forking(runtime, BREAK)
    for mask_slots in (0, 5):
        assert generate_answer(forked, prompt, 40, mask_slots).root.tokens[twice] != BREAK
        assert generate_answer(forked, (*prompt, *plain[:twice]), 4, mask_slots).root.tokens[0] != BREAK
    found = measure(forking(runtime, OTHER), [ReferenceAnswer(1, prompt, ())], 40, 2)
    assert found.generated.segments > 1
    assert found.generated.accuracy[0] == 1.0


CONVERSATIONS = (
    Conversation(1, (Turn("user", "How does json/scanner.py begin?"), Turn("assistant", "import re\n"))),
    Conversation(2, (Turn("system", "Be brief."), Turn("user", "a"), Turn("assistant", " b "))),
    Conversation(3, (Turn("user", "a"), Turn("assistant", "b"), Turn("user", "c"), Turn("assistant", "d"))),
    Conversation(4, (Turn("text", "import re\n\nNaN = float('nan')\n"),)),
)


def test_a_bundle_tokenizes_conversations_as_training_does(runtime: Runtime) -> None:
    training = prepare(CONVERSATIONS, checkpoint_encoder(TINY, False), 512)
    bundle = prepare(CONVERSATIONS, conversation_encoder_for(runtime), 512)
    assert training.counts == bundle.counts
    assert len(training.whole) == 4
    for one, other in zip(training.whole, bundle.whole, strict=True):
        assert one.ids.tolist() == other.ids.tolist()
        assert one.learned.tolist() == other.learned.tolist()


# Tables worked out by hand


def test_the_counts_of_a_table_are_those_worked_out_by_hand() -> None:
    answer = (5, 6, 7, 8, 9)
    found = np.array(
        [  # predictions before each token: next token, mask slot 1, mask slot 2
            [5, 6, 7],  # all correct: the answer begins with 5 6 7
            [6, 7, 0],
            [0, 8, 9],
            [8, 0, NO_PREDICTION],  # 9 is missed
            [9, NO_PREDICTION, NO_PREDICTION],
        ]
    )
    tally = Tally(2)
    tally.add(found, answer, ended=True)
    assert tally.predictions == [5, 4, 3]
    assert tally.correct == [4, 3, 2]
    # k = 1: 5 | 6 7 | 8 9
    # k = 2: 5 | 6 7 8 | 9
    assert tally.steps == [5, 3, 3]
    assert tally.accuracy == [4 / 5, 3 / 4, 2 / 3]
    assert tally.tokens_per_step == [4 / 5, 4 / 3, 4 / 3]
    # k = 2: 6 7 are drafted and accepted, then one draft token for 9, which is wrong
    assert (tally.drafted, tally.accepted, tally.acceptance) == ([2, 1], [1, 1], [1 / 2, 1.0])


def test_a_mask_slot_after_a_wrong_one_saves_no_step_and_acceptance_is_counted_by_depth() -> None:
    answer = (5, 6, 7, 8)
    found = np.array([[5, 0, 7], [6, 0, 8], [7, 0, NO_PREDICTION], [8, NO_PREDICTION, NO_PREDICTION]])
    assert count_steps(correct_predictions(found, answer), 2) == 4
    tally = Tally(2)
    found = np.array([[5, 6, 0], [6, 7, 8], [7, 8, NO_PREDICTION], [8, NO_PREDICTION, NO_PREDICTION]])
    tally.add(found, answer, ended=False)  # 5 | 6 7 | 8: the second draft token of the second step is wrong
    assert (tally.drafted, tally.accepted, tally.acceptance) == ([2, 1], [2, 0], [1.0, 0.0])
    single = Tally(3)  # one token takes one step, and no mask slot predicts
    single.add(np.array([[5, NO_PREDICTION, NO_PREDICTION, NO_PREDICTION]]), (5,), ended=False)
    assert (single.predictions, single.steps, single.accuracy[1]) == ([1, 0, 0, 0], [1, 1, 1, 1], None)


def test_precision_and_recall_of_forks_are_those_worked_out_by_hand() -> None:
    forks = ForkTally()
    forks.add(np.array([FORK, 1, FORK, 2, 3]), (FORK, 1, 2, FORK, FORK), FORK)
    assert (forks.positions, forks.expected, forks.predicted, forks.correct) == (5, 3, 2, 1)
    assert (forks.precision, forks.recall) == (1 / 2, 1 / 3)
    forks.add(np.array([FORK]), (1,), FORK)  # an answer without forks
    assert forks.precision == 1 / 3


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
    (found,) = reference_answers(Prepared(whole=[chat]), [Conversation(1, (Turn("user", "a"),))], TokenIds())
    assert found.segments == (AnswerSegment((10,), (11,)), AnswerSegment((10, 11, 12, 13), (14, 15)))
    assert found.prompt == (10, 11, 12, 13)
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
        kinds = [round(10 * proposal.behind(depth, 0)[0][0]) for depth in range(len(found))]
        right = proposal.learn(written, 0.0)
        for kind in kinds[: min(right + 1, len(written))]:
            expected[kind] += 1
        correct += right
        copied = copied + right if right and right == min(len(found), len(written)) else 0
        text += written[: right + 1]
    assert tally.tokens == expected
    assert sum(tally.accepted) == correct
    assert all(good <= count for good, count in zip(tally.accepted, tally.tokens, strict=True))
