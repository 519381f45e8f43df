"""Measure: prediction accuracy and tokens per step of a model, on generated and on reference answers."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import date
from typing import Any

from spaceport.graphs.contract.draft_methods import CorrectionTables, DraftAcceptance, measured_acceptance
from spaceport.runtime.bundle import read_correction
from spaceport.runtime.decode.sources import USUAL_LOOKUP
from spaceport.runtime.session import Runtime
from spaceport.tools.verify.acceptance.answers import generate_answer
from spaceport.tools.verify.acceptance.predictions import predict_segment
from spaceport.tools.verify.acceptance.reference_answers import AnswerSegment, ReferenceAnswer
from spaceport.tools.verify.acceptance.tally import ForkTally, LookupTally, Tally
from spaceport.tools.verify.draft_names import PREDICTOR_NAMES

_PRIOR = 10  # tokens that the initial rate of a kind of prompt-lookup token counts for


@dataclass
class MeasuredDrafts:
    """The acceptance of a model's drafts."""

    generated: Tally  # on the greedy answers that the model generates
    reference: Tally  # on the answers of the data file
    forks: ForkTally | None  # None for a model that does not fork
    predictor: str = "mask slot"  # what predicts beyond the next token: mask slot or head
    lookup: LookupTally = field(default_factory=LookupTally)  # on generated answers

    def as_dict(self) -> dict[str, Any]:
        """The figures as JSON data."""
        return {
            "mask_slots": self.reference.mask_slots,
            "predictor": self.predictor,
            "generated": self.generated.as_dict(),
            "reference": self.reference.as_dict(),
            "forks": self.forks and self.forks.as_dict(),
            "lookup_tokens": self.lookup.as_dict(),
        }

    def as_draft_acceptance(self, data: str, day: date) -> DraftAcceptance:
        """The rates along the greedy answers, as a checkpoint stores them.

        Rare kinds of prompt-lookup tokens would have rates by chance: the runtime's initial values count for a few tokens.
        """
        counts = zip(self.lookup.accepted, self.lookup.tokens, USUAL_LOOKUP, strict=True)
        lookup = [(good + _PRIOR * initial) / (count + _PRIOR) for good, count, initial in counts]
        return measured_acceptance(self.generated.acceptance, self.generated.tokens, data, day, lookup)


def measure(runtime: Runtime, samples: Iterable[ReferenceAnswer], max_tokens: int, mask_slots: int) -> MeasuredDrafts:
    """Acceptance on each reference answer, and on the answer that the model generates for the same prompt."""
    manifest, correction = runtime.bundle.manifest, read_correction(runtime.bundle)
    forks = None if manifest.tokens.fork is None else ForkTally()
    found = MeasuredDrafts(Tally(mask_slots), Tally(mask_slots), forks, PREDICTOR_NAMES[manifest.drafts.predictor])
    for sample in samples:
        for segment in sample.segments:
            _add(runtime, correction, segment, found.reference, found.forks)
        answer = generate_answer(runtime, sample.prompt, max_tokens, mask_slots)
        for thread in answer.threads:
            found.lookup.add(thread.prefix, thread.tokens)
            segment = AnswerSegment(thread.prefix, thread.tokens, thread.fork is not None)
            _add(runtime, correction, segment, found.generated, None)
    return found


def _add(
    runtime: Runtime, correction: CorrectionTables | None, segment: AnswerSegment, tally: Tally, forks: ForkTally | None
) -> None:
    if not segment.tokens:
        return
    manifest = runtime.bundle.manifest
    tokens = manifest.tokens
    layout, most = manifest.drafts.layout, runtime.max_seq_len
    predicted = predict_segment(runtime.engine, tokens, segment, tally.mask_slots, layout, most, correction)
    tally.add(predicted, segment.tokens, segment.tokens[-1] in tokens.end)
    if forks is not None and tokens.fork is not None and not segment.child:
        forks.add(predicted[:, 0], segment.tokens, tokens.fork)
