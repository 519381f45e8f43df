"""Worker: a process that runs one runtime and answers the calls of its parent, as JSON lines.

The Python interpreter of the runtime's environment runs `worker.py FILE CLASS`, so this file imports the standard library
only. A call is `{"call": NAME, ...}` on stdin, its result a line on stdout. An error ends the process with a traceback on
stderr.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import runpy
import sys
from typing import Any


def main(file: str, name: str) -> None:
    """Answer calls over stdin and stdout until the input ends; output of libraries goes to stderr."""
    channel = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    runner: Any = None
    for line in sys.stdin:
        arguments = json.loads(line)
        call = arguments.pop("call")
        if call == "open":
            runner = runpy.run_path(file)[name](arguments)
            result = {package: importlib.metadata.version(package) for package in runner.PACKAGES}
        else:
            result = getattr(runner, call)(**arguments)
        channel.write(json.dumps(result) + "\n")
        channel.flush()


if __name__ == "__main__":
    main(*sys.argv[1:])
