"""Answer: what a model writes on a prompt by itself, with all the threads that it forks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from spaceport.graphs.contract.faults import OptionFault
from spaceport.graphs.contract.manifest import TokenIds
from spaceport.graphs.contract.signature import STEP_ROWS
from spaceport.runtime.decode.draft import Drafting
from spaceport.runtime.decode.request import Request, RequestConfig, VerifiedStep
from spaceport.runtime.decode.statistics import Statistics
from spaceport.runtime.decode.step import PREFILL_ROWS, StepInput, step
from spaceport.runtime.decode.threads import Ending, Thread
from spaceport.runtime.sampling.choice import Bans, Greedy
from spaceport.runtime.session import Runtime

SIDE_BY_SIDE = 64  # threads at the same time: more than an answer has
DEPTH = 1  # a child does not fork again, as in the answers that models are tuned on


@dataclass(frozen=True)
class AnswerThread:
    """One thread of an answer."""

    prompt: tuple[int, ...]  # all that stands before: a child's holds the spine up to its [Fork], and [Child]
    tokens: tuple[int, ...]  # its own, the end token included
    fork: int | None  # place in the spine's tokens of the [Fork] that it hangs from; nothing: the spine itself
    ending: Ending  # "end": its last token is an end token; "length": it was cut at max_tokens

    @property
    def text_tokens(self) -> tuple[int, ...]:
        """The own tokens without the end token."""
        return self.tokens[:-1] if self.ending == "end" else self.tokens


@dataclass(frozen=True)
class Answer:
    """The tree of threads: the spine, then its children in the order of their forks."""

    lines: tuple[AnswerThread, ...]
    statistics: Statistics

    @property
    def spine(self) -> AnswerThread:
        return self.lines[0]

    @property
    def children(self) -> tuple[AnswerThread, ...]:
        return self.lines[1:]

    @property
    def text_tokens(self) -> tuple[int, ...]:
        """The tokens in reading order: each child in the place of its [Fork], no control tokens."""
        children = {child.fork: child.text_tokens for child in self.children}
        found: list[int] = []
        for place, token in enumerate(self.spine.text_tokens):
            found.extend(children.get(place, (token,)))
        return tuple(found)


class _Ends:
    """The end token of each thread that has come to one; what a thread writes does not hold it."""

    def __init__(self, end: frozenset[int]) -> None:
        self.of: dict[tuple[int, ...], int] = {}
        self._end = end

    def on_step(self, verified: VerifiedStep) -> None:
        for part, verdict in zip(verified.plan.parts, verified.verdicts, strict=True):
            for token in verdict.tokens:
                if token in self._end:
                    self.of.setdefault(part.thread.path, token)


def write_answer(
    runtime: Runtime,
    prompt: Sequence[int],
    max_tokens: int,
    mask_slots: int,
    max_threads: int = SIDE_BY_SIDE,
    max_depth: int = DEPTH,
) -> Answer:
    """The model's greedy answer: `max_tokens` counts along a path, so no thread's text depends on another's length.

    How many threads write at the same time changes how many steps it takes; at depth 0 it is written in one line.
    """
    engine, tokens = runtime.engine, runtime.bundle.manifest.tokens
    limit = min(len(prompt) + max_tokens, runtime.max_seq_len)
    if len(prompt) >= limit:
        return Answer((AnswerThread(tuple(prompt), (), None, "length"),), Statistics(prompt_tokens=len(prompt)))
    ends = _Ends(frozenset(tokens.end))
    config = RequestConfig(
        tokens=tokens,
        selector=greedy_for(tokens, max_depth),
        max_length=limit,
        max_total=max(0, engine.capacity - 1 - STEP_ROWS - len(prompt)),
        drafting=Drafting(mask_slots, "chain"),
        max_rows=engine.rows,
        max_threads=max_threads,
        end=frozenset(tokens.end),
    )
    request = Request(prompt, config, engine.capacity, engine.signature.lowering, observers=(ends,))
    while request.live:
        step(engine, [StepInput(request, 0, min(PREFILL_ROWS, engine.rows))])
    if any(thread.ending == "total" for thread in request.threads):
        raise OptionFault(
            f"the threads of an answer have room for {config.max_total} tokens behind a prompt of {len(prompt)} and need "
            f"more: raise --max-seq-len (now {runtime.max_seq_len}) or lower --max-tokens (now {max_tokens})"
        )
    return Answer(tuple(_line(thread, len(prompt), ends.of) for thread in request.threads), request.statistics)


def greedy_for(tokens: TokenIds, max_depth: int = DEPTH) -> Greedy:
    """Greedy decoding of a model that may fork this deep."""
    return Greedy(Bans(frozenset(tokens.forbidden), tokens.fork, tokens.child, max_depth))


def _line(thread: Thread, prompt: int, ends: dict[tuple[int, ...], int]) -> AnswerThread:
    """A thread that has ended, behind a prompt of so many tokens."""
    assert thread.ending is not None
    own = (*thread.written, *((ends[thread.path],) if thread.ending == "end" else ()))
    fork = None if thread.fork is None else thread.fork - prompt
    return AnswerThread(tuple(thread.tokens[: thread.start]), own, fork, thread.ending)
