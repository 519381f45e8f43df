"""Measuring of drafts: decoding modes on the same prompts, interleaved, each compared with its reference mode."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from time import perf_counter
from typing import Any, TypeVar

from spaceport.graphs.contract.faults import OptionFault
from spaceport.graphs.contract.manifest import Manifest
from spaceport.runtime.comparison import ThreadTokens, TokenDifference, thread_tokens_of, token_differences
from spaceport.runtime.decode.sequence_group import Statistics
from spaceport.runtime.decoding import Decoding
from spaceport.runtime.sampling.sampler import Sampling
from spaceport.runtime.session import Runtime
from spaceport.runtime.text.transcript import Path
from spaceport.verify.prompts import TokenizedPrompt

PLAIN, DEFAULT, FORKED = "plain", "default", "forked"
MODES = (PLAIN, "lookup", "masks", DEFAULT, FORKED, "forked+drafted")
FORKING = (FORKED, "forked+drafted")
WARM_UP = 0  # number of the round that is not recorded
Subject = TypeVar("Subject")


@dataclass(frozen=True)
class DecodeOptions:
    """What is measured, and how the engine is opened."""

    max_tokens: int = 128  # per completion
    limit: int | None = None  # number of prompts; None: all of the file
    temperatures: tuple[float, ...] = (0.0,)
    modes: tuple[str, ...] | None = None  # None: all that the bundle supports
    fixed: tuple[int, ...] = ()  # mask slots of fixed chains
    requests: int = 1  # concurrent requests
    rounds: int = 3  # recorded rounds, after the warm-up
    seed: int = 0
    backend: str = "auto"
    threads: int = 0
    max_seq_len: int | None = None
    trust_engines: bool = False

    def __post_init__(self) -> None:
        numbers = ("max_tokens", "limit", "requests", "rounds")
        for name in numbers:
            value = getattr(self, name)
            if value is not None and value < 1:
                raise OptionFault(f"--{name.replace('_', '-')} is {value}: expected at least 1")
        if self.seed < 0:
            raise OptionFault(f"--seed is {self.seed}: expected at least 0")


@dataclass(frozen=True)
class DecodeMode:
    """A named decoding mode."""

    name: str
    decoding: Decoding  # greedy
    reference: str  # name of the mode without drafts that generates the same tokens


def parse_modes(text: str) -> tuple[str, ...]:
    """The names in `plain,default`."""
    names = tuple(part.strip() for part in text.split(","))
    if unknown := [name for name in names if name not in MODES]:
        raise OptionFault(f"--modes names {unknown[0]!r}: expected comma-separated names among {', '.join(MODES)}")
    return names


def modes_for(
    manifest: Manifest, max_tokens: int, names: Sequence[str] | None = None, fixed: Sequence[int] = ()
) -> tuple[DecodeMode, ...]:
    """The modes with these names, or all that the bundle supports; their reference modes are always included.

    Each number in `fixed` adds a mode with chains of that many mask slots in every step.
    """
    slots, lacking = manifest.drafts.max_tokens, dict[str, str]()  # mode -> what the bundle needs for it
    if not slots:
        lacking["masks"] = "mask slots"
    if manifest.tokens.fork is None:
        lacking |= dict.fromkeys(FORKING, "a fork token")
    for name in names or ():
        if name in lacking:
            needs = f"expected a bundle with {lacking[name]}, this one has none"
            raise OptionFault(f"--modes names {name!r}: {needs}: leave it out")
    if names is None:  # without mask slots, "default" is prompt lookup
        names = [name for name in MODES if name not in lacking and (slots or name != "lookup")]
    for count in fixed:
        if not 1 <= count <= slots:
            has = f"this one has {slots}"
            raise OptionFault(f"--fixed names {count}: expected 1 to the number of mask slots of the bundle, {has}")
    wanted = {PLAIN, *names, *((FORKED,) if {*names} & {*FORKING} else ())}
    default = Decoding(max_tokens=max_tokens, fork=False)
    plain = default.without_drafts()
    decodings = {
        PLAIN: plain,
        "lookup": replace(plain, lookup=default.draft_config().lookup),
        "masks": replace(default, lookup=0),
        DEFAULT: default,
        FORKED: replace(plain, fork=True),
        "forked+drafted": replace(default, fork=True),
    }
    chains = {f"fixed {count}": replace(default, mask_slots=count, draft="chain") for count in fixed}
    chosen = {name: decodings[name] for name in MODES if name in wanted} | chains
    return tuple(DecodeMode(name, decoding, FORKED if decoding.fork else PLAIN) for name, decoding in chosen.items())


@dataclass(frozen=True)
class MeasuredCompletion:
    """The statistics and tokens of one completion."""

    mode: str
    temperature: float
    round: int
    prompt: int  # index of the prompt
    statistics: Statistics
    threads: Mapping[Path, ThreadTokens] = field(default_factory=dict)


@dataclass(frozen=True)
class OutputDifference:
    """An output that differs from that of the reference mode."""

    mode: str
    reference: str
    temperature: float
    round: int
    line: int  # line number in the prompt file
    first: TokenDifference

    def as_dict(self) -> dict[str, Any]:
        """The difference as JSON data."""
        first = self.first
        where = {"thread": first.path, "position": first.position, "token": first.token}
        own = {name: value for name, value in asdict(self).items() if name != "first"}
        return own | where | {"expected": first.expected, "found": first.found}

    def __str__(self) -> str:
        first = self.first
        thread = f", thread {'.'.join(map(str, first.path))}" if first.path else ""
        expected, found = (
            "the end" if token is None else f"token id {token}" for token in (first.expected, first.found)
        )
        when = f"round {self.round}" if self.round else "warm-up"
        return (
            f"line {self.line}, temperature {self.temperature:g}, {when}{thread}, token {first.token}: "
            f"{self.mode} has {found}, {self.reference} has {expected}"
        )


@dataclass
class DecodeMeasurements:
    """All measurements of a benchmark; counts and seconds by mode and temperature, those of a round also by its number."""

    completions: list[MeasuredCompletion] = field(default_factory=list)
    seconds: dict[tuple[str, float, int], float] = field(default_factory=lambda: defaultdict(float))
    compared: Counter[tuple[str, float]] = field(default_factory=Counter)  # outputs, warm-up included
    differences: list[OutputDifference] = field(default_factory=list)


def measure_modes(
    modes: Sequence[DecodeMode],
    runtime: Runtime,
    prompts: Sequence[TokenizedPrompt],
    options: DecodeOptions,
    on_progress: Callable[[str], None],
) -> DecodeMeasurements:
    """The measurements of every mode, temperature and prompt, in a warm-up round and in the recorded rounds.

    With one request at a time, all modes run on a prompt before the next prompt. With concurrent requests, a mode runs on
    all prompts, repeated until they fill the requests, before the next mode. The order of the modes rotates.
    """
    measured = DecodeMeasurements()
    indices = list(range(len(prompts)))
    several = options.requests > 1
    batches = [indices * -(-options.requests // len(prompts))] if several else [[index] for index in indices]
    for number in range(WARM_UP, options.rounds + 1):
        for temperature in options.temperatures:
            what = "warming up" if number == WARM_UP else f"round {number} of {options.rounds}"
            on_progress(f"{what}, temperature {temperature:g}")
            for rotation, batch in enumerate(batches, number):
                by_mode = {}
                for mode in rotated(modes, rotation):
                    started = perf_counter()
                    by_mode[mode.name] = _batch(runtime, mode, temperature, number, prompts, batch, options)
                    measured.seconds[mode.name, temperature, number] += perf_counter() - started
                _record(measured, modes, by_mode, prompts)
    return measured


def rotated(subjects: Sequence[Subject], rotation: int) -> Iterator[Subject]:
    """All subjects, beginning with another one for each rotation."""
    for index in range(len(subjects)):
        yield subjects[(index + rotation) % len(subjects)]


def _batch(
    runtime: Runtime,
    mode: DecodeMode,
    temperature: float,
    number: int,
    prompts: Sequence[TokenizedPrompt],
    batch: Sequence[int],
    options: DecodeOptions,
) -> list[MeasuredCompletion]:
    """The completions of a batch of prompts, requested by one client per concurrent request."""
    sampling = Sampling(temperature=temperature, seed=options.seed if temperature else None)
    decoding = replace(mode.decoding, sampling=sampling)
    child = runtime.bundle.manifest.tokens.child

    def generate(prompt: int) -> MeasuredCompletion:
        completion = runtime.generate(list(prompts[prompt].tokens), decoding)
        threads = thread_tokens_of(completion, child)
        return MeasuredCompletion(mode.name, temperature, number, prompt, completion.statistics, threads)

    if options.requests == 1:
        return [generate(prompt) for prompt in batch]
    with ThreadPoolExecutor(options.requests) as clients:
        return list(clients.map(generate, batch))


def _record(
    measured: DecodeMeasurements,
    modes: Sequence[DecodeMode],
    by_mode: Mapping[str, Sequence[MeasuredCompletion]],
    prompts: Sequence[TokenizedPrompt],
) -> None:
    """Record the completions of a batch, except in the warm-up, and compare them."""
    for mode in modes:
        for completion, expected in zip(by_mode[mode.name], by_mode[mode.reference], strict=True):
            if completion.round != WARM_UP:
                measured.completions.append(completion)
            if mode.name == mode.reference:
                continue
            temperature, line = completion.temperature, prompts[completion.prompt].line
            measured.compared[mode.name, temperature] += 1
            if differences := token_differences(completion.threads, expected.threads):
                first = next(iter(differences.values()))
                where = (mode.name, mode.reference, temperature, completion.round, line)
                measured.differences.append(OutputDifference(*where, first))
