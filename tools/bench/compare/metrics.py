"""Metrics: what is measured of every runtime, with the same prompts for all of them in a round."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from spaceport.graphs.contract.faults import OptionFault

Unit = Literal["ms", "tokens/s"]
_IDS = (3, 200)  # range of prompt token ids: in every vocabulary, after the usual special tokens


@dataclass(frozen=True)
class Workload:
    """Lengths and counts of the measured calls."""

    context: int = 256  # cached tokens before each measured step
    tokens: int = 32  # decode steps per round
    rows: tuple[int, ...] = (1, 4, 9, 16, 36)
    repeats: int = 3  # steps of each width per round
    prefill: int = 1024  # prompt tokens
    requests: int = 8  # concurrent requests
    request_context: int = 64  # prompt tokens per request
    request_tokens: int = 32  # new tokens per request
    seed: int = 0

    def __post_init__(self) -> None:
        least = min(self.context, self.tokens, *self.rows, self.repeats, self.prefill, self.requests)
        if min(least, self.request_context, self.request_tokens) < 1 or self.tokens < 2:
            raise OptionFault("a length or a count is too small: expected at least 1 of each, and 2 of --tokens")
        if max(self.rows) >= self.context:
            raise OptionFault(f"{max(self.rows)} rows after {self.context} tokens: expected a longer --context")

    @property
    def length(self) -> int:
        """Maximum context length of all metrics, in tokens."""
        steps = self.context + max(self.tokens, 2 * max(self.rows))
        return max(steps, self.prefill + 1, self.request_context + self.request_tokens)


@dataclass(frozen=True)
class Metric:
    """One column of the comparison."""

    name: str  # table heading
    call: str  # call of the worker protocol
    unit: Unit
    size: int = 0  # rows per step, or tokens of a prefill


def metrics_of(workload: Workload) -> tuple[Metric, ...]:
    """The metrics in table order."""
    return (
        Metric("decode", "decode", "ms"),
        *(Metric(f"{rows} rows" if rows > 1 else "1 row", "rows", "ms", rows) for rows in workload.rows),
        Metric("prefill", "prefill", "tokens/s", workload.prefill),
        Metric(f"{workload.requests} requests", "requests", "tokens/s"),
    )


def arguments(metric: Metric, workload: Workload, round_: int) -> dict[str, Any]:
    """The arguments of a worker call; prompts differ by round and metric, as some runtimes cache prefixes."""
    random = np.random.default_rng((workload.seed, round_ + 1, *metric.name.encode()))

    def prompt(length: int) -> list[int]:
        return [int(token) for token in random.integers(*_IDS, length)]

    if metric.call == "decode":
        return {"prompt": prompt(workload.context), "tokens": workload.tokens}
    if metric.call == "rows":
        return {"prompt": prompt(workload.context), "rows": prompt(metric.size), "repeats": workload.repeats}
    if metric.call == "prefill":
        return {"prompt": prompt(metric.size)}
    prompts = [prompt(workload.request_context) for _ in range(workload.requests)]
    return {"prompts": prompts, "tokens": workload.request_tokens}


def value_of(metric: Metric, value: Any) -> float:
    """The value of a metric from a worker's result: ms per step, or tokens/s."""
    if metric.call == "prefill":
        return metric.size / float(value)
    if metric.call == "requests":
        tokens, seconds = value
        return float(tokens) / float(seconds)
    times: Sequence[float] = value
    return statistics.median(times) * 1e3
