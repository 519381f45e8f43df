"""Acceptance: what is counted along a line is what the runtime does, on every engine, for checkpoints and bundles."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hash_engine import END, MASKS, VOCAB, Cell, HashEngine, Language, request_for
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from spaceport.exporter.checkpoint import TokenFlags, open_checkpoint
from spaceport.graphs.manifest import TokenIds
from spaceport.graphs.signature import LOWERINGS, Lowering, visible_length
from spaceport.runtime.decoding import Decoding
from spaceport.runtime.engine import Batch
from spaceport.runtime.loop import step
from spaceport.runtime.session import Runtime
from spaceport.tools.acceptance.answers import write_answer
from spaceport.tools.acceptance.choices import Choices
from spaceport.tools.acceptance.given import Given, Passage, given_answers, passages_of
from spaceport.tools.acceptance.measure import measure
from spaceport.tools.acceptance.reading import NOTHING, read_line
from spaceport.tools.acceptance.tally import Forks, Tally, count_steps, hits
from spaceport.tools.reference import checkpoint_runtime
from spaceport.tools.tune.conversations import Conversation, Turn
from spaceport.tools.tune.samples import Prepared, Sample

TINY = Path(__file__).parent / "data" / "tiny"
PROMPTS: dict[str, str] = json.loads((TINY / "prompts.json").read_text("utf-8"))
FORK, CHILD = 630, 631  # rows of the tiny model that no text uses


@pytest.fixture(scope="module", params=["onnxruntime scatter", "onnxruntime append", "torch"])
def runtime(request: pytest.FixtureRequest, tiny_bundle: Path, tiny_append_bundle: Path) -> Iterator[Runtime]:
    if request.param == "torch":
        with checkpoint_runtime(open_checkpoint(TINY, TokenFlags()), 512) as opened:
            yield opened
        return
    bundle = tiny_append_bundle if request.param.endswith("append") else tiny_bundle
    with Runtime.open(bundle, max_seq_len=512, threads=1) as opened:
        yield opened


@pytest.mark.parametrize("name", PROMPTS)
def test_steps_along_the_own_answer_are_those_that_the_runtime_takes(runtime: Runtime, name: str) -> None:
    tokens = runtime.bundle.manifest.tokens
    prompt = runtime.tokens_of(PROMPTS[name])
    line = write_answer(runtime, prompt, 96, 5).spine
    found = read_line(runtime.engine, tokens, line.prompt, line.tokens, 5)
    tally = Tally(5)
    tally.add(found, line.tokens, line.ending == "end")
    assert tuple(found[:, 0]) == line.tokens
    for mask_slots in range(6):
        completion = runtime.generate(prompt, Decoding(max_tokens=96, mask_slots=mask_slots))
        assert line.text_tokens == completion.tokens
        assert tally.steps[mask_slots] == completion.statistics.steps
        assert tally.tokens_per_step[mask_slots] == completion.statistics.tokens_per_step


@settings(max_examples=100)
@given(
    prompt=st.lists(st.integers(0, END - 1), min_size=1, max_size=40) | st.just([1, 2, 3] * 45),
    answer=st.lists(st.integers(0, 2) | st.integers(0, END), min_size=1, max_size=40),
    mask_slots=st.integers(0, 6),
    masks=st.sampled_from((MASKS[:1], MASKS * 3)),
    fork=st.none() | st.integers(0, 2),
    window=st.none() | st.integers(1, 30),
    rows=st.sampled_from((6, 40, 500)),
    seed=st.integers(0, 10**6),
    lowering=st.sampled_from(LOWERINGS),
)
def test_every_mask_slot_is_asked_behind_every_place(
    prompt: list[int],
    answer: list[int],
    mask_slots: int,
    masks: tuple[int, ...],
    fork: int | None,
    window: int | None,
    rows: int,
    seed: int,
    lowering: Lowering,
) -> None:
    language = Language(seed, 60, window=window)
    engine = HashEngine(language, visible_length(len(prompt) + len(answer) + 7), 1, lowering)
    engine.rows = rows
    child = None if fork is None else MASKS[1]
    tokens = TokenIds(masks, fork, child, (END,))
    found = read_line(engine, tokens, prompt, answer, mask_slots, MASKS)
    cells: list[Cell] = []
    for token in prompt:
        cells.append(language.follow(cells, token))
    for place, token in enumerate(answer):
        expected = [writable(language.logits(cells[-1].state), cells[-1].token, fork)]
        before = token
        for depth in range(mask_slots):
            before = writable(language.draft(cells, depth), before, fork)
            expected.append(before)
        left = len(answer) - place  # how many tokens there are to predict
        assert found[place].tolist() == [*expected[:left], *[NOTHING] * (1 + mask_slots - left)]
        cells.append(language.follow(cells, token))


def writable(logits: NDArray[np.float32], before: int, fork: int | None) -> int:
    """The likeliest token that is no mask, and no [Fork] right behind another."""
    allowed = [token for token in range(MASKS[0]) if fork is None or not token == before == fork]
    return max(allowed, key=lambda token: float(logits[token]))


class Recorder(HashEngine):
    """A fake engine that keeps what it was given."""

    def run(self, batch: Batch) -> NDArray[np.float32]:
        self.batches = [*getattr(self, "batches", []), batch]
        return super().run(batch)


def test_several_mask_tokens_are_fed_in_their_order() -> None:
    engine = Recorder(Language(1), 64, 1)
    read_line(engine, TokenIds(MASKS, end=(END,)), [1, 2], [3, 4, 5], 2)
    assert [batch.input_ids.tolist() for batch in engine.batches] == [[[1, 2, 3, 4]], [[*MASKS, MASKS[0]]]]
    assert [batch.position_ids.tolist() for batch in engine.batches] == [[[0, 1, 2, 3]], [[2, 3, 3]]]


@settings(max_examples=100)
@given(
    mask_slots=st.integers(1, 6),
    quality=st.sampled_from((0, 50, 80, 100)),
    max_tokens=st.integers(1, 60),
    seed=st.integers(0, 10**6),
    lowering=st.sampled_from(LOWERINGS),
)
def test_counted_steps_are_those_of_the_loop_for_any_quality_of_drafts(
    mask_slots: int, quality: int, max_tokens: int, seed: int, lowering: Lowering
) -> None:
    language = Language(seed, quality)
    engine = HashEngine(language, visible_length(70 + 49), 1, lowering)
    request = request_for(engine, [1, 2, 3], max_tokens, mask_slots)
    while request.live:
        step(engine, [request])
    (thread,) = request.threads
    answer = thread.written + ([END] if thread.ending == "end" else [])
    found = read_line(engine, request.tokens, [1, 2, 3], answer, mask_slots, MASKS)
    assert count_steps(hits(found, answer), mask_slots) == request.statistics.steps


def test_the_counts_of_a_table_are_those_worked_out_by_hand() -> None:
    answer = (5, 6, 7, 8, 9)
    found = np.array(
        [  # next token, mask slot 1, mask slot 2 behind the token before each place
            [5, 6, 7],  # all right: behind the prompt stand 5 6 7
            [6, 7, 0],
            [0, 8, 9],
            [8, 0, NOTHING],  # 9 is missed
            [9, NOTHING, NOTHING],
        ]
    )
    tally = Tally(2)
    tally.add(found, answer, ended=True)
    assert tally.asked == [5, 4, 3]
    assert tally.right == [4, 3, 2]
    # k = 1: 5 | 6 7 | 8 9
    # k = 2: 5 | 6 7 8 | 9
    assert tally.steps == [5, 3, 3]
    assert tally.accuracy == [4 / 5, 3 / 4, 2 / 3]
    assert tally.tokens_per_step == [4 / 5, 4 / 3, 4 / 3]


def test_a_deeper_slot_does_not_count_behind_a_wrong_one() -> None:
    answer = (5, 6, 7, 8)
    found = np.array([[5, 0, 7], [6, 0, 8], [7, 0, NOTHING], [8, NOTHING, NOTHING]])
    assert count_steps(hits(found, answer), 2) == 4


def test_an_answer_of_one_token_takes_one_step_and_asks_no_mask_slot() -> None:
    tally = Tally(3)
    tally.add(np.array([[5, NOTHING, NOTHING, NOTHING]]), (5,), ended=False)
    assert (tally.asked, tally.steps, tally.accuracy[1]) == ([1, 0, 0, 0], [1, 1, 1, 1], None)


def test_precision_and_recall_of_forks_are_those_worked_out_by_hand() -> None:
    forks = Forks()
    forks.add(np.array([FORK, 1, FORK, 2, 3]), (FORK, 1, 2, FORK, FORK), FORK)
    assert (forks.places, forks.written, forks.predicted, forks.right) == (5, 3, 2, 1)
    assert (forks.precision, forks.recall) == (1 / 2, 1 / 3)
    forks.add(np.array([FORK]), (1,), FORK)  # an answer with no tree
    assert forks.precision == 1 / 3


def test_no_fork_is_chosen_right_behind_a_fork() -> None:
    choose = Choices(TokenIds(mask=(11,), fork=3, child=4))
    logits = np.arange(VOCAB, 0, -1).astype(np.float32)
    logits[[3, 4, 11]] = (30, 40, 50)
    assert [choose(logits, (), place) for place in range(4)] == [3, 0, 3, 0]
    choose.tell(3, 8)
    assert choose(logits, (), 9) == 0
    choose.tell(7, 8)
    assert choose(logits, (), 9) == 3
    assert Choices(TokenIds(fork=3, child=4), (3,))(logits, (), 0) == 11


def test_a_sample_with_a_tree_becomes_its_spine_and_its_children() -> None:
    #                     0  1  2  3     4      5  6  7     8      9  10
    ids = np.array([1, 2, 9, FORK, CHILD, 7, 8, FORK, CHILD, 6, 5])
    parents = np.array([-1, 0, 1, 2, 3, 4, 3, 6, 7, 8, 7])
    learned = np.array([0, 0, 1, 1, 0, 1, 1, 1, 0, 1, 1], np.bool_)
    sample = Sample(1, ids, parents, learned)
    assert passages_of(sample, TokenIds(mask=(4,), fork=FORK, child=CHILD)) == [
        Passage((1, 2), (9, FORK, 8, FORK, 5)),
        Passage((1, 2, 9, FORK, CHILD), (7,), child=True),
        Passage((1, 2, 9, FORK, 8, FORK, CHILD), (6,), child=True),
    ]


def test_every_answer_of_a_chat_is_read_and_the_last_is_asked_for() -> None:
    chain = np.arange(-1, 5)
    chat = Sample(1, np.arange(10, 16), chain, np.array([0, 1, 0, 0, 1, 1], np.bool_))
    (found,) = given_answers(Prepared(whole=[chat]), [Conversation(1, (Turn("user", "a"),))], TokenIds())
    assert found.passages == (Passage((10,), (11,)), Passage((10, 11, 12, 13), (14, 15)))
    assert found.prompt == (10, 11, 12, 13)


@pytest.mark.parametrize(("size", "prompt"), [(7, 3), (63, 31), (100, 32)])
def test_the_beginning_of_a_plain_text_counts_as_its_prompt(size: int, prompt: int) -> None:
    learned = np.ones(size, np.bool_)
    learned[0] = False
    text = Sample(3, np.arange(size), np.arange(-1, size - 1), learned)
    (found,) = given_answers(Prepared(whole=[text]), [Conversation(3, (Turn("text", "a"),))], TokenIds())
    assert found.prompt == tuple(range(prompt))
    assert found.passages == (Passage(tuple(range(prompt)), tuple(range(prompt, size))),)


def forking(runtime: Runtime, fork: int) -> Runtime:
    """The runtime with an ordinary token taken for [Fork], so that its texts fork."""
    tokens = replace(runtime.bundle.manifest.tokens, fork=fork, child=CHILD)
    bundle = replace(runtime.bundle, manifest=replace(runtime.bundle.manifest, tokens=tokens))
    return Runtime(bundle, runtime.engine, runtime.max_seq_len)


# In the plain text the line break stands twice in a row; children would fork again at the other, were they let.
BREAK, OTHER = 203, 283


@pytest.mark.parametrize("mask_slots", [0, 2, 5])
@pytest.mark.parametrize("fork", [BREAK, OTHER])
def test_each_fork_of_a_spine_begets_a_child_that_continues_it(runtime: Runtime, fork: int, mask_slots: int) -> None:
    prompt = runtime.tokens_of(next(iter(PROMPTS.values())))
    forked = forking(runtime, fork)
    tokens = forked.bundle.manifest.tokens
    answer = write_answer(forked, prompt, 40, mask_slots)
    spine = answer.spine
    assert [child.fork for child in answer.children] == [i for i, token in enumerate(spine.tokens) if token == fork]
    assert answer.children
    # a runtime in which [Fork] counts as a mask never writes it
    unforked = replace(runtime.bundle.manifest.tokens, mask=(*runtime.bundle.manifest.tokens.mask, fork, CHILD))
    bundle = replace(runtime.bundle, manifest=replace(runtime.bundle.manifest, tokens=unforked))
    alone = Runtime(bundle, runtime.engine, runtime.max_seq_len)
    for child in answer.children:
        assert child.fork is not None
        assert child.prompt == (*prompt, *spine.tokens[: child.fork + 1], CHILD)
        room = len(prompt) + 40 - len(child.prompt)
        expected = alone.generate(child.prompt, Decoding(max_tokens=room, mask_slots=0)).tokens if room else ()
        assert child.text_tokens == expected
    assert fork not in answer.text_tokens
    assert len(answer.text_tokens) == len(spine.tokens) - len(answer.children) + sum(
        len(child.tokens) for child in answer.children
    )
    for line in answer.lines:
        if line.tokens and mask_slots:
            found = read_line(
                runtime.engine, tokens, line.prompt, line.tokens, mask_slots, (fork,) * (line is not spine)
            )
            assert tuple(found[:, 0]) == line.tokens
            assert count_steps(hits(found, line.tokens), mask_slots) == line.statistics.steps
    assert answer.steps <= answer.steps_one_by_one
    if not mask_slots:
        assert answer.steps == 40  # threads in step end when the longest path does


@pytest.mark.parametrize("mask_slots", [0, 5])
def test_no_fork_is_written_right_behind_a_fork(runtime: Runtime, mask_slots: int) -> None:
    prompt = runtime.tokens_of(next(iter(PROMPTS.values())))
    plain = runtime.generate(prompt, Decoding(max_tokens=40)).tokens
    twice = next(place for place in range(1, 40) if plain[place - 1 : place + 1] == (BREAK, BREAK))
    forked = forking(runtime, BREAK)
    assert write_answer(forked, prompt, 40, mask_slots).spine.tokens[twice] != BREAK
    assert write_answer(forked, (*prompt, *plain[:twice]), 4, mask_slots).spine.tokens[0] != BREAK


def test_own_threads_are_read_under_the_bans_that_they_were_written_under(runtime: Runtime) -> None:
    prompt = tuple(runtime.tokens_of(next(iter(PROMPTS.values()))))
    found = measure(forking(runtime, OTHER), [Given(1, prompt, ())], 40, 2)
    assert found.own.lines > 1
    assert found.own.accuracy[0] == 1.0
