"""Measuring: the answers of all subjects to every prompt, in turns, each compared with that of its reference."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from time import perf_counter

from spaceport.tools.bench.chat.answers import Answer, Subject
from spaceport.tools.bench.chat.chat_prompts import ChatPrompt, Encode
from spaceport.tools.bench.compare.worker_process import WorkerFailed
from spaceport.tools.bench.decode.measuring import Difference, difference, difference_at
from spaceport.tools.bench.decode.modes import PLAIN

OnProgress = Callable[[str], None]
_REPORTS = 10  # progress lines of a round


@dataclass(frozen=True)
class Job:
    """A prompt and the subjects that answer it; one of them is plain decoding."""

    prompt: ChatPrompt
    subjects: Sequence[Subject]


@dataclass(frozen=True)
class MeasuredAnswer:
    """One answer of one subject."""

    subject: str
    round: int
    prompt: ChatPrompt
    turn: int  # number of the answer in its conversation, from 1
    answer: Answer


@dataclass(frozen=True)
class ChatDifference:
    """An answer that differs from that of the reference."""

    turn: int
    difference: Difference


@dataclass
class Measured:
    """All answers of a benchmark."""

    answers: list[MeasuredAnswer] = field(default_factory=list)
    compared: Counter[str] = field(default_factory=Counter)  # answers by subject
    different: Counter[str] = field(default_factory=Counter)
    differences: list[ChatDifference] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)  # subject -> reason


def measure(jobs: Sequence[Job], encode: Encode, rounds: int, on_progress: OnProgress) -> Measured:
    """The answers of every subject: all subjects answer a prompt before the next one, and their order rotates.

    A subject whose process fails is not measured further.
    """
    found = Measured()
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


def _warm_up(found: Measured, jobs: Sequence[Job], encode: Encode) -> dict[str, float]:
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


def _converse(found: Measured, job: Job, encode: Encode, number: int, index: int) -> None:
    """Record the answers of all subjects to one prompt; a conversation continues with those of plain decoding."""
    texts: list[str] = []
    for turn in range(1, len(job.prompt.parts) + 1):
        tokens = encode(job.prompt.prompt(texts))
        answers: dict[str, Answer] = {}
        for subject in _rotated(job.subjects, number + index):
            if (answer := _answer(found, subject, tokens)) is not None:
                answers[subject.name] = answer
                found.answers.append(MeasuredAnswer(subject.name, number, job.prompt, turn, answer))
        for subject in job.subjects:
            if subject.reference is not None:
                _compare(found, subject, answers, job.prompt.line, number, turn)
        texts.append(answers[PLAIN].text)


def _answer(found: Measured, subject: Subject, tokens: Sequence[int]) -> Answer | None:
    """A subject's answer; None if the subject fails or has failed."""
    if subject.name in found.failed:
        return None
    try:
        return subject.answer(tokens)
    except WorkerFailed as failure:
        found.failed[subject.name] = str(failure)
        return None


def _compare(
    found: Measured, subject: Subject, answers: Mapping[str, Answer], line: int, number: int, turn: int
) -> None:
    assert subject.reference is not None
    expected, own = answers[subject.reference].threads, answers[subject.name].threads
    found.compared[subject.name] += 1
    if (position := difference(own, expected)) is not None:
        found.different[subject.name] += 1
        where = difference_at((subject.name, subject.reference), 0.0, number, line, position, (expected, own))
        found.differences.append(ChatDifference(turn, where))


def _rotated(subjects: Sequence[Subject], rotation: int) -> Iterator[Subject]:
    for index in range(len(subjects)):
        yield subjects[(index + rotation) % len(subjects)]


def _minutes(seconds: float) -> str:
    return f"{seconds / 60:.0f} min" if seconds >= 90 else f"{seconds:.0f} s"
