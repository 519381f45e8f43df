"""Answers of a model and of a data file, and what mask slots or heads predict along them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from spaceport.graphs.contract.draft_methods import CAUSAL, CorrectionTables, MaskLayout
from spaceport.graphs.contract.faults import OptionFault
from spaceport.graphs.contract.manifest import TokenIds
from spaceport.graphs.contract.signature import STEP_ROWS
from spaceport.runtime.costs import relative_costs
from spaceport.runtime.decode.draft import PLAIN, best_chain
from spaceport.runtime.decode.plan import Part, Plan, lay_out
from spaceport.runtime.decode.planner import DraftPlanner, drafter_for
from spaceport.runtime.decode.sequence import Ending, TokenSelector, TokenSequence
from spaceport.runtime.decode.sequence_group import Observer, ScheduledStep, SequenceGroup, Statistics, VerifiedStep
from spaceport.runtime.decode.step import StepInput, pack, split, step
from spaceport.runtime.decoding import Decoding
from spaceport.runtime.engine import PREFILL_ROWS, Engine
from spaceport.runtime.sampling.choice import Bans, Corrected, Greedy
from spaceport.runtime.session import Runtime
from spaceport.tools.tune.conversations import TEXT, Conversation
from spaceport.tools.tune.samples import NO_PARENT, Prepared, Sample
from spaceport.tools.verify.plain_logits import EchoObserver, known_request, prefill

TEXT_PROMPT = 32  # tokens of a plain text that count as its prompt, at most


@dataclass(frozen=True)
class AnswerSegment:
    """Consecutive tokens of an answer, with everything before them."""

    prefix: tuple[int, ...]
    tokens: tuple[int, ...]
    child: bool = False  # the prefix ends with [Child]: a child thread, which may not fork


@dataclass(frozen=True)
class ReferenceAnswer:
    """The answers of one sample, and the prompt of the last one."""

    line: int  # line number in the data file
    prompt: tuple[int, ...]  # everything before the last answer
    segments: tuple[AnswerSegment, ...]


def reference_answers(
    prepared: Prepared, conversations: Sequence[Conversation], tokens: TokenIds
) -> list[ReferenceAnswer]:
    """The samples in file order; the first tokens of a plain text count as its prompt."""
    texts = {conversation.line for conversation in conversations if conversation.turns[0].role == TEXT}
    answers = []
    for sample in sorted((*prepared.forked, *prepared.whole), key=lambda sample: sample.line):
        segments = segments_of(sample, tokens)
        if sample.line in texts:
            segments = [_with_prompt(segment) for segment in segments]
        roots = [segment for segment in segments if not segment.child]
        answers.append(ReferenceAnswer(sample.line, roots[-1].prefix, tuple(segments)))
    return answers


def segments_of(sample: Sample, tokens: TokenIds) -> list[AnswerSegment]:
    """The chains of learned tokens: each begins after a token that is not learned (the prompt's last, or [Child])."""
    members: dict[int, list[int]] = {}  # index of a segment's first token -> indices of all its tokens
    first: dict[int, int] = {}  # index of a token -> index of its segment's first token
    for index in np.flatnonzero(sample.learned).tolist():
        first[index] = first.get(int(sample.parents[index]), index)
        members.setdefault(first[index], []).append(index)
    segments = []
    for start, indices in members.items():
        before = _path(sample, int(sample.parents[start]))
        child = tokens.child is not None and int(sample.ids[before[-1]]) == tokens.child
        segments.append(AnswerSegment(tuple(sample.ids[before].tolist()), tuple(sample.ids[indices].tolist()), child))
    return segments


def _path(sample: Sample, index: int) -> list[int]:
    """The indices from the first token to this one, parent by parent."""
    path = []
    while index != NO_PARENT:
        path.append(index)
        index = int(sample.parents[index])
    return path[::-1]


def _with_prompt(text: AnswerSegment) -> AnswerSegment:
    """A plain text whose first tokens, at most half of them, are its prompt."""
    whole = (*text.prefix, *text.tokens)
    cut = max(len(text.prefix), min(TEXT_PROMPT, len(whole) // 2))
    return AnswerSegment(whole[:cut], whole[cut:])


MAX_THREADS = 64  # concurrent threads of an answer; more than any answer forks
MAX_DEPTH = 1  # child threads do not fork again, as in the answers of training data


@dataclass(frozen=True)
class AnswerThread:
    """One thread of an answer."""

    prefix: tuple[int, ...]  # tokens before the thread's own; of a child: the root up to its [Fork], then [Child]
    tokens: tuple[int, ...]  # generated tokens, end token included
    fork: int | None  # index of the thread's [Fork] in the root's tokens; None for the root itself
    ending: Ending  # "end": the last token is an end token; "length": cut at max_tokens

    @property
    def text_tokens(self) -> tuple[int, ...]:
        """The generated tokens without the end token."""
        return self.tokens[:-1] if self.ending == "end" else self.tokens


@dataclass(frozen=True)
class Answer:
    """The threads of an answer: the root, then its children in the order of their forks."""

    threads: tuple[AnswerThread, ...]
    statistics: Statistics

    @property
    def root(self) -> AnswerThread:
        return self.threads[0]

    @property
    def children(self) -> tuple[AnswerThread, ...]:
        return self.threads[1:]

    @property
    def text_tokens(self) -> tuple[int, ...]:
        """The tokens in reading order, without control tokens: each child replaces its [Fork]."""
        children = {child.fork: child.text_tokens for child in self.children}
        tokens: list[int] = []
        for index, token in enumerate(self.root.text_tokens):
            tokens.extend(children.get(index, (token,)))
        return tuple(tokens)


class _EndTokens:
    """The end token of each thread that generated one: a thread does not store it."""

    def __init__(self, end: frozenset[int]) -> None:
        self.by_thread: dict[tuple[int, ...], int] = {}  # by thread path
        self._end = end

    def on_step(self, verified: VerifiedStep) -> None:
        for part, verdict in zip(verified.plan.parts, verified.verdicts, strict=True):
            for token in verdict.tokens:
                if token in self._end:
                    self.by_thread.setdefault(part.thread.path, token)


def generate_answer(
    runtime: Runtime,
    prompt: Sequence[int],
    max_tokens: int,
    mask_slots: int,
    max_threads: int = MAX_THREADS,
    max_depth: int = MAX_DEPTH,
) -> Answer:
    """The model's greedy answer, drafted by chains of mask slots or heads.

    `max_tokens` counts along the path from the prompt to a thread's last token, so no thread's text depends on the length of
    another. `max_threads` changes the number of steps, never the text. With `max_depth=0` the answer does not fork.
    """
    return generate_drafted(
        runtime, prompt, max_tokens, Decoding(mask_slots=mask_slots, draft="chain"), max_threads, max_depth
    )


def generate_drafted(
    runtime: Runtime,
    prompt: Sequence[int],
    max_tokens: int,
    decoding: Decoding,
    max_threads: int = MAX_THREADS,
    max_depth: int = MAX_DEPTH,
) -> Answer:
    """The model's greedy answer with the drafts of a Decoding, as wide as it allows; its other options are not used."""
    engine, tokens = runtime.engine, runtime.bundle.manifest.tokens
    limit = min(len(prompt) + max_tokens, runtime.max_seq_len)
    if len(prompt) >= limit:
        return Answer((AnswerThread(tuple(prompt), (), None, "length"),), Statistics(prompt_tokens=len(prompt)))
    ends = _EndTokens(frozenset(tokens.end))
    draft_config = decoding.draft_config(runtime.bundle.manifest.drafts, runtime.exactness.drafts)
    request = SequenceGroup(
        prompt=prompt,
        capacity=engine.capacity,
        lowering=engine.signature.lowering,
        tokens=tokens,
        selector=greedy_selector(tokens, max_depth),
        max_length=limit,
        max_total=max(0, engine.capacity - 1 - STEP_ROWS - len(prompt)),
        draft_config=draft_config,
        drafter=drafter_for(draft_config, DraftPlanner(relative_costs(0.0))),
        max_rows=engine.rows,
        max_threads=max_threads,
        end=frozenset(tokens.end),
        observers=(ends,),
    )
    while request.live:
        step(engine, [StepInput(request, 0, min(PREFILL_ROWS, engine.rows))])
    if any(thread.ending == "total" for thread in request.threads):
        raise OptionFault(
            f"the threads of an answer need more than the {request.max_total} tokens that fit after its prompt of "
            f"{len(prompt)}: raise --max-seq-len (now {runtime.max_seq_len}) or lower --max-tokens (now {max_tokens})"
        )
    threads = tuple(_answer_thread(thread, len(prompt), ends.by_thread) for thread in request.threads)
    return Answer(threads, request.statistics)


def greedy_selector(tokens: TokenIds, max_depth: int = MAX_DEPTH) -> Greedy:
    """Greedy token selection for a model that forks at most `max_depth` levels deep."""
    return Greedy(Bans(frozenset(tokens.forbidden), tokens.fork, tokens.child, max_depth))


def _answer_thread(thread: TokenSequence, prompt_tokens: int, ends: dict[tuple[int, ...], int]) -> AnswerThread:
    """The record of a thread that has ended."""
    assert thread.ending is not None
    generated = (*thread.generated, *((ends[thread.path],) if thread.ending == "end" else ()))
    fork = None if thread.fork is None else thread.fork - prompt_tokens
    return AnswerThread(tuple(thread.tokens[: thread.start]), generated, fork, thread.ending)


ROWS = 128  # rows per call: enough for efficient matrix products, few enough for small logits
NO_PREDICTION = -1


def predict_segment(
    engine: Engine,
    tokens: TokenIds,
    segment: AnswerSegment,
    mask_slots: int,
    mask_layout: MaskLayout = CAUSAL,
    max_seq_len: int = 0,
    correction: CorrectionTables | None = None,
) -> NDArray[np.int64]:
    """The greedy predictions along an answer: its tokens x (1 + mask slots); those of heads, if the engine has any.

    Entry (n, i) is what slot i predicts for token n + i of the answer, given only the tokens before token n. Slot 0 is the row
    of the token before; mask slot i has the position of token n + i - 1, or without shift of token n + i. Entries past the answer's end are NO_PREDICTION.
    A block is complete there too, up to position `max_seq_len`. With a draft correction, mask slot 1 predicts behind token n,
    and each other one behind the prediction of the one before.
    """
    sequence = [*segment.prefix, *segment.tokens]
    start, path = len(segment.prefix), (0,) if segment.child else ()
    selector = greedy_selector(tokens)
    predicted = np.full((len(segment.tokens), 1 + mask_slots), NO_PREDICTION, np.int64)

    def on_logits(_: int, position: int, logits: NDArray[np.float32]) -> None:
        before = TokenSequence(path, sequence[:position], start, np.zeros(engine.capacity, np.bool_), fed=position)
        predicted[position - start, 0] = selector.token(logits, before, ())

    observer: Observer = EchoObserver(0, start, on_logits)
    if engine.signature.lines > 1:
        observer = _HeadsObserver(observer, selector, sequence, start, path, predicted)
    request = known_request(engine, sequence[:-1], start, observer, stays=True)
    prefill(engine, request, ROWS)
    if not mask_slots or engine.signature.lines > 1:
        return predicted
    drafts = selector if correction is None else Corrected(selector, correction)
    masks = _MaskGroups(engine, request, tokens, mask_layout, drafts, sequence, start, path, max_seq_len)
    groups = max(1, masks.free_rows // mask_layout.rows(mask_slots))  # groups per call
    last = len(segment.tokens) - 1  # mask slots predict from the token after the next one: none is left at the last
    for first in range(0, last, groups):
        masks.predict(range(first, min(first + groups, last)), predicted)
    return predicted


@dataclass(frozen=True)
class _HeadsObserver:
    """Stores what the heads predict at each token of a sequence, and passes the steps on to another observer."""

    inner: Observer
    selector: TokenSelector
    sequence: Sequence[int]
    start: int  # position of the first predicted token
    path: tuple[int, ...]  # path of the thread that generates the sequence
    predicted: NDArray[np.int64]

    def on_step(self, verified: VerifiedStep) -> None:
        self.inner.on_step(verified)
        (part,), (lines,) = verified.plan.parts, verified.head_logits
        for row, heads in zip(part.rows_wanted.tolist(), lines, strict=True):
            position = int(part.positions[row]) + 1
            count = min(self.predicted.shape[1] - 1, len(self.sequence) - 1 - position)
            if position < self.start or count < 1:
                continue
            thread = TokenSequence(
                self.path, list(self.sequence[:position]), self.start, np.zeros(1, np.bool_), fed=position
            )
            candidates = self.selector.candidates(heads[:count], thread, position + 1, 1)
            self.predicted[position - self.start, 1 : 1 + count] = [candidate.tokens[0] for candidate in candidates]


@dataclass(frozen=True)
class _MaskGroups:
    """Groups of mask slots after the tokens of a sequence that is in the KV cache."""

    engine: Engine
    request: SequenceGroup
    tokens: TokenIds
    mask_layout: MaskLayout
    selector: TokenSelector
    sequence: Sequence[int]
    start: int  # position of the first predicted token
    path: tuple[int, ...]  # path of the thread that generates the sequence
    max_seq_len: int  # first position that no row may have

    @property
    def free_rows(self) -> int:
        """Rows that a call may have besides the cached tokens."""
        return min(ROWS, self.engine.rows, self.request.slots.spare - self.request.slots.height)

    def predict(self, indices: range, predicted: NDArray[np.int64]) -> None:
        """Store the predictions of the groups at these indices of the answer, and release their KV slots."""
        depth = predicted.shape[1] - 1
        plan = Plan(tuple(self._group(self.start + index, depth) for index in indices))
        slots = self.request.slots.take(plan.positions)
        logits = self.engine.run(pack(self.engine, [ScheduledStep(self.request, 0, plan, slots)]))[0]
        self.request.slots.release(slots)
        for index, part, own in zip(indices, plan.parts, split(plan, logits), strict=True):
            candidates = self.selector.candidates(own, part.thread, self.start + index + 1, 1)
            known = best_chain(candidates, self.sequence[self.start + index])[: self._known(self.start + index)]
            predictions = [candidate.tokens[0] for candidate in known]
            predicted[index, 1 : 1 + len(predictions)] = predictions

    def _group(self, position: int, depth: int) -> Part:
        """The mask rows from a position on, which see the sequence before it; of a block, also those past its end."""
        within = self.max_seq_len - position - self.mask_layout.lead if self.mask_layout.group == "block" else 0
        depth = min(depth, max(self._known(position), within))
        layout = lay_out(0, PLAIN.parents, (depth,), self.mask_layout)
        wanted = np.array(layout.groups[0], np.int64)
        masks = self.tokens.mask
        ids = np.array(masks[: layout.rows] if len(masks) > 1 else masks * layout.rows, np.int64)
        return Part(self._before(position), PLAIN, layout, ids, layout.offsets + position, wanted, complete=True)

    def _known(self, position: int) -> int:
        """The number of mask slots from a position on whose tokens the sequence has."""
        return len(self.sequence) - 1 - position

    def _before(self, position: int) -> TokenSequence:
        """The thread as it is before the token at a position is generated."""
        (root,) = self.request.threads
        sees = root.sees & (self.request.slots.positions < position)
        return TokenSequence(self.path, list(self.sequence[:position]), self.start, sees, fed=position)
