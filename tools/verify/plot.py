"""Acceptance in two panels, accuracy by mask slot and tokens per step by number of mask slots."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from spaceport.tools.verify.acceptance import MeasuredDrafts, Tally

# Okabe and Ito's blue and vermilion, distinct for every kind of colour vision; the markers differ as well.
_GENERATED = ("#0072B2", "o", "generated answers", 8)
_REFERENCE = ("#D55E00", "s", "reference answers", -14)


def draw(measured: MeasuredDrafts, file: Path, title: str) -> None:
    """Write the plot, in the format of the file's suffix."""
    figure = Figure(figsize=(10, 4.4), layout="constrained")
    accuracy, speed = figure.subplots(1, 2)
    figure.suptitle(title, fontsize=11)
    slots = list(range(1 + measured.reference.mask_slots))
    for tally, style in ((measured.generated, _GENERATED), (measured.reference, _REFERENCE)):
        _line(accuracy, slots, tally.accuracy, "{:.0%}", style)
        _line(speed, slots, tally.tokens_per_step, "{:.2f}", style)
    _frame(accuracy, "Prediction accuracy", f"{measured.predictor} (0: next token)", slots)
    accuracy.set_ylim(0, 1.08)
    accuracy.yaxis.set_major_formatter(PercentFormatter(1.0))
    _frame(speed, "Tokens per step", f"{measured.predictor}s in use (0: plain decoding)", slots)
    speed.set_ylim(0, 1.15 * max(1.0, _highest(measured.generated), _highest(measured.reference)))
    figure.legend(*accuracy.get_legend_handles_labels(), loc="outside lower center", ncols=2, frameon=False)
    figure.savefig(file, dpi=150, metadata={"Date": None} if file.suffix.lower() == ".svg" else None)


def _highest(tally: Tally) -> float:
    return max((value for value in tally.tokens_per_step if value is not None), default=1.0)


def _line(
    axes: Axes,
    slots: Sequence[int],
    values: Sequence[float | None],
    label_format: str,
    style: tuple[str, str, str, int],
) -> None:
    """Draw a line with its values beside the markers; slots without a value are left out."""
    color, marker, label, offset = style
    points = [(slot, value) for slot, value in zip(slots, values, strict=True) if value is not None]
    axes.plot(*zip(*points, strict=True), color=color, marker=marker, linewidth=1.8, label=label)
    for slot, value in points:
        axes.annotate(
            label_format.format(value),
            (slot, value),
            textcoords="offset points",
            xytext=(0, offset),
            ha="center",
            fontsize=8,
            color=color,
        )


def _frame(axes: Axes, title: str, label: str, slots: Sequence[int]) -> None:
    axes.set_title(title, fontsize=10)
    axes.set_xlabel(label)

    axes.set_xticks(slots)
    axes.set_xlim(slots[0] - 0.4, slots[-1] + 0.4)
    axes.grid(axis="y", color="#DDDDDD", linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_axisbelow(True)
