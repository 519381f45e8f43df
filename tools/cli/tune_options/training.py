"""Training options: the data of a tuning, how it is optimized, and what is written."""

from __future__ import annotations

import click

from spaceport.tools.cli.options import (
    DURATION,
    PATH,
    json_option,
    options,
    overwrite_option,
    remote_code_option,
)
from spaceport.tools.tune.settings import DEFAULT_CUTOFF

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
