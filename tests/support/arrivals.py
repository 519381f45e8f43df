"""Arrivals: requests that arrive at a scheduler over a fake engine, and the failures that some of them cause."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from hypothesis import strategies as st
from numpy.typing import NDArray

from spaceport.graphs.contract.signature import STEP_ROWS, Lowering
from spaceport.runtime.costs import relative_costs
from spaceport.runtime.decode.draft import Candidates, DraftConfig
from spaceport.runtime.decode.sequence import Listener, NotANumber, TokenSelector, TokenSequence
from spaceport.runtime.decode.sequence_group import RequestStep, SequenceGroup
from spaceport.runtime.decoding import Decoding
from spaceport.runtime.engine import Batch, EngineFault
from spaceport.runtime.scheduling.request import Request
from spaceport.runtime.scheduling.scheduler import Scheduler
from support.hash_engine import END, LAYOUTS, HashEngine, Language, Tree, request_for

Trouble = Literal["on_token", "on_end", "choice", "number", "observer", "progress"]


class Trap(Exception):
    """The error that a request fails with in a test."""


@dataclass(frozen=True)
class Arrival:
    """A request that arrives later."""

    prompt: Sequence[int]
    at: int = 0  # round before which it is submitted
    max_tokens: int = 20
    draft_config: DraftConfig = field(default_factory=DraftConfig)
    max_threads: int = 1
    max_depth: int = 0
    cancelled: int | None = None  # rounds after which it is cancelled
    patience: int | None = None  # rounds after which its deadline passes
    trouble: Trouble | None = None
    when: int = 0  # calls that succeed before one fails
    salt: str | None = None  # of the prefix cache; None: it takes no part
    tenant: str = ""

    def alone(self, language: Language) -> Tree:
        """The output of each of its threads without failures."""
        return language.tree(self.prompt, len(self.prompt) + self.max_tokens, self.max_depth)


DRAFT_CONFIGS = st.builds(
    DraftConfig,
    mask_slots=st.integers(0, 5),
    shape=st.sampled_from(("chain", "tree")),
    rows=st.integers(1, 30),
    siblings=st.integers(1, 3),
    lookup=st.sampled_from((0, 3, 8)),
)
ARRIVALS = st.builds(
    Arrival,
    prompt=st.lists(st.integers(0, END - 1), min_size=1, max_size=25),
    at=st.integers(0, 12),
    max_tokens=st.integers(1, 20),
    draft_config=DRAFT_CONFIGS,
    max_threads=st.sampled_from((1, 2, 16)),
    max_depth=st.integers(0, 2),
    cancelled=st.none() | st.integers(0, 15),
    patience=st.none() | st.integers(0, 15),
    trouble=st.sampled_from((None, None, None, "on_token", "on_end", "choice", "number", "observer", "progress")),
    when=st.integers(0, 8),
    tenant=st.sampled_from(("", "", "a", "b")),
)
LANGUAGES = st.builds(
    Language,
    seed=st.integers(0, 10**6),
    quality=st.sampled_from((0, 30, 60, 90, 100)),
    end_every=st.sampled_from((4, 10, 30)),
    fork_every=st.sampled_from((3, 6, 12)),
    window=st.none() | st.integers(1, 30),
    mask_layout=st.sampled_from(LAYOUTS),
    heads=st.sampled_from((0, 0, 3)),
)


@dataclass
class Fuse(Listener):
    """The listener, observer and token selector of a request; as one of them, it raises after a number of uses."""

    trouble: Trouble | None
    left: int
    selector: TokenSelector | None = None

    def touch(self, trouble: Trouble) -> None:
        if trouble == self.trouble:
            self.left -= 1
            if self.left < 0:
                raise Trap

    def on_token(self, thread: TokenSequence, token: int, drafted: bool, source: str | None = None) -> bool:
        self.touch("on_token")
        return False

    def on_end(self, thread: TokenSequence) -> None:
        self.touch("on_end")

    def on_step(self, step: RequestStep) -> None:
        self.touch("observer")

    def token(self, logits: NDArray[np.float32], thread: TokenSequence, ahead: Sequence[int]) -> int:
        self.touch("choice")
        assert self.selector is not None
        return self.selector.token(logits, thread, ahead)

    def candidates(
        self, logits: NDArray[np.float32], thread: TokenSequence, position: int, most: int
    ) -> tuple[Candidates, ...]:
        assert self.selector is not None
        return self.selector.candidates(logits, thread, position, most)


class Scene:
    """Requests that arrive, and a clock that counts rounds."""

    def __init__(
        self,
        language: Language,
        arrivals: Sequence[Arrival],
        requests: int = 3,
        lowering: Lowering = "scatter",
        prompt_rows: int = 512,
        queue_limit: int = 10**6,
        faulty: int | None = None,  # index of the engine call that fails
        row_cost: float = 0.0,  # in plain steps
    ) -> None:
        self.language, self.arrivals = language, arrivals
        self.alone = [arrival.alone(language) for arrival in arrivals]
        longest = max(len(a.prompt) + self._total(tree) for a, tree in zip(arrivals, self.alone, strict=True))
        widest = max(STEP_ROWS, prompt_rows if lowering == "append" else 0) + 8
        hooks = {"owner": self._owner_of, "before": self._fail, "after": self._check}
        self.engine = HashEngine(language, longest + widest + 1, requests, lowering, **hooks)
        self.faulty = faulty
        self.poisoned: dict[int, int] = {}  # id of a request -> calls until its logits are NaN
        self.now = 0
        costs = relative_costs(row_cost)
        self.scheduler = Scheduler(self.engine, queue_limit, prompt_rows, clock=lambda: self.now, costs=costs)
        # for each request: whether it was done at each report
        self.reports: list[list[bool]] = [[] for _ in arrivals]
        self.guests = [self._prepared(number, arrival) for number, arrival in enumerate(arrivals)]
        self.requests, self.sequences = [request for request, _ in self.guests], [group for _, group in self.guests]

    def play(self) -> None:
        """Run rounds until all requests have arrived and ended."""
        while self.now <= max(arrival.at for arrival in self.arrivals) or self.scheduler.busy:
            self.turn()
            assert self.now < 2000, "the scheduler does not come to an end"

    def turn(self) -> None:
        """Run a round, after what is due before it."""
        for number, arrival in enumerate(self.arrivals):
            if arrival.at == self.now:
                self.submit(number)
            if arrival.cancelled is not None and arrival.at + arrival.cancelled == self.now:
                self.requests[number].end()
        self.scheduler.round()
        self.now += 1

    def submit(self, number: int) -> None:
        """Submit a request."""
        self.scheduler.submit(self.requests[number], self.sequences[number])

    def text(self, number: int) -> Tree:
        """The output of each thread of a request."""
        return {thread.path: thread.generated for thread in self.sequences[number].threads}

    def check_ending(self, number: int) -> None:
        """Assert that a request has ended as expected, that its slots are free, and that its end was reported once."""
        arrival, alone, text = self.arrivals[number], self.alone[number], self.text(number)
        request, sequences = self.requests[number], self.sequences[number]
        assert request.done
        assert (self.reports[number].count(True), self.reports[number][-1]) == (1, True)
        assert sequences.slots.held == 0
        ended = {thread.ending for thread in sequences.threads}
        if request.error is not None:
            assert isinstance(request.error, (Trap, NotANumber, EngineFault))
            assert isinstance(request.error, EngineFault) or arrival.trouble is not None
        elif ended & {"cancelled", "deadline"}:
            assert arrival.cancelled is not None or "deadline" in ended
            assert arrival.patience is not None or "cancelled" in ended
            assert all(alone[path][: len(tokens)] == tokens for path, tokens in text.items())
        else:
            assert text == alone
            assert ended <= {"end", "length"}

    def _total(self, tree: Tree) -> int:
        return sum(len(text) for text in tree.values()) + len(tree)

    def _prepared(self, number: int, arrival: Arrival) -> tuple[Request, SequenceGroup]:
        fuse = Fuse(arrival.trouble, arrival.when)
        sequences = request_for(
            self.engine,
            arrival.prompt,
            arrival.max_tokens,
            arrival.draft_config,
            max_threads=arrival.max_threads,
            max_depth=arrival.max_depth,
            total=self._total(self.alone[number]),
            listener=fuse,
            observers=[fuse] if arrival.trouble == "observer" else [],
        )
        fuse.selector, sequences.selector, sequences.cache_salt = sequences.selector, fuse, arrival.salt
        if arrival.trouble == "number":
            self.poisoned[id(sequences)] = arrival.when
        deadline = None if arrival.patience is None else arrival.at + arrival.patience
        request = Request(arrival.prompt, Decoding(tenant=arrival.tenant), deadline=deadline)

        def on_change() -> None:
            self.reports[number].append(request.done)
            fuse.touch("progress")

        request.on_change = on_change
        return request, sequences

    def _owner_of(self, index: int) -> object:
        """The salt of the request that uses an index, whose rows others of this salt may see; else the request itself."""
        tenant = self._tenant(index)
        return id(tenant) if tenant is None or tenant.cache_salt is None else tenant.cache_salt

    def _tenant(self, index: int) -> SequenceGroup | None:
        """The request that holds slots of an index; there is never more than one."""
        found = [sequences for request, sequences in self.guests if request.index == index and sequences.slots.held]
        assert len(found) < 2, "two requests share the buffers of one index"
        return found[0] if found else None

    def _fail(self, batch: Batch) -> None:
        if self.engine.calls == self.faulty:
            self.engine.calls += 1
            raise EngineFault("the fake engine failed")

    def _check(self, batch: Batch, logits: NDArray[np.float32]) -> None:
        """Assert that rows see slots that their request holds; poison its logits if that is due."""
        for line in range(batch.requests):
            if (tenant := self._tenant(batch.first + line)) is None:
                continue
            for row, slot in enumerate(batch.slot_ids[line]):
                own = int(slot) if self.engine.lowering == "scatter" else int(batch.slot_ids[line, 0]) + row
                visible = np.flatnonzero(batch.attention_mask[line, 0, row])
                if own in visible:
                    assert tenant.slots.still_held(visible).size == visible.size, "a row sees a slot that nobody holds"
            if id(tenant) in self.poisoned:
                self.poisoned[id(tenant)] -= 1
                if self.poisoned[id(tenant)] < 0:
                    logits[line] = np.nan


def steps_of(sequences: SequenceGroup) -> int:
    """Number of steps of a request."""
    return sequences.statistics.prompt_steps + sequences.statistics.steps
