"""Exception types for user errors, by what the user has to change, and the base of all exceptions of spaceport."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass

_START, _END = 3000, 500  # characters at both ends of a longer message: its subject, and what to do


class SpaceportError(Exception):
    """Any error that spaceport raises on purpose: a bundle, option, backend, engine, queue or closed runtime.

    A message quotes what it was given, which may be megabytes: the middle of a long message is left out.
    """

    def __init__(self, *arguments: object) -> None:
        super().__init__(*(_bounded(value) if isinstance(value, str) else value for value in arguments))


class InputFault(SpaceportError, ValueError):
    """A file or folder cannot be used: the message states what was found, what was expected and what to do."""


class CheckpointError(InputFault):
    """A checkpoint or adapter folder that cannot be used."""


class OptionFault(SpaceportError, ValueError):
    """An option, a prompt or an argument is invalid: the message states what is expected."""


class LibraryPanic(SpaceportError, RuntimeError):
    """A library of spaceport gave up on the input of one request (a Rust panic); other requests are not affected."""


class MissingDependency(SpaceportError, RuntimeError):
    """A backend, a device or a package is not available: the message states how to get it."""


def _bounded(message: str) -> str:
    left_out = len(message) - _START - _END
    if left_out <= 0:
        return message
    return f"{message[:_START]} … ({left_out} characters left out) … {message[-_END:]}"


_MOST_SHOWN = 200  # characters of a panic's message in an error message


def raise_panic(error: BaseException, action: str) -> None:
    """Raise `LibraryPanic` if an error is a Rust panic, which is a BaseException and would end more than one request.

    `action` says which library did what, such as "tokenizers encoded the prompt".
    """
    if is_panic(error):
        message = str(error)
        shown = message if len(message) <= _MOST_SHOWN else f"{message[: _MOST_SHOWN - 1]}…"
        raise LibraryPanic(f"a panic while {action}: {shown}: change the input, or update the library") from error


@dataclass(frozen=True)
class PanicsContained(AbstractContextManager[object]):
    """Context manager that raises `LibraryPanic` instead of a Rust panic of its block."""

    action: str  # as in `raise_panic`

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None:
            raise_panic(error, self.action)


def is_panic(error: BaseException) -> bool:
    """Whether an error is a Rust panic: its class has no module that can be imported."""
    return type(error).__name__ == "PanicException" and type(error).__module__ == "pyo3_runtime"
