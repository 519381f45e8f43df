"""Acceptance: counted steps equal the runtime's own, on every engine, for checkpoints and bundles."""

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

from spaceport.exporter.checkpoint import TokenFlags, open_checkpoint
from spaceport.graphs.contract.manifest import TokenIds
from spaceport.graphs.contract.mask_layout import MaskLayout
from spaceport.graphs.contract.signature import LOWERINGS, Lowering, visible_length
from spaceport.runtime.decoding import Decoding
from spaceport.runtime.engine import Batch
from spaceport.runtime.session import Runtime
from spaceport.tools.reference import checkpoint_runtime
from spaceport.tools.verify.acceptance.answers import generate_answer
from spaceport.tools.verify.acceptance.measure import measure
from spaceport.tools.verify.acceptance.predictions import NO_PREDICTION, predict_segment
from spaceport.tools.verify.acceptance.reference_answers import ReferenceAnswer, Segment
from spaceport.tools.verify.acceptance.tally import Tally, correct_predictions, count_steps
from support.hash_engine import CHILD as HASH_CHILD
from support.hash_engine import END, LAYOUTS, MASKS, Cell, HashEngine, Language, advance, request_for
from support.paths import TINY

PROMPTS: dict[str, str] = json.loads((TINY / "prompts.json").read_text("utf-8"))
CHILD = 631  # an embedding row of the tiny model that no text uses


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
def test_counted_steps_of_a_generated_answer_are_those_that_the_runtime_takes(runtime: Runtime, name: str) -> None:
    tokens = runtime.bundle.manifest.tokens
    prompt = runtime.tokens_of(PROMPTS[name])
    root = generate_answer(runtime, prompt, 96, 5).root
    predicted = predict_segment(runtime.engine, tokens, Segment(root.prefix, root.tokens), 5)
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


@settings(max_examples=100)
@given(
    prompt=st.lists(st.integers(0, END - 1), min_size=1, max_size=40) | st.just([1, 2, 3] * 45),
    answer=st.lists(st.integers(0, 2) | st.integers(0, END), min_size=1, max_size=40),
    mask_slots=st.integers(0, 6),
    masks=st.sampled_from((MASKS[:1], MASKS * 4)),
    fork=st.none() | st.integers(0, 2),
    child=st.booleans(),
    window=st.none() | st.integers(1, 30),
    layout=st.sampled_from(LAYOUTS),
    heads=st.sampled_from((0, 6)),
    rows=st.sampled_from((7, 40, 500)),
    seed=st.integers(0, 10**6),
    lowering=st.sampled_from(LOWERINGS),
)
def test_every_mask_slot_or_head_predicts_after_every_token(
    prompt: list[int],
    answer: list[int],
    mask_slots: int,
    masks: tuple[int, ...],
    fork: int | None,
    child: bool,
    window: int | None,
    layout: MaskLayout,
    heads: int,
    rows: int,
    seed: int,
    lowering: Lowering,
) -> None:
    language = Language(seed, 60, window=window, mask_layout=layout, heads=heads)
    engine = HashEngine(language, visible_length(len(prompt) + len(answer) + 8), 1, lowering)
    engine.rows = rows
    tokens = TokenIds(masks, fork, None if fork is None else HASH_CHILD, (END,))
    predicted = predict_segment(engine, tokens, Segment(tuple(prompt), tuple(answer), child), mask_slots, layout)
    cells: list[Cell] = []
    for token in prompt:
        cells.append(language.follow(cells, token))
    for index, token in enumerate(answer):
        here = {fork} if child or cells[-1].token == fork else set()
        ahead = {fork} if child else set()
        expected = [writable(language.logits(cells[-1].state), tokens, here)]
        expected += [writable(language.draft(cells, depth), tokens, ahead) for depth in range(mask_slots)]
        remaining = len(answer) - index  # tokens left to predict
        assert predicted[index].tolist() == [*expected[:remaining], *[NO_PREDICTION] * (1 + mask_slots - remaining)]
        cells.append(language.follow(cells, token))


def writable(logits: NDArray[np.float32], tokens: TokenIds, banned: set[int | None]) -> int:
    """The most probable token that may be generated."""
    allowed = [token for token in range(logits.size) if token not in banned | set(tokens.forbidden)]
    return max(allowed, key=lambda token: float(logits[token]))


class Recorder(HashEngine):
    """A fake engine that stores its input batches."""

    def run(self, batch: Batch) -> NDArray[np.float32]:
        self.batches = [*getattr(self, "batches", []), batch]
        return super().run(batch)


def test_several_mask_tokens_are_fed_in_their_order() -> None:
    engine = Recorder(Language(1), 64, 1)
    predict_segment(engine, TokenIds(MASKS, end=(END,)), Segment((1, 2), (3, 4, 5)), 2)
    assert [batch.input_ids.tolist() for batch in engine.batches] == [[[1, 2, 3, 4]], [[*MASKS, MASKS[0]]]]
    assert [batch.position_ids.tolist() for batch in engine.batches] == [[[0, 1, 2, 3]], [[2, 3, 3]]]


@settings(max_examples=100)
@given(
    mask_slots=st.integers(1, 6),
    quality=st.sampled_from((0, 50, 80, 100)),
    max_tokens=st.integers(1, 60),
    layout=st.sampled_from(LAYOUTS),
    seed=st.integers(0, 10**6),
    lowering=st.sampled_from(LOWERINGS),
)
def test_counted_steps_are_those_of_the_loop_for_any_quality_of_drafts(
    mask_slots: int, quality: int, max_tokens: int, layout: MaskLayout, seed: int, lowering: Lowering
) -> None:
    language = Language(seed, quality, mask_layout=layout)
    engine = HashEngine(language, visible_length(70 + 57), 1, lowering)
    request = request_for(engine, [1, 2, 3], max_tokens, mask_slots, masks=MASKS * 4)
    while request.live:
        advance(engine, request)
    (thread,) = request.threads
    answer = (*thread.generated, *((END,) if thread.ending == "end" else ()))
    predicted = predict_segment(engine, request.config.tokens, Segment((1, 2, 3), answer), mask_slots, layout)
    assert count_steps(correct_predictions(predicted, answer), mask_slots) == request.statistics.steps


def forking(runtime: Runtime, fork: int) -> Runtime:
    """The runtime with an ordinary token as its [Fork] token, so that its answers fork."""
    tokens = replace(runtime.bundle.manifest.tokens, fork=fork, child=CHILD)
    bundle = replace(runtime.bundle, manifest=replace(runtime.bundle.manifest, tokens=tokens))
    return Runtime(bundle, runtime.engine, runtime.max_seq_len)


# The plain answer has the line break twice in a row. At the other token children would fork again if they could.
BREAK, OTHER = 203, 283


@pytest.mark.parametrize("mask_slots", [0, 2, 5])
@pytest.mark.parametrize("fork", [BREAK, OTHER])
def test_each_fork_of_the_root_starts_a_child_that_continues_it(runtime: Runtime, fork: int, mask_slots: int) -> None:
    prompt = runtime.tokens_of(next(iter(PROMPTS.values())))
    answer = generate_answer(forking(runtime, fork), prompt, 40, mask_slots)
    root = answer.root
    assert [child.fork for child in answer.children] == [i for i, token in enumerate(root.tokens) if token == fork]
    assert answer.children
    # a runtime in which [Fork] is a mask token never generates it
    unforked = replace(runtime.bundle.manifest.tokens, mask=(*runtime.bundle.manifest.tokens.mask, fork, CHILD))
    bundle = replace(runtime.bundle, manifest=replace(runtime.bundle.manifest, tokens=unforked))
    alone = Runtime(bundle, runtime.engine, runtime.max_seq_len)
    for child in answer.children:
        assert child.fork is not None
        assert child.prefix == (*prompt, *root.tokens[: child.fork + 1], CHILD)
        remaining = len(prompt) + 40 - len(child.prefix)
        expected = ()
        if remaining:
            expected = alone.generate(child.prefix, Decoding(max_tokens=remaining, mask_slots=0)).tokens
        assert child.text_tokens == expected
    assert fork not in answer.text_tokens
    assert len(answer.text_tokens) == len(root.tokens) - len(answer.children) + sum(
        len(child.tokens) for child in answer.children
    )


@pytest.mark.parametrize("mask_slots", [0, 2, 5])
@pytest.mark.parametrize("fork", [BREAK, OTHER])
def test_concurrent_threads_generate_the_same_in_fewer_steps(runtime: Runtime, fork: int, mask_slots: int) -> None:
    prompt = runtime.tokens_of(next(iter(PROMPTS.values())))
    forked = forking(runtime, fork)
    concurrent = generate_answer(forked, prompt, 40, mask_slots)
    sequential = generate_answer(forked, prompt, 40, mask_slots, max_threads=1)
    assert concurrent.threads == sequential.threads
    counted = 0
    for thread in sequential.threads:
        if thread.tokens:
            segment = Segment(thread.prefix, thread.tokens, thread.fork is not None)
            predicted = predict_segment(runtime.engine, forked.bundle.manifest.tokens, segment, mask_slots)
            assert tuple(predicted[:, 0]) == thread.tokens
            counted += count_steps(correct_predictions(predicted, thread.tokens), mask_slots)
    assert sequential.statistics.steps == counted
    assert concurrent.statistics.steps < sequential.statistics.steps
    assert concurrent.statistics.peak_threads > sequential.statistics.peak_threads == 1
    if not mask_slots:
        assert concurrent.statistics.steps == 40  # concurrent threads end when the longest path does


@pytest.mark.parametrize("mask_slots", [0, 5])
def test_no_fork_directly_follows_a_fork(runtime: Runtime, mask_slots: int) -> None:
    prompt = runtime.tokens_of(next(iter(PROMPTS.values())))
    plain = runtime.generate(prompt, Decoding(max_tokens=40)).tokens
    twice = next(index for index in range(1, 40) if plain[index - 1 : index + 1] == (BREAK, BREAK))
    forked = forking(runtime, BREAK)
    assert generate_answer(forked, prompt, 40, mask_slots).root.tokens[twice] != BREAK
    assert generate_answer(forked, (*prompt, *plain[:twice]), 4, mask_slots).root.tokens[0] != BREAK


def test_generated_threads_are_measured_under_the_token_bans_of_their_generation(runtime: Runtime) -> None:
    prompt = tuple(runtime.tokens_of(next(iter(PROMPTS.values()))))
    found = measure(forking(runtime, OTHER), [ReferenceAnswer(1, prompt, ())], 40, 2)
    assert found.generated.segments > 1
    assert found.generated.accuracy[0] == 1.0
