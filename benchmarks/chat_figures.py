"""Figures of chats: speed, drafts, speedups by kind of prompt, and forked threads."""

from __future__ import annotations

import statistics as numbers
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from benchmarks.chat_measuring import (
    BenchPrompt,
    ChatMeasurements,
    TimedAnswer,
)
from spaceport.runtime.decode.sequence_group import Statistics
from spaceport.tools.bench.decode import (
    Rate,
    Speedup,
    rates_by_depth,
    rates_by_source,
    speedup_of,
)
from spaceport.tools.bench.decode_measuring import PLAIN

ALL = "all"  # kind of the rows over all prompts
LOSS = 0.97  # a prompt with a lower speedup counts as a loss


@dataclass(frozen=True)
class PromptTimes:
    """One prompt in one round: all its answers together."""

    tokens: int  # end tokens included
    seconds: float
    cpu_seconds: float
    decode_tokens: int
    decode_seconds: float
    first_token_seconds: float  # mean of its answers
    complete: int  # number of answers whose threads all ended with an end token
    answers: int

    @property
    def rate(self) -> float:
        """Tokens per second, prefill included."""
        return self.tokens / self.seconds

    @property
    def cpu_rate(self) -> float | None:
        """Tokens per second of CPU time; None if there was too little to be counted."""
        return self.tokens / self.cpu_seconds if self.cpu_seconds > 0 else None

    @property
    def decode_rate(self) -> float | None:
        """Tokens per second after the first token; None without any."""
        return self.decode_tokens / self.decode_seconds if self.decode_tokens and self.decode_seconds > 0 else None


Rounds = Mapping[BenchPrompt, Sequence[PromptTimes]]  # by prompt: its times in each round


@dataclass(frozen=True)
class DraftFigures:
    """The draft tokens of a mode."""

    tokens_per_step: float
    mean_acceptance_length: float  # 1 + accepted / steps
    by_depth: tuple[Rate, ...]
    by_source: dict[str, Rate]

    @property
    def given_previous(self) -> tuple[float, ...]:
        """The acceptance rate by depth if the draft token before was accepted; for drafts in one line."""
        before = (self.by_depth[0].drafted, *(rate.accepted for rate in self.by_depth)) if self.by_depth else ()
        return tuple(rate.accepted / one if one else 0.0 for rate, one in zip(self.by_depth, before, strict=False))


@dataclass(frozen=True)
class ChatFigures:
    """One mode or other runtime on the prompts of one kind."""

    subject: str
    kind: str
    prompts: int
    answers: int  # in one round
    complete: int  # answers that ended with an end token, in one round
    tokens: int  # in one round
    tokens_per_second: float  # prefill included
    decode_tokens_per_second: float | None
    first_token_p50: float  # seconds
    speedup: Speedup | None  # over plain decoding, prefill included; None for plain decoding
    decode_speedup: Speedup | None  # over plain decoding, after the first token
    cpu_speedup: Speedup | None  # over plain decoding in CPU time, prefill included
    losses: int  # prompts with a speedup below LOSS
    drafts: DraftFigures | None  # None without drafts, and for other runtimes


@dataclass(frozen=True)
class PromptFigures:
    """One prompt with one mode or runtime: medians over the rounds."""

    line: int
    kind: str
    subject: str
    tokens: int
    complete: bool
    tokens_per_second: float
    decode_tokens_per_second: float | None


@dataclass(frozen=True)
class PeerRatio:
    """The speed of a mode relative to another runtime, on the prompts of a kind that both answered."""

    peer: str
    mode: str
    kind: str
    speedup: Speedup | None  # prefill included
    decode_speedup: Speedup | None


def rounds_of(measured: ChatMeasurements, subject: str) -> dict[BenchPrompt, list[PromptTimes]]:
    """The times of a subject by prompt and round; prompts of which a round is incomplete are left out."""
    own: dict[tuple[BenchPrompt, int], list[TimedAnswer]] = defaultdict(list)
    plain: dict[tuple[BenchPrompt, int], list[TimedAnswer]] = defaultdict(list)
    for one in measured.answers:
        if one.subject == subject:
            own[one.prompt, one.round].append(one.answer)
        if one.subject == PLAIN:
            plain[one.prompt, one.round].append(one.answer)
    found: dict[BenchPrompt, list[PromptTimes]] = {}
    for (prompt, round_), answers in own.items():
        if len(answers) == len(prompt.parts):
            found.setdefault(prompt, []).append(prompt_times(answers, plain[prompt, round_]))
    rounds = max((one.round for one in measured.answers), default=0)
    return {prompt: times for prompt, times in found.items() if len(times) == rounds}


def prompt_times(answers: Sequence[TimedAnswer], plain: Sequence[TimedAnswer]) -> PromptTimes:
    """The times of a prompt's answers.

    A mode's decode time begins at the first token of plain decoding: prompt lookup may generate several tokens in the
    first step, whose rows and tokens so count as decoding. Other runtimes say how many tokens their first step generated.
    """
    decode_tokens, decode_seconds = 0, 0.0
    for answer, other in zip(answers, plain, strict=True):
        prefill = answer if answer.statistics is None else other
        decode_tokens += max(0, answer.tokens - answer.first_tokens)
        decode_seconds += answer.seconds - prefill.first_token_seconds
    return PromptTimes(
        sum(answer.tokens for answer in answers),
        sum(answer.seconds for answer in answers),
        sum(answer.cpu_seconds for answer in answers),
        decode_tokens,
        decode_seconds,
        numbers.mean(answer.first_token_seconds for answer in answers),
        sum(answer.complete for answer in answers),
        len(answers),
    )


def ratios(
    own: Rounds, reference: Rounds, rate: Callable[[PromptTimes], float | None], kind: str = ALL
) -> dict[int, list[float]]:
    """Ratios of speed in each round by line number, of the prompts of one kind for which both have a rate."""
    found: dict[int, list[float]] = {}
    for prompt in own:
        if prompt not in reference or kind not in (ALL, prompt.kind):
            continue
        rates = [rate(times) for times in own[prompt]], [rate(times) for times in reference[prompt]]
        if all(rates[0]) and all(rates[1]):
            found[prompt.line] = [one / other for one, other in zip(*rates, strict=True) if one and other]
    return found


def chat_figures(
    measured: ChatMeasurements, subjects: Iterable[str], kinds: Sequence[str], seed: int
) -> tuple[ChatFigures, ...]:
    """The figures of these subjects by kind, and over all kinds."""
    plain = rounds_of(measured, PLAIN)
    found = []
    for subject in subjects:
        rounds = plain if subject == PLAIN else rounds_of(measured, subject)
        for kind in (*kinds, ALL):
            own = {prompt: times for prompt, times in rounds.items() if kind in (ALL, prompt.kind)}
            if own:
                found.append(_figures(measured, subject, kind, own, plain, seed))
    return tuple(found)


def _figures(measured: ChatMeasurements, subject: str, kind: str, own: Rounds, plain: Rounds, seed: int) -> ChatFigures:
    reference = {} if subject == PLAIN else plain
    speeds = ratios(own, reference, lambda times: times.rate)
    decode_speeds = ratios(own, reference, lambda times: times.decode_rate)
    cpu_speeds = ratios(own, reference, lambda times: times.cpu_rate)
    everything = [times for rounds in own.values() for times in rounds]
    first = [rounds[0] for rounds in own.values()]
    seconds, decode_seconds = (sum(getattr(t, name) for t in everything) for name in ("seconds", "decode_seconds"))
    decode_tokens = sum(times.decode_tokens for times in everything)
    return ChatFigures(
        subject,
        kind,
        len(own),
        sum(times.answers for times in first),
        sum(times.complete for times in first),
        sum(times.tokens for times in first),
        sum(times.tokens for times in everything) / seconds,
        decode_tokens / decode_seconds if decode_tokens and decode_seconds > 0 else None,
        numbers.median(times.first_token_seconds for times in everything),
        speedup_of(speeds, seed),
        speedup_of(decode_speeds, seed),
        speedup_of(cpu_speeds, seed),
        sum(numbers.median(rounds) < LOSS for rounds in speeds.values()),
        draft_figures(_statistics(measured, subject, own)),
    )


def _statistics(measured: ChatMeasurements, subject: str, prompts: Rounds) -> list[Statistics]:
    return [
        one.answer.statistics
        for one in measured.answers
        if one.subject == subject and one.prompt in prompts and one.answer.statistics is not None
    ]


def draft_figures(completions: Sequence[Statistics]) -> DraftFigures | None:
    """The drafts of these completions; None without any draft token."""
    by_depth, steps = rates_by_depth(completions), sum(one.steps for one in completions)
    if not by_depth or not steps:
        return None
    return DraftFigures(
        sum(one.tokens for one in completions) / steps,
        1 + sum(rate.accepted for rate in by_depth) / steps,
        by_depth,
        rates_by_source(completions),
    )


def prompt_figures(measured: ChatMeasurements, subjects: Iterable[str]) -> tuple[PromptFigures, ...]:
    """The figures of every prompt."""
    found = []
    for subject in subjects:
        for prompt, times in rounds_of(measured, subject).items():
            rates = [one.decode_rate for one in times if one.decode_rate is not None]
            found.append(
                PromptFigures(
                    prompt.line,
                    prompt.kind,
                    subject,
                    times[0].tokens,
                    times[0].complete == times[0].answers,
                    numbers.median(one.rate for one in times),
                    numbers.median(rates) if rates else None,
                )
            )
    return tuple(found)


def peer_ratios(
    measured: ChatMeasurements, modes: Sequence[str], peers: Sequence[str], kinds: Sequence[str], seed: int
) -> tuple[PeerRatio, ...]:
    """The speed of each mode relative to each other runtime, by kind and over all kinds."""
    found = []
    for peer in peers:
        reference = rounds_of(measured, peer)
        for mode in modes if reference else ():
            own = rounds_of(measured, mode)
            for kind in (*kinds, ALL):
                speeds = ratios(own, reference, lambda times: times.rate, kind)
                decode_speeds = ratios(own, reference, lambda times: times.decode_rate, kind)
                found.append(PeerRatio(peer, mode, kind, speedup_of(speeds, seed), speedup_of(decode_speeds, seed)))
    return tuple(found)


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


def fork_figures(measured: ChatMeasurements, modes: Sequence[str], seed: int) -> tuple[ForkFigures, ...]:
    """The figures of each mode."""
    plain = rounds_of(measured, PLAIN)
    return tuple(_mode_forks(measured, mode, plain, seed) for mode in modes if measured.answers)


def _mode_forks(measured: ChatMeasurements, mode: str, plain: Rounds, seed: int) -> ForkFigures:
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
