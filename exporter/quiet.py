"""Quiet: the libraries below the exporter keep their chatter to themselves; what fails is raised."""

from __future__ import annotations

import logging

import transformers.utils.logging


def quiet_libraries() -> None:
    """No progress bars and no advice of libraries on the user's terminal."""
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    logging.getLogger("accelerate").setLevel(logging.ERROR)  # it tells of tied weights each time it keeps a state
