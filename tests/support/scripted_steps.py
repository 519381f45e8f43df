"""Scripted steps: a request whose output is given by a table, over an engine that records every row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from spaceport.runtime.decode.draft import Candidates, Source
from spaceport.runtime.decode.events import NullListener
from spaceport.runtime.decode.request import VerifiedStep
from spaceport.runtime.decode.threads import Ending, Thread
from spaceport.runtime.engine import Batch
from support.hash_engine import CHILD, END, FORK, MASKS, HashEngine, Language, advance, request_for

Path = tuple[int, ...]
Texts = dict[Path, list[int]]  # output of each thread, without the end token
PROMPT = [1, 2]


@dataclass(frozen=True, eq=False)
class Row:
    """A row, and the rows that it saw, itself included, in the order of their positions."""

    step: int
    path: Path
    token: int
    position: int
    seen: tuple[Row, ...]
    beside: bool  # its parent is another thread's row of the same step

    @property
    def line(self) -> list[int]:
        """The tokens that it saw."""
        return [*(row.token for row in self.seen), self.token]


@dataclass(frozen=True)
class Scripted:
    """A selector and drafter that follow the table."""

    texts: Texts

    def token(self, logits: NDArray[np.float32], thread: Thread, ahead: Sequence[int]) -> int:
        return self._at(thread, len(thread.tokens) + len(ahead))

    def candidates(
        self, logits: NDArray[np.float32], thread: Thread, position: int, most: int
    ) -> tuple[Candidates, ...]:
        return tuple(Candidates((self._at(thread, position + slot),), (1.0,)) for slot in range(len(logits)))

    def _at(self, thread: Thread, position: int) -> int:
        text = self.texts[thread.path]
        return text[position - thread.start] if position - thread.start < len(text) else END


class NotingEngine(HashEngine):
    """A fake engine that stores its last call."""

    last: Batch

    def run(self, batch: Batch) -> NDArray[np.float32]:
        self.last = batch
        return super().run(batch)


@dataclass
class Written(NullListener):
    """The tokens of each thread by step."""

    scene: Scene
    in_step: dict[Path, list[int]] = field(default_factory=dict)  # the step, from 1, of each token of a thread

    def on_token(self, thread: Thread, token: int, drafted: bool, source: Source | None = None) -> bool:
        self.in_step.setdefault(thread.path, []).append(self.scene.steps)
        return False


class Scene:
    """A scripted request under way."""

    def __init__(
        self,
        texts: Texts,
        mask_slots: int = 0,
        max_threads: int = 8,
        max_tokens: int = 60,
        total: int = 500,
    ) -> None:
        self.engine = NotingEngine(Language(1), 256, 1)
        self.generated = Written(self)
        self.request = request_for(
            self.engine,
            PROMPT,
            max_tokens,
            mask_slots,
            max_threads=max_threads,
            max_depth=9,
            total=total,
            selector=Scripted(texts),
            listener=self.generated,
            observers=[self],
        )
        self.texts = texts
        self.rows: list[Row] = []
        self.steps = 0
        self._slots: dict[int, Row] = {}  # last row of each slot

    @property
    def held(self) -> set[tuple[Path, int]]:
        """Thread and position of each row whose slot is in use."""
        slots = self.request.slots.still_held(np.arange(self.engine.capacity)).tolist()
        return {(self._slots[slot].path, self._slots[slot].position) for slot in slots}

    @property
    def said(self) -> Texts:
        """The output of each thread."""
        return {thread.path: thread.generated for thread in self.request.threads}

    @property
    def endings(self) -> dict[Path, Ending | None]:
        return {thread.path: thread.ending for thread in self.request.threads}

    def line(self, path: Path) -> list[int]:
        """All tokens of a thread at its end, by the table."""
        if not path:
            return [*PROMPT, *self.texts[()]]
        parent = self.line(path[:-1])
        start = len(parent) - len(self.texts[path[:-1]])
        fork = [index for index in range(start, len(parent)) if parent[index] == FORK][path[-1]]
        return [*parent[: fork + 1], CHILD, *self.texts[path]]

    def run(self, until: Path | None = None) -> Scene:
        """Run steps to the end of the request or of a thread."""
        while self.request.live and self.endings.get(until if until is not None else (-1,)) is None:
            advance(self.engine, self.request)
        return self

    def on_step(self, step: VerifiedStep) -> None:
        """Record the rows of a step."""
        self.steps += 1
        batch, row = self.engine.last, 0
        for part in step.plan.parts:
            for token, position in zip(part.tokens.tolist(), part.positions.tolist(), strict=True):
                slot = int(batch.slot_ids[0, row])
                visible = np.flatnonzero(batch.attention_mask[0, 0, row]).tolist()
                seen = sorted((self._slots[o] for o in visible if o != slot), key=lambda other: other.position)
                beside = any(other.step == self.steps and other.path != part.thread.path for other in seen)
                noted = Row(self.steps, part.thread.path, token, position, tuple(seen), beside)
                self._slots[slot] = noted
                self.rows.append(noted)
                row += 1

    def check_rows(self) -> None:
        """Assert that every row saw the thread's tokens before it, and a mask slot also the masks behind its anchor."""
        for row in self.rows:
            line = self.line(row.path)
            own = [token for token in row.line if token not in MASKS]
            assert [seen.position for seen in row.seen] == list(range(row.position))
            assert own[: len(line)] == line[: len(own)]
            assert row.line[len(own) :] == [MASKS[0]] * (len(row.line) - len(own))
