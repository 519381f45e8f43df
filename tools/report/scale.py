"""Scale: where the steps stand, the same in every drawing of a page."""

from __future__ import annotations

from dataclasses import dataclass

LABELS = 172.0  # pixels beside a drawing for what its lanes or lines are called
_WIDTH = 980.0  # pixels that the steps take up if there are few enough
_WIDEST, _NARROWEST = 48.0, 16.0  # a step's column that can hold tokens


@dataclass(frozen=True)
class Scale:
    """Columns of one width, a step in each; steps count from 1."""

    steps: int
    column: float

    @property
    def width(self) -> float:
        return self.steps * self.column + 8

    def left(self, step: int) -> float:
        """Where the column of a step begins."""
        return (step - 1) * self.column

    def middle(self, step: int) -> float:
        return self.left(step) + self.column / 2

    @property
    def ticks(self) -> range:
        """The steps that are given by their number."""
        every = next(n for n in (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 10**6) if n * self.column >= 30)
        return range(every, self.steps + 1, every)


def scale_for_lanes(steps: int) -> Scale:
    """Columns wide enough to tell tokens apart: the drawing of many steps is wider than a page."""
    return Scale(steps, min(_WIDEST, max(_NARROWEST, _WIDTH // max(1, steps))))


def scale_for_charts(steps: int) -> Scale:
    """The same columns as long as they fit on a page, or else narrower ones that do."""
    return Scale(steps, min(scale_for_lanes(steps).column, _WIDTH / max(1, steps)))
