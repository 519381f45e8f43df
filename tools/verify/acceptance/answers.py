"""Answers: a model's greedy completion of a prompt, with the child threads that it forks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from spaceport.graphs.contract.faults import OptionFault
from spaceport.graphs.contract.manifest import TokenIds
from spaceport.graphs.contract.signature import STEP_ROWS
from spaceport.runtime.costs import relative_costs
from spaceport.runtime.decode.planner import DraftPlanner, drafter_for
from spaceport.runtime.decode.sequence import Ending, TokenSequence
from spaceport.runtime.decode.sequence_group import SequenceGroup, Statistics, VerifiedStep
from spaceport.runtime.decode.step import StepInput, step
from spaceport.runtime.decoding import Decoding
from spaceport.runtime.engine import PREFILL_ROWS
from spaceport.runtime.sampling.choice import Bans, Greedy
from spaceport.runtime.session import Runtime

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
