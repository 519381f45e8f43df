"""Rounding: what small weights change of what a model says, on texts that the model with its own weights draws."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from transformers import PreTrainedModel

from spaceport.exporter.checkpoint import TokenFlags, load_model, open_checkpoint
from spaceport.exporter.quantization_scales import read_scales
from spaceport.exporter.quiet import quiet_libraries
from spaceport.graphs.contract.signature import Weights
from spaceport.graphs.quantize import QuantizedInputs, quantize_model
from spaceport.runtime.bundle import Bundle

TEXTS = 4
LENGTH = 64  # tokens of a text


@dataclass(frozen=True)
class Agreement:
    """How near a model with rounded weights is to the same model without, over the rows of some texts."""

    weights: Weights
    rows: int
    agreeing: int  # rows whose likeliest token is the same
    divergence: float  # mean of KL(unrounded || rounded), in nats
    inputs: int = 0  # values that were rounded to integers on their way into products
    cut: int = 0  # of them beyond what their scale can tell

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        share = 100 * self.agreeing / self.rows
        return (
            f"weights {self.weights}: top-1 agrees with the unrounded model in {share:.1f} % of {self.rows} rows, "
            f"mean KL {self.divergence:.2g}"
        ) + (f", {self.cut:,} of {self.inputs:,} inputs beyond their calibrated range" if self.inputs else "")


def measure_rounding(bundle: Bundle, folder: Path, remote_code: bool = False, seed: int = 0) -> Agreement | None:
    """How near the bundle's weights are to the checkpoint's, both reckoned with in float32; nothing if none are rounded."""
    quiet_libraries()
    manifest = bundle.manifest
    if manifest.weights == "same":
        return None
    checkpoint = open_checkpoint(folder, TokenFlags(), remote_code)
    with torch.no_grad():
        unrounded = load_model(checkpoint, "float32")
        texts = drawn_texts(unrounded, seed, min(LENGTH, manifest.max_positions))
        expected = log_probabilities(unrounded, texts)
        del unrounded  # two models need not fit into the memory
        rounded = load_model(checkpoint, manifest.signature.dtype)
        scales = read_scales(bundle.path) if manifest.integer_matmuls else None
        found = quantize_model(
            rounded, manifest.weights, manifest.activations, manifest.signature.lowering, scales
        ).integers
        inputs = None if found is None else QuantizedInputs(rounded, found)
        got = log_probabilities(cast(PreTrainedModel, rounded.to(torch.float32)), texts)  # type: ignore[arg-type]
    measured = agreement(manifest.weights, expected, got)
    if inputs is None:
        return measured
    return replace(measured, inputs=inputs.count, cut=sum(inputs.clipped.values()))


def agreement(weights: Weights, expected: Tensor, got: Tensor) -> Agreement:
    """How near log probabilities (rows x vocabulary) are to what is expected."""
    agreeing = int((expected.argmax(-1) == got.argmax(-1)).sum())
    divergence = (expected.exp() * (expected - got)).sum(-1).mean()
    return Agreement(weights, len(expected), agreeing, max(0.0, float(divergence)))


def drawn_texts(model: PreTrainedModel, seed: int, length: int) -> Tensor:
    """Texts as the model writes them when tokens are drawn by its own probabilities, each from a token of its own."""
    vocab = int(model.config.get_text_config().vocab_size)
    first = torch.randint(0, vocab, (TEXTS, 1), generator=torch.Generator().manual_seed(seed))
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return cast(
            Tensor,
            model.generate(  # type: ignore[operator]
                first,
                attention_mask=torch.ones_like(first),
                do_sample=True,
                temperature=1.0,
                top_k=0,
                top_p=1.0,
                max_new_tokens=length - 1,
                min_new_tokens=length - 1,
                pad_token_id=0,
            ),
        )


def log_probabilities(model: PreTrainedModel, texts: Tensor) -> Tensor:
    """Of every token behind every place of the texts: rows x vocabulary."""
    return torch.log_softmax(model(input_ids=texts, use_cache=False).logits.flatten(0, 1).double(), dim=-1)
