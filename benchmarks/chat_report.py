"""Report on chats: what drafts gain by kind of prompt, and what other runtimes need for the same prompts."""

from __future__ import annotations

import statistics as numbers
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.chat_measuring import ChatMeasurements, OpenedPeer, PromptTimes, Rounds, rounds_of
from spaceport.runtime.decode.sequence_group import Statistics
from spaceport.tools.bench.decode import (
    Rate,
    Speedup,
    differing_lines,
    rates_by_depth,
    rates_by_source,
    rates_data,
    speedup_of,
)
from spaceport.tools.bench.decode_measuring import DEFAULT, PLAIN, OutputDifference
from spaceport.tools.bench.machine import Machine
from spaceport.tools.bench.report import Report, Table
from spaceport.tools.bench.rivals import Skipped

ALL = "all"  # kind of the rows over all prompts
LOSS = 0.97  # a prompt with a lower speedup counts as a loss
_FIXED = "fixed "  # start of the names of modes with a fixed draft
_DEPTHS = 8  # columns; JSON has all


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

    def as_dict(self) -> dict[str, Any]:
        """The figures as JSON data."""
        rates = rates_data(self.by_depth, self.by_source)
        return {**asdict(self), **rates, "given_previous": list(self.given_previous)}


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


def speedup(
    own: Rounds, reference: Rounds, rate: Callable[[PromptTimes], float | None], seed: int
) -> tuple[Speedup | None, dict[int, list[float]]]:
    """The speedup over a reference on the prompts for which both have a rate, and its ratios by line and round."""
    ratios: dict[int, list[float]] = {}
    for prompt in (prompt for prompt in own if prompt in reference):
        rates = [rate(times) for times in own[prompt]], [rate(times) for times in reference[prompt]]
        if all(rates[0]) and all(rates[1]):
            ratios[prompt.line] = [one / other for one, other in zip(*rates, strict=True) if one and other]
    return speedup_of(ratios, seed), ratios


def _of_kind(rounds: Rounds, kind: str) -> Rounds:
    return {prompt: times for prompt, times in rounds.items() if kind in (ALL, prompt.kind)}


def chat_figures(
    measured: ChatMeasurements, subjects: Iterable[str], kinds: Sequence[str], seed: int
) -> tuple[ChatFigures, ...]:
    """The figures of these subjects by kind, and over all kinds."""
    plain = rounds_of(measured, PLAIN)
    by_subject = {subject: rounds_of(measured, subject) for subject in subjects}
    return tuple(
        _figures(measured, subject, kind, own, plain, seed)
        for subject, rounds in by_subject.items()
        for kind in (*kinds, ALL)
        if (own := _of_kind(rounds, kind))
    )


def _figures(measured: ChatMeasurements, subject: str, kind: str, own: Rounds, plain: Rounds, seed: int) -> ChatFigures:
    reference = {} if subject == PLAIN else plain
    answer_speedup, ratios = speedup(own, reference, lambda times: times.rate, seed)
    everything = [times for rounds in own.values() for times in rounds]
    first = [rounds[0] for rounds in own.values()]
    seconds, decode_seconds = (sum(getattr(t, name) for t in everything) for name in ("seconds", "decode_seconds"))
    decode_tokens = sum(times.decode_tokens for times in everything)
    answers = [one for one in measured.answers if one.subject == subject and one.prompt in own]
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
        answer_speedup,
        speedup(own, reference, lambda times: times.decode_rate, seed)[0],
        speedup(own, reference, lambda times: times.cpu_rate, seed)[0],
        sum(numbers.median(rounds) < LOSS for rounds in ratios.values()),
        draft_figures([one.answer.statistics for one in answers if one.answer.statistics is not None]),
    )


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


def prompt_figures(measured: ChatMeasurements, subjects: Iterable[str]) -> Iterator[PromptFigures]:
    """The figures of every prompt."""
    for subject in subjects:
        for prompt, times in rounds_of(measured, subject).items():
            first, rates = times[0], [one.decode_rate for one in times if one.decode_rate is not None]
            speeds = numbers.median(one.rate for one in times), numbers.median(rates) if rates else None
            yield PromptFigures(prompt.line, prompt.kind, subject, first.tokens, first.whole, *speeds)


def peer_ratios(
    measured: ChatMeasurements, modes: Sequence[str], peers: Sequence[str], kinds: Sequence[str], seed: int
) -> Iterator[PeerRatio]:
    """The speed of each mode relative to each other runtime, by kind and over all kinds."""
    for peer in peers:
        reference = rounds_of(measured, peer)
        for mode in modes if reference else ():
            rounds = rounds_of(measured, mode)
            for kind in (*kinds, ALL):
                own = _of_kind(rounds, kind)
                answer, _ = speedup(own, reference, lambda times: times.rate, seed)
                decode, _ = speedup(own, reference, lambda times: times.decode_rate, seed)
                yield PeerRatio(peer, mode, kind, answer, decode)


def fork_figures(measured: ChatMeasurements, mode: str, seed: int) -> ForkFigures:
    """The figures of a mode with forked threads, or of plain decoding of the same prompts."""
    own, plain = rounds_of(measured, mode), rounds_of(measured, PLAIN)
    answers = [one.answer for one in measured.answers if one.subject == mode]
    first = [one.answer for one in measured.answers if one.subject == mode and one.round == 1]
    seconds, tokens = sum(answer.seconds for answer in answers), sum(answer.tokens for answer in answers)
    steps = sum(answer.statistics.steps for answer in answers if answer.statistics is not None)
    whole = {prompt: times for prompt, times in own.items() if times[0].whole and plain[prompt][0].whole}
    reference = {} if mode == PLAIN else plain
    return ForkFigures(
        mode,
        len(first),
        sum(answer.complete for answer in first),
        numbers.mean(len(answer.threads) for answer in first),
        max(len(answer.threads) for answer in first),
        numbers.mean(answer.tokens for answer in first),
        seconds / len(answers),
        tokens / seconds,
        tokens / max(1, steps),
        *(speedup(rounds, reference, lambda times: 1 / times.seconds, seed)[0] for rounds in (own, whole)),
    )


@dataclass(frozen=True)
class ChatResults:
    """The results of a benchmark."""

    bundle: str
    engine: str
    machine: Machine
    options: dict[str, Any]  # with the number of rounds that were measured
    versions: dict[str, str]
    kinds: tuple[str, ...]
    prompts: int
    figures: tuple[ChatFigures, ...]  # by mode or runtime, and kind
    by_prompt: tuple[PromptFigures, ...]
    peer_ratios: tuple[PeerRatio, ...]
    peers: tuple[OpenedPeer, ...]
    skipped: tuple[Skipped, ...]  # other runtimes that were not measured
    failed: dict[str, str]  # other runtimes that failed meanwhile, with the reason
    forks: tuple[ForkFigures, ...]
    compared: Mapping[str, int]  # answers compared with those of the reference, by mode
    differences: tuple[OutputDifference, ...]
    other_cores: float | None  # CPU time of other processes per second; None if it is unknown

    @property
    def modes(self) -> list[str]:
        """The names of the decoding modes in table order."""
        peers = {ratio.peer for ratio in self.peer_ratios}
        return [one.subject for one in self.figures if one.kind == ALL and one.subject not in peers]

    def figure(self, subject: str, kind: str = ALL) -> ChatFigures | None:
        """The figures of a mode or runtime on the prompts of a kind; None if it has none."""
        return next((one for one in self.figures if (one.subject, one.kind) == (subject, kind)), None)

    def ratio(self, peer: str, mode: str, kind: str = ALL) -> PeerRatio | None:
        """The speed of a mode relative to another runtime; None if it was not measured."""
        key = (peer, mode, kind)
        return next((one for one in self.peer_ratios if (one.peer, one.mode, one.kind) == key), None)

    def report(self) -> Report:
        """The results as tables."""
        data = asdict(self)
        for one, figures in zip(data["figures"], self.figures, strict=True):
            one["drafts"] = None if figures.drafts is None else figures.drafts.as_dict()
        data["differences"] = [one.as_dict() for one in self.differences]
        identical = not self.differences
        fixed = [_fixed_drafts(self, name) for name in self.modes if name.startswith(_FIXED)]
        tables = (_speeds(self), _speedups_by_kind(self), *fixed, _planned_drafts(self))
        tables = (*tables, _peers(self), _peers_by_kind(self), _forks(self))
        return Report(_settings(self), tables, list(_conclusions(self)), {"identical": identical, **data}, identical)


def _settings(results: ChatResults) -> list[str]:
    options = results.options
    versions = ", ".join(f"{name} {version}" for name, version in results.versions.items())
    return [
        f"{results.bundle} on {results.engine}, {options['threads']} thread(s); {results.machine}; {versions}.",
        f"{results.prompts} prompts of {len(results.kinds)} kinds, greedy, at most {options['max_tokens']} tokens per "
        f"answer, {options['rounds']} round(s) after a warm-up; intervals are bootstraps over prompts, seed {options['seed']}.",
    ]


def _speeds(results: ChatResults) -> Table:
    """Speed over all prompts: a row per mode."""
    cpu = ["the same in CPU time"] if results.options["threads"] == 1 else []  # several threads spin while they wait
    columns = (
        *("mode", "decode tokens/s", "tokens/s", "first token p50, ms", "tokens per step"),
        *("decode speedup (95 % interval)", "answer speedup (95 % interval)", *cpu, "worst prompt"),
        *(f"below {LOSS}", "output"),
    )
    rows = []
    for name in results.modes:
        if (one := results.figure(name)) is not None:
            steps = 1.0 if one.drafts is None else one.drafts.tokens_per_step
            speed = [*_speed(one), steps, _interval(one.decode_speedup), _interval(one.speedup)]
            speed += [_interval(one.cpu_speedup) for _ in cpu]
            losses = None if one.speedup is None else one.losses
            rows.append([name, *speed, _worst(one.speedup), losses, _output(results, name)])
    return Table("Speed by mode", columns, rows)


def _speedups_by_kind(results: ChatResults) -> Table:
    """Speedups over plain decoding, prefill included: a row per kind, a column per mode."""
    drafted = [name for name in results.modes if name != PLAIN]
    columns = (
        *("kind", "prompts", "complete answers", "plain decode tokens/s", *drafted),
        *(f"{DEFAULT}, decode", f"{DEFAULT}, worst prompt", f"{DEFAULT}, below {LOSS}"),
    )
    rows = []
    for kind in (*results.kinds, ALL):
        plain, default = results.figure(PLAIN, kind), results.figure(DEFAULT, kind)
        if plain is None:
            continue
        cells = [plain.prompts, f"{plain.complete} of {plain.answers}", plain.decode_tokens_per_second]
        cells += [_interval(one.speedup) if (one := results.figure(name, kind)) else None for name in drafted]
        last: list[object] = [None] * 3
        if default is not None:
            last = [_interval(default.decode_speedup), _worst(default.speedup), default.losses]
        rows.append([kind, *cells, *last])
    return Table("Answer speedup by kind of prompt (95 % interval)", columns, rows)


def _fixed_drafts(results: ChatResults, name: str) -> Table:
    """Acceptance with a fixed number of mask slots: a row per kind."""
    title = f"Acceptance of {name[len(_FIXED) :]} mask slots in every step"
    overall = results.figure(name)
    if overall is None or overall.drafts is None:
        return Table(title, (), ())
    depths = range(min(_DEPTHS, len(overall.drafts.by_depth)))
    rows = []
    for kind in (*results.kinds, ALL):
        if (one := results.figure(name, kind)) is None or (drafts := one.drafts) is None:
            continue
        rates = [drafts.by_depth[depth].rate if depth < len(drafts.by_depth) else None for depth in depths]
        rows.append([kind, drafts.mean_acceptance_length, *rates])
    conditional = ", ".join(f"{rate:.2f}" for rate in overall.drafts.given_previous)
    note = f"Over all prompts, if the draft token before was accepted: {conditional}."
    columns = ("kind", "mean acceptance length", *(f"depth {depth + 1}" for depth in depths))
    return Table(title, columns, rows, (note,))


def _planned_drafts(results: ChatResults) -> Table:
    """Mean acceptance lengths where step costs decide how much is drafted: a row per kind."""
    planned = [name for name in results.modes if name != PLAIN and not name.startswith(_FIXED)]
    rows: list[list[object]] = []
    if any((one := results.figure(name)) is not None and one.drafts for name in planned):
        for kind in (*results.kinds, ALL):
            figures = [results.figure(name, kind) for name in planned]
            if any(figures):
                lengths = [one.drafts.mean_acceptance_length if one and one.drafts else 1.0 for one in figures]
                rows.append([kind, *lengths])
    return Table("Mean acceptance length of planned drafts", ("kind", *planned), rows)


def _peers(results: ChatResults) -> Table:
    """Other runtimes over all prompts that they answered."""
    names = list(dict.fromkeys(ratio.peer for ratio in results.peer_ratios))
    modes = [name for name in (PLAIN, DEFAULT) if any(ratio.mode == name for ratio in results.peer_ratios)]
    columns = (
        *("runtime", "prompts", "decode tokens/s", "tokens/s", "first token p50, ms"),
        *(f"{mode} relative to it{what}" for mode in modes for what in (", decode", "")),
        f"worst prompt of {modes[-1] if modes else DEFAULT}",
    )
    rows = []
    for name in names:
        one = results.figure(name)
        if one is not None:
            ratios = [results.ratio(name, mode) for mode in modes]
            cells = [_interval(part) for ratio in ratios if ratio for part in (ratio.decode_speedup, ratio.speedup)]
            rows.append([name, one.prompts, *_speed(one), *cells, _worst(ratios[-1].speedup if ratios[-1] else None)])
    notes = [
        f"- {peer.name}: {peer.model}; {peer.settings}; "
        f"{', '.join(f'{name} {version}' for name, version in peer.versions.items())}."
        for peer in results.peers
    ]
    return Table("Other runtimes", columns, rows, notes)


def _peers_by_kind(results: ChatResults) -> Table:
    """The default drafts' speed relative to other runtimes, prefill included: a row per kind."""
    names = list(dict.fromkeys(ratio.peer for ratio in results.peer_ratios if ratio.mode == DEFAULT))
    rows: list[list[object]] = []
    for kind in (*results.kinds, ALL) if names else ():
        ratios = [results.ratio(name, DEFAULT, kind) for name in names]
        rows.append([kind, *(_interval(one.speedup if one else None) for one in ratios)])
    title = f"Speed of `{DEFAULT}` relative to other runtimes by kind of prompt (95 % interval)"
    return Table(title, ("kind", *names), rows)


def _forks(results: ChatResults) -> Table:
    """Forked threads: a row per mode."""
    columns = (
        *("mode", "answers", "complete", "threads (most)", "tokens per answer", "s per answer"),
        *("answers/s relative to plain (95 % interval)", "the same, complete answers", "tokens/s", "tokens per step"),
    )
    rows = []
    for one in results.forks:
        counts = [one.answers, one.complete, f"{one.threads:.1f} ({one.most_threads})", f"{one.tokens:.0f}"]
        speedups = [_interval(one.answer_speedup), _interval(one.complete_speedup)]
        if one.complete_speedup is not None:
            speedups[1] = f"{speedups[1]}, {one.complete_speedup.prompts} prompts"
        rows.append([one.mode, *counts, one.seconds, *speedups, one.tokens_per_second, one.tokens_per_step])
    return Table(f"Forked threads: {', '.join(results.options['fork_kinds'])}", columns, rows)


def _conclusions(results: ChatResults) -> Iterator[str]:
    """Identical answers, differences, runtimes that were not measured, and the load of the machine."""
    compared = sum(results.compared.values())
    if results.differences:
        lines = [f"{one} (answer {one.turn})" for one in results.differences]
        yield from differing_lines("answers", compared, lines)
    else:
        yield f"- All {compared} compared answers are identical to those without drafts."
    for skipped in results.skipped:
        yield f"- {skipped.name}: not measured: {skipped.reason}"
    for name, reason in results.failed.items():
        yield f"- {name}: failed: {reason}"
    if results.other_cores is not None:
        yield f"- Other processes of the machine used {results.other_cores:.2f} cores meanwhile."


def _speed(one: ChatFigures) -> list[object]:
    return [one.decode_tokens_per_second, one.tokens_per_second, one.first_token_p50 * 1e3]


def _interval(value: Speedup | None) -> str | None:
    if value is None:
        return None
    return str(value) if value.prompts > 1 else f"{value.mean:.2f}"  # the interval of one prompt says nothing


def _worst(value: Speedup | None) -> str | None:
    return None if value is None else f"{value.worst:.2f} (line {value.worst_line})"


def _output(results: ChatResults, name: str) -> str:
    if name not in results.compared:
        return "reference"
    different = sum(one.mode == name for one in results.differences)
    return f"{different} of {results.compared[name]} DIFFER" if different else "same as plain"
