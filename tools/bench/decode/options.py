"""Options: what `bench decode` measures, checked before anything is opened."""

from __future__ import annotations

from dataclasses import dataclass

from spaceport.graphs.contract.faults import OptionFault

REPLAYED = 8  # prompts of a replay without a file of prompts


@dataclass(frozen=True)
class DecodeOptions:
    """What is measured, and with how much room."""

    max_tokens: int = 128  # of each text
    limit: int | None = None  # prompts; none: all of the file
    temperatures: tuple[float, ...] = (0.0,)
    modes: tuple[str, ...] | None = None  # none: all that the bundle has
    fixed: tuple[int, ...] = ()  # mask slots of chains
    requests: int = 1  # concurrent ones
    rounds: int = 3  # behind the warm-up
    seed: int = 0
    replay: tuple[float, ...] | None = None  # acceptance probabilities by depth; none: real texts
    context: int = 64  # tokens of a prompt of a replay
    backend: str = "auto"
    threads: int = 0
    max_seq_len: int | None = None
    trust_engines: bool = False

    def __post_init__(self) -> None:
        numbers = ("max_tokens", "limit", "requests", "rounds", "context")
        for name in numbers:
            given = getattr(self, name)
            if given is not None and given < 1:
                raise OptionFault(f"--{name.replace('_', '-')} is {given}: expected at least 1")
        if self.seed < 0:
            raise OptionFault(f"--seed is {self.seed}: expected at least 0")
        if self.replay is not None and self.temperatures != (0.0,):
            raise OptionFault("--temperatures with --replay: a replay is greedy: leave one of them out")


def parse_numbers(option: str, text: str, low: float, high: float) -> tuple[float, ...]:
    """The numbers in `0,0.7,1`, each within these bounds."""
    try:
        numbers = tuple(float(part) for part in text.split(","))
    except ValueError:
        numbers = (float("nan"),)
    if not all(low <= number <= high for number in numbers):
        raise OptionFault(f"{option} is {text!r}: expected numbers from {low:g} to {high:g} with commas between them")
    return numbers


def parse_counts(option: str, text: str) -> tuple[int, ...]:
    """The whole numbers in `1,3,5`."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise OptionFault(f"{option} is {text!r}: expected whole numbers of at least 1 with commas between them")
    return tuple(int(part) for part in parts)
