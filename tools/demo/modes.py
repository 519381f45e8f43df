"""Modes: a prompt decoded with and without drafts and parallel threads, in turns and timed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from time import perf_counter

from spaceport.runtime.comparison import thread_tokens_of, token_differences
from spaceport.runtime.decoding import Decoding
from spaceport.runtime.scheduling.request import Completion
from spaceport.runtime.session import Runtime, another_runtime
from spaceport.runtime.text.prompt import Prompt

DIFFERENT = "DIFFERENT"


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
    """The completions of one mode in one round, and the time that they took together."""

    completions: tuple[Completion, ...]  # one for each prompt
    seconds: float
    child: int | None = None  # token at the start of a forked thread

    def __add__(self, other: TimedRun) -> TimedRun:
        return TimedRun(self.completions + other.completions, self.seconds + other.seconds, self.child)

    @property
    def tokens(self) -> int:
        """Generated tokens."""
        return sum(len(completion.tokens) for completion in self.completions)

    @property
    def steps(self) -> int:
        """Decode steps."""
        return sum(completion.statistics.steps for completion in self.completions)

    @property
    def tokens_per_second(self) -> float:
        """Generated tokens per second."""
        return self.tokens / self.seconds

    def same_as(self, other: TimedRun) -> bool:
        """Whether all threads of all completions have the same tokens."""
        runs = [[thread_tokens_of(one, self.child) for one in run.completions] for run in (self, other)]
        return not any(token_differences(*pair) for pair in zip(*runs, strict=True))


TimedModes = Mapping[DecodingMode, Sequence[TimedRun]]  # a run for each round


def timed(
    runtime: Runtime,
    prompts: Sequence[Prompt],
    max_tokens: int,
    rounds: int,
    clock: Callable[[], float] = perf_counter,
) -> Iterator[TimedModes]:
    """For each prompt, the runs of the modes that change anything.

    A mode has a new runtime in each round, so that what it learned about acceptance rates is the same in each. They
    are never closed, since that would close the engine.
    """
    tokens, masks = runtime.bundle.manifest.tokens, runtime.bundle.manifest.drafts.max_tokens
    fork = tokens.fork
    possible = [mode for mode in MODES if (masks or not mode.drafts) and (fork is not None or not mode.forks)]
    runtimes = [{mode: another_runtime(runtime) for mode in possible} for _ in range(rounds)]
    for by_mode in runtimes:
        for mode, warmed in by_mode.items():
            warmed.generate(prompts[0], mode.decoding(max_tokens))  # the first request takes longer
    for prompt in prompts:
        forks = fork is not None and len(runtime.generate(prompt, MODES[-1].decoding(max_tokens)).threads) > 1
        modes = [mode for mode in possible if forks or not mode.forks]
        runs: dict[DecodingMode, list[TimedRun]] = {mode: [] for mode in modes}
        for by_mode in runtimes:
            for mode in modes:
                started = clock()
                completion = by_mode[mode].generate(prompt, mode.decoding(max_tokens))
                runs[mode].append(TimedRun((completion,), clock() - started, tokens.child))
            modes = [*modes[1:], modes[0]]  # no mode is always the first
        yield runs


def summed(prompts: Sequence[TimedModes]) -> TimedModes:
    """The sums over prompts, round by round, of the modes that all of them have."""
    first, *others = prompts
    found = {mode: runs for mode, runs in first.items() if all(mode in modes for modes in others)}
    for modes in others:
        found = {mode: [a + b for a, b in zip(runs, modes[mode], strict=True)] for mode, runs in found.items()}
    return found


def verdicts(found: TimedModes) -> dict[DecodingMode, str]:
    """For each mode: whether its output is in every round that of the mode without drafts above it."""
    result, undrafted = {}, next(iter(found.values()))
    for mode, runs in found.items():
        if mode.drafts:
            same = all(run.same_as(base) for run, base in zip(runs, undrafted, strict=True))
            result[mode] = "identical" if same else DIFFERENT
        else:
            result[mode], undrafted = "-", runs
    return result
