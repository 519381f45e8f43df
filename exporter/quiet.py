"""Quiet: turn off progress bars and log messages of libraries; errors are still raised."""

from __future__ import annotations

import logging

import transformers.utils.logging


def quiet_libraries() -> None:
    """Turn off the progress bars and log messages of transformers and accelerate."""
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    logging.getLogger("accelerate").setLevel(logging.ERROR)  # logs tied weights each time it saves a state
