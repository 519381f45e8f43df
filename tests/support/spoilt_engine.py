"""Spoilt engine: an engine with changed inputs or logits, for tests of checks that have to find it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from spaceport.runtime.backends import open_engine
from spaceport.runtime.bundle import open_bundle
from spaceport.runtime.costs import relative_costs
from spaceport.runtime.decode.plan import Part, Verdict, accept
from spaceport.runtime.decode.sequence import TokenSelector
from spaceport.runtime.engine import Batch, Engine, EngineOptions, Moves, capacity_for
from spaceport.runtime.session import Runtime

Logits = NDArray[np.float32]
Spoil = Callable[[Batch, Logits], None]  # changes logits in place
LENGTH = 128


def unchanged(batch: Batch, logits: Logits) -> None:
    """The logits of a correct engine."""


class SpoiltEngine(Engine):
    """Changes a batch before another engine runs it, or its logits afterwards."""

    def __init__(self, engine: Engine, after: Spoil = unchanged, before: Callable[[Batch], None] | None = None) -> None:
        self.inner, self._after, self.before = engine, after, before
        self.signature, self.capacity, self.requests = engine.signature, engine.capacity, engine.requests
        self.rows, self.device, self.costs, self.notes = engine.rows, engine.device, engine.costs, engine.notes
        self.widths: set[int] = set()  # numbers of rows per request that calls had
        self.cleared = 0

    def run(self, batch: Batch) -> Logits:
        self.widths.add(batch.input_ids.shape[1])
        if self.before is not None:
            self.before(batch)
        logits: Logits = self.inner.run(batch).copy()
        self._after(batch, logits)
        return logits

    def move(self, first: int, moves: Sequence[Moves]) -> None:
        self.inner.move(first, moves)

    def copy(self, source: int, target: int, slots: NDArray[np.int64]) -> None:
        self.inner.copy(source, target, slots)

    def clear(self, request: int) -> None:
        self.cleared += 1
        self.inner.clear(request)

    def close(self) -> None:
        self.inner.close()


def spoilt_runtime(
    bundle: Path, after: Spoil = unchanged, before: Callable[[Batch], None] | None = None, requests: int = 1
) -> tuple[Runtime, SpoiltEngine]:
    """A bundle's runtime over a spoilt engine; rows cost nothing, so that drafts are as wide as their limits."""
    opened = open_bundle(bundle)
    engine = open_engine(opened, "onnxruntime", EngineOptions(capacity_for(opened.manifest, LENGTH), requests, 1))
    spoilt = SpoiltEngine(engine, after, before)
    return Runtime(opened, spoilt, LENGTH, costs=relative_costs(0.0)), spoilt


def positions_of(batch: Batch) -> NDArray[np.int64]:
    """The position of the token that each row of logits predicts, B x R."""
    found: NDArray[np.int64] = np.take_along_axis(batch.position_ids, batch.logit_rows, axis=1) + 1
    return found


def tied(size: float, every: int = 5) -> Spoil:
    """Make the two best tokens nearly equal at every n-th position; wide steps prefer the other one."""

    def spoil(batch: Batch, logits: Logits) -> None:
        logits -= logits.max(axis=-1, keepdims=True)  # at most 0: float32 resolves small differences there
        wide = batch.input_ids.shape[1] > 1
        for line, row in np.argwhere(positions_of(batch) % every == 0):
            best, second = np.argsort(-logits[line, row], kind="stable")[:2]
            logits[line, row, best], logits[line, row, second] = (0, size) if wide else (size, 0)

    return spoil


def lenient(least: float = 0.0, most: float = np.inf) -> Any:
    """An acceptance rule that accepts a wrong first candidate if its margin to the right token is in this range."""

    def accept_wrong(part: Part, logits: Logits, choose: TokenSelector, *limits: int) -> Verdict:
        verdict = accept(part, logits, choose, *limits)
        if not part.draft.tokens or verdict.accepted:
            return verdict
        row, wrong = part.layout.nodes[1], part.draft.tokens[0]
        line = logits[part.layout.known - 1 - int(part.rows_wanted[0])]
        if not least <= float(line[verdict.tokens[0]] - line[wrong]) < most:
            return verdict
        following = choose.token(logits[row - int(part.rows_wanted[0])], part.thread, (wrong,))
        return Verdict((*verdict.retained, row), (wrong, following), ())

    return accept_wrong
