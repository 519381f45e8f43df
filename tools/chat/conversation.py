"""A conversation on the terminal: its messages in memory and as a file, the commands that are typed, and the answers."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterable
from contextlib import closing
from pathlib import Path

import click

from spaceport.graphs.contract.faults import InputFault, SpaceportError
from spaceport.tools.chat.models import ChatModel
from spaceport.tools.terminal.generation import Span, marked

_ROLES = ("system", "user", "assistant")


class ChatHistory:
    """The messages so far, the system prompt first if there is one."""

    def __init__(self, system: str | None = None) -> None:
        self._messages: list[dict[str, str]] = []
        self.set_system(system)

    @property
    def messages(self) -> list[dict[str, str]]:
        """The messages, as a chat template and OpenAI's API have them."""
        return [dict(message) for message in self._messages]

    @property
    def turns(self) -> int:
        """Number of user messages."""
        return sum(message["role"] == "user" for message in self._messages)

    def set_system(self, text: str | None) -> None:
        """Replace the system prompt; None: remove it."""
        rest = [message for message in self._messages if message["role"] != "system"]
        self._messages = ([{"role": "system", "content": text}] if text else []) + rest

    def add(self, role: str, content: str) -> None:
        """Append a message."""
        self._messages.append({"role": role, "content": content})

    def reset(self) -> None:
        """Remove all messages but the system prompt."""
        self._messages = [message for message in self._messages if message["role"] == "system"]

    def undo(self) -> bool:
        """Remove the last user message and what follows; returns whether there was one."""
        found = [index for index, message in enumerate(self._messages) if message["role"] == "user"]
        if found:
            del self._messages[found[-1] :]
        return bool(found)

    def save(self, file: Path) -> None:
        """Write the messages to a file as a JSON list."""
        try:
            file.write_text(json.dumps(self._messages, ensure_ascii=False, indent=1) + "\n", "utf-8")
        except OSError as error:
            raise InputFault(f"{file} cannot be written: {error.strerror}") from error

    def load(self, file: Path) -> None:
        """Replace the messages by those of a file; on an error they stay as they are."""
        expected = 'expected a JSON list of {"role": "user", "content": "…"}, as /save writes'
        try:
            found = json.loads(file.read_text("utf-8"))
        except OSError as error:
            raise InputFault(f"{file} cannot be read: {error.strerror}: {expected}") from error
        except (ValueError, RecursionError) as error:
            raise InputFault(f"{file} is not JSON: {expected}") from error
        if not isinstance(found, list) or not all(map(_is_message, found)):
            raise InputFault(f"{file} has other content: {expected}")
        self._messages = [{"role": message["role"], "content": message["content"]} for message in found]


def _is_message(found: object) -> bool:
    return isinstance(found, dict) and found.get("role") in _ROLES and isinstance(found.get("content"), str)


HELP = """\
/system [TEXT]  set or remove the system prompt    /save FILE  write the conversation to a file
/reset          forget the conversation            /load FILE  continue the one in a file
/undo           forget the last turn               /stats      statistics of the answers
/exit, Ctrl-D   leave                              Ctrl-C      end the answer
Text over several lines: between two lines with \"\"\", or with \\ at the end of each line but the last.
Underlined: accepted draft tokens, green from mask slots, cyan from prompt lookup."""

_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


class Chat:
    """A conversation with a model on the terminal."""

    def __init__(
        self, model: ChatModel, conversation: ChatHistory, *, terminal: bool = True, colours: bool = True
    ) -> None:
        self._model = model
        self._conversation = conversation
        self._terminal = terminal  # whether answers are shown on one
        self._colours = terminal and colours
        self._answers: list[str] = []  # the statistics of each
        self._files: set[Path] = set()  # that may be overwritten
        self._commands: dict[str, Callable[[str], None]] = {
            "/help": lambda _: _note(HELP),
            "/reset": self._reset,
            "/undo": self._undo,
            "/system": self._system,
            "/save": self._save,
            "/load": self._load,
            "/stats": self._show_statistics,
        }

    def run(self) -> None:
        """Read messages until the end of the input."""
        _note(f"{self._model.name}: /help lists commands, Ctrl-D exits")
        while True:
            try:
                text = read_message()
            except EOFError:
                _note("")
                return
            except KeyboardInterrupt:
                _note("\nCtrl-D or /exit exits")
                continue
            if text.strip() == "/exit":
                return
            if text.strip():
                self._handle(text)

    def respond(self, text: str) -> None:
        """Show the answer to a message; what came of one that Ctrl-C ended stays in the conversation."""
        self._conversation.add("user", text)
        parts: list[str] = []
        try:
            with closing(self._model.answer(self._conversation.messages)) as spans:  # type: ignore[type-var]
                self._show(spans, parts)
        except KeyboardInterrupt:
            if parts:
                self._conversation.add("assistant", "".join(parts))
            else:
                self._conversation.undo()
            raise
        except BaseException:
            self._conversation.undo()
            raise
        self._conversation.add("assistant", "".join(parts))

    def load(self, file: Path) -> None:
        """Continue the conversation in a file."""
        self._conversation.load(file)
        self._files.add(file.resolve())

    def _handle(self, text: str) -> None:
        """Run a command or answer a message; errors are shown, and the chat goes on."""
        try:
            if text.startswith("/"):
                name, _, argument = text.strip().partition(" ")
                self._commands.get(name, self._unknown(name))(argument.strip())
                return
            self.respond(text)
        except SpaceportError as error:
            _note(f"error: {error}")
            return
        except KeyboardInterrupt:
            _note("\n(ended)")
            return
        if self._model.statistics is not None:
            self._answers.append(self._model.statistics.line())
            _note(self._answers[-1], dim=self._colours)

    def _show(self, spans: Iterable[Span], parts: list[str]) -> None:
        for span in spans:
            parts.append(span.text)
            text = span.text
            if self._terminal:  # control characters could change it
                text = _CONTROLS.sub(lambda found: ascii(found[0])[1:-1], text)
            if self._colours:
                text = marked([span._replace(text=text)], True)[0]
            click.echo(text, nl=False, color=True)
            sys.stdout.flush()
        click.echo()

    def _unknown(self, name: str) -> Callable[[str], None]:
        return lambda _: _note(
            f"{name} is no command: /help lists them; begin a message with a space to send it as it is"
        )

    def _reset(self, _: str) -> None:
        self._conversation.reset()
        _note("the conversation is empty")

    def _undo(self, _: str) -> None:
        _note("the last turn is removed" if self._conversation.undo() else "there is no turn to remove")

    def _system(self, text: str) -> None:
        self._conversation.set_system(text or None)
        _note("the system prompt is set" if text else "the system prompt is removed")

    def _save(self, name: str) -> None:
        file = Path(name).expanduser()
        if not name:
            _note("/save needs a file: /save FILE")
        elif file.exists() and file.resolve() not in self._files:
            _note(f"{file} exists: choose another name")
        else:
            self._conversation.save(file)
            self._files.add(file.resolve())
            _note(f"saved {self._conversation.turns} turns to {file}")

    def _load(self, name: str) -> None:
        if not name:
            _note("/load needs a file: /load FILE")
            return
        self.load(Path(name).expanduser())
        _note(f"loaded {self._conversation.turns} turns")

    def _show_statistics(self, _: str) -> None:
        for number, line in enumerate(self._answers, 1):
            _note(f"{number}: {line}")
        _note(f"{self._conversation.turns} turns, {len(self._answers)} answers")


def read_message() -> str:
    """A message of one line or several from the terminal."""
    line = input("> ")
    lines = []
    if line.strip() == '"""':
        while (line := input(". ")).strip() != '"""':
            lines.append(line)
        return "\n".join(lines)
    while line.endswith("\\"):
        lines.append(line[:-1])
        line = input(". ")
    return "\n".join([*lines, line])


def _note(text: str, *, dim: bool = False) -> None:
    """Print a line of the program, which is no part of an answer."""
    click.echo(click.style(text, dim=True) if dim else text, err=True)
