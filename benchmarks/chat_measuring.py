"""Measuring of chats: the answers of decoding modes and other runtimes to every prompt, in turns."""

from __future__ import annotations

import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from pathlib import Path
from time import perf_counter, process_time
from typing import Protocol

from spaceport.graphs.contract.faults import InputFault, MissingDependency, OptionFault
from spaceport.graphs.contract.manifest import Manifest
from spaceport.runtime.comparison import ThreadTokens, thread_tokens_of, token_differences
from spaceport.runtime.decode.sequence_group import Statistics
from spaceport.runtime.session import Runtime
from spaceport.runtime.text.messages import Message
from spaceport.runtime.text.prompt import Prompt
from spaceport.runtime.text.transcript import Path as ThreadPath
from spaceport.tools.bench.decode_measuring import (
    FORKING,
    MODES,
    PLAIN,
    DecodeMode,
    OutputDifference,
    modes_for,
)
from spaceport.tools.bench.environments import (
    ADAPTERS,
    CommandFailed,
    ComparedRuntime,
    Environments,
    Peer,
    Skipped,
    create_environment,
    peers_named,
)
from spaceport.tools.bench.machine import Machine
from spaceport.tools.bench.workers import UnsupportedCall, WorkerFailed, WorkerProcess, open_model, start_worker
from spaceport.tools.verify.prompts import read_prompts

NO_KIND = "(none)"  # kind of a prompt whose line names none
Encode = Callable[[Prompt], list[int]]  # token ids of a prompt
_MANY_PROMPTS = 40  # from here on one round is the default
_FEW_ROUNDS = 3
LOOKUP = 10  # draft tokens of prompt lookup: the default of llama-cpp-python, and of transformers' examples
_PEER_TIMEOUT = 600.0  # seconds to wait for an answer
_IDLE_LIMIT = 10.0  # seconds to wait until a worker is idle
_BFLOAT16 = ("avx512_bf16", "amx_bf16")  # CPU extensions that multiply bfloat16
CHAT_PEERS = (
    Peer("transformers float32", "transformers", "on_transformers.py", (), "generate, sdpa attention"),
    Peer(
        "transformers bfloat16",
        "transformers",
        "on_transformers.py",
        (),
        "generate, sdpa attention",
        {"dtype": "bfloat16"},
    ),
    Peer("llama.cpp", "llama.cpp", "on_llama_cpp.py", (), "the file of --gguf, low-level API"),
)
OnProgress = Callable[[str], None]
_REPORTS = 10  # progress lines of a round


@dataclass(frozen=True, eq=False)
class BenchPrompt:
    """A prompt that is answered once, or a conversation that is answered several times."""

    line: int  # line number in the file, from 1
    kind: str
    parts: tuple[str | tuple[Message, ...], ...]  # what is new before each answer: one text, or messages

    def prompt(self, answers: Sequence[str]) -> Prompt:
        """The prompt of the next answer after these ones."""
        part = self.parts[len(answers)]
        if isinstance(part, str):
            return part
        before: list[Message] = []
        for earlier, answer in zip(self.parts, answers, strict=False):
            assert not isinstance(earlier, str)
            before += [*earlier, {"role": "assistant", "content": answer}]
        return [*before, *part]


def read_chat_prompts(path: Path, sample: int | None) -> list[BenchPrompt]:
    """The first `sample` prompts of each kind, or all; the kinds alternate."""
    by_kind: dict[str, list[BenchPrompt]] = defaultdict(list)
    for read in read_prompts(path):
        parts = (read.prompt,) if isinstance(read.prompt, str) else conversation_parts(read.prompt)
        kind = read.kind or NO_KIND
        by_kind[kind].append(BenchPrompt(read.line, kind, parts))
    kinds = [prompts[:sample] for prompts in by_kind.values()]
    return [prompt for row in zip_longest(*kinds) for prompt in row if prompt is not None]


def conversation_parts(messages: Sequence[Message]) -> tuple[tuple[Message, ...], ...]:
    """The messages before each answer: a user turn is answered if no assistant turn follows it."""
    parts: list[tuple[Message, ...]] = []
    part: list[Message] = []
    for index, message in enumerate(messages):
        part.append(message)
        following = messages[index + 1]["role"] if index + 1 < len(messages) else None
        if following is None or (message["role"] == "user" and following == "user"):
            parts.append(tuple(part))
            part = []
    return tuple(parts)


def check_chat_lengths(encode: Encode, prompts: Sequence[BenchPrompt], max_tokens: int, limit: int, path: Path) -> int:
    """The maximum context length that the prompts need; raises if one could exceed the limit."""
    longest = 0
    for prompt in prompts:
        try:
            length = len(encode(prompt.prompt([""] * (len(prompt.parts) - 1))))
        except OptionFault as error:
            raise InputFault(f"{path} line {prompt.line}: {error}") from error
        needed = length + max_tokens * len(prompt.parts)
        if needed > limit:
            answers = f"{len(prompt.parts)} answers of {max_tokens} tokens (--max-tokens)"
            raise InputFault(
                f"{path} line {prompt.line}: {length} prompt tokens and {answers} make {needed}, --max-seq-len is {limit}: "
                "shorten the prompt, lower --max-tokens, or raise --max-seq-len"
            )
        longest = max(longest, needed)
    return longest


_NAMES = tuple(name for name in MODES if name not in FORKING)


@dataclass(frozen=True)
class PeerOptions:
    """The other runtimes that are measured, and their model files."""

    peers: tuple[Peer, ...]
    work: Path  # folder of their environments
    checkpoint: Path | None  # for transformers
    gguf: Path | None  # for llama.cpp
    sample: int | None  # prompts of each kind; None: all
    setup: bool  # create missing environments first


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


@dataclass(frozen=True)
class TimedAnswer:
    """The tokens and times of one answer."""

    tokens: int  # generated by all threads, end tokens included
    seconds: float  # from the request to the last token
    cpu_seconds: float  # CPU time of the process meanwhile
    first_token_seconds: float
    first_tokens: int  # tokens that the first step generated; 1 if it is not known
    complete: bool  # every thread ended with an end token
    text: str = ""
    threads: Mapping[ThreadPath, ThreadTokens] = field(default_factory=dict)
    statistics: Statistics | None = None  # None: of another runtime


class ChatSubject(Protocol):
    """A decoding mode or another runtime."""

    @property
    def name(self) -> str: ...

    @property
    def reference(self) -> str | None:
        """The subject whose answers have the same tokens; None for a reference itself and for other runtimes."""

    @property
    def max_tokens(self) -> int: ...

    def answer(self, prompt: Sequence[int]) -> TimedAnswer:
        """The greedy answer to a prompt; raises WorkerFailed if the subject's process fails."""


@dataclass(frozen=True)
class ModeSubject:
    """A decoding mode of the bundle."""

    mode: DecodeMode
    runtime: Runtime

    @property
    def name(self) -> str:
        return self.mode.name

    @property
    def reference(self) -> str | None:
        return None if self.mode.reference == self.mode.name else self.mode.reference

    @property
    def max_tokens(self) -> int:
        assert self.mode.decoding.max_tokens is not None
        return self.mode.decoding.max_tokens

    def answer(self, prompt: Sequence[int]) -> TimedAnswer:
        computed = process_time()
        completion = self.runtime.generate(list(prompt), self.mode.decoding)
        computed = process_time() - computed
        threads = thread_tokens_of(completion, self.runtime.bundle.manifest.tokens.child)
        statistics = completion.statistics
        return TimedAnswer(
            tokens=sum(thread.generated for thread in threads.values()),
            seconds=statistics.seconds,
            cpu_seconds=computed,
            first_token_seconds=statistics.first_token_seconds,
            first_tokens=1,
            complete=all(thread.ended for thread in threads.values()),
            text=completion.text,
            threads=threads,
            statistics=statistics,
        )


@dataclass(frozen=True)
class PeerSubject:
    """Another runtime in its worker process, with or without its prompt lookup."""

    name: str
    worker: WorkerProcess
    lookup: int  # draft tokens per step; 0 = none
    ends: tuple[int, ...]  # ids of the end tokens
    max_tokens: int
    idle_limit: float = 10.0  # seconds to wait until the worker is idle
    reference: str | None = None

    def answer(self, prompt: Sequence[int]) -> TimedAnswer:
        call = {"prompt": list(prompt), "tokens": self.max_tokens, "ends": list(self.ends), "lookup": self.lookup}
        found = self.worker.call("answer", call)
        if isinstance(found, UnsupportedCall):
            raise WorkerFailed(found.reason)
        self.worker.wait_until_idle(self.idle_limit)
        value = found["value"]
        tokens = value["tokens"]
        return TimedAnswer(
            len(tokens),
            value["seconds"],
            found["cpu_seconds"],
            value["first_token_seconds"],
            value["first_tokens"],
            complete=bool(tokens) and tokens[-1] in self.ends,
        )


@dataclass(frozen=True)
class OpenedPeer:
    """A running peer, for the tables."""

    name: str
    model: str  # name of its file or folder
    settings: str
    versions: dict[str, str]


@dataclass
class Peers:
    """The running peers and those that cannot be measured."""

    subjects: list[PeerSubject] = field(default_factory=list)
    opened: list[OpenedPeer] = field(default_factory=list)
    skipped: list[Skipped] = field(default_factory=list)

    @property
    def workers(self) -> list[WorkerProcess]:
        """The processes; two subjects share one."""
        return list({id(subject.worker): subject.worker for subject in self.subjects}.values())


def chosen_peers(names: str | None, checkpoint: Path | None, gguf: Path | None) -> tuple[Peer, ...]:
    """The peers with these names, or all whose model is given; raises if the model of a named one is not."""
    for option, path, valid in (
        ("--checkpoint", checkpoint, checkpoint is None or (checkpoint / "config.json").is_file()),
        ("--gguf", gguf, gguf is None or gguf.is_file()),
    ):
        if not valid:
            expected = "a GGUF file" if option == "--gguf" else "a Hugging Face checkpoint folder"
            raise InputFault(f"{option} {path}: expected {expected}")
    if names is None:
        return tuple(peer for peer in CHAT_PEERS if _model_of(peer, checkpoint, gguf) is not None)
    peers = peers_named(names, CHAT_PEERS)
    if missing := [peer for peer in peers if _model_of(peer, checkpoint, gguf) is None]:
        option = "--gguf FILE" if missing[0].environment == "llama.cpp" else "--checkpoint FOLDER"
        raise OptionFault(f"--peers names {missing[0].name!r}: expected {option} with the model of the bundle: add it")
    return peers


@contextmanager
def running_peers(
    options: PeerOptions | None,
    machine: Machine,
    ends: Sequence[int],
    lengths: tuple[int, int],
    threads: int,
    on_progress: Callable[[str], None],
) -> Iterator[Peers]:
    """The peers with their models open; `lengths` are the maximum context length and the maximum tokens of an answer."""
    peers = Peers()
    try:
        for peer in options.peers if options is not None else ():
            assert options is not None
            if not sys.platform.startswith("linux"):
                raise MissingDependency(f"--peers reads CPU time from /proc: expected Linux, this is {sys.platform}")
            on_progress(f"opening {peer.name}")
            found = _peer_runtime(peer, options, machine)
            if isinstance(found, Skipped):
                peers.skipped.append(found)
            else:
                _open_peer(peers, found, Environments(options.work).logs, tuple(ends), lengths, threads)
        yield peers
    finally:
        for worker in peers.workers:
            worker.close()


def _model_of(peer: Peer, checkpoint: Path | None, gguf: Path | None) -> Path | None:
    return gguf if peer.environment == "llama.cpp" else checkpoint


def _peer_runtime(peer: Peer, options: PeerOptions, machine: Machine) -> ComparedRuntime | Skipped:
    """A peer that can be started, or the reason why it cannot."""
    if peer.options.get("dtype") == "bfloat16" and not set(_BFLOAT16) & set(machine.flags):
        return Skipped(peer.name, f"this CPU has none of {', '.join(_BFLOAT16)}: measure float32")
    work = Environments(options.work)
    if options.setup:
        try:
            create_environment(work, peer.environment, lambda _: None)
        except CommandFailed as failure:
            return Skipped(peer.name, f"setup failed: {failure}")
    python = work.python(peer.environment)
    if not work.installed(peer.environment):
        return Skipped(peer.name, f"no environment with the pinned versions at {python.parent.parent}: add --setup")
    model = _model_of(peer, options.checkpoint, options.gguf)
    assert model is not None
    quantization = f" {model.stem.rpartition('.')[2]}" if peer.environment == "llama.cpp" else ""
    return ComparedRuntime(
        peer.name + quantization, python, ADAPTERS / peer.adapter, model, peer.settings, peer.options
    )


def _open_peer(
    peers: Peers, subject: ComparedRuntime, logs: Path, ends: tuple[int, ...], lengths: tuple[int, int], threads: int
) -> None:
    """Start a peer's worker and open its model; a peer that fails is skipped."""
    length, max_tokens = lengths
    try:
        worker = start_worker(subject, threads, logs, _PEER_TIMEOUT)
        open_model(worker, length + LOOKUP, threads, _IDLE_LIMIT)
    except WorkerFailed as failure:
        peers.skipped.append(Skipped(subject.name, str(failure)))
        return
    versions = {name: version for name, version in worker.opened["versions"].items() if name != "numpy"}
    peers.opened.append(OpenedPeer(subject.name, subject.model.name, subject.settings, versions))
    plain = PeerSubject(subject.name, worker, 0, ends, max_tokens, _IDLE_LIMIT)
    peers.subjects += [plain, replace(plain, name=f"{subject.name} lookup", lookup=LOOKUP)]


@dataclass(frozen=True)
class Job:
    """A prompt and the subjects that answer it; one of them is plain decoding."""

    prompt: BenchPrompt
    subjects: Sequence[ChatSubject]


@dataclass(frozen=True)
class MeasuredAnswer:
    """One answer of one subject."""

    subject: str
    round: int
    prompt: BenchPrompt
    turn: int  # number of the answer in its conversation, from 1
    answer: TimedAnswer


@dataclass
class ChatMeasurements:
    """All answers of a benchmark."""

    answers: list[MeasuredAnswer] = field(default_factory=list)
    compared: Counter[str] = field(default_factory=Counter)  # answers by subject
    different: Counter[str] = field(default_factory=Counter)
    differences: list[OutputDifference] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)  # subject -> reason


def measure_chats(jobs: Sequence[Job], encode: Encode, rounds: int, on_progress: OnProgress) -> ChatMeasurements:
    """The answers of every subject: all subjects answer a prompt before the next one, and their order rotates.

    A subject whose process fails is not measured further.
    """
    found = ChatMeasurements()
    if not jobs:
        return found
    speeds = _warm_up(found, jobs, encode)
    seconds = rounds * sum(_seconds(job, speeds) for job in jobs)
    names = {subject.name for job in jobs for subject in job.subjects}
    on_progress(
        f"{len(jobs)} prompts, {len(names)} modes and runtimes, {rounds} rounds: at most {_minutes(seconds)} if every answer "
        "has the maximum length"
    )
    started, every = perf_counter(), max(1, -(-len(jobs) // _REPORTS))
    for number in range(1, rounds + 1):
        for index, job in enumerate(jobs):
            if index % every == 0 and (done := (number - 1) * len(jobs) + index):
                left = (perf_counter() - started) / done * (rounds * len(jobs) - done)
                on_progress(f"round {number} of {rounds}, prompt {index + 1} of {len(jobs)}: {_minutes(left)} left")
            _converse(found, job, encode, number, index)
    return found


def _warm_up(found: ChatMeasurements, jobs: Sequence[Job], encode: Encode) -> dict[str, float]:
    """Seconds per token of each subject, from an answer that is not recorded."""
    speeds: dict[str, float] = {}
    for job in jobs:
        for subject in job.subjects:
            if subject.name in speeds or subject.name in found.failed:
                continue
            if (answer := _answer(found, subject, encode(job.prompt.prompt([])))) is not None:
                speeds[subject.name] = answer.seconds / max(1, answer.tokens)
    return speeds


def _seconds(job: Job, speeds: Mapping[str, float]) -> float:
    """Seconds of all answers to a prompt if each has the maximum length."""
    subjects = ((subject.max_tokens, speeds.get(subject.name, 0.0)) for subject in job.subjects)
    return len(job.prompt.parts) * sum(tokens * seconds for tokens, seconds in subjects)


def _converse(found: ChatMeasurements, job: Job, encode: Encode, number: int, index: int) -> None:
    """Record the answers of all subjects to one prompt; a conversation continues with those of plain decoding."""
    texts: list[str] = []
    for turn in range(1, len(job.prompt.parts) + 1):
        tokens = encode(job.prompt.prompt(texts))
        answers: dict[str, TimedAnswer] = {}
        for subject in _rotated(job.subjects, number + index):
            if (answer := _answer(found, subject, tokens)) is not None:
                answers[subject.name] = answer
                found.answers.append(MeasuredAnswer(subject.name, number, job.prompt, turn, answer))
        for subject in job.subjects:
            if subject.reference is not None:
                _compare(found, subject, answers, job.prompt.line, number, turn)
        texts.append(answers[PLAIN].text)


def _answer(found: ChatMeasurements, subject: ChatSubject, tokens: Sequence[int]) -> TimedAnswer | None:
    """A subject's answer; None if the subject fails or has failed."""
    if subject.name in found.failed:
        return None
    try:
        return subject.answer(tokens)
    except WorkerFailed as failure:
        found.failed[subject.name] = str(failure)
        return None


def _compare(
    found: ChatMeasurements, subject: ChatSubject, answers: Mapping[str, TimedAnswer], line: int, number: int, turn: int
) -> None:
    assert subject.reference is not None
    expected, own = answers[subject.reference].threads, answers[subject.name].threads
    found.compared[subject.name] += 1
    if differences := token_differences(own, expected):
        found.different[subject.name] += 1
        first = next(iter(differences.values()))
        difference = OutputDifference(subject.name, subject.reference, 0.0, number, line, first, turn)
        found.differences.append(difference)


def _rotated(subjects: Sequence[ChatSubject], rotation: int) -> Iterator[ChatSubject]:
    for index in range(len(subjects)):
        yield subjects[(index + rotation) % len(subjects)]


def _minutes(seconds: float) -> str:
    return f"{seconds / 60:.0f} min" if seconds >= 90 else f"{seconds:.0f} s"
