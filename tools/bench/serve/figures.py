"""Figures: what the exchanges of a run say about a service."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from statistics import median
from typing import Any

import numpy as np

from spaceport.tools.bench.serve.exchange import Exchange
from spaceport.tools.bench.serve.load_run import LoadRun
from spaceport.tools.bench.serve.processes import Resources

Expected = Sequence[tuple[list[int], str]]  # tokens and text of the answer to each prompt


@dataclass(frozen=True)
class Quantiles:
    """Mean and quantiles in milliseconds."""

    mean: float
    p50: float
    p95: float
    p99: float
    highest: float


@dataclass(frozen=True)
class Drafts:
    """Acceptance as the service reports it."""

    mean_acceptance_length: float  # 1 + accepted / steps
    acceptance_rate: float  # accepted / drafted


@dataclass(frozen=True)
class Figures:
    """One run of one subject, or the medians of several."""

    answered: float  # complete answers
    left: float  # requests whose client left
    refused: float
    failed: float
    compared: float  # answers compared with those of the bundle
    different: float
    seconds: float
    tokens_per_second: float  # that clients read; of streams that were left, events count as tokens
    goodput: float  # tokens per second of complete and right answers whose first token came in time
    requests_per_second: float  # complete answers
    first_token: Quantiles | None  # of streams
    per_token: Quantiles | None  # mean time between the tokens of a stream, over streams
    gap: Quantiles | None  # time between events with text, over all events
    refusal: Quantiles | None  # time until a refusal came
    drafts: Drafts | None
    cpu_per_token: float | None  # milliseconds of the process
    main_thread_per_token: float | None  # milliseconds of its first thread: the event loop of a service


def figures_of(
    run: LoadRun, expected: Expected | None, used: tuple[Resources, Resources] | None, first_token_limit: float | None
) -> Figures:
    """The figures of a run; `used` is what its process had used before and after it."""
    by_outcome: dict[str, list[Exchange]] = {name: [] for name in ("answered", "left", "refused", "failed")}
    for one in run.exchanges:
        by_outcome[one.outcome].append(one)
    answered = by_outcome["answered"]
    wrong = [one for one in answered if expected is not None and is_different(one, expected)]
    good = [one for one in answered if one not in wrong and _in_time(one, first_token_limit)]
    tokens = sum(one.token_count for one in run.exchanges)
    return Figures(
        answered=len(answered),
        left=len(by_outcome["left"]),
        refused=len(by_outcome["refused"]),
        failed=len(by_outcome["failed"]),
        compared=0 if expected is None else len(answered),
        different=len(wrong),
        seconds=run.seconds,
        tokens_per_second=tokens / run.seconds,
        goodput=sum(one.token_count for one in good) / run.seconds,
        requests_per_second=len(answered) / run.seconds,
        first_token=quantiles(one.first_token_seconds for one in run.exchanges),
        per_token=quantiles(one.seconds_per_token for one in answered),
        gap=quantiles(gap for one in run.exchanges if one.behaviour != "slow" for gap in one.gaps),
        refusal=quantiles(one.ended - one.started for one in by_outcome["refused"]),
        drafts=drafts_of(answered),
        cpu_per_token=_per_token(used, "cpu_seconds", tokens),
        main_thread_per_token=_per_token(used, "main_thread_seconds", tokens),
    )


def is_different(exchange: Exchange, expected: Expected) -> bool:
    """Whether a complete answer is not the expected one: its tokens, if the service reports them, and its text."""
    tokens, text = expected[exchange.prompt]
    return exchange.text != text or exchange.token_ids not in (None, tokens)


def statuses(exchanges: Iterable[Exchange]) -> dict[str, int]:
    """Number of exchanges by HTTP status."""
    return {str(status): count for status, count in sorted(Counter(one.status for one in exchanges).items())}


def quantiles(seconds: Iterable[float | None]) -> Quantiles | None:
    """Quantiles of these times; None without any."""
    found = [each * 1e3 for each in seconds if each is not None]
    return Quantiles(float(np.mean(found)), *np.quantile(found, (0.5, 0.95, 0.99, 1.0)).tolist()) if found else None


def drafts_of(exchanges: Iterable[Exchange]) -> Drafts | None:
    """Acceptance over the exchanges for which the service reports it; None without any."""
    found = [one.drafts for one in exchanges if one.drafts is not None]
    steps, drafted, accepted = (
        sum(one[name] for one in found) for name in ("num_spec_steps", "num_draft_tokens", "num_accepted_draft_tokens")
    )
    return Drafts(1 + accepted / steps, accepted / drafted if drafted else 0.0) if steps else None


def medians(found: Sequence[Any]) -> Any:
    """The medians of figures over rounds, field by field."""
    present = [one for one in found if one is not None]
    if not present:
        return None
    if isinstance(present[0], int | float):
        return float(median(present))
    return type(present[0])(
        **{field.name: medians([getattr(one, field.name) for one in present]) for field in fields(present[0])}
    )


def _per_token(used: tuple[Resources, Resources] | None, name: str, tokens: int) -> float | None:
    """Milliseconds of CPU time per token; None if they are unknown."""
    if used is None or not tokens:
        return None
    before, after = (getattr(one, name) for one in used)
    return float(after - before) * 1e3 / tokens


def _in_time(exchange: Exchange, limit: float | None) -> bool:
    first = exchange.first_token_seconds
    return limit is None or first is None or first <= limit
