"""Worker: one runtime in a process of its own, which measures what its parent asks for in JSON lines.

The interpreter of the runtime's environment runs it as `python worker.py ADAPTER.py`: it imports the standard library only.
A request is `{"ask": NAME, ...}` on stdin. An answer on stdout is `{"result": {...}}`, or `{"absent": REASON}` where the
runtime's API has no such call. An error ends the process with a traceback on stderr: the parent starts another one.
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


class Runner(Protocol):
    """An open model of one runtime. Times are in seconds; NotImplementedError says why something cannot be measured."""

    def decode(self, prompt: list[int], tokens: int) -> list[float]:
        """Time of each decode step behind the first, without drafts, of exactly `tokens` tokens."""
        ...

    def rows(self, prompt: list[int], rows: list[int], repeats: int) -> list[float]:
        """Time of a step that feeds these tokens behind the cached prompt and computes the logits of each."""
        ...

    def prefill(self, prompt: list[int]) -> float:
        """Time until the first token behind a prompt is known."""
        ...

    def requests(self, prompts: list[list[int]], tokens: int) -> tuple[int, float]:
        """Number of tokens generated for all prompts at once, and the time it took."""
        ...


class Adapter(Protocol):
    """What each script of this folder defines."""

    LIBRARIES: Sequence[str]  # modules to import before the model is opened
    PACKAGES: Sequence[str]  # packages whose versions are reported

    def open_runner(self, settings: dict[str, Any]) -> Runner: ...


def adapter_at(path: str) -> Any:
    """The adapter in a file."""
    spec = importlib.util.spec_from_file_location(Path(path).stem, path)
    if spec is None or spec.loader is None:
        raise SystemExit(f"{path}: expected a Python file")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def opened(adapter: Adapter, settings: dict[str, Any]) -> tuple[Runner, dict[str, Any]]:
    """The open model, with the time that imports and opening took and the versions of its packages."""
    started = perf_counter()
    for name in adapter.LIBRARIES:
        importlib.import_module(name)
    imported = perf_counter()
    runner = adapter.open_runner(settings)
    seconds = perf_counter() - imported
    versions = {name: importlib.metadata.version(name) for name in adapter.PACKAGES}
    return runner, {"import_seconds": imported - started, "open_seconds": seconds, "versions": versions}


def measured(runner: Runner, name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    """One measurement, with the time and the CPU time of the whole call."""
    calls: dict[str, Callable[..., Any]] = {
        "decode": runner.decode,
        "rows": runner.rows,
        "prefill": runner.prefill,
        "requests": runner.requests,
    }
    if name not in calls:
        raise SystemExit(f"asked for {name!r}: expected open or one of {', '.join(calls)}")
    before, computed = perf_counter(), process_time()
    value = calls[name](**arguments)
    return {"value": value, "seconds": perf_counter() - before, "cpu_seconds": process_time() - computed}


def serve(adapter: Adapter, lines: Iterable[str], answer: Callable[[dict[str, Any]], None]) -> None:
    """Answer each request until there are no more."""
    runner: Runner | None = None
    for line in lines:
        request = json.loads(line)
        name = request.pop("ask")
        try:
            if name == "open":
                runner, result = opened(adapter, request)
            elif runner is None:
                raise SystemExit(f"asked for {name!r} before open")
            else:
                result = measured(runner, name, request)
        except NotImplementedError as reason:
            answer({"absent": str(reason)})
            continue
        answer({"result": result})


def main(path: str) -> None:
    """Serve the adapter in a file over stdin and stdout; what libraries print goes to stderr."""
    channel = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)

    def answer(data: dict[str, Any]) -> None:
        channel.write(json.dumps(data) + "\n")
        channel.flush()

    serve(adapter_at(path), sys.stdin, answer)


if __name__ == "__main__":
    main(sys.argv[1])
