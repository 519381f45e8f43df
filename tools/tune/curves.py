"""Curves: plots the losses and accuracies of a training."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure

# Palette for colour-blind readers (Okabe and Ito)
_COLOURS = ("#000000", "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#f0e442")

_NAMED = 16  # legend entries per column


def draw_curves(measurements: Sequence[dict[str, Any]], file: Path) -> None:
    """Plot losses and accuracies over the steps; the file's suffix selects the format."""
    with mpl.rc_context({"svg.hashsalt": "spaceport", "svg.fonttype": "none"}):
        named = sum(len(line["losses"]) for line in {line["kind"]: line for line in measurements}.values())
        columns = max(1, -(-named // _NAMED))
        figure = Figure(figsize=(8.4 + 1.6 * columns, 3.8), layout="constrained")
        losses, accuracies = figure.subplots(1, 2)
        for kind, style in (("training", "-"), ("validation", "o--")):
            lines = [line for line in measurements if line["kind"] == kind]
            steps = [line["step"] for line in lines]
            for index in range(len(lines[0]["losses"]) if lines else 0):
                if any(line["losses"][index] is None for line in lines):
                    continue
                name = (f"mask slot {index}" if index else "next token") + (
                    "" if kind == "training" else ", validation"
                )
                look: dict[str, Any] = {"color": _COLOURS[index % len(_COLOURS)], "linewidth": 1.2, "markersize": 4}
                losses.plot(steps, [line["losses"][index] for line in lines], style, **look)
                accuracies.plot(steps, [100 * line["accuracies"][index] for line in lines], style, label=name, **look)
        losses.set(xlabel="step", ylabel="loss", ylim=(0, None))
        accuracies.set(xlabel="step", ylabel="accuracy (%)", ylim=(0, 100))
        for axes in (losses, accuracies):
            axes.grid(alpha=0.3)
            axes.spines[["top", "right"]].set_visible(False)
        if measurements:
            accuracies.legend(fontsize=8, frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5), ncols=columns)
        figure.savefig(file, metadata={"Date": None} if file.suffix == ".svg" else None)
