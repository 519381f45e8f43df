"""Options: those that several commands share, their sections in --help, and the refusal of options without effect."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, get_args

import click

from spaceport.graphs.contract.faults import OptionFault
from spaceport.runtime.backends import BACKENDS
from spaceport.runtime.costs import CostSource

PATH = click.Path(path_type=Path)

bundle_argument = click.argument("bundle", type=PATH)
backend_option = click.option("--backend", type=click.Choice(("auto", *BACKENDS)), default="auto", show_default=True)
threads_option = click.option("--threads", default=0, metavar="N", help="Processor threads; 0 means one for each core.")
step_costs_option = click.option(
    "--step-costs",
    type=click.Choice(get_args(CostSource)),
    default="measured",
    show_default=True,
    help="Plan drafts by step times measured on this machine, by constants that give the same steps every time, or as if rows were free.",
)
trust_engines_option = click.option(
    "--trust-engines", is_flag=True, help="Also open engines that were not built on this machine."
)
remote_code_option = click.option(
    "--trust-remote-code", is_flag=True, help="Run model code that the checkpoint brings along."
)

_COLUMN = 24  # characters of the widest option that its description stands beside


def json_option(what: str) -> Callable[[Any], Any]:
    """The flag that prints a result as JSON."""
    return click.option("--json", "as_json", is_flag=True, help=f"Print {what} as JSON.")


def overwrite_option(what: str) -> Callable[[Any], Any]:
    """The flag that replaces an existing output."""
    return click.option("--overwrite", is_flag=True, help=f"Replace a {what} that is there already.")


class Idle(NamedTuple):
    """Options that do nothing under a condition."""

    holds: bool
    names: tuple[str, ...]
    given: str  # the condition as it was given
    expected: str


class Sectioned(click.Command):
    """A command whose --help lists its options under headings."""

    headings: ClassVar[Mapping[str, str]] = {}  # heading by the name of the first option under it

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
    """Several options as one decorator, in their order."""

    def apply(function: Any) -> Any:
        for option in reversed(listed):
            function = option(function)
        return function

    return apply


def refuse_idle(context: click.Context, rules: Iterable[Idle]) -> None:
    """Raise for an option that was given and would do nothing."""
    for rule in rules:
        for option in context.command.params if rule.holds else ():
            if option.name in rule.names and was_given(context, option.name):
                raise OptionFault(
                    f"{option.opts[0]} with {rule.given}: it would do nothing; expected {rule.expected}, or leave it out"
                )


def was_given(context: click.Context, name: str) -> bool:
    """Whether an option was said, and is not what it is by default."""
    return context.get_parameter_source(name) is click.core.ParameterSource.COMMANDLINE
