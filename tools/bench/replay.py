"""Replay: synthetic texts with acceptance rates from a table, decoded in the steps of a real engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from spaceport.graphs.contract.draft_methods import CAUSAL, MaskLayout
from spaceport.graphs.contract.manifest import Manifest
from spaceport.runtime.bundle import Bundle
from spaceport.runtime.engine import Batch, Engine, Moves, SelectedRows, selected_rows
from spaceport.runtime.session import Runtime
from spaceport.verify.prompts import TokenizedPrompt

_CERTAIN = 0.999  # predicted probability of the next token
_LEAST = 1e-4  # lowest probability that a mask slot predicts


def allowed_tokens(manifest: Manifest) -> NDArray[np.int64]:
    """The tokens that a completion may contain, but for 0, which padding rows have."""
    tokens = manifest.tokens
    special = {0, *tokens.end, *tokens.forbidden, *tokens.fork_ids}
    return np.setdiff1d(np.arange(manifest.signature.vocab_size), list(special))


def without_end_tokens(bundle: Bundle) -> Bundle:
    """The bundle without end tokens, so that completions reach max_tokens."""
    manifest = bundle.manifest
    return replace(bundle, manifest=replace(manifest, tokens=replace(manifest.tokens, end=())))


class SyntheticTexts:
    """Numbered texts: the token at each position, and how many mask slots or heads after it are right."""

    def __init__(self, vocabulary: NDArray[np.int64], acceptance: Sequence[float], count: int, length: int, seed: int):
        self.vocabulary = vocabulary
        prime = _prime(min(len(vocabulary), 1 << 20))
        blocks, offsets = np.divmod(np.arange(length), prime)
        number = np.arange(count)[:, None]
        step = 1 + (number + blocks) % (prime - 1)  # differs by block of positions, so no pair of tokens repeats
        self.tokens = vocabulary[(number + offsets * step) % prime]  # texts x positions
        draws = np.random.default_rng(seed).random((count, length, len(acceptance)))
        self.right = np.logical_and.accumulate(draws < np.array(acceptance), axis=2).sum(axis=2)  # texts x positions

    def prompt(self, number: int, length: int) -> tuple[int, ...]:
        """The first tokens of a text; no other text begins with the same token."""
        return tuple(self.tokens[number, :length].tolist())


class Replay:
    """Predicts the synthetic texts; the first token of a prompt identifies the text of its request."""

    def __init__(
        self,
        texts: SyntheticTexts,
        masks: Sequence[int],
        acceptance: Sequence[float],
        requests: int,
        size: int,
        mask_layout: MaskLayout = CAUSAL,
        heads: int = 0,
    ):
        self._heads = heads
        self._texts, self._masks, self._mask_layout = texts, np.unique(masks), mask_layout
        self._number = {int(token): number for number, token in enumerate(texts.tokens[:, 0])}
        self._current = np.zeros(requests, np.int64)  # number of each request's text
        probabilities = np.clip([*acceptance, 0.0, _CERTAIN], _LEAST, _CERTAIN)
        logits = np.log(probabilities / (1 - probabilities) * (size - 1))
        self._logits = logits.astype(np.float32)  # by depth of a mask slot; the last one is for ordinary rows

    def __call__(self, batch: Batch) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """The most probable token of each line of logits, and its logit; all other tokens have logit 0."""
        requests = np.arange(batch.requests)[:, None]
        for request in np.flatnonzero(batch.position_ids[:, 0] == 0):
            token = int(batch.input_ids[request, 0])
            if token in self._number:  # padding rows have position 0 too, but a token that begins no text
                self._current[batch.first + request] = self._number[token]
        text = self._current[batch.first + requests]
        depths = mask_depths(np.isin(batch.input_ids, self._masks))[requests, batch.logit_rows]
        positions = batch.position_ids[requests, batch.logit_rows]
        tokens, right = self._texts.tokens, self._texts.right
        last = tokens.shape[1] - 1
        layout, masked = self._mask_layout, depths >= 0
        slots = np.where(masked, depths - layout.lead, depths)  # -1 also for the row before those of mask slots
        wrong = slots >= right[text, np.clip(positions - 1 - depths, 0, last)]
        following = tokens[text, np.minimum(positions + np.where(masked, int(layout.shift), 1), last)]
        predicted = np.where(masked & wrong, self._other(following), following)
        known = len(self._logits) - 2
        logits = self._logits[np.where(slots < 0, known + 1, np.minimum(slots, known))]
        if self._heads:
            guessed, certainty = self._of_heads(text, positions)
            predicted = np.concatenate([predicted[..., None], guessed], axis=2).reshape(batch.requests, -1)
            logits = np.concatenate([logits[..., None], certainty], axis=2).reshape(batch.requests, -1)
        return predicted, logits

    def _of_heads(
        self, text: NDArray[np.int64], positions: NDArray[np.int64]
    ) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """The token of each head at these positions, and its logit: head 1 predicts the second token from there."""
        depths = np.arange(self._heads)
        tokens, right = self._texts.tokens, self._texts.right
        following = tokens[text[..., None], np.minimum(positions[..., None] + 2 + depths, tokens.shape[1] - 1)]
        wrong = depths >= right[text, np.minimum(positions, right.shape[1] - 1)][..., None]
        logits = np.broadcast_to(self._logits[np.minimum(depths, len(self._logits) - 2)], wrong.shape)
        return np.where(wrong, self._other(following), following), logits

    def _other(self, tokens: NDArray[np.int64]) -> NDArray[np.int64]:
        """A wrong token for each of these tokens."""
        vocabulary = self._texts.vocabulary
        indices = np.searchsorted(vocabulary, tokens) + len(vocabulary) // 2
        wrong: NDArray[np.int64] = vocabulary[indices % len(vocabulary)]
        return wrong


def mask_depths(masked: NDArray[np.bool_]) -> NDArray[np.int64]:
    """The depth of each mask row in its group, from 0; -1 for other rows. A group directly follows its token's row."""
    rows = np.arange(masked.shape[1])
    node = np.maximum.accumulate(np.where(masked, -1, rows), axis=1)
    return np.where(masked, rows - node, 0) - 1


class ReplayEngine(Engine):
    """An engine that runs every call on another one, and returns the logits of synthetic texts instead of its own."""

    device = "none"

    def __init__(self, inner: Engine, replay: Replay) -> None:
        self.signature, self.costs = inner.signature, inner.costs
        self.requests, self.capacity, self.rows = inner.requests, inner.capacity, inner.rows
        self._inner, self._replay, self.selects = inner, replay, inner.selects
        self._logits = np.zeros((0, inner.signature.vocab_size), np.float32)

    def run(self, batch: Batch) -> NDArray[np.float32]:
        self._inner.run(batch)
        return self._synthetic_logits(batch)

    def select(self, batch: Batch) -> list[SelectedRows]:
        """The predicted token and another token per row; the selection of the inner engine is ignored."""
        self._inner.select(batch)
        tokens, logits = self._replay(batch)
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

    def _synthetic_logits(self, batch: Batch) -> NDArray[np.float32]:
        requests, lines = batch.requests, batch.lines(self.signature)
        if len(self._logits) < requests * lines:
            self._logits = np.zeros((requests * lines, self.signature.vocab_size), np.float32)
        logits = self._logits[: requests * lines].reshape(requests, lines, -1)
        logits.fill(0)  # all of them, so that they are in the CPU caches as after a real engine
        tokens, predicted = self._replay(batch)
        np.put_along_axis(logits, tokens[..., None], predicted[..., None], axis=2)
        return logits


def replay_runtime(base: Runtime, texts: SyntheticTexts, acceptance: Sequence[float]) -> Runtime:
    """A runtime that generates the synthetic texts on the engine of another runtime."""
    engine, manifest = base.engine, base.bundle.manifest
    size = engine.signature.vocab_size
    heads = manifest.drafts.heads
    replay = Replay(texts, manifest.tokens.mask, acceptance, engine.requests, size, manifest.drafts.layout, heads)
    return Runtime(
        without_end_tokens(base.bundle),
        ReplayEngine(engine, replay),
        base.max_seq_len,
        costs=base.costs,
        exactness=base.exactness,
    )


def synthetic_texts(
    runtime: Runtime, acceptance: Sequence[float], prompts: int, context: int, max_tokens: int, seed: int = 0
) -> tuple[SyntheticTexts, tuple[TokenizedPrompt, ...]]:
    """The texts of a replay and their prompts, of `context` tokens each."""
    manifest = runtime.bundle.manifest
    texts = SyntheticTexts(allowed_tokens(manifest), acceptance, prompts, context + max_tokens + 1, seed)
    return texts, tuple(TokenizedPrompt(number + 1, texts.prompt(number, context)) for number in range(prompts))


def _prime(limit: int) -> int:
    """The largest prime up to this limit."""
    return next(n for n in range(limit, 1, -1) if all(n % d for d in range(2, int(n**0.5) + 1)))
