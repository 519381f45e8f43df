"""`spaceport bench load`: services and an embedded runtime under the same load."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import click

from spaceport.graphs.contract.faults import OptionFault
from spaceport.tools.bench.load import benchmark_services
from spaceport.tools.bench.load_clients import Workload
from spaceport.tools.bench.load_services import ServiceLoadOptions
from spaceport.tools.cli import ACCURACY, OK
from spaceport.tools.cli.bench import parse_counts
from spaceport.tools.cli.options import PATH, Sectioned, json_option, options
from spaceport.tools.report.files import check_target
from spaceport.tools.terminal.screen import stages

_REQUESTS = 32


class LoadBenchmark(Sectioned):
    """The command with its options in groups."""

    headings: ClassVar = {
        "bundle": "Services",
        "threads": "How the bundle is opened",
        "clients": "Workload",
        "cancelled": "Clients",
        "markdown": "Output",
    }


services = options(
    click.option(
        "--bundle", type=PATH, metavar="BUNDLE", help="Bundle to serve, to embed, and to compare answers with."
    ),
    click.option("--no-embedded", is_flag=True, help="Do not measure the runtime without HTTP."),
    click.option(
        "--url",
        "urls",
        multiple=True,
        metavar="[NAME=]URL",
        help="Running service of the model; with --bundle, its answers are compared.",
    ),
    click.option("--api-key", default="", metavar="KEY", help="Key that the services at --url ask for."),
    click.option("--gguf", type=PATH, metavar="FILE", help="Model of BUNDLE for the server of llama-cpp-python."),
    click.option("--work", type=PATH, metavar="FOLDER", help="Folder of its environment and of logs."),
    click.option("--setup", is_flag=True, help="Create its environment first; downloads packages with pip."),
)
opened = options(
    click.option("--threads", default=ServiceLoadOptions.threads, show_default=True, metavar="N", help="CPU threads."),
    click.option(
        "--max-requests",
        default=ServiceLoadOptions.max_requests,
        show_default=True,
        help="Requests that decode at a time.",
    ),
    click.option("--queue-limit", type=int, metavar="N", help="Requests that may wait; default: 256."),
    click.option(
        "--max-seq-len",
        default=ServiceLoadOptions.max_seq_len,
        show_default=True,
        metavar="N",
        help="Maximum context length in tokens.",
    ),
)
load = options(
    click.option("--clients", default="1,8", show_default=True, metavar="N,N,…", help="Requests at a time."),
    click.option("--requests", type=int, metavar="N", help=f"Requests of a run; default: {_REQUESTS}."),
    click.option("--seconds", type=float, help="Duration of a run, instead of a number of requests."),
    click.option(
        "--rate", type=float, help="Requests per second on average, at random times; default: one per client."
    ),
    click.option(
        "--ramp",
        default=1.0,
        show_default=True,
        metavar="SECONDS",
        help="Time in which the clients start, one after the other.",
    ),
    click.option(
        "--max-tokens", default=Workload.max_tokens, show_default=True, metavar="N", help="Tokens per answer."
    ),
    click.option("--no-drafts", is_flag=True, help="Decode without drafts, which makes runs comparable."),
    click.option("--sample", default=40, show_default=True, metavar="N", help="Use only the first N prompts."),
    click.option(
        "--rounds", default=ServiceLoadOptions.rounds, show_default=True, metavar="N", help="Measured rounds."
    ),
    click.option("--seed", default=0, show_default=True, metavar="N", help="Seed of the clients' behaviour."),
    click.option(
        "--first-token-limit",
        type=float,
        metavar="SECONDS",
        help="Answers with a later first token do not count as goodput.",
    ),
)
clients = options(
    click.option(
        "--cancelled", default=0.0, metavar="SHARE", help="Requests whose client closes its connection early."
    ),
    click.option("--dropped", default=0.0, metavar="SHARE", help="Requests whose client resets its connection."),
    click.option("--slow", default=0.0, metavar="SHARE", help="Requests whose client pauses after each event."),
    click.option("--unstreamed", default=0.0, metavar="SHARE", help="Requests for the whole answer."),
)


@click.command("load", cls=LoadBenchmark)
@click.argument("prompts", type=PATH)
@services
@opened
@load
@clients
@click.option("--markdown", type=PATH, metavar="FILE", help="Also write the tables to FILE.")
@json_option("the report")
def command(prompts: Path, **values: Any) -> int:
    """Measure services with an OpenAI-compatible API under the load of many clients, with the prompts of the file PROMPTS.

    With --bundle, `spaceport serve` is started and measured in turns with the same runtime without HTTP, and every answer
    is compared with that of `Runtime.generate`. Exit code 4 if one differs.
    """
    load_options = options_of(values)
    if values["markdown"] is not None:
        check_target(values["markdown"])
    with stages() as on_progress:
        report = benchmark_services(prompts, load_options, on_progress)
    report.show(values["as_json"], values["markdown"])
    return OK if report.identical else ACCURACY


def options_of(values: dict[str, Any]) -> ServiceLoadOptions:
    """The options of the benchmark from the command's parameters."""
    requests = _REQUESTS if values["requests"] is None and values["seconds"] is None else values["requests"]
    shares = {name: values[name] for name in ("cancelled", "dropped", "slow", "unstreamed")}
    timing = {name: values[name] for name in ("seconds", "rate", "ramp", "max_tokens", "seed")}
    own = ("rounds", "sample", "bundle", "gguf", "work", "setup", "threads", "max_requests", "queue_limit")
    return ServiceLoadOptions(
        Workload(requests=requests, drafts=not values["no_drafts"], **timing, **shares),
        parse_counts("--clients", values["clients"]),
        embedded=not values["no_embedded"],
        urls=tuple(_named(one) for one in values["urls"]),
        key=values["api_key"],
        max_seq_len=values["max_seq_len"],
        first_token_limit=values["first_token_limit"],
        **{name: values[name] for name in own},
    )


def _named(given: str) -> tuple[str, str]:
    """Name and URL; without a name, the URL is the name."""
    name, equals, url = given.partition("=")
    if not equals or "://" in name:
        return given, given
    if not name:
        raise OptionFault(f"--url {given!r} has an empty name: expected URL or NAME=URL")
    return name, url
