"""Chat subjects: fake modes and runtimes that answer with given tokens and times."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from spaceport.runtime.decode.statistics import Statistics
from spaceport.runtime.text.piece import Path
from spaceport.tools.bench.chat.answers import Answer
from spaceport.tools.bench.chat.chat_prompts import ChatPrompt
from spaceport.tools.bench.chat.measuring import Measured, MeasuredAnswer
from spaceport.tools.bench.compare.worker_process import WorkerFailed
from spaceport.tools.verify.thread_tokens import ThreadTokens


def chat_prompt(line: int, kind: str = "code", turns: int = 1) -> ChatPrompt:
    return ChatPrompt(line, kind, tuple(({"role": "user", "content": f"{line}.{turn}"},) for turn in range(turns)))


def chat_answer(
    seconds: float,
    tokens: int = 11,
    first: float = 1.0,
    first_tokens: int = 1,
    *,
    complete: bool = True,
    statistics: Statistics | None = None,
    threads: int = 1,
) -> Answer:
    """An answer with these times; with statistics it is that of a mode."""
    found = {(index,) * bool(index): ThreadTokens((), (1,), 0) for index in range(threads)}
    return Answer(tokens, seconds, seconds / 2, first, first_tokens, complete, "text", found, statistics)


def chat_measured(*given: tuple[str, int, ChatPrompt, Answer]) -> Measured:
    """Measurements of a subject, a round, a prompt and an answer each; answers of a prompt are its turns."""
    found = Measured()
    turns: dict[tuple[str, int, int], int] = {}
    for subject, number, prompt, answer in given:
        key = (subject, number, prompt.line)
        turns[key] = turns.get(key, 0) + 1
        found.answers.append(MeasuredAnswer(subject, number, prompt, turns[key], answer))
    return found


@dataclass
class FakeSubject:
    """Answers a prompt with its sum and records the prompts; fails from call number `fails` on."""

    name: str
    reference: str | None = None
    max_tokens: int = 8
    change: int = 0  # added to every token
    fails: int | None = None
    log: list[tuple[str, tuple[int, ...]]] = field(default_factory=list)  # may be shared: name and prompt

    def answer(self, prompt: Sequence[int]) -> Answer:
        self.log.append((self.name, tuple(prompt)))
        if self.fails is not None and sum(name == self.name for name, _ in self.log) >= self.fails:
            raise WorkerFailed("no answer today")
        token = sum(prompt) + self.change
        threads: dict[Path, ThreadTokens] = {(): ThreadTokens((), (*prompt, token), len(prompt), ended=True)}
        return Answer(
            2, 0.5, 0.5, 0.25, 1, complete=True, text=f"answer {token}", threads=threads, statistics=Statistics()
        )
