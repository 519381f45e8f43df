"""Spoilt engine: an engine with changed inputs or logits, for tests of checks that have to find it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from spaceport.runtime.backends import open_engine
from spaceport.runtime.bundle import open_bundle
from spaceport.runtime.costs import relative_costs
from spaceport.runtime.decode.plan import Part, Verdict, accept
from spaceport.runtime.decode.sequence import TokenSelector
from spaceport.runtime.engine import Batch, Engine, EngineOptions, capacity_for
from spaceport.runtime.session import Runtime

Logits = NDArray[np.float32]
Spoil = Callable[[Batch, Logits], None]  # changes logits in place
LENGTH = 128


def unchanged(batch: Batch, logits: Logits) -> None:
    """The logits of a correct engine."""


def spoilt(engine: Engine, after: Spoil = unchanged, before: Callable[[Batch], None] = lambda batch: None) -> Engine:
    """The engine, which now changes each batch before it runs, or its logits afterwards."""
    run = engine.run

    def run_spoilt(batch: Batch) -> Logits:
        before(batch)
        logits: Logits = run(batch).copy()
        after(batch, logits)
        return logits

    engine.run = run_spoilt  # type: ignore[method-assign]
    return engine


def spoilt_runtime(
    bundle: Path, after: Spoil = unchanged, before: Callable[[Batch], None] = lambda batch: None, requests: int = 1
) -> Runtime:
    """A bundle's runtime over a spoilt engine; rows cost nothing, so that drafts are as wide as their limits."""
    opened = open_bundle(bundle)
    engine = open_engine(opened, "onnxruntime", EngineOptions(capacity_for(opened.manifest, LENGTH), requests, 1))
    return Runtime(opened, spoilt(engine, after, before), LENGTH, costs=relative_costs(0.0))


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
