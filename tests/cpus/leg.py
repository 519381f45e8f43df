"""A leg: what one CPU guarantees for bundles of all formats; runs on that CPU, emulated or not."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from spaceport.runtime.decoding import Decoding
from spaceport.runtime.sampling.sampler import Sampling
from spaceport.runtime.session import Runtime

COMPLETIONS = 20  # of each bundle, half of them sampled
_TOKENS = 16


def measured(given: str, prompts: list[str]) -> dict[str, Any]:
    """The exactness of a bundle here, and how many of its completions change with default drafts."""
    changed, drafted, (name, _, bundle) = 0, 0, given.partition("=")
    with Runtime.open(bundle, max_seq_len=128, threads=1, step_costs="free") as runtime:
        tokens = [tuple(runtime.tokens_of(prompt)[:24]) for prompt in prompts[: COMPLETIONS // 2]]
        for seed in (None, 1):
            sampling = Sampling(temperature=1.0 if seed else 0.0, seed=seed)
            for prompt in tokens:
                default = Decoding(max_tokens=_TOKENS, sampling=sampling)
                plain = Decoding(max_tokens=_TOKENS, sampling=sampling, mask_slots=0, lookup=0, max_threads=1)
                answer = runtime.generate(prompt, default)
                changed += answer.tokens != runtime.generate(prompt, plain).tokens
                drafted += answer.statistics.candidate_rows
        exactness = str(runtime.exactness)
    counts = {"completions": 2 * len(tokens), "changed": changed, "drafted": drafted}
    return {"bundle": name, "exactness": exactness, **counts}


def main() -> None:
    """Print, as JSON, what each bundle of the arguments, name=folder, guarantees."""
    prompts, *bundles = sys.argv[1:]
    texts = [*json.loads(Path(prompts).read_text("utf-8")).values()]
    lines = [line for text in texts for line in text.splitlines() if len(line) > 20]
    found = [measured(bundle, (lines * COMPLETIONS)[:COMPLETIONS]) for bundle in bundles]
    print(json.dumps({"bundles": found}))


if __name__ == "__main__":
    main()
