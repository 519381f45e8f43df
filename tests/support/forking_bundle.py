"""Forking bundle: a bundle that does not fork, changed so that the newline token is its [Fork]."""

from __future__ import annotations

import shutil
from pathlib import Path

from tokenizers import Tokenizer

from spaceport.graphs.contract.manifest import TOKENIZER_FILE
from support.small_bundle import edit


def forking_copy(bundle: Path, copy: Path) -> Path:
    """A copy of the tiny bundle that forks at each newline."""
    shutil.copytree(bundle, copy)
    tokenizer = Tokenizer.from_file(str(copy / TOKENIZER_FILE))
    (fork,), (child,) = (tokenizer.encode(text, add_special_tokens=False).ids for text in ("\n", "#"))
    edit(copy, lambda manifest: manifest["tokens"].update(fork=fork, child=child))
    return copy
