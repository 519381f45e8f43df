"""Load benchmark: the requests that it sends."""

from __future__ import annotations

from spaceport.runtime.decoding import Decoding
from spaceport.tools.bench import load


def test_load_repeats_the_prompts_of_a_checkpoint_in_order() -> None:
    load_requests = load.prompt_requests(["a", "b"], 3, Decoding(max_tokens=5))
    assert [request.prompt for request in load_requests] == ["a", "b", "a"]
    lengths = [len(request.prompt) for request in load.random_requests(50, 10, Decoding())]
    assert min(lengths) >= 5
    assert max(lengths) <= 15
    assert len(set(lengths)) > 3
