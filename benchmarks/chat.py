"""`python -m benchmarks chat`: what drafts gain on chat prompts, by kind of prompt, beside other runtimes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, ClassVar

import click

from benchmarks.chat_measuring import (
    BenchPrompt,
    ChatMeasurements,
    ChatSubject,
    Job,
    PeerOptions,
    check_chat_lengths,
    mode_subject,
    read_chat_prompts,
    running_peers,
)
from benchmarks.chat_report import ChatResults, chat_figures, fork_figures, peer_ratios, prompt_figures
from spaceport.graphs.contract.faults import InputFault, OptionFault
from spaceport.graphs.contract.manifest import Manifest
from spaceport.runtime.bundle import read_manifest
from spaceport.runtime.session import Runtime, another_runtime
from spaceport.tools.bench.decode_measuring import DEFAULT, FORKING, MODES, PLAIN, DecodeMode, mode_runtimes, modes_for
from spaceport.tools.bench.machine import OtherProcesses, this_machine
from spaceport.tools.bench.report import Report
from spaceport.tools.bench.rivals import OnProgress, Peer, peers_named
from spaceport.tools.cli import ACCURACY, OK
from spaceport.tools.cli.bench import parse_counts
from spaceport.tools.cli.options import (
    PATH,
    Sectioned,
    Unused,
    backend_option,
    bundle_argument,
    json_option,
    options,
    refuse_unused,
    trust_engines_option,
)
from spaceport.tools.report.files import check_target
from spaceport.tools.terminal.screen import stages

_NAMES = tuple(name for name in MODES if name not in FORKING)
_MANY_PROMPTS = 40  # from here on one round is the default
_FEW_ROUNDS = 3
CHAT_PEERS = (
    Peer("transformers float32", "transformers", "Transformers", (), "generate, sdpa attention"),
    Peer(
        *("transformers bfloat16", "transformers", "Transformers", (), "generate, sdpa attention"),
        options={"dtype": "bfloat16"},
    ),
    Peer("llama.cpp", "llama.cpp", "LlamaCpp", (), "the file of --gguf, low-level API"),
    *(
        replace(peer, looks_up=peer.environment == "openvino-genai")
        for peer in peers_named("onnxruntime-genai,openvino-genai")
    ),
)


@dataclass(frozen=True)
class ChatOptions:
    """What is measured, and how the engine is opened."""

    max_tokens: int = 128  # per answer
    sample: int | None = None  # prompts of each kind; None: all
    modes: tuple[str, ...] | None = None  # None: all that the bundle supports
    fixed: tuple[int, ...] | None = None  # mask slots of chains in every step; None: those of the bundle
    rounds: int | None = None  # None: one from _MANY_PROMPTS prompts on, else _FEW_ROUNDS
    seed: int = 0  # of the intervals
    fork_kinds: tuple[str, ...] = ("lists",)  # kinds of prompts that are also answered in parallel threads
    fork_max_tokens: int = 256  # per thread, the prompt's tokens not counted
    backend: str = "auto"
    threads: int = 1
    max_seq_len: int | None = None
    trust_engines: bool = False

    def __post_init__(self) -> None:
        for name in ("max_tokens", "sample", "rounds", "fork_max_tokens", "threads"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise OptionFault(f"--{name.replace('_', '-')} is {value}: expected at least 1")
        if self.seed < 0:
            raise OptionFault(f"--seed is {self.seed}: expected at least 0")
        if unknown := [name for name in self.modes or () if name not in _NAMES]:
            remedy = "forked threads are measured on --fork-kinds" if unknown[0] in FORKING else "choose among them"
            raise OptionFault(f"--modes names {unknown[0]!r}: expected names among {', '.join(_NAMES)}: {remedy}")

    def rounds_for(self, prompts: int) -> int:
        """Measured rounds with this number of prompts."""
        return self.rounds or (1 if prompts >= _MANY_PROMPTS else _FEW_ROUNDS)

    def modes_of(self, manifest: Manifest) -> tuple[DecodeMode, ...]:
        """The modes that are measured on all prompts; plain decoding is always one of them."""
        slots = manifest.drafts.max_tokens
        names = self.modes or (_NAMES if slots else ("plain", "default"))
        fixed = ((slots,) if slots else ()) if self.fixed is None else self.fixed
        return modes_for(manifest, self.max_tokens, names, fixed)

    def forking_modes_of(self, manifest: Manifest) -> tuple[DecodeMode, ...]:
        """The modes that are measured on prompts of the forking kinds; none if the model does not fork."""
        if manifest.tokens.fork is None or not self.fork_kinds:
            return ()
        return modes_for(manifest, self.fork_max_tokens, ("plain", "default", *FORKING))


def benchmark_chat(
    bundle: Path, file: Path, options: ChatOptions, peer_options: PeerOptions, on_progress: OnProgress
) -> Report:
    """The speed of every mode and other runtime on the prompts of a file."""
    prompts = read_chat_prompts(file, options.sample)
    manifest = read_manifest(bundle)
    modes, forking = options.modes_of(manifest), options.forking_modes_of(manifest)
    forked = [prompt for prompt in prompts if prompt.kind in options.fork_kinds] if forking else []
    together = {mode.name: mode for mode in (*forking, *modes)}
    answers, forks, machine = ChatMeasurements(), ChatMeasurements(), this_machine()
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
        engine, encode, limit = f"{type(base.engine).__name__}, {base.engine.device}", base.tokens_of, base.max_seq_len
        length = check_chat_lengths(encode, prompts, options.max_tokens, limit, file)
        check_chat_lengths(encode, forked, options.fork_max_tokens, limit, file)

        ends, threads = base.bundle.manifest.tokens.end, options.threads
        with (
            mode_runtimes(list(together.values()), lambda: another_runtime(base)) as runtimes,
            running_peers(peer_options, machine, ends, length, options.max_tokens, threads, on_progress) as peers,
        ):
            others = OtherProcesses([worker.process for worker in peers.workers])
            subjects = [mode_subject(mode, runtimes[mode.name]) for mode in modes]
            jobs = _jobs(prompts, subjects, peers.subjects, peer_options.sample)
            answers.measure(jobs, encode, options.rounds_for(len(prompts)), on_progress)
            subjects = [mode_subject(mode, runtimes[mode.name]) for mode in forking]
            fork_jobs = [Job(prompt, subjects) for prompt in forked]
            forks.measure(fork_jobs, encode, options.rounds_for(len(forked)), on_progress)
            other_cores = others.cores()
    kinds = list(dict.fromkeys(prompt.kind for prompt in prompts))
    names, others_names, seed = [mode.name for mode in modes], [s.name for s in peers.subjects], options.seed
    compared = answers.outputs.compared + forks.outputs.compared
    return ChatResults(
        bundle.absolute().name,
        engine,
        machine,
        asdict(replace(options, rounds=options.rounds_for(len(prompts)))),
        _versions(),
        tuple(kinds),
        len(prompts),
        chat_figures(answers, [*names, *others_names], kinds, seed),
        tuple(prompt_figures(answers, [*names, *others_names])),
        tuple(peer_ratios(answers, [n for n in names if n in (PLAIN, DEFAULT)], others_names, kinds, seed)),
        tuple(peers.opened),
        tuple(peers.skipped),
        {**answers.failed, **forks.failed},
        tuple(fork_figures(forks, mode.name, seed) for mode in forking if forked),
        {mode: count for (mode, _), count in compared.items()},
        (*answers.outputs.differences, *forks.outputs.differences),
        other_cores,
    ).report()


def _jobs(
    prompts: Sequence[BenchPrompt], modes: Sequence[ChatSubject], peers: Sequence[ChatSubject], sample: int | None
) -> list[Job]:
    """A job for each prompt; the peers answer the first `sample` prompts of each kind, or all."""
    seen: Counter[str] = Counter()
    jobs = []
    for prompt in prompts:
        seen[prompt.kind] += 1
        with_peers = sample is None or seen[prompt.kind] <= sample
        jobs.append(Job(prompt, (*modes, *peers) if with_peers else modes))
    return jobs


def _versions() -> dict[str, str]:
    """The versions of Spaceport and of the packages that run its bundles here."""
    versions = {}
    for name in ("spaceport", "onnxruntime", "onnxruntime-gpu"):
        with suppress(PackageNotFoundError):
            versions[name] = version(name)
    return versions


def chosen_peers(names: str | None, checkpoint: Path | None, gguf: Path | None) -> tuple[Peer, ...]:
    """The peers with these names, or all whose model is given; raises if the model of a named one is not."""
    if checkpoint is not None and not (checkpoint / "config.json").is_file():
        raise InputFault(f"--checkpoint {checkpoint}: expected a Hugging Face checkpoint folder")
    if gguf is not None and not gguf.is_file():
        raise InputFault(f"--gguf {gguf}: expected a GGUF file")
    with_model = tuple(peer for peer in CHAT_PEERS if (gguf if peer.reads_gguf else checkpoint) is not None)
    peers = with_model if names is None else peers_named(names, CHAT_PEERS)
    if missing := [peer for peer in peers if peer not in with_model]:
        option = "--gguf FILE" if missing[0].reads_gguf else "--checkpoint FOLDER"
        raise OptionFault(f"--peers names {missing[0].name!r}: expected {option} with the model of the bundle: add it")
    return peers


class ChatBenchmark(Sectioned):
    """The command with its options in groups."""

    headings: ClassVar = {
        "max_tokens": "Workload",
        "fork_kinds": "Forked threads",
        "checkpoint": "Other runtimes",
        "backend": "Engine",
        "markdown": "Output",
    }


workload = options(
    click.option(
        "--max-tokens", default=ChatOptions.max_tokens, show_default=True, metavar="N", help="Tokens per answer."
    ),
    click.option("--sample", type=int, metavar="N", help="Use only the first N prompts of each kind."),
    click.option(
        "--modes", metavar="NAME,…", help=f"Modes among {', '.join(_NAMES)}; default: all that the bundle supports."
    ),
    click.option(
        "--fixed", metavar="K,K,…", help="Chains of K mask slots in every step, 0 = none; default: those of the bundle."
    ),
    click.option(
        "--rounds", type=int, metavar="N", help="Measured rounds after a warm-up; default: 3, or 1 from 40 prompts on."
    ),
    click.option("--seed", default=0, show_default=True, metavar="N", help="Seed of the intervals."),
)

forking = options(
    click.option(
        "--fork-kinds",
        default=",".join(ChatOptions.fork_kinds),
        show_default=True,
        metavar="KIND,…",
        help="Kinds that are also answered in forked threads, if the model forks.",
    ),
    click.option(
        "--fork-max-tokens",
        default=ChatOptions.fork_max_tokens,
        show_default=True,
        metavar="N",
        help="Tokens per thread of these answers.",
    ),
)

others = options(
    click.option("--checkpoint", type=PATH, metavar="FOLDER", help="The model of BUNDLE for all but llama.cpp."),
    click.option("--gguf", type=PATH, metavar="FILE", help="The model of BUNDLE for llama.cpp."),
    click.option("--peers", metavar="NAME,…", help="Runtimes or their formats; default: all whose model is given."),
    click.option("--peer-sample", type=int, metavar="N", help="They answer only the first N prompts of each kind."),
    click.option(
        "--work", type=PATH, metavar="FOLDER", help="Folder of their environments, as in spaceport bench compare."
    ),
    click.option("--setup", is_flag=True, help="Create missing environments first; downloads packages with pip."),
)

engine = options(
    backend_option,
    click.option("--threads", default=ChatOptions.threads, show_default=True, metavar="N", help="CPU threads."),
    click.option("--max-seq-len", type=int, metavar="N", help="Maximum context length in tokens."),
    trust_engines_option,
)


@click.command("chat", cls=ChatBenchmark)
@bundle_argument
@click.argument("prompts", type=PATH)
@workload
@forking
@others
@engine
@click.option("--markdown", type=PATH, metavar="FILE", help="Also write the tables to FILE.")
@json_option("the report")
@click.pass_context
def command(context: click.Context, /, bundle: Path, prompts: Path, **values: Any) -> int:
    """Measure what drafts gain on the chat prompts of the file PROMPTS, by kind of prompt.

    One JSON object per line, with "kind" and "messages"; user turns are answered in order. All modes and other runtimes
    answer a prompt in turns, greedy, one request at a time. Exit code 4 if a drafted answer differs from the plain one.
    """
    markdown, as_json = values.pop("markdown"), values.pop("as_json")
    peer_options = peer_options_of(context, values)
    chat_options = options_of(values)
    if markdown is not None:
        check_target(markdown)
    with stages() as on_progress:
        report = benchmark_chat(bundle, prompts, chat_options, peer_options, on_progress)
    report.show(as_json, markdown)
    return OK if report.identical else ACCURACY


def options_of(values: dict[str, Any]) -> ChatOptions:
    """The options of the benchmark from the command's parameters."""
    modes, fixed = values["modes"], values["fixed"]
    parsed = {
        "modes": None if modes is None else _names(modes),
        "fixed": () if fixed == "0" else None if fixed is None else parse_counts("--fixed", fixed),
        "fork_kinds": _names(values["fork_kinds"]),
    }
    return ChatOptions(**{**values, **parsed})


def peer_options_of(context: click.Context, values: dict[str, Any]) -> PeerOptions:
    """The other runtimes from the command's parameters, which are taken out of them."""
    names, checkpoint, gguf, work, sample, setup = (
        values.pop(name) for name in ("peers", "checkpoint", "gguf", "work", "peer_sample", "setup")
    )
    peers = chosen_peers(names, checkpoint, gguf)
    alone = ("work", "setup", "peer_sample")
    refuse_unused(
        context, [Unused(not peers, alone, "without other runtimes", "add --checkpoint FOLDER or --gguf FILE")]
    )
    if not peers:
        return PeerOptions()
    if work is None:
        raise OptionFault(
            "no --work: expected the folder with the environments of the other runtimes: add --work FOLDER"
        )
    if sample is not None and sample < 1:
        raise OptionFault(f"--peer-sample is {sample}: expected at least 1")
    return PeerOptions(peers, work, checkpoint, gguf, sample, setup)


def _names(text: str) -> tuple[str, ...]:
    """The names in `plain,default`."""
    return tuple(dict.fromkeys(name for part in text.split(",") if (name := part.strip())))
