"""Terminal: runs a program on a pseudo terminal."""

from __future__ import annotations

import os
import pty
import re
import subprocess
import sys


def on_a_terminal(program: str) -> str:
    """The output of a program on a terminal, without colours."""
    reader, writer = pty.openpty()
    environment = os.environ | {"TERM": "xterm", "COLUMNS": "100", "LINES": "40"}
    with subprocess.Popen(
        [sys.executable, "-c", program], stdin=writer, stdout=writer, stderr=writer, env=environment
    ) as running:
        os.close(writer)
        shown = b""
        try:
            while piece := os.read(reader, 4096):
                shown += piece
        except OSError:  # the program has ended
            pass
        os.close(reader)
    assert running.returncode == 0
    return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", shown.decode())
