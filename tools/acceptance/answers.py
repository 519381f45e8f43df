"""Answer: what a model writes on a prompt by itself, the threads of a forking one written one after the other."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from spaceport.graphs.manifest import TokenIds
from spaceport.runtime.engine import Engine
from spaceport.runtime.loop import step
from spaceport.runtime.request import Request, Statistics, new_thread
from spaceport.runtime.session import DEFAULT_CHUNK, Runtime
from spaceport.runtime.slots import Slots
from spaceport.runtime.threads import Ending, Thread
from spaceport.tools.acceptance.choices import Choices


@dataclass(frozen=True)
class Line:
    """One thread of an answer."""

    prompt: tuple[int, ...]  # all that stands before: a child's holds the spine up to its [Fork], and [Child]
    tokens: tuple[int, ...]  # its own, the end token included
    fork: int | None  # place in the spine's tokens of the [Fork] that it hangs from; nothing: the spine itself
    ending: Ending  # "end": its last token is an end token; "length": it was cut at max_tokens
    statistics: Statistics
    written_in: tuple[int, ...] = ()  # the step, from 1, that wrote each token but the end token

    @property
    def text_tokens(self) -> tuple[int, ...]:
        """The own tokens without the end token."""
        return self.tokens[:-1] if self.ending == "end" else self.tokens


@dataclass(frozen=True)
class Answer:
    """The tree of threads: the spine, then its children in the order of their forks."""

    lines: tuple[Line, ...]

    @property
    def spine(self) -> Line:
        return self.lines[0]

    @property
    def children(self) -> tuple[Line, ...]:
        return self.lines[1:]

    @property
    def text_tokens(self) -> tuple[int, ...]:
        """The tokens in reading order: each child in the place of its [Fork], no control tokens."""
        children = {child.fork: child.text_tokens for child in self.children}
        found: list[int] = []
        for place, token in enumerate(self.spine.text_tokens):
            found.extend(children.get(place, (token,)))
        return tuple(found)

    @property
    def steps(self) -> int:
        """Steps if all threads shared them: a child takes its first one right after that which wrote its [Fork]."""
        ends = [self.spine.statistics.steps]
        for child in self.children:
            assert child.fork is not None
            ends.append(self.spine.written_in[child.fork] + child.statistics.steps)
        return max(ends)

    @property
    def steps_one_by_one(self) -> int:
        """Steps that the threads took one after the other."""
        return sum(line.statistics.steps for line in self.lines)


def write_answer(runtime: Runtime, prompt: Sequence[int], max_tokens: int, mask_slots: int) -> Answer:
    """The model's greedy answer: `max_tokens` counts along a path, so no thread's text depends on another's length.

    The spine is written first. Each [Fork] in it begets a child, which sees the spine up to that [Fork], begins with
    [Child] and does not fork again.
    """
    tokens = runtime.bundle.manifest.tokens
    limit = min(len(prompt) + max_tokens, runtime.max_seq_len)
    spine = write_line(runtime, prompt, limit, mask_slots)
    if tokens.fork is None or tokens.child is None:
        return Answer((spine,))
    lines = [spine]
    for place, token in enumerate(spine.text_tokens):
        if token == tokens.fork:
            before = (*spine.prompt, *spine.tokens[: place + 1], tokens.child)
            lines.append(write_line(runtime, before, limit, mask_slots, place, (tokens.fork,)))
    return Answer(tuple(lines))


def write_line(
    runtime: Runtime,
    prompt: Sequence[int],
    limit: int,
    mask_slots: int,
    fork: int | None = None,
    banned: Collection[int] = (),
) -> Line:
    """One thread, up to `limit` tokens with its prompt; empty where the prompt leaves no room."""
    if len(prompt) >= limit:
        return Line(tuple(prompt), (), fork, "length", Statistics(prompt_tokens=len(prompt)))
    choices = Choices(runtime.bundle.manifest.tokens, banned)
    choices.tell(prompt[-1], len(prompt) - 1)
    request = request_for(runtime.engine, runtime.bundle.manifest.tokens, prompt, limit, mask_slots, choices)
    written_in: list[int] = []

    def hear(thread: Thread, token: int, drafted: bool) -> bool:
        written_in.append(request.statistics.steps)
        return False

    request.listener = hear
    while request.live:
        step(runtime.engine, [request])
    (thread,) = request.threads
    assert thread.ending is not None
    end = (choices[len(thread.tokens)],) if thread.ending == "end" else ()
    own = (*thread.written, *end)
    return Line(tuple(prompt), own, fork, thread.ending, request.statistics, tuple(written_in))


def request_for(
    engine: Engine, tokens: TokenIds, prompt: Sequence[int], limit: int, mask_slots: int, choices: Choices
) -> Request:
    """A request that is alone on its engine."""
    return Request(
        index=0,
        slots=Slots(engine.capacity, engine.signature.lowering),
        threads=[new_thread(prompt, engine.capacity)],
        tokens=tokens,
        choose=choices,
        listener=lambda thread, token, drafted: False,
        limit=limit,
        mask_slots=mask_slots,
        chunk=min(DEFAULT_CHUNK, engine.rows),
        end=frozenset(tokens.end),
        statistics=Statistics(prompt_tokens=len(prompt)),
    )
