"""The KV buffers of an engine, and the prefixes in them that later requests reuse."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any, NamedTuple

from spaceport.runtime.decode.sequence import KvPrefix, in_order
from spaceport.runtime.decode.sequence_group import SequenceGroup
from spaceport.runtime.engine import Engine

LEAST_COPIED = 32  # tokens: for fewer, a copy saves little
_MOST_LOST = 8  # tokens of a prefix: instead of more, its rows are copied if that overwrites no other prefix


class Match(NamedTuple):
    """The longest common beginning of a sequence and those in the tree."""

    length: int  # tokens
    holders: frozenset[int]  # whose sequences have these tokens in common; none if the length is 0


@dataclass
class _Node:
    """The end of a run of tokens, and the runs that continue it."""

    run: list[int]  # tokens from the parent to this node; at least one, except at the root
    holders: set[int] = field(default_factory=set)  # whose sequences go through all of the run
    children: dict[int, _Node] = field(default_factory=dict)  # by the first token of their run


class RadixTree:
    """One sequence of tokens for each holder; a lookup takes time for the tokens only, not for the holders."""

    def __init__(self) -> None:
        self._root = _Node([])

    def __bool__(self) -> bool:
        return bool(self._root.children)

    def insert(self, tokens: Sequence[int], holder: int) -> None:
        """Add the sequence of a holder, which must have none."""
        node, at = self._root, 0
        while at < len(tokens):
            child = node.children.get(tokens[at])
            if child is None:
                node.children[tokens[at]] = _Node(list(tokens[at:]), {holder})
                return
            common = _common(child.run, tokens, at)
            if common < len(child.run):
                child = _split(node, child, common)
            child.holders.add(holder)
            node, at = child, at + common

    def remove(self, tokens: Sequence[int], holder: int) -> None:
        """Remove the sequence that was inserted for a holder."""
        node, at = self._root, 0
        while at < len(tokens):
            child = node.children[tokens[at]]
            child.holders.remove(holder)
            if not child.holders:
                del node.children[tokens[at]]
                break
            node, at = child, at + len(child.run)
        _join(node)

    def longest(self, tokens: Sequence[int]) -> Match:
        """The longest beginning of these tokens that is in the tree."""
        node, at = self._root, 0
        while at < len(tokens):
            child = node.children.get(tokens[at])
            if child is None:
                break
            common = _common(child.run, tokens, at)
            node, at = child, at + common
            if common < len(child.run):
                break
        return Match(at, frozenset(node.holders))


def _common(run: Sequence[int], tokens: Sequence[int], at: int) -> int:
    """Number of tokens of a run that are equal to those from an index on."""
    rest = tokens[at : at + len(run)]
    if rest == run:
        return len(run)
    return next((index for index, (one, other) in enumerate(zip(rest, run, strict=False)) if one != other), len(rest))


def _split(parent: _Node, child: _Node, length: int) -> _Node:
    """Split a run after some tokens; returns the new node between."""
    between = _Node(child.run[:length], set(child.holders), {child.run[length]: child})
    parent.children[child.run[0]] = between
    child.run = child.run[length:]
    return between


def _join(node: _Node) -> None:
    """Join a node with its only child if the same sequences go through both."""
    if len(node.children) != 1 or not node.run:
        return
    (child,) = node.children.values()
    if child.holders == node.holders:
        node.run, node.children = node.run + child.run, child.children


NO_MATCH = Match(0, frozenset())


@dataclass
class Entry:
    """A prefix in the KV buffers of one index."""

    prefix: KvPrefix
    salt: str
    used: int  # when it was stored or reused last: a counter; 0: never again unless nothing else matches


class PrefixCache:
    """The prefixes in KV buffers, at most one for each index; it holds no rows itself."""

    def __init__(self) -> None:
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


class FreeBuffers:
    """The KV buffers that no request uses; their contents stay reusable until a request gets them."""

    def __init__(self, count: int, cache: PrefixCache | None = None) -> None:
        self._free = set(range(count))
        self._spoilt: set[int] = set()  # free indices whose buffers may hold NaN, to be cleared before they are used
        self._cache = cache

    def __len__(self) -> int:
        return len(self._free)

    @property
    def cached_tokens(self) -> int:
        """Number of tokens in free buffers that a request with the same beginning would reuse."""
        return 0 if self._cache is None else self._cache.tokens(tuple(self._free))

    def take(self, sequences: SequenceGroup, running: Collection[int]) -> int:
        """The index of the buffers that a request gets, beside those of the running ones."""
        index = min(self._free) if self._cache is None else self._choose(self._cache, sequences, running)
        self._free.remove(index)
        return index

    def reusable(self, sequences: SequenceGroup) -> int:
        """Number of its first prompt tokens that a request would find in any buffers."""
        return 0 if self._cache is None else self._match(self._cache, sequences).length

    def prepare(self, engine: Engine, sequences: SequenceGroup, index: int) -> None:
        """Put the rows that a request reuses into its lowest slots, or clear what may be NaN; raises the engine's error."""
        self._clear_spoilt(engine, index)
        if self._cache is None:
            return
        if sequences.cache_salt is not None:
            self._cache.queried_tokens += sequences.statistics.prompt_tokens
        donor, length = self._donor(self._cache, sequences, index)
        if donor is None:
            self._cache.forget(index)
            return
        found = self._cache[donor].prefix.cut(length)
        if donor != index or found.tokens_in_order < length:
            engine.copy(donor, index, found.slots)
        sequences.reuse(length)
        self._cache.hits += 1
        self._cache.hit_tokens += length
        self.store_prompt(index, sequences)

    def store_prompt(self, index: int, sequences: SequenceGroup) -> None:
        """Let others reuse the prompt rows that a request has computed.

        If they hold NaN, so do the logits of all requests that see them: these fail, and their buffers are cleared.
        """
        salt, root = sequences.cache_salt, sequences.threads[0]
        if self._cache is not None and salt is not None:
            self._cache.store(index, salt, in_order(root.tokens[: min(root.fed, root.start)]))

    def release(self, index: int, sequences: SequenceGroup, spoilt: bool) -> None:
        """Take back the buffers of a request that has ended; `spoilt`: they may hold NaN."""
        if spoilt:
            self._spoilt.add(index)
        if self._cache is not None:
            salt, prefix = sequences.cache_salt, sequences.prefix
            if spoilt or salt is None or prefix is None:
                self._cache.forget(index)
            else:
                self._cache.store(index, salt, prefix)
        self._free.add(index)

    def park(self, index: int, sequences: SequenceGroup) -> None:
        """Take back the buffers of a request that goes on in others."""
        if sequences.prefilling:  # its rows may be NaN
            self.release(index, sequences, spoilt=True)
        else:
            self.store_prompt(index, sequences)
            self._free.add(index)

    def restore(self, engine: Engine, sequences: SequenceGroup, index: int, rows: Any) -> None:
        """Put the rows of a request back that had other buffers before; raises the engine's error."""
        self._clear_spoilt(engine, index)
        if self._cache is not None:
            self._cache.forget(index)
        engine.restore(index, rows)
        self.store_prompt(index, sequences)

    def forget_prefixes(self) -> None:
        """Reuse nothing that is in the buffers now."""
        if self._cache is not None:
            self._cache.clear()

    def _clear_spoilt(self, engine: Engine, index: int) -> None:
        if index in self._spoilt:
            engine.clear(index)
            self._spoilt.remove(index)

    def _choose(self, cache: PrefixCache, sequences: SequenceGroup, running: Collection[int]) -> int:
        """Buffers near the running ones, since calls pad the requests between; among equals the least recently used.

        Buffers of which nearly all tokens are reused are taken over, or at least half of them if a copy would overwrite
        another prefix. Otherwise the rows are copied, so that they stay reusable for others.
        """
        match = self._match(cache, sequences)
        low, high = min(running, default=0), max(running, default=0)

        def span(index: int) -> int:
            """Number of requests in a call of the running ones and this one, idle ones between them included."""
            return max(index, high) - min(index, low) + 1 if running else 1

        index = min(self._free, key=lambda one: (span(one), cache[one].used if one in cache else -1, one))
        near = [donor for donor in self._whole(cache, match, index, self._free) if span(donor) == span(index)]
        return min(near, key=lambda one: len(cache[one].prefix.tokens)) if near else index

    def _match(self, cache: PrefixCache, sequences: SequenceGroup) -> Match:
        salt = sequences.cache_salt
        return NO_MATCH if salt is None else cache.longest(salt, sequences.reusable)

    def _whole(self, cache: PrefixCache, match: Match, index: int, among: Collection[int]) -> list[int]:
        """The buffers whose prefix is given up rather than that in the buffers of an index."""
        most = match.length if index in cache and cache[index].used else _MOST_LOST  # tokens that are given up
        return [
            one for one in match.holders.intersection(among) if len(cache[one].prefix.tokens) - match.length <= most
        ]

    def _donor(self, cache: PrefixCache, sequences: SequenceGroup, index: int) -> tuple[int | None, int]:
        """The buffers whose rows are reused, those of the request itself if they have them, and the number of rows."""
        match = self._match(cache, sequences)
        whole = self._whole(cache, match, index, {*self._free, index})
        cache.evictions += index in cache and index not in whole
        if index in match.holders:
            cache.touch(index)
            return index, match.length
        if match.length < LEAST_COPIED:
            return None, 0
        donor = max(match.holders, key=lambda holder: cache[holder].used)
        if donor in whole:
            cache.demote(donor)  # the copy takes its part
        else:
            cache.touch(donor)
        return donor, match.length
