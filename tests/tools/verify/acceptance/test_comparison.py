"""Comparison: the steps of prompt lookup are those that the runtime takes for the same answers."""

from __future__ import annotations

import json
from pathlib import Path

from spaceport.runtime.decoding import Decoding
from spaceport.runtime.session import Runtime
from spaceport.tools.verify.acceptance.comparison import count_drafted
from spaceport.tools.verify.acceptance.reference_answers import ReferenceAnswer
from support.paths import TINY

PROMPTS: dict[str, str] = json.loads((TINY / "prompts.json").read_text("utf-8"))


def test_steps_with_prompt_lookup_are_those_of_the_runtime(tiny_bundle: Path) -> None:
    with Runtime.open(tiny_bundle, max_seq_len=256, threads=1, step_costs="free") as runtime:
        prompts = [tuple(runtime.tokens_of(prompt)) for prompt in list(PROMPTS.values())[:2]]
        counted = count_drafted(runtime, [ReferenceAnswer(1, prompt, ()) for prompt in prompts], 24, 3)
        for found, slots in ((counted.lookup, 0), (counted.together, 3)):
            decoding = Decoding(max_tokens=24, mask_slots=slots, lookup=16, prefix_cache=False)
            own = [runtime.generate(prompt, decoding).statistics for prompt in prompts]
            assert (found.tokens, found.steps) == (sum(one.tokens for one in own), sum(one.steps for one in own))
            assert found.tokens_per_step == found.tokens / found.steps
    assert counted.together.steps < counted.lookup.steps
