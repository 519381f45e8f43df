"""Screen: text in brackets is shown as it is on a terminal."""

from __future__ import annotations

import os
import pty
import re
import subprocess
import sys

PROGRAM = """
from spaceport.tools.terminal.screen import show_table, stages
show_table("\\nTo install [bold]", ("what [red]", "how"), [("a", "pip install 'spaceport[tensorrt]' :smile:")])
with stages() as stage:
    stage("not tensorrt: pip install 'spaceport[tensorrt]'")
"""


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


def test_text_in_brackets_is_shown_on_a_terminal() -> None:
    shown = on_a_terminal(PROGRAM)
    assert "To install [bold]" in shown
    assert "what [red]" in shown
    assert "pip install 'spaceport[tensorrt]' :smile:" in shown
    assert "not tensorrt: pip install 'spaceport[tensorrt]'" in shown
