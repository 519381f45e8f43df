"""Mask rows: the logits of ordinary and of mask rows, in PyTorch from the module that is exported, and in a bundle."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedModel

from spaceport.graphs.contract.signature import Lowering, visible_length
from spaceport.graphs.decoder import decoder_of
from spaceport.runtime.backends import open_engine
from spaceport.runtime.backends.on_torch import TorchEngine
from spaceport.runtime.bundle import open_bundle
from spaceport.runtime.engine import Batch, Engine, EngineOptions

SLOTS = 128
Logits = NDArray[np.float32]

# Steps of one text: parents of their rows (index within the step, -1 = last row of the previous path), mask rows, and the
# row that the next step continues. The third is the SPACE step x m01 m02 c1 m11 m12 c2 m21 m22.
STEPS: tuple[tuple[tuple[int, ...], tuple[int, ...], int], ...] = (
    (tuple(range(-1, 20)), (), 20),
    ((-1,), (), 0),
    ((-1, 0, 1, 0, 3, 4, 3, 6, 7), (1, 2, 4, 5, 7, 8), 3),
    ((-1, 0, 1), (1, 2), 0),
    ((*range(-1, 29), 29, 30, 31, 32), (30, 31, 32, 33), 29),
)


def torch_engine(model: PreTrainedModel, lowering: Lowering = "scatter") -> TorchEngine:
    """A model as an engine for one request; it is compared with the unmodified model first."""
    decoder, _ = decoder_of(model, lowering, "plain" if lowering == "scatter" else "operator")
    return TorchEngine(decoder, decoder.signature, SLOTS, 1, "cpu")


def rows_batch(ids: list[int]) -> Batch:
    """The rows of a text, each of which sees those before it, with logits for all of them."""
    rows = np.arange(len(ids))[None]
    return Batch(0, np.array([ids]), rows, rows, np.tri(len(ids), SLOTS, dtype=np.bool_)[None, None], rows)


def rows_logits(model: PreTrainedModel, ids: list[int]) -> Logits:
    """The logits of all rows of a text: rows x V, with draft heads the lines of each row behind each other."""
    return torch_engine(model).run(rows_batch(ids))[0]


def walk(engine: Engine, mask: int, tokens: range | None = None) -> tuple[Logits, Logits]:
    """The logits of all ordinary rows and of all mask rows of one text of these tokens, fed step by step."""
    tokens = tokens or range(mask + 1, engine.signature.vocab_size)
    random = np.random.default_rng(0)
    order = np.arange(SLOTS) if engine.signature.lowering == "append" else random.permutation(SLOTS)
    paths: list[list[int]] = []  # path of each row, itself last
    ancestors: list[int] = []
    found: tuple[list[Logits], list[Logits]] = ([], [])
    for parents, masks, last in STEPS:
        first, count = len(paths), len(parents)
        for row, parent in enumerate(parents):
            paths.append([*(ancestors if parent < 0 else paths[first + parent]), first + row])
        ids = random.integers(tokens.start, tokens.stop, count)
        ids[list(masks)] = mask
        visible = np.zeros((1, 1, count, visible_length(SLOTS)), np.bool_)
        near = visible.copy()
        for row, path in enumerate(paths[first:]):
            visible[0, 0, row, order[path]] = True
            near[0, 0, row, order[path[-(engine.signature.window or 0) :]]] = True
        positions = np.array([[len(path) - 1 for path in paths[first:]]])
        rows = np.arange(count)[None]
        logits = engine.run(Batch(0, ids[None], positions, order[None, first : first + count], visible, rows, near))[0]
        for row in range(count):
            found[row in masks].append(logits[row, : tokens.stop].copy())
        ancestors = paths[first + last]
    return np.stack(found[0]), np.stack(found[1])


def require_other_mask_rows_alone(base: Engine, gated: Engine, mask: int, difference: float = 0.5) -> Logits:
    """Verify that all mask rows differ, and no bit of the others; the mask rows' logits with the adapter."""
    (ordinary, drafted), (same, other) = walk(base, mask), walk(gated, mask)
    assert ordinary.tobytes() == same.tobytes()
    assert (np.abs(drafted - other).max(axis=-1) > difference).all()
    return other


def bundle_engine(bundle: Path) -> Engine:
    return open_engine(open_bundle(bundle), "onnxruntime", EngineOptions(SLOTS, 1))
