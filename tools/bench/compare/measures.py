"""Measures: what is asked of every runtime, with the same token ids for all of them in a round."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from spaceport.graphs.contract.faults import OptionFault

Unit = Literal["ms", "tokens/s"]
_IDS = (3, 200)  # token ids of prompts: in every vocabulary, and beyond the usual special tokens


@dataclass(frozen=True)
class Workload:
    """Lengths and counts of what is measured."""

    context: int = 256  # tokens behind which steps are taken
    tokens: int = 32  # decode steps of a round
    rows: tuple[int, ...] = (1, 4, 9, 16, 36)
    repeats: int = 3  # steps of each number of rows in a round
    prefill: int = 1024
    requests: int = 8
    request_context: int = 64
    request_tokens: int = 32
    seed: int = 0

    def __post_init__(self) -> None:
        least = min(self.context, self.tokens, *self.rows, self.repeats, self.prefill, self.requests)
        if min(least, self.request_context, self.request_tokens) < 1 or self.tokens < 2:
            raise OptionFault("a length or a count is too small: expected at least 1 of each, and 2 of --tokens")
        if max(self.rows) >= self.context:
            raise OptionFault(f"{max(self.rows)} rows behind {self.context} tokens: expected a longer --context")

    @property
    def length(self) -> int:
        """Longest text of all measures."""
        behind = self.context + max(self.tokens, 2 * max(self.rows))
        return max(behind, self.prefill + 1, self.request_context + self.request_tokens)


@dataclass(frozen=True)
class Measure:
    """One figure of the comparison."""

    name: str  # column of the tables
    ask: str  # request of the worker's protocol
    unit: Unit
    size: int = 0  # rows of a step, tokens of a prefill


def measures_of(workload: Workload) -> tuple[Measure, ...]:
    """The measures in the order of the tables."""
    return (
        Measure("decode", "decode", "ms"),
        *(Measure(f"{rows} rows" if rows > 1 else "1 row", "rows", "ms", rows) for rows in workload.rows),
        Measure("prefill", "prefill", "tokens/s", workload.prefill),
        Measure(f"{workload.requests} requests", "requests", "tokens/s"),
    )


def arguments(measure: Measure, workload: Workload, round_: int) -> dict[str, Any]:
    """What the worker is asked with; prompts differ between rounds and measures, as some runtimes cache prefixes."""
    random = np.random.default_rng((workload.seed, round_ + 1, *measure.name.encode()))

    def prompt(length: int) -> list[int]:
        return [int(token) for token in random.integers(*_IDS, length)]

    if measure.ask == "decode":
        return {"prompt": prompt(workload.context), "tokens": workload.tokens}
    if measure.ask == "rows":
        return {"prompt": prompt(workload.context), "rows": prompt(measure.size), "repeats": workload.repeats}
    if measure.ask == "prefill":
        return {"prompt": prompt(measure.size)}
    prompts = [prompt(workload.request_context) for _ in range(workload.requests)]
    return {"prompts": prompts, "tokens": workload.request_tokens}


def figure(measure: Measure, value: Any) -> float:
    """The figure of one turn from what the worker measured: ms of a step, or tokens a second."""
    if measure.ask == "prefill":
        return measure.size / float(value)
    if measure.ask == "requests":
        tokens, seconds = value
        return float(tokens) / float(seconds)
    times: Sequence[float] = value
    return statistics.median(times) * 1e3
