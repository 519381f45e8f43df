"""How closely a quantized model agrees with its checkpoint on texts of its own."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from spaceport.exporter.checkpoint import Checkpoint, TokenFlags, load_model, open_checkpoint, quiet_libraries
from spaceport.exporter.checkpoint_files import ModelFiles
from spaceport.graphs.contract.signature import Signature, visible_length
from spaceport.runtime.backends import open_engine
from spaceport.runtime.bundle import Bundle
from spaceport.runtime.engine import Batch, Engine, EngineOptions
from spaceport.verify.reference import open_reference

TEXTS, LENGTH = 4, 64  # texts that quantization is measured on, and tokens of each


@dataclass(frozen=True)
class Agreement:
    """How closely a quantized model agrees with the unquantized one, over the tokens of sampled texts."""

    format: str
    rows: int
    agreeing: int  # rows with the same top-1 token
    divergence: float  # mean KL(unquantized || quantized), in nats

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        share = 100 * self.agreeing / self.rows
        return (
            f"format {self.format}: top-1 agreement with the unquantized model {share:.1f} % of {self.rows} rows, "
            f"mean KL {self.divergence:.2g}"
        )


def measure_quantization(
    bundle: Bundle, folder: Path, remote_code: bool = False, seed: int = 0, adapter: Path | None = None
) -> Agreement | None:
    """The agreement of PyTorch with the bundle's quantized weights and the checkpoint; None without quantization."""

    def reference(slots: int) -> Engine:
        return open_reference(bundle, folder, slots, TEXTS, "float32", remote_code, adapter=adapter)

    if bundle.manifest.weights == "same":
        return None
    return _measure(bundle, open_checkpoint(folder, TokenFlags(), remote_code, adapter), reference, seed)


def measure_bundle(
    bundle: Bundle, model: Path | ModelFiles, remote_code: bool = False, adapter: Path | None = None
) -> Agreement:
    """The agreement of a bundle on ONNX Runtime with the checkpoint in float32."""

    def engine(slots: int) -> Engine:
        return open_engine(bundle, "onnxruntime", EngineOptions(slots, TEXTS, threads=0))

    return _measure(bundle, open_checkpoint(model, TokenFlags(), remote_code, adapter), engine, length=LENGTH // 2)


def _measure(
    bundle: Bundle, checkpoint: Checkpoint, open_quantized: Callable[[int], Engine], seed: int = 0, length: int = LENGTH
) -> Agreement:
    """The agreement of a quantized engine, which is opened with a number of KV slots, with a checkpoint in float32."""
    quiet_libraries()
    with torch.no_grad():
        unquantized = load_model(checkpoint, "float32")
        texts = sampled_texts(unquantized, seed, min(length, bundle.manifest.max_positions))
        expected = log_probabilities(unquantized, texts)
        del unquantized  # only one model has to fit into memory
    slots = visible_length(texts.shape[1])
    with closing(open_quantized(slots)) as quantized:
        logits = torch.from_numpy(quantized.run(_prompts(quantized.signature, texts, slots)).copy())
        got = torch.log_softmax(logits[:, :: quantized.signature.lines].flatten(0, 1).double(), dim=-1)
    return agreement(bundle.manifest.format, expected, got)


def agreement(name: str, expected: Tensor, got: Tensor) -> Agreement:
    """How closely log probabilities agree with the expected ones (both rows x vocabulary)."""
    agreeing = int((expected.argmax(-1) == got.argmax(-1)).sum())
    divergence = (expected.exp() * (expected - got)).sum(-1).mean()
    return Agreement(name, len(expected), agreeing, max(0.0, float(divergence)))


def sampled_texts(model: PreTrainedModel, seed: int, length: int) -> Tensor:
    """Texts sampled from the model at temperature 1, each after its own random first token."""
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


def _prompts(signature: Signature, texts: Tensor, slots: int) -> Batch:
    """A call with all tokens of texts of the same length."""
    count, length = texts.shape
    distance = np.arange(length)[:, None] - np.arange(slots)[None]
    causal, window = (
        np.broadcast_to((distance >= 0) & (distance < size), (count, 1, length, slots)).copy()
        for size in (length, signature.window or length)
    )
    order = np.tile(np.arange(length), (count, 1))
    return Batch(0, texts.numpy(), order, order, causal, order, window if signature.window else None)


def log_probabilities(model: PreTrainedModel, texts: Tensor) -> Tensor:
    """The log probabilities of every token at every position of the texts: rows x vocabulary."""
    return torch.log_softmax(model(input_ids=texts, use_cache=False).logits.flatten(0, 1).double(), dim=-1)
