"""Phrases: which token mostly follows a few others in texts that were counted beforehand, such as a model's own answers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import BinaryIO, NamedTuple

import numpy as np
from numpy.typing import NDArray

from spaceport.graphs.contract.draft_methods import read_array
from spaceport.graphs.contract.faults import InputFault

PHRASES_FILE = "draft_phrases.npy"
PHRASES = "phrases"  # name in sar_config.json and in a manifest
LONGEST = 4  # tokens of a context
CHANCES = 255  # steps of a probability
_FACTOR = 0x9E3779B97F4A7C15  # odd, with irregular bits: two contexts practically never have one number
_BITS = (1 << 64) - 1
_ENTRY = np.dtype([("context", "<u8"), ("token", "<u4"), ("chance", "u1")])


class PhraseTable(NamedTuple):
    """Contexts of 1 to `LONGEST` tokens as numbers, ascending; what follows each of them, and how often, of `CHANCES`."""

    contexts: NDArray[np.uint64]
    tokens: NDArray[np.uint32]
    chances: NDArray[np.uint8]


def context_numbers(tokens: Sequence[int]) -> list[int]:
    """The numbers of the contexts that a text ends with: of its last token, of its last two, and so on."""
    numbers, number = list[int](), 0
    for token in tokens[: -LONGEST - 1 : -1]:
        number = (number * _FACTOR + token + 1) & _BITS
        numbers.append(number)
    return numbers


def extended_all(contexts: NDArray[np.uint64], tokens: NDArray[np.int64]) -> NDArray[np.uint64]:
    """The numbers of contexts with one more token before each; 0 is the number of no token."""
    longer: NDArray[np.uint64] = contexts * np.uint64(_FACTOR) + tokens.astype(np.uint64) + np.uint64(1)
    return longer


def write_phrases(file: BinaryIO, table: PhraseTable) -> None:
    """Write a table to a file: one array."""
    entries = np.empty(len(table.contexts), _ENTRY)
    for name, values in zip(_ENTRY.names or (), table, strict=True):
        entries[name] = values
    np.save(file, entries, allow_pickle=False)


def read_phrases(file: BinaryIO, vocab_size: int) -> PhraseTable:
    """The table in a file; raises if it is not one of a model with this vocabulary."""
    expected = f"entries of {_ENTRY}"
    entries = read_array(file, PHRASES_FILE, expected, lambda array: array.dtype == _ENTRY and array.ndim == 1)
    table = PhraseTable(*(np.ascontiguousarray(entries[name]) for name in _ENTRY.names or ()))
    check_phrases(table, vocab_size)
    return table


def check_phrases(table: PhraseTable, vocab_size: int) -> None:
    """Raise for contexts that do not ascend, and for tokens that the vocabulary does not have."""
    if (table.contexts[1:] <= table.contexts[:-1]).any():
        raise InputFault("phrases have contexts that do not ascend: expected each context once; train or export again")
    if table.tokens.size and table.tokens.max() >= vocab_size:
        raise InputFault(
            f"phrases have token {table.tokens.max()}: expected tokens below {vocab_size}, the model's vocabulary; take "
            "those of this model"
        )
