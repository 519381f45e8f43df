"""Draft correction file: the correction vectors of all tokens, as an export writes them and a runtime reads them."""

from __future__ import annotations

from typing import BinaryIO, NamedTuple

import numpy as np
from numpy.typing import NDArray

from spaceport.graphs.contract.faults import InputFault

CORRECTION_FILE = "draft_correction.npy"
CANDIDATES = 32  # most probable tokens of a mask slot, whose scores are corrected


class CorrectionTables(NamedTuple):
    """Vectors of all tokens, each V x rank: the correction of a candidate is a product of two of them."""

    before: NDArray[np.float16]  # of the token before the candidate
    after: NDArray[np.float16]  # of the candidate


def write_tables(file: BinaryIO, tables: CorrectionTables) -> None:
    """Write tables to a file: one array, 2 x V x rank."""
    np.save(file, np.stack(tables), allow_pickle=False)


def read_tables(file: BinaryIO, vocab_size: int) -> CorrectionTables:
    """The tables in a file; raises if they are not those of a model with this vocabulary."""
    try:
        tables = np.load(file, allow_pickle=False)
    except (ValueError, EOFError) as error:
        raise InputFault(f"{CORRECTION_FILE} is not an array: {error}; export the checkpoint again") from error
    if not isinstance(tables, np.ndarray) or tables.dtype != np.float16 or tables.shape[:-1] != (2, vocab_size):
        shape = f"{getattr(tables, 'dtype', '?')} {getattr(tables, 'shape', '?')}"
        raise InputFault(
            f"{CORRECTION_FILE} holds {shape}: expected float16 (2, {vocab_size}, rank); export the checkpoint again"
        )
    if not np.isfinite(tables).all():
        raise InputFault(f"{CORRECTION_FILE} holds numbers that are not finite: export the checkpoint again")
    return CorrectionTables(tables[0], tables[1])
