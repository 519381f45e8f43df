"""Faults: exception types for user errors, by what the user has to change, and the base of all exceptions of spaceport."""


class SpaceportError(Exception):
    """Any error that spaceport raises on purpose: a bundle, option, backend, engine, queue or closed runtime."""


class InputFault(SpaceportError, ValueError):
    """A file or folder cannot be used: the message states what was found, what was expected and what to do."""


class OptionFault(SpaceportError, ValueError):
    """An option, a prompt or an argument is invalid: the message states what is expected."""


class LibraryPanic(SpaceportError, RuntimeError):
    """A library of spaceport gave up on the input of one request (a Rust panic); other requests are not affected."""


class MissingDependency(SpaceportError, RuntimeError):
    """A backend, a device or a package is not available: the message states how to get it."""
