"""Token selection: the best tokens of each row, computed on the device, so that logits need not be copied."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from typing import Protocol, cast

import numpy as np
from numpy.typing import NDArray

from spaceport.runtime.engine import Batch, Engine


class SelectedRows:
    """The best tokens of some rows; their logits are copied only on request."""

    def __init__(self, packed: NDArray[np.float32], logits: Callable[[], NDArray[np.float32]]) -> None:
        self._packed = packed  # rows x (2n + 1): scores of the n best tokens, those tokens, log of the sum of all exp
        self._logits = logits

    def __getitem__(self, index: int | slice) -> SelectedRows:
        rows = slice(index, index + 1) if isinstance(index, int) else index
        return SelectedRows(self._packed[rows], lambda: self._logits()[rows])

    @property
    def logits(self) -> NDArray[np.float32]:
        """All logits of the rows."""
        return self._logits()

    def best(self, banned: Collection[int]) -> list[int] | None:
        """The best token of each row that is not banned, the lowest id among equals; None if it is unknown.

        It is unknown if all selected tokens are banned, if tokens that were not selected may have the same score, or if a
        logit is NaN.
        """
        found = []
        for line in self._packed.tolist():
            if (token := _best(line, banned)) is None:
                return None
            found.append(token)
        return found

    def probable(self, most: int, least: float, banned: Collection[int]) -> list[list[tuple[int, float]]]:
        """Up to `most` tokens of each row with a probability of at least `least`, with their probabilities.

        The probabilities are those of a row without the `banned` tokens.
        """
        found = []
        for *line, total in self._packed.tolist():
            count = len(line) // 2
            known = [
                (int(token), math.exp(score - total))
                for score, token in zip(line[:count], line[count:], strict=True)
                if math.isfinite(score - total)
            ]
            left = 1 - sum(probability for token, probability in known if token in banned)
            ranked = [(token, probability / left) for token, probability in known if token not in banned and left > 0]
            found.append([(token, probability) for token, probability in ranked if probability >= least][:most])
        return found


class SelectingEngine(Engine, Protocol):
    """An engine that can select the best tokens on its device."""

    def select(self, batch: Batch) -> list[SelectedRows]:
        """The best tokens of the needed rows of each request; valid until the next call."""


def selecting(engine: Engine) -> SelectingEngine | None:
    """The engine if it selects tokens on its device, else None."""
    return cast(SelectingEngine, engine) if getattr(engine, "selects", False) else None


def selected_rows(
    packed: NDArray[np.float32], logits: Callable[[], NDArray[np.float32]], wanted: int
) -> list[SelectedRows]:
    """The rows of each request, from a call with padding rows."""

    def of(request: int) -> Callable[[], NDArray[np.float32]]:
        return lambda: logits()[request, :wanted]

    return [SelectedRows(lines[:wanted], of(request)) for request, lines in enumerate(packed)]


def _best(line: list[float], banned: Collection[int]) -> int | None:
    count = len(line) // 2
    if not math.isfinite(line[-1]):
        return None
    allowed = [(-line[rank], int(line[count + rank])) for rank in range(count) if int(line[count + rank]) not in banned]
    if not allowed:
        return None
    score, token = min(allowed)
    return token if -score > line[count - 1] else None
