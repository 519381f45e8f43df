"""Writing: the texts of an audit, each alone or many together, as a runtime writes them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from spaceport.runtime.decode.selector import NotANumber
from spaceport.runtime.scheduling.stream import Stream
from spaceport.runtime.session import Runtime
from spaceport.runtime.text.piece import Path
from spaceport.tools.verify.audit.kinds import DraftKind
from spaceport.tools.verify.audit.prompts import TokenizedPrompt
from spaceport.tools.verify.thread_tokens import ThreadTokens, thread_tokens_of

_WAITING = 64  # texts that wait for a place of the engine: so they begin and end beside each other, at odd times


@dataclass(frozen=True)
class TextJob:
    """A text to be written: the kind and the prompt by their numbers."""

    kind: int
    prompt: int


@dataclass(frozen=True)
class AuditText:
    """A text that was written, thread by thread."""

    lines: dict[Path, ThreadTokens]
    steps: int
    fault: str = ""  # why there is none

    @property
    def tokens(self) -> int:
        """Of all threads, end tokens included."""
        return sum(line.written for line in self.lines.values())


def write(
    runtime: Runtime,
    kinds: Sequence[DraftKind],
    questions: Sequence[TokenizedPrompt],
    jobs: Sequence[TextJob],
    together: bool,
) -> list[AuditText]:
    """The texts of these jobs, one after the other or as many at a time as the engine has room for.

    Together their steps are wider, and rows fill up where texts differ. Nothing is under way when this returns.
    """
    count = runtime.engine.requests + _WAITING if together else 1
    child = runtime.bundle.manifest.tokens.child
    found: list[AuditText] = []
    for first in range(0, len(jobs), count):
        group = jobs[first : first + count]
        streams = [runtime.stream(questions[job.prompt].tokens, kinds[job.kind].decoding) for job in group]
        found.extend(_text(stream, child) for stream in streams)
    if any(text.fault for text in found):
        for request in range(runtime.engine.requests):
            runtime.engine.clear(request)
    return found


def _text(stream: Stream, child: int | None) -> AuditText:
    try:
        completion = stream.completion()
    except NotANumber as error:
        return AuditText({}, stream.statistics.steps, str(error))
    return AuditText(thread_tokens_of(completion, child), completion.statistics.steps)
