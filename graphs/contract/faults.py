"""Faults: exception types for user errors, by what the user has to change."""


class InputFault(ValueError):
    """A file or folder cannot be used: the message states what was found, what was expected and what to do."""


class OptionFault(ValueError):
    """An option, a prompt or an argument is invalid: the message states what is expected."""


class MissingDependency(RuntimeError):
    """A backend, a device or a package is not available: the message states how to get it."""
