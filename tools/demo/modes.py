"""Modes: prompts decoded with and without drafts and parallel threads, in turns and timed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from time import perf_counter

from spaceport.runtime.comparison import thread_tokens_of, token_differences
from spaceport.runtime.decoding import Decoding
from spaceport.runtime.scheduling.request import Completion
from spaceport.runtime.session import Runtime
from spaceport.runtime.text.prompt import Prompt


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
class TimedRun:
    """The completion of one prompt in one mode and round, and the time that it took."""

    completion: Completion
    seconds: float

    @property
    def tokens_per_second(self) -> float:
        """Generated tokens per second."""
        return len(self.completion.tokens) / self.seconds


TimedModes = Mapping[DecodingMode, Sequence[TimedRun]]  # a run for each round


def timed(
    runtime: Runtime,
    prompts: Sequence[Prompt],
    max_tokens: int,
    rounds: int,
    clock: Callable[[], float] = perf_counter,
) -> Iterator[TimedModes]:
    """For each prompt, the runs of the modes that change anything."""
    masks, fork = runtime.bundle.manifest.drafts.max_tokens, runtime.bundle.manifest.tokens.fork
    possible = [mode for mode in MODES if (masks or not mode.drafts) and (fork is not None or not mode.forks)]
    for mode in possible:
        runtime.generate(prompts[0], mode.decoding(max_tokens))  # the first request takes longer
    for prompt in prompts:
        forks = fork is not None and len(runtime.generate(prompt, MODES[-1].decoding(max_tokens)).threads) > 1
        modes = [mode for mode in possible if forks or not mode.forks]
        runs: dict[DecodingMode, list[TimedRun]] = {mode: [] for mode in modes}
        for _ in range(rounds):
            for mode in modes:
                started = clock()
                completion = runtime.generate(prompt, mode.decoding(max_tokens))
                runs[mode].append(TimedRun(completion, clock() - started))
            modes = [*modes[1:], modes[0]]  # no mode is always the first
        yield runs


def verdicts(found: TimedModes, child: int | None) -> dict[DecodingMode, str]:
    """For each mode: whether its output is in every round that of the mode without drafts above it.

    `child` is the id of the token at the start of a forked thread.
    """
    result, undrafted = {}, next(iter(found.values()))
    for mode, runs in found.items():
        if mode.drafts:
            same = all(_same(run, base, child) for run, base in zip(runs, undrafted, strict=True))
            result[mode] = "identical" if same else "DIFFERENT"
        else:
            result[mode], undrafted = "-", runs
    return result


def _same(run: TimedRun, base: TimedRun, child: int | None) -> bool:
    """Whether all threads of two completions have the same tokens."""
    threads = (thread_tokens_of(one.completion, child) for one in (run, base))
    return not token_differences(*threads)
