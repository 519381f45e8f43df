"""Statistics: what a request cost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from spaceport.runtime.decode.accept import Verdict
from spaceport.runtime.decode.plan import Part, Plan


@dataclass
class Statistics:
    """What a request cost so far."""

    prompt_tokens: int = 0
    prompt_steps: int = 0  # steps that fed a part of the prompt and could write nothing yet
    steps: int = 0  # steps that wrote
    tokens: int = 0  # of all threads
    rows: int = 0
    drafted_by_depth: list[int] = field(default_factory=list)  # candidates fed at each depth
    accepted_by_depth: list[int] = field(default_factory=list)
    drafted_by_source: dict[str, int] = field(default_factory=dict)  # by who proposed them: mask, lookup or both
    accepted_by_source: dict[str, int] = field(default_factory=dict)
    threads: int = 1  # all that there were
    peak_threads: int = 1  # that wrote in one step
    peak_slots: int = 0
    waiting_seconds: float = 0.0  # until the first step
    engine_seconds: float = 0.0
    outside_seconds: float = 0.0

    @property
    def tokens_per_step(self) -> float:
        return self.tokens / self.steps if self.steps else 0.0

    def count(self, plan: Plan, verdicts: Sequence[Verdict], held: int) -> None:
        """A step of so many rows, for which so many slots were held."""
        self.rows += plan.rows
        self.peak_slots = max(self.peak_slots, held)
        self.peak_threads = max(self.peak_threads, len(plan.parts))
        if any(verdict.tokens for verdict in verdicts):
            self.steps += 1
        else:
            self.prompt_steps += 1
        for part in plan.parts:
            drafted = part.layout.drafted
            while len(self.drafted_by_depth) < len(drafted):
                self.drafted_by_depth.append(0)
                self.accepted_by_depth.append(0)
            for depth, count in enumerate(drafted):
                self.drafted_by_depth[depth] += count
            for source in part.draft.sources:
                self.drafted_by_source[source] = self.drafted_by_source.get(source, 0) + 1

    def wrote(self, part: Part, verdict: Verdict, place: int) -> None:
        """The token of a verdict at this place was written."""
        self.tokens += 1
        if place < verdict.accepted:
            self.accepted_by_depth[place] += 1
            if part.draft.sources:
                row = verdict.kept[part.layout.known + place]
                source = part.draft.sources[part.layout.nodes.index(row) - 1]
                self.accepted_by_source[source] = self.accepted_by_source.get(source, 0) + 1
