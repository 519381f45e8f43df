"""Demo tables: times and costs of decoding modes, a table for each prompt or one table for all."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from statistics import median

import click

from spaceport.runtime.session import Runtime
from spaceport.runtime.text.prompt import Prompt
from spaceport.tools.bench.machine import OtherProcesses
from spaceport.tools.demo.timing import DIFFERENT, TimedModes, TimedRun, summed, timed, verdicts
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

_Row = tuple[object, ...]


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
