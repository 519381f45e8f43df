"""Objective options: what a tuning trains, and which weights, adapters and special tokens it adds."""

from __future__ import annotations

from typing import get_args

import click

from spaceport.graphs.contract.draft_methods import GROUPS
from spaceport.tools.cli.options import PATH, Renamed, options
from spaceport.tools.tune.settings import Method, Objective, TrainingSettings
from spaceport.tools.tune.token_names import DEFAULT

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
