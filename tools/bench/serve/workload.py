"""Workload: which requests are sent when, and how their clients behave."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np

from spaceport.graphs.contract.faults import OptionFault

# cancel: close the connection while the answer comes; drop: reset it, as a client that crashes; slow: pause while reading.
Behaviour = Literal["read", "cancel", "drop", "slow"]
_LEAVES: tuple[Behaviour, ...] = ("cancel", "drop")
_EVENTS = 24  # a client that leaves does so before this many events of text


@dataclass(frozen=True)
class Workload:
    """The requests of one run."""

    clients: int = 8  # requests at a time; each client sends its next request when it has its answer
    requests: int | None = None  # requests that are sent; None: until `seconds` have passed
    seconds: float | None = None
    rate: float | None = None  # mean requests per second, as a Poisson process; `clients` does not count then
    max_tokens: int = 64
    cancelled: float = 0.0  # share of requests whose client closes its connection early
    dropped: float = 0.0  # share whose client resets its connection
    slow: float = 0.0  # share whose client pauses after each event
    unstreamed: float = 0.0  # share that asks for the whole answer
    drafts: bool = True  # without them, the work of a request does not depend on what was learned about drafts
    pause: float = 0.05  # seconds that a slow client pauses
    ramp: float = 0.0  # seconds in which the clients start, one after the other; else all prefill at once, and again
    seed: int = 0

    def __post_init__(self) -> None:
        if (self.requests is None) == (self.seconds is None):
            raise OptionFault("a run has requests and seconds, or neither: expected one of --requests and --seconds")
        for name in ("clients", "requests", "max_tokens"):
            if (count := getattr(self, name)) is not None and count < 1:
                raise OptionFault(f"{name} is {count}: expected at least 1")
        for name in ("seconds", "rate", "pause"):
            if (value := getattr(self, name)) is not None and not value > 0:
                raise OptionFault(f"{name} is {value}: expected a number above 0")
        if not self.ramp >= 0:
            raise OptionFault(f"ramp is {self.ramp}: expected seconds of at least 0")
        shares = {name: getattr(self, name) for name in ("cancelled", "dropped", "slow", "unstreamed")}
        for name, share in shares.items():
            if not 0 <= share <= 1:
                raise OptionFault(f"{name} is {share}: expected a share from 0 to 1")
        if (together := shares["cancelled"] + shares["dropped"] + shares["slow"]) > 1:
            raise OptionFault(f"cancelled, dropped and slow add up to {together:g}: expected at most 1")


@dataclass(frozen=True)
class PlannedRequest:
    """A request to send, and how its client behaves."""

    number: int
    prompt: int  # index of its prompt
    behaviour: Behaviour
    streamed: bool
    events: int  # events of text after which a client leaves
    gap: float  # seconds since the request before, if requests arrive at random

    @property
    def leaves(self) -> bool:
        """Whether the client leaves before the answer is complete."""
        return self.behaviour in _LEAVES


def planned(workload: Workload, prompts: int, first: int = 0) -> Iterator[PlannedRequest]:
    """The requests of a run in order, the same for each service; the prompts repeat in order, from number `first` on."""
    random = np.random.default_rng(workload.seed)
    shares = {"cancel": workload.cancelled, "drop": workload.dropped, "slow": workload.slow}
    number = 0
    while workload.requests is None or number < workload.requests:
        chance, streamed = random.random(), random.random() >= workload.unstreamed
        events, gap = int(random.integers(0, _EVENTS)), float(random.exponential(1.0))
        yield PlannedRequest(
            number,
            (first + number) % prompts,
            _behaviour(chance, shares),
            streamed,
            events,
            gap / workload.rate if workload.rate else 0.0,
        )
        number += 1


def _behaviour(chance: float, shares: dict[str, float]) -> Behaviour:
    """The behaviour for a random number between 0 and 1."""
    for name, share in shares.items():
        if chance < share:
            return name  # type: ignore[return-value]
        chance -= share
    return "read"
