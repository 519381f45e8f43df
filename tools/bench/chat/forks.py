"""Forks: the time per answer with forked threads, relative to plain decoding."""

from __future__ import annotations

import statistics as numbers
from collections.abc import Sequence
from dataclasses import dataclass

from spaceport.tools.bench.chat.measuring import Measured
from spaceport.tools.bench.chat.summary import ALL, Rounds, ratios, rounds_of
from spaceport.tools.bench.decode.modes import PLAIN
from spaceport.tools.bench.decode.speedup import Speedup, speedup_of


@dataclass(frozen=True)
class ForkFigures:
    """One mode on the prompts of the forking kinds."""

    mode: str
    answers: int  # in one round
    complete: int  # answers of which every thread ended with an end token
    threads: float  # mean threads per answer
    most_threads: int
    tokens: float  # mean tokens per answer, end tokens included
    seconds: float  # mean time per answer
    tokens_per_second: float
    tokens_per_step: float
    answer_speedup: Speedup | None  # time per answer of plain decoding / that of the mode; None for plain decoding
    complete_speedup: Speedup | None  # the same on prompts whose answers are complete in both


def fork_figures(measured: Measured, modes: Sequence[str], seed: int) -> tuple[ForkFigures, ...]:
    """The figures of each mode."""
    plain = rounds_of(measured, PLAIN)
    return tuple(_figures(measured, mode, plain, seed) for mode in modes if measured.answers)


def _figures(measured: Measured, mode: str, plain: Rounds, seed: int) -> ForkFigures:
    own = rounds_of(measured, mode)
    answers = [one.answer for one in measured.answers if one.subject == mode]
    first = [one.answer for one in measured.answers if one.subject == mode and one.round == 1]
    seconds = sum(answer.seconds for answer in answers)
    steps = sum(answer.statistics.steps for answer in answers if answer.statistics is not None)
    whole = {
        prompt: times
        for prompt, times in own.items()
        if times[0].complete == times[0].answers and plain[prompt][0].complete == plain[prompt][0].answers
    }
    speedups = [
        None if mode == PLAIN else speedup_of(ratios(rounds, plain, lambda times: 1 / times.seconds, ALL), seed)
        for rounds in (own, whole)
    ]
    return ForkFigures(
        mode,
        len(first),
        sum(answer.complete for answer in first),
        numbers.mean(len(answer.threads) for answer in first),
        max(len(answer.threads) for answer in first),
        numbers.mean(answer.tokens for answer in first),
        seconds / len(answers),
        sum(answer.tokens for answer in answers) / seconds,
        sum(answer.tokens for answer in answers) / max(1, steps),
        speedups[0],
        speedups[1],
    )
