"""All that may be asked for, through the public API: what changes a text, what does not, and what is refused."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from spaceport.graphs.contract.faults import OptionFault
from spaceport.graphs.contract.mask_layout import MaskLayout
from spaceport.graphs.contract.signature import Weights
from spaceport.runtime.bundle import open_bundle
from spaceport.runtime.decoding import Decoding
from spaceport.runtime.sampling.grammar import Grammar
from spaceport.runtime.sampling.sampler import Sampling
from spaceport.runtime.session import Runtime
from spaceport.tools.reference import open_reference_runtime
from support.paths import TINY

PROMPT = "def __init__(self, object_hook=None):\n"
SAMPLINGS = (
    Sampling(temperature=1.0, seed=1),
    Sampling(temperature=0.7, top_p=0.9, seed=2**63),
    Sampling(temperature=1.5, top_k=40, min_p=0.02, presence_penalty=0.5, seed=3),
    Sampling(temperature=0.9, repetition_penalty=1.2, frequency_penalty=0.1, logit_bias={5: 4.0}, seed=4),
    Sampling(repetition_penalty=1.3),
)
DRAFTS: tuple[dict[str, Any], ...] = (
    {},
    {"draft": "chain"},
    {"mask_slots": 1, "draft": "chain"},
    {"draft_rows": 60, "draft_siblings": 6},
    {"mask_slots": 0, "lookup": 9},
)
GRAMMAR = Grammar(regex="(self|object|[a-z_]{2,9} = None;)( [a-z]{1,5}){2,8}")


@pytest.fixture(scope="module", params=["onnxruntime scatter", "onnxruntime append", "onnxruntime int8", "torch"])
def runtime(
    request: pytest.FixtureRequest, tiny_bundle: Path, tiny_append_bundle: Path, tiny_int8_bundle: Path
) -> Iterator[Runtime]:
    if request.param == "torch":
        opened = open_reference_runtime(open_bundle(tiny_bundle), TINY, 128)
    else:
        bundles = {"scatter": tiny_bundle, "append": tiny_append_bundle, "int8": tiny_int8_bundle}
        opened = Runtime.open(bundles[request.param.split()[-1]], max_seq_len=128, max_requests=2, threads=1)
    with opened:
        yield opened


@pytest.fixture(scope="module")
def sampled(tiny_bundle: Path, tiny_int8_bundle: Path) -> dict[Weights, list[tuple[int, ...]]]:
    """Plain texts of each way of sampling, by the kind of weights; every backend writes the same ones."""
    found: dict[Weights, list[tuple[int, ...]]] = {}
    for bundle in (tiny_bundle, tiny_int8_bundle):
        with Runtime.open(bundle, max_seq_len=128, threads=1) as runtime:
            texts = [runtime.generate(PROMPT, Decoding(mask_slots=0, sampling=how)).tokens for how in SAMPLINGS]
        assert len(set(texts)) == len(texts)
        found[runtime.bundle.manifest.weights] = texts
    return found


def test_a_seed_means_one_text_on_every_backend_with_every_draft(
    runtime: Runtime, sampled: dict[Weights, list[tuple[int, ...]]]
) -> None:
    for how, expected in zip(SAMPLINGS, sampled[runtime.bundle.manifest.weights], strict=True):
        for drafts in ({"mask_slots": 0}, *DRAFTS):
            assert runtime.generate(PROMPT, Decoding(sampling=how, **drafts)).tokens == expected


def test_sampled_texts_side_by_side_are_what_each_is_alone(
    any_tiny_bundle: Path, sampled: dict[Weights, list[tuple[int, ...]]]
) -> None:
    with Runtime.open(any_tiny_bundle, max_seq_len=128, max_requests=4, threads=1) as runtime:
        streams = [runtime.stream(PROMPT, Decoding(sampling=how)) for how in SAMPLINGS]
        assert [stream.completion().tokens for stream in streams] == sampled[runtime.bundle.manifest.weights]


def test_a_form_is_kept_and_drafts_do_not_change_it(runtime: Runtime) -> None:
    for how in (Sampling(), Sampling(temperature=1.0, seed=5)):
        plain = runtime.generate(PROMPT, Decoding(grammar=GRAMMAR, sampling=how, mask_slots=0))
        assert plain.ending == "end"
        for drafts in DRAFTS:
            assert runtime.generate(PROMPT, Decoding(grammar=GRAMMAR, sampling=how, **drafts)).tokens == plain.tokens


def test_a_dead_end_that_the_text_never_comes_to_is_none(tiny_bundle: Path) -> None:
    """Drafts look further than the text goes: what is wrong there must not end it."""
    with Runtime.open(tiny_bundle, max_seq_len=128, threads=1) as runtime:
        every = range(runtime.bundle.manifest.signature.vocab_size)
        banned = [token for token in every if "Z" in runtime.tokenizer.decode([token])]
        how: dict[str, Any] = {
            "grammar": Grammar(regex="alpha beta gamma delta Z"),
            "sampling": Sampling(banned=banned),
        }
        for limit in ({"stop": "delta "}, {"max_tokens": 12}, {"max_total_tokens": 12}):
            plain = runtime.generate(PROMPT, Decoding(mask_slots=0, **how, **limit))
            for drafts in DRAFTS:
                drafted = runtime.generate(PROMPT, Decoding(**how, **limit, **drafts))
                assert (drafted.tokens, drafted.ending) == (plain.tokens, plain.ending)
        with pytest.raises(OptionFault, match="allows no token at position"):
            runtime.generate(PROMPT, Decoding(**how))


def test_a_text_tells_the_seed_that_writes_it_again(tiny_bundle: Path) -> None:
    with Runtime.open(tiny_bundle, max_seq_len=128, threads=1) as runtime:
        first = runtime.generate(PROMPT, Decoding(sampling=Sampling(temperature=1.0)))
        other = runtime.generate(PROMPT, Decoding(sampling=Sampling(temperature=1.0)))
        again = runtime.generate(PROMPT, Decoding(sampling=Sampling(temperature=1.0, seed=first.seed)))
        assert (again.tokens, again.seed) == (first.tokens, first.seed)
        assert other.seed != first.seed
        assert runtime.generate(PROMPT, Decoding(max_tokens=1)).seed is None


def test_statistics_have_the_time_to_the_first_token_and_the_rate_of_all(tiny_bundle: Path) -> None:
    with Runtime.open(tiny_bundle, max_seq_len=128, threads=1) as runtime, runtime.stream(PROMPT) as stream:
        assert stream.statistics.tokens_per_second == 0.0
        found = stream.completion().statistics
        assert 0 < found.waiting_seconds < found.first_token_seconds < found.seconds
        assert found.engine_seconds + found.outside_seconds <= found.seconds - found.waiting_seconds + 0.001
        assert found.tokens_per_second == pytest.approx(found.tokens / (found.seconds - found.waiting_seconds))
        only = runtime.generate(PROMPT, Decoding(max_tokens=1)).statistics
        assert only.first_token_seconds == only.seconds


def test_a_trace_is_kept_if_it_is_asked_for(tiny_bundle: Path) -> None:
    with Runtime.open(tiny_bundle, max_seq_len=128, threads=1) as runtime:
        found = runtime.generate(PROMPT, Decoding(trace=True, max_tokens=40))
        assert found.trace is not None
        record = found.trace.record(runtime.tokenizer)
        assert sum(map(len, record.generated)) == len(found.tokens)
        assert len(record.steps) == found.statistics.steps + found.statistics.prompt_steps
        assert runtime.generate(PROMPT, Decoding(max_tokens=2)).trace is None


@pytest.mark.parametrize(
    ("asked", "reported"),
    [
        ({"max_tokens": 0}, "max_tokens is 0: expected at least 1"),
        ({"max_total_tokens": 0}, "max_total_tokens is 0: expected at least 1"),
        ({"max_depth": -1}, "max_depth is -1: expected at least 0"),
        ({"max_threads": 0}, "max_threads is 0: expected 1 to 128"),
        ({"max_threads": 129}, "max_threads is 129: expected 1 to 128"),
        ({"timeout": 0.0}, "timeout is 0.0: expected a number of seconds above 0"),
        ({"timeout": float("nan")}, "timeout is nan: expected a number of seconds above 0"),
        ({"stop": [""]}, "expected strings of at least one character"),
        ({"draft": "bush"}, "draft shape is 'bush': expected chain or tree"),
        ({"draft_rows": 0}, "draft_rows is 0: expected at least 1"),
        ({"draft_siblings": 0}, "draft_siblings is 0: expected at least 1"),
        ({"lookup": -1}, "lookup is -1: expected at least 0"),
        ({"draft": "chain", "lookup": 3}, "lookup is 3 with draft='chain': it applies to draft='tree' only"),
        ({"draft": "chain", "draft_rows": 3}, "draft_rows is 3 with draft='chain': it applies to draft='tree' only"),
        (
            {"draft": "chain", "draft_siblings": 3},
            "draft_siblings is 3 with draft='chain': it applies to draft='tree' only",
        ),
        ({"max_tokens": 5.5}, "max_tokens is 5.5: expected a whole number"),
        ({"max_tokens": True}, "max_tokens is True: expected a whole number"),
        ({"draft_siblings": "3"}, "draft_siblings is '3': expected a whole number"),
        ({"logprobs": 1.5}, "logprobs is 1.5: expected a whole number"),
        ({"timeout": "5"}, "timeout is '5': expected a number of seconds"),
        ({"stop": 5}, "stop is 5: expected strings"),
        ({"fork": "no"}, "fork is 'no': expected True, False or None"),
        ({"trace": "t.json"}, "trace is 't.json': expected True or False"),
        ({"sampling": 0.7}, "sampling is 0.7: expected a Sampling"),
        ({"grammar": "[a-z]"}, r"grammar is .* expected a Grammar"),
        ({"fork": True, "grammar": GRAMMAR}, "fork is True with a grammar: a constrained completion cannot fork"),
    ],
)
def test_what_cannot_be_meant_is_refused_at_once(asked: dict[str, Any], reported: str) -> None:
    with pytest.raises(OptionFault, match=reported):
        Decoding(**asked)


@pytest.mark.parametrize(
    "prompt", [5, None, b"abc", [True, 2], "", [], [1.5], {"role": "user"}, [5, {"role": "user", "content": "a"}]]
)
def test_what_is_no_prompt_is_refused(tiny_bundle: Path, prompt: Any) -> None:
    with Runtime.open(tiny_bundle, max_seq_len=128, threads=1) as runtime, pytest.raises(OptionFault, match="expected"):
        runtime.stream(prompt)


def test_what_says_how_to_decode_is_a_decoding(tiny_bundle: Path) -> None:
    how: Any = {"max_tokens": 3}
    reported = r"decoding is \{'max_tokens': 3\}: expected a Decoding"
    with Runtime.open(tiny_bundle, max_seq_len=128, threads=1) as runtime, pytest.raises(OptionFault, match=reported):
        runtime.stream(PROMPT, how)


def test_a_draft_may_verify_all_mask_slots_and_have_them_behind_one_token() -> None:
    block = MaskLayout(shift=False, group="block")
    assert Decoding().draft_config(5).rows == Decoding().draft_config(11, mask_layout=block).rows == 24
    assert Decoding().draft_config(30).rows == 61
    assert Decoding().draft_config(30, mask_layout=block).rows == 62
    assert Decoding(draft_rows=9).draft_config(30, mask_layout=block).rows == 9


def test_a_stream_that_two_read_ends_for_both(tiny_bundle: Path) -> None:
    with Runtime.open(tiny_bundle, max_seq_len=128, threads=1) as runtime:
        stream = runtime.stream(PROMPT, Decoding(max_tokens=40))
        with ThreadPoolExecutor(2) as readers:
            read = [future.result(timeout=60) for future in [readers.submit(list, stream) for _ in range(2)]]
        assert sum(map(len, read)) >= 40


@pytest.mark.parametrize(
    ("asked", "reported"),
    [
        ({"max_tokens": 500}, "max_tokens 500 make"),
        ({"max_total_tokens": 500}, "lower max_total_tokens to"),
        ({"mask_slots": 6}, "mask_slots is 6: expected 0 to 5"),
        ({"fork": True}, "expected a bundle with a fork token"),
        ({"sampling": Sampling(banned=(10**6,))}, "banned holds the token id 1000000: expected ids from 0 to"),
        ({"grammar": Grammar(regex="(")}, "regular expression"),
    ],
)
def test_what_a_bundle_cannot_do_is_refused_before_anything_is_written(
    tiny_bundle: Path, asked: dict[str, Any], reported: str
) -> None:
    with Runtime.open(tiny_bundle, max_seq_len=128, threads=1) as runtime:
        with pytest.raises(OptionFault, match=reported):
            runtime.stream(PROMPT, Decoding(**asked))
        assert runtime.generate(PROMPT, Decoding(max_tokens=1)).statistics.tokens == 1
