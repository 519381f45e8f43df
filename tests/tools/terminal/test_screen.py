"""Screens: text on a terminal is shown as it is, progress in lines or a bar, and statistics of a completion."""

from __future__ import annotations

import json
import time

import pytest

from spaceport.runtime.decoding import Decoding
from spaceport.tools.distill.distillation import DistillProgress
from spaceport.tools.terminal.distill_screen import described, progress_shown
from spaceport.tools.terminal.generate_screen import as_dict, show_statistics
from spaceport.tools.terminal.screen import show_json, show_table
from support.hash_engine import Language
from support.hash_runtime import hash_runtime
from support.terminal import on_a_terminal

PROGRAM = """
from spaceport.tools.terminal.screen import show_table, stages
show_table("\\nTo install [bold]", ("what [red]", "how"), [("a", "pip install 'spaceport[tensorrt]' :smile:")])
with stages() as stage:
    stage("not tensorrt: pip install 'spaceport[tensorrt]'")
from spaceport.tools.distill.distillation import DistillProgress
from spaceport.tools.terminal.distill_screen import progress_shown
with progress_shown() as show:
    show(DistillProgress(0, 40, 0, 0, 0.0))
    show(DistillProgress(10, 40, 0, 5000, 50.0))
"""


def test_a_terminal_shows_text_in_brackets_and_a_bar() -> None:
    shown = on_a_terminal(PROGRAM)
    assert "To install [bold]" in shown
    assert "what [red]" in shown
    assert "pip install 'spaceport[tensorrt]' :smile:" in shown
    assert "not tensorrt: pip install 'spaceport[tensorrt]'" in shown
    assert "10/40" in shown
    assert "5,000 tokens  100 tokens/s  0:02:30 left" in shown


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


def test_progress_of_distillation_has_tokens_their_rate_and_the_remaining_time() -> None:
    assert described(DistillProgress(0, 40, 0, 0, 0.0)) == "0 tokens  0 tokens/s"
    assert described(DistillProgress(10, 40, 0, 5000, 50.0)) == "5,000 tokens  100 tokens/s  0:02:30 left"
    assert described(DistillProgress(20, 40, 10, 5000, 50.0)) == "5,000 tokens  100 tokens/s  0:01:40 left"
    assert described(DistillProgress(40, 40, 0, 5000, 50.0)) == "5,000 tokens  100 tokens/s"


def test_lines_of_progress_are_at_least_ten_seconds_apart(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    now = 0.0
    monkeypatch.setattr(time, "perf_counter", lambda: now)
    with progress_shown() as show:
        for second in range(35):
            now = float(second)
            show(DistillProgress(second, 100, 0, 10 * second, now))
    lines = capfd.readouterr().err.splitlines()
    assert lines[0] == "10/100 prompts  100 tokens  10 tokens/s  0:01:30 left"
    assert len(lines) == 3
    with progress_shown() as show:
        show(DistillProgress(10, 40, 10, 0, 0.0))
    assert capfd.readouterr().err == "10/40 prompts  0 tokens  0 tokens/s\n"  # a continued run says so at once


def test_statistics_say_why_drafts_were_narrow_most_frequent_reason_first(capsys: pytest.CaptureFixture[str]) -> None:
    with hash_runtime(Language(3, end_every=10**9), row=5.0) as runtime:
        completion = runtime.generate([1, 2, 3], Decoding(max_tokens=8))
    assert completion.statistics.drafts_limited == {"budget": 8}
    assert as_dict(completion)["statistics"]["drafts_limited"] == {"budget": 8}
    completion.statistics.drafts_limited |= {"not_worth_it": 12, "end_of_text": 1}
    show_statistics(completion)
    assert capsys.readouterr().err.splitlines()[2:4] == [
        "draft tokens: none",
        "drafts limited: not worth it 12, budget 8, end of text 1",
    ]
    completion.statistics.drafts_limited.clear()
    show_statistics(completion)
    assert "limited" not in capsys.readouterr().err
