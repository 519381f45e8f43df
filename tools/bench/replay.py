"""Replay: synthetic texts with acceptance rates from a table, decoded in the steps of a real engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from spaceport.graphs.contract.manifest import Manifest
from spaceport.runtime.engine import Batch, Engine, Moves, SelectedRows, selected_rows
from spaceport.runtime.session import Runtime
from spaceport.verify.prompts import TokenizedPrompt

_CERTAIN = 0.999  # predicted probability of the next token
_LEAST = 1e-4  # lowest probability that a mask slot predicts


class SyntheticTexts:
    """Numbered texts of random tokens, and how many mask slots or heads after each token are right."""

    def __init__(
        self, manifest: Manifest, acceptance: Sequence[float], count: int, context: int, max_tokens: int, seed: int = 0
    ):
        random, shape = np.random.default_rng(seed), (count, context + max_tokens + 1)  # texts x positions
        self.acceptance = acceptance  # by depth
        draws = random.random((*shape, len(acceptance)))
        self.right = np.logical_and.accumulate(draws < np.array(acceptance), axis=2).sum(axis=2)  # texts x positions
        special = {0, *manifest.tokens.end, *manifest.tokens.forbidden, *manifest.tokens.fork_ids}  # 0: of padding rows
        self.vocabulary = np.setdiff1d(np.arange(manifest.signature.vocab_size), list(special))
        self.tokens = random.choice(self.vocabulary, shape)  # texts x positions
        self.tokens[:, 0] = self.vocabulary[:count]  # another first token for each text
        self.prompts = tuple(
            TokenizedPrompt(number, tuple(text[:context].tolist())) for number, text in enumerate(self.tokens, 1)
        )

    def guessed(
        self, text: NDArray[np.int64], origin: NDArray[np.int64], depths: NDArray[np.int64], target: NDArray[np.int64]
    ) -> NDArray[np.int64]:
        """What mask slots or heads after the tokens at `origin` predict for `target`: right or another token."""
        last = self.tokens.shape[1] - 1
        wrong = depths >= self.right[text, np.clip(origin, 0, last)]
        following: NDArray[np.int64] = self.tokens[text, np.minimum(target, last)]
        others = np.searchsorted(self.vocabulary, following) + len(self.vocabulary) // 2
        return np.where(wrong, self.vocabulary[others % len(self.vocabulary)], following)


def mask_depths(masked: NDArray[np.bool_]) -> NDArray[np.int64]:
    """The depth of each mask row in its group, from 0; -1 for other rows. A group directly follows its token's row."""
    rows = np.arange(masked.shape[1])
    node = np.maximum.accumulate(np.where(masked, -1, rows), axis=1)
    return np.where(masked, rows - node, 0) - 1


class ReplayEngine(Engine):
    """An engine that runs every call on another one, and returns the logits of synthetic texts instead of its own.

    The first token of a prompt identifies the text of its request.
    """

    device = "none"

    def __init__(self, inner: Engine, texts: SyntheticTexts, manifest: Manifest) -> None:
        self.signature, self.costs = inner.signature, inner.costs
        self.requests, self.capacity, self.rows = inner.requests, inner.capacity, inner.rows
        self._inner, self.selects = inner, inner.selects
        self._logits = np.zeros((0, inner.signature.vocab_size), np.float32)
        self._texts, self._drafts, self._masks = texts, manifest.drafts, np.unique(manifest.tokens.mask)
        self._number = {int(token): number for number, token in enumerate(texts.tokens[:, 0])}
        self._current = np.zeros(inner.requests, np.int64)  # number of each request's text
        probabilities = np.clip([*texts.acceptance, 0.0, _CERTAIN], _LEAST, _CERTAIN)
        certainty = np.log(probabilities / (1 - probabilities) * (inner.signature.vocab_size - 1))
        self._certainty = certainty.astype(np.float32)  # by depth of a mask slot; the last one is for ordinary rows

    def run(self, batch: Batch) -> NDArray[np.float32]:
        self._inner.run(batch)
        return self._synthetic_logits(batch)

    def select(self, batch: Batch) -> list[SelectedRows]:
        """The predicted token and another token per row; the selection of the inner engine is ignored."""
        self._inner.select(batch)
        tokens, logits = self._predicted(batch)
        size = self.signature.vocab_size
        others, sums = (tokens + 1) % size, np.log(np.exp(logits) + size - 1)
        packed = np.stack([logits, np.zeros_like(sums), tokens, others, sums], axis=2).astype(np.float32)
        return selected_rows(packed, lambda: self._synthetic_logits(batch), batch.lines(self.signature))

    def move(self, first: int, moves: Sequence[Moves]) -> None:
        self._inner.move(first, moves)

    def copy(self, source: int, target: int, slots: NDArray[np.int64]) -> None:
        self._inner.copy(source, target, slots)

    def clear(self, request: int) -> None:
        self._inner.clear(request)

    def close(self) -> None:
        self._inner.close()

    def _predicted(self, batch: Batch) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """The most probable token of each line of logits, and its logit; all other tokens have logit 0."""
        requests = np.arange(batch.requests)[:, None]
        for request in np.flatnonzero(batch.position_ids[:, 0] == 0):
            token = int(batch.input_ids[request, 0])
            if token in self._number:  # padding rows have position 0 too, but a token that begins no text
                self._current[batch.first + request] = self._number[token]
        text = self._current[batch.first + requests]
        depths = mask_depths(np.isin(batch.input_ids, self._masks))[requests, batch.logit_rows]
        positions = batch.position_ids[requests, batch.logit_rows]
        layout, last = self._drafts.layout, len(self._certainty) - 2
        slots = np.where(depths < 0, -1, depths - layout.lead)  # -1 also for the row before those of mask slots
        target = positions + np.where(depths < 0, 1, int(layout.shift))
        predicted = self._texts.guessed(text, positions - 1 - depths, slots, target)
        logits = self._certainty[np.where(slots < 0, last + 1, np.minimum(slots, last))]
        if self._drafts.heads:  # head 1 predicts the second token after a row
            heads = np.arange(self._drafts.heads)
            rows = positions[..., None]
            guessed = self._texts.guessed(text[..., None], rows, heads, rows + 2 + heads)
            certainty = np.broadcast_to(self._certainty[np.minimum(heads, last)], guessed.shape)
            predicted = np.concatenate([predicted[..., None], guessed], axis=2).reshape(batch.requests, -1)
            logits = np.concatenate([logits[..., None], certainty], axis=2).reshape(batch.requests, -1)
        return predicted, logits

    def _synthetic_logits(self, batch: Batch) -> NDArray[np.float32]:
        requests, lines = batch.requests, batch.lines(self.signature)
        if len(self._logits) < requests * lines:
            self._logits = np.zeros((requests * lines, self.signature.vocab_size), np.float32)
        logits = self._logits[: requests * lines].reshape(requests, lines, -1)
        logits.fill(0)  # all of them, so that they are in the CPU caches as after a real engine
        tokens, predicted = self._predicted(batch)
        np.put_along_axis(logits, tokens[..., None], predicted[..., None], axis=2)
        return logits


def replay_runtime(base: Runtime, texts: SyntheticTexts) -> Runtime:
    """A runtime that generates the synthetic texts up to max_tokens, on the engine of another runtime."""
    manifest = base.bundle.manifest
    endless = replace(base.bundle, manifest=replace(manifest, tokens=replace(manifest.tokens, end=())))
    engine = ReplayEngine(base.engine, texts, manifest)
    return Runtime(endless, engine, base.max_seq_len, costs=base.costs, exactness=base.exactness)
