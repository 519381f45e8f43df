"""Terminal: runs a program on a pseudo terminal, with or without somebody who types."""

from __future__ import annotations

import os
import pty
import re
import select
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from time import monotonic

_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]")
_PATIENCE = 60.0  # seconds for a text that is waited for


def on_a_terminal(program: str) -> str:
    """The output of a program on a terminal, without its escape sequences."""
    with at_a_terminal(program, variables={"COLUMNS": "100", "LINES": "40"}) as typist:
        assert typist.leave() == 0
        return typist.shown


class Typist:
    """Somebody at a terminal: reads what a program shows, and types."""

    def __init__(self, process: subprocess.Popen[bytes], terminal: int) -> None:
        self._process = process
        self._terminal = terminal
        self.raw = ""  # all that was shown
        self._seen = 0  # characters of it that were waited for

    @property
    def shown(self) -> str:
        """All that was shown, without colours."""
        return _ESCAPES.sub("", self.raw)

    def press(self, keys: str) -> None:
        """Press keys: characters, \r (Enter), \x03 (Ctrl-C), \x04 (Ctrl-D)."""
        os.write(self._terminal, keys.encode())

    def wait_for(self, text: str) -> str:
        """What is shown from the last such text to this one."""
        end = monotonic() + _PATIENCE
        while (index := self.raw.find(text, self._seen)) < 0:
            if not select.select([self._terminal], [], [], max(0.0, end - monotonic()))[0]:
                raise AssertionError(f"waited for {text!r}, got {self.raw[self._seen :]!r}")
            try:
                self.raw += os.read(self._terminal, 4096).decode("utf-8", "replace")
            except OSError as error:  # the program has ended
                raise AssertionError(f"waited for {text!r}, got {self.raw[self._seen :]!r} and the end") from error
        begin, self._seen = self._seen, index + len(text)
        return _ESCAPES.sub("", self.raw[begin : self._seen])

    def leave(self) -> int:
        """The exit code of the program, which ends now."""
        try:
            while piece := os.read(self._terminal, 4096):
                self.raw += piece.decode("utf-8", "replace")
        except OSError:  # it has ended
            pass
        return self._process.wait(_PATIENCE)


@contextmanager
def at_a_terminal(program: str, *arguments: str, variables: Mapping[str, str] | None = None) -> Iterator[Typist]:
    """Somebody at the terminal of a program, which is killed if it is not left."""
    terminal, inside = pty.openpty()
    environment = {name: value for name, value in os.environ.items() if name != "NO_COLOR"}
    environment |= {"TERM": "xterm", "COLUMNS": "200", "PROMPT_TOOLKIT_NO_CPR": "1", **(variables or {})}
    own_terminal = (  # so that Ctrl-C is a signal, also if the tests ignore it
        "import fcntl, signal, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0)\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", own_terminal + program, *arguments],
        stdin=inside,
        stdout=inside,
        stderr=inside,
        env=environment,
        start_new_session=True,
    )
    os.close(inside)
    try:
        yield Typist(process, terminal)
    finally:
        process.kill()
        process.wait()
        os.close(terminal)
