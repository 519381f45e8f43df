"""Screen: text in brackets is shown as it is on a terminal."""

from __future__ import annotations

import json

import pytest

from spaceport.tools.terminal.screen import show_json, show_table
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


def test_control_characters_are_escaped(capsys: pytest.CaptureFixture[str]) -> None:
    """Entries of a manifest could otherwise change the terminal, or forge lines of a table."""
    show_table("", ("name", "value"), [("a\x1b[2J", "b\nc\x9b31m\u202e"), ("é", "漢字")])
    shown = capsys.readouterr().out
    assert r"a\x1b[2J" in shown
    assert r"b\nc\x9b31m\u202e" in shown
    assert "漢字" in shown
    data = {"a\x1b": "\x9b31m é"}
    show_json(data)
    shown = capsys.readouterr().out
    assert "\x1b" not in shown
    assert "\x9b" not in shown
    assert json.loads(shown) == data
