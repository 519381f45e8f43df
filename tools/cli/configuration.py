"""Configuration: options of a command from flags, environment variables and a TOML file, with the source of each value."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any, ClassVar

import click
from click.core import ParameterSource

from spaceport.graphs.contract.faults import OptionFault
from spaceport.tools.cli.options import PATH, Sectioned

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

KEY_VARIABLE = "SPACEPORT_API_KEY"  # keys of the service, separated by commas
_OWN = ("config", "print_config")  # name no value of the configuration
_LARGEST = 2**20  # bytes of a file
_SIMILAR = 0.8  # of the name of an environment variable to that of an option


class Configured(Sectioned):
    """A command whose options can also be set in the environment (`auto_envvar_prefix`) and in the file of --config."""

    # Table of the file -> the parameter that takes its entries as NAME=VALUE.
    tables: ClassVar[Mapping[str, str]] = {}

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse the arguments; an error in an environment variable or in the file names it."""
        try:
            return super().parse_args(ctx, args)
        except click.BadParameter as error:
            option = error.param
            source = None if option is None else ctx.get_parameter_source(option.name or "")
            if option is None or source not in (ParameterSource.ENVIRONMENT, ParameterSource.DEFAULT_MAP):
                raise
            if source is ParameterSource.DEFAULT_MAP:
                hint = f"`{option.name}` in {ctx.params.get('config')}"
                raise click.BadParameter(error.message, ctx, option, hint) from error
            variable, message = _variable(ctx, option), error.message
            if "://" in os.environ.get(variable, ""):
                message += " Kubernetes sets this variable for a service named spaceport: rename the service."
            raise click.BadParameter(message, ctx, option, variable) from error


def config_option(function: Any) -> Any:
    """The option --config, which reads a file before the other options are read."""
    return click.option(
        "--config",
        type=PATH,
        is_eager=True,
        callback=_read,
        metavar="FILE",
        help="TOML file with options by name, such as max_requests = 8. Flags and environment variables override it.",
    )(function)


def print_config_option(function: Any) -> Any:
    """The flag --print-config, for a command that prints `effective`."""
    return click.option(
        "--print-config",
        is_flag=True,
        allow_from_autoenv=False,
        help="Print all options as TOML with the source of each, and exit.",
    )(function)


def effective(context: click.Context) -> str:
    """The options in effect as the content of a TOML file, with the source of each as a comment."""
    tables = _tables(context)
    lines, below = [], []
    for option in _parameters(context):
        name, value = option.name or "", context.params[option.name or ""]
        source = _source(context, option)
        if name in tables.values():
            table = next(each for each, target in tables.items() if target == name)
            entries = dict(_pairs(value))
            below += ["", f"[{table}]", *(f"{entry(each, found)}  # {source}" for each, found in entries.items())]
        elif value is None:
            lines.append(f"# {name} is not set")
        else:
            lines.append(f"{entry(name, value)}  # {source}")
    return "\n".join([*lines, *below])


def unknown_variables(context: click.Context, known: Sequence[str] = ()) -> list[str]:
    """A warning for each environment variable whose name is almost that of an option."""
    prefix = f"{context.auto_envvar_prefix}_"
    names = [*known, *(_variable(context, option) for option in _parameters(context)), f"{prefix}CONFIG"]
    unknown = sorted(each for each in os.environ if each.startswith(prefix) and each not in names)
    return [
        f"the environment variable {name} has no effect: {close[0]} is an option"
        for name in unknown
        if (close := get_close_matches(name, names, 1, _SIMILAR))
    ]


def options_in(command: Configured, content: Mapping[str, Any], source: str) -> dict[str, Any]:
    """All options of a command with the values in a table, which has the form of the file of --config; no variable counts.

    `source` names the table in errors.
    """
    context = click.Context(command, info_name=command.name)
    values = _values(context, content, source)
    arguments = [each for each in command.params if isinstance(each, click.Argument)]
    # Arguments may have a variable of their own, which would override a default.
    given = [one for argument in arguments for one in values.pop(argument.name, ())]
    context.default_map = values
    try:
        command.parse_args(context, ["--", *given])
    except click.BadParameter as error:
        raise OptionFault(f"{source}: {error.message}") from error
    return dict(context.params)


def _read(context: click.Context, _: click.Parameter, file: Path | None) -> Path | None:
    """Make the values of a file the defaults of the command's options."""
    if file is not None:
        context.default_map = {**(context.default_map or {}), **_values(context, _content(file), str(file))}
    return file


def _content(file: Path) -> dict[str, Any]:
    """What a TOML file says."""
    if file.exists() and (not file.is_file() or file.stat().st_size > _LARGEST):
        raise OptionFault(f"--config: {file} is not a file of at most {_LARGEST} bytes: expected a TOML file")
    try:
        found: dict[str, Any] = tomllib.loads(file.read_text("utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise OptionFault(f"--config: {file} cannot be read: {error}: expected a TOML file") from error
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise OptionFault(f"--config: {file} is not TOML: {error}") from error
    return found


def _values(context: click.Context, content: Mapping[str, Any], source: str) -> dict[str, Any]:
    """The values in a table by option; raises for unknown names and wrong types."""
    tables = _tables(context)
    options = {each.name: each for each in _parameters(context) if each.name not in tables.values()}
    found: dict[str, Any] = {}
    for given, value in content.items():
        name = given.replace("-", "_")
        where = f"{source}: `{given}`"
        if name not in options and name not in tables:
            raise OptionFault(f"{where} is not an option: {nearest(name, [*map(str, options), *tables])}")
        target = tables.get(name, name)
        if target in found:
            raise OptionFault(f"{where} is given twice: leave one out")
        found[target] = _entries(where, value) if name in tables else _checked(context, options[name], value, where)
    return found


def _checked(context: click.Context, option: click.Parameter, value: Any, where: str) -> Any:
    """A value of the file, if it has the type of its option."""
    several = isinstance(option, click.Option) and option.multiple
    if several and not isinstance(value, list):
        raise OptionFault(f"{where} is {_kind(value)}: expected a list")
    expected, kinds = _expected(option)
    for each in value if several else [value]:
        if not isinstance(each, kinds) or (isinstance(each, bool) and bool not in kinds):
            raise OptionFault(f"{where} is {_kind(each)}: expected {expected}")
    try:
        option.type_cast_value(context, value)
    except click.BadParameter as error:
        raise OptionFault(f"{where}: {error.message}") from error
    return value


def _entries(where: str, value: Any) -> list[str]:
    """The entries of a table as NAME=VALUE."""
    if not isinstance(value, dict):
        raise OptionFault(f"{where} is {_kind(value)}: expected a table")
    for name, each in value.items():
        if not isinstance(each, str | int) or isinstance(each, bool):
            raise OptionFault(f"{where}: `{name}` is {_kind(each)}: expected a string or a whole number")
    return [f"{name}={each}" for name, each in value.items()]


def _expected(option: click.Parameter) -> tuple[str, tuple[type, ...]]:
    """The type of an option's value in a file, in words and as Python types."""
    if isinstance(option.type, type(click.BOOL)):
        return "true or false", (bool,)
    if isinstance(option.type, type(click.INT)):
        return "a whole number", (int,)
    if isinstance(option.type, type(click.FLOAT)):
        return "a number", (int, float)
    return "a string", (str,)


def _kind(value: Any) -> str:
    kinds = {bool: "a boolean", int: "a whole number", float: "a number", str: "a string", list: "a list"}
    found = kinds.get(type(value), "a table" if isinstance(value, dict) else "a date or time")
    return found if isinstance(value, list | dict) else f"{found} ({str(value)[:40]!r})"


def nearest(name: str, known: Sequence[str]) -> str:
    """What an error says about a name that is none of the known ones."""
    close = get_close_matches(name, known, 1, 0.5)
    return f"`{close[0]}` is one" if close else f"expected one of {', '.join(known)}"


def _tables(context: click.Context) -> Mapping[str, str]:
    return context.command.tables if isinstance(context.command, Configured) else {}


def _parameters(context: click.Context) -> Iterator[click.Parameter]:
    """The parameters of a command that belong to its configuration."""
    for option in context.command.params:
        if option.expose_value and option.name not in _OWN:
            yield option


def _pairs(value: Any) -> Iterator[tuple[str, Any]]:
    """The entries of a table: those of a mapping, or NAME=VALUE."""
    if isinstance(value, Mapping):
        yield from value.items()
        return
    for each in value:
        name, _, found = each.partition("=")
        yield name, int(found) if found.isascii() and found.isdigit() else found


def _variable(context: click.Context, option: click.Parameter) -> str:
    """The environment variable that sets an option."""
    if option.envvar:
        return option.envvar if isinstance(option.envvar, str) else option.envvar[0]
    return f"{context.auto_envvar_prefix}_{(option.name or '').upper()}"


def _source(context: click.Context, option: click.Parameter) -> str:
    """Where the value of an option comes from."""
    source = context.get_parameter_source(option.name or "")
    if source is ParameterSource.COMMANDLINE:
        return "command line"
    if source is ParameterSource.ENVIRONMENT:
        return f"environment, {_variable(context, option)}"
    return "file" if source is ParameterSource.DEFAULT_MAP else "default"


def entry(name: str, value: Any) -> str:
    """A name with its value."""
    key = name if re.fullmatch(r"[A-Za-z0-9_-]+", name) else _text(name)
    return f"{key} = {_spelled(value)}"


def _spelled(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, str | Path):
        return _text(str(value))
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_spelled, value))}]"
    raise TypeError(f"{type(value).__name__} has no spelling in TOML: expected a number, a text, a path or a list")


def _text(value: str) -> str:
    """A string in TOML: as in JSON, which escapes all that TOML does but DEL."""
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def keys_of(file: Path | None, variable: str) -> tuple[str, ...]:
    """The keys in a file, one per line, or else those in the environment, separated by commas."""
    if file is None:
        return tuple(key.strip() for key in variable.split(",") if key.strip())
    try:
        lines = file.read_text("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise OptionFault(f"--api-key-file: {file} cannot be read: {error}: expected one key per line") from error
    keys = tuple(line.strip() for line in lines if line.strip() and not line.startswith("#"))
    if not keys:
        raise OptionFault(f"--api-key-file: {file} has no key: expected one per line")
    return keys
