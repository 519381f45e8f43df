"""Timing: completions of a prompt with and without drafts and parallel threads, with interleaved runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from time import perf_counter

from spaceport.runtime.decoding import Decoding
from spaceport.runtime.scheduling.generation import Completion
from spaceport.runtime.session import Runtime
from spaceport.runtime.text.prompt import Prompt

ROUNDS = 3


@dataclass(frozen=True)
class DecodingMode:
    """A row of the table: whether drafts and parallel threads are on."""

    name: str
    drafts: bool
    forks: bool

    def decoding(self, max_tokens: int) -> Decoding:
        """Its options, with defaults for everything else."""
        return Decoding(max_tokens=max_tokens, mask_slots=None if self.drafts else 0, fork=self.forks)


MODES = (
    DecodingMode("plain", False, False),
    DecodingMode("speculative", True, False),
    DecodingMode("parallel threads", False, True),
    DecodingMode("both", True, True),
)


@dataclass(frozen=True)
class TimedCompletion:
    """A completion with the shortest of its run times."""

    completion: Completion
    seconds: float

    @property
    def tokens_per_second(self) -> float:
        """Generated tokens per second of the fastest run."""
        return len(self.completion.tokens) / self.seconds

    def same_as(self, other: TimedCompletion) -> bool:
        """Whether all threads have the same tokens."""
        return self.completion.threads == other.completion.threads


TimedModes = Mapping[DecodingMode, TimedCompletion]


def timed(
    runtime: Runtime, prompt: Prompt, max_tokens: int, rounds: int = ROUNDS
) -> dict[DecodingMode, TimedCompletion]:
    """Completions of a prompt in each mode that changes anything, with the runs of all modes interleaved."""
    masks, fork = runtime.bundle.manifest.max_draft_tokens, runtime.bundle.manifest.tokens.fork
    modes = [mode for mode in MODES if (masks or not mode.drafts) and (fork is not None or not mode.forks)]
    found: dict[DecodingMode, TimedCompletion] = {}
    for _ in range(rounds):
        for mode in modes:
            started = perf_counter()
            completion = runtime.generate(prompt, mode.decoding(max_tokens))
            seconds = perf_counter() - started
            if mode not in found or seconds < found[mode].seconds:  # the table shows the steps of the fastest run
                found[mode] = TimedCompletion(completion, seconds)
        modes = [mode for mode in modes if not mode.forks or len(found[mode].completion.threads) > 1]
    return {mode: found[mode] for mode in modes}


def verdicts(found: TimedModes) -> dict[DecodingMode, str]:
    """For each mode: whether its output is that of the mode without drafts above it."""
    result, undrafted = {}, next(iter(found.values()))
    for mode, one in found.items():
        if mode.drafts:
            result[mode] = "identical" if one.same_as(undrafted) else "DIFFERENT"
        else:
            result[mode], undrafted = "-", one
    return result
