"""Capacity: context length and KV slots of a runtime."""

from __future__ import annotations

from spaceport.graphs.contract.faults import OptionFault
from spaceport.graphs.contract.manifest import Manifest
from spaceport.graphs.contract.signature import STEP_ROWS, Lowering, visible_length
from spaceport.runtime.decode.step import PREFILL_ROWS

DEFAULT_SEQ_LEN = 4096


def seq_len(manifest: Manifest, max_seq_len: int | None) -> int:
    """The context length of a runtime, in tokens."""
    if max_seq_len is None:
        return min(manifest.max_positions, DEFAULT_SEQ_LEN)
    if not 2 <= max_seq_len <= manifest.max_positions:
        raise OptionFault(f"max_seq_len is {max_seq_len}: expected 2 to {manifest.max_positions}, the model's limit")
    return max_seq_len


def slots_for(max_seq_len: int, max_slots: int | None) -> int:
    """Maximum tokens of a prompt and all its threads."""
    if max_slots is None:
        return max_seq_len
    if max_slots < max_seq_len:
        raise OptionFault(
            f"max_slots is {max_slots}: expected at least max_seq_len, {max_seq_len}, so that one thread can reach it"
        )
    return max_slots


def capacity_for(manifest: Manifest, max_slots: int) -> int:
    """KV slots of a request: its tokens, the rows of its widest step, and one for padding rows."""
    return kv_slots(manifest.signature.lowering, max_slots)


def kv_slots(lowering: Lowering, max_slots: int) -> int:
    """KV slots of a request with this lowering: its tokens, the rows of its widest step, and one for padding rows."""
    widest = STEP_ROWS
    if lowering == "append":
        widest += (
            PREFILL_ROWS  # all requests of a call write the same number of consecutive slots: those of a prefill chunk
        )
    return visible_length(max_slots + widest + 1)
