"""`spaceport serve`: serve bundles with an OpenAI-compatible HTTP API."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import click

from spaceport.graphs.contract.faults import OptionFault
from spaceport.graphs.contract.manifest import MANIFEST_FILE
from spaceport.runtime.bundle import read_manifest
from spaceport.runtime.session import DEFAULT_CALL_TIMEOUT, Runtime
from spaceport.serving.options import ServiceOptions
from spaceport.tools.cli.bundle_cache import bundle_at, model_name
from spaceport.tools.cli.configuration import KEY_VARIABLE, config_option, keys_of
from spaceport.tools.cli.options import (
    PATH,
    Sectioned,
    backend_option,
    declared_options,
    declared_values,
    limit_option,
    max_seq_len_option,
    max_slots_option,
    options,
    runtime_engine_options,
    runtime_options,
    sections,
)

_LOCAL = ("127.0.0.1", "::1", "localhost")


def _named(_: click.Context, __: click.Parameter, given: Sequence[str]) -> dict[str, str]:
    return {name: str(path) for name, path in models_of(given).items()}


_network = options(
    click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on."),
    click.option("--port", type=click.IntRange(0, 65535), default=8000, show_default=True, help="Port to listen on."),
    click.option(
        "--api-key-file",
        type=PATH,
        metavar="FILE",
        help=f"File with one key per line, of which clients have to send one; default: the keys in {KEY_VARIABLE}.",
    ),
    click.option(
        "--tool-format",
        type=click.Choice(("auto", "hermes", "llama3", "mistral", "json")),
        default="auto",
        show_default=True,
        help="Format of calls of functions; auto = that of the model's chat template.",
    ),
    declared_options(ServiceOptions, defaults=True),
)
_logs = options(
    click.option(
        "--log-format",
        type=click.Choice(("text", "json")),
        default="text",
        show_default=True,
        help="Format of log entries; json = one object per line.",
    ),
    click.option(
        "--log-level",
        type=click.Choice(("debug", "info", "warning", "error")),
        default="info",
        show_default=True,
        help="Least severe log entries; debug also names unknown fields of requests.",
    ),
)
_requests = options(
    click.option("--max-requests", type=int, default=8, show_default=True, help="Requests that decode at a time."),
    click.option("--queue-limit", type=int, help="Requests that may wait; default: 256."),
    max_seq_len_option,
    max_slots_option,
    limit_option,
    click.option(
        "--prefix-cache/--no-prefix-cache",
        default=True,
        show_default=True,
        help="Reuse the KV rows of earlier requests with the same beginning.",
    ),
)
_engines = options(
    backend_option,
    runtime_engine_options,
    click.option(
        "--call-timeout",
        type=float,
        default=DEFAULT_CALL_TIMEOUT,
        show_default=True,
        metavar="SECONDS",
        help="Time after which an engine call counts as hung, and the service ends.",
    ),
)


@sections(
    {
        "config": "Configuration",
        "host": "Network",
        "log_format": "Log",
        "request_timeout": "Requests",
        "audit_rate": "Exactness audit",
        "max_requests": "Requests",
        "backend": "Backend",
    },
    *("config", "host", "port", "api_key_file", "page", "max_requests", "max_seq_len", "request_timeout"),
    *("log_format", "backend", "threads"),
)
@click.command("serve", cls=Sectioned, context_settings={"auto_envvar_prefix": "SPACEPORT"})
@click.argument("bundles", nargs=-1, metavar="BUNDLE…", envvar="SPACEPORT_MODELS", callback=_named)
@config_option
@_network
@_logs
@_requests
@_engines
def command(host: str, port: int, **given: Any) -> None:
    """Serve each BUNDLE, checkpoint or GGUF file as a model, under the name of its folder; NAME=BUNDLE gives it another name.

    Each option can also be set by an environment variable such as SPACEPORT_MAX_REQUESTS, and in the file of --config.
    """
    service_options, openers = service_options_of(given), openers_of(given)
    keys = service_options.keys
    if not openers:
        raise click.UsageError("no bundle is given: expected BUNDLE, or a table [models] in the file of --config")
    from spaceport.serving.application import application
    from spaceport.serving.request_log import configure_logging
    from spaceport.serving.server import listening, serve

    configure_logging(given["log_format"], given["log_level"])
    if not keys and host not in _LOCAL:
        click.echo(f"warning: anyone who reaches {host}:{port} can send requests: --api-key-file sets keys", err=True)
    with listening(host, port) as listener:
        paths = {name: Path(path) for name, path in given["bundles"].items()}
        for path in paths.values():
            if not path.exists() or (path / MANIFEST_FILE).exists():
                checked_bundle(path)
        models = {name: str(checked_bundle(path)) for name, path in paths.items()}  # checkpoints are exported
        openers = openers_of({**given, "bundles": models})
        serve(application(openers, service_options, answers_while_opening=True), listener)


def checked_bundle(path: Path) -> Path:
    """The bundle at a path, or of the checkpoint there; raises before any is opened if its manifest cannot be read."""
    bundle = bundle_at(path)
    read_manifest(bundle)
    return bundle


def _exists(path: str) -> bool:
    try:
        return Path(path).exists()
    except OSError:  # too long a name, or a working directory that may not be read
        return False


def models_of(given: Sequence[str]) -> dict[str, Path]:
    """The bundles to serve, by model name."""
    found: dict[str, Path] = {}
    for one in given:
        name, equals, path = one.partition("=")
        if not equals or _exists(one):
            name, path = model_name(Path(one)), one
        if not name or not path:
            raise OptionFault(f"{one!r}: expected BUNDLE or NAME=BUNDLE")
        if name in found:
            raise OptionFault(f"two bundles have the name {name}: expected different names; NAME=BUNDLE sets one")
        found[name] = Path(path)
    return found


def service_options_of(given: Mapping[str, Any]) -> ServiceOptions:
    """The options of the service, with the keys in the file or in the environment of this process."""
    return ServiceOptions(
        keys=keys_of(given["api_key_file"], os.environ.get(KEY_VARIABLE, "")),
        tool_format=None if given["tool_format"] == "auto" else given["tool_format"],
        **declared_values(ServiceOptions, {name: given.get(name) for name in given.keys() - {"keys", "tool_format"}}),
    )


def openers_of(given: Mapping[str, Any]) -> dict[str, Callable[[], Runtime]]:
    """What opens the bundle of each model."""
    options = runtime_options(given)
    return {name: partial(Runtime.open, path, **options) for name, path in given["bundles"].items()}
