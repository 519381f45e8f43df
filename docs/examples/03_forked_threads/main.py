"""Let a model fork its answer into threads that decode side by side."""

import sys

from spaceport import Decoding, Runtime

CHAT = [{"role": "user", "content": "Explain the parameters of move( src, dst, copy = None )"}]

with Runtime.open(sys.argv[1]) as runtime:
    forked = runtime.generate(CHAT, Decoding(max_tokens=200))
    unforked = runtime.generate(CHAT, Decoding(max_tokens=200, fork=False))
    plain = runtime.generate(CHAT, Decoding(max_tokens=200, fork=False, mask_slots=0))

print(forked.text)
print("---")
for thread in forked.threads:
    name = ".".join(map(str, thread.path)) or "root"
    print(f"thread {name}: {len(thread.tokens)} tokens, ending {thread.ending}")
print("---")
for name, completion in (("forked", forked), ("one thread", unforked), ("one thread, no drafts", plain)):
    print(f"{name}: {completion.statistics.tokens} tokens in {completion.statistics.steps} steps")
