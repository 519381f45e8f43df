"""Signature: the inputs and outputs of an exported graph."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Literal, get_args

from spaceport.graphs.contract.json_fields import between

Lowering = Literal["scatter", "append"]
Precision = Literal["float32", "float16", "bfloat16"]

# How keys and values are stored: in the type of the graph, or in 8 bits with a scale for each slot and head.
KvCache = Literal["same", "int8"]

LOWERINGS: tuple[Lowering, ...] = get_args(Lowering)
PRECISIONS: tuple[Precision, ...] = get_args(Precision)


@dataclass(frozen=True)
class Dtype:
    """A tensor type; numpy has those of the same name, except bfloat16."""

    bytes: int  # of one element
    onnx: int  # element type number: onnx.TensorProto.DataType
    onnxruntime: str  # T in "tensor(T)", the type of session inputs and outputs
    tensorrt: str  # member of tensorrt.DataType


DTYPES = {
    "float32": Dtype(4, 1, "float", "FLOAT"),
    "float16": Dtype(2, 10, "float16", "HALF"),
    "bfloat16": Dtype(2, 16, "bfloat16", "BF16"),
    "int64": Dtype(8, 7, "int64", "INT64"),
    "int8": Dtype(1, 3, "int8", "INT8"),
    "bool": Dtype(1, 9, "bool", "BOOL"),
}

STEP_ROWS = 128  # maximum rows per request in a decode step, over all its threads
# Tokens per row that an engine selects: more than the forbidden tokens plus the candidates that a draft needs.
BEST_TOKENS = 16
LOGIT_BYTES = 32 << 20  # logits per request in a prefill call; those of a whole prompt could be gigabytes

# The visible length is rounded up to a multiple of this, so that an engine sees few distinct shapes.
VISIBLE_STEP = 64


@dataclass(frozen=True)
class Tensor:
    """A graph input or output; a named dimension is dynamic."""

    name: str
    dtype: str
    shape: tuple[int | str, ...]


@dataclass(frozen=True)
class Signature:
    """The sizes and types that determine every input and output of a graph.

    Dimensions: B requests, T rows, R rows with logits, L lines of logits, A visible length, S KV slots per request.
    The upper limits are far above every known model: sizes beyond them are damage or an attack.
    """

    layers: Annotated[int, between(1, 4096)]
    kv_heads: Annotated[int, between(1, 4096)]
    head_dim: Annotated[int, between(1, 2**16)]
    vocab_size: Annotated[int, between(1, 2**24)]
    dtype: Precision
    lowering: Lowering
    # sliding attention window in positions, including the row's own
    window: Annotated[int, between(1, 2**31 - 1)] | None = None
    # of logits per row: the row's own, then that of each draft head over the last hidden state
    lines: Annotated[int, between(1, 65)] = 1
    kv_cache: KvCache = "same"

    @cached_property
    def rows(self) -> tuple[Tensor, ...]:
        """The inputs that describe the rows of a step, in graph order."""
        return (
            Tensor("input_ids", "int64", ("B", "T")),
            Tensor("position_ids", "int64", ("B", "T")),
            Tensor("slot_ids", "int64", ("B", "T")),
            Tensor("attention_mask", "bool", ("B", 1, "T", "A")),
            *((Tensor("sliding_attention_mask", "bool", ("B", 1, "T", "A")),) if self.window else ()),
            Tensor("logit_rows", "int64", ("B", "R")),
        )

    @cached_property
    def past(self) -> tuple[Tensor, ...]:
        """The KV buffers as inputs: for each layer the key, then the value, then scales if they have them."""
        return self._buffers("past_key_values")

    @cached_property
    def present(self) -> tuple[Tensor, ...]:
        """The KV buffers as outputs: in the order of `past`, bound to the same memory."""
        return self._buffers("present")

    @property
    def inputs(self) -> tuple[Tensor, ...]:
        return (*self.rows, *self.past)

    @property
    def outputs(self) -> tuple[Tensor, ...]:
        rows = "L" if self.lines > 1 else "R"
        return (Tensor("logits", "float32", ("B", rows, self.vocab_size)), *self.present)

    @property
    def row_logits(self) -> int:
        """Number of logits per row."""
        return self.lines * self.vocab_size

    @property
    def kv_dtype(self) -> Literal[Precision, "int8"]:
        """The type of the KV buffers."""
        return self.dtype if self.kv_cache == "same" else self.kv_cache

    def kv_bytes(self, requests: int, slots: int) -> int:
        """Total bytes of the KV buffers."""
        values = self.head_dim * DTYPES[self.kv_dtype].bytes + (DTYPES["float32"].bytes if self.has_scales else 0)
        return 2 * self.layers * requests * self.kv_heads * slots * values

    @property
    def has_scales(self) -> bool:
        """Whether keys and values have a scale for each slot and head."""
        return self.kv_cache == "int8"

    def _buffers(self, prefix: str) -> tuple[Tensor, ...]:
        values = (self.kv_dtype, ("B", self.kv_heads, "S", self.head_dim))
        kinds: dict[str, tuple[str, tuple[int | str, ...]]] = {"key": values, "value": values}
        if self.has_scales:  # those of keys, then those of values
            kinds["scales"] = ("float32", ("B", 2 * self.kv_heads, "S"))
        return tuple(
            Tensor(f"{prefix}.{layer}.{kind}", *tensor)
            for layer in range(self.layers)
            for kind, tensor in kinds.items()
        )


def visible_length(slots: int) -> int:
    """The smallest allowed visible length that covers the first `slots` slots."""
    return max(1, -(-slots // VISIBLE_STEP)) * VISIBLE_STEP


def selection_width(vocab_size: int) -> int:
    """Number of values in the selection of a row: logits and ids of the best tokens, and the log-sum-exp."""
    return 2 * min(BEST_TOKENS, vocab_size) + 1


def logit_rows(prompt_rows: int, row_logits: int) -> int:
    """The maximum number of rows with logits per request in a call with up to `prompt_rows` prompt rows.

    `row_logits` is the number of logits of a row.
    """
    return min(prompt_rows, max(STEP_ROWS, LOGIT_BYTES // (4 * row_logits)))
