"""`spaceport chat`: conversations on a terminal and through pipes."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path

import click
import pytest

from spaceport.runtime.decoding import Decoding
from spaceport.runtime.session import Runtime
from spaceport.tools.cli import INPUT, OK, USAGE, run
from spaceport.tools.cli.chat import Screen, show_line
from spaceport.tools.terminal.generation import Span
from support.paths import DEMO
from support.terminal import Typist, at_a_terminal

SLOW = """
import time
from spaceport.runtime.backends.on_onnxruntime import OnnxRuntimeEngine
run = OnnxRuntimeEngine.run
OnnxRuntimeEngine.run = lambda *given: (time.sleep(0.02), run(*given))[1]
"""
PROGRAM = "import sys; from spaceport.tools.cli import main; sys.argv = ['spaceport', 'chat', *sys.argv[1:]]; main()"
QUESTION = json.loads((DEMO / "prompts.json").read_text("utf-8"))["triangular"]["user"].replace("\n", " ")
OPTIONS = ("--threads", "1", "--max-tokens", "24", "--temperature", "0")
ENTER, ALT_ENTER = "\r", "\x1b\r"
DRAFTED = "\x1b[32m\x1b[4m"  # green, underlined
PROMPT = "\x1b[?2004h"  # pasted text is marked from here on, so a message can be typed


def answered(typist: Typist, text: str) -> str:
    """What is shown after a message, until the prompt comes again."""
    typist.press(text + ENTER)
    typist.wait_for("prompt tokens cached")
    return typist.wait_for(PROMPT)


def told(typist: Typist, command: str, message: str) -> None:
    """Type a command and wait for what it prints."""
    typist.press(command + ENTER)
    typist.wait_for(message)
    typist.wait_for(PROMPT)


def turns(bundle: Path, *texts: str, system: str = "") -> list[str]:
    """The answers of a conversation with these messages."""
    messages = [{"role": "system", "content": system}] if system else []
    answers = []
    with Runtime.open(bundle, threads=1, step_costs="free") as runtime:
        for text in texts:
            messages.append({"role": "user", "content": text})
            answers.append(runtime.generate(list(messages), Decoding(max_tokens=24, fork=False)).text)
            messages.append({"role": "assistant", "content": answers[-1]})
    return answers


@pytest.mark.slow
def test_a_conversation_on_a_terminal(demo_bundle: Path) -> None:
    """The second turn continues the first one; lines that are pasted, or typed with Alt-Enter, are one message."""
    first, second = turns(demo_bundle, QUESTION, "one\ntwo\nthree\nfour")
    (alone,) = turns(demo_bundle, "five\nsix", system="Be short.")
    with at_a_terminal(PROGRAM, str(demo_bundle), *OPTIONS) as typist:
        typist.wait_for("opening the model, measuring steps")
        typist.wait_for("Ctrl-D exits")
        typist.wait_for(PROMPT)
        answered(typist, QUESTION)
        answered(typist, "\x1b[200~one\ntwo\nthree\nfour\x1b[201~")
        told(typist, "/help", "set or remove the system prompt")
        told(typist, "/nonsense", "/nonsense is no command")
        typist.press("\x1b[200~def f():\n\treturn 1" + " x" * 2000 + "\x1b[201~" + ENTER)
        typist.wait_for("--max-seq-len is ")  # the error names the option of this command
        assert "^I" not in typist.raw
        told(typist, "", "/reset forgets them")
        told(typist, "/reset", "the conversation is empty")
        told(typist, "/system Be short.", "the system prompt is set")
        answered(typist, f"five{ALT_ENTER}six")
        typist.press("\x04")
        assert typist.leave() == OK
    shown = " ".join(typist.shown.split())
    for answer in (first, second, alone):
        assert " ".join(answer.split()) in shown
    assert DRAFTED in typist.raw


@pytest.mark.slow
def test_ctrl_c_ends_the_answer_but_not_the_chat(demo_bundle: Path) -> None:
    (answer,) = turns(demo_bundle, QUESTION)
    with at_a_terminal(SLOW + PROGRAM, str(demo_bundle), "--temperature", "0", "--no-drafts") as typist:
        typist.wait_for("Ctrl-D exits")
        typist.wait_for(PROMPT)
        typist.press("\x03")
        typist.wait_for("Ctrl-D or /quit exits")
        typist.wait_for(PROMPT)
        typist.press(QUESTION + ENTER)
        typist.wait_for(answer.strip()[:5])
        typist.press("\x03")
        typist.wait_for(", stopped")
        typist.wait_for(PROMPT)
        assert DRAFTED not in typist.raw
        typist.press("/quit" + ENTER)
        assert typist.leave() == OK


def test_a_pipe_gets_the_answer_alone(
    demo_bundle: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def piped(text: str, *arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text.encode())))
        return run(["chat", *arguments, *OPTIONS]), *capfd.readouterr()

    (answer,) = turns(demo_bundle, QUESTION)
    assert piped(f"{QUESTION}\n", str(demo_bundle)) == (OK, f"{answer}\n", "")
    for text, target, code, message in (
        ("", str(demo_bundle), USAGE, "standard input is empty: expected a message"),
        ("a", "nowhere", INPUT, "nowhere: no such file or folder"),
    ):
        found, shown, error = piped(text, target)
        assert (found, shown) == (code, "")
        assert message in error


def test_lines_of_the_program_are_wrapped_at_words(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "12")
    show_line("one two three four\n/reset  as it is", dim=True)
    assert click.unstyle(capfd.readouterr().err) == "one two\nthree four\n/reset  as\nit is\n"
    monkeypatch.setenv("COLUMNS", "80")
    show_line("/reset  as it is")
    assert capfd.readouterr().err == "/reset  as it is\n"


def shown_on(width: int, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *spans: Span) -> str:
    """An answer on a terminal of this width, or on none (0)."""
    monkeypatch.setattr("sys.stdout.isatty", lambda: width > 0)
    monkeypatch.setenv("COLUMNS", str(width))
    screen = Screen()
    for span in spans:
        screen.add([span])
    screen.end()
    return capfd.readouterr().out


def test_an_answer_cannot_change_the_terminal(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    spans = Span("a\x1b[2J\x07\n\tb", False), Span("\x9b", True, "lookup")
    shown = shown_on(80, capfd, monkeypatch, *spans)
    assert click.unstyle(shown) == "a\\x1b[2J\\x07\n\tb\\x9b\n"
    assert shown_on(0, capfd, monkeypatch, *spans) == "a\x1b[2J\x07\n\tb\x9b\n"


def test_lines_break_between_words_and_words_may_come_in_parts(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for width, parts, expected in (
        (10, ("one two th", "ree four\n", "  five"), "one two \nthree four\n  five\n"),
        (10, ("0123456789 ", "abc"), "0123456789\nabc\n"),
        (10, ("a " + "x" * 25,), "a \n" + "x" * 25 + "\n"),
        (10, ("漢字漢字 漢字",), "漢字漢字 \n漢字\n"),
    ):
        assert shown_on(width, capfd, monkeypatch, *(Span(part, False) for part in parts)) == expected
