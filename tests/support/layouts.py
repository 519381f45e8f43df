"""Texts that are fed to an engine in any layout: in any calls and slots, beside any other rows and requests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from spaceport.graphs.contract.signature import visible_length
from spaceport.runtime.engine import Batch, Engine


@dataclass(frozen=True)
class Layout:
    """How a text is fed."""

    widths: tuple[int, ...] = (1,)  # rows of the text in each call, by turns
    others: int = 0  # other rows of the request in each call
    requests: int = 1  # of the engine, all of which have rows in each call
    seed: int | None = None  # of the slots and of everything else; None: lowest slots, other rows in order


def fed(engine: Engine, text: Sequence[int], layout: Layout) -> NDArray[np.float32]:
    """The logits of all rows of a text."""
    signature, capacity, length = engine.signature, engine.capacity, len(text)
    dice = np.random.default_rng(layout.seed)
    places = np.arange(capacity) if layout.seed is None else dice.permutation(capacity)
    slots, free = places[:length], places[length:]
    visible = visible_length(length) if layout.seed is None and not layout.others else capacity
    mine = int(dice.integers(layout.requests))
    found, start, call = [], 0, 0
    while start < length:
        rows = np.arange(start, min(length, start + layout.widths[call % len(layout.widths)]))
        count = rows.size + layout.others
        shape = (layout.requests, count)
        ids, positions = dice.integers(3, signature.vocab_size, shape), dice.integers(0, length, shape)
        targets = np.stack([dice.permutation(capacity)[:count] for _ in range(layout.requests)])
        masks = [dice.random((layout.requests, 1, count, visible)) < 0.3 for _ in range(2)]
        order = np.arange(count) if layout.seed is None else dice.permutation(count)
        order = order[: rows.size]  # where the rows of the text are in this call
        ids[mine, order], positions[mine, order] = np.asarray(text)[rows], rows
        targets[mine] = free[:count] if layout.others else slots[rows]
        targets[mine, order] = slots[rows]
        for mask, window in zip(masks, (length, signature.window or length), strict=True):
            mask[mine, 0, order] = False
            for place, row in zip(order, rows, strict=True):
                mask[mine, 0, place, slots[max(0, row + 1 - window) : row + 1]] = True
        wanted = np.tile(np.arange(count), (layout.requests, 1))
        logits = engine.run(Batch(0, ids, positions, targets, masks[0], wanted, masks[1]))
        found.append(logits.reshape(layout.requests, count, -1)[mine, order].copy())
        start, call = start + rows.size, call + 1
    return np.concatenate(found)
