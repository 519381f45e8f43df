"""Faults: exception types for user errors, by what the user has to change, and the base of all exceptions of spaceport."""

_START, _END = 3000, 500  # characters at both ends of a longer message: its subject, and what to do


class SpaceportError(Exception):
    """Any error that spaceport raises on purpose: a bundle, option, backend, engine, queue or closed runtime.

    A message quotes what it was given, which may be megabytes: the middle of a long message is left out.
    """

    def __init__(self, *arguments: object) -> None:
        super().__init__(*(_bounded(each) if isinstance(each, str) else each for each in arguments))


class InputFault(SpaceportError, ValueError):
    """A file or folder cannot be used: the message states what was found, what was expected and what to do."""


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
