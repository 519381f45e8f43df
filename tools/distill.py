"""Distill: prompts of a file answered by a bundle, and the training data that they become."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, get_args

from spaceport.graphs.contract.atomic_file import replace_text
from spaceport.graphs.contract.faults import InputFault, OptionFault
from spaceport.graphs.contract.manifest import TEMPLATE_FILE, Manifest, record_of
from spaceport.runtime.bundle import read_manifest
from spaceport.runtime.engine import seq_len
from spaceport.runtime.session import Runtime
from spaceport.tools.tune.conversations import Turn, content_of, flag_of, object_of, read_lines, text_of, turns_of
from spaceport.tools.tune.own_answers import (
    AnswerLimits,
    AnswerPrompt,
    Dialogue,
    Outcome,
    generate_answers,
    open_dialogues,
    rendered,
)

TEXT_SUFFIX = ".txt"

_EXPECTED = 'expected "messages" or "prompt"'
_REPLACED = ("messages", "prompt", "response", "ends")  # keys that the output sets or leaves out


def read_prompts(path: Path) -> list[AnswerPrompt]:
    """All prompts of a file in file order: plain text if its name ends with .txt, JSON objects otherwise."""
    plain = path.suffix.lower() == TEXT_SUFFIX
    prompts = []
    for line, content in read_lines(path, "a prompt file with one prompt per line", "prompt"):
        try:
            prompts.append(_plain(line, content) if plain else _parsed(line, content))
        except InputFault as error:
            raise InputFault(f"{path} line {line}: {error}") from error
    if not prompts:
        raise InputFault(f"{path}: has no prompt: expected at least one line")
    return prompts


def parts_of(turns: Sequence[Turn]) -> tuple[tuple[Turn, ...], ...]:
    """The turns in parts that each end where an answer is missing; an answer at the end is left out."""
    given = turns[:-1] if turns[-1].role == "assistant" else turns
    parts: list[tuple[Turn, ...]] = []
    part: list[Turn] = []
    for turn, following in zip(given, [*given[1:], None], strict=True):
        part.append(turn)
        if turn.role in ("user", "tool") and (following is None or following.role == "user"):
            parts.append(tuple(part))
            part = []
    if part:
        raise InputFault(f"the last turn is of the {part[-1].role}: expected a user turn last, which the model answers")
    return tuple(parts)


def _plain(line: int, content: bytes) -> AnswerPrompt:
    text = content_of(text_of(content).rstrip("\r\n"), "the prompt")
    return AnswerPrompt(line, ((Turn("user", text),),))


def _parsed(line: int, content: bytes) -> AnswerPrompt:
    data = object_of(content, f"plain text goes into a file whose name ends with {TEXT_SUFFIX}")
    for name in ("fork", "ends"):
        flag_of(data, name)
    forms = [name for name in ("messages", "prompt", "text") if name in data]
    if forms == ["messages"]:
        turns = turns_of(data["messages"])
    elif forms == ["prompt"]:
        turns = (Turn("user", content_of(data["prompt"], '"prompt"')),)
    else:
        found = " and ".join(f'"{name}"' for name in forms) or "neither"
        raise InputFault(f"holds {found}: {_EXPECTED}" + (", not both" if len(forms) > 1 else ""))
    others = {name: value for name, value in data.items() if name not in _REPLACED}
    return AnswerPrompt(line, parts_of(turns), others)


SCHEMA = 2

_LONGEST_HEADER = 2**16  # bytes
_BUSY = (errno.EAGAIN, errno.EACCES)


@dataclass(frozen=True)
class RunHeader:
    """What the answers of a run depend on: the first line of the file."""

    bundle: str  # SHA-256 of the bundle's manifest without its engines
    prompts: str  # SHA-256 of the prompt file
    max_tokens: int
    max_seq_len: int
    temperature: float
    schema: int = SCHEMA


def partial_file(out: Path) -> Path:
    """The file that stores the answers until the output is complete."""
    return out.with_name(f"{out.name}.partial")


@contextmanager
def opened_partial(out: Path, header: RunHeader, overwrite: bool) -> Iterator[Path]:
    """The partial file of an output, locked for this process; a new one, or that of an interrupted run with this header."""
    file = partial_file(out)
    if not file.exists() or (overwrite and _difference(file, header)):
        replace_text(file, json.dumps(asdict(header)) + "\n")
    with file.open("rb") as stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:  # other errors: a network file system that cannot lock
            if error.errno in _BUSY:
                raise InputFault(
                    f"{file}: another process writes it: wait for its end, or choose another output"
                ) from error
        if difference := _difference(file, header):
            raise InputFault(
                f"{file}: {difference}: repeat the command of that run to continue it, or begin anew with --overwrite"
            )
        yield file


def _difference(file: Path, header: RunHeader) -> str | None:
    """How the header of a file differs from this one; None if they are equal."""
    try:
        with file.open("rb") as stream:
            found = json.loads(stream.readline(_LONGEST_HEADER).decode("utf-8"))
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict) or "schema" not in found:
        return "has no header of `spaceport distill`"
    if found["schema"] != SCHEMA:
        return f"has schema {found['schema']!r}, expected {SCHEMA}: another version of spaceport began it"
    for name, expected in asdict(header).items():
        if (stored := found.get(name)) != expected:
            return f"was begun with {_described(name, stored)}, this command has {_described(name, expected)}"
    return None


def _described(name: str, value: object) -> str:
    if name in ("bundle", "prompts"):
        what = "the bundle" if name == "bundle" else "the prompts"
        return f"{what} {str(value)[:12]}…"
    return f"--{name.replace('_', '-')} {value}"


DEFAULT_REQUESTS = 16  # answers that are generated at the same time

_PLACEHOLDER = Turn("assistant", "answer")  # for the chat template, before there are answers


@dataclass(frozen=True)
class DistillOptions:
    """How the answers are generated, and how the engine is opened."""

    max_tokens: int = 512  # per answer
    temperature: float = 0.0  # 0: greedy answers
    max_requests: int | None = None  # answers that are generated at the same time; None: see `requests_for`
    max_seq_len: int | None = None  # tokens of a conversation; None: the bundle's default
    backend: str = "auto"
    threads: int = 0
    trust_engines: bool = False
    overwrite: bool = False

    def __post_init__(self) -> None:
        if self.max_tokens < 1:
            raise OptionFault(f"--max-tokens is {self.max_tokens}: expected at least 1")
        if not 0 <= self.temperature <= 100:
            raise OptionFault(f"--temperature is {self.temperature}: expected 0 to 100")


@dataclass(frozen=True)
class DistillProgress:
    """How far a run is."""

    done: int  # prompts
    total: int  # prompts
    stored: int  # prompts that were done when this run began
    tokens: int  # generated in this run
    seconds: float  # of this run

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds if self.seconds else 0.0

    @property
    def remaining_seconds(self) -> float | None:
        """The expected time to the end; None before the first prompt is done."""
        done = self.done - self.stored
        return self.seconds / done * (self.total - self.done) if done else None


@dataclass(frozen=True)
class DistillReport:
    """What a run wrote, and counts of the answers."""

    file: Path
    prompts: int
    lines: int  # conversations in the file
    answers: dict[Outcome, int]
    tokens: int  # of all answers, those of interrupted runs included
    progress: DistillProgress

    def as_dict(self) -> dict[str, Any]:
        """The report as JSON-compatible data."""
        progress = self.progress
        return {
            **asdict(self),
            "file": str(self.file),
            "progress": {**asdict(progress), "tokens_per_second": progress.tokens_per_second},
        }


@dataclass(frozen=True)
class Distillation:
    """A prompt file, the runtime that answers it, and the file of the answers so far."""

    source: Path
    out: Path
    prompts: Sequence[AnswerPrompt]
    runtime: Runtime
    partial: Path
    limits: AnswerLimits

    def run(self, on_progress: Callable[[DistillProgress], None] = lambda progress: None) -> DistillReport:
        """Generate the missing answers and write the output; an interrupted run can be repeated."""
        dialogues = open_dialogues(self.prompts, self.partial)
        stored = sum(dialogue.complete for dialogue in dialogues)
        done, tokens, started = stored, 0, time.perf_counter()

        def progress() -> DistillProgress:
            return DistillProgress(done, len(dialogues), stored, tokens, time.perf_counter() - started)

        def count(dialogue: Dialogue) -> None:
            nonlocal done, tokens
            done, tokens = done + dialogue.complete, tokens + dialogue.answers[-1].tokens
            on_progress(progress())

        on_progress(progress())
        with _located(self.source), _write_errors(self.out):
            generate_answers(dialogues, self.runtime, self.partial, self.limits, count)
            lines = self._write(dialogues)
        counts = Counter(answer.outcome for dialogue in dialogues for answer in dialogue.answers)
        total = sum(answer.tokens for dialogue in dialogues for answer in dialogue.answers)
        outcomes = {outcome: counts[outcome] for outcome in get_args(Outcome)}
        return DistillReport(self.out, len(dialogues), lines, outcomes, total, progress())

    def _write(self, dialogues: Sequence[Dialogue]) -> int:
        """Write the output and remove the partial file; returns the number of lines."""
        records = [record_for(dialogue) for dialogue in dialogues]
        lines = [json.dumps(record, ensure_ascii=False) + "\n" for record in records if record is not None]
        if not lines:
            raise InputFault(
                f"no prompt has an answer: all answers are empty, or the prompts exceed {self.runtime.max_seq_len} tokens: "
                "expected shorter prompts, or a larger --max-seq-len"
            )
        replace_text(self.out.resolve(), "".join(lines), durable=True)  # follows a symbolic link
        self.partial.unlink()
        return len(lines)


@contextmanager
def open_distillation(
    bundle: Path, source: Path, out: Path, options: DistillOptions, on_stage: Callable[[str], None] = lambda stage: None
) -> Iterator[Distillation]:
    """A distillation whose inputs and output are checked, with the bundle opened."""
    check_target(source, out, options.overwrite)
    on_stage("reading the prompts")
    prompts = read_prompts(source)
    manifest = read_manifest(bundle)
    length = seq_len(manifest, options.max_seq_len)
    requests = requests_for(manifest) if options.max_requests is None else options.max_requests
    limits = AnswerLimits(length, options.max_tokens, requests, options.temperature)
    if TEMPLATE_FILE not in manifest.files:
        _require_single_turns(bundle, source, prompts)
    header = RunHeader(_digest_of(manifest), _digest(source), options.max_tokens, length, options.temperature)
    with opened_partial(out, header, options.overwrite) as partial:
        on_stage("opening the bundle")
        with Runtime.open(
            bundle,
            backend=options.backend,
            max_seq_len=length,
            max_requests=limits.requests,
            threads=options.threads,
            trust_engines=options.trust_engines,
        ) as runtime:
            with _located(source):
                _check_template(runtime, prompts)
            yield Distillation(source, out, prompts, runtime, partial, limits)


def requests_for(manifest: Manifest) -> int:
    """The default number of concurrent requests, or fewer if the bundle's engines take fewer.

    With more requests than they take, the bundle would be opened on another engine.
    """
    return min(
        DEFAULT_REQUESTS, max((record.requests for record in manifest.engines.values()), default=DEFAULT_REQUESTS)
    )


def check_target(source: Path, out: Path, overwrite: bool) -> None:
    """Raise if the output cannot be written."""
    folder = out.absolute().parent
    if not folder.is_dir():
        raise InputFault(f"{out}: the folder {folder} does not exist: create it first")
    if out.resolve() == source.resolve():
        raise OptionFault(f"{out}: is the prompt file: choose another output")
    if out.exists() and not out.is_file():
        raise InputFault(f"{out}: is not a file: expected the name of a new file")
    if out.exists() and not overwrite:
        raise InputFault(f"{out}: exists: replace it with --overwrite, or choose another output")


def record_for(dialogue: Dialogue) -> dict[str, Any] | None:
    """The line of training data that a dialogue becomes; None if it has no answer."""
    turns: list[Turn] = []
    ends = True
    for part, answer in zip(dialogue.prompt.parts, dialogue.answers, strict=False):
        if answer.outcome not in ("finished", "unfinished"):
            break
        turns += [*part, Turn("assistant", answer.text)]
        ends = answer.outcome == "finished"
    if not turns:
        return None
    messages = [{"role": turn.role, "content": turn.content} for turn in turns]
    return {"messages": messages, **dialogue.prompt.others, **({} if ends else {"ends": False})}


def _require_single_turns(bundle: Path, source: Path, prompts: Sequence[AnswerPrompt]) -> None:
    for prompt in prompts:
        if [turn.role for part in prompt.parts for turn in part] != ["user"]:
            raise InputFault(
                f"{source} line {prompt.line}: has several turns, but {bundle} has no chat template: expected one user turn"
            )


def _check_template(runtime: Runtime, prompts: Sequence[AnswerPrompt]) -> None:
    """Raise for turns that the chat template refuses; one prompt for each order of roles is rendered."""
    seen: set[tuple[str, ...]] = set()
    for prompt in prompts:
        turns = [turn for part in prompt.parts for turn in (*part, _PLACEHOLDER)][:-1]
        roles = tuple(turn.role for turn in turns)
        if roles not in seen:
            seen.add(roles)
            try:
                runtime.tokens_of(rendered(runtime, turns))
            except OptionFault as error:
                raise InputFault(f"line {prompt.line}: {error}") from error


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return record_of(file).sha256


def _digest_of(manifest: Manifest) -> str:
    """SHA-256 of a manifest, which has the digests of the bundle's files; engines that are added later do not change it."""
    return hashlib.sha256(json.dumps({**manifest.as_dict(), "engines": {}}, sort_keys=True).encode()).hexdigest()


@contextmanager
def _located(source: Path) -> Iterator[None]:
    """Errors begin with the name of the prompt file."""
    try:
        yield
    except InputFault as error:
        raise InputFault(f"{source} {error}" if str(error).startswith("line ") else f"{source}: {error}") from error


@contextmanager
def _write_errors(out: Path) -> Iterator[None]:
    """Turn a failed write into an error that says how to continue."""
    try:
        yield
    except OSError as error:
        raise OptionFault(
            f"{out}: cannot be written ({error.strerror or error}): free disk space or make it writable, then repeat the "
            f"command; {partial_file(out)} has the answers so far"
        ) from error
