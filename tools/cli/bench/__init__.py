"""`spaceport bench`: the benchmark commands, one module each."""

from __future__ import annotations

from typing import ClassVar

import click

from spaceport.tools.cli.lazy import LazyGroup


class Benchmarks(LazyGroup):
    """The benchmark commands."""

    package = "spaceport.tools.cli.bench"
    summaries: ClassVar = {
        "steps": "Time per step by number of rows.",
        "outside": "Time per step outside the engine.",
        "decode": "Speedup of drafts over plain decoding on your prompts.",
        "chat": "Speedup of drafts on chat prompts, by kind, and other runtimes.",
        "load": "Throughput and latency of concurrent requests.",
        "serve": "Services under the load of many clients.",
        "start": "Time from the start of a service to its first token.",
        "prefix": "The next turn of a chat with and without a prefix cache.",
        "compare": "A checkpoint in Spaceport and in other runtimes.",
        "gpu": "Build, check, audit and time everything on this machine's GPU.",
    }


@click.command("bench", cls=Benchmarks)
def command() -> None:
    """Measure speed on this machine."""
