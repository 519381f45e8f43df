"""The one state machine of requests: whatever happens in whatever order, each passes its states once and ends once."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, get_args

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from spaceport.graphs.contract.signature import LOWERINGS, Lowering
from spaceport.runtime.decoding import Decoding
from spaceport.runtime.engine import Batch, EngineFault
from spaceport.runtime.scheduling.request import Outcome, Request, State
from spaceport.runtime.scheduling.request_queue import QueueFull
from spaceport.runtime.scheduling.scheduler import Scheduler
from spaceport.runtime.scheduling.worker import RuntimeClosed
from spaceport.runtime.text.transcript import Piece
from support.hash_engine import END, HashEngine, Language
from support.hash_runtime import hash_runtime

STATES = get_args(State)  # in their order; a round can take a short request through all of them
SLOW = 3  # events that a slow reader leaves unread


def fail(batch: Batch) -> None:
    raise EngineFault("the fake engine failed")


@dataclass(eq=False)
class Seen:
    """What a test knows about a request."""

    request: Request
    prompt: list[int]
    state: State = "waiting"
    asked: Outcome | None = None  # the first wish to end it
    outcome: Outcome | None = None
    slow: bool = False
    begun: bool = False
    ends: int = 0  # how often its reader was told that it is done
    pieces: list[Piece] = field(default_factory=list)

    def read(self) -> None:
        while pieces := self.request.read():
            self.pieces += pieces


class RequestMachine(RuleBasedStateMachine):
    """Requests on one scheduler, without OS threads."""

    seen = Bundle("seen")

    @initialize(
        seed=st.integers(0, 99),
        fork_every=st.sampled_from((6, 10**9)),
        requests=st.integers(1, 3),
        lowering=st.sampled_from(LOWERINGS),
        queue_limit=st.integers(0, 2),
    )
    def open(self, seed: int, fork_every: int, requests: int, lowering: Lowering, queue_limit: int) -> None:
        self.language = Language(seed, 70, end_every=30, fork_every=fork_every)
        with hash_runtime(self.language, 40, 200, requests, lowering) as runtime:
            self.admission = runtime._admission
            self.engine = HashEngine(self.language, runtime.engine.capacity, requests, lowering)
        self.scheduler = Scheduler(self.engine, queue_limit, prompt_rows=4)
        self.all: list[Seen] = []
        self.closed = False

    @rule(
        target=seen,
        prompt=st.lists(st.integers(0, END - 1), min_size=1, max_size=12),
        max_tokens=st.sampled_from((1, 5, 25)),
        max_threads=st.integers(1, 3),
        stop=st.sampled_from(("", "", "a", "bc")),
        slow=st.booleans(),
        prepared=st.sampled_from((True, True, False)),
    )
    def submit(
        self, prompt: list[int], max_tokens: int, max_threads: int, stop: str, slow: bool, prepared: bool
    ) -> Seen:
        options: dict[str, Any] = {"stop": stop, "fork": False} if stop else {"fork": True, "max_threads": max_threads}
        seen = Seen(Request(prompt, Decoding(max_tokens=max_tokens, **options)), prompt, slow=slow)
        waiting, free = self.waiting(), len(self.scheduler.buffers)
        try:
            self.scheduler.enter(seen.request)
        except QueueFull:
            assert len(waiting) >= self.scheduler.queue.limit + free
            return seen  # refused: it takes part in nothing
        assert len(waiting) < self.scheduler.queue.limit + free
        if slow:
            seen.request.unread_limit = SLOW

        def on_change() -> None:
            seen.ends += seen.request.done

        seen.request.on_change = on_change
        self.all.append(seen)
        if prepared:
            self.prepare(seen)
        return seen

    @rule(seen=seen)
    def prepare(self, seen: Seen) -> None:
        if seen.begun or seen not in self.all:
            return
        seen.begun = True
        sequences = self.admission.prepare(seen.request)
        assert (sequences is None) == (seen.asked is not None)
        if sequences is None:
            self.scheduler.queue.leave(seen.request)
            seen.request.end()
            assert seen.request.outcome is seen.asked
        else:
            self.scheduler.submit(seen.request, sequences)

    @rule(seen=seen, cancels=st.lists(st.booleans(), min_size=1, max_size=2))
    def end(self, seen: Seen, cancels: list[bool]) -> None:
        """A reader cancels a request, or fails, or both."""
        if seen not in self.all:
            return
        for cancel in cancels:
            before, wish = seen.request.outcome, "cancelled" if cancel else ValueError("of a reader")
            seen.request.end(wish)
            if seen.asked is None and before is None:
                seen.asked = wish
            if before is not None:
                assert seen.request.outcome is before
            elif seen.request.prepared:
                assert not seen.request.done, "only the scheduler ends what it has"
            else:
                assert seen.request.outcome is seen.asked

    @rule(seen=seen)
    def forget(self, seen: Seen) -> None:
        """A reader is garbage: it sets its wish without a lock."""
        if seen in self.all and seen.request.asked is None:
            seen.request.asked = "cancelled"
            if not seen.request.done:
                seen.asked = "cancelled"

    @rule()
    def read(self) -> None:
        for seen in self.all:
            seen.read()
            assert not seen.request.paused

    @rule(count=st.integers(1, 4))
    def rounds(self, count: int) -> None:
        for _ in range(count):
            steps = {seen: seen.request.statistics.steps for seen in self.all}
            due = [seen for seen in self.all if seen.request.prepared and not seen.request.done]
            paused = [seen for seen in due if seen.slow and seen.request.paused]
            decoding = [seen for seen in due if seen.request.state == "decoding" and not seen.request.paused]
            self.scheduler.round()
            for seen in due:
                if seen.asked is not None:
                    assert seen.request.done, "an end that was asked for takes longer than a step"
                    assert seen.request.outcome is seen.asked
            for seen in paused:
                assert seen.request.statistics.steps == steps[seen], "a request goes on although its reader does not"
            for seen in decoding:
                if seen.asked is None:
                    assert seen.request.statistics.steps == steps[seen] + 1, "a request takes no step in a round"

    @rule()
    def fail_in_a_call(self) -> None:
        self.engine.before = fail
        running = [seen for seen in self.all if seen.request.state == "decoding" and not seen.request.paused]
        self.scheduler.round()
        self.engine.before = None
        for seen in running:
            assert seen.request.done
            assert seen.asked is not None or isinstance(seen.request.error, EngineFault)

    @rule(seen=consumes(seen))
    def close(self, seen: Seen) -> None:
        error = RuntimeClosed("closed")
        for request in self.scheduler.queue.preparing():
            request.end(error)
        self.scheduler.fail(error)
        for other in self.all:
            assert other.request.done
            other.asked = other.asked or error
            if other.outcome is None:
                assert other.request.outcome in (error, other.asked)

    @precondition(lambda self: bool(self.all))
    @invariant()
    def states_follow_each_other_and_ends_are_final(self) -> None:
        for seen in self.all:
            request = seen.request
            assert STATES.index(request.state) >= STATES.index(seen.state)
            seen.state = request.state
            if seen.outcome is not None:
                assert request.outcome is seen.outcome
            seen.outcome = request.outcome
            assert seen.ends == request.done
            assert request.done == (request.outcome is not None)
            if request.done and request.prepared:
                assert request.sequences.slots.held == 0
                assert not request.sequences.live
            if request.done and not request.prepared:
                assert request.outcome is seen.asked
        running = [seen.request.index for seen in self.all if seen.request.state in ("prefill", "decoding")]
        assert len(set(running)) == len(running) == self.engine.requests - len(self.scheduler.buffers)
        assert len(self.scheduler.queue) == len(self.waiting())

    @precondition(lambda self: bool(self.all))
    @invariant()
    def texts_are_those_of_plain_decoding(self) -> None:
        for seen in self.all:
            if not seen.request.done or seen.request.error is not None or not seen.request.prepared:
                continue
            seen.read()
            completion = seen.request.completion()
            assert "".join(piece.reading for piece in seen.pieces) == completion.text
            decoding = seen.request.decoding
            limit = len(seen.prompt) + (decoding.max_tokens or 0)
            alone = self.language.tree(seen.prompt, limit, 0 if decoding.stops else decoding.max_depth)
            for thread in completion.threads:
                tokens = list(thread.tokens)
                assert tokens == alone[thread.path][: len(tokens)]
                assert tokens == alone[thread.path] or thread.ending not in ("end", "length")

    def teardown(self) -> None:
        if not hasattr(self, "all"):
            return
        for seen in self.all:
            self.prepare(seen)
            seen.slow, seen.request.unread_limit = False, 10**6
        for _ in range(400):
            if self.scheduler.busy:
                self.rounds(1)
        self.states_follow_each_other_and_ends_are_final()
        self.texts_are_those_of_plain_decoding()
        assert all(seen.request.done for seen in self.all)
        assert len(self.scheduler.buffers) == self.engine.requests
        assert self.scheduler.ended == sum(seen.request.prepared for seen in self.all)

    def waiting(self) -> list[Seen]:
        """The requests that count towards the limit of the queue: those that ended while being prepared included."""
        return [seen for seen in self.all if seen.request.state == "waiting"]


@pytest.mark.parametrize("examples", [150, pytest.param(2_000, marks=pytest.mark.nightly)])
def test_requests_pass_their_states_once_and_end_once(examples: int) -> None:
    run_state_machine_as_test(  # type: ignore[no-untyped-call]
        RequestMachine, settings=settings(max_examples=examples, stateful_step_count=40, deadline=None)
    )
