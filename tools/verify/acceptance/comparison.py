"""Comparison: the acceptance of a model as a row of a table, with the steps that prompt lookup needs for the same answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from spaceport.runtime.decoding import DEFAULT_LOOKUP, Decoding
from spaceport.runtime.session import Runtime
from spaceport.tools.verify.acceptance.answers import generate_drafted
from spaceport.tools.verify.acceptance.measure import MeasuredDrafts
from spaceport.tools.verify.acceptance.reference_answers import ReferenceAnswer
from spaceport.tools.verify.draft_names import named_drafts


@dataclass(frozen=True)
class StepCounts:
    """Tokens and decode steps of generated answers."""

    tokens: int
    steps: int

    @property
    def tokens_per_step(self) -> float | None:
        return self.tokens / self.steps if self.steps else None

    def as_dict(self) -> dict[str, Any]:
        return {"tokens": self.tokens, "steps": self.steps, "tokens_per_step": self.tokens_per_step}


@dataclass(frozen=True)
class LookupSteps:
    """The steps of generated answers with prompt lookup."""

    lookup: StepCounts  # with prompt lookup only
    together: StepCounts  # with trees of mask slots or heads, and prompt lookup

    def as_dict(self) -> dict[str, Any]:
        return {"lookup": self.lookup.as_dict(), "together": self.together.as_dict()}


@dataclass(frozen=True)
class ModelAcceptance:
    """The acceptance of a model."""

    model: str
    method: str  # by which it drafts
    adapter: str | None  # name of the published weights that it drafts with
    samples: int
    counts: dict[str, int]  # of conversations
    found: MeasuredDrafts
    steps: LookupSteps | None  # None: only the model's own drafts were measured

    @property
    def draft_tokens(self) -> int:
        """Maximum draft tokens from mask slots or heads that were measured."""
        return self.found.generated.mask_slots

    @property
    def drafts(self) -> str:
        """What drafts, such as "3 mask slots"."""
        return named_drafts(self.draft_tokens, self.found.predictor)

    @property
    def exact(self) -> float | None:
        """Share of the generated tokens that plain decoding selects."""
        return self.found.generated.accuracy[0]

    @property
    def own_tokens_per_step(self) -> float | None:
        """Tokens per step with chains of mask slots or heads; None without them."""
        return self.found.generated.tokens_per_step[-1] if self.draft_tokens else None

    def as_dict(self) -> dict[str, Any]:
        return {
            "method": self.method,
            "adapter": self.adapter,
            "samples": self.samples,
            "counts": self.counts,
            **self.found.as_dict(),
            **({} if self.steps is None else self.steps.as_dict()),
        }


def count_drafted(
    runtime: Runtime, samples: Sequence[ReferenceAnswer], max_tokens: int, mask_slots: int
) -> LookupSteps:
    """The steps of generated answers with prompt lookup, thread by thread and with drafts as wide as possible."""
    counted = []
    for slots in (0, mask_slots):
        decoding = Decoding(mask_slots=slots, lookup=DEFAULT_LOOKUP)
        answers = [generate_drafted(runtime, one.prompt, max_tokens, decoding, max_threads=1) for one in samples]
        tokens = sum(one.statistics.tokens for one in answers)
        counted.append(StepCounts(tokens, sum(one.statistics.steps for one in answers)))
    return LookupSteps(*counted)
