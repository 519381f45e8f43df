"""The sequences of one request while they are decoded: what they feed in each step, and what they keep of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import InitVar, dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from spaceport.graphs.contract.manifest import TokenIds
from spaceport.graphs.contract.signature import STEP_ROWS, Lowering
from spaceport.runtime.decode.draft import PLAIN, Draft, DraftConfig
from spaceport.runtime.decode.plan import NO_ROWS, Part, Verdict, plan_thread
from spaceport.runtime.decode.planner import ChainDrafter, Drafter, SharedCall, Sharing
from spaceport.runtime.decode.sequence import (
    Ending,
    KvPrefix,
    Listener,
    Slots,
    TokenSelector,
    TokenSequence,
    kv_prefix,
    root_sequence,
)
from spaceport.runtime.engine import NO_MOVES, PREFILL_ROWS, Moves

GROUP_ENDINGS: tuple[Ending, ...] = ("cancelled", "deadline", "total")  # of all threads at once
MOST_STEPS = 4096  # decode steps that are counted one by one


@dataclass
class Statistics:
    """Counts and times of a request so far; a step in which the request failed adds its time only.

    - `prompt_tokens`: Number of prompt tokens.
    - `cached_tokens`: Number of prompt tokens whose KV rows were reused from the prefix cache.
    - `prompt_steps`: Prefill steps: they fed a part of the prompt and generated nothing.
    - `steps`: Decode steps: they generated at least one token.
    - `tokens`: Generated tokens of all threads.
    - `rows`: Rows of all steps, without padding.
    - `candidate_rows`: Of these, rows of candidates.
    - `mask_rows`: Of these, mask rows; all others are known tokens.
    - `padding_rows`: Rows that were computed beside them, since a call computes equally many for each of its requests.
    - `drafted_by_step`: Draft tokens that were fed in each decode step; of the first 4,096 steps only.
    - `accepted_by_step`: Accepted draft tokens of each of these steps.
    - `drafted_by_depth`: Draft tokens that were fed, by depth in the draft.
    - `accepted_by_depth`: Accepted draft tokens, by depth in the draft.
    - `drafted_by_source`: Draft tokens that were fed, by source: "mask", "head", "lookup" or "phrase", and "mask+lookup" of
      tokens that both propose.
    - `accepted_by_source`: Accepted draft tokens, by source.
    - `drafts_limited`: Steps in which a thread's draft was narrower than its limits allow, by reason: "budget",
      "not_worth_it", "no_candidates", "grammar", "end_of_text", "row_limit" or "shared_call".
    - `threads`: Number of threads.
    - `peak_threads`: Maximum number of threads that decoded in one step.
    - `peak_slots`: Maximum number of KV slots in use.
    - `waiting_seconds`: Seconds in the queue, from the submission to the first step.
    - `engine_seconds`: Seconds in engine calls that the request took part in.
    - `outside_seconds`: Seconds between these calls, in Python code.
    - `first_token_seconds`: Time to first token: seconds from the submission, the queue included.
    - `seconds`: Seconds from the submission to the last step, the queue included.
    """

    prompt_tokens: int = 0
    cached_tokens: int = 0
    prompt_steps: int = 0
    steps: int = 0
    tokens: int = 0
    rows: int = 0
    candidate_rows: int = 0
    mask_rows: int = 0
    padding_rows: int = 0
    drafted_by_step: list[int] = field(default_factory=list, repr=False)
    accepted_by_step: list[int] = field(default_factory=list, repr=False)
    drafted_by_depth: list[int] = field(default_factory=list)
    accepted_by_depth: list[int] = field(default_factory=list)
    drafted_by_source: dict[str, int] = field(default_factory=dict)
    accepted_by_source: dict[str, int] = field(default_factory=dict)
    drafts_limited: dict[str, int] = field(default_factory=dict)
    threads: int = 1
    peak_threads: int = 1
    peak_slots: int = 0
    waiting_seconds: float = 0.0
    engine_seconds: float = 0.0
    outside_seconds: float = 0.0
    first_token_seconds: float = 0.0
    seconds: float = 0.0

    @property
    def tokens_per_step(self) -> float:
        """Generated tokens of all threads per decode step."""
        return self.tokens / self.steps if self.steps else 0.0

    @property
    def acceptance_rate(self) -> float:
        """Accepted draft tokens / draft tokens, siblings included; 0 without drafts."""
        drafted = sum(self.drafted_by_depth)
        return sum(self.accepted_by_depth) / drafted if drafted else 0.0

    @property
    def mean_acceptance_length(self) -> float | None:
        """1 + accepted draft tokens / decode steps; None with several threads, which share their steps."""
        if self.threads > 1 or not self.steps:
            return None
        return 1 + sum(self.accepted_by_depth) / self.steps

    @property
    def tokens_per_second(self) -> float:
        """Generated tokens of all threads per second from the first step to the last one, prefill included."""
        running = self.seconds - self.waiting_seconds
        return self.tokens / running if running > 0 else 0.0

    def add_step(self, step: RequestStep, written: Sequence[int], held: int) -> None:
        """Count a step; `written` is the number of tokens that each part generated, `held` the KV slots in use."""
        self.rows += step.rows
        self.peak_slots = max(self.peak_slots, held)
        self.peak_threads = max(self.peak_threads, len(step.parts))
        writes, drafted, accepted = False, 0, 0
        for part, verdict, count in zip(step.parts, step.verdicts, written, strict=True):
            writes = writes or bool(verdict.tokens)
            if (reason := part.draft.limited) is not None:
                self.drafts_limited[reason] = self.drafts_limited.get(reason, 0) + 1
            self.tokens += count
            self.mask_rows += part.layout.mask_rows.size
            if part.layout.drafted:
                drafted += part.layout.candidates.size
                kept = min(count, verdict.accepted)
                accepted += kept
                self._add_drafts(part, verdict, kept)
        self.candidate_rows += drafted
        if writes and len(self.drafted_by_step) < MOST_STEPS:
            self.drafted_by_step.append(drafted)
            self.accepted_by_step.append(accepted)
        self.steps += writes
        self.prompt_steps += not writes

    def _add_drafts(self, part: Part, verdict: Verdict, accepted: int) -> None:
        drafted = part.layout.drafted
        missing = len(drafted) - len(self.drafted_by_depth)
        if missing > 0:
            self.drafted_by_depth += [0] * missing
            self.accepted_by_depth += [0] * missing
        for depth, count in enumerate(drafted):
            self.drafted_by_depth[depth] += count
        for depth in range(accepted):
            self.accepted_by_depth[depth] += 1
        for counts, sources in (
            (self.drafted_by_source, part.draft.sources),
            (self.accepted_by_source, verdict.sources[:accepted]),
        ):
            for source in sources:
                counts[source] = counts.get(source, 0) + 1


class RequestStep:
    """One step of a request: scheduled with its rows and their KV slots, then verified."""

    # once scheduled:
    parts: Sequence[Part] = ()  # the rows of each live thread
    rows = 0
    tokens: NDArray[np.int64] = NO_ROWS
    positions: NDArray[np.int64] = NO_ROWS
    slots: NDArray[np.int64] = NO_ROWS
    logit_rows: NDArray[np.int64] = NO_ROWS  # the rows whose logits are needed
    # once verified, before rows are kept or freed:
    verdicts: Sequence[Verdict] = ()  # on each part
    engine_seconds = 0.0  # of the call that the step was part of
    # for observers only, logits until the next engine call:
    logits: Sequence[NDArray[np.float32]] = ()  # of the wanted rows of each part
    head_logits: Sequence[NDArray[np.float32]] = ()  # of the same rows: rows x heads x vocabulary
    held = 0  # KV slots in use during the step
    queued: Sequence[TokenSequence] = ()  # threads that waited during the step
    outside_seconds = 0.0  # spent on earlier steps of the request outside the engine

    def __init__(self, sequences: SequenceGroup, engine_index: int = 0, prefill_rows: int = PREFILL_ROWS) -> None:
        self.sequences = sequences
        self.engine_index = engine_index  # index of its KV buffers in the engine
        self.prefill_rows = prefill_rows  # maximum known tokens of a thread to feed


class Observer(Protocol):
    """Receives every step of a request with its verdicts, and with its logits unless its `needs_logits` is False."""

    def on_step(self, step: RequestStep) -> None:
        """Called once for each verified step; observers may run in any order."""


@dataclass(eq=False, kw_only=True, repr=False)
class SequenceGroup:
    """The sequences of one request: its root thread and all child threads, with their KV slots and statistics."""

    prompt: InitVar[Sequence[int]]
    capacity: InitVar[int]  # KV slots
    lowering: InitVar[Lowering]
    tokens: TokenIds
    selector: TokenSelector
    max_length: int  # maximum tokens of a thread, the prompt and its ancestors' tokens included
    max_total: int  # maximum new tokens of all threads; 0: it ends after prefill
    draft_config: DraftConfig = field(default_factory=DraftConfig)
    drafter: Drafter = field(default_factory=lambda: ChainDrafter(DraftConfig()))
    max_rows: int | None = None  # maximum rows of a step on this engine; None: any number
    max_threads: int = 1  # maximum threads that decode at the same time; the others wait
    echo: int | None = None  # position of the first prompt token whose logits observers get
    end: frozenset[int] = frozenset()  # tokens that end a thread, its ending is "end"
    stop: frozenset[int] = frozenset()  # tokens of the caller that end a thread, its ending is "stop"
    cache_salt: str | None = None  # requests of one salt reuse each other's KV rows; None: it reuses and leaves none
    listener: Listener = field(default_factory=Listener)
    observers: Sequence[Observer] = ()

    threads: list[TokenSequence] = field(init=False)  # all threads, also ended ones
    live: list[TokenSequence] = field(init=False)  # threads in the next step
    queue: list[TokenSequence] = field(init=False, default_factory=list)  # threads that wait for one of these to end
    slots: Slots = field(init=False)
    statistics: Statistics = field(init=False)
    prefilling: bool = field(
        init=False, default=True
    )  # it has generated nothing yet: its next step feeds a prefill chunk
    added: int = field(init=False, default=0)  # tokens after the prompt in all threads, each [Child] included
    prefix: KvPrefix | None = field(init=False, default=None)  # what later requests may reuse, once it has ended
    selects: bool = field(init=False)  # whether the best tokens of each row are enough, without all logits

    def __post_init__(self, prompt: Sequence[int], capacity: int, lowering: Lowering) -> None:
        root = root_sequence(prompt, capacity)
        self.threads, self.live = [root], [root]
        self.slots = Slots(capacity, lowering)
        self.statistics = Statistics(prompt_tokens=len(prompt))
        self.selects = getattr(self.selector, "selects", False) and not (
            self.echo is not None or any(getattr(observer, "needs_logits", True) for observer in self.observers)
        )
        self._most_rows = STEP_ROWS  # of a step of several threads

    @property
    def ending(self) -> Ending | None:
        """Why it ended: what ended all of its threads at once, else the ending of the root thread; None: it has not."""
        if self.live or self.queue:
            return None
        endings = [thread.ending for thread in self.threads]
        return next((ending for ending in endings if ending in GROUP_ENDINGS), endings[0])

    @property
    def silent_rows(self) -> int:
        """Number of prompt rows before the first one whose logits are needed."""
        root, echo = self.threads[0], self.echo
        return max(0, (len(root.tokens) if echo is None else echo) - root.fed)

    @property
    def reusable(self) -> list[int]:
        """The first prompt tokens whose rows need not be computed: no logits of them are needed."""
        root, echo = self.threads[0], self.echo
        return root.tokens[: root.start - 1 if echo is None else echo]

    def reuse(self, count: int) -> None:
        """Start behind the first prompt tokens, whose rows are in the lowest KV slots already."""
        root = self.threads[0]
        root.visible[self.slots.allocate(np.arange(count))] = True
        root.fed = self.statistics.cached_tokens = count

    def draft(self, prefill_rows: int, call: SharedCall | None = None) -> list[Draft]:
        """The drafts of the live threads; in a call with other requests, a single thread gets the rows that they agree on."""
        sharing = Sharing(len(self.live), self.slots.height, call)
        return [self._draft(thread, prefill_rows, sharing) for thread in self.live]

    def plan(self, prefill_rows: int, drafts: Sequence[Draft]) -> Sequence[Part]:
        """The rows of the next step for every live thread, each with at most `prefill_rows` known tokens."""
        if len(self.threads) == 1:
            return (plan_thread(self.live[0], drafts[0], self.tokens, prefill_rows, None, self.echo),)
        parts: list[Part] = []
        first = 0
        feeding: dict[tuple[int, ...], int] = {}  # path of a thread that feeds one known token -> its row
        for thread, draft in zip(self.live, drafts, strict=True):
            waits_for_fork = thread.fork is not None and thread.fed <= thread.fork
            anchor = feeding.get(thread.path[:-1]) if waits_for_fork else None
            part = plan_thread(thread, draft, self.tokens, prefill_rows, anchor, self.echo)
            if len(thread.tokens) - thread.fed == 1:
                feeding[thread.path] = first
            first += part.layout.rows
            parts.append(part)
        return parts

    def commit(self, step: RequestStep) -> Moves:
        """Keep the slots of accepted rows, free the others, and append the tokens; returns the slots to move."""
        slots, held, end = self.slots, self.slots.held, 0
        kept: list[NDArray[np.int64]] = []
        generated: list[int] = []
        for part, verdict in zip(step.parts, step.verdicts, strict=True):
            begin, end = end, end + part.layout.rows
            own = step.slots[begin:end]
            if len(verdict.retained) < own.size:
                rejected = np.ones(own.size, np.bool_)
                rejected[list(verdict.retained)] = False
                slots.free(own[rejected])
                own = own[~rejected]
            part.thread.visible[own] = True
            part.thread.fed = int(part.positions[0]) + own.size
            if part.thread.forks:
                self._share(part, own)
            generated.append(self._append(part, verdict, own) if verdict.tokens else 0)
            kept.append(own)
        self.statistics.add_step(step, generated, held)
        if len(self.threads) > 1 or part.thread.ending is not None or self.added >= self.max_total:
            self._advance_queue()
        return NO_MOVES if slots.lowering == "scatter" or not self.live else self._compact(np.concatenate(kept))

    def limit_rows(self, rows: int) -> None:
        """Limit the rows of a step of several threads; threads beyond that wait. The output is the same."""
        self._most_rows = max(1, min(rows, STEP_ROWS))
        if len(self.live) > self._most_rows:
            self.queue[:0] = self.live[self._most_rows :]
            del self.live[self._most_rows :]

    def finish(self, ending: Ending) -> None:
        """End every thread at its current token."""
        for thread in (*self.live, *self.queue):
            self._end(thread, ending)
        self._advance_queue()

    def abandon(self) -> None:
        """Release all slots of a request that failed, without reporting its threads as ended."""
        self.live, self.queue = [], []
        self.slots.clear()

    def _draft(self, thread: TokenSequence, prefill_rows: int, sharing: Sharing) -> Draft:
        most = STEP_ROWS if len(self.live) == 1 else self._most_rows
        rows = max(1, most // len(self.live))
        if self.max_rows is not None:  # the last prompt rows and the draft share the limit
            known = min(len(thread.tokens) - thread.fed, prefill_rows)
            rows = max(1, min(rows, self.max_rows // len(self.live) - known + 1))
        remaining = min(self.max_length - len(thread.tokens), self.max_total - self.added)
        return self.drafter.draft(thread, remaining, rows, sharing)

    def _share(self, part: Part, own: NDArray[np.int64]) -> None:
        """Share the rows of a [Fork] that a thread has fed with the child threads that wait for them."""
        thread, begin = part.thread, int(part.positions[0])
        for child in (*self.live, *self.queue):
            if child.path[:-1] == thread.path and child.fork is not None and begin <= child.fork == child.fed:
                slot = own[child.fork - begin : child.fork - begin + 1]
                self.slots.share(slot)
                child.visible[slot] = True
                child.fed += 1

    def _append(self, part: Part, verdict: Verdict, own: NDArray[np.int64]) -> int:
        """Append tokens one by one, so that limits apply as in plain decoding; returns the number appended."""
        thread = part.thread
        if part.draft is not PLAIN:
            self.drafter.learn(part, verdict)  # before the candidates that the draft was made from are replaced
        thread.candidates = verdict.candidates
        drafted, sources, count = len(verdict.tokens) - 1, verdict.sources, 0
        for index, token in enumerate(verdict.tokens):
            if thread.ending is not None or self.added >= self.max_total:
                break
            if token in self.end or token in self.stop:
                self._end(thread, "end" if token in self.end else "stop")
                break
            accepted = index < drafted
            thread.tokens.append(token)
            thread.drafted.append(accepted)
            self.added += 1
            count += 1
            source = sources[index] if index < len(sources) else None
            stops = self.listener.on_token(thread, token, accepted, source)
            if token == self.tokens.fork and not stops and self.added < self.max_total:
                self._fork(thread, own[part.layout.known + index + 1 :])
            if stops:
                self._end(thread, "stop")
            elif len(thread.tokens) >= self.max_length:
                self._end(thread, "length")
        self.prefilling = False
        return count

    def _fork(self, parent: TokenSequence, unseen: NDArray[np.int64]) -> None:
        """Start the child thread at a parent's last token; it does not see the parent's rows after that."""
        assert self.tokens.child is not None
        child = parent.child(len(parent.tokens) - 1, self.tokens.child, unseen)
        self.slots.share(child.held)
        self.added += 1
        self.threads.append(child)
        self.queue.append(child)
        self.statistics.threads = len(self.threads)
        self.listener.on_fork(parent, child)
        if len(child.tokens) >= self.max_length:
            self._end(child, "length")

    def _advance_queue(self) -> None:
        """Remove the threads that have ended, and start queued ones instead."""
        if not self.prefilling and self.added >= self.max_total:
            for thread in (*self.live, *self.queue):
                self._end(thread, "total")
        if len(self.threads) > 1:
            for thread in (*self.live, *self.queue):
                if thread.ending is None and self.listener.is_cut_off(thread):
                    self._end(thread, "stop")
            self.queue = [thread for thread in self.queue if thread.ending is None]
        self.live = [thread for thread in self.live if thread.ending is None]
        while self.queue and len(self.live) < min(self.max_threads, self._most_rows):
            self.live.append(self.queue.pop(0))

    def _end(self, thread: TokenSequence, ending: Ending) -> None:
        if thread.ending is None:
            thread.ending = ending
            if self.cache_salt is not None:
                # that of the last thread to end remains: it holds its slots until then
                self.prefix = kv_prefix(thread, self.slots)
            self.slots.free(thread.held)
            thread.visible[:] = False
            thread.draft_state.clear()  # the index of prompt lookup takes 300 bytes per token, until all is read
            self.listener.on_end(thread)

    def _compact(self, kept: NDArray[np.int64]) -> Moves:
        """The moves that put the rows of an append engine that were kept into the lowest slots."""
        moves = self.slots.compact(self.slots.still_held(kept))
        if moves[0].size:
            for thread in (*self.live, *self.queue):
                thread.move(*moves)
        return moves
