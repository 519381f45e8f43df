"""Benchmark: a bundle and other runtimes on the prompts of a file, measured in turns and summarized by kind."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from spaceport.runtime.bundle import read_manifest
from spaceport.runtime.session import Runtime
from spaceport.tools.bench.chat.answers import ModeSubject
from spaceport.tools.bench.chat.chat_prompts import ChatPrompt, check_lengths, read_chat_prompts
from spaceport.tools.bench.chat.forks import fork_figures
from spaceport.tools.bench.chat.measuring import Job, Measured, measure
from spaceport.tools.bench.chat.options import ChatOptions, PeerOptions
from spaceport.tools.bench.chat.peers import Peers, running_peers
from spaceport.tools.bench.chat.report import ChatReport
from spaceport.tools.bench.chat.summary import figures_of, peer_ratios, prompt_figures
from spaceport.tools.bench.compare.machine import Machine, this_machine
from spaceport.tools.bench.compare.worker_process import OtherProcesses
from spaceport.tools.bench.decode.modes import DEFAULT, PLAIN, DecodeMode
from spaceport.tools.bench.decode.runtimes import mode_runtimes

OnProgress = Callable[[str], None]


@dataclass(frozen=True)
class _Run:
    """All measurements of a benchmark."""

    modes: tuple[DecodeMode, ...]
    forking: tuple[DecodeMode, ...]
    answers: Measured
    forks: Measured
    peers: Peers
    other_cores: float | None


def benchmark(
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
        others = OtherProcesses(peers.workers)
        rounds = options.rounds_for(len(prompts))
        sample = peer_options.sample if peer_options is not None else None
        jobs = _jobs(prompts, _subjects(listed, runtimes), peers, sample)
        answers = measure(jobs, encode, rounds, on_progress)
        fork_jobs = [Job(prompt, _subjects(forking, runtimes)) for prompt in forked]
        forks = measure(fork_jobs, encode, options.rounds_for(len(forked)), on_progress)
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
