"""Profiles: the optimization profiles of an engine, one for decode steps and one for prefill."""

from __future__ import annotations

from dataclasses import dataclass

from spaceport.graphs.contract.faults import OptionFault
from spaceport.graphs.contract.signature import STEP_ROWS, VISIBLE_STEP, logit_rows, visible_length

MAX_REQUESTS = 1024

# dimension -> minimum, optimum, maximum
Profile = dict[str, tuple[int, int, int]]


@dataclass(frozen=True)
class Shapes:
    """The maximum sizes of an engine's calls."""

    capacity: int  # KV slots per request
    requests: int
    step_rows: int  # maximum rows per request in decode steps, for which CUDA graphs are captured
    prompt_rows: int  # maximum rows per request in any call

    def __post_init__(self) -> None:
        if not 1 <= self.requests <= MAX_REQUESTS:
            raise OptionFault(f"--max-requests is {self.requests}: expected 1 to {MAX_REQUESTS}")
        if self.capacity % VISIBLE_STEP or self.capacity < VISIBLE_STEP:
            raise OptionFault(f"the capacity is {self.capacity} slots: expected a multiple of {VISIBLE_STEP}")
        if not STEP_ROWS <= self.prompt_rows <= self.capacity:
            raise OptionFault(
                f"--prefill-rows is {self.prompt_rows}: expected {STEP_ROWS}, the maximum of a decode step, to "
                f"{self.capacity}, the KV slots per request; raise --max-seq-len for more"
            )
        if not 1 <= self.step_rows <= self.prompt_rows:
            raise OptionFault(
                f"--max-step-rows is {self.step_rows}: expected 1 to {self.prompt_rows}, the value of --prefill-rows"
            )


def profiles(shapes: Shapes, row_logits: int, mask_slots: int, heads: int = 0) -> tuple[Profile, Profile]:
    """The decode profile and the prefill profile of an engine.

    They are tuned for one request, where latency matters most: for its largest draft, and for a full prefill chunk. Kernels
    for one request are not slow for four. The tuned visible length is half of the capacity.
    """
    requests = (1, 1, shapes.requests)
    visible = (VISIBLE_STEP, visible_length(shapes.capacity // 2), shapes.capacity)
    drafted = (mask_slots + 1) ** 2 + heads  # the root and each candidate, with its mask slots if it has no heads
    drafted = min(drafted, shapes.step_rows)
    most = logit_rows(shapes.prompt_rows, row_logits)
    rows = (1, drafted, shapes.step_rows)
    return (
        {"B": requests, "T": rows, "R": rows, "A": visible},
        {"B": requests, "T": (1, shapes.prompt_rows, shapes.prompt_rows), "R": (1, 1, most), "A": visible},
    )
