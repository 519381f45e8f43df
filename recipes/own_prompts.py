"""Own prompts: what a chat model itself writes where a user's message stands.

They resemble the chats that the model was trained on, so they are far more varied than prompts from templates.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from pathlib import Path

from spaceport.runtime.decoding import Decoding
from spaceport.runtime.sampling.sampler import Sampling
from spaceport.runtime.session import Runtime

_REQUESTS = 48  # prompts that are generated at the same time
_LENGTH = range(12, 401)  # characters of a prompt
_MOST_TOKENS = 90


def own_prompts(bundle: Path, wanted: int, seed: int, most: int | None = None) -> list[dict[str, object]]:
    """Different prompts, `wanted` of them, sampled at temperature 1; the same for the same bundle and seed.

    At most `most` are sampled, by default four times as many as wanted: some do not end, or were there before.
    """
    most = 4 * wanted if most is None else most
    with Runtime.open(bundle, max_seq_len=1024, max_requests=_REQUESTS) as runtime:
        texts: dict[str, None] = {}
        for text in _messages(runtime, seed, most):
            if len(texts) == wanted:
                break
            if len(text) in _LENGTH and text not in texts:
                texts[text] = None
                if len(texts) % _REQUESTS == 0:
                    print(f"{len(texts)} of {wanted} prompts", file=sys.stderr, flush=True)
    if len(texts) < wanted:
        raise ValueError(
            f"{bundle}: wrote {len(texts)} different prompts in {most} attempts, expected {wanted}: ask for fewer"
        )
    return [{"kind": "own", "messages": [{"role": "user", "content": text}]} for text in texts]


def _messages(runtime: Runtime, seed: int, most: int) -> Iterator[str]:
    """Finished user messages of the model, in the order of their seeds."""
    opening = _opening(runtime)

    def message(number: int) -> str:
        sampling = Sampling(temperature=1.0, top_p=0.95, seed=seed << 32 | number)
        completion = runtime.generate(opening, Decoding(max_tokens=_MOST_TOKENS, sampling=sampling))
        return completion.text.strip() if completion.ending == "end" else ""

    with ThreadPoolExecutor(_REQUESTS) as pool:
        for first in range(0, most, _REQUESTS):
            yield from filter(None, pool.map(message, range(first, min(first + _REQUESTS, most))))


def _opening(runtime: Runtime) -> list[int]:
    """The tokens before a user's first message: those that two different messages share."""
    first, second = (runtime.tokens_of([{"role": "user", "content": text}]) for text in ("a", "1"))
    length = next(index for index in count() if first[index] != second[index])
    return first[:length]
