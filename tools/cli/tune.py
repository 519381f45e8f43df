"""`spaceport tune`: train a checkpoint to draft with mask slots, to fork, or both."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any, get_args

import click

from spaceport.exporter.atomic_folder import ADAPTER_FOLDER, CHECKPOINT, check_target
from spaceport.exporter.checkpoint_files import require_adapter_folder, require_checkpoint
from spaceport.graphs.contract.draft_methods import GROUPS
from spaceport.tools.cli.options import (
    DURATION,
    PATH,
    Sectioned,
    Unused,
    json_option,
    options,
    overwrite_option,
    refuse_unused,
    remote_code_option,
    sections,
)
from spaceport.tools.terminal.screen import show_json
from spaceport.training.settings import (
    DEFAULT,
    DEFAULT_CUTOFF,
    DEFAULT_MASK_SLOTS,
    Method,
    Objective,
    TokenNames,
    TrainingSettings,
)

_DRAFTING = (
    *("mask_slots", "distinct", "group", "shift", "anchors", "drop_rate", "correction_rank", "mask_weight"),
    *("phrases", "mask_token"),
)
_FORKING = ("unfork_rate", "fork_token", "child_token")
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
        ),
    )


def _setting(flag: str, metavar: str, help: str, **others: Any) -> Callable[[Any], Any]:
    """An option that sets a number of the training's settings, with its default and type."""
    default = getattr(TrainingSettings, flag.removeprefix("--").replace("-", "_"))
    settings = {"default": default, "type": type(default), "show_default": True, **others}
    return click.option(flag, metavar=metavar, help=help, **settings)


_objective = options(
    click.option(
        "--objective",
        type=click.Choice(get_args(Objective)),
        default="sar",
        show_default=True,
        help="Train drafting (sar), forking (apar), or both.",
    ),
    click.option(
        "--method",
        type=click.Choice(get_args(Method)),
        default="full",
        show_default=True,
        help=(
            "Parameters to train: all weights (full), LoRA adapters (lora), LoRA adapters on mask rows only, "
            "which leave the base model's output bit-identical (gated-lora), or the embeddings of the new tokens "
            "(embeddings)."
        ),
    ),
    _setting(
        "--mask-slots",
        "K",
        "Mask slots behind a token: draft tokens per step.",
        type=int,
        show_default=f"as in the checkpoint or adapter, else {DEFAULT_MASK_SLOTS}",
    ),
    click.option("--distinct", is_flag=True, help="Use one mask token per mask slot instead of one shared mask token."),
    click.option(
        "--mask-group",
        "group",
        type=click.Choice(GROUPS),
        show_default="as in the checkpoint, else causal",
        help="Mask rows of its group that a mask row sees: those before it (causal), or all (block).",
    ),
    click.option(
        "--shift/--no-shift",
        default=None,
        show_default="as in the checkpoint, else --shift",
        help="Whether a mask row predicts the token after its position, or the one at its position.",
    ),
    _setting("--anchors", "N", "Mask groups per sample, at random positions that change every epoch."),
    _setting("--drop-rate", "P", "From the second mask slot of a group on, end the group here with probability P."),
    _setting(
        "--correction-rank",
        "R",
        "Rank of the draft correction, which scores a draft token by the one before it, such as 64; 0: none.",
    ),
    _setting(
        "--phrases",
        "N",
        "Maximum number of phrases that are counted in DATA, for draft tokens without mask slots; 0: none.",
    ),
    _setting("--mask-weight", "W", "Weight of the mask slots' mean loss relative to the next-token loss."),
    _setting(
        "--unfork-rate",
        "P",
        "Probability that an answer that could fork is trained without forks.",
    ),
)

_data = options(
    click.option(
        "--validation",
        multiple=True,
        type=PATH,
        metavar="FILE",
        help="Validation data, evaluated at every saved state; repeatable.",
    ),
    _setting(
        "--cutoff",
        "N",
        "Maximum sample length in tokens, prompt included.",
        show_default=f"{DEFAULT_CUTOFF}, or the model's maximum",
    ),
)

_optimization = options(
    _setting("--epochs", "N", "Passes over the data."),
    _setting("--max-steps", "N", "Maximum training steps; overrides --epochs if lower.", type=int, show_default=False),
    _setting(
        "--time-budget",
        "TIME",
        "Maximum training time, such as 100m or 1h30m; the learning rate decays with the time used.",
        type=DURATION,
        show_default=False,
    ),
    _setting("--batch-size", "N", "Samples per step, over all processes."),
    _setting(
        "--micro-batch-size",
        "N",
        "Samples per forward pass of one process; the rest of a batch accumulates gradients.",
    ),
    _setting("--learning-rate", "R", "Peak learning rate, after linear warm-up and before cosine decay."),
    _setting("--warmup", "P", "Warm-up steps as a fraction of all steps."),
    _setting("--weight-decay", "D", "AdamW weight decay of matrices, embeddings excluded."),
    _setting("--clip", "N", "Maximum gradient norm."),
    _setting("--seed", "N", "Seed of the sample order, the anchors and new weights."),
    click.option("--bf16", is_flag=True, help="Compute in bfloat16; trained weights stay float32."),
    click.option(
        "--gradient-checkpointing",
        "recompute",
        is_flag=True,
        help="Recompute activations in the backward pass to save memory.",
    ),
)

_adapters = options(
    click.option(
        "--adapter",
        type=PATH,
        metavar="FOLDER",
        help="Train the adapter in this folder further, with its rank, alpha and layers; CHECKPOINT is its base model.",
    ),
    _setting("--rank", "R", "LoRA rank."),
    _setting("--alpha", "A", "LoRA alpha: adapters are scaled by alpha / rank."),
    click.option(
        "--target",
        "targets",
        multiple=True,
        metavar="NAME",
        show_default="all",
        help="Linear layer to adapt, such as q_proj; repeatable.",
    ),
)

_tokens = options(
    *(
        click.option(
            f"--{name}-token", default=default, metavar="TOKEN", show_default=True, help=f"Text of the {what}."
        )
        for name, default, what in (
            ("mask", DEFAULT.masks[0], "mask token"),
            ("fork", DEFAULT.fork, "token that forks a thread"),
            ("child", DEFAULT.child, "first token of a child thread"),
        )
    )
)

_output = options(
    click.option(
        "--save-every", type=int, default=500, metavar="N", show_default=True, help="Steps between saved states."
    ),
    click.option(
        "--log-every",
        type=int,
        default=10,
        metavar="N",
        show_default=True,
        help="Steps between measurements in metrics.jsonl; at most one in 10 seconds is printed.",
    ),
    click.option(
        "--resume", is_flag=True, help="Continue from the saved state, if there is one; give the same options again."
    ),
    click.option(
        "--adapter-only",
        is_flag=True,
        help="Write the adapter of --method gated-lora to TUNED without the base weights, for `spaceport export --adapter`.",
    ),
    overwrite_option("checkpoint"),
    remote_code_option,
    json_option("the outcome"),
)


@sections(
    {
        "objective": "Objective",
        "validation": "Data",
        "epochs": "Optimization",
        "adapter": "LoRA adapters",
        "mask_token": "Special tokens",
        "save_every": "Output and resuming",
    },
    *("objective", "mask_slots", "validation", "epochs", "time_budget", "batch_size", "learning_rate"),
    *("bf16", "adapter", "rank", "resume", "overwrite", "as_json"),
)
@click.command("tune", cls=Sectioned, context_settings={"max_content_width": 110})
@click.argument("checkpoint", type=PATH)
@click.argument("tuned", type=PATH)
@click.argument("data", nargs=-1, required=True, type=PATH)
@_objective
@_data
@_optimization
@_adapters
@_tokens
@_output
def command(checkpoint: Path, tuned: Path, data: tuple[Path, ...], as_json: bool, **given: Any) -> None:
    """Train CHECKPOINT (a Hugging Face folder or a GGUF file) on DATA (JSONL files) and write the tuned checkpoint to TUNED.

    A line of DATA has the "messages" of a chat, "prompt" and "response", or plain "text". While the training runs, its state is saved in TUNED.training.
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
    from spaceport.training.job import TuningJob
    from spaceport.training.progress import is_first
    from spaceport.training.tuning import train

    job = TuningJob(
        checkpoint,
        tuned,
        data,
        settings,
        TokenNames((given["mask_token"],), given["fork_token"], given["child_token"]),
        remote_code=given["trust_remote_code"],
        **{field.name: given[field.name] for field in fields(TuningJob) if field.name in given},
    )
    outcome = train(job)
    if as_json and is_first():
        show_json(outcome.as_dict())
