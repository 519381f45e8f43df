"""Hash engine: a fake engine whose next token is a hash of everything that a row can see."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from spaceport.graphs.manifest import TokenIds
from spaceport.graphs.signature import Lowering, Signature
from spaceport.runtime.engine import Batch
from spaceport.runtime.request import Request, new_thread
from spaceport.runtime.sampling import greedy
from spaceport.runtime.slots import Moves, Slots

VOCAB = 13
MASKS = (11, 12)
END = 10


@dataclass(frozen=True)
class Cell:
    """What a slot holds: a token, its position and a state made of everything its row saw."""

    token: int
    position: int
    state: int


@dataclass
class Language:
    """The text that the fake network writes, and how well it drafts."""

    seed: int
    quality: int = 100  # percent of the drafted tokens that are right
    end_every: int = 40  # one token in so many ends the text
    window: int | None = None

    def state(self, cells: Sequence[Cell], near: Sequence[Cell], token: int, position: int) -> int:
        return hash((self.seed, token, position, *((c.position, c.state) for c in cells), -7, *(c.state for c in near)))

    def follow(self, cells: Sequence[Cell], token: int) -> Cell:
        """The cell of the token after these, as a row that sees all of them makes it."""
        position = len(cells)
        near = cells[max(0, position + 1 - self.window) :] if self.window else ()
        return Cell(token, position, self.state(cells, near, token, position))

    def logits(self, state: int) -> NDArray[np.float32]:
        """A forbidden token comes first now and then; the one that counts is the likeliest of the others."""
        logits = np.zeros(VOCAB, np.float32)
        logits[END if state % self.end_every == 0 else state // 7 % END] = 2.0
        if state % 3 == 0:
            logits[MASKS[state // 3 % 2]] = 3.0
        return logits

    def next(self, state: int) -> int:
        return int(self.logits(state)[: MASKS[0]].argmax())

    def write(self, prompt: Sequence[int], count: int) -> list[int]:
        """The text itself, with no engine, no slots and no drafts."""
        cells: list[Cell] = []
        for token in prompt:
            cells.append(self.follow(cells, token))
        text: list[int] = []
        while len(text) < count and (token := self.next(cells[-1].state)) != END:
            text.append(token)
            cells.append(self.follow(cells, token))
        return text

    def draft(self, known: Sequence[Cell], depth: int) -> NDArray[np.float32]:
        """What mask slot `depth` (from 0) behind these cells says: the token after the one it stands for."""
        cells = list(known)
        for _ in range(depth + 1):
            cells.append(self.follow(cells, self.next(cells[-1].state)))
        state = cells[-1].state
        if hash((state, depth, 1)) % 100 < self.quality:
            return self.logits(state)
        return np.roll(self.logits(state), 1)


@dataclass
class HashEngine:
    """An engine with no network; it refuses rows that see what no row may see."""

    language: Language
    capacity: int
    requests: int
    lowering: Lowering = "scatter"
    calls: int = 0
    widths: list[int] = field(default_factory=list)
    device: str = "none"

    def __post_init__(self) -> None:
        self.signature = Signature(1, 1, 1, VOCAB, "float32", self.lowering, self.language.window)
        self.rows = self.capacity
        self._cells: list[list[Cell | None]] = [[None] * self.capacity for _ in range(self.requests)]

    def run(self, batch: Batch) -> NDArray[np.float32]:
        self.calls += 1
        self.widths.append(batch.input_ids.shape[1])
        logits = np.full((*batch.logit_rows.shape, VOCAB), np.nan, np.float32)
        for line in range(batch.requests):
            given = self._rows(batch, line)
            for out, row in enumerate(batch.logit_rows[line]):
                if row in given:
                    logits[line, out] = given[int(row)]
        return logits

    def move(self, first: int, moves: Sequence[Moves]) -> None:
        for request, (sources, targets) in enumerate(moves, first):
            assert self.lowering == "append" or not sources.size
            cells = self._cells[request]
            moved = [cells[source] for source in sources]
            for source in sources:
                cells[source] = None
            for target, cell in zip(targets, moved, strict=True):
                cells[target] = cell

    def close(self) -> None:
        self.requests = 0

    def _rows(self, batch: Batch, line: int) -> dict[int, NDArray[np.float32]]:
        cells = self._cells[batch.first + line]
        given = {}
        for row in range(batch.input_ids.shape[1]):
            visible = np.flatnonzero(batch.attention_mask[line, 0, row])
            slot = int(batch.slot_ids[line, row])
            if self.lowering == "append":
                slot = int(batch.slot_ids[line, 0]) + row
                assert slot < self.capacity, "the run of an append engine goes beyond its buffer"
            if slot not in visible:  # a row that only fills up: it sees slot 0 and is never read
                assert visible.tolist() == [0]
                continue
            token, position = int(batch.input_ids[line, row]), int(batch.position_ids[line, row])
            seen = [cells[other] for other in visible if other != slot]
            assert None not in seen, "a row sees a slot that holds nothing"
            before = sorted((cell for cell in seen if cell is not None), key=lambda cell: cell.position)
            assert [cell.position for cell in before] == list(range(position)), "a row sees not just one line of text"
            near = self._near(batch, line, row, slot)
            cells[slot] = Cell(token, position, self.language.state(before, near, token, position))
            given[row] = self._answer(before, token, cells[slot])
        return given

    def _near(self, batch: Batch, line: int, row: int, slot: int) -> list[Cell]:
        if batch.sliding_attention_mask is None:
            return []
        visible = np.flatnonzero(batch.sliding_attention_mask[line, 0, row])
        assert slot in visible
        found = [cell for other in visible if other != slot and (cell := self._cells[batch.first + line][other])]
        return sorted(found, key=lambda cell: cell.position)

    def _answer(self, before: list[Cell], token: int, cell: Cell | None) -> NDArray[np.float32]:
        assert cell is not None
        if token not in MASKS:
            return self.language.logits(cell.state)
        known = [other for other in before if other.token not in MASKS]
        depth = len(before) - len(known)
        assert [other.token in MASKS for other in before] == [False] * len(known) + [True] * depth
        return self.language.draft(known, depth)


def request_for(
    engine: HashEngine,
    prompt: Sequence[int],
    max_tokens: int,
    mask_slots: int,
    index: int = 0,
    chunk: int = 512,
    masks: tuple[int, ...] = MASKS[:1],
) -> Request:
    """A request as the session would make it."""
    tokens = TokenIds(mask=masks, end=(END,))
    return Request(
        index=index,
        slots=Slots(engine.capacity, engine.lowering),
        threads=[new_thread(prompt, engine.capacity)],
        tokens=tokens,
        choose=greedy(MASKS),
        listener=lambda thread, token, drafted: False,
        limit=len(prompt) + max_tokens,
        mask_slots=mask_slots,
        chunk=chunk,
        end=frozenset(tokens.end),
    )
