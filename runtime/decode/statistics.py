"""Statistics: what a request cost; nothing is decided by them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from spaceport.runtime.decode.accept import Verdict
from spaceport.runtime.decode.plan import Part, Plan


@dataclass
class Statistics:
    """What a request cost so far; of a step in which it failed, only the time."""

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
    first_token_seconds: float = 0.0  # from the submission to the first token, the wait included
    seconds: float = 0.0  # from the submission to the last step, the wait included

    @property
    def tokens_per_step(self) -> float:
        return self.tokens / self.steps if self.steps else 0.0

    @property
    def tokens_per_second(self) -> float:
        """Of all threads, from the first step to the last one, those of the prompt included."""
        running = self.seconds - self.waiting_seconds
        return self.tokens / running if running > 0 else 0.0

    def add_step(self, plan: Plan, verdicts: Sequence[Verdict], written: Sequence[int], held: int) -> None:
        """Count a step; `written` is the number of tokens that each part wrote, `held` the number of KV slots held."""
        self.rows += plan.rows
        self.peak_slots = max(self.peak_slots, held)
        self.peak_threads = max(self.peak_threads, len(plan.parts))
        writes = False
        for part, verdict, count in zip(plan.parts, verdicts, written, strict=True):
            writes = writes or bool(verdict.tokens)
            self.tokens += count
            if part.layout.drafted:
                self._add_drafts(part, verdict, min(count, verdict.accepted))
        self.steps += writes
        self.prompt_steps += not writes

    def _add_drafts(self, part: Part, verdict: Verdict, accepted: int) -> None:
        drafted, sources, layout = part.layout.drafted, part.draft.sources, part.layout
        missing = len(drafted) - len(self.drafted_by_depth)
        if missing > 0:
            self.drafted_by_depth += [0] * missing
            self.accepted_by_depth += [0] * missing
        for depth, count in enumerate(drafted):
            self.drafted_by_depth[depth] += count
        for source in sources:
            self.drafted_by_source[source] = self.drafted_by_source.get(source, 0) + 1
        for depth in range(accepted):
            self.accepted_by_depth[depth] += 1
            if sources:
                source = sources[layout.nodes.index(verdict.kept[layout.known + depth]) - 1]
                self.accepted_by_source[source] = self.accepted_by_source.get(source, 0) + 1
