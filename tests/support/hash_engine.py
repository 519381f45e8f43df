"""Hash engine: a fake engine whose next token is a hash of all that a row can see, and selectors of single tests."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from spaceport.graphs.contract.draft_methods import CAUSAL, GROUPS, MaskLayout
from spaceport.graphs.contract.manifest import TokenIds
from spaceport.graphs.contract.signature import Lowering, Signature
from spaceport.runtime.costs import StepCosts, relative_costs
from spaceport.runtime.decode.draft import DraftConfig
from spaceport.runtime.decode.planner import DraftPlanner, drafter_for
from spaceport.runtime.decode.sequence import Listener, TokenSelector
from spaceport.runtime.decode.sequence_group import Observer, RequestStep, SequenceGroup
from spaceport.runtime.decode.step import step
from spaceport.runtime.engine import CPU_COSTS, PREFILL_ROWS, Batch, Costs, Engine, Moves
from spaceport.runtime.sampling.choice import Bans, Greedy
from spaceport.runtime.sampling.grammar import Constrained, Grammar, GrammarCompiler, Vocabulary

FREE_ROWS = replace(CPU_COSTS, row=0.0)  # rows are free: drafts are as wide as their limits
FREE_STEPS = relative_costs(FREE_ROWS.row)  # the same for a planner: a draft that is not fed shows no fault

VOCAB = 15
MASKS = (11, 12)
END = 10
FORK, CHILD = 13, 14
LAYOUTS = tuple(MaskLayout(shift, group) for shift in (True, False) for group in GROUPS)


Tree = dict[tuple[int, ...], list[int]]  # path of a thread -> its tokens


@dataclass(frozen=True)
class Cell:
    """The content of a slot: a token, its position, and a hash of everything that its row saw."""

    token: int
    position: int
    state: int
    owner: object = None  # request that wrote it


@dataclass
class Language:
    """The output of the fake model, and how well it drafts."""

    seed: int
    quality: int = 100  # percent of the draft tokens that are right
    end_every: int = 40  # one token in this many is the end token
    fork_every: int = 10**9  # one token in this many is [Fork]
    window: int | None = None
    mask_layout: MaskLayout = CAUSAL
    heads: int = 0  # that draft instead of mask slots

    def state(self, cells: Sequence[Cell], near: Sequence[Cell], token: int, position: int) -> int:
        return hash((self.seed, token, position, *((c.position, c.state) for c in cells), -7, *(c.state for c in near)))

    def follow(self, cells: Sequence[Cell], token: int) -> Cell:
        """The cell of the token after these, as computed by a row that sees all of them."""
        position = len(cells)
        near = cells[max(0, position + 1 - self.window) :] if self.window else ()
        return Cell(token, position, self.state(cells, near, token, position))

    def logits(self, state: int) -> NDArray[np.float32]:
        """Logits in which a banned token is sometimes the best; the next token is the best of the others."""
        logits = np.zeros(VOCAB, np.float32)
        logits[state // 11 % END] = 1.0
        logits[END if state % self.end_every == 0 else state // 7 % END] = 2.0
        if state // 5 % self.fork_every == 1:
            logits[FORK] = 2.5
        if state % 3 == 0:
            logits[(*MASKS, CHILD)[state // 3 % 3]] = 3.0
        return logits

    def next(self, state: int, fork: bool = False) -> int:
        """The next token; whether it may be [Fork] depends on its position."""
        allowed = self.logits(state)
        allowed[[*MASKS, CHILD, *(() if fork else (FORK,))]] = -1
        return int(allowed.argmax())

    def write(self, prompt: Sequence[int], count: int) -> list[int]:
        """The output of plain decoding, without engine, slots, drafts and forks."""
        return self.tree(prompt, len(prompt) + count, 0)[()]

    def tree(self, prompt: Sequence[int], limit: int, depth: int, path: tuple[int, ...] = ()) -> Tree:
        """The output of every thread, each computed alone; none is longer than `limit` with all before it."""
        cells: list[Cell] = []
        for token in prompt:
            cells.append(self.follow(cells, token))
        text: list[int] = []
        found: Tree = {path: text}
        while len(cells) < limit:
            fork = len(path) < depth and cells[-1].token not in (FORK, CHILD)
            token = self.next(cells[-1].state, fork)
            if token == END:
                break
            text.append(token)
            cells.append(self.follow(cells, token))
            if token == FORK:
                child = (*path, text.count(FORK) - 1)
                found |= self.tree([*(cell.token for cell in cells), CHILD], limit, depth, child)
        return found

    def draft(self, known: Sequence[Cell], depth: int) -> NDArray[np.float32]:
        """The prediction of mask slot `depth` (from 0) behind these cells: the token that follows theirs by depth + 2."""
        cells = list(known)
        for _ in range(depth + 1):
            cells.append(self.follow(cells, self.next(cells[-1].state, fork=True)))
        state = cells[-1].state
        if hash((state, depth, 1)) % 100 < self.quality:
            return self.logits(state)
        return np.roll(self.logits(state), 1)


@dataclass
class HashEngine(Engine):
    """An engine without a model; it raises if a row sees what it must not see."""

    language: Language
    capacity: int
    requests: int
    lowering: Lowering = "scatter"
    calls: int = 0
    widths: list[int] = field(default_factory=list)
    device: str = "none"
    costs: Costs = FREE_ROWS
    parks: bool = True
    masks: tuple[int, ...] = MASKS  # mask tokens; empty: every token is an ordinary one
    owner: Callable[[int], object] = int  # request that uses an index of the engine now
    copied: list[tuple[int, int, int]] = field(default_factory=list)  # source, target and slots of each copy
    parked: int = 0  # number of times that rows were saved
    before: Callable[[Batch], None] | None = None  # what a test does with each call, such as to let it fail
    after: Callable[[Batch, NDArray[np.float32]], None] | None = None  # what it does to the logits, in place

    def __post_init__(self) -> None:
        heads = self.language.heads
        self.signature = Signature(1, 1, 1, VOCAB, "float32", self.lowering, self.language.window, 1 + heads)
        self.rows = self.capacity
        self._cells: list[list[Cell | None]] = [[None] * self.capacity for _ in range(self.requests)]

    def run(self, batch: Batch) -> NDArray[np.float32]:
        if self.before is not None:
            self.before(batch)
        self.calls += 1
        self.widths.append(batch.input_ids.shape[1])
        logits = np.full((*batch.logit_rows.shape, self.signature.lines, VOCAB), np.nan, np.float32)
        for line in range(batch.requests):
            given = self._rows(batch, line)
            for out, row in enumerate(batch.logit_rows[line]):
                if row in given:
                    logits[line, out] = given[int(row)]
        logits = logits.reshape(batch.requests, -1, VOCAB)
        if self.after is not None:
            self.after(batch, logits)
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

    def copy(self, source: int, target: int, slots: NDArray[np.int64]) -> None:
        copied = [self._cells[source][slot] for slot in slots]
        assert None not in copied, "a slot that holds nothing is copied"
        self.copied.append((source, target, slots.size))
        self._cells[target][: slots.size] = copied

    def saved(self, request: int, slots: int) -> list[Cell | None]:
        self.parked += 1
        return self._cells[request][:slots]

    def restore(self, request: int, rows: list[Cell | None]) -> None:
        self._cells[request][: len(rows)] = rows

    def clear(self, request: int) -> None:
        self._cells[request] = [None] * self.capacity

    def close(self) -> None:
        self.requests = 0

    def _rows(self, batch: Batch, line: int) -> dict[int, NDArray[np.float32]]:
        cells, owner = self._cells[batch.first + line], self.owner(batch.first + line)
        self._store_masks(batch, line, owner)
        given = {}
        for row in range(batch.input_ids.shape[1]):
            visible = np.flatnonzero(batch.attention_mask[line, 0, row])
            slot = int(batch.slot_ids[line, row])
            if self.lowering == "append":
                slot = int(batch.slot_ids[line, 0]) + row
                assert slot < self.capacity, "the run of an append engine goes beyond its buffer"
            if slot not in visible:  # a padding row: it sees slot 0 and is never read
                assert visible.tolist() == [0]
                cells[slot] = None  # its slot is never read
                continue
            token, position = int(batch.input_ids[line, row]), int(batch.position_ids[line, row])
            seen = [cells[other] for other in visible if other != slot]
            assert None not in seen, "a row sees a slot that holds nothing"
            assert all(cell is None or cell.owner == owner for cell in seen), "a row sees a slot of another request"
            before = sorted((cell for cell in seen if cell is not None), key=lambda cell: cell.position)
            if token in self.masks:
                given[row] = self._draft(before, position)[None]
                continue
            assert [cell.position for cell in before] == list(range(position)), "a row sees not just one line of text"
            near = self._near(batch, line, row, slot)
            state = self.language.state(before, near, token, position)
            cells[slot] = cell = Cell(token, position, state, owner)
            heads = range(self.language.heads if row in batch.logit_rows[line] else 0)
            lines = [self.language.logits(state), *(self.language.draft([*before, cell], head) for head in heads)]
            given[row] = np.stack(lines) if heads else lines[0][None]
        return given

    def _store_masks(self, batch: Batch, line: int, owner: object) -> None:
        """Fill the slots of mask rows, which other rows may see before their own turn comes."""
        masked = np.flatnonzero(np.isin(batch.input_ids[line], self.masks)).tolist()
        first, sees = int(batch.slot_ids[line, 0]), batch.attention_mask[line, 0]
        slots = [first + row if self.lowering == "append" else int(batch.slot_ids[line, row]) for row in masked]
        for row, slot in zip(masked, slots, strict=True):
            token, position = int(batch.input_ids[line, row]), int(batch.position_ids[line, row])
            self._cells[batch.first + line][slot] = Cell(token, position, hash((token, position)), owner)
            if self.language.mask_layout.group == "block":
                group = [other for other, held in zip(masked, slots, strict=True) if sees[row, held]]
                assert all((sees[other] == sees[row]).all() for other in group), (
                    "the rows of a block see different rows"
                )

    def _draft(self, seen: list[Cell], position: int) -> NDArray[np.float32]:
        """The prediction of a mask row that sees these cells, its own position left out."""
        known = [cell for cell in seen if cell.token not in self.masks]
        masks = [cell.position for cell in seen if cell.token in self.masks]
        start = len(known)
        end = position + 1 if self.language.mask_layout.group == "causal" else start + len(masks) + 1
        assert [cell.position for cell in known] == list(range(start)), "a mask row sees not just one line of text"
        assert sorted((*masks, position)) == list(range(start, end)), "a mask row sees another group"
        slot = position - start - self.language.mask_layout.lead
        if slot < 0:  # its prediction has no use: the token before the group decides the same
            return np.roll(self.language.logits(known[-1].state), 1)
        return self.language.draft(known, slot)

    def _near(self, batch: Batch, line: int, row: int, slot: int) -> list[Cell]:
        if batch.sliding_attention_mask is None:
            return []
        visible = np.flatnonzero(batch.sliding_attention_mask[line, 0, row])
        assert slot in visible
        found = [cell for other in visible if other != slot and (cell := self._cells[batch.first + line][other])]
        return sorted(found, key=lambda cell: cell.position)


def request_for(
    engine: HashEngine,
    prompt: Sequence[int],
    max_tokens: int,
    draft_config: DraftConfig | int,
    masks: tuple[int, ...] = MASKS[:1],
    max_threads: int = 1,
    max_depth: int = 0,
    total: int | None = None,
    selector: TokenSelector | None = None,
    listener: Listener | None = None,
    observers: Sequence[Observer] = (),
    costs: StepCosts = FREE_STEPS,
    max_rows: int | None = None,
) -> SequenceGroup:
    """A request as the session creates it; a number of mask slots means chains of that length.

    An engine with heads drafts with as many of them instead.
    """
    draft_config = draft_config if isinstance(draft_config, DraftConfig) else DraftConfig(draft_config, "chain")
    if engine.language.heads:
        heads = min(draft_config.mask_slots, engine.language.heads)
        draft_config = replace(draft_config, mask_slots=0, heads=heads)
    tokens = TokenIds(mask=masks, fork=FORK, child=CHILD, end=(END,))
    bans = Bans(frozenset((*MASKS, CHILD)), FORK, CHILD, max_depth)
    draft_config = replace(draft_config, mask_layout=engine.language.mask_layout)
    return SequenceGroup(
        prompt=prompt,
        capacity=engine.capacity,
        lowering=engine.lowering,
        tokens=tokens,
        selector=selector or Greedy(bans),
        max_length=len(prompt) + max_tokens,
        max_total=max_tokens if total is None else total,
        draft_config=draft_config,
        drafter=drafter_for(draft_config, DraftPlanner(costs)),
        max_rows=max_rows,
        max_threads=max_threads,
        end=frozenset(tokens.end),
        listener=listener or Listener(),
        observers=observers,
    )


def advance(engine: Engine, *requests: SequenceGroup, chunk: int = PREFILL_ROWS) -> None:
    """One step of requests that have the first indices of an engine."""
    step(engine, [RequestStep(request, index, chunk) for index, request in enumerate(requests)])


def completed(engine: Engine, request: SequenceGroup, chunk: int = PREFILL_ROWS) -> SequenceGroup:
    """A request after its last step."""
    while request.live:
        advance(engine, request, chunk=chunk)
    return request


def greedy(banned: Collection[int] = ()) -> Greedy:
    """Greedy selection with banned tokens."""
    return Greedy(Bans(frozenset(banned)))


def constrained(inner: TokenSelector, grammar: Grammar, vocabulary: Vocabulary) -> Constrained:
    """A token selector for one request, whose completion matches the grammar."""
    return GrammarCompiler(lambda: vocabulary).constrained(inner, grammar)
