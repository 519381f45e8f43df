"""What the helper processes run; each job has a limit of CPU time and memory."""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from spaceport.runtime.sampling.grammar import open_vocabulary
from spaceport.runtime.text.chat_template import ChatTemplate

_MEMORY = 4 << 30  # bytes of address space
_GRACE = 30.0  # seconds after which a job ends that nobody waits for


def main(cpu_seconds: float) -> None:
    """Read jobs from standard input and write their results, until the input ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with os.fdopen(os.dup(1), "wb") as out:
        os.dup2(2, 1)  # nothing that a library prints is an answer
        _, most = resource.getrlimit(resource.RLIMIT_AS)
        limit = _MEMORY if most == resource.RLIM_INFINITY else min(_MEMORY, most)
        resource.setrlimit(resource.RLIMIT_AS, (limit, most))
        out.write(b"ready\n")
        out.flush()
        for line in sys.stdin.buffer:
            signal.setitimer(signal.ITIMER_PROF, cpu_seconds)  # kills this process when it expires
            signal.setitimer(signal.ITIMER_REAL, _GRACE)
            answer = _answer(json.loads(line))
            signal.setitimer(signal.ITIMER_PROF, 0)
            signal.setitimer(signal.ITIMER_REAL, 0)
            out.write(answer + b"\n")
            out.flush()


def _answer(request: dict[str, Any]) -> bytes:
    try:
        return json.dumps({"result": _JOBS[request.pop("job")](**request)}).encode()
    except BaseException as error:  # noqa: BLE001  (a panic too is an answer)
        return json.dumps({"error": f"{error}" or type(error).__name__}).encode()


def _render(
    source: str,
    special_tokens: Mapping[str, str],
    messages: Sequence[Any],
    ask: bool,
    variables: Mapping[str, Any] | None = None,
) -> str:
    return ChatTemplate(source, special_tokens).render(messages, ask, variables=variables)


def _compile(grammar: str) -> None:
    """Compile a grammar for a vocabulary of single bytes: what takes long does not depend on the vocabulary."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: index for index, letter in enumerate([*letters, "<end>"])}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<end>"])
    matcher = open_vocabulary(tokenizer, len(letters) + 1, (len(letters),)).matcher(grammar)
    if not matcher.is_error():
        matcher.compute_bitmask()


_JOBS: dict[str, Callable[..., Any]] = {"render": _render, "compile": _compile}
