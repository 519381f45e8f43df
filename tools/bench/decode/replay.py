"""Replay: real steps of an engine while acceptance follows a given table.

The engine computes every call, and its logits are replaced. The text is a fixed made-up one in which no pair of tokens
comes twice, so that there is nothing to look up. A mask slot is right with the probability of its depth in the table, if
the slots before it are; so a group is wrong from some depth on.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from spaceport.graphs.contract.faults import OptionFault
from spaceport.runtime.costs import StepCosts
from spaceport.runtime.engine import Batch
from spaceport.runtime.session import Runtime
from spaceport.tools.bench.decode.options import REPLAYED, DecodeOptions
from spaceport.tools.bench.made_up import MadeUpEngine, Predicted, endless, writable_tokens
from spaceport.tools.verify.audit.prompts import TokenizedPrompt

_CERTAIN = 0.999  # probability of the token that follows an ordinary one
_LEAST = 1e-4  # of what a mask slot claims


class MadeUpTexts:
    """Texts by number: the token at each position, and how many mask slots are right behind it."""

    def __init__(self, letters: NDArray[np.int64], acceptance: Sequence[float], count: int, length: int, seed: int):
        self.letters = letters
        prime = _prime(min(len(letters), 1 << 20))
        blocks, places = np.divmod(np.arange(length), prime)
        number = np.arange(count)[:, None]
        step = 1 + (number + blocks) % (prime - 1)  # in each block of positions another one: no pair comes twice
        self.tokens = letters[(number + places * step) % prime]  # texts x positions
        draws = np.random.default_rng(seed).random((count, length, len(acceptance)))
        self.right = np.logical_and.accumulate(draws < np.array(acceptance), axis=2).sum(axis=2)  # texts x positions

    def prompt(self, number: int, length: int) -> tuple[int, ...]:
        """The beginning of a text; its first token is that of no other text."""
        return tuple(self.tokens[number, :length].tolist())


class Replay:
    """Predicts the made-up texts, each request's told by the first token of its prompt."""

    def __init__(self, texts: MadeUpTexts, masks: Sequence[int], acceptance: Sequence[float], requests: int, size: int):
        self._texts, self._masks = texts, np.unique(masks)
        self._number = {int(token): number for number, token in enumerate(texts.tokens[:, 0])}
        self._current = np.zeros(requests, np.int64)  # number of each request's text
        claims = np.clip([*acceptance, 0.0, _CERTAIN], _LEAST, _CERTAIN)
        self._logits = np.log(claims / (1 - claims) * (size - 1)).astype(
            np.float32
        )  # by depth; the last: ordinary rows

    def __call__(self, batch: Batch) -> Predicted:
        lines = np.arange(batch.requests)[:, None]
        for line in np.flatnonzero(batch.position_ids[:, 0] == 0):
            token = int(batch.input_ids[line, 0])
            if token in self._number:  # padding rows have position 0 too, and a token that begins no text
                self._current[batch.first + line] = self._number[token]
        text = self._current[batch.first + lines]
        depths = mask_depths(np.isin(batch.input_ids, self._masks))[lines, batch.logit_rows]
        positions = batch.position_ids[lines, batch.logit_rows]
        tokens, right = self._texts.tokens, self._texts.right
        last = tokens.shape[1] - 1
        wrong = depths >= right[text, np.clip(positions - 1 - depths, 0, last)]
        following = tokens[text, np.minimum(positions + 1, last)]
        predicted = np.where((depths >= 0) & wrong, self._other(following), following)
        known = len(self._logits) - 2
        logits = self._logits[np.where(depths < 0, known + 1, np.minimum(depths, known))]
        return Predicted(predicted[..., None], logits[..., None])

    def _other(self, tokens: NDArray[np.int64]) -> NDArray[np.int64]:
        """Another token in the place of each."""
        letters = self._texts.letters
        found: NDArray[np.int64] = letters[(np.searchsorted(letters, tokens) + len(letters) // 2) % len(letters)]
        return found


def mask_depths(masked: NDArray[np.bool_]) -> NDArray[np.int64]:
    """The place of each mask row in its group, from 0; -1 of other rows. A group follows its node row by row."""
    rows = np.arange(masked.shape[1])
    node = np.maximum.accumulate(np.where(masked, -1, rows), axis=1)
    return np.where(masked, rows - node, 0) - 1


def replay_runtime(
    base: Runtime, texts: MadeUpTexts, acceptance: Sequence[float], queue_limit: int, costs: StepCosts
) -> Runtime:
    """A runtime whose texts are the made-up ones, on the engine of another."""
    engine, tokens = base.engine, base.bundle.manifest.tokens
    replay = Replay(texts, tokens.mask, acceptance, engine.requests, engine.signature.vocab_size)
    made_up = MadeUpEngine(engine.signature, engine.requests, engine.capacity, replay, engine, engine.costs)
    return Runtime(endless(base.bundle), made_up, base.max_seq_len, queue_limit=queue_limit, costs=costs)


def made_up_texts(
    runtime: Runtime, options: DecodeOptions, lengths: Sequence[int]
) -> tuple[MadeUpTexts, tuple[TokenizedPrompt, ...]]:
    """The texts of a replay and their prompts, as long as given ones or as `--context` says."""
    assert options.replay is not None
    lengths = lengths or [options.context] * (options.limit or REPLAYED)
    manifest = runtime.bundle.manifest
    letters = writable_tokens(manifest, manifest.signature.vocab_size)
    letters = letters[letters > 0]  # 0 is the token of padding rows
    if len(lengths) > (most := len(letters) // 2):
        raise OptionFault(
            f"{len(lengths)} prompts in a replay: expected at most {most} with this vocabulary: lower --limit"
        )
    if (length := max(lengths) + options.max_tokens) > runtime.max_seq_len:
        raise OptionFault(
            f"--context {max(lengths)} and --max-tokens {options.max_tokens} make {length}, --max-seq-len is "
            f"{runtime.max_seq_len}: lower one of them, or raise --max-seq-len (the model goes up to {manifest.max_positions})"
        )
    texts = MadeUpTexts(letters, options.replay, len(lengths), length + 1, options.seed)
    prompts = [TokenizedPrompt(number + 1, texts.prompt(number, size)) for number, size in enumerate(lengths)]
    return texts, tuple(prompts)


def implied_tokens_per_step(acceptance: Sequence[float]) -> float:
    """What a chain with as many mask slots as a table has depths writes in a step on average."""
    return 1.0 + float(np.cumprod(acceptance).sum())


def _prime(most: int) -> int:
    """The largest prime that is no larger."""
    return next(n for n in range(most, 1, -1) if all(n % d for d in range(2, int(n**0.5) + 1)))
