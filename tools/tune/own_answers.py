"""Own answers: a model's own answers to prompts, generated concurrently and stored so that a later run continues."""

from __future__ import annotations

import hashlib
import json
from collections import Counter, deque
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import asdict, dataclass, field
from pathlib import Path
from threading import Lock
from typing import Any, Literal, get_args

from spaceport.graphs.contract.faults import InputFault, OptionFault
from spaceport.graphs.contract.manifest import TEMPLATE_FILE
from spaceport.runtime.decoding import Decoding
from spaceport.runtime.sampling.sampler import Sampling
from spaceport.runtime.scheduling.request import Completion
from spaceport.runtime.scheduling.stream import Stream
from spaceport.runtime.session import Runtime
from spaceport.runtime.text.prompt import Prompt
from spaceport.tools.tune.conversations import TEXT, Conversation, Turn

# finished: ended with an end token; unfinished: reached the limit; long prompt: no token left for an answer
Outcome = Literal["finished", "unfinished", "empty", "long prompt"]

_DIGEST = "sha256"  # entry of a stored answer: the beginning of the digest of its other entries
_INCOMPLETE = "\ufffd"  # stands for the bytes of a character that the limit cut off


@dataclass(frozen=True)
class AnswerPrompt:
    """The given turns of a conversation in parts; the model answers each part and sees its own earlier answers."""

    line: int  # of the data file
    parts: tuple[tuple[Turn, ...], ...]
    others: dict[str, Any] = field(default_factory=dict)  # keys of the line that the output repeats, such as an id


@dataclass(frozen=True)
class OwnAnswer:
    """A model's answer to one part of the prompt on a line."""

    line: int
    outcome: Outcome
    text: str = ""
    tokens: int = 0  # generated
    part: int = 0  # index of the part that it answers


@dataclass
class Dialogue:
    """A prompt and the model's answers so far, one for each part."""

    prompt: AnswerPrompt
    answers: list[OwnAnswer] = field(default_factory=list)

    @property
    def complete(self) -> bool:
        """Whether no answer is missing; a conversation ends at the first answer that is not finished."""
        if self.answers and self.answers[-1].outcome != "finished":
            return True
        return len(self.answers) == len(self.prompt.parts)

    @property
    def turns(self) -> list[Turn]:
        """All turns before the next answer."""
        found: list[Turn] = []
        for part, answer in zip(self.prompt.parts, self.answers, strict=False):
            found += [*part, Turn("assistant", answer.text)]
        return [*found, *self.prompt.parts[len(self.answers)]]


@dataclass(frozen=True)
class AnswerLimits:
    """Limits of generated answers."""

    context: int  # tokens of prompt and answer together
    max_tokens: int | None = None  # tokens of one answer
    requests: int = 1  # answers that are generated at the same time
    temperature: float = 0.0  # 0: greedy answers

    def decoding(self, prompt_tokens: int, line: int, part: int) -> Decoding:
        """How an answer is generated; a sampled one has a seed of its own, the same in each run."""
        room = self.context - prompt_tokens
        limit = room if self.max_tokens is None else min(self.max_tokens, room)
        seed = line << 16 | part
        sampling = Sampling(temperature=self.temperature, seed=seed) if self.temperature else Sampling()
        return Decoding(max_tokens=limit, sampling=sampling)


class _Requests:
    """The running requests, which can be cancelled together."""

    def __init__(self) -> None:
        self._streams: set[Stream] = set()
        self._cancelled = False
        self._lock = Lock()

    def completion(self, runtime: Runtime, tokens: Sequence[int], decoding: Decoding) -> Completion:
        """The completion of a prompt; incomplete if the requests are cancelled."""
        with runtime.stream(tokens, decoding) as stream:
            with self._lock:
                self._streams.add(stream)
                if self._cancelled:
                    stream.close()
            try:
                return stream.completion()
            finally:
                with self._lock:
                    self._streams.discard(stream)

    def cancel(self) -> None:
        """End all requests after the current step."""
        with self._lock:
            self._cancelled = True
            for stream in self._streams:
                stream.close()


def open_dialogues(prompts: Sequence[AnswerPrompt], file: Path) -> list[Dialogue]:
    """The prompts with the answers that a file has already."""
    known = {(answer.line, answer.part): answer for answer in stored_answers(file)}
    dialogues = []
    for prompt in prompts:
        dialogue = Dialogue(prompt)
        while not dialogue.complete and (answer := known.get((prompt.line, len(dialogue.answers)))) is not None:
            dialogue.answers.append(answer)
        dialogues.append(dialogue)
    return dialogues


def generate_answers(
    dialogues: Sequence[Dialogue],
    runtime: Runtime,
    file: Path,
    limits: AnswerLimits,
    on_answer: Callable[[Dialogue], None] = lambda dialogue: None,
) -> None:
    """Complete the dialogues; each answer is appended to `file` as soon as it ends."""
    ready = deque(dialogue for dialogue in dialogues if not dialogue.complete)
    running: dict[Future[OwnAnswer], Dialogue] = {}
    requests = _Requests()
    with file.open("a", encoding="utf-8") as store, ThreadPoolExecutor(limits.requests) as pool:
        if file.stat().st_size and not file.read_bytes().endswith(b"\n"):
            store.write("\n")  # after the incomplete line of an interrupted run
        try:
            while ready or running:
                while ready and len(running) < limits.requests:
                    dialogue = ready.popleft()
                    running[pool.submit(_generate, requests, runtime, dialogue, limits)] = dialogue
                for future in wait(running, return_when=FIRST_COMPLETED).done:
                    dialogue = running.pop(future)
                    dialogue.answers.append(future.result())
                    store.write(_stored(dialogue.answers[-1]) + "\n")
                    store.flush()
                    if not dialogue.complete:
                        ready.appendleft(dialogue)
                    on_answer(dialogue)
        except BaseException:
            requests.cancel()
            raise


def stored_answers(file: Path) -> list[OwnAnswer]:
    """The answers in a file; lines that are incomplete, damaged or no answers are skipped."""
    lines = file.read_bytes().split(b"\n") if file.exists() else ()  # an answer may contain other line ends
    return [answer for line in lines if (answer := _answer_of(line)) is not None]


def _answer_of(line: bytes) -> OwnAnswer | None:
    """The answer on a line of a file; None if the line is none."""
    try:
        record = json.loads(line.decode("utf-8"))
    except (ValueError, RecursionError):  # an incomplete object or character
        return None
    if not isinstance(record, dict):
        return None
    if (digest := record.pop(_DIGEST, None)) is not None and digest != _digest_of(record):
        return None
    number, outcome = record.get("line", -1), record.get("outcome", "")
    text, tokens, part = record.get("text", ""), record.get("tokens", 0), record.get("part", 0)
    if outcome not in get_args(Outcome) or not _is_text(text) or not all(map(_is_count, (number, tokens, part))):
        return None
    if outcome in ("finished", "unfinished") and not text.strip():
        return None
    return OwnAnswer(number, outcome, text, tokens, part)


def _stored(answer: OwnAnswer) -> str:
    """The line of a file that stores an answer, with a digest of its entries."""
    record = asdict(answer)
    return json.dumps({**record, _DIGEST: _digest_of(record)}, ensure_ascii=False)


def _digest_of(record: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(record).encode()).hexdigest()[:16]


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and not any("\ud800" <= sign <= "\udfff" for sign in value)  # no half of a character


def _generate(requests: _Requests, runtime: Runtime, dialogue: Dialogue, limits: AnswerLimits) -> OwnAnswer:
    line, part = dialogue.prompt.line, len(dialogue.answers)
    try:
        tokens = runtime.tokens_of(rendered(runtime, dialogue.turns))
    except OptionFault as error:  # of the chat template
        raise InputFault(f"line {line}: {error}") from error
    if len(tokens) >= limits.context:
        return OwnAnswer(line, "long prompt", part=part)
    completion = requests.completion(runtime, tokens, limits.decoding(len(tokens), line, part))
    finished = completion.ending == "end"
    text = completion.text if finished else completion.text.rstrip(_INCOMPLETE)
    outcome: Outcome = "finished" if finished else "unfinished"
    return OwnAnswer(line, outcome if text.strip() else "empty", text, len(completion.tokens), part)


def rendered(runtime: Runtime, turns: Sequence[Turn]) -> Prompt:
    """The turns as a prompt: messages, or the last turn's text if the model has no chat template."""
    if TEMPLATE_FILE in runtime.bundle.manifest.files:
        return [{"role": turn.role, "content": turn.content} for turn in turns]
    return turns[-1].content


# Keys of the sample counts
WRITTEN, UNFINISHED = "answers generated by the model itself", "dropped: the model's own answer exceeds the cutoff"
EMPTY, LONG = "dropped: the model's own answer is empty", "dropped: the prompt is longer than the cutoff"
_COUNTED: dict[Outcome, str] = {"finished": WRITTEN, "unfinished": UNFINISHED, "empty": EMPTY, "long prompt": LONG}

BUNDLE_REQUESTS = 8  # answers that a bundle generates at the same time; the PyTorch model generates one


def distill(
    conversations: Sequence[Conversation],
    runtime: Runtime,
    file: Path,
    cutoff: int,
    counts: Counter[str],
    requests: int = 1,
    on_answer: Callable[[], None] = lambda: None,
) -> list[Conversation]:
    """The conversations with the model's own last answers; plain texts do not change.

    Answers are stored in `file` as they finish, and those it has already are not generated again.
    """
    prompts = [
        AnswerPrompt(conversation.line, (_before_answer(conversation),))
        for conversation in conversations
        if conversation.turns[0].role != TEXT
    ]
    dialogues = open_dialogues(prompts, file)
    generate_answers(dialogues, runtime, file, AnswerLimits(cutoff, requests=requests), lambda _: on_answer())
    answers = {dialogue.prompt.line: dialogue.answers[0] for dialogue in dialogues}
    answered: list[Conversation] = []
    for conversation in conversations:
        if conversation.turns[0].role == TEXT:
            answered.append(conversation)
            continue
        answer = answers[conversation.line]
        counts[_COUNTED[answer.outcome]] += 1
        if answer.outcome == "finished":
            turns = (*_before_answer(conversation), Turn("assistant", answer.text))
            answered.append(Conversation(conversation.line, turns, conversation.fork))
    return answered


def _before_answer(conversation: Conversation) -> tuple[Turn, ...]:
    """The turns before the last answer."""
    last = max(index for index, turn in enumerate(conversation.turns) if turn.role == "assistant")
    return conversation.turns[:last]
