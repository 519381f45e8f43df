"""Tune options: the options of `spaceport tune` in their --help sections, and the refusal of options without effect."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, get_args

import click

from spaceport.graphs.contract.mask_layout import GROUPS
from spaceport.tools.cli.options import (
    DURATION,
    PATH,
    Renamed,
    Sectioned,
    Unused,
    json_option,
    options,
    overwrite_option,
    refuse_unused,
    remote_code_option,
)
from spaceport.tools.cli.tune_data import command as data_command
from spaceport.tools.tune.settings import DEFAULT_CUTOFF, Method, Objective, TrainingSettings
from spaceport.tools.tune.token_names import DEFAULT

_SHOWN: dict[str, Any] = {"show_default": True}
_UNFORK_RATE = TrainingSettings.unfork_rate


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


objective_options = options(
    click.option(
        "--objective",
        type=click.Choice(get_args(Objective)),
        default="sar",
        **_SHOWN,
        help="Train drafting (sar), forking (apar), or both.",
    ),
    click.option(
        "--method",
        type=click.Choice(get_args(Method)),
        default="full",
        **_SHOWN,
        help=(
            "Parameters to train: all weights (full), LoRA adapters (lora), LoRA adapters on mask rows only, "
            "which leave the base model's output bit-identical (gated-lora), or the embeddings of the new tokens "
            "(embeddings)."
        ),
    ),
    click.option(
        "--mask-slots",
        type=int,
        default=5,
        metavar="K",
        **_SHOWN,
        help="Mask slots behind a token: draft tokens per step.",
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
    click.option(
        "--anchors",
        type=int,
        default=32,
        metavar="N",
        **_SHOWN,
        help="Mask groups per sample, at random positions that change every epoch.",
    ),
    click.option(
        "--drop-rate",
        type=float,
        default=0.0,
        metavar="P",
        **_SHOWN,
        help="From the second mask slot of a group on, end the group here with probability P.",
    ),
    click.option(
        "--correction-rank",
        type=int,
        default=0,
        metavar="R",
        **_SHOWN,
        help="Rank of the draft correction, which scores a draft token by the one before it, such as 64; 0: none.",
    ),
    click.option(
        "--mask-weight",
        type=float,
        default=1.0,
        metavar="W",
        **_SHOWN,
        help="Weight of the mask slots' mean loss relative to the next-token loss.",
    ),
    click.option(
        "--unforked-share",
        type=float,
        metavar="P",
        show_default="as in the data",
        help="Share of the samples of an epoch that have no forks at all.",
    ),
    click.option(
        "--unfork-rate",
        cls=Renamed,
        former=["--whole-rate"],
        type=float,
        default=_UNFORK_RATE,
        metavar="P",
        **_SHOWN,
        help="Probability that an answer that could fork is trained without forks.",
    ),
)

data_options = options(
    click.option(
        "--validation",
        multiple=True,
        type=PATH,
        metavar="FILE",
        help="Validation data, evaluated at every saved state; repeatable.",
    ),
    click.option(
        "--cutoff",
        type=int,
        default=DEFAULT_CUTOFF,
        metavar="N",
        show_default=f"{DEFAULT_CUTOFF}, or the model's maximum",
        help="Maximum sample length in tokens, prompt included.",
    ),
    click.option(
        "--self-distill", is_flag=True, help="Replace the answers in the data by the model's own greedy answers first."
    ),
    click.option(
        "--bundle", type=PATH, help="Bundle of the checkpoint, which generates the answers for --self-distill faster."
    ),
)

optimization_options = options(
    click.option("--epochs", type=float, default=2.0, metavar="N", **_SHOWN, help="Passes over the data."),
    click.option("--max-steps", type=int, metavar="N", help="Maximum training steps; overrides --epochs if lower."),
    click.option(
        "--time-budget",
        type=DURATION,
        metavar="TIME",
        help="Maximum training time, such as 100m or 1h30m; the learning rate decays with the time used.",
    ),
    click.option(
        "--batch-size", type=int, default=32, metavar="N", **_SHOWN, help="Samples per step, over all processes."
    ),
    click.option(
        "--micro-batch-size",
        type=int,
        default=4,
        metavar="N",
        **_SHOWN,
        help="Samples per forward pass of one process; the rest of a batch accumulates gradients.",
    ),
    click.option(
        "--learning-rate",
        type=float,
        default=5e-5,
        metavar="R",
        **_SHOWN,
        help="Peak learning rate, after linear warm-up and before cosine decay.",
    ),
    click.option(
        "--warmup", type=float, default=0.03, metavar="P", **_SHOWN, help="Warm-up steps as a fraction of all steps."
    ),
    click.option(
        "--weight-decay",
        type=float,
        default=0.0,
        metavar="D",
        **_SHOWN,
        help="AdamW weight decay of matrices, embeddings excluded.",
    ),
    click.option("--clip", type=float, default=1.0, metavar="N", **_SHOWN, help="Maximum gradient norm."),
    click.option(
        "--seed",
        type=int,
        default=0,
        metavar="N",
        **_SHOWN,
        help="Seed of the sample order, the anchors and new weights.",
    ),
    click.option("--bf16", is_flag=True, help="Compute in bfloat16; trained weights stay float32."),
    click.option(
        "--gradient-checkpointing",
        "recompute",
        is_flag=True,
        help="Recompute activations in the backward pass to save memory.",
    ),
)

adapter_options = options(
    click.option(
        "--adapter",
        type=PATH,
        metavar="FOLDER",
        help="Train the adapter in this folder further, with its rank, alpha and layers; CHECKPOINT is its base model.",
    ),
    click.option("--rank", type=int, default=16, metavar="R", **_SHOWN, help="LoRA rank."),
    click.option(
        "--alpha",
        type=float,
        default=32.0,
        metavar="A",
        **_SHOWN,
        help="LoRA alpha: adapters are scaled by alpha / rank.",
    ),
    click.option(
        "--target",
        "targets",
        multiple=True,
        metavar="NAME",
        show_default="all",
        help="Linear layer to adapt, such as q_proj; repeatable.",
    ),
)

token_options = options(
    click.option("--mask-token", default=DEFAULT.masks[0], metavar="TOKEN", **_SHOWN, help="Text of the mask token."),
    click.option(
        "--fork-token", default=DEFAULT.fork, metavar="TOKEN", **_SHOWN, help="Text of the token that forks a thread."
    ),
    click.option(
        "--child-token",
        default=DEFAULT.child,
        metavar="TOKEN",
        **_SHOWN,
        help="Text of the first token of a child thread.",
    ),
)

output_options = options(
    click.option("--save-every", type=int, default=500, metavar="N", **_SHOWN, help="Steps between saved states."),
    click.option(
        "--log-every",
        type=int,
        default=10,
        metavar="N",
        **_SHOWN,
        help=("Steps between measurements in metrics.jsonl; without a terminal, at most one in 10 seconds is printed."),
    ),
    click.option("--tensorboard", type=PATH, metavar="DIR", help="Also write the measurements as TensorBoard events."),
    click.option("--resume", is_flag=True, help="Continue an interrupted training; give the same options again."),
    click.option(
        "--auto-resume",
        is_flag=True,
        help="Continue the training of TUNED if a state is saved, else start it: for launchers that restart processes.",
    ),
    click.option(
        "--process-timeout",
        type=DURATION,
        default="30m",
        metavar="TIME",
        **_SHOWN,
        help="Longest time that a process waits for the others, such as while the first one saves.",
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
