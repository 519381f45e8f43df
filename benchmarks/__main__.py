"""`python -m benchmarks`: the benchmark commands that serve the development, one module each."""

from __future__ import annotations

import sys
from typing import ClassVar

import click

from spaceport.tools.cli import LazyGroup, run


class DevelopmentBenchmarks(LazyGroup):
    """The benchmark commands of the checkout."""

    package = "benchmarks"
    summaries: ClassVar = {
        "chat": "Speedup of drafts on chat prompts, by kind, and other runtimes.",
    }


@click.command("benchmarks", cls=DevelopmentBenchmarks, context_settings={"max_content_width": 110})
def command() -> None:
    """Measure what the development of Spaceport needs to know."""


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:], command))
