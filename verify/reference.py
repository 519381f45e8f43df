"""Reference: a checkpoint's own PyTorch model behind the engine interface of its bundle."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from spaceport.exporter.atomic_folder import write_manifest
from spaceport.exporter.checkpoint import Checkpoint, TokenFlags, open_checkpoint, quiet_libraries
from spaceport.exporter.export import ExportOptions, Written, build_decoder, manifest_for, write_texts_and_drafts
from spaceport.exporter.native_weights import round_weights
from spaceport.graphs.contract.faults import InputFault
from spaceport.graphs.contract.formats import FORMATS
from spaceport.graphs.contract.signature import Precision
from spaceport.graphs.quantization import quantize_inputs
from spaceport.runtime.backends import check_threads
from spaceport.runtime.backends.on_torch import TorchEngine
from spaceport.runtime.bundle import Bundle
from spaceport.runtime.engine import capacity_for, seq_len
from spaceport.runtime.session import Runtime

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
    adapter: Path | None = None,
) -> TorchEngine:
    """The model that a bundle was made from, in the bundle's precision or another."""
    quiet_libraries()
    _set_threads(threads, bundle.manifest.parameters)
    signature = bundle.manifest.signature
    opened = open_checkpoint(checkpoint, TokenFlags(), remote_code, adapter)
    number_format = bundle.manifest.number_format
    # Small weights are those of the bundle to the bit, whatever they are computed with: of a weight that is read in
    # another type, another step may be the nearest.
    if number_format.weights == "same":
        number_format = FORMATS[dtype or signature.dtype]
    options = ExportOptions(number_format, signature.lowering, "plain", remote_code=remote_code)
    decoder, _ = build_decoder(opened, options, arithmetic=dtype)
    if number_format.native:
        round_weights(decoder.model, number_format.weights)
        quantize_inputs(decoder.model, number_format.weights)
    for fact in ("layers", "kv_heads", "head_dim", "vocab_size", "window", "lines"):
        ours, theirs = getattr(signature, fact), getattr(decoder.signature, fact)
        if ours != theirs:
            raise InputFault(
                f"{checkpoint}: {fact} is {theirs}, the bundle's is {ours}: expected the checkpoint that {bundle.path} was made from"
            )
    return TorchEngine(decoder, decoder.signature, capacity, requests, "cpu")


@contextmanager
def checkpoint_runtime(checkpoint: Checkpoint, max_seq_len: int | None, threads: int = 0) -> Iterator[Runtime]:
    """A runtime over a checkpoint's own PyTorch model in float32, with nothing exported."""
    quiet_libraries()
    options = ExportOptions(remote_code=checkpoint.remote_code)
    decoder, traits = build_decoder(checkpoint, options)
    parameters = sum(parameter.numel() for parameter in decoder.parameters())
    _set_threads(threads, parameters)
    written = Written(decoder.model, decoder.signature, traits.max_positions, parameters)
    manifest = manifest_for(checkpoint, options, written)
    length = seq_len(manifest, max_seq_len)
    with tempfile.TemporaryDirectory(prefix="spaceport-checkpoint-") as folder:
        write_texts_and_drafts(checkpoint, Path(folder), written)
        bundle = Bundle(Path(folder), write_manifest(Path(folder), manifest))
        engine = TorchEngine(decoder, decoder.signature, capacity_for(manifest, length), 1, "cpu")
        with Runtime(bundle, engine, length) as runtime:
            yield runtime


def _set_threads(threads: int, parameters: int) -> None:
    check_threads(threads)
    if threads or parameters < _SMALL:
        torch.set_num_threads(threads or 1)
