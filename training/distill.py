"""Distill: prompts of a file answered by a bundle, as training data."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

from spaceport.graphs.contract.atomic_file import replace_text
from spaceport.graphs.contract.faults import InputFault, OptionFault
from spaceport.graphs.contract.manifest import TEMPLATE_FILE
from spaceport.runtime.bundle import read_manifest
from spaceport.runtime.decoding import Decoding
from spaceport.runtime.sampling.option_fields import check_options, option
from spaceport.runtime.sampling.sampler import Sampling
from spaceport.runtime.session import Runtime
from spaceport.runtime.text.prompt import Prompt
from spaceport.training.conversations import Turn, content_of, flag_of, object_of, read_each, text_of, turns_of
from spaceport.verify.audit import requests_for

TEXT_SUFFIX = ".txt"
DEFAULT_REQUESTS = 16  # answers that are generated at the same time

_EXPECTED = 'expected "messages" or "prompt"'
_REPLACED = ("messages", "prompt", "response", "ends")  # keys that the output sets or leaves out
_SECONDS = 10.0  # between two progress lines
_INCOMPLETE = "\ufffd"  # stands for the bytes of a character that the limit cut off
_PLACEHOLDER = Turn("assistant", "answer")  # for the chat template, before there are answers


@dataclass(frozen=True)
class AnswerPrompt:
    """The given turns of a conversation in parts; the model answers each part and sees its own earlier answers."""

    line: int  # of the prompt file
    parts: tuple[tuple[Turn, ...], ...]
    others: dict[str, Any] = field(default_factory=dict)  # keys of the line that the output repeats, such as an id


def read_prompts(path: Path) -> list[AnswerPrompt]:
    """All prompts of a file in file order: plain text if its name ends with .txt, JSON objects otherwise."""
    parse = _plain if path.suffix.lower() == TEXT_SUFFIX else _parsed
    return read_each(path, "a prompt file with one prompt per line", "prompt", parse)


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


@dataclass(frozen=True)
class DistillOptions:
    """How the answers are generated, and how the engine is opened."""

    max_tokens: int = option(512, "Maximum number of tokens of an answer.", 1)
    temperature: float = option(0.0, "Sampling temperature; 0 = greedy answers.", 0, 100)
    max_requests: int | None = option(
        None,
        "Answers that are generated at the same time.",
        unset=f"{DEFAULT_REQUESTS}, or the maximum of the bundle's engines",
    )
    max_seq_len: int | None = None  # tokens of a conversation; None: the bundle's default
    backend: str = "auto"
    threads: int = 0
    trust_engines: bool = False
    overwrite: bool = False

    def __post_init__(self) -> None:
        check_options(self)

    def open(self, bundle: Path, requests: int) -> Runtime:
        """A runtime for this many concurrent requests."""
        return Runtime.open(
            bundle,
            backend=self.backend,
            max_seq_len=self.max_seq_len,
            max_requests=requests,
            threads=self.threads,
            trust_engines=self.trust_engines,
        )

    def decoding(self, room: int, seed: int) -> Decoding:
        """How an answer with this many free tokens is generated; a sampled one has a seed of its own."""
        sampling = Sampling(temperature=self.temperature, seed=seed) if self.temperature else Sampling()
        return Decoding(max_tokens=min(self.max_tokens, room), sampling=sampling)


@dataclass(frozen=True)
class DistillReport:
    """What a run wrote."""

    file: str
    prompts: int
    conversations: int  # in the file; the other prompts have no answer, or are too long
    unfinished: int  # of these, those whose last answer reached a limit
    tokens: int  # generated in this run
    seconds: float  # of this run


def partial_file(out: Path) -> Path:
    """The file that stores the conversations until the output is complete."""
    return out.with_name(f"{out.name}.partial")


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


def _stored(partial: Path, source: Path, prompts: Sequence[AnswerPrompt], overwrite: bool) -> dict[int, dict[str, Any]]:
    """The conversations in the file of an interrupted run, by the lines of their prompts."""
    if not partial.exists():
        return {}
    whole, _, torn = partial.read_bytes().rpartition(b"\n")
    first = {prompt.line: prompt.parts[0] for prompt in prompts}
    records = {}
    try:
        for text in whole.splitlines():
            record = json.loads(text)
            line = record.pop("line")
            turns = tuple(Turn(turn["role"], turn["content"]) for turn in record["messages"])
            if turns[: len(first[line])] != first[line]:
                raise ValueError(f"line {line} of the prompts is another one")
            records[line] = record
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        if not overwrite:
            raise InputFault(
                f"{partial}: does not continue with {source} ({error}): repeat the command of that run to continue it, or "
                "begin anew with --overwrite"
            ) from error
        records, whole, torn = {}, b"", b"other prompts"
    if torn:
        partial.write_bytes(whole + b"\n" * bool(whole))
    return records


def _rendered(runtime: Runtime, turns: Sequence[Turn]) -> Prompt:
    """The turns as a prompt: messages, or the last turn's text if the model has no chat template."""
    if TEMPLATE_FILE in runtime.bundle.manifest.files:
        return [{"role": turn.role, "content": turn.content} for turn in turns]
    return turns[-1].content


def _check_turns(runtime: Runtime, source: Path, prompts: Sequence[AnswerPrompt]) -> None:
    """Raise for turns that the chat template refuses, or that need one; a prompt for each order of roles is rendered."""
    seen: set[tuple[str, ...]] = set()
    for prompt in prompts:
        turns = [turn for part in prompt.parts for turn in (*part, _PLACEHOLDER)][:-1]
        roles = tuple(turn.role for turn in turns)
        if len(turns) > 1 and TEMPLATE_FILE not in runtime.bundle.manifest.files:
            raise InputFault(
                f"{source} line {prompt.line}: has several turns, but {runtime.bundle.path} has no chat template: expected one "
                "user turn"
            )
        if roles not in seen:
            seen.add(roles)
            try:
                runtime.tokens_of(_rendered(runtime, turns))
            except OptionFault as error:
                raise InputFault(f"{source} line {prompt.line}: {error}") from error


def _answer(runtime: Runtime, prompt: AnswerPrompt, options: DistillOptions) -> tuple[dict[str, Any] | None, int]:
    """The conversation of a prompt as a line of training data, None without an answer, and the generated tokens.

    It ends at the first answer that is empty or reaches a limit.
    """
    turns: list[Turn] = []
    ends, generated = True, 0
    for number, part in enumerate(prompt.parts):
        tokens = runtime.tokens_of(_rendered(runtime, [*turns, *part]))
        if (room := runtime.max_seq_len - len(tokens)) < 1:
            break
        completion = runtime.generate(tokens, options.decoding(room, seed=prompt.line << 16 | number))
        generated += len(completion.tokens)
        finished = completion.ending == "end"
        text = completion.text if finished else completion.text.rstrip(_INCOMPLETE)
        if not text.strip():
            break
        turns += [*part, Turn("assistant", text)]
        ends = finished
        if not finished:
            break
    messages = [{"role": turn.role, "content": turn.content} for turn in turns]
    record = {"messages": messages, **prompt.others, **({} if ends else {"ends": False})}
    return record if turns else None, generated


def _store_answers(
    runtime: Runtime,
    prompts: Sequence[AnswerPrompt],
    store: TextIO,
    options: DistillOptions,
    requests: int,
    say: Callable[[str], None],
) -> tuple[dict[int, dict[str, Any]], int]:
    """The conversations by the lines of their prompts, stored as soon as each is complete, and the generated tokens."""
    started = shown = time.perf_counter()
    records, tokens = {}, 0
    pool = ThreadPoolExecutor(requests)
    try:
        lines = {pool.submit(_answer, runtime, prompt, options): prompt.line for prompt in prompts}
        for number, done in enumerate(as_completed(lines), 1):
            record, count = done.result()
            tokens += count
            if record is not None:
                records[lines[done]] = record
                store.write(json.dumps({"line": lines[done], **record}, ensure_ascii=False) + "\n")
                store.flush()
            if (now := time.perf_counter()) - shown > _SECONDS:
                shown = now
                say(f"{number}/{len(prompts)} prompts  {tokens:,} tokens  {tokens / (now - started):,.0f} tokens/s")
    finally:  # after an interrupt, the runtime ends the running requests when it closes
        pool.shutdown(wait=False, cancel_futures=True)
    return records, tokens


def distill(
    bundle: Path, source: Path, out: Path, options: DistillOptions, say: Callable[[str], None] = lambda text: None
) -> DistillReport:
    """Write a conversation for each prompt of a file, in its order.

    Until all prompts are answered, `OUT.partial` has the conversations so far, and a later run continues from it.
    """
    check_target(source, out, options.overwrite)
    prompts, manifest, partial = read_prompts(source), read_manifest(bundle), partial_file(out)
    records = _stored(partial, source, prompts, options.overwrite)
    missing = [prompt for prompt in prompts if prompt.line not in records]
    requests = options.max_requests
    requests = requests_for(manifest, DEFAULT_REQUESTS) if requests is None else requests
    say(f"opening the bundle; {len(records)}/{len(prompts)} prompts are answered")
    with options.open(bundle, requests) as runtime, partial.open("a", encoding="utf-8") as store:
        for note in runtime.notes:
            say(f"note: {note}")
        _check_turns(runtime, source, prompts)
        started, longest = time.perf_counter(), runtime.max_seq_len
        answers, tokens = _store_answers(runtime, missing, store, options, requests, say)
        seconds = time.perf_counter() - started
    records |= answers
    if not records:
        raise InputFault(
            f"{source}: no prompt has an answer: all answers are empty, or the prompts exceed {longest} tokens: "
            "expected shorter prompts, or a larger --max-seq-len"
        )
    lines = [json.dumps(records[line], ensure_ascii=False) + "\n" for line in sorted(records)]
    replace_text(out.resolve(), "".join(lines), durable=True)  # follows a symbolic link
    partial.unlink()
    unfinished = sum(not record.get("ends", True) for record in records.values())
    return DistillReport(str(out), len(prompts), len(records), unfinished, tokens, seconds)
