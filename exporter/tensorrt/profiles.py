"""Profiles: the ranges of shapes that an engine is built for, and the shapes that it is tuned to."""

from __future__ import annotations

from dataclasses import dataclass

from spaceport.graphs.contract.faults import OptionFault
from spaceport.graphs.contract.signature import STEP_ROWS, VISIBLE_STEP, logit_rows, visible_length

MAX_REQUESTS = 1024

# dimension of the contract -> least, tuned to, most
Profile = dict[str, tuple[int, int, int]]


@dataclass(frozen=True)
class Shapes:
    """How much an engine takes in a call."""

    capacity: int  # slots of a request
    requests: int
    step_rows: int  # most rows of a request in a step that CUDA graphs are captured for
    prompt_rows: int  # most rows of a request in any call

    def __post_init__(self) -> None:
        if not 1 <= self.requests <= MAX_REQUESTS:
            raise OptionFault(f"--max-requests is {self.requests}: expected 1 to {MAX_REQUESTS}")
        if self.capacity % VISIBLE_STEP or self.capacity < VISIBLE_STEP:
            raise OptionFault(f"the capacity is {self.capacity} slots: expected a multiple of {VISIBLE_STEP}")
        if not STEP_ROWS <= self.prompt_rows <= self.capacity:
            raise OptionFault(
                f"--prompt-rows is {self.prompt_rows}: expected {STEP_ROWS}, the widest step that writes, to "
                f"{self.capacity}, the slots of a request; raise --max-seq-len for more"
            )
        if not 1 <= self.step_rows <= self.prompt_rows:
            raise OptionFault(
                f"--max-step-rows is {self.step_rows}: expected 1 to {self.prompt_rows}, the rows of a prompt"
            )


def profiles(shapes: Shapes, vocab_size: int, mask_slots: int) -> tuple[Profile, Profile]:
    """The profile of steps, tuned to the widest draft of one text, and that of prompts, tuned to a full chunk of one.

    One text, since that is where latency is felt: what is fast for its rows is not slow for those of four. Its visible
    length is taken to be half of what there is room for.
    """
    requests = (1, 1, shapes.requests)
    visible = (VISIBLE_STEP, visible_length(shapes.capacity // 2), shapes.capacity)
    drafted = min((mask_slots + 1) ** 2, shapes.step_rows)  # a row and the mask slots behind each candidate
    most = logit_rows(shapes.prompt_rows, vocab_size)
    rows = (1, drafted, shapes.step_rows)
    return (
        {"B": requests, "T": rows, "R": rows, "A": visible},
        {"B": requests, "T": (1, shapes.prompt_rows, shapes.prompt_rows), "R": (1, 1, most), "A": visible},
    )
