"""The distill screen: one line in ten seconds without a terminal, a bar on one, and the expected end."""

from __future__ import annotations

import time

import pytest

from spaceport.tools.distill.distillation import DistillProgress
from spaceport.tools.terminal.distill_screen import described, progress_shown
from support.terminal import on_a_terminal

PROGRAM = """
from spaceport.tools.distill.distillation import DistillProgress
from spaceport.tools.terminal.distill_screen import progress_shown
with progress_shown() as show:
    show(DistillProgress(0, 40, 0, 0, 0.0))
    show(DistillProgress(10, 40, 0, 5000, 50.0))
"""


def test_progress_has_tokens_their_rate_and_the_remaining_time() -> None:
    assert described(DistillProgress(0, 40, 0, 0, 0.0)) == "0 tokens  0 tokens/s"
    assert described(DistillProgress(10, 40, 0, 5000, 50.0)) == "5,000 tokens  100 tokens/s  0:02:30 left"
    assert described(DistillProgress(20, 40, 10, 5000, 50.0)) == "5,000 tokens  100 tokens/s  0:01:40 left"
    assert described(DistillProgress(40, 40, 0, 5000, 50.0)) == "5,000 tokens  100 tokens/s"


def test_lines_are_at_least_ten_seconds_apart(
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


def test_a_continued_run_says_so_at_once(capfd: pytest.CaptureFixture[str]) -> None:
    with progress_shown() as show:
        show(DistillProgress(10, 40, 10, 0, 0.0))
    assert capfd.readouterr().err == "10/40 prompts  0 tokens  0 tokens/s\n"


def test_a_terminal_shows_a_bar() -> None:
    shown = on_a_terminal(PROGRAM)
    assert "10/40" in shown
    assert "5,000 tokens  100 tokens/s  0:02:30 left" in shown
