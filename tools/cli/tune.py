"""`spaceport tune`: train a checkpoint to draft with mask slots, to fork, or both."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any

import click

from spaceport.exporter.checkpoint_files import require_adapter_folder, require_checkpoint
from spaceport.tools.cli.options import (
    DURATION,
    PATH,
    Sectioned,
    Unused,
    declared_options,
    json_option,
    overwrite_option,
    refuse_unused,
    remote_code_option,
    sections,
)
from spaceport.tools.terminal.screen import show_json
from spaceport.training.settings import DEFAULT, TokenNames, TrainingSettings, TuningJob, check_job

_DRAFTING = (
    *("mask_slots", "distinct", "group", "shift", "anchors", "drop_rate", "correction_rank", "mask_weight"),
    *("phrases", "mask_token"),
)
_FORKING = ("unfork_rate", "fork_token", "child_token")
_ADAPTING = ("rank", "alpha", "targets")


def check_use(context: click.Context) -> None:
    """Raise for an option that would have no effect."""
    objective, method = context.params["objective"], context.params["method"]
    adapting = method in ("lora", "gated-lora")
    refuse_unused(
        context,
        (
            Unused(objective == "apar", _DRAFTING, f"with --objective {objective}", "use --objective sar or both"),
            Unused(objective == "sar", _FORKING, f"with --objective {objective}", "use --objective apar or both"),
            Unused(not adapting, _ADAPTING, f"with --method {method}", "use --method lora or gated-lora"),
            Unused(context.params["adapter"] is not None, _ADAPTING, "with --adapter", "use those of the folder"),
        ),
    )


def _token_option(name: str, default: str | None, what: str) -> Callable[[Any], Any]:
    return click.option(
        f"--{name}-token", default=default, metavar="TOKEN", show_default=True, help=f"Text of the {what}."
    )


@sections(
    {
        "objective": "Objective",
        "cutoff": "Data",
        "epochs": "Optimization",
        "rank": "LoRA adapters",
        "mask_token": "Special tokens",
        "save_every": "Output and resuming",
        # Declared apart from their groups
        "validation": "Data",
        "time_budget": "Optimization",
        "adapter": "LoRA adapters",
        "bf16": "Optimization",
    },
    *("objective", "mask_slots", "validation", "epochs", "time_budget", "batch_size", "learning_rate"),
    *("bf16", "adapter", "rank", "resume", "overwrite", "as_json"),
)
@click.command("tune", cls=Sectioned, context_settings={"max_content_width": 110})
@click.argument("checkpoint", type=PATH)
@click.argument("target", metavar="TUNED", type=PATH)
@click.argument("data", nargs=-1, required=True, type=PATH)
@declared_options(TrainingSettings, defaults=True)
@click.option(
    "--time-budget",
    type=DURATION,
    metavar="TIME",
    help="Maximum training time, such as 100m or 1h30m; the learning rate decays with the time used.",
)
@click.option(
    "--validation",
    multiple=True,
    type=PATH,
    metavar="FILE",
    help="Validation data, evaluated at every saved state; repeatable.",
)
@click.option(
    "--adapter",
    type=PATH,
    metavar="FOLDER",
    help="Train the adapter in this folder further, with its rank, alpha and layers; CHECKPOINT is its base model.",
)
@_token_option("mask", DEFAULT.masks[0], "mask token")
@_token_option("fork", DEFAULT.fork, "token that forks a thread")
@_token_option("child", DEFAULT.child, "first token of a child thread")
@declared_options(TuningJob, defaults=True)
@overwrite_option("checkpoint")
@remote_code_option
@json_option("the outcome")
def command(as_json: bool, **given: Any) -> None:
    """Train CHECKPOINT (a Hugging Face folder or a GGUF file) on DATA (JSONL files) and write the tuned checkpoint to TUNED.

    A line of DATA has the "messages" of a chat, "prompt" and "response", or plain "text". While the training runs, its state is saved in TUNED.training.
    """
    check_use(click.get_current_context())
    job = TuningJob(
        settings=TrainingSettings(**_given(TrainingSettings, given)),
        names=TokenNames((given["mask_token"],), given["fork_token"], given["child_token"]),
        remote_code=given["trust_remote_code"],
        **_given(TuningJob, given),
    )
    check_job(job)
    require_checkpoint(job.checkpoint)
    if job.adapter is not None:
        require_adapter_folder(job.adapter)
    # torch is imported only once the options and paths are valid
    from spaceport.training.tuning import is_first, train

    outcome = train(job)
    if as_json and is_first():
        show_json(outcome.as_dict())


def _given(declaring: type, given: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a dataclass among the options of the command."""
    return {field.name: given[field.name] for field in fields(declaring) if field.name in given}
