"""Screen: text in brackets is shown as it is on a terminal."""

from __future__ import annotations

from support.terminal import on_a_terminal

PROGRAM = """
from spaceport.tools.terminal.screen import show_table, stages
show_table("\\nTo install [bold]", ("what [red]", "how"), [("a", "pip install 'spaceport[tensorrt]' :smile:")])
with stages() as stage:
    stage("not tensorrt: pip install 'spaceport[tensorrt]'")
"""


def test_text_in_brackets_is_shown_on_a_terminal() -> None:
    shown = on_a_terminal(PROGRAM)
    assert "To install [bold]" in shown
    assert "what [red]" in shown
    assert "pip install 'spaceport[tensorrt]' :smile:" in shown
    assert "not tensorrt: pip install 'spaceport[tensorrt]'" in shown
