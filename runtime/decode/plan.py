"""The rows of a step, whose parents are stored and whose visible slots are derived, and which of them are accepted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from spaceport.graphs.contract.draft_methods import Group, MaskLayout
from spaceport.graphs.contract.faults import OptionFault
from spaceport.graphs.contract.manifest import TokenIds
from spaceport.runtime.decode.draft import PLAIN, Candidates, Draft
from spaceport.runtime.decode.sequence import NotANumber, TokenSelector, TokenSequence

NO_PARENT = -1
NO_ROWS = np.zeros(0, np.int64)
_CACHED = 4  # maximum known tokens of cached layouts: those of prefill chunks are large and seldom repeat
# Cached layouts of 3 kB; 600 mixed requests have about 30, and rare ones would fill a larger cache for hours.
_LAYOUTS = 128


@dataclass(frozen=True)
class Layout:
    """The shape of one thread's rows: known tokens in a chain, then the draft tree with its mask slots."""

    parents: NDArray[np.int64]  # rows; NO_PARENT: the parent is the thread's last token in the KV cache
    offsets: NDArray[np.int64]  # rows; position minus that of the first row
    mask_depths: NDArray[np.int64]  # rows; index of a mask row in its group, or -1
    mask_rows: NDArray[np.int64]
    candidates: NDArray[np.int64]  # the row of each candidate
    known: int  # rows of known tokens
    nodes: tuple[int, ...]  # row of each node of the draft: the last known token, then the candidates
    groups: tuple[tuple[int, ...], ...]  # rows of the mask slots behind each node, without the row that leads a group
    visible: NDArray[np.bool_]  # rows x rows; True = may see: itself, its ancestors, in a block also all of its group
    wanted: NDArray[np.int64]  # rows whose logits are needed: the last known token and everything after it
    drafted: tuple[int, ...]  # candidates at each depth
    rows: int
    # rows; 0: known tokens and the first candidate at each depth, 1: others, 2: mask slots
    slot_ranks: NDArray[np.int64]
    slot_order: NDArray[np.int64]  # the rows in the order in which they get slots


class Part(NamedTuple):
    """The rows of one thread in a step."""

    thread: TokenSequence
    draft: Draft
    layout: Layout
    tokens: NDArray[np.int64]  # rows
    positions: NDArray[np.int64]  # rows
    rows_wanted: NDArray[np.int64]  # the rows whose logits are needed
    complete: bool  # False for a prefill chunk that is not the last: it generates nothing
    # row of the plan with another thread's [Fork] that is the parent of this part's first row
    anchor: int | None = None


def joined(parts: Sequence[Part]) -> Sequence[NDArray[np.int64]]:
    """Tokens, positions and rows whose logits are needed, of several threads; and the rows in the order of their slots.

    The most probable path comes first. If it is accepted, its rows are in the slots of plain decoding, and later rows
    add up in the same order.
    """
    starts = accumulate([part.layout.rows for part in parts], initial=0)
    return (
        np.concatenate([part.tokens for part in parts]),
        np.concatenate([part.positions for part in parts]),
        np.concatenate([part.rows_wanted + start for part, start in zip(parts, starts, strict=False)]),
        np.argsort(np.concatenate([part.layout.slot_ranks for part in parts]), kind="stable"),
    )


def plan_thread(
    thread: TokenSequence,
    draft: Draft,
    tokens: TokenIds,
    chunk: int,
    anchor: int | None = None,
    echo: int | None = None,
) -> Part:
    """The next rows of a thread: a chunk of the known tokens that were not fed yet, and the draft behind the last of them.

    With an anchor, that row feeds the [Fork] that started the thread. `echo` is the first position from which the logits of
    known tokens are needed too.
    """
    begin = thread.fed + (anchor is not None)
    pending = len(thread.tokens) - begin
    complete = pending <= chunk
    known = min(pending, chunk)
    if not complete:
        draft = PLAIN
    layout = (_small_layout if known <= _CACHED else lay_out)(
        known, draft.parents, draft.masks, draft.mask_layout.shift, draft.mask_layout.group
    )
    ids = np.empty(layout.rows, np.int64)
    ids[:known] = thread.tokens[begin : begin + known]
    if draft.tokens:
        ids[layout.candidates] = draft.tokens
    if layout.mask_rows.size:
        masks = tokens.mask
        ids[layout.mask_rows] = np.array(masks)[layout.mask_depths[layout.mask_rows]] if len(masks) > 1 else masks[0]
    if echo is None:
        wanted = layout.wanted if complete else NO_ROWS
    else:
        first = max(0, echo - begin)
        wanted = np.arange(min(first, known - 1) if complete else first, layout.rows)
    return Part(thread, draft, layout, ids, layout.offsets + begin, wanted, complete, anchor)


def lay_out(
    known: int, draft_parents: tuple[int, ...], masks: tuple[int, ...], shift: bool = True, group: Group = "causal"
) -> Layout:
    """The rows of `known` tokens and a draft of this shape; the mask rows of a node follow it directly.

    `shift` and `group` are those of the mask layout.
    """
    mask_layout = MaskLayout(shift, group)
    parents = list(range(-1, known - 1))
    mask_depths = [-1] * known
    path = _first_path(draft_parents)
    ranks = [0] * known
    nodes: list[int] = []
    groups: list[tuple[int, ...]] = []
    for node, count in enumerate(masks):
        if node == 0:
            nodes.append(known - 1)
        else:
            nodes.append(len(parents))
            parents.append(nodes[draft_parents[node - 1]])
            mask_depths.append(-1)
            ranks.append(int(node not in path))
        rows = mask_layout.rows(count)
        span = range(len(parents), len(parents) + rows)
        parents.extend((nodes[node], *span)[:rows])
        mask_depths.extend(range(rows))
        ranks.extend([2] * rows)
        groups.append(tuple(span[rows - count :]))
    ancestry = _ancestry(parents)
    offsets = ancestry.sum(axis=1) - 1
    depths = np.array(mask_depths, np.int64)
    layout = Layout(
        parents=np.array(parents, np.int64),
        offsets=offsets,
        mask_depths=depths,
        mask_rows=np.flatnonzero(depths >= 0),
        candidates=np.array(nodes[1:], np.int64),
        known=known,
        nodes=tuple(nodes),
        groups=tuple(groups),
        visible=_with_blocks(ancestry, groups, mask_layout.lead) if group == "block" else ancestry,
        wanted=np.arange(known - 1, len(parents)),
        drafted=tuple(np.bincount(offsets[nodes[1:]] - known).tolist()),
        rows=len(parents),
        slot_ranks=np.array(ranks, np.int64),
        slot_order=np.argsort(ranks, kind="stable"),
    )
    for array in vars(layout).values():
        if isinstance(array, np.ndarray):
            array.setflags(write=False)  # one layout serves many steps
    return layout


def _with_blocks(ancestry: NDArray[np.bool_], groups: Sequence[tuple[int, ...]], lead: int) -> NDArray[np.bool_]:
    """Visibility of rows whose groups of mask rows see each other."""
    visible: NDArray[np.bool_] = ancestry.copy()
    for group in groups:
        if group:
            block = slice(group[0] - lead, group[-1] + 1)
            visible[block, block] = True
    return visible


def _first_path(draft_parents: tuple[int, ...]) -> frozenset[int]:
    """The first candidate behind the last known token, the first one behind that, and so on: the most probable path."""
    path = [0]
    for node, parent in enumerate(draft_parents, 1):
        if parent == path[-1]:
            path.append(node)
    return frozenset(path)


_small_layout = lru_cache(maxsize=_LAYOUTS)(lay_out)


def mark_visible(parts: Sequence[Part], slots: NDArray[np.int64], mask: NDArray[np.bool_]) -> None:
    """Write the visibility mask of a step, rows x slots: a row sees what its thread sees, and rows of the same step.

    The first rows of a child thread may have the [Fork] as parent that another thread feeds in the same step.
    """
    first, visible = 0, mask.shape[1]
    for part in parts:
        end = first + part.layout.rows
        mask[first:end] = part.thread.visible[:visible]
        if part.layout.rows == 1:  # much faster than with arrays
            mask[first, slots[first]] = True
        else:
            mask[first:end, slots[first:end]] = part.layout.visible
        if part.anchor is not None:
            mask[first:end, slots[part.anchor]] = True
        first = end


def within(
    window: int, mask: NDArray[np.bool_], positions: NDArray[np.int64], slot_positions: NDArray[np.int64]
) -> NDArray[np.bool_]:
    """The part of a mask that lies within the last `window` positions of each row."""
    near: NDArray[np.bool_] = positions[:, None] - slot_positions[None, : mask.shape[1]] < window
    return mask & near


def _ancestry(parents: Sequence[int]) -> NDArray[np.bool_]:
    lines: list[int] = []  # a bit for each row itself and for each of its ancestors
    for row, parent in enumerate(parents):
        lines.append(1 << row | (0 if parent == NO_PARENT else lines[parent]))
    size = (len(lines) + 7) // 8
    packed = np.frombuffer(b"".join([line.to_bytes(size, "little") for line in lines]), np.uint8)
    bits = np.unpackbits(packed.reshape(len(lines), size), axis=1, count=len(lines), bitorder="little")
    return bits.view(np.bool_)


class Verdict(NamedTuple):
    """The result of a step for one thread: retained rows and generated tokens."""

    retained: tuple[int, ...]  # rows of the part whose KV slots are retained
    tokens: tuple[int, ...]  # the accepted candidates, then the model's own next token
    candidates: tuple[Candidates, ...]  # what the mask slots or heads predict after those, by position
    sources: tuple[str, ...] = ()  # of each accepted candidate, as in its draft

    @property
    def accepted(self) -> int:
        """Number of accepted candidates."""
        return max(0, len(self.tokens) - 1)


def accept(
    part: Part, logits: NDArray[np.float32], selector: TokenSelector, most: int = 1, lines: int = 1, heads: int = 0
) -> Verdict:
    """The verdict on a thread's rows: walks the draft along the tokens that the model itself selects.

    The generated tokens are therefore those of plain decoding.

    `logits` has `lines` lines for each wanted row of the part: its own, then those of the heads, of which the first
    `heads` are used. `most` is the number of candidates to take from each mask slot or head.
    """
    layout, thread, draft, known = part.layout, part.thread, part.draft, part.layout.known
    if not part.complete:
        return Verdict(tuple(range(known)), (), ())
    first = int(part.rows_wanted[0])
    node, retained, nodes = 0, list(range(known)), []
    tokens = [selector.token(logits[(known - 1 - first) * lines], thread, ())]
    for child, candidate in enumerate(draft.tokens, 1):
        if draft.parents[child - 1] != node or candidate != tokens[-1]:  # a candidate comes after its parent
            continue
        row = layout.nodes[child]
        try:
            following = selector.token(logits[(row - first) * lines], thread, tokens)
        except (NotANumber, OptionFault):
            break  # the completion may end before this position; if it does not, the next step raises the error
        node = child
        nodes.append(child)
        retained.append(row)
        tokens.append(following)
    sources = tuple([draft.sources[node - 1] for node in nodes]) if draft.sources else ()
    candidates: tuple[Candidates, ...] = ()
    proposed, group = None, layout.groups[node]  # lines with predictions for the tokens after that of the own line
    if heads:
        own = (layout.nodes[node] - first) * lines
        proposed = slice(own + 1, own + 1 + heads)
    elif group:
        proposed = slice((group[0] - first) * lines, (group[-1] + 1 - first) * lines, lines)
    if proposed is not None:
        candidates = selector.candidates(logits[proposed], thread, len(thread.tokens) + len(tokens), most)
    return Verdict(tuple(retained), tuple(tokens), candidates, sources)
