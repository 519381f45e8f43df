"""The KV buffers of an engine, and the prefixes in them that later requests reuse."""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any, NamedTuple

import numpy as np

from spaceport.runtime.decode.sequence import KvPrefix, in_order
from spaceport.runtime.decode.sequence_group import SequenceGroup
from spaceport.runtime.engine import Engine, slots_in_order

LEAST_COPIED = 32  # tokens: for fewer, a copy saves little
_MOST_LOST = 8  # tokens of a prefix: instead of more, its rows are copied if that overwrites no other prefix
_SIZE = 4  # bytes of a token as a part of a key


class Match(NamedTuple):
    """The longest common beginning of some tokens and the prefixes in KV buffers."""

    length: int  # tokens
    holders: frozenset[int]  # indices of all buffers that have it; none if the length is 0


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
        self._sorted: list[tuple[str, bytes, int]] = []  # salt, tokens and index of each entry
        self._clock = count(1)
        self.queried_tokens = 0  # prompt tokens of admitted requests
        self.hit_tokens = 0  # of them, tokens whose rows were reused
        self.hits = 0  # requests that reused rows
        self.evictions = 0  # prefixes that were given up for a request with another prompt

    def __contains__(self, index: int) -> bool:
        return index in self._entries

    def __getitem__(self, index: int) -> Entry:
        return self._entries[index]

    def longest(self, salt: str | None, tokens: Sequence[int]) -> Match:
        """The longest beginning of these tokens in any buffers of this salt; None: there is none."""
        if salt is None:
            return NO_MATCH
        key = np.array(tokens, np.uint32).tobytes()
        at = bisect_left(self._sorted, (salt, key))  # of all entries, these neighbours have the most in common
        near = [other for own_salt, other, _ in self._sorted[max(0, at - 1) : at + 1] if own_salt == salt]
        length = max([_common(key, other) for other in near], default=0)
        if not length:
            return NO_MATCH
        size = length * _SIZE
        beginning = salt, key[:size]
        first = bisect_left(self._sorted, beginning)
        end = bisect_right(self._sorted, beginning, first, key=lambda entry: (entry[0], entry[1][:size]))
        return Match(length, frozenset([index for _, _, index in self._sorted[first:end]]))

    def store(self, index: int, salt: str, prefix: KvPrefix) -> None:
        """Replace the prefix of an index."""
        self.forget(index)
        if prefix.tokens:
            insort(self._sorted, (salt, np.array(prefix.tokens, np.uint32).tobytes(), index))
            self._entries[index] = Entry(prefix, salt, next(self._clock))

    def touch(self, index: int) -> None:
        """Note that a prefix was reused."""
        self._entries[index].used = next(self._clock)

    def forget(self, index: int) -> None:
        """Forget the prefix of an index, if it has one."""
        if self._entries.pop(index, None) is not None:
            self._sorted = [entry for entry in self._sorted if entry[2] != index]

    def clear(self) -> None:
        """Forget all prefixes."""
        self._entries.clear()
        self._sorted.clear()

    def tokens(self, indices: Sequence[int]) -> int:
        """Number of tokens in the prefixes of these indices; may be called from any OS thread."""
        found = (self._entries.get(index) for index in indices)
        return sum(len(entry.prefix.tokens) for entry in found if entry is not None)


def _common(first: bytes, second: bytes) -> int:
    """Number of tokens that two sequences begin with."""
    length = min(len(first), len(second)) // _SIZE
    (differ,) = np.nonzero(np.frombuffer(first, np.uint32, length) != np.frombuffer(second, np.uint32, length))
    return int(differ[0]) if differ.size else length


class FreeBuffers:
    """The KV buffers that no request uses; their contents stay reusable until a request gets them."""

    def __init__(self, count: int) -> None:
        self._free = set(range(count))
        self._spoilt: set[int] = set()  # free indices whose buffers may hold NaN, to be cleared before they are used
        self.cache = PrefixCache()

    def __len__(self) -> int:
        return len(self._free)

    @property
    def cached_tokens(self) -> int:
        """Number of tokens in free buffers that a request with the same beginning would reuse."""
        return self.cache.tokens(tuple(self._free))

    def take(self, sequences: SequenceGroup, running: Collection[int]) -> int:
        """The index of the buffers that a request gets, beside those of the running ones."""
        index = self._choose(sequences, running)
        self._free.remove(index)
        return index

    def prepare(self, engine: Engine, sequences: SequenceGroup, index: int) -> None:
        """Put the rows that a request reuses into its lowest slots, or clear what may be NaN; raises the engine's error."""
        self._clear_spoilt(engine, index)
        cache = self.cache
        if sequences.cache_salt is not None:
            cache.queried_tokens += sequences.statistics.prompt_tokens
        donor, length = self._donor(sequences, index)
        if donor is None:
            cache.forget(index)
            return
        slots = cache[donor].prefix.slots[:length]
        if donor != index or slots_in_order(slots) < length:
            engine.copy(donor, index, slots)
        sequences.reuse(length)
        cache.hits += 1
        cache.hit_tokens += length
        self.store_prompt(index, sequences)

    def reusable(self, sequences: SequenceGroup) -> Match:
        """The first prompt tokens of a request that are in any buffers."""
        return self.cache.longest(sequences.cache_salt, sequences.reusable)

    def store_prompt(self, index: int, sequences: SequenceGroup) -> None:
        """Let others reuse the prompt rows that a request has computed.

        If they hold NaN, so do the logits of all requests that see them: these fail, and their buffers are cleared.
        """
        salt, root = sequences.cache_salt, sequences.threads[0]
        if salt is not None:
            self.cache.store(index, salt, in_order(root.tokens[: min(root.fed, root.start)]))

    def release(self, index: int, sequences: SequenceGroup, spoilt: bool) -> None:
        """Take back the buffers of a request that has ended; `spoilt`: they may hold NaN."""
        salt, prefix = sequences.cache_salt, sequences.prefix
        if spoilt:
            self._spoilt.add(index)
        if spoilt or salt is None or prefix is None:
            self.cache.forget(index)
        else:
            self.cache.store(index, salt, prefix)
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
        self.cache.forget(index)
        engine.restore(index, rows)
        self.store_prompt(index, sequences)

    def _clear_spoilt(self, engine: Engine, index: int) -> None:
        if index in self._spoilt:
            engine.clear(index)
            self._spoilt.remove(index)

    def _choose(self, sequences: SequenceGroup, running: Collection[int]) -> int:
        """Buffers near the running ones, since calls pad the requests between; among equals the least recently used.

        Buffers of which nearly all tokens are reused are taken over, or at least half of them if a copy would overwrite
        another prefix. Otherwise the rows are copied, so that they stay reusable for others.
        """
        cache = self.cache
        low, high = min(running, default=0), max(running, default=0)

        def span(index: int) -> int:
            """Number of requests in a call of the running ones and this one, idle ones between them included."""
            return max(index, high) - min(index, low) + 1 if running else 1

        index = min(self._free, key=lambda one: (span(one), cache[one].used if one in cache else -1, one))
        whole = self._whole(self.reusable(sequences), index, self._free)
        near = [donor for donor in whole if span(donor) == span(index)]
        return min(near, key=lambda one: len(cache[one].prefix.tokens)) if near else index

    def _whole(self, match: Match, index: int, among: Collection[int]) -> list[int]:
        """The buffers whose prefix is given up rather than that in the buffers of an index."""
        cache = self.cache
        most = match.length if index in cache and cache[index].used else _MOST_LOST  # tokens that are given up
        return [
            one for one in match.holders.intersection(among) if len(cache[one].prefix.tokens) - match.length <= most
        ]

    def _donor(self, sequences: SequenceGroup, index: int) -> tuple[int | None, int]:
        """The buffers whose rows are reused, those of the request itself if they have them, and the number of rows."""
        cache, match = self.cache, self.reusable(sequences)
        whole = self._whole(match, index, {*self._free, index})
        cache.evictions += index in cache and index not in whole
        if index in match.holders:
            cache.touch(index)
            return index, match.length
        if match.length < LEAST_COPIED:
            return None, 0
        donor = max(match.holders, key=lambda holder: cache[holder].used)
        if donor in whole:
            cache[donor].used = 0  # the first to be given up: the copy takes its part
        else:
            cache.touch(donor)
        return donor, match.length
