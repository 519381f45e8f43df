"""Runtime: a bundle as text."""

from spaceport.runtime.session import Completion, Piece, Runtime, RuntimeBusy, Stream

__all__ = ["Completion", "Piece", "Runtime", "RuntimeBusy", "Stream"]
