"""Interrupted: exports in a process that test_interrupted.py kills.

Exports once and prints `ready`, then for each line on standard input forks a child that exports.
The child prints its process id, so that it can be interrupted or killed; the parent prints how it ended.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch

from spaceport.exporter.export import ExportOptions, export
from spaceport.exporter.quiet import quiet_libraries
from spaceport.tools.cli import run


def main(checkpoint: Path, target: Path) -> None:
    torch.set_num_threads(1)
    quiet_libraries()
    export(checkpoint, target, ExportOptions())  # one-time work of the libraries is done before the children start
    print("ready", flush=True)
    for _ in sys.stdin:
        child = os.fork()
        if child == 0:
            code = 130
            try:
                print(os.getpid(), flush=True)
                os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # messages of the command would be read as process ids
                code = run(["export", str(checkpoint), str(target), "--overwrite"])
            finally:
                os._exit(code)
        _, status = os.waitpid(child, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
