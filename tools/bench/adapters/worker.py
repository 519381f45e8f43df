"""Worker: a process that runs one runtime and answers the calls of its parent, as JSON lines.

The Python interpreter of the runtime's environment runs `worker.py FILE CLASS`, so this file imports the standard library
only. A call is `{"call": NAME, ...}` on stdin. The answer on stdout is `{"result": {...}}`, or `{"unsupported": REASON}` if
the runtime's API has no such call. An error ends the process with a traceback on stderr, and the parent starts a new one.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import os
import runpy
import sys
from time import perf_counter, process_time
from typing import Any


def opened(file: str, name: str, settings: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """An open model of the class with this name, with the times of imports and opening and the package versions."""
    started = perf_counter()
    kind = runpy.run_path(file)[name]
    for library in kind.LIBRARIES:
        importlib.import_module(library)
    imported = perf_counter()
    runner = kind(settings)
    seconds = perf_counter() - imported
    versions = {package: importlib.metadata.version(package) for package in kind.PACKAGES}
    return runner, {"import_seconds": imported - started, "open_seconds": seconds, "versions": versions}


def measured(runner: Any, name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    """The result of one call, with its wall time and CPU time."""
    before, computed = perf_counter(), process_time()
    value = getattr(runner, name)(**arguments)
    return {"value": value, "seconds": perf_counter() - before, "cpu_seconds": process_time() - computed}


def main(file: str, name: str) -> None:
    """Answer calls over stdin and stdout until the input ends; output of libraries goes to stderr."""
    channel = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    runner = None
    for line in sys.stdin:
        request = json.loads(line)
        call = request.pop("call")
        answer: dict[str, Any]
        try:
            if call == "open":
                runner, result = opened(file, name, request)
            elif runner is None:
                raise SystemExit(f"call {call!r} before open: expected open first")
            else:
                result = measured(runner, call, request)
            answer = {"result": result}
        except NotImplementedError as reason:
            answer = {"unsupported": str(reason)}
        channel.write(json.dumps(answer) + "\n")
        channel.flush()


if __name__ == "__main__":
    main(*sys.argv[1:])
