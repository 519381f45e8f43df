"""Chat benchmark: what drafts gain on chat prompts, by kind of prompt, and what other runtimes need for the same prompts."""

from __future__ import annotations

import statistics as numbers
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from spaceport.runtime.bundle import read_manifest
from spaceport.runtime.decode.sequence_group import Statistics
from spaceport.runtime.session import Runtime
from spaceport.tools.bench.chat_measuring import (
    Answer,
    ChatDifference,
    ChatMeasurements,
    ChatOptions,
    ChatPrompt,
    Job,
    ModeSubject,
    OpenedPeer,
    PeerOptions,
    Peers,
    check_lengths,
    measure_chats,
    read_chat_prompts,
    running_peers,
)
from spaceport.tools.bench.compare import header, number, row, titled
from spaceport.tools.bench.decode import Rate, Speedup, described, rates_by_depth, rates_by_source, speedup_of
from spaceport.tools.bench.decode_measuring import DEFAULT, PLAIN, DecodeMode, mode_runtimes
from spaceport.tools.bench.environments import Skipped
from spaceport.tools.bench.machine import Machine, OtherProcesses, this_machine

ALL = "all"  # kind of the rows over all prompts
LOSS = 0.97  # a prompt with a lower speedup counts as a loss
_SHOWN = 10  # differences; JSON has all
_FIXED = "fixed "  # start of the names of modes with a fixed draft
_DEPTHS = 8  # columns; JSON has all
_NONE = "-"
OnProgress = Callable[[str], None]


@dataclass(frozen=True)
class Times:
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


Rounds = Mapping[ChatPrompt, Sequence[Times]]  # by prompt: its times in each round


@dataclass(frozen=True)
class Drafts:
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
class Figures:
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
    drafts: Drafts | None  # None without drafts, and for other runtimes


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


def rounds_of(measured: ChatMeasurements, subject: str) -> dict[ChatPrompt, list[Times]]:
    """The times of a subject by prompt and round; prompts of which a round is incomplete are left out."""
    own: dict[tuple[ChatPrompt, int], list[Answer]] = defaultdict(list)
    plain: dict[tuple[ChatPrompt, int], list[Answer]] = defaultdict(list)
    for one in measured.answers:
        if one.subject == subject:
            own[one.prompt, one.round].append(one.answer)
        if one.subject == PLAIN:
            plain[one.prompt, one.round].append(one.answer)
    found: dict[ChatPrompt, list[Times]] = {}
    for (prompt, round_), answers in own.items():
        if len(answers) == len(prompt.parts):
            found.setdefault(prompt, []).append(times_of(answers, plain[prompt, round_]))
    rounds = max((one.round for one in measured.answers), default=0)
    return {prompt: times for prompt, times in found.items() if len(times) == rounds}


def times_of(answers: Sequence[Answer], plain: Sequence[Answer]) -> Times:
    """The times of a prompt's answers.

    A mode's decode time begins at the first token of plain decoding: prompt lookup may generate several tokens in the
    first step, whose rows and tokens so count as decoding. Other runtimes say how many tokens their first step generated.
    """
    decode_tokens, decode_seconds = 0, 0.0
    for answer, other in zip(answers, plain, strict=True):
        prefill = answer if answer.statistics is None else other
        decode_tokens += max(0, answer.tokens - answer.first_tokens)
        decode_seconds += answer.seconds - prefill.first_token_seconds
    return Times(
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
    own: Rounds, reference: Rounds, rate: Callable[[Times], float | None], kind: str = ALL
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


def figures_of(
    measured: ChatMeasurements, subjects: Iterable[str], kinds: Sequence[str], seed: int
) -> tuple[Figures, ...]:
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


def _figures(measured: ChatMeasurements, subject: str, kind: str, own: Rounds, plain: Rounds, seed: int) -> Figures:
    reference = {} if subject == PLAIN else plain
    speeds = ratios(own, reference, lambda times: times.rate)
    decode_speeds = ratios(own, reference, lambda times: times.decode_rate)
    cpu_speeds = ratios(own, reference, lambda times: times.cpu_rate)
    everything = [times for rounds in own.values() for times in rounds]
    first = [rounds[0] for rounds in own.values()]
    seconds, decode_seconds = (sum(getattr(t, name) for t in everything) for name in ("seconds", "decode_seconds"))
    decode_tokens = sum(times.decode_tokens for times in everything)
    return Figures(
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
        drafts_of(_statistics(measured, subject, own)),
    )


def _statistics(measured: ChatMeasurements, subject: str, prompts: Rounds) -> list[Statistics]:
    return [
        one.answer.statistics
        for one in measured.answers
        if one.subject == subject and one.prompt in prompts and one.answer.statistics is not None
    ]


def drafts_of(completions: Sequence[Statistics]) -> Drafts | None:
    """The drafts of these completions; None without any draft token."""
    by_depth, steps = rates_by_depth(completions), sum(one.steps for one in completions)
    if not by_depth or not steps:
        return None
    return Drafts(
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


@dataclass(frozen=True)
class ChatReport:
    """The results of a benchmark."""

    bundle: str
    engine: str
    machine: Machine
    options: ChatOptions  # with the number of rounds that were measured
    versions: dict[str, str]
    kinds: tuple[str, ...]
    prompts: int
    figures: tuple[Figures, ...]  # by mode or runtime, and kind
    by_prompt: tuple[PromptFigures, ...]
    peer_ratios: tuple[PeerRatio, ...]
    peers: tuple[OpenedPeer, ...]
    skipped: tuple[Skipped, ...]  # other runtimes that were not measured
    failed: dict[str, str]  # other runtimes that failed meanwhile, with the reason
    forks: tuple[ForkFigures, ...]
    compared: Mapping[str, int]  # answers compared with those of the reference, by mode
    differences: tuple[ChatDifference, ...]
    other_cores: float | None  # CPU time of other processes per second; None if it is unknown

    @property
    def identical(self) -> bool:
        """Whether every drafted answer equals that of its reference."""
        return not self.differences

    @property
    def modes(self) -> tuple[str, ...]:
        """The names of the decoding modes in table order."""
        peers = {ratio.peer for ratio in self.peer_ratios}
        return tuple(one.subject for one in self.figures if one.kind == ALL and one.subject not in peers)

    def figure(self, subject: str, kind: str = ALL) -> Figures | None:
        """The figures of a mode or runtime on the prompts of a kind; None if it has none."""
        return next((one for one in self.figures if (one.subject, one.kind) == (subject, kind)), None)

    def ratio(self, peer: str, mode: str, kind: str = ALL) -> PeerRatio | None:
        """The speed of a mode relative to another runtime; None if it was not measured."""
        key = (peer, mode, kind)
        return next((one for one in self.peer_ratios if (one.peer, one.mode, one.kind) == key), None)

    def as_dict(self) -> dict[str, Any]:
        """The report as JSON data."""
        data = asdict(self)
        for one, figures in zip(data["figures"], self.figures, strict=True):
            one["drafts"] = None if figures.drafts is None else _drafts(figures.drafts)
        return {"identical": self.identical, **data}


def _drafts(drafts: Drafts) -> dict[str, Any]:
    return {
        **asdict(drafts),
        "by_depth": [{**asdict(rate), "rate": rate.rate} for rate in drafts.by_depth],
        "by_source": {name: {**asdict(rate), "rate": rate.rate} for name, rate in drafts.by_source.items()},
        "given_previous": list(drafts.given_previous),
    }


def markdown_of(report: ChatReport) -> str:
    """The whole report."""
    return "\n".join(_lines(report)) + "\n"


def _lines(report: ChatReport) -> Iterator[str]:
    yield from setting(report)
    sections = (
        ("Speed by mode", speeds(report)),
        ("Answer speedup by kind of prompt (95 % interval)", speedups_by_kind(report)),
        *(
            (f"Acceptance of {name[len(_FIXED) :]} mask slots in every step", fixed_drafts(report, name))
            for name in _fixed(report)
        ),
        ("Mean acceptance length of planned drafts", planned_drafts(report)),
        ("Other runtimes", peers(report)),
        (f"Speed of `{DEFAULT}` relative to other runtimes by kind of prompt (95 % interval)", peers_by_kind(report)),
        (f"Forked threads: {', '.join(report.options.fork_kinds)}", forks(report)),
    )
    yield from titled(sections)
    yield ""
    yield from conclusions(report)


def setting(report: ChatReport) -> Iterator[str]:
    """What was measured on which machine."""
    machine, options = report.machine, report.options
    versions = ", ".join(f"{name} {version}" for name, version in report.versions.items())
    yield (
        f"{report.bundle} on {report.engine}, {options.threads} thread(s); {machine.cpu} ({machine.model}; "
        f"{machine.cores} cores; {', '.join(machine.flags) or 'no vector extensions found'}), {machine.system}; {versions}."
    )
    yield (
        f"{report.prompts} prompts of {len(report.kinds)} kinds, greedy, at most {options.max_tokens} tokens per answer, "
        f"{options.rounds} round(s) after a warm-up; intervals are bootstraps over prompts, seed {options.seed}."
    )


def speeds(report: ChatReport) -> Iterator[str]:
    """The table of speed over all prompts: a row per mode."""
    cpu = ["the same in CPU time"] if report.options.threads == 1 else []  # several threads spin while they wait
    yield from header(
        [
            *("mode", "decode tokens/s", "tokens/s", "first token p50, ms", "tokens per step"),
            *("decode speedup (95 % interval)", "answer speedup (95 % interval)", *cpu, "worst prompt"),
            *(f"below {LOSS}", "output"),
        ]
    )
    for name in report.modes:
        if (one := report.figure(name)) is not None:
            steps = "1.00" if one.drafts is None else f"{one.drafts.tokens_per_step:.2f}"
            speed = [*_speed(one), steps, _interval(one.decode_speedup), _interval(one.speedup)]
            speed += [_interval(one.cpu_speedup) for _ in cpu]
            losses = _NONE if one.speedup is None else str(one.losses)
            yield row([name, *speed, _worst(one.speedup), losses, _output(report, name)])


def speedups_by_kind(report: ChatReport) -> Iterator[str]:
    """The table of speedups over plain decoding, prefill included: a row per kind, a column per mode."""
    drafted = [name for name in report.modes if name != PLAIN]
    yield from header(
        [
            *("kind", "prompts", "complete answers", "plain decode tokens/s", *drafted),
            *(f"{DEFAULT}, decode", f"{DEFAULT}, worst prompt", f"{DEFAULT}, below {LOSS}"),
        ]
    )
    for kind in (*report.kinds, ALL):
        plain, default = report.figure(PLAIN, kind), report.figure(DEFAULT, kind)
        if plain is None:
            continue
        cells = [str(plain.prompts), f"{plain.complete} of {plain.answers}", _rate(plain.decode_tokens_per_second)]
        cells += [_interval(one.speedup) if (one := report.figure(name, kind)) else _NONE for name in drafted]
        last = [_NONE] * 3
        if default is not None:
            last = [_interval(default.decode_speedup), _worst(default.speedup), str(default.losses)]
        yield row([kind, *cells, *last])


def fixed_drafts(report: ChatReport, name: str) -> Iterator[str]:
    """The table of acceptance with a fixed number of mask slots: a row per kind."""
    overall = report.figure(name)
    if overall is None or overall.drafts is None:
        return
    depths = range(min(_DEPTHS, len(overall.drafts.by_depth)))
    yield from header(["kind", "mean acceptance length", *(f"depth {depth + 1}" for depth in depths)])
    for kind in (*report.kinds, ALL):
        if (one := report.figure(name, kind)) is None or (drafts := one.drafts) is None:
            continue
        rates = [f"{drafts.by_depth[depth].rate:.2f}" if depth < len(drafts.by_depth) else _NONE for depth in depths]
        yield row([kind, f"{drafts.mean_acceptance_length:.2f}", *rates])
    given = ", ".join(f"{rate:.2f}" for rate in overall.drafts.given_previous)
    yield ""
    yield f"Over all prompts, if the draft token before was accepted: {given}."


def planned_drafts(report: ChatReport) -> Iterator[str]:
    """The table of mean acceptance lengths where step costs decide how much is drafted: a row per kind."""
    planned = [name for name in report.modes if name != PLAIN and not name.startswith(_FIXED)]
    if not any((one := report.figure(name)) is not None and one.drafts for name in planned):
        return
    yield from header(["kind", *planned])
    for kind in (*report.kinds, ALL):
        found = [report.figure(name, kind) for name in planned]
        if any(found):
            lengths = [f"{one.drafts.mean_acceptance_length:.2f}" if one and one.drafts else "1.00" for one in found]
            yield row([kind, *lengths])


def peers(report: ChatReport) -> Iterator[str]:
    """The table of other runtimes over all prompts that they answered."""
    names = list(dict.fromkeys(ratio.peer for ratio in report.peer_ratios))
    modes = [name for name in (PLAIN, DEFAULT) if any(ratio.mode == name for ratio in report.peer_ratios)]
    if not names:
        return
    yield from header(
        [
            *("runtime", "prompts", "decode tokens/s", "tokens/s", "first token p50, ms"),
            *(f"{mode} relative to it{what}" for mode in modes for what in (", decode", "")),
            f"worst prompt of {modes[-1]}",
        ]
    )
    for name in names:
        one = report.figure(name)
        if one is not None:
            found = [report.ratio(name, mode) for mode in modes]
            cells = [_interval(part) for ratio in found if ratio for part in (ratio.decode_speedup, ratio.speedup)]
            yield row([name, str(one.prompts), *_speed(one), *cells, _worst(found[-1].speedup if found[-1] else None)])
    yield ""
    for peer in report.peers:
        versions = ", ".join(f"{name} {version}" for name, version in peer.versions.items())
        yield f"- {peer.name}: {peer.model}; {peer.settings}; {versions}."


def peers_by_kind(report: ChatReport) -> Iterator[str]:
    """The table of the default drafts' speed relative to other runtimes, prefill included: a row per kind."""
    names = list(dict.fromkeys(ratio.peer for ratio in report.peer_ratios if ratio.mode == DEFAULT))
    if not names:
        return
    yield from header(["kind", *names])
    for kind in (*report.kinds, ALL):
        found = [report.ratio(name, DEFAULT, kind) for name in names]
        yield row([kind, *(_interval(one.speedup if one else None) for one in found)])


def forks(report: ChatReport) -> Iterator[str]:
    """The table of forked threads: a row per mode."""
    if not report.forks:
        return
    yield from header(
        [
            *("mode", "answers", "complete", "threads (most)", "tokens per answer", "s per answer"),
            *(
                "answers/s relative to plain (95 % interval)",
                "the same, complete answers",
                "tokens/s",
                "tokens per step",
            ),
        ]
    )
    for one in report.forks:
        counts = [str(one.answers), str(one.complete), f"{one.threads:.1f} ({one.most_threads})", f"{one.tokens:.0f}"]
        speedups = [_interval(one.answer_speedup), _interval(one.complete_speedup)]
        if one.complete_speedup is not None:
            speedups[1] += f", {one.complete_speedup.prompts} prompts"
        rates = [number(one.tokens_per_second), f"{one.tokens_per_step:.2f}"]
        yield row([one.mode, *counts, number(one.seconds), *speedups, *rates])


def conclusions(report: ChatReport) -> Iterator[str]:
    """Identical answers, differences, runtimes that were not measured, and the load of the machine."""
    compared = sum(report.compared.values())
    if report.identical:
        yield f"- All {compared} compared answers are identical to those without drafts."
    else:
        yield f"- {len(report.differences)} of {compared} compared answers DIFFER; `spaceport audit` separates rounding from faults:"
        for one in report.differences[:_SHOWN]:
            yield f"  - {described(one.difference)} (answer {one.turn})"
        if (more := len(report.differences) - _SHOWN) > 0:
            yield f"  - {more} more: --json lists them"
    for skipped in report.skipped:
        yield f"- {skipped.name}: not measured: {skipped.reason}"
    for name, reason in report.failed.items():
        yield f"- {name}: failed: {reason}"
    if report.other_cores is not None:
        yield f"- Other processes of the machine used {report.other_cores:.2f} cores meanwhile."


def _fixed(report: ChatReport) -> Sequence[str]:
    return [name for name in report.modes if name.startswith(_FIXED)]


def _speed(one: Figures) -> list[str]:
    return [_rate(one.decode_tokens_per_second), number(one.tokens_per_second), number(one.first_token_p50 * 1e3)]


def _rate(rate: float | None) -> str:
    return _NONE if rate is None else number(rate)


def _interval(speedup: Speedup | None) -> str:
    if speedup is None:
        return _NONE
    interval = f" ({speedup.low:.2f}-{speedup.high:.2f})" if speedup.prompts > 1 else ""  # one prompt says nothing
    return f"{speedup.mean:.2f}{interval}"


def _worst(speedup: Speedup | None) -> str:
    return _NONE if speedup is None else f"{speedup.worst:.2f} (line {speedup.worst_line})"


def _output(report: ChatReport, name: str) -> str:
    if name not in report.compared:
        return "reference"
    different = sum(one.difference.mode == name for one in report.differences)
    return f"{different} of {report.compared[name]} DIFFER" if different else "same as plain"


@dataclass(frozen=True)
class _Run:
    """All measurements of a benchmark."""

    modes: tuple[DecodeMode, ...]
    forking: tuple[DecodeMode, ...]
    answers: ChatMeasurements
    forks: ChatMeasurements
    peers: Peers
    other_cores: float | None


def benchmark_chat(
    bundle: Path, file: Path, options: ChatOptions, peer_options: PeerOptions | None, on_progress: OnProgress
) -> ChatReport:
    """The speed of every mode and other runtime on the prompts of a file."""
    prompts = read_chat_prompts(file, options.sample)
    manifest = read_manifest(bundle)
    modes, forking = options.modes_of(manifest), options.forking_modes_of(manifest)
    machine = this_machine()
    on_progress("opening the bundle")
    with Runtime.open(
        bundle,
        backend=options.backend,
        max_seq_len=options.max_seq_len,
        threads=options.threads,
        trust_engines=options.trust_engines,
    ) as base:
        for note in base.notes:
            on_progress(note)
        engine = f"{type(base.engine).__name__}, {base.engine.device}"
        run = _run(base, (modes, forking), prompts, file, options, peer_options, machine, on_progress)
    return _report(bundle, engine, machine, prompts, options, run)


def _run(
    base: Runtime,
    modes: tuple[tuple[DecodeMode, ...], tuple[DecodeMode, ...]],
    prompts: Sequence[ChatPrompt],
    file: Path,
    options: ChatOptions,
    peer_options: PeerOptions | None,
    machine: Machine,
    on_progress: OnProgress,
) -> _Run:
    listed, forking = modes
    encode, limit = base.tokens_of, base.max_seq_len
    forked = [prompt for prompt in prompts if prompt.kind in options.fork_kinds] if forking else []
    length = check_lengths(encode, prompts, options.max_tokens, limit, file)
    check_lengths(encode, forked, options.fork_max_tokens, limit, file)

    def open_runtime() -> Runtime:
        return Runtime(base.bundle, base.engine, base.max_seq_len, costs=base.costs)

    ends = base.bundle.manifest.tokens.end
    together = {mode.name: mode for mode in (*forking, *listed)}
    with (
        mode_runtimes(list(together.values()), open_runtime) as runtimes,
        running_peers(peer_options, machine, ends, (length, options.max_tokens), options.threads, on_progress) as peers,
    ):
        others = OtherProcesses([worker.process for worker in peers.workers])
        rounds = options.rounds_for(len(prompts))
        sample = peer_options.sample if peer_options is not None else None
        jobs = _jobs(prompts, _subjects(listed, runtimes), peers, sample)
        answers = measure_chats(jobs, encode, rounds, on_progress)
        fork_jobs = [Job(prompt, _subjects(forking, runtimes)) for prompt in forked]
        forks = measure_chats(fork_jobs, encode, options.rounds_for(len(forked)), on_progress)
        other_cores = others.cores()
    return _Run(listed, forking if forked else (), answers, forks, peers, other_cores)


def _subjects(modes: Sequence[DecodeMode], runtimes: Mapping[str, Runtime]) -> list[ModeSubject]:
    return [ModeSubject(mode, runtimes[mode.name]) for mode in modes]


def _jobs(prompts: Sequence[ChatPrompt], modes: Sequence[ModeSubject], peers: Peers, sample: int | None) -> list[Job]:
    """A job for each prompt; the peers answer the first `sample` prompts of each kind, or all."""
    seen: dict[str, int] = {}
    jobs = []
    for prompt in prompts:
        seen[prompt.kind] = seen.get(prompt.kind, 0) + 1
        with_peers = sample is None or seen[prompt.kind] <= sample
        jobs.append(Job(prompt, (*modes, *peers.subjects) if with_peers else tuple(modes)))
    return jobs


def versions() -> dict[str, str]:
    """The versions of Spaceport and of the packages that run its bundles here."""
    found = {}
    for name in ("spaceport", "onnxruntime", "onnxruntime-gpu"):
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


def _report(
    bundle: Path, engine: str, machine: Machine, prompts: Sequence[ChatPrompt], options: ChatOptions, run: _Run
) -> ChatReport:
    kinds = list(dict.fromkeys(prompt.kind for prompt in prompts))
    names, seed = [mode.name for mode in run.modes], options.seed
    peers = [subject.name for subject in run.peers.subjects]
    return ChatReport(
        bundle.absolute().name,
        engine,
        machine,
        replace(options, rounds=options.rounds_for(len(prompts))),
        versions(),
        tuple(kinds),
        len(prompts),
        figures_of(run.answers, [*names, *peers], kinds, seed),
        prompt_figures(run.answers, [*names, *peers]),
        peer_ratios(run.answers, [name for name in names if name in (PLAIN, DEFAULT)], peers, kinds, seed),
        tuple(run.peers.opened),
        tuple(run.peers.skipped),
        {**run.answers.failed, **run.forks.failed},
        fork_figures(run.forks, [mode.name for mode in run.forking], seed),
        dict(run.answers.compared + run.forks.compared),
        (*run.answers.differences, *run.forks.differences),
        run.other_cores,
    )
