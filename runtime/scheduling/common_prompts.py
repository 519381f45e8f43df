"""Common prompts: the running request that computes the beginning of another one's prompt."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from spaceport.runtime.scheduling.buffers import LEAST_COPIED
from spaceport.runtime.scheduling.task import Task

_BLOCK = 64  # tokens that are compared at once


def find_leader(task: Task, running: Iterable[Task], reusable: int) -> tuple[Task | None, int]:
    """The request to wait for instead of computing a prompt alone, and the number of tokens that both begin with.

    `reusable` is the number of tokens that are found in KV buffers already. A request that waits itself leads none, so
    that no two wait for each other.
    """
    salt = task.request.config.cache_salt
    leader, most = None, reusable + LEAST_COPIED - 1
    if salt is None:
        return leader, 0
    wanted = task.request.reusable
    for other in running:
        if other is task or other.leader is not None or not other.request.prefilling:
            continue
        if other.request.config.cache_salt == salt:
            common = _common(wanted, other.request.threads[0].tokens)
            if common > most:
                leader, most = other, common
    return leader, most if leader is not None else 0


def has_computed(leader: Task, common: int) -> bool:
    """Whether a request has computed this many tokens of its prompt, or computes it no longer."""
    return leader.done or not leader.request.prefilling or leader.request.threads[0].fed >= common


def _common(one: Sequence[int], other: Sequence[int]) -> int:
    """Number of tokens that two sequences begin with."""
    length, at = min(len(one), len(other)), 0
    while at < length and one[at : at + _BLOCK] == other[at : at + _BLOCK]:
        at += _BLOCK
    while at < length and one[at] == other[at]:
        at += 1
    return min(at, length)
