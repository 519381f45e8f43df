"""Scale: the x positions of steps, the same in every drawing of a page."""

from __future__ import annotations

from dataclasses import dataclass

LABELS = 172.0  # pixels left of a drawing for labels
_WIDTH = 980.0  # pixels of all steps together, if they fit
_WIDEST, _NARROWEST = 48.0, 16.0  # pixels of a step in the lanes


@dataclass(frozen=True)
class Scale:
    """A column of equal width for each step; steps are counted from 1."""

    steps: int
    column: float

    @property
    def width(self) -> float:
        return self.steps * self.column + 8

    def left(self, step: int) -> float:
        """The left edge of a step's column."""
        return (step - 1) * self.column

    def middle(self, step: int) -> float:
        return self.left(step) + self.column / 2

    @property
    def ticks(self) -> range:
        """The steps that are labelled with their number."""
        every = next(n for n in (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 10**6) if n * self.column >= 30)
        return range(every, self.steps + 1, every)


def scale_for_lanes(steps: int) -> Scale:
    """Columns wide enough to distinguish tokens, so that many steps are wider than the page."""
    return Scale(steps, min(_WIDEST, max(_NARROWEST, _WIDTH // max(1, steps))))
