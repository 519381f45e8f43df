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

from benchmarks.chat_measuring import (
    BenchPrompt,
    ChatMeasurements,
    ChatOptions,
    Job,
    ModeSubject,
    OpenedPeer,
    PeerOptions,
    Peers,
    TimedAnswer,
    check_chat_lengths,
    measure_chats,
    read_chat_prompts,
    running_peers,
)
from spaceport.runtime.bundle import read_manifest
from spaceport.runtime.decode.sequence_group import Statistics
from spaceport.runtime.session import Runtime
from spaceport.tools.bench.decode import (
    Rate,
    Speedup,
    differing_lines,
    rates_by_depth,
    rates_by_source,
    speedup_of,
)
from spaceport.tools.bench.decode_measuring import DEFAULT, PLAIN, DecodeMode, OutputDifference, mode_runtimes
from spaceport.tools.bench.environments import Skipped
from spaceport.tools.bench.machine import Machine, OtherProcesses, this_machine
from spaceport.tools.bench.report import Report, Table

ALL = "all"  # kind of the rows over all prompts
LOSS = 0.97  # a prompt with a lower speedup counts as a loss
_FIXED = "fixed "  # start of the names of modes with a fixed draft
_DEPTHS = 8  # columns; JSON has all
OnProgress = Callable[[str], None]


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


@dataclass(frozen=True)
class ChatResults:
    """The results of a benchmark."""

    bundle: str
    engine: str
    machine: Machine
    options: ChatOptions  # with the number of rounds that were measured
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
    def identical(self) -> bool:
        """Whether every drafted answer equals that of its reference."""
        return not self.differences

    @property
    def modes(self) -> tuple[str, ...]:
        """The names of the decoding modes in table order."""
        peers = {ratio.peer for ratio in self.peer_ratios}
        return tuple(one.subject for one in self.figures if one.kind == ALL and one.subject not in peers)

    def figure(self, subject: str, kind: str = ALL) -> ChatFigures | None:
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
        data["differences"] = [one.as_dict() for one in self.differences]
        return {"identical": self.identical, **data}


def _drafts(drafts: DraftFigures) -> dict[str, Any]:
    return {
        **asdict(drafts),
        "by_depth": [{**asdict(rate), "rate": rate.rate} for rate in drafts.by_depth],
        "by_source": {name: {**asdict(rate), "rate": rate.rate} for name, rate in drafts.by_source.items()},
        "given_previous": list(drafts.given_previous),
    }


def chat_report(results: ChatResults) -> Report:
    """The results as tables."""
    fixed = [name for name in results.modes if name.startswith(_FIXED)]
    tables = (
        _speeds(results),
        _speedups_by_kind(results),
        *(_fixed_drafts(results, name) for name in fixed),
        _planned_drafts(results),
        _peers(results),
        _peers_by_kind(results),
        _forks(results),
    )
    return Report(_settings(results), tables, list(_conclusions(results)), results.as_dict(), results.identical)


def _settings(results: ChatResults) -> list[str]:
    machine, options = results.machine, results.options
    versions = ", ".join(f"{name} {version}" for name, version in results.versions.items())
    return [
        f"{results.bundle} on {results.engine}, {options.threads} thread(s); {machine}; {versions}.",
        f"{results.prompts} prompts of {len(results.kinds)} kinds, greedy, at most {options.max_tokens} tokens per answer, "
        f"{options.rounds} round(s) after a warm-up; intervals are bootstraps over prompts, seed {options.seed}.",
    ]


def _speeds(results: ChatResults) -> Table:
    """Speed over all prompts: a row per mode."""
    cpu = ["the same in CPU time"] if results.options.threads == 1 else []  # several threads spin while they wait
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
            found = [results.ratio(name, mode) for mode in modes]
            cells = [_interval(part) for ratio in found if ratio for part in (ratio.decode_speedup, ratio.speedup)]
            rows.append([name, one.prompts, *_speed(one), *cells, _worst(found[-1].speedup if found[-1] else None)])
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
        found = [results.ratio(name, DEFAULT, kind) for name in names]
        rows.append([kind, *(_interval(one.speedup if one else None) for one in found)])
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
    return Table(f"Forked threads: {', '.join(results.options.fork_kinds)}", columns, rows)


def _conclusions(results: ChatResults) -> Iterator[str]:
    """Identical answers, differences, runtimes that were not measured, and the load of the machine."""
    compared = sum(results.compared.values())
    if results.identical:
        yield f"- All {compared} compared answers are identical to those without drafts."
    else:
        lines = [f"{one} (answer {one.turn})" for one in results.differences]
        yield from differing_lines("answers", compared, lines)
    for skipped in results.skipped:
        yield f"- {skipped.name}: not measured: {skipped.reason}"
    for name, reason in results.failed.items():
        yield f"- {name}: failed: {reason}"
    if results.other_cores is not None:
        yield f"- Other processes of the machine used {results.other_cores:.2f} cores meanwhile."


def _speed(one: ChatFigures) -> list[object]:
    return [one.decode_tokens_per_second, one.tokens_per_second, one.first_token_p50 * 1e3]


def _interval(speedup: Speedup | None) -> str | None:
    if speedup is None:
        return None
    return str(speedup) if speedup.prompts > 1 else f"{speedup.mean:.2f}"  # the interval of one prompt says nothing


def _worst(speedup: Speedup | None) -> str | None:
    return None if speedup is None else f"{speedup.worst:.2f} (line {speedup.worst_line})"


def _output(results: ChatResults, name: str) -> str:
    if name not in results.compared:
        return "reference"
    different = sum(one.mode == name for one in results.differences)
    return f"{different} of {results.compared[name]} DIFFER" if different else "same as plain"


@dataclass(frozen=True)
class _ChatRun:
    """All measurements of a benchmark."""

    modes: tuple[DecodeMode, ...]
    forking: tuple[DecodeMode, ...]
    answers: ChatMeasurements
    forks: ChatMeasurements
    peers: Peers
    other_cores: float | None


def benchmark_chat(
    bundle: Path, file: Path, options: ChatOptions, peer_options: PeerOptions | None, on_progress: OnProgress
) -> Report:
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
    return chat_report(_results(bundle, engine, machine, prompts, options, run))


def _run(
    base: Runtime,
    modes: tuple[tuple[DecodeMode, ...], tuple[DecodeMode, ...]],
    prompts: Sequence[BenchPrompt],
    file: Path,
    options: ChatOptions,
    peer_options: PeerOptions | None,
    machine: Machine,
    on_progress: OnProgress,
) -> _ChatRun:
    listed, forking = modes
    encode, limit = base.tokens_of, base.max_seq_len
    forked = [prompt for prompt in prompts if prompt.kind in options.fork_kinds] if forking else []
    length = check_chat_lengths(encode, prompts, options.max_tokens, limit, file)
    check_chat_lengths(encode, forked, options.fork_max_tokens, limit, file)

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
    return _ChatRun(listed, forking if forked else (), answers, forks, peers, other_cores)


def _subjects(modes: Sequence[DecodeMode], runtimes: Mapping[str, Runtime]) -> list[ModeSubject]:
    return [ModeSubject(mode, runtimes[mode.name]) for mode in modes]


def _jobs(prompts: Sequence[BenchPrompt], modes: Sequence[ModeSubject], peers: Peers, sample: int | None) -> list[Job]:
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


def _results(
    bundle: Path, engine: str, machine: Machine, prompts: Sequence[BenchPrompt], options: ChatOptions, run: _ChatRun
) -> ChatResults:
    kinds = list(dict.fromkeys(prompt.kind for prompt in prompts))
    names, seed = [mode.name for mode in run.modes], options.seed
    peers = [subject.name for subject in run.peers.subjects]
    return ChatResults(
        bundle.absolute().name,
        engine,
        machine,
        replace(options, rounds=options.rounds_for(len(prompts))),
        versions(),
        tuple(kinds),
        len(prompts),
        chat_figures(run.answers, [*names, *peers], kinds, seed),
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
