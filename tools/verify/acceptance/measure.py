"""Measure: a model's acceptance along its own answers and along given ones."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from spaceport.runtime.session import Runtime
from spaceport.tools.verify.acceptance.answers import write_answer
from spaceport.tools.verify.acceptance.given import Given, Passage
from spaceport.tools.verify.acceptance.predictions import predict_line
from spaceport.tools.verify.acceptance.tally import Forks, Tally


@dataclass
class Acceptance:
    """What was measured on a model."""

    own: Tally  # along the answers that it writes itself, greedily
    given: Tally  # along the answers that it is given
    forks: Forks | None  # nothing: the model does not fork

    def as_dict(self) -> dict[str, Any]:
        """The numbers for machines."""
        return {
            "mask_slots": self.given.mask_slots,
            "own": self.own.as_dict(),
            "given": self.given.as_dict(),
            "forks": self.forks and self.forks.as_dict(),
        }


def measure(runtime: Runtime, samples: Iterable[Given], max_tokens: int, mask_slots: int) -> Acceptance:
    """Have the model read every given answer, write one of its own on the same prompt, and read that."""
    tokens = runtime.bundle.manifest.tokens
    found = Acceptance(Tally(mask_slots), Tally(mask_slots), None if tokens.fork is None else Forks())
    for sample in samples:
        for passage in sample.passages:
            _read(runtime, passage, found.given, found.forks)
        answer = write_answer(runtime, sample.prompt, max_tokens, mask_slots)
        for line in answer.lines:
            _read(runtime, Passage(line.prompt, line.tokens, line.fork is not None), found.own, None)
    return found


def _read(runtime: Runtime, passage: Passage, tally: Tally, forks: Forks | None) -> None:
    if not passage.tokens:
        return
    tokens = runtime.bundle.manifest.tokens
    found = predict_line(runtime.engine, tokens, passage, tally.mask_slots)
    tally.add(found, passage.tokens, passage.tokens[-1] in tokens.end)
    if forks is not None and tokens.fork is not None and not passage.child:
        forks.add(found[:, 0], passage.tokens, tokens.fork)
