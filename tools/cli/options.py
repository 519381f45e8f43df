"""Options: those that several commands share, their groups in --help, former names, and errors for unused options."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, get_args

import click

from spaceport.graphs.contract.faults import OptionFault
from spaceport.runtime.backends import BACKENDS
from spaceport.runtime.costs import CostSource

PATH = click.Path(path_type=Path)


class _Duration(click.ParamType[float]):
    """A time such as 90s, 100m or 1h30m, in seconds."""

    name = "duration"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        if isinstance(value, (int, float)):
            return float(value)
        parts = re.fullmatch(r"(?:(\d+)h)?(?:(\d+)m)?(?:(\d+)s)?", value)
        if parts is None or not any(parts.groups()):
            self.fail(f"{value!r}: expected hours, minutes and seconds such as 1h30m, 100m or 90s", param, ctx)
        hours, minutes, seconds = (int(part or 0) for part in parts.groups())
        return float(3600 * hours + 60 * minutes + seconds)


DURATION = _Duration()

bundle_argument = click.argument("bundle", type=PATH)
backend_option = click.option(
    "--backend",
    type=click.Choice(("auto", *BACKENDS)),
    default="auto",
    metavar="NAME",
    help=f"Backend: {', '.join(BACKENDS)}; auto = the best one available (default).",
)
threads_option = click.option(
    "--threads", default=0, metavar="N", help="CPU threads; 0 = one per usable core (default)."
)
step_costs_option = click.option(
    "--step-costs",
    type=click.Choice(get_args(CostSource)),
    default="measured",
    show_default=True,
    help="Step costs for planning drafts: measured on this machine; standard = built-in constants, reproducible; free = always draft the maximum.",
)
trust_engines_option = click.option(
    "--trust-engines", is_flag=True, help="Also load TensorRT engines built on other machines: an engine file is code."
)
allow_links_option = click.option(
    "--allow-links", is_flag=True, help="Allow links as files of the bundle, as in caches of a model hub."
)
require_signature_option = click.option(
    "--require-signature",
    type=PATH,
    metavar="PUBLIC_KEY",
    help="Refuse the bundle unless it is signed with this key (`spaceport sign`).",
)
copy_weights_option = click.option(
    "--copy-weights",
    is_flag=True,
    help="Copy the weights into memory, so that later changes of their file have no effect.",
)
remote_code_option = click.option(
    "--trust-remote-code", is_flag=True, help="Run the Python code in the checkpoint folder."
)

adapter_option = click.option(
    "--adapter", type=PATH, metavar="FOLDER", help="Add the adapter in this folder to CHECKPOINT, its base model."
)

_COLUMN = 24  # characters; the help of longer options starts on the next line


def json_option(what: str) -> Callable[[Any], Any]:
    """The flag --json, for a command that prints `what`."""
    return click.option("--json", "as_json", is_flag=True, help=f"Print {what} as JSON to stdout.")


def overwrite_option(what: str) -> Callable[[Any], Any]:
    """The flag --overwrite, for a command that writes a `what`."""
    return click.option("--overwrite", is_flag=True, help=f"Replace an existing {what}.")


class Unused(NamedTuple):
    """Options that have no effect under a condition."""

    holds: bool
    names: tuple[str, ...]
    condition: str  # as in an error: "with --json", "without --temperature"
    remedy: str  # as in an error: "add --temperature 1"


class Renamed(click.Option):
    """An option that also accepts its former names, which --help does not list."""

    def __init__(self, declarations: Sequence[str], former: Sequence[str] = (), **settings: Any) -> None:
        super().__init__(declarations, **settings)
        self.former = tuple(former)

    def add_to_parser(self, parser: Any, ctx: click.Context) -> None:
        listed = self.opts
        self.opts = [*listed, *self.former]
        try:
            super().add_to_parser(parser, ctx)
        finally:
            self.opts = listed


class Sectioned(click.Command):
    """A command whose --help lists its options in groups with headings."""

    headings: ClassVar[Mapping[str, str]] = {}  # name of the first option of a group -> its heading

    def format_options(self, context: click.Context, formatter: click.HelpFormatter) -> None:
        listed: dict[str, list[tuple[str, str]]] = {}
        heading = "Options"
        for option in self.get_params(context):
            heading = (
                "Help" if option is self.get_help_option(context) else self.headings.get(option.name or "", heading)
            )
            record = option.get_help_record(context)
            if record is not None and isinstance(option, click.Option):
                listed.setdefault(heading, []).append(record)
        for heading, records in listed.items():
            with formatter.section(heading):
                formatter.write_dl(records, col_max=_COLUMN)


def options(*listed: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """One decorator that adds several options in this order."""

    def apply(function: Any) -> Any:
        for option in reversed(listed):
            function = option(function)
        return function

    return apply


def refuse_unused(context: click.Context, rules: Iterable[Unused]) -> None:
    """Raise for an option that was given and has no effect."""
    for rule in rules:
        for option in context.command.params if rule.holds else ():
            if option.name in rule.names and was_given(context, option.name):
                raise OptionFault(f"{option.opts[0]} has no effect {rule.condition}: {rule.remedy}, or leave it out")


def was_given(context: click.Context, name: str) -> bool:
    """Whether an option is on the command line."""
    return context.get_parameter_source(name) is click.core.ParameterSource.COMMANDLINE
