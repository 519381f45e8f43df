"""Token selector: which token a row of logits stands for, as the decode loop asks for it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from spaceport.runtime.decode.draft import Candidates
from spaceport.runtime.decode.threads import Thread


class NotANumber(RuntimeError):
    """An engine returned logits that are NaN or infinite."""


class TokenSelector(Protocol):
    """Chooses tokens from logits; for the same text and the same logits it always chooses the same.

    One with a true attribute `selects` takes the best tokens of rows too, as `runtime.selection.SelectedRows`.
    """

    def token(self, logits: NDArray[np.float32], thread: Thread, ahead: Sequence[int]) -> int:
        """The token after a thread's tokens and those `ahead` of them, which this step has chosen already."""

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
