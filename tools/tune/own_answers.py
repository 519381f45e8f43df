"""Own answers: a model's greedy answers to prompts, generated concurrently and stored so that a later run continues."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal, get_args

from spaceport.graphs.contract.manifest import TEMPLATE_FILE
from spaceport.runtime.decoding import Decoding
from spaceport.runtime.session import Runtime
from spaceport.runtime.text.prompt import Prompt
from spaceport.tools.tune.conversations import Turn

# finished: ended with an end token; unfinished: reached the limit; long prompt: no token left for an answer
Outcome = Literal["finished", "unfinished", "empty", "long prompt"]


@dataclass(frozen=True)
class AnswerPrompt:
    """The turns before an answer, and the line of the data file that they are from."""

    line: int
    turns: tuple[Turn, ...]


@dataclass(frozen=True)
class OwnAnswer:
    """A model's answer to the prompt on one line."""

    line: int
    outcome: Outcome
    text: str = ""
    tokens: int = 0  # generated


OnAnswer = Callable[[OwnAnswer], None]


def generate_answers(
    prompts: Sequence[AnswerPrompt],
    runtime: Runtime,
    file: Path,
    cutoff: int,
    max_tokens: int | None = None,
    requests: int = 1,
    on_answer: OnAnswer = lambda answer: None,
) -> dict[int, OwnAnswer]:
    """The answers by line. Answers are appended to `file` as they finish; those it has already are not generated again.

    `cutoff` limits prompt and answer together, `max_tokens` the answer; `requests` are generated at the same time.
    """
    known = stored_answers(file)
    missing = [prompt for prompt in prompts if prompt.line not in known]
    with file.open("a", encoding="utf-8") as store, ThreadPoolExecutor(requests) as pool:
        if file.stat().st_size and not file.read_bytes().endswith(b"\n"):
            store.write("\n")  # after the incomplete line of an interrupted run
        futures: list[Future[OwnAnswer]] = [
            pool.submit(_generate, runtime, prompt, cutoff, max_tokens) for prompt in missing
        ]
        try:
            for future in as_completed(futures):
                answer = future.result()
                known[answer.line] = answer
                store.write(json.dumps(asdict(answer), ensure_ascii=False) + "\n")
                store.flush()
                on_answer(answer)
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return {prompt.line: known[prompt.line] for prompt in prompts}


def stored_answers(file: Path) -> dict[int, OwnAnswer]:
    """The answers in a file; an incomplete last line and answers of earlier versions are skipped."""
    found = {}
    for line in file.read_bytes().split(b"\n") if file.exists() else ():  # an answer may contain other line ends
        try:
            record = json.loads(line)
        except ValueError:  # an incomplete object or character
            continue
        if isinstance(record, Mapping) and record.get("outcome") in get_args(Outcome):
            found[int(record["line"])] = OwnAnswer(**record)
    return found


def _generate(runtime: Runtime, prompt: AnswerPrompt, cutoff: int, max_tokens: int | None) -> OwnAnswer:
    tokens = runtime.tokens_of(_rendered(runtime, prompt.turns))
    remaining = cutoff - len(tokens)
    if remaining <= 0:
        return OwnAnswer(prompt.line, "long prompt")
    limit = remaining if max_tokens is None else min(max_tokens, remaining)
    completion = runtime.generate(tokens, Decoding(max_tokens=limit))
    count = len(completion.tokens)
    if completion.ending != "end":
        return OwnAnswer(prompt.line, "unfinished", completion.text, count)
    return OwnAnswer(prompt.line, "finished" if completion.text.strip() else "empty", completion.text, count)


def _rendered(runtime: Runtime, turns: Sequence[Turn]) -> Prompt:
    if TEMPLATE_FILE in runtime.bundle.manifest.files:
        return [{"role": turn.role, "content": turn.content} for turn in turns]
    return turns[-1].content
