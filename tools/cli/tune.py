"""`spaceport tune`: train a checkpoint to draft with mask slots, to fork, or both."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, ClassVar

import click

from spaceport.exporter.atomic_folder import ADAPTER_FOLDER, CHECKPOINT, check_target
from spaceport.exporter.checkpoint_files import require_adapter_folder, require_checkpoint
from spaceport.tools.cli.options import PATH, Sectioned, Unused, refuse_unused
from spaceport.tools.cli.tune_data import command as data_command
from spaceport.tools.cli.tune_options import (
    adapter_options,
    data_options,
    objective_options,
    optimization_options,
    output_options,
    token_options,
)
from spaceport.tools.terminal.screen import show_json
from spaceport.tools.tune.settings import TokenNames, TrainingSettings


class Tune(Sectioned):
    """The command and its subcommand `tune data`."""

    headings: ClassVar[Mapping[str, str]] = {
        "objective": "Objective",
        "validation": "Data",
        "epochs": "Optimization",
        "adapter": "LoRA adapters",
        "mask_token": "Special tokens",
        "save_every": "Output and resuming",
    }

    def make_context(self, info_name: str | None, args: list[str], *others: Any, **named: Any) -> click.Context:
        if args[:1] == ["data"]:
            return data_command.make_context(f"{info_name} data", args[1:], *others, **named)
        return super().make_context(info_name, args, *others, **named)


_DRAFTING = (
    *("mask_slots", "distinct", "group", "shift", "anchors", "drop_rate", "correction_rank", "mask_weight"),
    "mask_token",
)
_FORKING = ("unforked_share", "unfork_rate", "fork_token", "child_token")
_ADAPTING = ("rank", "alpha", "targets")


def check_use(context: click.Context) -> None:
    """Raise for an option that would have no effect."""
    objective, method = context.params["objective"], context.params["method"]
    refuse_unused(
        context,
        (
            Unused(objective == "apar", _DRAFTING, f"with --objective {objective}", "use --objective sar or both"),
            Unused(objective == "sar", _FORKING, f"with --objective {objective}", "use --objective apar or both"),
            Unused(
                method not in ("lora", "gated-lora"),
                _ADAPTING,
                f"with --method {method}",
                "use --method lora or gated-lora",
            ),
            Unused(context.params["adapter"] is not None, _ADAPTING, "with --adapter", "use those of the folder"),
            Unused(
                method != "gated-lora",
                ("adapter", "adapter_only"),
                f"with --method {method}",
                "use --method gated-lora",
            ),
            Unused(not context.params["self_distill"], ("bundle",), "without --self-distill", "add --self-distill"),
        ),
    )


@click.command("tune", cls=Tune, context_settings={"max_content_width": 110})
@click.argument("checkpoint", type=PATH)
@click.argument("tuned", type=PATH)
@click.argument("data", nargs=-1, required=True, type=PATH)
@objective_options
@data_options
@optimization_options
@adapter_options
@token_options
@output_options
def command(checkpoint: Path, tuned: Path, data: tuple[Path, ...], as_json: bool, **given: Any) -> None:
    """Train CHECKPOINT (a Hugging Face folder or a GGUF file) on DATA (JSONL files) and write the tuned checkpoint to TUNED.

    A line of DATA has the "messages" of a chat, "prompt" and "response", or plain "text". `spaceport tune data FILE`
    shows which answers fork. While the training runs, its state is saved in TUNED.training.
    """
    check_use(click.get_current_context())
    settings = TrainingSettings(
        **{field.name: given[field.name] for field in fields(TrainingSettings) if field.name in given}
    )
    check_target(tuned, given["overwrite"], ADAPTER_FOLDER if given["adapter_only"] else CHECKPOINT)
    require_checkpoint(checkpoint)
    if given["adapter"] is not None:
        require_adapter_folder(given["adapter"])
    # torch is imported only once the options and paths are valid
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # its warnings of lost processes are pages of C++ frames
    from spaceport.tools.terminal.tuning_screen import is_first, shown
    from spaceport.tools.tune.job import TuningJob
    from spaceport.tools.tune.own_answers import AnswerSource
    from spaceport.tools.tune.tuning import tune

    job = TuningJob(
        checkpoint=checkpoint,
        target=tuned,
        data=data,
        settings=settings,
        names=TokenNames((given["mask_token"],), given["fork_token"], given["child_token"]),
        validation=given["validation"],
        bf16=given["bf16"],
        recompute=given["recompute"],
        save_every=given["save_every"],
        log_every=given["log_every"],
        resume=given["resume"],
        auto_resume=given["auto_resume"],
        process_timeout=given["process_timeout"],
        overwrite=given["overwrite"],
        adapter=given["adapter"],
        adapter_only=given["adapter_only"],
        remote_code=given["trust_remote_code"],
        distillation=AnswerSource(given["bundle"]) if given["self_distill"] else None,
    )
    with shown(given["tensorboard"]) as callbacks:
        outcome = tune(job, callbacks)
    if as_json and is_first():
        show_json(outcome.as_dict())
