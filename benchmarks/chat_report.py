"""Report on chats: what drafts gain by kind of prompt, and what other runtimes need for the same prompts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from benchmarks.chat_figures import (
    ALL,
    LOSS,
    ChatFigures,
    DraftFigures,
    ForkFigures,
    PeerRatio,
    PromptFigures,
    chat_figures,
    fork_figures,
    peer_ratios,
    prompt_figures,
)
from benchmarks.chat_measuring import (
    BenchPrompt,
    ChatMeasurements,
    ChatOptions,
    Job,
    ModeSubject,
    OpenedPeer,
    PeerOptions,
    Peers,
    check_chat_lengths,
    measure_chats,
    read_chat_prompts,
    running_peers,
)
from spaceport.runtime.bundle import read_manifest
from spaceport.runtime.session import Runtime
from spaceport.tools.bench.decode import (
    Speedup,
    differing_lines,
)
from spaceport.tools.bench.decode_measuring import DEFAULT, PLAIN, DecodeMode, OutputDifference, mode_runtimes
from spaceport.tools.bench.environments import Skipped
from spaceport.tools.bench.machine import Machine, OtherProcesses, this_machine
from spaceport.tools.bench.report import Report, Table

_FIXED = "fixed "  # start of the names of modes with a fixed draft
_DEPTHS = 8  # columns; JSON has all
OnProgress = Callable[[str], None]


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
