"""Logits of known tokens: fed N rows at a time, the noise of other step widths, and what plain decoding selects."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import cycle, islice
from statistics import median
from typing import Any

import numpy as np
from numpy.typing import NDArray

from spaceport.graphs.contract.exactness import tolerance_of
from spaceport.graphs.contract.manifest import TokenIds
from spaceport.runtime.comparison import ThreadTokens, TokenDifference, first_difference, token_differences
from spaceport.runtime.decode.draft import Candidates
from spaceport.runtime.decode.sequence import TokenSequence, root_sequence
from spaceport.runtime.decode.sequence_group import RequestStep, SequenceGroup
from spaceport.runtime.decode.step import step
from spaceport.runtime.decoding import Decoding
from spaceport.runtime.engine import PREFILL_ROWS, Engine
from spaceport.runtime.sampling.choice import Bans
from spaceport.runtime.sampling.sampler import gumbels, most_probable, noise_key
from spaceport.runtime.text.transcript import Path

WIDTHS = (1, 2, 4, 9, 16, 36, 64)
_BATCH_WIDTHS = (1, 9)  # rows of each request in batched calls
_MAX_BATCH = 4  # requests in a batched call
_PREFILL_CHUNK = 64  # smaller than the chunks of plain decoding, as when prompts share calls with other requests
_OUTLIER = 16  # times the median of all widths; on correct engines the ratio was at most 2
# Most probable tokens of a row that are compared: in half precision the errors of others are larger, and they are never
# chosen.
_TOP_TOKENS = 16
_GAPS = 48  # slots; fewer than the free slots that every request has for a step's rows

Logits = NDArray[np.float32]
# Called with the index of a sequence, a position in it, and the logits for the token there; valid until it returns.
OnLogits = Callable[[int, int, Logits], None]


@dataclass(frozen=True)
class FeedPlan:
    """How sequences are fed to an engine."""

    rows: int = 1  # rows of a sequence per step
    requests: int = 1  # sequences in one engine call
    plain: bool = False  # as plain decoding feeds them; else in small prefill chunks, with gaps between KV slots

    def first(self, thread: ThreadTokens) -> int:
        """Position of the first token in steps of this width.

        These steps end with the sequence, so those of a short sequence begin within its prompt.
        """
        if self.plain:
            return thread.start
        steps = min(-(-(len(thread.tokens) - thread.start + 1) // self.rows), len(thread.tokens) // self.rows)
        return len(thread.tokens) - steps * self.rows

    def first_scored(self, thread: ThreadTokens) -> int:
        """The first position whose logits come from a step of this width."""
        return max(thread.start, self.first(thread) + (not self.plain))

    def prefill_rows(self, first: int) -> int:
        """Rows per step for the tokens before position `first`; a chunked prefill has at least two chunks."""
        return PREFILL_ROWS if self.plain else min(_PREFILL_CHUNK, max(1, -(-first // 2)))


PLAIN = FeedPlan(plain=True)


class KnownTokens:
    """A token selector for sequences that are fed, not generated: its choices are not used."""

    def token(self, logits: Logits, thread: TokenSequence, ahead: Sequence[int]) -> int:
        return 0

    def candidates(self, logits: Logits, thread: TokenSequence, position: int, most: int) -> tuple[Candidates, ...]:
        return ()


class EchoObserver:
    """Passes on the logits for a sequence's tokens from a position on."""

    def __init__(self, index: int, first: int, on_logits: OnLogits) -> None:
        self.index = index
        self.has_nan = False  # some logits were NaN, so the KV cache may hold NaN too
        self._first, self._on_logits = first, on_logits

    def on_step(self, step: RequestStep) -> None:
        (part,), (own,) = step.parts, step.logits
        for row, logits in zip(part.rows_wanted.tolist(), own, strict=True):
            position = int(part.positions[row]) + 1
            if position >= self._first:
                self._on_logits(self.index, position, logits)
            self.has_nan |= bool(np.isnan(logits).any())


def feed(engine: Engine, threads: Sequence[ThreadTokens], plan: FeedPlan, on_logits: OnLogits) -> None:
    """Feed sequences in shared engine calls, and pass on the logits from each one's `start` to one after its end.

    Logits of rows that were fed in narrower steps are left out.
    """
    firsts = [plan.first(thread) for thread in threads]
    observers = [EchoObserver(index, plan.first_scored(thread), on_logits) for index, thread in enumerate(threads)]
    groups = [
        SequenceGroup(
            prompt=thread.tokens,
            capacity=engine.capacity,
            lowering=engine.signature.lowering,
            tokens=TokenIds(),
            selector=KnownTokens(),
            max_length=len(thread.tokens),
            max_total=0,  # it ends once its tokens are fed
            echo=thread.start - 1,
            observers=(observer,),
        )
        for thread, observer in zip(threads, observers, strict=True)
    ]
    gaps = [] if plan.plain else [_Gaps(sequences, index) for index, sequences in enumerate(groups)]
    while live := [(index, sequences) for index, sequences in enumerate(groups) if sequences.live]:
        for gap in gaps:
            gap.close_one()
        inputs = []
        for index, sequences in live:
            first, fed = firsts[index], sequences.threads[0].fed
            rows = plan.rows if fed >= first else min(plan.prefill_rows(first), first - fed)
            inputs.append(RequestStep(sequences, index, min(rows, engine.rows)))
        step(engine, inputs)
    for observer in observers:
        if observer.has_nan:
            engine.clear(observer.index)


def logits_of(engine: Engine, thread: ThreadTokens) -> Logits:
    """The logits of plain decoding for every position from a thread's start to one after its end."""
    computed = np.empty((len(thread.tokens) - thread.start + 1, engine.signature.vocab_size), np.float32)

    def on_logits(_: int, position: int, logits: Logits) -> None:
        computed[position - thread.start] = logits

    feed(engine, [thread], PLAIN, on_logits)
    return computed


class _Gaps:
    """Reserved slots that no row sees, one freed before each step, so that rows get slots with gaps and out of order.

    Draft trees leave slots like this, and the slots of a row decide the order of its floating-point sums.
    """

    def __init__(self, sequences: SequenceGroup, seed: int) -> None:
        self._slots = sequences.slots
        held = sequences.slots.allocate(np.zeros(_GAPS, np.int64))
        self._held = np.random.default_rng(seed).permutation(held)
        for _ in range(_GAPS // 2):
            self.close_one()

    def close_one(self) -> None:
        """Free one slot."""
        if self._slots.held and self._held.size:
            self._slots.free(self._held[:1])
            self._held = self._held[1:]


@dataclass
class Noise:
    """The logit differences between one step width and steps of one row."""

    plan: FeedPlan
    positions: int = 0  # positions that were compared
    largest: float = 0.0  # NaN if some logits were NaN
    largest_logit: float = 0.0
    allowed: float = 0.0  # the largest difference that rounding explains

    @property
    def passed(self) -> bool:
        return self.largest <= self.allowed  # False for NaN

    @property
    def name(self) -> str:
        """The step width, such as `9 rows` or `4 x 9 rows`."""
        rows = "1 row" if self.plan.rows == 1 else f"{self.plan.rows} rows"
        return rows if self.plan.requests == 1 else f"{self.plan.requests} x {rows}"

    def feed(self, engine: Engine, threads: Sequence[ThreadTokens], plain: Sequence[Logits]) -> None:
        """Feed threads in shared calls, some of them twice if there are fewer than requests."""
        which = list(islice(cycle(range(len(threads))), self.plan.requests))

        def on_logits(index: int, position: int, logits: Logits) -> None:
            thread = which[index]
            self._compare(plain[thread][position - threads[thread].start], logits)

        feed(engine, [threads[thread] for thread in which], self.plan, on_logits)

    def as_dict(self) -> dict[str, Any]:
        return {
            "rows": self.plan.rows,
            "requests": self.plan.requests,
            "positions": self.positions,
            "noise": None if np.isnan(self.largest) else self.largest,
            "allowed": self.allowed,
            "passed": self.passed,
        }

    def _compare(self, plain: Logits, other: Logits) -> None:
        self.positions += 1
        self.largest = float(np.maximum(self.largest, difference(plain, other)))  # NaN propagates
        magnitudes = np.abs(plain[np.isfinite(plain)])
        self.largest_logit = max(self.largest_logit, float(magnitudes.max(initial=0.0)))


def measure(engine: Engine, threads: Sequence[ThreadTokens], native: bool = False) -> list[Noise]:
    """The noise of every step width of an engine on these threads, in other KV slots than in plain decoding."""
    widths = [Noise(plan) for plan in feed_plans(engine)]
    batch = min(_MAX_BATCH, engine.requests)
    for first in range(0, len(threads), batch):
        group = threads[first : first + batch]
        plain = [logits_of(engine, thread) for thread in group]
        for noise in widths:
            for begin in range(0, len(group), noise.plan.requests):
                part = slice(begin, begin + noise.plan.requests)
                noise.feed(engine, group[part], plain[part])
    measured = [noise for noise in widths if noise.positions]
    allowed = allowed_noise(measured, tolerance_of(engine.signature.dtype, native))
    for noise in measured:
        noise.allowed = allowed
    return measured


def allowed_noise(widths: Sequence[Noise], tolerance: float) -> float:
    """The largest difference that rounding explains: within the type's tolerance, and no outlier among the widths.

    The tolerance alone is too wide: it is meant for different engines, and in half precision exceeds the effect of one wrong
    mask bit.
    """
    nonzero = [noise.largest for noise in widths if noise.largest > 0]  # NaN is left out
    largest = max([1.0, *(noise.largest_logit for noise in widths)])
    spacing = float(np.spacing(np.float32(largest)))  # smallest difference in float32 at this magnitude
    usual = max(spacing, median(nonzero)) if nonzero else spacing
    return min(tolerance * largest, _OUTLIER * usual)


def feed_plans(engine: Engine) -> list[FeedPlan]:
    """The step widths that are measured on an engine, with one request and with several."""
    single = [FeedPlan(rows) for rows in WIDTHS if rows <= engine.rows]
    counts = sorted({2, min(_MAX_BATCH, engine.requests)}) if engine.requests > 1 else []
    return [*single, *(FeedPlan(rows, count) for count in counts for rows in _BATCH_WIDTHS)]


def noise_of(widths: Sequence[Noise]) -> float:
    """The largest noise that rounding explains; larger noise is itself a fault and explains no mismatch."""
    return max((noise.largest for noise in widths if noise.passed), default=0.0)


def difference(plain: Logits, other: Logits) -> float:
    """The largest difference over the most probable tokens of either row; NaN if either row holds NaN."""
    if np.isnan(plain).any() or np.isnan(other).any():
        return np.nan
    tokens = sorted(set(_top_tokens(plain)) | set(_top_tokens(other)))
    left, right = plain[tokens].astype(np.float64), other[tokens].astype(np.float64)
    differ = left != right  # equal infinities do not differ
    return float(np.abs(left[differ] - right[differ]).max(initial=0.0))


def _top_tokens(logits: Logits) -> list[int]:
    tokens: list[int] = most_probable(logits, min(_TOP_TOKENS, logits.size)).tolist()
    return tokens


@dataclass(frozen=True)
class SelectionRule:
    """How the modes of a group select tokens, computed independently of the runtime's selectors."""

    tokens: TokenIds
    bans: Bans
    seed: int | None

    def scores(self, logits: Logits, thread: ThreadTokens, position: int) -> NDArray[np.float64]:
        """Scores by token at a position: the highest is selected, among equal ones the lowest id."""
        scores = logits.astype(np.float64)
        if self.seed is not None:
            scores += gumbels(noise_key(self.seed, thread.path, position), np.arange(scores.size))
        before = root_sequence(thread.tokens[position - 1 : position], 0)
        before.path = thread.path
        scores[list(self.bans.at(before, ()))] = -np.inf
        return scores


def selection_rule(decoding: Decoding, tokens: TokenIds) -> SelectionRule:
    """The selection rule of plain decoding with these options."""
    never, seed = frozenset(tokens.forbidden), decoding.sampling.seed
    if decoding.fork:
        return SelectionRule(tokens, Bans(never, tokens.fork, tokens.child, Decoding.max_depth), seed)
    return SelectionRule(tokens, Bans(never | frozenset(tokens.fork_ids)), seed)


def find_mismatches(
    engine: Engine, rule: SelectionRule, thread: ThreadTokens, limit: int, plain: ThreadTokens | None = None
) -> list[TokenDifference]:
    """Every position, from the first difference to the plain thread on, whose token plain decoding would not select.

    The thread's own tokens are fed, one row per step, so each token is verified after the tokens that precede it here, and a
    later mismatch is not hidden by an earlier one. `limit` is the maximum length of the thread, prompt included.
    """
    first = thread.start if plain is None else first_difference(thread, plain)
    if first is None:
        return []
    logits = logits_of(engine, thread)
    mismatches = [*_wrong_tokens(rule, thread, logits, first), *_wrong_length(thread, limit)]
    if plain is not None and first < min(_length(thread), _length(plain)):
        mismatches = [
            _first_mismatch(rule, thread, plain, first, logits),
            *(mismatch for mismatch in mismatches if mismatch.position != first),
        ]
    return mismatches


def unmatched_threads(threads: dict[Path, ThreadTokens], plain: dict[Path, ThreadTokens]) -> list[TokenDifference]:
    """The threads that only one of two completions has, although their parents are equal."""
    differences = token_differences(threads, plain)
    return [difference for path, difference in differences.items() if path not in threads or path not in plain]


def _wrong_tokens(rule: SelectionRule, thread: ThreadTokens, logits: Logits, first: int) -> Iterator[TokenDifference]:
    for position in range(first, _length(thread)):
        scores = rule.scores(logits[position - thread.start], thread, position)
        token, best = _token_at(rule, thread, position, scores), int(scores.argmax())
        if np.isnan(scores).any():
            yield TokenDifference(
                thread.path, position, thread.start, None, token, np.nan, reason="the logits hold NaN"
            )
        elif best != token:
            margin = float(scores[best] - scores[token])
            yield TokenDifference(thread.path, position, thread.start, best, token, margin)


def _wrong_length(thread: ThreadTokens, limit: int) -> list[TokenDifference]:
    """A mismatch if a thread without an end token is shorter or longer than its limit."""
    length = len(thread.tokens)
    if thread.ended or thread.cut or max(limit, thread.start) == length:
        return []
    reason = f"the thread ends too {'early' if length < limit else 'late'}, its limit is {limit} tokens"
    return [TokenDifference(thread.path, length, thread.start, None, None, reason=reason)]


def _first_mismatch(
    rule: SelectionRule, thread: ThreadTokens, plain: ThreadTokens, position: int, logits: Logits
) -> TokenDifference:
    """The first difference of two threads, with the tokens of both.

    The margin is that of the worse token: on a nondeterministic engine the plain token may not be the best one.
    """
    scores = rule.scores(logits[position - thread.start], thread, position)
    expected, found = _token_at(rule, plain, position, scores), _token_at(rule, thread, position, scores)
    margin = float(scores.max() - min(scores[expected], scores[found]))
    reason = "the logits hold NaN" if np.isnan(margin) else ""
    return TokenDifference(thread.path, position, thread.start, expected, found, margin, reason=reason)


def _token_at(rule: SelectionRule, thread: ThreadTokens, position: int, scores: NDArray[np.float64]) -> int:
    """The token at a position; after the last token the most probable end token."""
    if position < len(thread.tokens):
        return thread.tokens[position]
    return max(rule.tokens.end, key=lambda token: (scores[token], -token))


def _length(thread: ThreadTokens) -> int:
    """Number of tokens, end token included."""
    return len(thread.tokens) + thread.ended
