"""`spaceport bench`: the benchmark commands, one module each."""

from __future__ import annotations

from typing import ClassVar

import click

from spaceport.tools.cli import LazyGroup


class Benchmarks(LazyGroup):
    """The benchmark commands."""

    package = "spaceport.tools.cli.bench"
    summaries: ClassVar = {
        "steps": "Time per step by number of rows.",
        "decode": "Speedup of drafts over plain decoding on your prompts.",
        "load": "Services under the load of many clients.",
        "compare": "A checkpoint in Spaceport and in other runtimes.",
        "gpu": "Build, check, audit and time everything on this machine's GPU.",
    }


@click.command("bench", cls=Benchmarks)
def command() -> None:
    """Measure speed on this machine."""
