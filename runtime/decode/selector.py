"""Token selector: the protocol by which the decode loop selects tokens from logits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from spaceport.graphs.contract.faults import SpaceportError
from spaceport.runtime.decode.draft import Candidates
from spaceport.runtime.decode.threads import Thread


class NotANumber(SpaceportError, RuntimeError):
    """The logits of a request hold NaN; check the bundle with `spaceport check`."""


class TokenSelector(Protocol):
    """Selects tokens from logits, always the same ones for the same text and logits.

    A selector whose attribute `selects` is true also takes `runtime.selection.SelectedRows` instead of logits.
    """

    def token(self, logits: NDArray[np.float32], thread: Thread, ahead: Sequence[int]) -> int:
        """The next token after a thread's tokens and the tokens `ahead` that this step has already selected."""

    def candidates(
        self, logits: NDArray[np.float32], thread: Thread, position: int, most: int
    ) -> tuple[Candidates, ...]:
        """Up to `most` candidates for each row of logits; the first row is for index `place` of the thread."""


def not_a_number(position: int) -> NotANumber:
    """The error for logits that hold NaN."""
    return NotANumber(
        f"the logits for the token at position {position} hold NaN: `spaceport check` on the bundle shows whether the "
        "export or the engine is at fault; a float16 model that overflows needs --dtype float32 at its export"
    )
