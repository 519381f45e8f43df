"""Layout: which weights of the converted model the tensors of a published checkpoint hold."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from spaceport.exporter.sar_config import CheckpointError

Shape = tuple[int, ...]

# Tables that the original code computes from the configuration and stored with the weights.
_COMPUTED = re.compile(
    r"(.+\.)?(rotary_emb|rotary_pos_emb)\.inv_freq|transformer\.h\.\d+\.attn\.(masked_bias|logn_tensor)"
)


@dataclass(frozen=True)
class Part:
    """Consecutive rows of a published tensor, which are one weight of the converted model."""

    weight: str  # name in the converted model
    rows: int


@dataclass(frozen=True)
class Source:
    """A tensor of a published checkpoint."""

    name: str
    columns: int | None  # None: a vector
    parts: tuple[Part, ...]  # from the first row to the last
    copy_of: str | None = None  # of a tied head: it may be missing, or has the values of this tensor

    @property
    def shape(self) -> Shape:
        rows = sum(part.rows for part in self.parts)
        return (rows,) if self.columns is None else (rows, self.columns)

    def slices(self) -> Iterator[tuple[str, slice]]:
        """The weights in this tensor, each with its rows."""
        start = 0
        for part in () if self.copy_of is not None else self.parts:
            yield part.weight, slice(start, start + part.rows)
            start += part.rows


def matrix(name: str, columns: int, *parts: tuple[str, int]) -> Source:
    """A matrix whose rows are those of one weight or of several weights."""
    return Source(name, columns, tuple(Part(weight, rows) for weight, rows in parts))


def vector(name: str, *parts: tuple[str, int]) -> Source:
    """A vector whose values are those of one weight or of several weights."""
    return Source(name, None, tuple(Part(weight, rows) for weight, rows in parts))


def tied(head: Source, embeddings: str) -> Source:
    """A head that is tied to the embeddings."""
    return Source(head.name, head.columns, head.parts, copy_of=embeddings)


def check_tensors(owner: object, layout: Iterable[Source], found: Mapping[str, Shape]) -> None:
    """Raise for missing and wrongly shaped tensors, and for those that no weight is made from."""
    expected = {source.name: source for source in layout}
    missing = [name for name, source in expected.items() if name not in found and source.copy_of is None]
    if missing:
        raise CheckpointError(
            f"{owner}: tensor {_some(missing)} missing: expected the {len(expected)} tensors that config.json describes; copy "
            "or download the checkpoint again"
        )
    unused = [name for name in found if name not in expected and not _COMPUTED.fullmatch(name)]
    if unused:
        raise CheckpointError(
            f"{owner}: tensor {_some(sorted(unused))} unknown: expected the {len(expected)} tensors that config.json describes, "
            "and no adapters, prefixes or quantized weights; merge or dequantize them with the software that wrote them"
        )
    for name, source in expected.items():
        if name in found and found[name] != source.shape:
            raise CheckpointError(
                f"{owner}: tensor {name} has shape {found[name]}: expected {source.shape} from config.json; copy or download "
                "the checkpoint again"
            )


def _some(names: list[str]) -> str:
    """The first names of a list, with the verb that follows them."""
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return f"{names[0]}{more} {'are' if more else 'is'}"
