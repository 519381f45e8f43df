"""Report: the results of a load benchmark as data."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from spaceport.tools.bench.compare.machine import Machine
from spaceport.tools.bench.serve.figures import Figures
from spaceport.tools.bench.serve.options import ServeOptions
from spaceport.tools.bench.serve.processes import Resources


@dataclass(frozen=True)
class LoadFigures:
    """One subject with one number of clients."""

    subject: str
    clients: int
    figures: Figures  # medians of the rounds
    rounds: tuple[Figures, ...]
    statuses: dict[str, int]  # requests of all rounds by HTTP status; 0: no response


@dataclass(frozen=True)
class HeldResources:
    """What a process held when it had no request: after the warm-up, and after each run."""

    subject: str
    samples: tuple[Resources, ...]


@dataclass(frozen=True)
class Difference:
    """An answer that is not the expected one."""

    subject: str
    clients: int
    prompt: int
    text: str  # its beginning
    expected: str


@dataclass(frozen=True)
class LoadRatio:
    """The first subject relative to the second, in runs of the same round."""

    subject: str
    reference: str
    clients: int
    tokens_per_second: float  # ratio
    first_token: float | None  # difference of the medians in milliseconds
    first_token_mean: float | None  # difference of the means
    per_token_p95: float | None  # ratio of the 95th percentiles of the time between tokens
    gap_p95: float | None  # ratio of the 95th percentiles of the time between events


@dataclass(frozen=True)
class ServeReport:
    """The results of a benchmark."""

    bundle: str
    machine: Machine
    options: ServeOptions
    prompts: int
    loads: tuple[LoadFigures, ...]
    resources: tuple[HeldResources, ...]
    differences: tuple[Difference, ...]
    errors: dict[str, str]  # subject -> the first error

    @property
    def identical(self) -> bool:
        """Whether all compared answers are those of the bundle."""
        return not self.differences

    def load(self, subject: str, clients: int) -> LoadFigures | None:
        """The figures of a subject with a number of clients."""
        return next((one for one in self.loads if (one.subject, one.clients) == (subject, clients)), None)

    @property
    def ratios(self) -> tuple[LoadRatio, ...]:
        """The service of the bundle relative to everything else, with each number of clients."""
        names = dict.fromkeys(one.subject for one in self.loads if one.subject != "spaceport")
        pairs = [
            (self.load("spaceport", clients), self.load(name, clients))
            for clients in self.options.clients
            for name in names
        ]
        return tuple(_ratio(own, other) for own, other in pairs if own is not None and other is not None)

    def as_dict(self) -> dict[str, Any]:
        """The report as JSON data."""
        options = {name: str(one) if hasattr(one, "parts") else one for name, one in asdict(self.options).items()}
        ratios = [asdict(one) for one in self.ratios]
        return {"identical": self.identical, **asdict(self), "options": options, "ratios": ratios}


def _ratio(own: LoadFigures, other: LoadFigures) -> LoadRatio:
    pairs = list(zip(own.rounds, other.rounds, strict=True))
    return LoadRatio(
        own.subject,
        other.subject,
        own.clients,
        median(one.tokens_per_second / two.tokens_per_second for one, two in pairs),
        _median(
            [one.first_token.p50 - two.first_token.p50 for one, two in pairs if one.first_token and two.first_token]
        ),
        _median(
            [one.first_token.mean - two.first_token.mean for one, two in pairs if one.first_token and two.first_token]
        ),
        _median([one.per_token.p95 / two.per_token.p95 for one, two in pairs if one.per_token and two.per_token]),
        _median([one.gap.p95 / two.gap.p95 for one, two in pairs if one.gap and two.gap]),
    )


def _median(found: list[float]) -> float | None:
    return median(found) if found else None
