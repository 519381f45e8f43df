"""Lazy group: commands whose modules are imported when they are called, so that --help is fast."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any, ClassVar

import click

from spaceport.graphs.contract.faults import OptionFault
from spaceport.tools.cli.flag_names import name_flags


class LazyGroup(click.Group):
    """A group with one module per command in a package; each module defines `command`."""

    package: ClassVar[str]
    summaries: ClassVar[Mapping[str, str]]  # name of a command and of its module -> its line in --help

    def list_commands(self, context: click.Context) -> list[str]:
        return list(self.summaries)

    def get_command(self, context: click.Context, name: str) -> click.Command | None:
        if name not in self.summaries:
            return None
        command: click.Command = import_module(f"{self.package}.{name}").command
        return command

    def invoke(self, context: click.Context) -> Any:
        """Run a command; errors about options name its flags."""
        try:
            return super().invoke(context)
        except OptionFault as error:
            command = self.get_command(context, context.invoked_subcommand or "")
            raise OptionFault(name_flags(str(error), command)) from error

    def format_commands(self, context: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(self.summaries.items()))
