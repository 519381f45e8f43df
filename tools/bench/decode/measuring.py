"""Measuring: the completions of all modes, interleaved, each compared with that of its reference mode."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from time import perf_counter

from spaceport.runtime.decode.statistics import Statistics
from spaceport.runtime.sampling.sampler import Sampling
from spaceport.runtime.session import Runtime
from spaceport.runtime.text.transcript import Path
from spaceport.tools.bench.decode.modes import DecodeMode
from spaceport.tools.bench.decode.options import DecodeOptions
from spaceport.tools.verify.audit.prompts import TokenizedPrompt
from spaceport.tools.verify.thread_tokens import ThreadTokens, first_difference, thread_tokens_of

WARM_UP = 0  # number of the round that is not recorded
_Key = tuple[str, float]  # mode, temperature


@dataclass(frozen=True)
class MeasuredCompletion:
    """The statistics of one completion."""

    mode: str
    temperature: float
    round: int
    prompt: int  # index of the prompt
    statistics: Statistics


@dataclass(frozen=True)
class Difference:
    """A completion that differs from that of the reference mode."""

    mode: str
    reference: str
    temperature: float
    round: int
    line: int  # line number in the prompt file
    thread: Path
    token: int  # number of the first differing token, counted from 1 after the prompt or [Child]
    expected: int | None  # token id of the reference; None: its thread ended before
    found: int | None  # token id of the mode; None: its thread ended before


@dataclass
class Measured:
    """All measurements of a benchmark."""

    completions: list[MeasuredCompletion] = field(default_factory=list)
    seconds: dict[tuple[str, float, int], float] = field(default_factory=dict)  # by mode, temperature and round
    compared: Counter[_Key] = field(default_factory=Counter)  # number of completions
    different: Counter[_Key] = field(default_factory=Counter)
    differences: list[Difference] = field(default_factory=list)


@dataclass(frozen=True)
class _Completion:
    """The statistics and tokens of one completion."""

    statistics: Statistics
    threads: Mapping[Path, ThreadTokens]


def measure(
    modes: Sequence[DecodeMode],
    runtimes: Mapping[str, Runtime],
    prompts: Sequence[TokenizedPrompt],
    options: DecodeOptions,
    on_progress: Callable[[str], None],
) -> Measured:
    """The measurements of every mode, temperature and prompt, in a warm-up round and in the recorded rounds.

    With one request at a time, all modes run on a prompt before the next prompt. With concurrent requests, a mode runs on
    all prompts before the next mode. The order of the modes rotates.
    """
    measured = Measured()
    jobs = _jobs(len(prompts), options.requests)
    for number in range(WARM_UP, options.rounds + 1):
        for temperature in options.temperatures:
            what = "warming up" if number == WARM_UP else f"round {number} of {options.rounds}"
            on_progress(f"{what}, temperature {temperature:g}")
            for rotation, batch in enumerate(jobs, number):
                completions = {}
                for mode in _rotated(modes, rotation):
                    started = perf_counter()
                    completions[mode.name] = _generate(runtimes[mode.name], mode, temperature, prompts, batch, options)
                    _add_seconds(measured, mode, temperature, number, perf_counter() - started)
                _add(measured, modes, completions, prompts, batch, temperature, number)
    return measured


def difference(found: Mapping[Path, ThreadTokens], expected: Mapping[Path, ThreadTokens]) -> tuple[Path, int] | None:
    """The first thread that differs and the position of its first differing token; None if all threads are equal.

    The lengths of threads that were cut because KV slots ran out are not compared.
    """
    for path in sorted(found.keys() | expected.keys()):
        one, other = found.get(path), expected.get(path)
        if one is None or other is None:
            parents = [threads.get(path[:-1]) for threads in (found, expected)]
            if any(parent is None or parent.cut for parent in parents):
                continue
            return path, (one or other).start  # type: ignore[union-attr]  # one of them exists
        position = first_difference(one, other)
        shorter = min(len(one.tokens), len(other.tokens))
        if position is not None and not ((one.cut or other.cut) and position >= shorter):
            return path, position
    return None


def _jobs(prompts: int, requests: int) -> list[list[int]]:
    """The prompts of each batch: one by one, or all of them, repeated until they fill all concurrent requests."""
    if requests == 1:
        return [[prompt] for prompt in range(prompts)]
    return [list(range(prompts)) * -(-requests // prompts)]


def _rotated(modes: Sequence[DecodeMode], rotation: int) -> Iterator[DecodeMode]:
    for index in range(len(modes)):
        yield modes[(index + rotation) % len(modes)]


def _generate(
    runtime: Runtime,
    mode: DecodeMode,
    temperature: float,
    prompts: Sequence[TokenizedPrompt],
    batch: Sequence[int],
    options: DecodeOptions,
) -> list[_Completion]:
    """The completions of a batch of prompts, requested by one client per concurrent request."""
    sampling = Sampling(temperature=temperature, seed=options.seed if temperature else None)
    decoding = replace(mode.decoding, sampling=sampling)
    child = runtime.bundle.manifest.tokens.child

    def generate(prompt: int) -> _Completion:
        completion = runtime.generate(list(prompts[prompt].tokens), decoding)
        return _Completion(completion.statistics, thread_tokens_of(completion, child))

    if options.requests == 1:
        return [generate(prompt) for prompt in batch]
    with ThreadPoolExecutor(options.requests) as clients:
        return list(clients.map(generate, batch))


def _add_seconds(measured: Measured, mode: DecodeMode, temperature: float, number: int, seconds: float) -> None:
    key = (mode.name, temperature, number)
    measured.seconds[key] = measured.seconds.get(key, 0.0) + seconds


def _add(
    measured: Measured,
    modes: Sequence[DecodeMode],
    completions: Mapping[str, Sequence[_Completion]],
    prompts: Sequence[TokenizedPrompt],
    batch: Sequence[int],
    temperature: float,
    number: int,
) -> None:
    """Record the completions of a batch, except in the warm-up, and compare them."""
    for mode in modes:
        for completion, expected, prompt in zip(
            completions[mode.name], completions[mode.reference], batch, strict=True
        ):
            if number != WARM_UP:
                statistics = completion.statistics
                measured.completions.append(MeasuredCompletion(mode.name, temperature, number, prompt, statistics))
            if mode.name == mode.reference:
                continue
            measured.compared[mode.name, temperature] += 1
            if (found := difference(completion.threads, expected.threads)) is not None:
                measured.different[mode.name, temperature] += 1
                threads = (expected.threads, completion.threads)
                line = prompts[prompt].line
                measured.differences.append(
                    difference_at((mode.name, mode.reference), temperature, number, line, found, threads)
                )


def difference_at(
    names: tuple[str, str],
    temperature: float,
    number: int,
    line: int,
    found: tuple[Path, int],
    threads: tuple[Mapping[Path, ThreadTokens], Mapping[Path, ThreadTokens]],
) -> Difference:
    """The difference between a mode and its reference at a thread and position; `threads` has the reference's first."""
    path, position = found
    both = [each.get(path) for each in threads]
    start = next(each.start for each in both if each is not None)
    expected, token = (
        each.tokens[position] if each is not None and position < len(each.tokens) else None for each in both
    )
    return Difference(*names, temperature, number, line, path, position - start + 1, expected, token)
