"""Tune command: `spaceport tune` with its --help sections and its subcommand, and the refusal of options without effect."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import click

from spaceport.tools.cli.options import Sectioned, Unused, refuse_unused
from spaceport.tools.cli.tune_data import command as data_command


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
