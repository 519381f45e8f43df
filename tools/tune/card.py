"""Card: the model card of a tuned checkpoint with data, settings, results and curves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from spaceport import __version__
from spaceport.tools.tune.batches import TrainingBatches
from spaceport.tools.tune.curves import draw_curves
from spaceport.tools.tune.job import TuningJob, TuningOutcome

CARD_FILE, CURVES_FILE = "README.md", "training.svg"
_PACKAGES = ("torch", "transformers", "accelerate", "peft", "tokenizers")


@dataclass(frozen=True)
class CardFacts:
    """Contents of a card."""

    job: TuningJob
    batches: TrainingBatches
    outcome: TuningOutcome


def write_card(folder: Path, facts: CardFacts) -> None:
    """Write the card and its curves to a checkpoint folder."""
    draw_curves(facts.outcome.measurements, folder / CURVES_FILE)
    (folder / CARD_FILE).write_text(card(facts), "utf-8")


def card(facts: CardFacts) -> str:
    """The card as Markdown."""
    job, settings, counts = facts.job, facts.outcome.settings, facts.outcome.counts
    learned = {
        "sar": f"to draft {settings.slots} tokens ahead with mask slots",
        "apar": "to fork into parallel threads",
        "both": f"to draft {settings.slots} tokens ahead with mask slots and to fork into parallel threads",
    }
    last = {line["kind"]: line for line in facts.outcome.measurements}
    title = f"{job.checkpoint.name}, tuned with spaceport"
    usage = f"This model was trained {learned[settings.objective]}. Export it with `spaceport export`"
    if job.adapter_only:
        title = f"Adapter for {job.checkpoint.name}, trained with spaceport"
        usage = (
            f"This adapter was trained {learned[settings.objective]}; it needs its base model. Export both with "
            f"`spaceport export {job.checkpoint.name} BUNDLE --adapter {job.target.name}`"
        )
    parts = [
        f"# {title}",
        f"{usage} and measure its draft acceptance with `spaceport acceptance`.",
        "## Results",
        _table(("", *(_column(index) for index in range(settings.slots + 1))), _results(last)),
        "Loss is the mean cross entropy; accuracy is the fraction of targets that are the most probable token, given the true text.",
        f"![curves]({CURVES_FILE})",
        "## Data",
        _table(("file",), [(path.name,) for path in job.data]),
        _table(("samples", "count"), [(name, count) for name, count in counts.items() if count]),
        "## Training",
        _table(("", ""), _training(facts, last)),
        "## Settings",
        _table(("setting", "value"), [(name, value) for name, value in settings.as_dict().items()]),
        "## Versions",
        _table(("package", "version"), [("spaceport", __version__), *((name, version(name)) for name in _PACKAGES)]),
    ]
    return "\n\n".join(parts) + "\n"


def _results(last: dict[str, dict[str, Any]]) -> list[Sequence[object]]:
    rows: list[Sequence[object]] = []
    for kind, line in last.items():
        rows.append((f"{kind}: loss", *("-" if value is None else f"{value:.3f}" for value in line["losses"])))
        rows.append((f"{kind}: accuracy", *("-" if value is None else f"{value:.1%}" for value in line["accuracies"])))
        if line.get("corrected"):
            corrected = ("-" if value is None else f"{value:.1%}" for value in line["corrected"])
            rows.append((f"{kind}: accuracy with the draft correction", "-", *corrected))
    return rows


def _training(facts: CardFacts, last: dict[str, dict[str, Any]]) -> list[Sequence[object]]:
    final = last.get("training", {})
    steps = final.get("step", 0)  # fewer than planned if a time budget ended the training
    return [
        ("samples per epoch", facts.batches.samples),
        ("steps", steps),
        ("epochs", f"{steps / facts.batches.epoch_steps:.2f}"),
        ("tokens, mask slots included", f"{final.get('tokens', 0):,}"),
        ("hours", f"{final.get('seconds', 0) / 3600:.2f}"),
    ]


def _column(index: int) -> str:
    return f"mask slot {index}" if index else "next token"


def _table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(str(cell).replace("|", "\\|") for cell in line) + " |" for line in lines)
