"""Distillation: the answers of a data file replaced by those that the model itself writes."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from spaceport.exporter.checkpoint import TokenFlags, open_checkpoint
from spaceport.graphs.contract.faults import InputFault
from spaceport.graphs.contract.manifest import TEMPLATE_FILE
from spaceport.runtime.decoding import Decoding
from spaceport.runtime.session import Runtime
from spaceport.runtime.text.prompt import Prompt
from spaceport.tools.reference import checkpoint_runtime
from spaceport.tools.tune.conversations import TEXT, Conversation, Turn

WRITTEN, UNFINISHED = (
    "answers written by the model itself",
    "dropped: the model's own answer has no end within the cutoff",
)
EMPTY, LONG = "dropped: the model's own answer is empty", "dropped: the prompt is longer than the cutoff"


@dataclass(frozen=True)
class Distillation:
    """That answers are to be the model's own, and what writes them."""

    bundle: Path | None  # nothing: the checkpoint's PyTorch model, which is slower


def distill(
    conversations: Sequence[Conversation],
    runtime: Runtime,
    file: Path,
    cutoff: int,
    counts: Counter[str],
    wrote: Callable[[int, int], None] = lambda done, all: None,
) -> list[Conversation]:
    """The conversations with the model's own last answers; plain texts stay as they are.

    Answers are stored in `file` as they come, and what is there already is not written again.
    """
    known = _known(file)
    found: list[Conversation] = []
    with file.open("a", encoding="utf-8") as kept:
        if file.stat().st_size and not file.read_bytes().endswith(b"\n"):
            kept.write("\n")  # behind the half answer of an interrupted run
        for done, conversation in enumerate(conversations):
            if conversation.turns[0].role == TEXT:
                found.append(conversation)
                continue
            answer = known.get(conversation.line)
            if answer is None:
                answer = _write(runtime, conversation, cutoff)
                kept.write(json.dumps({"line": conversation.line, **answer}, ensure_ascii=False) + "\n")
                kept.flush()
            counts[answer["outcome"]] += 1
            if answer["outcome"] == WRITTEN:
                turns = (*_asked(conversation), Turn("assistant", answer["text"]))
                found.append(Conversation(conversation.line, turns, conversation.fork, conversation.ends))
            wrote(done + 1, len(conversations))
    return found


@contextmanager
def writer(checkpoint: Path, distillation: Distillation, cutoff: int, remote_code: bool) -> Iterator[Runtime]:
    """A runtime over the model that is tuned."""
    opened = open_checkpoint(checkpoint, TokenFlags(), remote_code)
    if distillation.bundle is None:
        threads = torch.get_num_threads()
        with checkpoint_runtime(opened, cutoff) as runtime:
            yield runtime
        torch.set_num_threads(threads)  # for the training
        return
    with Runtime.open(distillation.bundle, max_seq_len=cutoff) as runtime:
        theirs = runtime.tokenizer.to_str()
        if json.loads(theirs) != json.loads(opened.tokenizer):
            raise InputFault(
                f"{distillation.bundle}: has another tokenizer than {checkpoint}: expected the bundle of this checkpoint"
            )
        yield runtime


def _write(runtime: Runtime, conversation: Conversation, cutoff: int) -> dict[str, Any]:
    prompt = runtime.tokens_of(_prompt(runtime, conversation))
    if len(prompt) >= cutoff:
        return {"outcome": LONG}
    completion = runtime.generate(prompt, Decoding(max_tokens=cutoff - len(prompt)))
    if completion.ending != "end":
        return {"outcome": UNFINISHED}
    return {"outcome": WRITTEN, "text": completion.text} if completion.text.strip() else {"outcome": EMPTY}


def _prompt(runtime: Runtime, conversation: Conversation) -> Prompt:
    asked = _asked(conversation)
    if TEMPLATE_FILE in runtime.bundle.manifest.files:
        return [{"role": turn.role, "content": turn.content} for turn in asked]
    return asked[0].content


def _asked(conversation: Conversation) -> tuple[Turn, ...]:
    """The turns before the last answer."""
    last = max(index for index, turn in enumerate(conversation.turns) if turn.role == "assistant")
    return conversation.turns[:last]


def _known(file: Path) -> dict[int, dict[str, Any]]:
    """The answers that an interrupted run left; its last line may be half a one."""
    found = {}
    for line in file.read_bytes().split(b"\n") if file.exists() else ():  # an answer may hold other line ends
        try:
            answer = json.loads(line)
        except ValueError:  # half of an object, or of a character
            continue
        found[int(answer["line"])] = answer
    return found
