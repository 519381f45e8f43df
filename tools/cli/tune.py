"""`spaceport tune`: a checkpoint learns to draft for itself, to fork, or both."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any, get_args

import click

from spaceport.tools.cli.options import (
    PATH,
    Unused,
    json_option,
    options,
    overwrite_option,
    refuse_unused,
    remote_code_option,
)
from spaceport.tools.cli.tune_data import command as data_command
from spaceport.tools.terminal.screen import show_json
from spaceport.tools.tune.names import DEFAULT, Names
from spaceport.tools.tune.settings import DEFAULT_CUTOFF, Method, Objective, TrainingSettings

_SHOWN: dict[str, Any] = {"show_default": True}


class Tune(click.Command):
    """The command, and `tune data`, which looks at data before anything is learned."""

    def make_context(self, info_name: str | None, args: list[str], *others: Any, **named: Any) -> click.Context:
        if args[:1] == ["data"]:
            return data_command.make_context(f"{info_name} data", args[1:], *others, **named)
        return super().make_context(info_name, args, *others, **named)


learning = options(
    click.option("--objective", type=click.Choice(get_args(Objective)), default="sar", **_SHOWN, help="What is learned: to draft with mask slots, to fork, or both."),
    click.option("--method", type=click.Choice(get_args(Method)), default="full", **_SHOWN, help="What changes: all weights; low-rank adapters; adapters for mask rows only, which leave the text what it was to the bit (objective sar); or the embeddings of the new tokens."),
    click.option("--mask-slots", type=int, default=5, metavar="K", **_SHOWN, help="Tokens that a step can draft."),
    click.option("--distinct", is_flag=True, help="A mask token for each mask slot instead of one for all."),
    click.option("--anchors", type=int, default=32, metavar="N", **_SHOWN, help="Places of a sample that mask slots hang from, redrawn in every epoch."),
    click.option("--drop-rate", type=float, default=0.0, metavar="P", **_SHOWN, help="How often a group of mask slots ends before its next one: deep ones cost as much as shallow ones and matter less."),
    click.option("--mask-weight", type=float, default=1.0, metavar="W", **_SHOWN, help="Weight of the mask slots' mean loss beside that of the text."),
    click.option("--unforked-share", type=float, metavar="P", help="Share of the samples that do not fork; by default as the data are."),
    click.option("--whole-rate", type=float, default=TrainingSettings.whole_rate, metavar="P", **_SHOWN, help="How often an answer that could fork is learned in one line, so that the model can write it so too."),
)  # fmt: skip

steps = options(
    click.option("--cutoff", type=int, default=DEFAULT_CUTOFF, metavar="N", show_default=f"{DEFAULT_CUTOFF}, or what the model knows", help="Longest text in tokens, along a thread."),
    click.option("--epochs", type=float, default=2.0, metavar="N", **_SHOWN, help="How often the data are gone through."),
    click.option("--max-steps", type=int, metavar="N", help="End after so many steps, if the epochs are not over before."),
    click.option("--batch-size", "batch", type=int, default=32, metavar="N", **_SHOWN, help="Samples of a step, over all processes."),
    click.option("--micro-batch-size", "micro_batch", type=int, default=4, metavar="N", **_SHOWN, help="Samples that a process computes at once."),
    click.option("--learning-rate", "rate", type=float, default=5e-5, metavar="R", **_SHOWN, help="Highest learning rate: reached by a linear warm-up, left by a cosine."),
    click.option("--warmup", type=float, default=0.03, metavar="P", **_SHOWN, help="Share of the steps, 0 to 1, that warm up."),
    click.option("--weight-decay", type=float, default=0.0, metavar="D", **_SHOWN, help="AdamW's, on matrices."),
    click.option("--clip", type=float, default=1.0, metavar="N", **_SHOWN, help="Longest gradient."),
    click.option("--seed", type=int, default=0, metavar="N", **_SHOWN, help="Of the order of the samples, their anchors and new weights."),
    click.option("--rank", type=int, default=16, metavar="R", **_SHOWN, help="Of the low-rank adapters."),
    click.option("--alpha", type=float, default=32.0, metavar="A", **_SHOWN, help="Of the low-rank adapters: what they add is multiplied by alpha / rank."),
    click.option("--target", "targets", multiple=True, metavar="NAME", help="Linear layers that get an adapter, such as q_proj; by default all."),
)  # fmt: skip

running = options(
    click.option("--validation", multiple=True, type=PATH, metavar="FILE", help="Data to look at with each state that is kept, not learned."),
    click.option("--mask-token", default=DEFAULT.masks[0], metavar="TOKEN", **_SHOWN, help="Text of the mask token."),
    click.option("--fork-token", default=DEFAULT.fork, metavar="TOKEN", **_SHOWN, help="Text of the token that forks."),
    click.option("--child-token", default=DEFAULT.child, metavar="TOKEN", **_SHOWN, help="Text of the token that a forked thread begins with."),
    click.option("--self-distill", is_flag=True, help="Learn the model's own answers to the prompts of the data: they are written first."),
    click.option("--bundle", type=PATH, help="With --self-distill: the checkpoint as a bundle, which writes faster."),
    click.option("--bf16", is_flag=True, help="Compute in bfloat16; the weights that learn stay float32."),
    click.option("--gradient-checkpointing", "recompute", is_flag=True, help="Compute activations twice to save memory."),
    click.option("--save-every", type=int, default=500, metavar="N", **_SHOWN, help="Steps between states that are kept."),
    click.option("--log-every", type=int, default=10, metavar="N", **_SHOWN, help="Steps between measurements in metrics.jsonl; in a pipe at most one in ten seconds is shown."),
    click.option("--tensorboard", type=PATH, metavar="DIR", help="Write the measurements for TensorBoard too."),
    click.option("--resume", is_flag=True, help="Go on with a training that was interrupted, said with the same options."),
    overwrite_option("checkpoint"),
    remote_code_option,
    json_option("what was reached"),
)  # fmt: skip


_DRAFTING = ("mask_slots", "distinct", "anchors", "drop_rate", "mask_weight", "mask_token")
_FORKING = ("unforked_share", "whole_rate", "fork_token", "child_token")
_ADAPTING = ("rank", "alpha", "targets")


def check_use(context: click.Context) -> None:
    """Raise for an option that was given and would do nothing."""
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
            Unused(not context.params["self_distill"], ("bundle",), "without --self-distill", "add --self-distill"),
        ),
    )


@click.command("tune", cls=Tune)
@click.argument("checkpoint", type=PATH)
@click.argument("tuned", type=PATH)
@click.argument("data", nargs=-1, required=True, type=PATH)
@learning
@steps
@running
def command(checkpoint: Path, tuned: Path, data: tuple[Path, ...], as_json: bool, **told: Any) -> None:
    """Tune CHECKPOINT (a Hugging Face folder) on DATA (JSONL files) and write it as TUNED (a folder to be made).

    A line of DATA holds "messages" of a chat, "prompt" and "response", or plain "text". What they teach about forking is
    shown by `spaceport tune data FILE`. While it runs, a training keeps its state in TUNED.training.
    """
    check_use(click.get_current_context())
    settings = TrainingSettings(
        **{field.name: told[field.name] for field in fields(TrainingSettings) if field.name in told}
    )
    # torch is read only once the options are known to be right
    from spaceport.tools.terminal.tuning_screen import is_first, shown
    from spaceport.tools.tune.distill import Distillation
    from spaceport.tools.tune.job import TuningJob
    from spaceport.tools.tune.tuning import tune

    job = TuningJob(
        checkpoint=checkpoint,
        target=tuned,
        data=data,
        settings=settings,
        names=Names((told["mask_token"],), told["fork_token"], told["child_token"]),
        validation=told["validation"],
        bf16=told["bf16"],
        recompute=told["recompute"],
        save_every=told["save_every"],
        log_every=told["log_every"],
        resume=told["resume"],
        overwrite=told["overwrite"],
        remote_code=told["trust_remote_code"],
        distillation=Distillation(told["bundle"]) if told["self_distill"] else None,
    )
    with shown(told["tensorboard"]) as callbacks:
        outcome = tune(job, callbacks)
    if as_json and is_first():
        show_json(outcome.as_dict())
