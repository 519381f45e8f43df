"""Generate several completions at the same time with asyncio."""

import asyncio
import sys

from spaceport import Decoding, QueueFull, Runtime

PROMPTS = ["import json\n", "class Reader:\n", "def parse(text):\n", "for name in names:\n"]


async def main(runtime: Runtime) -> None:
    decoding = Decoding(max_tokens=24, timeout=60)
    completions = await asyncio.gather(*(runtime.agenerate(prompt, decoding) for prompt in PROMPTS))
    for prompt, completion in zip(PROMPTS, completions, strict=True):
        print(repr(prompt), "->", repr(completion.text[:40]))

    streams = [runtime.astream(PROMPTS[0]) for _ in range(8)]  # without a limit: 4 decode, 4 wait
    try:
        runtime.astream(PROMPTS[0])
    except QueueFull:
        print("the queue is full")
    for stream in streams:
        stream.close()


with Runtime.open(sys.argv[1], max_requests=4, queue_limit=4) as opened:
    asyncio.run(main(opened))
