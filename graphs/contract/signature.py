"""Signature: the inputs and outputs of an exported graph."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any, Literal

from spaceport.graphs.contract.dtypes import DTYPES
from spaceport.graphs.contract.json_fields import is_whole

Lowering = Literal["scatter", "append"]
Precision = Literal["float32", "float16", "bfloat16"]

Weights = Literal["same", "int8", "int4", "float8"]
# How the inputs of layers with quantized weights are quantized: to two 8-bit limbs, to 8 bits, or not at all.
Activations = Literal["int8x2", "int8", "float"]

# How keys and values are stored: in the type of the graph, or in 8 bits.
KvCache = Literal["same", "int8"]

LOWERINGS: tuple[Lowering, ...] = ("scatter", "append")
PRECISIONS: tuple[Precision, ...] = ("float32", "float16", "bfloat16")
WEIGHTS: tuple[Weights, ...] = ("same", "int8", "int4", "float8")
ACTIVATIONS: tuple[Activations, ...] = ("int8x2", "int8", "float")
KV_CACHES: tuple[KvCache, ...] = ("same", "int8")

STEP_ROWS = 128  # maximum rows per request in a decode step, over all its threads
# Tokens per row that an engine selects: more than the forbidden tokens plus the candidates that a draft needs.
BEST_TOKENS = 16
LOGIT_BYTES = 32 << 20  # logits per request in a prefill call; those of a whole prompt could be gigabytes

# The visible length is rounded up to a multiple of this, so that an engine sees few distinct shapes.
VISIBLE_STEP = 64


# Upper limits, far above every known model: sizes beyond them are damage or an attack.
_MOST = {"layers": 4096, "kv_heads": 4096, "head_dim": 2**16, "vocab_size": 2**24, "window": 2**31 - 1, "lines": 65}


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
    """

    layers: int
    kv_heads: int
    head_dim: int
    vocab_size: int
    dtype: Precision
    lowering: Lowering
    window: int | None = None  # sliding attention window in positions, including the row's own
    lines: int = 1  # of logits per row: the row's own, then that of each draft head over the last hidden state
    kv_cache: KvCache = "same"

    def __post_init__(self) -> None:
        for name in ("layers", "kv_heads", "head_dim", "vocab_size", "lines"):
            value = getattr(self, name)
            if not is_whole(value, 1):
                raise ValueError(f"{name} is {value!r}: expected a whole number of at least 1")
        if self.dtype not in PRECISIONS:
            raise ValueError(f"dtype is {self.dtype!r}: expected one of {', '.join(PRECISIONS)}")
        if self.lowering not in LOWERINGS:
            raise ValueError(f"lowering is {self.lowering!r}: expected one of {', '.join(LOWERINGS)}")
        if self.kv_cache not in KV_CACHES:
            raise ValueError(f"kv_cache is {self.kv_cache!r}: expected one of {', '.join(KV_CACHES)}")
        if self.window is not None and not is_whole(self.window, 1):
            raise ValueError(f"window is {self.window!r}: expected null or a whole number of at least 1")
        for name, most in _MOST.items():
            value = getattr(self, name)
            if value is not None and value > most:
                raise ValueError(f"{name} is {value}: expected at most {most}")

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
        """The KV buffers as inputs: for each layer the key, then the value."""
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
        return 2 * self.layers * requests * self.kv_heads * slots * self.head_dim * DTYPES[self.kv_dtype].bytes

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    def _buffers(self, prefix: str) -> tuple[Tensor, ...]:
        shape = ("B", self.kv_heads, "S", self.head_dim)
        return tuple(
            Tensor(f"{prefix}.{layer}.{kind}", self.kv_dtype, shape)
            for layer in range(self.layers)
            for kind in ("key", "value")
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
