"""Buffers: the free KV buffers of an engine, and which of them a request gets."""

from __future__ import annotations

from collections.abc import Collection

from spaceport.runtime.decode.kv_prefix import in_order
from spaceport.runtime.decode.request import Request
from spaceport.runtime.engine import Engine
from spaceport.runtime.scheduling.prefix_cache import NO_MATCH, PrefixCache
from spaceport.runtime.scheduling.radix_tree import Match

LEAST_COPIED = 32  # tokens: for fewer, a copy saves little
_MOST_LOST = 8  # tokens of a prefix: instead of more, its rows are copied if that overwrites no other prefix


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

    def take(self, request: Request, running: Collection[int]) -> int:
        """The index of the buffers that a request gets, beside those of the running ones."""
        index = min(self._free) if self._cache is None else self._choose(self._cache, request, running)
        self._free.remove(index)
        return index

    def reusable(self, request: Request) -> int:
        """Number of its first prompt tokens that a request would find in any buffers."""
        return 0 if self._cache is None else self._match(self._cache, request).length

    def prepare(self, engine: Engine, request: Request, index: int) -> None:
        """Put the rows that a request reuses into its lowest slots, or clear what may be NaN; raises the engine's error."""
        if index in self._spoilt:
            engine.clear(index)
            self._spoilt.remove(index)
        if self._cache is None:
            return
        if request.config.cache_salt is not None:
            self._cache.queried_tokens += request.statistics.prompt_tokens
        donor, length = self._donor(self._cache, request, index)
        if donor is None:
            self._cache.forget(index)
            return
        found = self._cache[donor].prefix.cut(length)
        if donor != index or found.tokens_in_order < length:
            engine.copy(donor, index, found.slots)
        request.reuse(length)
        self._cache.hits += 1
        self._cache.hit_tokens += length
        self.store_prompt(index, request)

    def store_prompt(self, index: int, request: Request) -> None:
        """Let others reuse the prompt rows that a request has computed.

        If they hold NaN, so do the logits of all requests that see them: these fail, and their buffers are cleared.
        """
        salt, root = request.config.cache_salt, request.threads[0]
        if self._cache is not None and salt is not None:
            self._cache.store(index, salt, in_order(root.tokens[: min(root.fed, root.start)]))

    def release(self, index: int, request: Request, spoilt: bool) -> None:
        """Take back the buffers of a request that has ended; `spoilt`: they may hold NaN."""
        if spoilt:
            self._spoilt.add(index)
        if self._cache is not None:
            salt, prefix = request.config.cache_salt, request.prefix
            if spoilt or salt is None or prefix is None:
                self._cache.forget(index)
            else:
                self._cache.store(index, salt, prefix)
        self._free.add(index)

    def forget_prefixes(self) -> None:
        """Reuse nothing that is in the buffers now."""
        if self._cache is not None:
            self._cache.clear()

    def _choose(self, cache: PrefixCache, request: Request, running: Collection[int]) -> int:
        """Buffers near the running ones, since calls pad the requests between; among equals the least recently used.

        Buffers of which nearly all tokens are reused are taken over, or at least half of them if a copy would overwrite
        another prefix. Otherwise the rows are copied, so that they stay reusable for others.
        """
        match = self._match(cache, request)
        low, high = min(running, default=0), max(running, default=0)

        def span(index: int) -> int:
            """Number of requests in a call of the running ones and this one, idle ones between them included."""
            return max(index, high) - min(index, low) + 1 if running else 1

        index = min(self._free, key=lambda one: (span(one), cache[one].used if one in cache else -1, one))
        near = [donor for donor in self._whole(cache, match, index, self._free) if span(donor) == span(index)]
        return min(near, key=lambda one: len(cache[one].prefix.tokens)) if near else index

    def _match(self, cache: PrefixCache, request: Request) -> Match:
        salt = request.config.cache_salt
        return NO_MATCH if salt is None else cache.longest(salt, request.reusable)

    def _whole(self, cache: PrefixCache, match: Match, index: int, among: Collection[int]) -> list[int]:
        """The buffers whose prefix is given up rather than that in the buffers of an index."""
        most = match.length if index in cache and cache[index].used else _MOST_LOST  # tokens that are given up
        return [
            one for one in match.holders.intersection(among) if len(cache[one].prefix.tokens) - match.length <= most
        ]

    def _donor(self, cache: PrefixCache, request: Request, index: int) -> tuple[int | None, int]:
        """The buffers whose rows are reused, those of the request itself if they have them, and the number of rows."""
        match = self._match(cache, request)
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
