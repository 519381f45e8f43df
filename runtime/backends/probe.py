"""Probe: measures on an opened engine how far logits depend on the number of rows in a call and on the order of KV slots."""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter

import numpy as np
from numpy.typing import NDArray

from spaceport.graphs.contract.exactness import Exactness
from spaceport.runtime.engine import Batch, Engine

# Kernels change at these numbers of rows: one row, few, the rows of a tile, one more, and those of wide drafts.
_WIDTHS = (2, 9, 33, 3, 8)  # the most informative first
_NEEDED = 2  # of them, always compared
_SECONDS = 0.15  # no further width is compared after this time
_CONTEXT, _VISIBLE = 31, 64  # KV slots
_LAYOUTS = 8  # orders of the KV slots
# Attention adds floating-point numbers in the order of the slots. Rounding of activations can hide that from all rows here,
# never from all rows of a text. Attention over 8-bit keys and values adds integers.
_LEAST_SLOTS = 1e-7


def probe(engine: Engine, tolerated: float, clock: Callable[[], float] = perf_counter) -> Exactness:
    """The exactness of an engine that no request uses; its first KV slots are zero afterwards."""
    started = clock()
    visible = min(_VISIBLE, engine.capacity)
    context = min(_CONTEXT, visible // 2, engine.rows)
    most = min(visible - context, engine.rows)
    engine.run(_prompt(engine, context, visible))
    (alone,) = _logits(engine, 1, context, visible)
    rows, compared = 0.0, list[int]()
    for width in (width for width in _WIDTHS if width <= most):
        if len(compared) >= _NEEDED and clock() - started > _SECONDS:
            break
        rows = max(rows, _noise(_logits(engine, width, context, visible), alone[None]))
        compared.append(width)
    count = max(compared, default=1)
    in_order = _logits(engine, count, context, visible, varied=True)
    slots = _LEAST_SLOTS if engine.signature.kv_cache == "same" else 0.0
    for seed in range(_LAYOUTS):
        if seed and clock() - started > _SECONDS:
            break
        engine.copy(0, 0, np.random.default_rng(seed).permutation(context))
        slots = max(slots, _noise(_logits(engine, count, context, visible, varied=True), in_order))
    engine.clear(0)
    return Exactness(rows, slots, tolerated, tuple(sorted(compared)))


def _prompt(engine: Engine, length: int, visible: int) -> Batch:
    """The rows of a prompt, in the lowest slots."""
    order = np.arange(length)
    mask = np.tril(np.ones((length, visible), np.bool_))
    return _batch(engine, _tokens(engine, length), order, order, mask, order[-1:])


def _logits(engine: Engine, rows: int, context: int, visible: int, *, varied: bool = False) -> NDArray[np.float32]:
    """Logits of rows behind a prompt that see nothing else: all of the same token, or each of another one."""
    mask = np.broadcast_to(np.arange(visible) < context, (rows, visible)).copy()
    tokens = _tokens(engine, rows)[::-1] if varied else _tokens(engine, 1).repeat(rows)
    slots = context + np.arange(rows)
    found = engine.run(_batch(engine, tokens, np.full(rows, context), slots, mask, np.arange(rows)))
    logits: NDArray[np.float32] = found[0, : rows * engine.signature.lines].reshape(rows, -1).copy()
    return logits


def _batch(
    engine: Engine,
    tokens: NDArray[np.int64],
    positions: NDArray[np.int64],
    slots: NDArray[np.int64],
    mask: NDArray[np.bool_],
    wanted: NDArray[np.int64],
) -> Batch:
    masks = mask[None, None]
    window = masks if engine.signature.window else None
    return Batch(0, tokens[None].copy(), positions[None], slots[None], masks, wanted[None], window)


def _tokens(engine: Engine, count: int) -> NDArray[np.int64]:
    """Token ids that are spread over the vocabulary."""
    return (7 + 7919 * np.arange(count, dtype=np.int64)) % engine.signature.vocab_size


def _noise(got: NDArray[np.float32], expected: NDArray[np.float32]) -> float:
    """The largest difference, relative to the largest logit of its row."""
    if np.isnan(got).any() or np.isnan(expected).any():
        return 1.0  # as wrong as can be
    if got.tobytes() == np.broadcast_to(expected, got.shape).tobytes():
        return 0.0
    largest = np.abs(expected).max(axis=-1, keepdims=True)
    return max(float((np.abs(got - expected) / np.maximum(largest, 1e-30)).max()), float(np.finfo(np.float32).tiny))
