"""Peers: other runtimes that answer the same prompts, each in its own environment and process."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from spaceport.graphs.contract.faults import InputFault, MissingDependency, OptionFault
from spaceport.tools.bench.chat.answers import PeerSubject
from spaceport.tools.bench.chat.options import PeerOptions
from spaceport.tools.bench.compare.machine import Machine
from spaceport.tools.bench.compare.setup import CommandFailed, create
from spaceport.tools.bench.compare.subjects import ADAPTERS, Peer, Skipped, Subject, chosen
from spaceport.tools.bench.compare.work_folder import Environments
from spaceport.tools.bench.compare.worker_pool import open_model
from spaceport.tools.bench.compare.worker_process import Worker, WorkerFailed, start

LOOKUP = 10  # draft tokens of prompt lookup: the default of llama-cpp-python, and of transformers' examples
_TIMEOUT = 600.0  # seconds to wait for an answer
_IDLE_LIMIT = 10.0  # seconds to wait until a worker is idle
_BFLOAT16 = ("avx512_bf16", "amx_bf16")  # CPU extensions that multiply bfloat16

PEERS = (
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
    def workers(self) -> list[Worker]:
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
        return tuple(peer for peer in PEERS if _model(peer, checkpoint, gguf) is not None)
    peers = chosen(names, PEERS)
    if missing := [peer for peer in peers if _model(peer, checkpoint, gguf) is None]:
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
            found = _subject(peer, options, machine)
            if isinstance(found, Skipped):
                peers.skipped.append(found)
            else:
                _open(peers, found, Environments(options.work).logs, tuple(ends), lengths, threads)
        yield peers
    finally:
        for worker in peers.workers:
            worker.close()


def _model(peer: Peer, checkpoint: Path | None, gguf: Path | None) -> Path | None:
    return gguf if peer.environment == "llama.cpp" else checkpoint


def _subject(peer: Peer, options: PeerOptions, machine: Machine) -> Subject | Skipped:
    """A peer that can be started, or the reason why it cannot."""
    if peer.options.get("dtype") == "bfloat16" and not set(_BFLOAT16) & set(machine.flags):
        return Skipped(peer.name, f"this CPU has none of {', '.join(_BFLOAT16)}: measure float32")
    work = Environments(options.work)
    if options.setup:
        try:
            create(work, peer.environment, lambda _: None)
        except CommandFailed as failure:
            return Skipped(peer.name, f"setup failed: {failure}")
    python = work.python(peer.environment)
    if not work.installed(peer.environment):
        return Skipped(peer.name, f"no environment with the versions of pins.py at {python.parent.parent}: add --setup")
    model = _model(peer, options.checkpoint, options.gguf)
    assert model is not None
    quantization = f" {model.stem.rpartition('.')[2]}" if peer.environment == "llama.cpp" else ""
    return Subject(peer.name + quantization, python, ADAPTERS / peer.adapter, model, peer.settings, peer.options)


def _open(
    peers: Peers, subject: Subject, logs: Path, ends: tuple[int, ...], lengths: tuple[int, int], threads: int
) -> None:
    """Start a peer's worker and open its model; a peer that fails is skipped."""
    length, max_tokens = lengths
    try:
        worker = start(subject, threads, logs, _TIMEOUT)
        open_model(worker, length + LOOKUP, threads, _IDLE_LIMIT)
    except WorkerFailed as failure:
        peers.skipped.append(Skipped(subject.name, str(failure)))
        return
    versions = {name: version for name, version in worker.opened["versions"].items() if name != "numpy"}
    peers.opened.append(OpenedPeer(subject.name, subject.model.name, subject.settings, versions))
    plain = PeerSubject(subject.name, worker, 0, ends, max_tokens, _IDLE_LIMIT)
    peers.subjects += [plain, replace(plain, name=f"{subject.name} lookup", lookup=LOOKUP)]
