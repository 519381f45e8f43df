"""Measuring: the texts of all modes, interleaved, each compared with the text that has to be the same."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from time import perf_counter

from spaceport.runtime.decode.statistics import Statistics
from spaceport.runtime.sampling.sampler import Sampling
from spaceport.runtime.session import Runtime
from spaceport.runtime.text.piece import Path
from spaceport.tools.bench.decode.modes import DecodeMode
from spaceport.tools.bench.decode.options import DecodeOptions
from spaceport.tools.verify.audit.prompts import TokenizedPrompt
from spaceport.tools.verify.thread_tokens import ThreadTokens, first_difference, thread_tokens_of

WARM_UP = 0  # number of the round that is not measured
_Key = tuple[str, float]  # mode, temperature


@dataclass(frozen=True)
class MeasuredText:
    """What one text cost."""

    mode: str
    temperature: float
    round: int
    prompt: int  # index
    statistics: Statistics


@dataclass(frozen=True)
class Difference:
    """A text that is not the one that it has to be."""

    mode: str
    reference: str
    temperature: float
    round: int
    line: int  # of the file of prompts
    thread: Path
    token: int  # number of the first token that differs, from 1 behind the prompt or [Child]
    expected: int | None  # token of the reference; none: its text or thread ends before
    found: int | None


@dataclass
class Measured:
    """Everything that was measured."""

    texts: list[MeasuredText] = field(default_factory=list)
    seconds: dict[tuple[str, float, int], float] = field(default_factory=dict)  # by mode, temperature and round
    compared: Counter[_Key] = field(default_factory=Counter)  # texts
    different: Counter[_Key] = field(default_factory=Counter)
    differences: list[Difference] = field(default_factory=list)


@dataclass(frozen=True)
class _Written:
    """One text."""

    statistics: Statistics
    threads: Mapping[Path, ThreadTokens]


def measure(
    modes: Sequence[DecodeMode],
    runtimes: Mapping[str, Runtime],
    prompts: Sequence[TokenizedPrompt],
    options: DecodeOptions,
    stage: Callable[[str], None],
) -> Measured:
    """The texts of every mode, temperature and prompt, in a warm-up round and in those that count.

    One request at a time takes the prompts one by one, with all modes on a prompt before the next; several take all
    prompts in one mode, then in the next. The order of the modes rotates.
    """
    measured = Measured()
    jobs = _jobs(len(prompts), options.requests)
    for number in range(WARM_UP, options.rounds + 1):
        for temperature in options.temperatures:
            what = "warming up" if number == WARM_UP else f"round {number} of {options.rounds}"
            stage(f"{what}, temperature {temperature:g}")
            for turn, batch in enumerate(jobs, number):
                written = {}
                for mode in _rotated(modes, turn):
                    started = perf_counter()
                    written[mode.name] = _write(runtimes[mode.name], mode, temperature, prompts, batch, options)
                    _add_seconds(measured, mode, temperature, number, perf_counter() - started)
                _keep(measured, modes, written, prompts, batch, temperature, number)
    return measured


def difference(found: Mapping[Path, ThreadTokens], expected: Mapping[Path, ThreadTokens]) -> tuple[Path, int] | None:
    """The first thread that differs, and the index of its first token that does, prompt included; none: all are the same.

    Where all threads together had no room left, they end where they happened to be.
    """
    for path in sorted(found.keys() | expected.keys()):
        one, other = found.get(path), expected.get(path)
        if one is None or other is None:
            parents = [threads.get(path[:-1]) for threads in (found, expected)]
            if any(parent is None or parent.cut for parent in parents):
                continue
            return path, (one or other).start  # type: ignore[union-attr]  # one of them is there
        place = first_difference(one, other)
        shorter = min(len(one.tokens), len(other.tokens))
        if place is not None and not ((one.cut or other.cut) and place >= shorter):
            return path, place
    return None


def _jobs(prompts: int, requests: int) -> list[list[int]]:
    """The prompts that are asked together: one by one, or all of them, as often as it takes to occupy all requests."""
    if requests == 1:
        return [[prompt] for prompt in range(prompts)]
    return [list(range(prompts)) * -(-requests // prompts)]


def _rotated(modes: Sequence[DecodeMode], turn: int) -> Iterator[DecodeMode]:
    for index in range(len(modes)):
        yield modes[(index + turn) % len(modes)]


def _write(
    runtime: Runtime,
    mode: DecodeMode,
    temperature: float,
    prompts: Sequence[TokenizedPrompt],
    batch: Sequence[int],
    options: DecodeOptions,
) -> list[_Written]:
    """The texts of some prompts; as many clients as there are concurrent requests take them in turn."""
    sampling = Sampling(temperature=temperature, seed=options.seed if temperature else None)
    decoding = replace(mode.decoding, sampling=sampling)
    child = runtime.bundle.manifest.tokens.child

    def write(prompt: int) -> _Written:
        completion = runtime.generate(list(prompts[prompt].tokens), decoding)
        return _Written(completion.statistics, thread_tokens_of(completion, child))

    if options.requests == 1:
        return [write(prompt) for prompt in batch]
    with ThreadPoolExecutor(options.requests) as clients:
        return list(clients.map(write, batch))


def _add_seconds(measured: Measured, mode: DecodeMode, temperature: float, number: int, seconds: float) -> None:
    key = (mode.name, temperature, number)
    measured.seconds[key] = measured.seconds.get(key, 0.0) + seconds


def _keep(
    measured: Measured,
    modes: Sequence[DecodeMode],
    written: Mapping[str, Sequence[_Written]],
    prompts: Sequence[TokenizedPrompt],
    batch: Sequence[int],
    temperature: float,
    number: int,
) -> None:
    """Note what the texts cost unless they warmed up, and compare them."""
    for mode in modes:
        for text, expected, prompt in zip(written[mode.name], written[mode.reference], batch, strict=True):
            if number != WARM_UP:
                measured.texts.append(MeasuredText(mode.name, temperature, number, prompt, text.statistics))
            if mode.name == mode.reference:
                continue
            measured.compared[mode.name, temperature] += 1
            if (found := difference(text.threads, expected.threads)) is not None:
                measured.different[mode.name, temperature] += 1
                threads = (expected.threads, text.threads)
                told = _told(mode, temperature, number, prompts[prompt].line, found, threads)
                measured.differences.append(told)


def _told(
    mode: DecodeMode,
    temperature: float,
    number: int,
    line: int,
    found: tuple[Path, int],
    threads: tuple[Mapping[Path, ThreadTokens], Mapping[Path, ThreadTokens]],
) -> Difference:
    path, place = found
    lines = [each.get(path) for each in threads]
    start = next(each.start for each in lines if each is not None)
    expected, written = (
        each.tokens[place] if each is not None and place < len(each.tokens) else None for each in lines
    )
    return Difference(mode.name, mode.reference, temperature, number, line, path, place - start + 1, expected, written)
