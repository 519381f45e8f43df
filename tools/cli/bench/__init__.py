"""`spaceport bench`: the benchmark commands, one module each."""

from __future__ import annotations

from typing import ClassVar

import click

from spaceport.graphs.contract.faults import OptionFault
from spaceport.tools.cli import LazyGroup


class Benchmarks(LazyGroup):
    """The benchmark commands."""

    package = "spaceport.tools.cli.bench"
    summaries: ClassVar = {
        "steps": "Time per step by number of rows, on each backend.",
        "random": "Write a random model without its weights, for steps.",
        "decode": "Speedup of drafts over plain decoding on your prompts.",
    }


@click.command("bench", cls=Benchmarks)
def command() -> None:
    """Measure speed on this machine."""


def parse_numbers(option: str, text: str, low: float, high: float) -> tuple[float, ...]:
    """The comma-separated numbers in a text such as `0,0.7,1`, each within these bounds."""
    try:
        numbers = tuple(float(part) for part in text.split(","))
    except ValueError:
        numbers = (float("nan"),)
    if not all(low <= number <= high for number in numbers):
        raise OptionFault(f"{option} is {text!r}: expected comma-separated numbers from {low:g} to {high:g}")
    return numbers


def parse_counts(option: str, text: str) -> tuple[int, ...]:
    """The comma-separated whole numbers in a text such as `1,3,5`."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise OptionFault(f"{option} is {text!r}: expected comma-separated whole numbers of at least 1")
    return tuple(int(part) for part in parts)
