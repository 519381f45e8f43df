"""Generating: the completions of an audit, one request at a time or in batches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from spaceport.runtime.comparison import ThreadTokens, thread_tokens_of
from spaceport.runtime.decode.sequence import NotANumber
from spaceport.runtime.scheduling.stream import Stream
from spaceport.runtime.session import Runtime
from spaceport.runtime.text.transcript import Path
from spaceport.tools.verify.audit.modes import AuditMode
from spaceport.tools.verify.audit.prompts import TokenizedPrompt

_QUEUED = 64  # requests that wait while others run, so that requests start and end at different steps


@dataclass(frozen=True)
class AuditJob:
    """A completion to generate."""

    mode: int  # index of the mode
    prompt: int  # index of the prompt


@dataclass(frozen=True)
class AuditCompletion:
    """The token sequences of a completion's threads."""

    threads: dict[Path, ThreadTokens]
    steps: int
    error: str = ""  # why there is no completion

    @property
    def tokens(self) -> int:
        """Generated tokens of all threads, end tokens included."""
        return sum(thread.generated for thread in self.threads.values())


def generate(
    runtime: Runtime,
    modes: Sequence[AuditMode],
    prompts: Sequence[TokenizedPrompt],
    jobs: Sequence[AuditJob],
    batched: bool,
) -> list[AuditCompletion]:
    """The completions of these jobs, one request at a time or, `batched`, as many as the engine takes.

    Batched steps are wider, and shorter plans are padded. No request is live when this returns.
    """
    count = runtime.engine.requests + _QUEUED if batched else 1
    child = runtime.bundle.manifest.tokens.child
    completions: list[AuditCompletion] = []
    for first in range(0, len(jobs), count):
        group = jobs[first : first + count]
        streams = [runtime.stream(prompts[job.prompt].tokens, modes[job.mode].decoding) for job in group]
        completions.extend(_completion(stream, child) for stream in streams)
    if any(completion.error for completion in completions):
        for request in range(runtime.engine.requests):
            runtime.engine.clear(request)
    return completions


def _completion(stream: Stream, child: int | None) -> AuditCompletion:
    try:
        completion = stream.completion()
    except NotANumber as error:
        return AuditCompletion({}, stream.statistics.steps, str(error))
    return AuditCompletion(thread_tokens_of(completion, child), completion.statistics.steps)
