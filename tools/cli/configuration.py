"""Configuration of a service: a TOML file whose values are the defaults of the command's options, and the keys of clients."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import click

from spaceport.graphs.contract.faults import OptionFault
from spaceport.tools.cli.options import PATH

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

KEY_VARIABLE = "SPACEPORT_API_KEY"  # keys of the service, separated by commas
_TABLES = {"models": "bundles", "limits": "limits"}  # table of the file -> parameter that takes NAME=VALUE
_LARGEST = 2**20  # bytes of a file


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


def options_in(command: click.Command, content: Mapping[str, Any], source: str) -> dict[str, Any]:
    """All options of a command with the values in a table, which has the form of the file of --config; no variable counts.

    `source` names the table in errors.
    """
    context = click.Context(command, info_name=command.name)
    values = _values(context, content, source)
    bundles = values.pop("bundles", ())  # their argument has a variable of its own, which would override a default
    context.default_map = values
    command.parse_args(context, ["--", *bundles])
    return dict(context.params)


def _read(context: click.Context, _: click.Parameter, file: Path | None) -> Path | None:
    """Make the values of a file the defaults of the command's options."""
    if file is not None:
        context.default_map = _values(context, content_of(file), str(file))
    return file


def content_of(file: Path) -> dict[str, Any]:
    """What a TOML file says."""
    if file.exists() and (not file.is_file() or file.stat().st_size > _LARGEST):
        raise OptionFault(f"--config: {file} is not a file of at most {_LARGEST} bytes: expected a TOML file")
    try:
        found: dict[str, Any] = tomllib.loads(file.read_text("utf-8"))
    except (OSError, ValueError, RecursionError) as error:  # ValueError: not UTF-8, not TOML
        raise OptionFault(f"--config: {file} cannot be read: {error}: expected a TOML file") from error
    return found


def _values(context: click.Context, content: Mapping[str, Any], source: str) -> dict[str, Any]:
    """The values in a table by parameter, as text, as on a command line; raises for unknown names and wrong values."""
    options = {option.name or "": option for option in context.command.params if option.name != "config"}
    known = [*(name for name in options if name not in _TABLES.values()), *_TABLES]
    found: dict[str, Any] = {}
    for given, value in content.items():
        name, where = given.replace("-", "_"), f"{source}: `{given}`"
        if name not in known:
            raise OptionFault(f"{where} is not an option: {nearest(name, known)}")
        if name in found:
            raise OptionFault(f"{where} is given twice: leave one out")
        if name in _TABLES and not isinstance(value, Mapping):
            raise OptionFault(f"{where} is {value!r:.40}: expected a table")
        if name in _TABLES:
            name, value = _TABLES[name], [f"{entry}={each}" for entry, each in value.items()]
        found[name] = value if isinstance(value, list) else str(value)
        try:
            options[name].process_value(context, found[name])
        except click.BadParameter as error:
            raise OptionFault(f"{where}: {error.message}") from error
    return found


def nearest(name: str, known: Sequence[str]) -> str:
    """What an error says about a name that is none of the known ones."""
    close = get_close_matches(name, known, 1, 0.5)
    return f"`{close[0]}` is one" if close else f"expected one of {', '.join(known)}"


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
