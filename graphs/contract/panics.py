"""Panics: Rust panics of tokenizers and llguidance as exceptions that fail only one request."""

from __future__ import annotations

from types import TracebackType

from spaceport.graphs.contract.faults import LibraryPanic

_MOST_SHOWN = 200  # characters of a panic's message in an error message


def raise_panic(error: BaseException, action: str) -> None:
    """Raise `LibraryPanic` if an error is a Rust panic, which is a BaseException and would end more than one request.

    `action` says which library did what, such as "tokenizers encoded the prompt".
    """
    if is_panic(error):
        message = str(error)
        shown = message if len(message) <= _MOST_SHOWN else f"{message[: _MOST_SHOWN - 1]}…"
        raise LibraryPanic(f"a panic while {action}: {shown}: change the input, or update the library") from error


class PanicsContained:
    """Context manager that raises `LibraryPanic` instead of a Rust panic of its block."""

    __slots__ = ("_action",)

    def __init__(self, action: str) -> None:
        self._action = action  # as in `raise_panic`

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            raise_panic(error, self._action)


def is_panic(error: BaseException) -> bool:
    """Whether an error is a Rust panic: its class has no module that can be imported."""
    return type(error).__name__ == "PanicException" and type(error).__module__ == "pyo3_runtime"
