"""When requests begin while completions run, so that many requests at a time do not take the interpreter from their steps."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

_BETWEEN = 0.006  # seconds between two requests; each takes about a millisecond of the interpreter
_MOST_WAIT = 0.03  # seconds that a request waits, however many come
_LARGE_REST = 2.0  # times that it took to parse a large body, until the next one is parsed


@dataclass
class Spacing:
    """The earliest times of the next request and of the next large body, in the time of the event loop."""

    _next: float = 0.0
    _next_large: float = 0.0
    _large: asyncio.Lock = field(default_factory=asyncio.Lock)

    def start(self, now: float) -> float:
        """When a request begins that comes now."""
        start = max(now, min(self._next, now + _MOST_WAIT))
        self._next = start + _BETWEEN
        return start

    async def begin(self) -> None:
        """Wait until a request may begin."""
        now = asyncio.get_running_loop().time()
        await asyncio.sleep(self.start(now) - now)

    @asynccontextmanager
    async def one_large(self) -> AsyncIterator[None]:
        """Parse a large body inside the block: one at a time, with rests between them."""
        clock = asyncio.get_running_loop().time
        async with self._large:
            await asyncio.sleep(self._next_large - clock())
            began = clock()
            try:
                yield
            finally:
                self._next_large = clock() + _LARGE_REST * (clock() - began)
