"""Signature: the contract between a compiled graph and whoever feeds it."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

from spaceport.graphs.contract.dtypes import DTYPES
from spaceport.graphs.contract.json_fields import is_whole

Lowering = Literal["scatter", "append"]
Precision = Literal["float32", "float16", "bfloat16"]

Weights = Literal["same", "int8", "int4", "float8"]
# How the inputs of products with quantized weights are quantized: not at all, to 8 bits, or to two numbers of 8 bits.
Activations = Literal["int8x2", "int8", "float"]

LOWERINGS: tuple[Lowering, ...] = ("scatter", "append")
PRECISIONS: tuple[Precision, ...] = ("float32", "float16", "bfloat16")
WEIGHTS: tuple[Weights, ...] = ("same", "int8", "int4", "float8")
ACTIVATIONS: tuple[Activations, ...] = ("int8x2", "int8", "float")

STEP_ROWS = 128  # most rows of a request in a step that writes, all its threads together
# Tokens of a row that an engine selects: more than those that may not be written, and the candidates that a draft takes.
BEST_TOKENS = 16
LOGIT_BYTES = 32 << 20  # of logits of prompts' rows in a call: a whole prompt's would be gigabytes

# The visible length is rounded up to a multiple of this, so that few distinct shapes reach an engine.
VISIBLE_STEP = 64


@dataclass(frozen=True)
class Tensor:
    """A graph input or output; a named dimension is dynamic."""

    name: str
    dtype: str
    shape: tuple[int | str, ...]


@dataclass(frozen=True)
class Signature:
    """The facts from which every input and output of a graph follows.

    Dimensions: B requests, T rows, R rows whose logits come out, A visible length, S slots of a request.
    """

    layers: int
    kv_heads: int
    head_dim: int
    vocab_size: int
    dtype: Precision
    lowering: Lowering
    window: int | None = None  # in positions: a row sees the last `window` positions, its own among them

    def __post_init__(self) -> None:
        for name in ("layers", "kv_heads", "head_dim", "vocab_size"):
            value = getattr(self, name)
            if not is_whole(value, 1):
                raise ValueError(f"{name} is {value!r}: expected a whole number of at least 1")
        if self.dtype not in PRECISIONS:
            raise ValueError(f"dtype is {self.dtype!r}: expected one of {', '.join(PRECISIONS)}")
        if self.lowering not in LOWERINGS:
            raise ValueError(f"lowering is {self.lowering!r}: expected one of {', '.join(LOWERINGS)}")
        if self.window is not None and not is_whole(self.window, 1):
            raise ValueError(f"window is {self.window!r}: expected nothing or a whole number of at least 1")

    @property
    def rows(self) -> tuple[Tensor, ...]:
        """The inputs that describe the rows of a step, in the order of the graph."""
        return (
            Tensor("input_ids", "int64", ("B", "T")),
            Tensor("position_ids", "int64", ("B", "T")),
            Tensor("slot_ids", "int64", ("B", "T")),
            Tensor("attention_mask", "bool", ("B", 1, "T", "A")),
            *((Tensor("sliding_attention_mask", "bool", ("B", 1, "T", "A")),) if self.window else ()),
            Tensor("logit_rows", "int64", ("B", "R")),
        )

    @property
    def past(self) -> tuple[Tensor, ...]:
        """The KV buffers as inputs: layer by layer, key before value."""
        return self._buffers("past_key_values")

    @property
    def present(self) -> tuple[Tensor, ...]:
        """The KV buffers as outputs: the same memory as `past`, in the same order."""
        return self._buffers("present")

    @property
    def inputs(self) -> tuple[Tensor, ...]:
        return (*self.rows, *self.past)

    @property
    def outputs(self) -> tuple[Tensor, ...]:
        return (Tensor("logits", "float32", ("B", "R", self.vocab_size)), *self.present)

    def kv_bytes(self, requests: int, slots: int) -> int:
        """Bytes of all KV buffers together."""
        return 2 * self.layers * requests * self.kv_heads * slots * self.head_dim * DTYPES[self.dtype].bytes

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    def _buffers(self, prefix: str) -> tuple[Tensor, ...]:
        shape = ("B", self.kv_heads, "S", self.head_dim)
        return tuple(
            Tensor(f"{prefix}.{layer}.{kind}", self.dtype, shape)
            for layer in range(self.layers)
            for kind in ("key", "value")
        )


def visible_length(slots: int) -> int:
    """The shortest allowed visible length that covers the first `slots` slots."""
    return max(1, -(-slots // VISIBLE_STEP)) * VISIBLE_STEP


def selection_width(vocab_size: int) -> int:
    """Numbers in the selection of a row: scores and tokens of the best ones, and the log of the sum of all exp."""
    return 2 * min(BEST_TOKENS, vocab_size) + 1


def logit_rows(prompt_rows: int, vocab_size: int) -> int:
    """The most rows of a request in a call whose logits are wanted, if it may feed so many rows of a prompt."""
    return min(prompt_rows, max(STEP_ROWS, LOGIT_BYTES // (4 * vocab_size)))
