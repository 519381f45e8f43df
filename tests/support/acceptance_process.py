"""Acceptance process: steps of one thread whose drafts are accepted as a table says, timed with a cost table."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from spaceport.graphs.contract.manifest import TokenIds
from spaceport.runtime.decode.accept import Verdict
from spaceport.runtime.decode.draft import Candidates, DraftConfig
from spaceport.runtime.decode.drafter import TreeDrafter
from spaceport.runtime.decode.plan import Part, plan_thread
from spaceport.runtime.decode.planner import DraftPlanner, SharedCall, Sharing
from spaceport.runtime.decode.threads import Thread, new_thread

TOKENS = TokenIds(mask=(999,))
Fate = Callable[[int, int], bool]  # index of the token in the text, depth of the mask slot -> whether it is right
CLAIMED = 0.7  # probability that each mask slot gives to its token


@dataclass
class Spent:
    """Tokens, steps, rows and time of a completion."""

    tokens: int = 0
    steps: int = 0
    rows: int = 0
    time: float = 0.0  # plain steps

    @property
    def speedup(self) -> float:
        return self.tokens / self.time


def decode(
    planner: DraftPlanner,
    draft_config: DraftConfig,
    fate: Fate,
    length: int,
    kind: str = "",
    on_step: Callable[[int], None] | None = None,
) -> Spent:
    """Decode at least `length` tokens; drafts are chains, since each mask slot proposes one token."""
    drafter = TreeDrafter(draft_config, planner, kind)
    thread, spent = new_thread([1, 2, 3], 8), Spent()
    thread.fed = 2
    plain = planner.costs.seconds(1)
    while spent.tokens < length:
        draft = drafter.draft(thread, 10**6, 64, Sharing(1, 64))
        part = plan_thread(thread, draft, TOKENS, 512)
        spent.tokens += _write(drafter, part, fate)
        spent.steps += 1
        spent.rows += part.layout.rows
        spent.time += planner.costs.seconds(part.layout.rows) / plain
        if on_step is not None:
            on_step(part.layout.rows)
    return spent


def decode_together(planner: DraftPlanner, draft_config: DraftConfig, fates: Sequence[Fate], steps: int) -> Spent:
    """Completions that share every call; the time is that of the calls, in plain steps."""
    drafters = [TreeDrafter(draft_config, planner, "") for _ in fates]
    threads = [new_thread([1, 2, 3], 8) for _ in fates]
    spent, plain = Spent(), planner.costs.seconds(1, len(fates), 64)
    for thread in threads:
        thread.fed = 2
    for _ in range(steps):
        call = SharedCall(len(fates))
        pairs = list(zip(drafters, threads, fates, strict=True))
        drafts = [drafter.draft(thread, 10**6, 64, Sharing(1, 64, call)) for drafter, thread, _ in pairs]
        call.decide()
        assert call.width is not None
        parts = [
            plan_thread(thread, draft.cut(call.width, "shared_call"), TOKENS, 512)
            for draft, thread in zip(drafts, threads, strict=True)
        ]
        for (drafter, _, fate), part in zip(pairs, parts, strict=True):
            spent.tokens += _write(drafter, part, fate)
        spent.time += planner.costs.seconds(max(part.layout.rows for part in parts), len(fates), 64) / plain
    return spent


def _write(drafter: TreeDrafter, part: Part, fate: Fate) -> int:
    """Verify a step and append its tokens; returns their number."""
    thread, verdict = part.thread, _verdict(part, fate)
    drafter.learn(part, verdict)
    thread.tokens += verdict.tokens
    thread.fed = len(thread.tokens) - 1
    thread.candidates = verdict.candidates
    return len(verdict.tokens)


def _verdict(part: Part, fate: Fate) -> Verdict:
    """The verdict on a draft whose tokens are their depths; a wrong token does not occur again."""
    thread, layout = part.thread, part.layout
    at = len(thread.tokens)
    node, kept = 0, list(range(layout.known))
    tokens = []
    for index, parent in enumerate(part.draft.parents):
        if parent == node and part.draft.tokens[index] == _right(at + len(tokens)):
            node = index + 1
            kept.append(layout.nodes[node])
            tokens.append(part.draft.tokens[index])
    tokens.append(_right(at + len(tokens)))
    following = at + len(tokens)
    candidates = tuple(_candidates(thread, following, depth, fate) for depth in range(len(layout.groups[node])))
    return Verdict(tuple(kept), tuple(tokens), candidates)


def _candidates(thread: Thread, following: int, depth: int, fate: Fate) -> Candidates:
    index = following + depth
    return Candidates((_right(index) if fate(index, depth) else 900,), (CLAIMED,))


def _right(index: int) -> int:
    return index % 800
