"""Synthetic engine: an engine whose logits come from a function, on top of a real engine or of none."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from time import perf_counter
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from spaceport.graphs.contract.manifest import Manifest
from spaceport.graphs.contract.signature import Signature
from spaceport.runtime.bundle import Bundle
from spaceport.runtime.engine import CPU_COSTS, Batch, Costs, Engine, Moves, SelectedRows, selected_rows, selecting


class Predicted(NamedTuple):
    """The n most probable tokens of each line of logits; all other tokens have logit 0."""

    tokens: NDArray[np.int64]  # B x L x n
    logits: NDArray[np.float32]  # B x L x n


Predict = Callable[[Batch], Predicted]


class SyntheticEngine:
    """An engine with the logits of a function; an inner engine, if any, runs every call, and its logits are ignored."""

    device = "none"
    notes: tuple[str, ...] = ()

    def __init__(
        self,
        signature: Signature,
        requests: int,
        capacity: int,
        predict: Predict,
        inner: Engine | None = None,
        costs: Costs = CPU_COSTS,
        heads: int = 0,  # whose lines the function predicts too
    ) -> None:
        self.signature, self.requests = replace(signature, lines=1 + heads), requests
        self.capacity = capacity
        self.rows = capacity if inner is None else inner.rows
        self.costs = costs
        self._predict = predict
        self._inner = inner
        self._selecting = None if inner is None else selecting(inner)
        self._logits = np.zeros((0, signature.vocab_size), np.float32)
        self.rows_fed = 0
        self.seconds = 0.0

    def run(self, batch: Batch) -> NDArray[np.float32]:
        started = perf_counter()
        if self._inner is not None:
            self._inner.run(batch)
        logits = self._synthetic_logits(batch)
        self.rows_fed += batch.input_ids.size
        self.seconds += perf_counter() - started
        return logits

    @property
    def selects(self) -> bool:
        """Whether the inner engine selects tokens on its device."""
        return self._selecting is not None

    def select(self, batch: Batch) -> list[SelectedRows]:
        """The predicted tokens and one other token per row; the selection of the inner engine is ignored."""
        started = perf_counter()
        assert self._selecting is not None
        self._selecting.select(batch)
        tokens, logits = self._predict(batch)
        size = self.signature.vocab_size
        others = (tokens[..., :1] + 1) % size
        sums = np.log(np.exp(logits).sum(axis=2, keepdims=True) + size - tokens.shape[2])
        packed = np.concatenate([logits, np.zeros_like(sums), tokens, others, sums], axis=2).astype(np.float32)
        found = selected_rows(packed, lambda: self._synthetic_logits(batch), batch.lines(self.signature))
        self.rows_fed += batch.input_ids.size
        self.seconds += perf_counter() - started
        return found

    def move(self, first: int, moves: Sequence[Moves]) -> None:
        if self._inner is not None:
            self._inner.move(first, moves)

    def copy(self, source: int, target: int, slots: NDArray[np.int64]) -> None:
        if self._inner is not None:
            self._inner.copy(source, target, slots)

    def clear(self, request: int) -> None:
        if self._inner is not None:
            self._inner.clear(request)

    def close(self) -> None:
        if self._inner is not None:
            self._inner.close()

    def _synthetic_logits(self, batch: Batch) -> NDArray[np.float32]:
        requests, lines = batch.requests, batch.lines(self.signature)
        if len(self._logits) < requests * lines:
            self._logits = np.zeros((requests * lines, self.signature.vocab_size), np.float32)
        logits = self._logits[: requests * lines].reshape(requests, lines, -1)
        logits.fill(0)  # all of them, so that they are in the CPU caches as after a real engine
        np.put_along_axis(logits, *self._predict(batch), axis=2)
        return logits


def allowed_tokens(manifest: Manifest, count: int) -> NDArray[np.int64]:
    """The first `count` tokens that a completion may contain, or all of them."""
    tokens = manifest.tokens
    special = {*tokens.end, *tokens.forbidden, *tokens.fork_ids}
    return np.setdiff1d(np.arange(min(manifest.signature.vocab_size, count + len(special))), list(special))[:count]


def without_end_tokens(bundle: Bundle) -> Bundle:
    """The bundle without end tokens, so that completions reach max_tokens."""
    manifest = bundle.manifest
    return replace(bundle, manifest=replace(manifest, tokens=replace(manifest.tokens, end=())))
