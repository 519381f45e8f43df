"""Options: the options of `bench decode`, validated before the bundle is opened."""

from __future__ import annotations

from dataclasses import dataclass

from spaceport.graphs.contract.faults import OptionFault

REPLAY_PROMPTS = 8  # number of prompts of a replay without a prompt file


@dataclass(frozen=True)
class DecodeOptions:
    """What is measured, and how the engine is opened."""

    max_tokens: int = 128  # per completion
    limit: int | None = None  # number of prompts; None: all of the file
    temperatures: tuple[float, ...] = (0.0,)
    modes: tuple[str, ...] | None = None  # None: all that the bundle supports
    fixed: tuple[int, ...] = ()  # mask slots of fixed chains
    requests: int = 1  # concurrent requests
    rounds: int = 3  # recorded rounds, after the warm-up
    seed: int = 0
    replay: tuple[float, ...] | None = None  # acceptance rate by depth; None: real completions
    context: int = 64  # prompt tokens of a replay
    backend: str = "auto"
    threads: int = 0
    max_seq_len: int | None = None
    trust_engines: bool = False

    def __post_init__(self) -> None:
        numbers = ("max_tokens", "limit", "requests", "rounds", "context")
        for name in numbers:
            value = getattr(self, name)
            if value is not None and value < 1:
                raise OptionFault(f"--{name.replace('_', '-')} is {value}: expected at least 1")
        if self.seed < 0:
            raise OptionFault(f"--seed is {self.seed}: expected at least 0")
        if self.replay is not None and self.temperatures != (0.0,):
            raise OptionFault("--temperatures with --replay: a replay is greedy: leave one of them out")


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
