"""Faults: mistakes that are not ours, told apart by who can mend them."""


class InputFault(ValueError):
    """A file or folder cannot be used as it is: the message says what was found, what is expected and what to do."""


class OptionFault(ValueError):
    """An option, a prompt or an argument cannot be meant: the message says what is expected."""


class MissingDependency(RuntimeError):
    """A backend, a device or a package is not there: the message says how to get it."""
