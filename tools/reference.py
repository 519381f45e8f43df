"""Reference: a checkpoint's own PyTorch model behind the engine interface of its bundle."""

from __future__ import annotations

from pathlib import Path

import torch

from spaceport.exporter.checkpoint import open_checkpoint
from spaceport.exporter.export import Options, TokenFlags, decoder_from
from spaceport.exporter.quiet import quiet_libraries
from spaceport.graphs.faults import InputFault
from spaceport.graphs.signature import Precision
from spaceport.runtime.backends import check_threads
from spaceport.runtime.backends.on_torch import TorchEngine
from spaceport.runtime.bundle import Bundle
from spaceport.runtime.session import Runtime, capacity_for, seq_len

# On smaller models threads wait for each other longer than they work: on a busy machine 16 s instead of 0.3 s for the
# cases of a check.
_SMALL = 20_000_000


def open_reference(
    bundle: Bundle,
    checkpoint: Path,
    capacity: int,
    requests: int,
    dtype: Precision | None = None,
    remote_code: bool = False,
    threads: int = 0,
) -> TorchEngine:
    """The model that a bundle was made from, in the bundle's precision or another."""
    quiet_libraries()
    check_threads(threads)
    if threads or bundle.manifest.parameters < _SMALL:
        torch.set_num_threads(threads or 1)
    signature = bundle.manifest.signature
    options = Options(signature.lowering, dtype or signature.dtype, "plain", remote_code=remote_code)
    decoder, _ = decoder_from(open_checkpoint(checkpoint, TokenFlags(), remote_code), options)
    for fact in ("layers", "kv_heads", "head_dim", "vocab_size", "window"):
        ours, theirs = getattr(signature, fact), getattr(decoder.signature, fact)
        if ours != theirs:
            raise InputFault(
                f"{checkpoint}: {fact} is {theirs}, the bundle's is {ours}: expected the checkpoint that {bundle.path} was made from"
            )
    return TorchEngine(decoder, decoder.signature, capacity, requests, "cpu")


def open_reference_runtime(bundle: Bundle, checkpoint: Path, max_seq_len: int | None, threads: int = 0) -> Runtime:
    """A runtime over the PyTorch model, in the bundle's place."""
    length = seq_len(bundle.manifest, max_seq_len)
    capacity = capacity_for(bundle.manifest, length)
    return Runtime(bundle, open_reference(bundle, checkpoint, capacity, 1, threads=threads), length)
