"""Prefix cache: the reusable prefix in each request's KV buffers, and the longest one for a prompt."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count

from spaceport.runtime.decode.kv_prefix import KvPrefix
from spaceport.runtime.scheduling.radix_tree import Match, RadixTree

NO_MATCH = Match(0, frozenset())


@dataclass
class Entry:
    """A prefix in the KV buffers of one index."""

    prefix: KvPrefix
    salt: str
    used: int  # when it was stored or reused last: a counter; 0: never again unless nothing else matches


class PrefixCache:
    """The prefixes in KV buffers, at most one for each index; it holds no rows itself.

    With `in_order`, only rows in the slots of plain decoding are reused: with 8-bit activations, rows in other slots
    differ by a quantization step.
    """

    def __init__(self, in_order: bool = False) -> None:
        self._in_order = in_order
        self._entries: dict[int, Entry] = {}
        self._trees: dict[str, RadixTree] = {}  # by salt
        self._clock = count(1)
        self.queried_tokens = 0  # prompt tokens of admitted requests
        self.hit_tokens = 0  # of them, tokens whose rows were reused
        self.hits = 0  # requests that reused rows
        self.evictions = 0  # prefixes that were given up for a request with another prompt

    def __contains__(self, index: int) -> bool:
        return index in self._entries

    def __getitem__(self, index: int) -> Entry:
        return self._entries[index]

    def longest(self, salt: str, tokens: Sequence[int]) -> Match:
        """The longest beginning of these tokens in any buffers, and the indices of all buffers that have it."""
        tree = self._trees.get(salt)
        return NO_MATCH if tree is None else tree.longest(tokens)

    def store(self, index: int, salt: str, prefix: KvPrefix) -> None:
        """Replace the prefix of an index."""
        self.forget(index)
        if self._in_order:
            prefix = prefix.cut(prefix.tokens_in_order)
        if prefix.tokens:
            self._trees.setdefault(salt, RadixTree()).insert(prefix.tokens, index)
            self._entries[index] = Entry(prefix, salt, next(self._clock))

    def touch(self, index: int) -> None:
        """Note that a prefix was reused."""
        self._entries[index].used = next(self._clock)

    def demote(self, index: int) -> None:
        """Make a prefix the first to be given up."""
        self._entries[index].used = 0

    def forget(self, index: int) -> None:
        """Forget the prefix of an index, if it has one."""
        entry = self._entries.pop(index, None)
        if entry is not None:
            tree = self._trees[entry.salt]
            tree.remove(entry.prefix.tokens, index)
            if not tree:
                del self._trees[entry.salt]

    def clear(self) -> None:
        """Forget all prefixes."""
        self._entries.clear()
        self._trees.clear()

    def tokens(self, indices: Sequence[int]) -> int:
        """Number of tokens in the prefixes of these indices; may be called from any OS thread."""
        found = (self._entries.get(index) for index in indices)
        return sum(len(entry.prefix.tokens) for entry in found if entry is not None)
