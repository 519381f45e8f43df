"""Tune options: the options of `spaceport tune`, by what they are about."""

from __future__ import annotations

from typing import get_args

import click

from spaceport.graphs.contract.draft_methods import GROUPS
from spaceport.tools.cli.options import (
    DURATION,
    PATH,
    Renamed,
    json_option,
    options,
    overwrite_option,
    remote_code_option,
)
from spaceport.tools.tune.settings import DEFAULT, DEFAULT_CUTOFF, Method, Objective, TrainingSettings

_UNFORK_RATE = TrainingSettings.unfork_rate

objective_options = options(
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
    click.option(
        "--mask-slots",
        type=int,
        default=5,
        metavar="K",
        show_default=True,
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
        show_default=True,
        help="Mask groups per sample, at random positions that change every epoch.",
    ),
    click.option(
        "--drop-rate",
        type=float,
        default=0.0,
        metavar="P",
        show_default=True,
        help="From the second mask slot of a group on, end the group here with probability P.",
    ),
    click.option(
        "--correction-rank",
        type=int,
        default=0,
        metavar="R",
        show_default=True,
        help="Rank of the draft correction, which scores a draft token by the one before it, such as 64; 0: none.",
    ),
    click.option(
        "--mask-weight",
        type=float,
        default=1.0,
        metavar="W",
        show_default=True,
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
        show_default=True,
        help="Probability that an answer that could fork is trained without forks.",
    ),
)

adapter_options = options(
    click.option(
        "--adapter",
        type=PATH,
        metavar="FOLDER",
        help="Train the adapter in this folder further, with its rank, alpha and layers; CHECKPOINT is its base model.",
    ),
    click.option("--rank", type=int, default=16, metavar="R", show_default=True, help="LoRA rank."),
    click.option(
        "--alpha",
        type=float,
        default=32.0,
        metavar="A",
        show_default=True,
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
    click.option(
        "--mask-token", default=DEFAULT.masks[0], metavar="TOKEN", show_default=True, help="Text of the mask token."
    ),
    click.option(
        "--fork-token",
        default=DEFAULT.fork,
        metavar="TOKEN",
        show_default=True,
        help="Text of the token that forks a thread.",
    ),
    click.option(
        "--child-token",
        default=DEFAULT.child,
        metavar="TOKEN",
        show_default=True,
        help="Text of the first token of a child thread.",
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
    click.option("--epochs", type=float, default=2.0, metavar="N", show_default=True, help="Passes over the data."),
    click.option("--max-steps", type=int, metavar="N", help="Maximum training steps; overrides --epochs if lower."),
    click.option(
        "--time-budget",
        type=DURATION,
        metavar="TIME",
        help="Maximum training time, such as 100m or 1h30m; the learning rate decays with the time used.",
    ),
    click.option(
        "--batch-size",
        type=int,
        default=32,
        metavar="N",
        show_default=True,
        help="Samples per step, over all processes.",
    ),
    click.option(
        "--micro-batch-size",
        type=int,
        default=4,
        metavar="N",
        show_default=True,
        help="Samples per forward pass of one process; the rest of a batch accumulates gradients.",
    ),
    click.option(
        "--learning-rate",
        type=float,
        default=5e-5,
        metavar="R",
        show_default=True,
        help="Peak learning rate, after linear warm-up and before cosine decay.",
    ),
    click.option(
        "--warmup",
        type=float,
        default=0.03,
        metavar="P",
        show_default=True,
        help="Warm-up steps as a fraction of all steps.",
    ),
    click.option(
        "--weight-decay",
        type=float,
        default=0.0,
        metavar="D",
        show_default=True,
        help="AdamW weight decay of matrices, embeddings excluded.",
    ),
    click.option("--clip", type=float, default=1.0, metavar="N", show_default=True, help="Maximum gradient norm."),
    click.option(
        "--seed",
        type=int,
        default=0,
        metavar="N",
        show_default=True,
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

output_options = options(
    click.option(
        "--save-every", type=int, default=500, metavar="N", show_default=True, help="Steps between saved states."
    ),
    click.option(
        "--log-every",
        type=int,
        default=10,
        metavar="N",
        show_default=True,
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
        show_default=True,
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
