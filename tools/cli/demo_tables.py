"""Demo tables: runs with and without drafts and parallel threads, as a table for each prompt or one table for all."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from time import perf_counter

import click

from spaceport.runtime.comparison import thread_tokens_of, token_differences
from spaceport.runtime.decoding import Decoding
from spaceport.runtime.scheduling.request import Completion
from spaceport.runtime.session import Runtime
from spaceport.runtime.text.prompt import Prompt
from spaceport.tools.bench.machine import OtherProcesses
from spaceport.tools.terminal.screen import show_table

COLUMNS = ("decoding", "tokens", "steps", "tokens per step", "slots", "ms", "speedup", "output")
CHAT_COLUMNS = ("prompt", "decoding", "tokens", "steps", "tokens per step", "tokens/s", "speedup", "output")
ROUNDS, CHAT_ROUNDS = 5, 3
_LEGEND = """speedup: tokens/s relative to the plain run of the same round, median (range).
Each mode has a new runtime in each round, whose first request (the first prompt) is not counted.
output: a speculative run is compared with the run in the line above it, token by token."""
LEGEND = f"""slots: peak number of KV slots in use. ms: median of {ROUNDS} rounds, each with a run of every mode.
{_LEGEND}"""
CHAT_LEGEND = f"""tokens/s: median of {CHAT_ROUNDS} rounds, prompt included. Each round has a run of every mode.
{_LEGEND}"""
STEPS_LEGEND = "Steps differ between rounds; those of the first round are shown."
THREADS_LEGEND = "Parallel threads may change the text, so their output is not compared with plain decoding."
_MOST_OTHER = 0.1  # share of the machine's CPU time that other programs may take before the table says so
DIFFERENT = "DIFFERENT"

_Row = tuple[object, ...]


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


def _new_runtime(runtime: Runtime) -> Runtime:
    """A runtime on the engine of another one; it is never closed, since that would close the engine."""
    return Runtime(
        runtime.bundle, runtime.engine, runtime.max_seq_len, costs=runtime.costs, exactness=runtime.exactness
    )


def timed(
    runtime: Runtime,
    prompts: Sequence[Prompt],
    max_tokens: int,
    rounds: int,
    clock: Callable[[], float] = perf_counter,
) -> Iterator[TimedModes]:
    """For each prompt, the runs of the modes that change anything.

    A mode has a new runtime in each round, so that what it learned about acceptance rates is the same in each.
    """
    tokens, masks = runtime.bundle.manifest.tokens, runtime.bundle.manifest.drafts.max_tokens
    fork = tokens.fork
    possible = [mode for mode in MODES if (masks or not mode.drafts) and (fork is not None or not mode.forks)]
    runtimes = [{mode: _new_runtime(runtime) for mode in possible} for _ in range(rounds)]
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


def compare(runtime: Runtime, prompts: Mapping[str, Prompt], max_tokens: int) -> bool:
    """Print a table for each prompt; whether every speculative run has the output of the run without drafts."""
    found, others = [], OtherProcesses()
    for name, modes in zip(prompts, timed(runtime, list(prompts.values()), max_tokens, ROUNDS), strict=True):
        found.append(modes)
        show_table(name, COLUMNS, list(rows_of(modes)))
        click.echo()
    click.echo("\n".join((LEGEND, *notes(found, others.cores()))))
    return _same(found)


def compare_chats(runtime: Runtime, prompts: Mapping[str, Prompt], max_tokens: int) -> bool:
    """Print one table for all prompts; whether every speculative run has the output of the run without drafts."""
    found, others = {}, OtherProcesses()
    runs = timed(runtime, list(prompts.values()), max_tokens, CHAT_ROUNDS)
    for number, name in enumerate(prompts, 1):
        click.echo(f"decoding prompt {number} of {len(prompts)}: {name}", err=True)
        found[name] = next(runs)
    cores = others.cores()
    show_table("", CHAT_COLUMNS, list(chat_rows(found)))
    click.echo("\n".join(("", CHAT_LEGEND, *notes(list(found.values()), cores))))
    return _same(list(found.values()))


def _same(found: Sequence[TimedModes]) -> bool:
    return all(DIFFERENT not in verdicts(modes).values() for modes in found)


def rows_of(found: TimedModes) -> Iterator[_Row]:
    """The rows of a prompt's table."""
    return _rows(
        found, lambda runs: (runs[0].completions[0].statistics.peak_slots, median(run.seconds for run in runs) * 1e3)
    )


def chat_rows(found: Mapping[str, TimedModes]) -> Iterator[_Row]:
    """The rows of the table for all prompts, with the sums of each mode that every prompt has at the end."""
    for name, modes in (*found.items(), ("all", summed(list(found.values())))):
        for row in _rows(modes, lambda runs: (median(run.tokens_per_second for run in runs),)):
            yield name, *row
            name = ""


def _rows(found: TimedModes, measures: Callable[[Sequence[TimedRun]], _Row]) -> Iterator[_Row]:
    """A row for each mode, with these measures between its counts and its speedup."""
    plain, outputs = next(iter(found.values())), verdicts(found)
    for mode, runs in found.items():
        tokens, steps = runs[0].tokens, runs[0].steps
        ratios = [run.tokens_per_second / base.tokens_per_second for run, base in zip(runs, plain, strict=True)]
        spread = "" if runs is plain else f" ({min(ratios):.2f}-{max(ratios):.2f})"
        yield mode.name, tokens, steps, tokens / steps, *measures(runs), f"{median(ratios):.2f}{spread}", outputs[mode]


def notes(found: Sequence[TimedModes], other_cores: float | None) -> Iterator[str]:
    """The sentences below the legend that these runs need."""
    if any(mode.forks for modes in found for mode in modes):
        yield THREADS_LEGEND
    if any(run.steps != runs[0].steps for modes in found for runs in modes.values() for run in runs):
        yield STEPS_LEGEND
    cpus = os.cpu_count() or 1
    if other_cores is not None and other_cores > _MOST_OTHER * cpus:
        yield f"Other programs used {other_cores:.1f} of {cpus} CPUs meanwhile: do not rely on these times and speedups."
