"""`spaceport bench`: measurements of this machine, each a command in a module of its own."""

from __future__ import annotations

from typing import ClassVar

import click

from spaceport.tools.cli.lazy import LazyGroup


class Benchmarks(LazyGroup):
    """The benchmarks."""

    package = "spaceport.tools.cli.bench"
    summaries: ClassVar = {
        "steps": "Time of a step by its number of rows.",
        "outside": "Time of a round outside the engine.",
        "decode": "Whether drafts pay on given prompts.",
        "load": "Throughput and latency under load.",
        "compare": "The same checkpoint in Spaceport and in other runtimes.",
        "gpu": "Everything that runs on this machine's GPU, as one page.",
    }


@click.command("bench", cls=Benchmarks)
def command() -> None:
    """Measure what steps cost on this machine."""
