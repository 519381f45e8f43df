"""Options that several commands share, those that generation options declare, their groups in --help, and what files and pairs say."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, get_args, get_origin

import click

from spaceport.graphs.contract.faults import InputFault, OptionFault
from spaceport.runtime.backends import BACKENDS
from spaceport.runtime.costs import CostSource
from spaceport.runtime.limits import DEFAULT_LIMITS, Limits
from spaceport.runtime.sampling.option_fields import OptionField, option_fields

PATH = click.Path(path_type=Path)


class _Duration(click.ParamType[float]):
    """A time such as 90s, 100m or 1h30m, in seconds."""

    name = "duration"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        parts = re.fullmatch(r"(?=.)(?:(\d+)h)?(?:(\d+)m)?(?:(\d+)s)?", value)
        if parts is None:
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
copy_weights_option = click.option(
    "--copy-weights/--map-weights",
    default=None,
    help="Copy the weights into memory, where changes of their file have no effect, or share the memory of their file "
    "with other processes. Default: copy native weights of 32 MB or more, which are faster on huge pages.",
)
remote_code_option = click.option(
    "--trust-remote-code", is_flag=True, help="Run the Python code in the checkpoint folder."
)

adapter_option = click.option(
    "--adapter", type=PATH, metavar="FOLDER", help="Add the adapter in this folder to CHECKPOINT, its base model."
)

max_seq_len_option = click.option(
    "--max-seq-len",
    type=int,
    metavar="N",
    help="Maximum context length in tokens (prompt and output); default: the model's, at most 32768 and what 2 GiB of KV cache hold, but at least 4096.",
)
max_slots_option = click.option(
    "--max-slots",
    type=int,
    metavar="N",
    help="KV cache slots of a request, for its prompt and the output of all its threads; default: --max-seq-len.",
)


def _limits(context: click.Context, parameter: click.Parameter, given: Sequence[str]) -> Limits:
    """The limits with those that --limit names changed."""
    changed: dict[str, int] = {}
    for pair in given:
        name, _, number = pair.partition("=")
        if name not in DEFAULT_LIMITS.as_dict() or not (number.isascii() and number.isdigit()):
            names = ", ".join(DEFAULT_LIMITS.as_dict())
            raise OptionFault(f"--limit is {pair!r}: expected NAME=N with one of {names}")
        changed[name] = int(number)
    return replace(DEFAULT_LIMITS, **changed)


limit_option = click.option(
    "--limit",
    "limits",
    multiple=True,
    callback=_limits,
    metavar="NAME=N",
    help="Raise or lower a limit of requests, such as stop_strings=32; `inspect` shows all; repeatable.",
)

_RUNTIME = (
    *("backend", "threads", "max_requests", "queue_limit", "max_seq_len", "max_slots", "prefix_cache", "step_costs"),
    *("call_timeout", "trust_engines", "allow_links", "copy_weights", "limits"),
)
_ALL = "spaceport.all_options"  # entry of a context: --help-all is given
_COLUMN = 24  # characters; the help of longer options starts on the next line


def json_option(what: str) -> Callable[[Any], Any]:
    """The flag --json, for a command that prints `what`."""
    return click.option("--json", "as_json", is_flag=True, help=f"Print {what} as JSON to stdout.")


def overwrite_option(what: str) -> Callable[[Any], Any]:
    """The flag --overwrite, for a command that writes a `what`."""
    return click.option("--overwrite", is_flag=True, help=f"Replace an existing {what}.")


def declared_options(
    declaring: type, *names: str, unset: str | None = None, defaults: bool = False
) -> Callable[[Any], Any]:
    """One decorator with the flags of the options that a dataclass declares, or of those with these names.

    What is not given is None, or its default with `defaults`; `unset` says what happens then, if not the default.
    """
    declared = [
        entry if unset is None else replace(entry, unset=unset)
        for entry in option_fields(declaring)
        if entry.flag is not None and (entry.name in names or not names)
    ]
    return options(*(_flag_of(entry, entry.default if defaults else None) for entry in declared))


def _flag_of(declared: OptionField, default_value: Any) -> Callable[[Any], Any]:
    flag, kind = str(declared.flag), declared.kind
    several = get_origin(kind) in (Sequence, Collection, Mapping, tuple) and declared.metavar != "FILE"
    if several:
        kind = get_args(kind)[0] if declared.metavar is None else str
    is_switch = kind is bool and not declared.optional and not declared.default
    default = "" if is_switch or declared.default_text in ("", "none") else f"default: {declared.default_text}"
    values = "" if declared.choices else declared.values
    settings: dict[str, Any] = {
        "help": _in_flags(declared.with_facts(values, default, "repeatable" if several else "")),
        "default": default_value,
    }
    if kind is bool:
        names = flag if is_switch else f"{flag}/--no-{flag[2:]}"
        return click.option(names, declared.name, is_flag=True, **settings)
    return click.option(
        flag,
        declared.name,
        type=click.Choice(declared.choices) if declared.choices else PATH if declared.metavar == "FILE" else kind,
        metavar=declared.metavar or {int: "N", float: "X"}.get(kind),
        multiple=several,
        **settings,
    )


def _in_flags(text: str) -> str:
    """A text with the flags of the options that it names."""

    def flag(name: re.Match[str]) -> str:
        return " ".join(filter(None, (f"--{name[1].replace('_', '-')}", name[2])))

    text = re.sub(r"`([a-z]+(?:_[a-z]+)+)(?:=(\w+))?`", flag, text)
    return text.replace("--stop-token-ids", "--stop-token-id")


def runtime_options(given: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of `Runtime.open` among the options of a command."""
    return {name: given[name] for name in _RUNTIME if name in given}


def declared_values(declaring: type, given: Mapping[str, Any]) -> dict[str, Any]:
    """What is given of the generation options that a dataclass declares."""
    values = {declared.name: given.get(declared.name) for declared in option_fields(declaring)}
    return {name: value for name, value in values.items() if value is not None and value != ()}


class Unused(NamedTuple):
    """Options that have no effect under a condition."""

    holds: bool
    names: tuple[str, ...]
    condition: str  # as in an error: "with --json", "without --temperature"
    remedy: str  # as in an error: "add --temperature 1"


class BeforeLast(click.Argument):
    """One or more values before the last argument; where only one value is given, the last argument is missing."""

    def handle_parse_result(
        self, ctx: click.Context, opts: Mapping[str, Any], args: list[str]
    ) -> tuple[Any, list[str]]:
        last = next(argument for argument in reversed(ctx.command.params) if isinstance(argument, click.Argument))
        if self.value_is_missing(opts.get(str(self.name))) and isinstance(opts.get(str(last.name)), str):
            raise click.MissingParameter(ctx=ctx, param=last)
        return super().handle_parse_result(ctx, opts, args)


class Sectioned(click.Command):
    """A command whose --help lists its options in groups with headings, or the usual ones only if they are named."""

    headings: Mapping[str, str]  # name of the first option of a group -> its heading
    usual: Collection[str]  # names of the options that --help lists; empty: all

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        """The parameters, with --help-all if --help does not list all of them."""
        params = super().get_params(ctx)
        if self.usual:
            text = f"Show all {sum(isinstance(option, click.Option) for option in params)} options and exit."
            params.append(
                click.Option(
                    ["--help-all"], is_flag=True, is_eager=True, expose_value=False, callback=_show_all, help=text
                )
            )
        return params

    def format_options(self, context: click.Context, formatter: click.HelpFormatter) -> None:
        heading = "Options"
        listed: dict[str, list[tuple[str, str]]] = {name: [] for name in (heading, *self.headings.values(), "Help")}
        for option in self.get_params(context):
            is_help = option is self.get_help_option(context) or option.name == "help_all"
            heading = "Help" if is_help else self.headings.get(option.name or "", heading)
            if not is_help and self.usual and option.name not in self.usual and not context.meta.get(_ALL):
                continue
            record = option.get_help_record(context)
            if record is not None and isinstance(option, click.Option):
                listed[heading].append(record)
        for heading, records in listed.items():
            if records:
                with formatter.section(heading):
                    formatter.write_dl(records, col_max=_COLUMN)


def sections(headings: Mapping[str, str], *usual: str) -> Callable[[Sectioned], Sectioned]:
    """Set the headings and the usual options of a command."""

    def apply(command: Sectioned) -> Sectioned:
        command.headings, command.usual = headings, usual
        return command

    return apply


def _show_all(context: click.Context, _: click.Parameter, shown: bool) -> None:
    if shown and not context.resilient_parsing:
        context.meta[_ALL] = True
        click.echo(context.get_help(), color=context.color)
        context.exit()


def options(*listed: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """One decorator that adds several options in this order."""

    def apply(function: Any) -> Any:
        for option in reversed(listed):
            function = option(function)
        return function

    return apply


runtime_engine_options = options(
    threads_option,
    step_costs_option,
    trust_engines_option,
    allow_links_option,
    copy_weights_option,
)


def refuse_unused(context: click.Context, rules: Iterable[Unused]) -> None:
    """Raise for an option that was given and has no effect."""
    for rule in rules:
        for option in context.command.params if rule.holds else ():
            source = context.get_parameter_source(option.name or "")
            if option.name in rule.names and source is click.core.ParameterSource.COMMANDLINE:
                raise OptionFault(f"{option.opts[0]} has no effect {rule.condition}: {rule.remedy}, or leave it out")


def read_text(file: Path) -> str:
    """The content of a text file."""
    try:
        return decoded(file.read_bytes(), str(file))
    except OSError as error:
        raise InputFault(f"{file}: {error.strerror}: expected a text file that can be read") from error


def decoded(data: bytes, source: str) -> str:
    """UTF-8 bytes as text; `source` names them in errors."""
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise InputFault(
            f"{source}: byte {error.start} (0x{data[error.start]:02x}) is not valid UTF-8: expected UTF-8 text"
        ) from error
