"""Chat prompts: the prompts of a file by kind, and the messages before each answer."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path

from spaceport.graphs.contract.faults import InputFault, OptionFault
from spaceport.runtime.text.messages import Message
from spaceport.runtime.text.prompt import Prompt
from spaceport.tools.verify.audit.prompts import read_prompts

NO_KIND = "(none)"  # kind of a prompt whose line names none
Encode = Callable[[Prompt], list[int]]  # token ids of a prompt


@dataclass(frozen=True, eq=False)
class ChatPrompt:
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


def read_chat_prompts(path: Path, sample: int | None) -> list[ChatPrompt]:
    """The first `sample` prompts of each kind, or all; the kinds alternate."""
    by_kind: dict[str, list[ChatPrompt]] = defaultdict(list)
    for read in read_prompts(path):
        parts = (read.prompt,) if isinstance(read.prompt, str) else parts_of(read.prompt)
        kind = read.kind or NO_KIND
        by_kind[kind].append(ChatPrompt(read.line, kind, parts))
    kinds = [prompts[:sample] for prompts in by_kind.values()]
    return [prompt for row in zip_longest(*kinds) for prompt in row if prompt is not None]


def parts_of(messages: Sequence[Message]) -> tuple[tuple[Message, ...], ...]:
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


def check_lengths(encode: Encode, prompts: Sequence[ChatPrompt], max_tokens: int, limit: int, path: Path) -> int:
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
