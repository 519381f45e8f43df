"""Lazy group: commands that are imported when they are called, so that --help is fast."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import ClassVar

import click


class LazyGroup(click.Group):
    """A group whose commands live in modules of a package, each in a `command`."""

    package: ClassVar[str]
    summaries: ClassVar[Mapping[str, str]]  # command, which is also its module -> its line in --help

    def list_commands(self, context: click.Context) -> list[str]:
        return list(self.summaries)

    def get_command(self, context: click.Context, name: str) -> click.Command | None:
        if name not in self.summaries:
            return None
        command: click.Command = import_module(f"{self.package}.{name}").command
        return command

    def format_commands(self, context: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(self.summaries.items()))
