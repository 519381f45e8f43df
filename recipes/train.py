"""Train: trains the shipped demo model on the running Python's standard library.

`python -m recipes.train` takes about half an hour on two CPU cores.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import click

from recipes.corpus import HELD_OUT_FILE, HELD_OUT_TEXT_FILE, TRAIN_FILE, Corpus, write_code, write_data
from recipes.scratch import CODE, DEMO, ModelShape, train_tokenizer, write_scratch
from spaceport.tools.demo.prompts import MODEL, PROMPTS_FILE
from spaceport.tools.terminal.tuning_screen import shown
from spaceport.tools.tune.job import TuningJob
from spaceport.tools.tune.settings import TrainingSettings
from spaceport.tools.tune.tuned_checkpoint import CARD_FILE
from spaceport.tools.tune.tuning import tune

_VALIDATION = 64  # conversations of each kind


@dataclass(frozen=True)
class Preset:
    """Corpus, model shape and training settings of a model."""

    write_corpus: Callable[[Path], Corpus]
    shape: ModelShape
    settings: TrainingSettings
    prompts: dict[str, Any]
    about: str  # text of the model card
    bf16: bool = False


_SOURCE = '    def log_error(self, format, *args):\n        """Log an error.\n'  # from a held-out file

PRESETS = {
    "demo": Preset(
        write_data,
        DEMO,
        TrainingSettings(
            objective="both",
            mask_slots=5,
            anchors=16,
            unfork_rate=0.0,  # the data contains unforked copies
            drop_rate=0.3,
            mask_weight=0.3,  # at 1, next-token prediction learns late
            cutoff=448,
            epochs=1.25,
            batch_size=8,
            micro_batch_size=8,
            learning_rate=1.5e-3,  # at 4e-3 it does not learn to copy names
            warmup=0.03,
            betas=(0.9, 0.98),
        ),
        {  # functions from held-out files
            "triangular": {"user": "Explain the parameters of triangular( low = 0.0, high = 1.0, mode = None )"},
            "fullmatch": {"user": "Explain the parameters of fullmatch( pattern, string, flags = 0 )"},
            "source": _SOURCE,
        },
        "The demo model, trained from scratch on the Python standard library by `python -m recipes.train`, with "
        "one file in ten held out. Its answers are templated and it is tiny: its figures show that the methods work. They are "
        "not comparable with published results.",
    ),
    "code": Preset(
        write_code,
        CODE,
        TrainingSettings(
            objective="sar",
            mask_slots=5,
            anchors=24,
            drop_rate=0.3,
            mask_weight=0.3,
            cutoff=512,
            epochs=2.0,
            batch_size=128,
            micro_batch_size=128,
            learning_rate=2e-3,
            warmup=0.03,
            weight_decay=0.1,
            betas=(0.9, 0.98),
        ),
        {"source": _SOURCE},
        "Trained from scratch by `python -m recipes.train --preset code` on the Python sources of the standard "
        "library and of the packages that were installed, with one package in ten held out.",
        bf16=True,
    ),
}


@click.command()
@click.argument("target", type=click.Path(path_type=Path), required=False)
@click.option(
    "--preset",
    type=click.Choice(("demo", "code")),
    default="demo",
    show_default=True,
    help="demo: the shipped model. code: 25 million weights, trained on the sources of installed packages; needs a GPU.",
)
@click.option("--work", type=click.Path(path_type=Path), show_default="temporary", help="Folder for the data.")
@click.option("--max-steps", type=int, metavar="N", help="Maximum training steps, for a trial.")
@click.option("--resume", is_flag=True, help="Continue an interrupted training; needs the same --work.")
def main(target: Path | None, preset: str, work: Path | None, max_steps: int | None, resume: bool) -> None:
    """Create the data, tokenizer and untrained model, train the model, and write it to TARGET.

    Without TARGET, replace the shipped model.
    """
    if target is None and preset != "demo":
        raise click.UsageError(
            f"--preset {preset} without TARGET: only the demo preset has a default target; name a folder"
        )
    with tempfile.TemporaryDirectory(prefix="spaceport-demo-") as temporary:
        folder = work or Path(temporary)
        train(folder, target or MODEL, PRESETS[preset], max_steps, resume)


def train(folder: Path, target: Path, preset: Preset, max_steps: int | None = None, resume: bool = False) -> None:
    """Run the whole recipe; a resumed training reuses the data in `folder`."""
    scratch, validation = folder / "scratch", folder / "validation.jsonl"
    if not resume:
        shutil.rmtree(scratch, ignore_errors=True)
        tokenizer = train_tokenizer(preset.write_corpus(folder).vocabulary, preset.shape.tokens)
        write_scratch(scratch, tokenizer, preset.shape)
        validation.write_text("".join(_first(folder / name) for name in (HELD_OUT_FILE, HELD_OUT_TEXT_FILE)), "utf-8")
    job = TuningJob(
        checkpoint=scratch,
        target=target,
        data=(folder / TRAIN_FILE,),
        settings=replace(preset.settings, max_steps=max_steps),
        validation=(validation,),
        bf16=preset.bf16,
        log_every=50,
        resume=resume,
        overwrite=True,
    )
    with shown(None) as callbacks:
        tune(job, callbacks)
    describe(target, preset.about)
    (target / PROMPTS_FILE).write_text(json.dumps(preset.prompts, indent=2) + "\n", "utf-8")


def describe(target: Path, about: str) -> None:
    """Write the description of a trained model into its card."""
    card = target / CARD_FILE
    _, _, rest = card.read_text("utf-8").partition("\n\n")
    card.write_text(f"# {target.name}\n\n{about}\n\n{rest}", "utf-8")


def _first(file: Path) -> str:
    return "".join(line + "\n" for line in file.read_text("utf-8").split("\n")[:_VALIDATION] if line)


if __name__ == "__main__":
    main()
