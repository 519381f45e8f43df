"""Demo tables: times and costs of decoding modes, a table for each prompt or one table for all."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import click

from spaceport.runtime.session import Runtime
from spaceport.runtime.text.prompt import Prompt
from spaceport.tools.demo.timing import ROUNDS, DecodingMode, TimedModes, timed, verdicts
from spaceport.tools.terminal.screen import show_table

_OUTPUT = "output: a speculative run is compared with the run in the line above it, token by token."
LEGEND = f"""slots: peak number of KV slots in use. ms: shortest time of {ROUNDS} runs.
speedup: tokens per second relative to plain decoding.
{_OUTPUT}"""
THREADS_LEGEND = "Parallel threads may change the text, so their output is not compared with plain decoding."
COLUMNS = ("decoding", "tokens", "steps", "tokens per step", "slots", "ms", "speedup", "output")
CHAT_COLUMNS = ("prompt", "decoding", "tokens", "steps", "tokens per step", "tokens/s", "speedup", "output")
_CHAT_ROUNDS = 2
CHAT_LEGEND = f"""tokens/s: of the fastest of {_CHAT_ROUNDS} runs, prompt included. speedup: relative to plain decoding.
{_OUTPUT}"""
_DIFFERENT = "DIFFERENT"


def compare(runtime: Runtime, prompts: Mapping[str, Prompt], max_tokens: int) -> bool:
    """Print a table for each prompt; whether every speculative run has the output of the run without drafts."""
    same, forks = True, False
    for name, prompt in prompts.items():
        rows = list(rows_of(timed(runtime, prompt, max_tokens)))
        show_table(name, COLUMNS, rows)
        click.echo()
        same = same and all(row[-1] != _DIFFERENT for row in rows)
        forks = forks or any(row[0] == "parallel threads" for row in rows)
    click.echo(f"{LEGEND}\n{THREADS_LEGEND}" if forks else LEGEND)
    return same


def rows_of(found: TimedModes) -> Iterator[tuple[object, ...]]:
    """The rows of a prompt's table."""
    plain, outputs = next(iter(found.values())), verdicts(found)
    for mode, one in found.items():
        count, cost = len(one.completion.tokens), one.completion.statistics
        speed = one.tokens_per_second / plain.tokens_per_second
        yield mode.name, count, cost.steps, count / cost.steps, cost.peak_slots, one.seconds * 1e3, speed, outputs[mode]


def compare_chats(runtime: Runtime, prompts: Mapping[str, Prompt], max_tokens: int) -> bool:
    """Print one table for all prompts; whether every speculative run has the output of the run without drafts."""
    found = {}
    for number, (name, prompt) in enumerate(prompts.items(), 1):
        click.echo(f"decoding prompt {number} of {len(prompts)}: {name}", err=True)
        found[name] = timed(runtime, prompt, max_tokens, _CHAT_ROUNDS)
    rows = list(chat_rows(found))
    show_table("", CHAT_COLUMNS, rows)
    forks = any(mode.forks for modes in found.values() for mode in modes)
    click.echo(f"\n{CHAT_LEGEND}" + (f"\n{THREADS_LEGEND}" if forks else ""))
    return all(row[-1] != _DIFFERENT for row in rows)


def chat_rows(found: Mapping[str, TimedModes]) -> Iterator[tuple[object, ...]]:
    """The rows of the table for all prompts, with the sums of each mode that every prompt has at the end."""
    for name, modes in found.items():
        for mode, (tokens, steps, seconds) in _sums([modes]).items():
            plain = next(iter(modes.values())).tokens_per_second
            shown = name if mode is next(iter(modes)) else ""
            speed = tokens / seconds
            yield shown, mode.name, tokens, steps, tokens / steps, speed, speed / plain, verdicts(modes)[mode]
    sums = _sums(list(found.values()))
    first = next(iter(sums))
    for mode, (tokens, steps, seconds) in sums.items():
        plain_tokens, _, plain_seconds = sums[first]
        speed = tokens / seconds
        output = [verdicts(modes)[mode] for modes in found.values()]
        verdict = next((one for one in output if one == _DIFFERENT), output[0])
        shown = "all" if mode is first else ""
        yield shown, mode.name, tokens, steps, tokens / steps, speed, speed * plain_seconds / plain_tokens, verdict


def _sums(found: list[TimedModes]) -> dict[DecodingMode, tuple[int, int, float]]:
    """Tokens, steps and seconds of the modes that all of these have."""
    shared = [mode for mode in found[0] if all(mode in modes for modes in found)]
    return {
        mode: (
            sum(len(modes[mode].completion.tokens) for modes in found),
            sum(modes[mode].completion.statistics.steps for modes in found),
            sum(modes[mode].seconds for modes in found),
        )
        for mode in shared
    }
