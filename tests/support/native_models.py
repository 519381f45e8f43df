"""Native graphs of tiny models: their parts, files and engines, with and without the compiled library."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel

from spaceport.exporter.native_graph import NativeGraph
from spaceport.exporter.native_weights import RoundedWeights, Weights, round_weights
from spaceport.graphs.contract.manifest import MODEL_FILE
from spaceport.graphs.contract.signature import Signature
from spaceport.graphs.decoder import freeze_rotary
from spaceport.graphs.find_parts import parts_of
from spaceport.graphs.heads import head_logits, heads_of
from spaceport.graphs.parts import DecoderParts
from spaceport.graphs.quantization import quantize_inputs
from spaceport.graphs.traits import probe
from spaceport.runtime.backends.on_onnxruntime import OnnxRuntimeEngine
from support.families import FAMILIES, POSITIONS, Family, build, family_of
from support.native_operators import options

SLOTS = POSITIONS
# Widths of whole blocks; the MLP of the gated families is padded to them.
GATED_WIDTH, PLAIN_WIDTH = 88, 96
_PLAIN = ("gpt_neox", "starcoder2", "opt", "gpt2", "gptj", "phi")
_LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "short_factor": [1.0, 1.1, 1.3, 1.7, 1.8, 1.9, 2.0, 2.1],
    "long_factor": [2.0, 3.0, 5.0, 9.0, 9.0, 9.0, 9.0, 9.0],
}
_OWN: dict[str, dict[str, Any]] = {
    "gemma2": {"attn_logit_softcapping": 0.5},  # so low that a graph without it is another one
    "phi3, longrope": {"rope_parameters": _LONGROPE},
    "opt": {"ffn_dim": PLAIN_WIDTH, "word_embed_proj_dim": 64},
    "gpt2": {"n_embd": 64, "n_inner": PLAIN_WIDTH},
    "gptj": {"n_embd": 64, "n_inner": PLAIN_WIDTH},
    "granite": {"embedding_multiplier": 3.0, "logits_scaling": 4.0},
}

# Families that native operators do not compute, and patterns of the errors.
REFUSED = {
    "ministral3": "has queries that are scaled by their position",
    "falcon, 7B style": "has an attention of its own",
    "falcon, 40B style": "has an attention of its own",
    "opt": "has no norm in OPTModel",
    "gpt2": "inputs of its first layer that are not its embeddings",
    "gptj": "has an attention of its own",
}
SUPPORTED = [family.name for family in FAMILIES if family.name not in REFUSED]


def native_family(name: str, **changes: Any) -> Family:
    """A family in sizes that native operators can compute."""
    family = family_of(name)
    width = PLAIN_WIDTH if family.model_type in _PLAIN else GATED_WIDTH
    sizes = {"hidden_size": 64, "intermediate_size": width}
    return replace(family, options={**family.options, **sizes, **_OWN.get(name, {}), **changes})


def built(name: str, **changes: Any) -> PreTrainedModel:
    return build(native_family(name, **changes))


@torch.no_grad()
def found_parts(model: PreTrainedModel) -> DecoderParts:
    """The parts of a model, as an export finds them."""
    traits = probe(model)
    freeze_rotary(model)
    return parts_of(model, traits)


@dataclass(frozen=True)
class NativeModel:
    """A model that is written as a native graph."""

    model: PreTrainedModel
    parts: DecoderParts
    signature: Signature

    @classmethod
    def of(cls, model: PreTrainedModel) -> NativeModel:
        with torch.no_grad():
            traits = probe(model)
        heads = heads_of(model)
        lines = 1 if heads is None else 1 + heads.count
        sizes = (traits.layers, traits.kv_heads, traits.head_dim, traits.vocab_size)
        signature = Signature(*sizes, "float32", "scatter", traits.window, lines, "int8")
        return cls(model, found_parts(model), signature)

    @torch.no_grad()
    def write(
        self, folder: Path, weights: Weights | str = "int8", input_rows: tuple[tuple[int, ...], Tensor] | None = None
    ) -> NativeFiles:
        chosen = RoundedWeights(weights) if isinstance(weights, str) else weights
        folder.mkdir(parents=True, exist_ok=True)
        NativeGraph(folder, self.parts, self.signature, chosen, input_rows, heads_of(self.model)).write()
        return NativeFiles(folder, self.signature)

    def float_logits(self, ids: Sequence[int]) -> NDArray[np.float32]:
        """Logits of all rows of a text that the parts compute, with nothing rounded."""
        with torch.no_grad():
            logits: NDArray[np.float32] = self.parts.logits(torch.tensor([ids]), 0)[0].numpy()
        return logits


@dataclass(frozen=True)
class NativeFiles:
    """The files of a native graph."""

    folder: Path
    signature: Signature

    def engine(self, with_library: bool = True, threads: int = 1, requests: int = 1) -> OnnxRuntimeEngine:
        session = ort.InferenceSession(
            self.folder / MODEL_FILE, options(threads, with_library), providers=["CPUExecutionProvider"]
        )
        return OnnxRuntimeEngine(session, self.signature, SLOTS, requests)


@torch.no_grad()
def rounded_logits(model: PreTrainedModel, ids: Sequence[int], format_name: str = "int8") -> NDArray[np.float32]:
    """Logits of all rows of a text by PyTorch, with weights and inputs of products rounded as in a native graph.

    Changes the model. With draft heads, their logits follow those of the row."""
    round_weights(model, format_name)
    quantize_inputs(model, "int4" if format_name == "int4" else "int8")
    with head_logits(model) as lines:
        logits = model(input_ids=torch.tensor([ids]), use_cache=False).logits
    return torch.cat([logits, *lines], -1)[0].float().numpy()


def tokens(count: int, vocabulary: int) -> list[int]:
    """Random tokens without the first eight, of which some have a meaning."""
    return np.random.default_rng(0).integers(8, vocabulary, count).tolist()


def rms(found: NDArray[np.float32], expected: NDArray[np.float32]) -> float:
    """The root mean square of differences relative to that of the expected logits."""
    return float(np.sqrt(np.square(found - expected).mean() / np.square(expected).mean()))
