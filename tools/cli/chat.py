"""`spaceport chat`: chat with a bundle on the terminal."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from shutil import get_terminal_size
from textwrap import wrap
from typing import Any

import click
from prompt_toolkit import PromptSession
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
from prompt_toolkit.layout.processors import TabsProcessor
from prompt_toolkit.output import create_output
from prompt_toolkit.utils import get_cwidth

from spaceport.graphs.contract.faults import InputFault, OptionFault, SpaceportError
from spaceport.graphs.contract.manifest import TEMPLATE_FILE
from spaceport.runtime.decoding import Decoding
from spaceport.runtime.sampling.sampler import Sampling
from spaceport.runtime.scheduling.request import Completion
from spaceport.runtime.session import Runtime
from spaceport.tools.cli import name_flags
from spaceport.tools.cli.bundle_cache import bundle_at, model_name
from spaceport.tools.cli.options import (
    PATH,
    Sectioned,
    allow_links_option,
    backend_option,
    declared_options,
    decoded,
    max_seq_len_option,
    options,
    runtime_options,
    sections,
    threads_option,
    trust_engines_option,
)
from spaceport.tools.terminal.generation import MarkedText, Span, marked
from spaceport.tools.terminal.screen import show_notes, stages

HELP = """\
/system [TEXT]  set or remove the system prompt
/reset          forget the conversation
/quit, Ctrl-D   leave
Ctrl-C          end the answer
Alt-Enter       begin a new line; pasted lines are one message
Underlined: accepted draft tokens, green from mask slots, cyan from prompt lookup and phrases."""
_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
_EARLY = {"length": "cut off at --max-tokens or --max-seq-len", "cancelled": "stopped"}  # endings of answers
_LONG_WORD = 20  # columns; a longer word is shown before its end is known


@sections({"system": "Answers", "backend": "Bundle"})
@click.command("chat", cls=Sectioned)
@click.argument("bundle", type=PATH)
@options(
    click.option("--system", metavar="TEXT", help="System prompt."),
    declared_options(Decoding, "max_tokens"),
    declared_options(Sampling, "temperature", "top_p", unset="as the model suggests"),
    declared_options(Sampling, "seed"),
    click.option("--drafts/--no-drafts", default=True, help="Speculative decoding; the text is the same without."),
    click.option("--fork", is_flag=True, help="Let the text fork into threads, if the bundle can."),
    *(backend_option, threads_option, max_seq_len_option),
    *(trust_engines_option, allow_links_option),
)
def command(bundle: Path, system: str | None, **given: Any) -> None:
    """Chat with BUNDLE, or with a checkpoint or GGUF file.

    Without a terminal, standard input is one message, and the answer is plain text.
    """
    interactive = sys.stdin.isatty()
    path = bundle_at(bundle)
    arguments = {"prefix_cache": True, **runtime_options(given)}
    if not interactive:
        text = decoded(sys.stdin.buffer.read(), "standard input").strip("\n")
        if not text:
            raise OptionFault("standard input is empty: expected a message")
        with Runtime.open(path, **arguments) as runtime:
            completion = Chat(runtime, decoding_of(runtime, given), system).respond(text)
        if completion.ending == "cancelled":
            raise KeyboardInterrupt
        return
    with stages() as stage:
        stage("opening the model, measuring steps")
        runtime = Runtime.open(path, **arguments)
    with runtime:
        show_notes(runtime.notes)
        Chat(runtime, decoding_of(runtime, given), system).run(model_name(bundle))


def decoding_of(runtime: Runtime, given: Mapping[str, Any]) -> Decoding:
    """The options of all answers: as given, else as the model's publisher suggests, else greedy."""
    manifest = runtime.bundle.manifest
    if TEMPLATE_FILE not in manifest.files:
        raise InputFault(f"{runtime.bundle.path} has no chat template: expected the bundle of a chat model")
    samples = bool(manifest.generation_config.get("do_sample"))
    suggested = {"temperature": 1.0, **manifest.generation_config} if samples else {"temperature": 0.0}
    names = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
    found: dict[str, Any] = {name: suggested[name] for name in names if name in suggested}
    found |= {name: given[name] for name in ("temperature", "top_p", "seed") if given[name] is not None}
    sampling = Sampling(**found) if found["temperature"] else Sampling()
    decoding = Decoding(max_tokens=given["max_tokens"], sampling=sampling, fork=given["fork"])
    return decoding if given["drafts"] else decoding.without_drafts()


class Chat:
    """A conversation with a model on the terminal; the prefix cache has the turns before."""

    def __init__(self, runtime: Runtime, decoding: Decoding, system: str | None) -> None:
        self._runtime, self._decoding, self._system = runtime, decoding, system or ""
        self._turns: list[dict[str, str]] = []  # messages of the user and the model

    def run(self, name: str) -> None:
        """Read and answer messages to the model of this name until the end of the input."""
        read_message = reader()
        show_line(f"{name}: /help lists commands, Ctrl-D exits")
        while True:
            try:
                text = read_message()
                if text.strip() in ("/quit", "/exit"):
                    return
                if text.startswith("/") and "\n" not in text:
                    self._obey(*text.strip().partition(" ")[::2])
                elif text.strip():
                    show_line(statistics_line(self.respond(text)), dim=True)
            except EOFError:
                return
            except KeyboardInterrupt:
                show_line("Ctrl-D or /quit exits")
            except SpaceportError as error:
                show_line(f"error: {name_flags(str(error), command)}")
                if isinstance(error, OptionFault) and self._turns:
                    show_line("the messages before are part of the prompt: /reset forgets them")

    def respond(self, text: str) -> Completion:
        """Show the answer to a message; what came of one that Ctrl-C ended stays in the conversation."""
        turns = [*self._turns, {"role": "user", "content": text}]
        system = [{"role": "system", "content": self._system}] if self._system else []
        screen, text_so_far = Screen(), MarkedText(self._runtime.bundle.manifest.tokens.fork)
        with self._runtime.stream([*system, *turns], self._decoding) as stream:
            try:
                for piece in stream:
                    screen.add(text_so_far.add(piece))
            except KeyboardInterrupt:
                stream.close()
            finally:
                screen.end()
            completion = stream.completion()
        if completion.text:
            self._turns = [*turns, {"role": "assistant", "content": completion.text}]
        return completion

    def _obey(self, name: str, argument: str) -> None:
        """Run a command."""
        if name == "/help":
            show_line(HELP)
        elif name == "/reset":
            self._turns = []
            show_line("the conversation is empty")
        elif name == "/system":
            self._system = argument.strip()
            show_line("the system prompt is set" if self._system else "the system prompt is removed")
        else:
            show_line(f"{name} is no command: /help lists them; begin a message with a space to send it as it is")


class Screen:
    """Shows the answer while it is generated: on a terminal with accepted draft tokens marked, wrapped at words."""

    def __init__(self) -> None:
        self._terminal = sys.stdout.isatty()
        self._width = get_terminal_size().columns
        self._column = 0
        self._word: list[Span] = []  # parts of the last word, whose end is not known

    def add(self, spans: Iterable[Span]) -> None:
        """Show spans up to the last complete word."""
        for span in spans:
            if not self._terminal:
                click.echo(span.text, nl=False, color=True)
                continue
            text = _CONTROLS.sub(lambda found: ascii(found[0])[1:-1], span.text)  # they could change the terminal
            for part in re.findall(r"\s|\S+", text):
                if not part.isspace():
                    self._word.append(span._replace(text=part))
                if part.isspace() or sum(get_cwidth(one.text) for one in self._word) > _LONG_WORD:
                    self._end_word()
                if part == "\n" or (part.isspace() and self._column < self._width):
                    self._write(span._replace(text=part))
        sys.stdout.flush()

    def end(self) -> None:
        """Show the rest, and end the line."""
        self._end_word()
        click.echo()

    def _end_word(self) -> None:
        """Show the last word, on a new line if it does not fit into this one."""
        columns = sum(get_cwidth(part.text) for part in self._word)
        if columns and self._column and self._column + columns > self._width:
            click.echo()
            self._column = 0
        for part in self._word:
            self._write(part)
        self._word = []

    def _write(self, span: Span) -> None:
        click.echo(marked([span], True)[0], nl=False, color=True)
        self._column = 0 if span.text == "\n" else self._column + get_cwidth(span.text)


def reader() -> Callable[[], str]:
    """Reads messages with line editing and a history; pasted lines are one message."""
    keys = KeyBindings()

    @keys.add("escape", "enter")
    def _(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    session: PromptSession[str] = PromptSession(
        key_bindings=keys,
        output=create_output(always_prefer_tty=True),
        input_processors=[TabsProcessor(char1=" ", char2=" ")],  # else a tab is shown as ^I
    )
    return lambda: session.prompt("> ")


def statistics_line(completion: Completion) -> str:
    """The counts and speed of an answer."""
    found = completion.statistics
    seconds = found.seconds - found.waiting_seconds
    parts = [f"{found.tokens} tokens"]
    if found.steps and seconds > 0:
        parts += [f"{found.tokens / seconds:.1f} tokens/s", f"{found.tokens / found.steps:.2f} tokens per step"]
    parts.append(f"{found.cached_tokens} of {found.prompt_tokens} prompt tokens cached")
    parts.append(f"first token after {found.first_token_seconds:.2f} s")
    if completion.ending not in ("end", "stop"):
        parts.append(_EARLY.get(completion.ending, f"ending: {completion.ending}"))
    return ", ".join(parts)


def show_line(text: str, *, dim: bool = False) -> None:
    """Print lines of the program, which are no part of an answer, wrapped at words."""
    width = get_terminal_size().columns
    lines = [part for line in text.split("\n") for part in (wrap(line, width) if len(line) > width else [line])]
    text = "\n".join(lines)
    click.echo(click.style(text, dim=True) if dim else text, err=True)
