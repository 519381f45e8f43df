"""Report: the results of a chat benchmark as data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from spaceport.tools.bench.chat.forks import ForkFigures
from spaceport.tools.bench.chat.measuring import ChatDifference
from spaceport.tools.bench.chat.options import ChatOptions
from spaceport.tools.bench.chat.peers import OpenedPeer
from spaceport.tools.bench.chat.summary import ALL, Drafts, Figures, PeerRatio, PromptFigures
from spaceport.tools.bench.compare.machine import Machine
from spaceport.tools.bench.compare.subjects import Skipped


@dataclass(frozen=True)
class ChatReport:
    """The results of a benchmark."""

    bundle: str
    engine: str
    machine: Machine
    options: ChatOptions  # with the number of rounds that were measured
    versions: dict[str, str]
    kinds: tuple[str, ...]
    prompts: int
    figures: tuple[Figures, ...]  # by mode or runtime, and kind
    by_prompt: tuple[PromptFigures, ...]
    peer_ratios: tuple[PeerRatio, ...]
    peers: tuple[OpenedPeer, ...]
    skipped: tuple[Skipped, ...]  # other runtimes that were not measured
    failed: dict[str, str]  # other runtimes that failed meanwhile, with the reason
    forks: tuple[ForkFigures, ...]
    compared: Mapping[str, int]  # answers compared with those of the reference, by mode
    differences: tuple[ChatDifference, ...]
    other_cores: float | None  # CPU time of other processes per second; None if it is unknown

    @property
    def identical(self) -> bool:
        """Whether every drafted answer equals that of its reference."""
        return not self.differences

    @property
    def modes(self) -> tuple[str, ...]:
        """The names of the decoding modes in table order."""
        peers = {ratio.peer for ratio in self.peer_ratios}
        return tuple(one.subject for one in self.figures if one.kind == ALL and one.subject not in peers)

    def figure(self, subject: str, kind: str = ALL) -> Figures | None:
        """The figures of a mode or runtime on the prompts of a kind; None if it has none."""
        return next((one for one in self.figures if (one.subject, one.kind) == (subject, kind)), None)

    def ratio(self, peer: str, mode: str, kind: str = ALL) -> PeerRatio | None:
        """The speed of a mode relative to another runtime; None if it was not measured."""
        key = (peer, mode, kind)
        return next((one for one in self.peer_ratios if (one.peer, one.mode, one.kind) == key), None)

    def as_dict(self) -> dict[str, Any]:
        """The report as JSON data."""
        data = asdict(self)
        for one, figures in zip(data["figures"], self.figures, strict=True):
            one["drafts"] = None if figures.drafts is None else _drafts(figures.drafts)
        return {"identical": self.identical, **data}


def _drafts(drafts: Drafts) -> dict[str, Any]:
    return {
        **asdict(drafts),
        "by_depth": [{**asdict(rate), "rate": rate.rate} for rate in drafts.by_depth],
        "by_source": {name: {**asdict(rate), "rate": rate.rate} for name, rate in drafts.by_source.items()},
        "given_previous": list(drafts.given_previous),
    }
