"""Worker: a process that runs one runtime and answers the calls of its parent, as JSON lines.

The Python interpreter of the runtime's environment runs `worker.py ADAPTER.py`, so this file imports the standard library
only. A call is `{"call": NAME, ...}` on stdin. The answer on stdout is `{"result": {...}}`, or `{"unsupported": REASON}` if
the runtime's API has no such call. An error ends the process with a traceback on stderr, and the parent starts a new one.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import json
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from time import perf_counter, process_time
from typing import Any, Protocol

CALLS = ("decode", "rows", "prefill", "requests", "answer")


class Runner(Protocol):
    """An open model of one runtime. Times are in seconds; NotImplementedError marks an unsupported call."""

    def decode(self, prompt: list[int], tokens: int) -> list[float]:
        """Time of each decode step after the first, for exactly `tokens` tokens without drafts."""
        ...

    def rows(self, prompt: list[int], rows: list[int], repeats: int) -> list[float]:
        """Times of `repeats` steps that feed these rows after the cached prompt and compute the logits of each."""
        ...

    def prefill(self, prompt: list[int]) -> float:
        """Time to the first token of a prompt."""
        ...

    def requests(self, prompts: list[list[int]], tokens: int) -> tuple[int, float]:
        """Number of tokens generated for all prompts concurrently, and the time."""
        ...


class AnsweringRunner(Runner, Protocol):
    """A runner that also answers prompts, with prompt lookup if asked to."""

    def answer(self, prompt: list[int], tokens: int, ends: list[int], lookup: int) -> dict[str, Any]:
        """The greedy answer of at most `tokens` tokens up to an end token, with `lookup` draft tokens per step.

        `tokens`: the answer, end token included; `first_tokens`: the number of tokens that the first step generated;
        `first_token_seconds` and `seconds`: time to the first and to the last token.
        """
        ...


class Adapter(Protocol):
    """The interface of each adapter module in this folder."""

    LIBRARIES: Sequence[str]  # modules to import before opening the model
    PACKAGES: Sequence[str]  # packages whose versions are reported

    def open_runner(self, settings: dict[str, Any]) -> Runner: ...


def adapter_at(path: str) -> Any:
    """The adapter module in a file."""
    spec = importlib.util.spec_from_file_location(Path(path).stem, path)
    if spec is None or spec.loader is None:
        raise SystemExit(f"{path}: expected a Python file")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def opened(adapter: Adapter, settings: dict[str, Any]) -> tuple[Runner, dict[str, Any]]:
    """The open model, with the times of imports and opening and the package versions."""
    started = perf_counter()
    for name in adapter.LIBRARIES:
        importlib.import_module(name)
    imported = perf_counter()
    runner = adapter.open_runner(settings)
    seconds = perf_counter() - imported
    versions = {name: importlib.metadata.version(name) for name in adapter.PACKAGES}
    return runner, {"import_seconds": imported - started, "open_seconds": seconds, "versions": versions}


def measured(runner: Runner, name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    """The result of one call, with its wall time and CPU time."""
    if name not in CALLS:
        raise SystemExit(f"call {name!r}: expected open or one of {', '.join(CALLS)}")
    call: Callable[..., Any] | None = getattr(runner, name, None)
    if call is None:
        raise NotImplementedError(f"the adapter has no call {name!r}")
    before, computed = perf_counter(), process_time()
    value = call(**arguments)
    return {"value": value, "seconds": perf_counter() - before, "cpu_seconds": process_time() - computed}


def serve_calls(adapter: Adapter, lines: Iterable[str], answer: Callable[[dict[str, Any]], None]) -> None:
    """Answer calls until the input ends."""
    runner: Runner | None = None
    for line in lines:
        request = json.loads(line)
        name = request.pop("call")
        try:
            if name == "open":
                runner, result = opened(adapter, request)
            elif runner is None:
                raise SystemExit(f"call {name!r} before open: expected open first")
            else:
                result = measured(runner, name, request)
        except NotImplementedError as reason:
            answer({"unsupported": str(reason)})
            continue
        answer({"result": result})


def main(path: str) -> None:
    """Serve the adapter in a file over stdin and stdout; output of libraries goes to stderr."""
    channel = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)

    def answer(data: dict[str, Any]) -> None:
        channel.write(json.dumps(data) + "\n")
        channel.flush()

    serve_calls(adapter_at(path), sys.stdin, answer)


if __name__ == "__main__":
    main(sys.argv[1])
