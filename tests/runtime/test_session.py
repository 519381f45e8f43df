"""From a prompt to text on trained models: golden texts, pinned numbers of steps, every backend and every way of drafting."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from spaceport.graphs.contract.faults import OptionFault
from spaceport.runtime.bundle import open_bundle
from spaceport.runtime.decoding import Decoding
from spaceport.runtime.engine import capacity_for
from spaceport.runtime.sampling.grammar import Grammar
from spaceport.runtime.sampling.sampler import Sampling
from spaceport.runtime.session import Runtime
from spaceport.runtime.text.prompt import Prompt
from spaceport.verify.reference import open_reference
from support.paths import DEMO, TINY

PROMPTS: dict[str, str] = json.loads((TINY / "prompts.json").read_text("utf-8"))
DECODER, SCANNER, FOREIGN = PROMPTS.values()
GOLDEN = (
    ":\n    c_scanstring = None\n\n__all__ = ['JSONDecoder', 'JSONDecodeError']\n\n"
    "FLAGS = re.VERBOSE | re.MULTILINE | re.DOTALL\n\nNaN = float('nan')\nPosInf = float('inf')\nNegInf = float('-in"
)
GOLDEN_END = (
    "\n        finally:\n            memo.clear()\n\n    return scan_once\n\n"
    "make_scanner = c_make_scanner or py_make_scanner\n"
)
INIT = "def __init__(self, object_hook=None):\n"
SAMPLINGS = (
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
FIELDS = {"name": {"type": "string", "maxLength": 20}, "kind": {"enum": ["the answer", "a ship"]}}
SCHEMA = {"type": "object", "properties": FIELDS, "required": ["name", "kind"], "additionalProperties": False}
GRAMMARS = (Grammar(regex="(self|object|[a-z_]{2,9} = None;)( [a-z]{1,5}){2,8}"), Grammar(json_schema=SCHEMA))


def chain(mask_slots: int, **options: Any) -> Decoding:
    """Drafts whose number of steps does not depend on step costs."""
    return Decoding(max_tokens=96, mask_slots=mask_slots, draft="chain", **options)


@pytest.fixture(scope="module", params=["onnxruntime scatter", "onnxruntime append", "onnxruntime int8", "torch"])
def runtime(
    request: pytest.FixtureRequest, tiny_bundle: Path, tiny_append_bundle: Path, tiny_int8_bundle: Path
) -> Iterator[Runtime]:
    if request.param == "torch":
        bundle = open_bundle(tiny_bundle)
        opened = Runtime(bundle, open_reference(bundle, TINY, capacity_for(bundle.manifest, 512), 1), 512)
    else:
        bundles = {"scatter": tiny_bundle, "append": tiny_append_bundle, "int8": tiny_int8_bundle}
        options: dict[str, Any] = {"max_seq_len": 512, "max_requests": 4, "threads": 1, "step_costs": "standard"}
        opened = Runtime.open(bundles[request.param.split()[-1]], **options)
    with opened:
        yield opened


@pytest.fixture(scope="module")
def sampled(tiny_bundle: Path, tiny_int8_bundle: Path) -> dict[str, list[tuple[int, ...]]]:
    """Plain texts of each way of sampling, by the format; every backend writes the same ones."""
    found: dict[str, list[tuple[int, ...]]] = {}
    for bundle in (tiny_bundle, tiny_int8_bundle):
        with Runtime.open(bundle, max_seq_len=512, threads=1) as runtime:
            plain = [Decoding(mask_slots=0, max_tokens=40, sampling=how) for how in SAMPLINGS]
            texts = [runtime.generate(INIT, how).tokens for how in plain]
        assert len(set(texts)) == len(texts)
        found[runtime.bundle.manifest.format] = texts
    return found


def test_golden_texts_take_the_pinned_numbers_of_steps_and_end_where_plain_decoding_would(runtime: Runtime) -> None:
    slack = 3 * runtime.bundle.manifest.native  # in 8 bits, other draft tokens are accepted and rejected
    for mask_slots, steps in enumerate((96, 49, 33, 25, 20, 18)):
        found = runtime.generate(DECODER, chain(mask_slots))
        assert (found.text, found.ending, len(found.tokens)) == (GOLDEN, "length", 96)
        assert abs(found.statistics.steps - steps) <= slack
        assert sum(found.statistics.accepted_by_depth) == 96 - found.statistics.steps
    for mask_slots, steps in enumerate((49, 27, 19, 15, 12, 11)):
        found = runtime.generate(SCANNER, chain(mask_slots))
        assert (found.text, found.ending, len(found.tokens)) == (GOLDEN_END, "end", 48)
        assert abs(found.statistics.steps - steps) <= slack
    assert runtime.generate(runtime.tokens_of(SCANNER), chain(5)).text == GOLDEN_END


def test_a_chat_goes_through_the_models_template(runtime: Runtime) -> None:
    """The template writes `<s>` itself, and the text ends at the second of two end tokens."""
    messages = [{"role": "user", "content": "How does json/scanner.py begin?"}]
    found = runtime.generate(messages, Decoding(max_tokens=96))
    assert found.text.startswith('"""JSON token scanner\n"""\nimport re\n')
    assert found.ending == "end"
    assert (found.prompt_tokens.count(0), found.prompt_tokens[0]) == (1, 0)
    assert found.tokens == runtime.generate(messages, Decoding(max_tokens=96, mask_slots=0)).tokens


@pytest.mark.parametrize("prompt", PROMPTS)
def test_no_way_of_drafting_changes_a_text(runtime: Runtime, prompt: str) -> None:
    stops = ({"stop": "', '"}, {"stop": "\n\n"}, {"stop": "_scan"}) if prompt == next(iter(PROMPTS)) else ()
    for limit in ({"max_tokens": 60}, {"max_tokens": 11}, {"max_tokens": 1}, *stops):
        how: dict[str, Any] = {"max_tokens": 96} | limit
        plain = runtime.generate(PROMPTS[prompt], Decoding(mask_slots=0, **how))
        for drafts in (*DRAFTS, {"draft": "chain", "mask_slots": 3}):
            found = runtime.generate(PROMPTS[prompt], Decoding(**how, **drafts))
            assert (found.text, found.tokens, found.ending) == (plain.text, plain.tokens, plain.ending)
        if "stop" in limit:
            assert (plain.text, plain.ending) == (GOLDEN[: GOLDEN.index(how["stop"])], "stop")
    assert runtime.generate(FOREIGN, chain(5)).statistics.tokens_per_step < 1.3


def test_a_seed_means_one_text_on_every_backend_with_every_draft(
    runtime: Runtime, sampled: dict[str, list[tuple[int, ...]]]
) -> None:
    expected = sampled[runtime.bundle.manifest.format]
    for drafts in ({"mask_slots": 0}, DRAFTS[1], DRAFTS[4]):
        found = [runtime.generate(INIT, Decoding(sampling=how, max_tokens=40, **drafts)).tokens for how in SAMPLINGS]
        assert found == expected
    streams = [runtime.stream(INIT, Decoding(sampling=how, max_tokens=40)) for how in SAMPLINGS]
    assert [stream.completion().tokens for stream in streams] == expected


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=1.0, seed=5)], ids=["greedy", "sampled"])
def test_a_form_is_kept_and_drafts_do_not_change_it(runtime: Runtime, sampling: Sampling) -> None:
    for grammar in GRAMMARS:
        plain = runtime.generate(INIT, Decoding(grammar=grammar, sampling=sampling, mask_slots=0))
        assert plain.ending == "end"
        assert not grammar.json_schema or json.loads(plain.text)["kind"] in ("the answer", "a ship")
        for drafts in (DRAFTS[0], DRAFTS[1], DRAFTS[4]):
            found = runtime.generate(INIT, Decoding(grammar=grammar, sampling=sampling, **drafts))
            assert found.tokens == plain.tokens


def test_a_dead_end_that_the_text_never_comes_to_is_none(tiny_bundle: Path) -> None:
    """Drafts look further than the text goes: what is wrong there must not end it."""
    with Runtime.open(tiny_bundle, max_seq_len=128, threads=1) as runtime:
        every = range(runtime.bundle.manifest.signature.vocab_size)
        banned = Sampling(banned=[token for token in every if "Z" in runtime.tokenizer.decode([token])])
        how: dict[str, Any] = {"grammar": Grammar(regex="alpha beta gamma delta Z"), "sampling": banned}
        for limit in ({"stop": "delta "}, {"max_tokens": 12}, {"max_total_tokens": 12}):
            plain = runtime.generate(INIT, Decoding(mask_slots=0, **how, **limit))
            for drafts in DRAFTS:
                drafted = runtime.generate(INIT, Decoding(**how, **limit, **drafts))
                assert (drafted.tokens, drafted.ending) == (plain.tokens, plain.ending)
        with pytest.raises(OptionFault, match="allows no token at position"):
            runtime.generate(INIT, Decoding(**how))


# Forked text of the demo model: each thread says what it would say if threads were written one after the other.

ASKED: dict[str, Any] = json.loads((DEMO / "prompts.json").read_text("utf-8"))
THREE: Prompt = [{"role": "user", "content": ASKED["triangular"]["user"]}]
QUESTIONS = (THREE, [{"role": "user", "content": "Explain the parameters of move( src, dst )"}], ASKED["source"])


@pytest.fixture(scope="module")
def demo(any_demo_bundle: Path) -> Iterator[Runtime]:
    with Runtime.open(any_demo_bundle, threads=1, max_seq_len=256) as opened:
        yield opened


def test_no_draft_and_no_order_of_threads_changes_what_one_says(demo: Runtime) -> None:
    for prompt in QUESTIONS:
        expected = demo.generate(prompt, Decoding(mask_slots=0, max_threads=1, max_tokens=150))
        for drafts in (
            {"mask_slots": 0},
            {},
            {"draft": "chain"},
            {"draft_rows": 60, "draft_siblings": 1},
            {"lookup": 6},
        ):
            for max_threads in (1, 2, 16):
                how: dict[str, Any] = {"max_tokens": 150, "max_threads": max_threads, **drafts}
                found = demo.generate(prompt, Decoding(**how))
                assert (found.text, found.tokens, found.ending) == (expected.text, expected.tokens, expected.ending)
                assert {one.path: one for one in found.threads} == {one.path: one for one in expected.threads}
                assert found.statistics.peak_threads == min(max_threads, len(expected.threads))


def test_a_text_is_a_tree_of_threads_that_are_read_where_they_fork(demo: Runtime) -> None:
    found = demo.generate(THREE)
    root, *children = found.threads
    fork = demo.bundle.manifest.tokens.fork
    assert [(thread.path, thread.ending) for thread in found.threads] == [
        *(((), "end"), ((0,), "end"), ((1,), "end"), ((2,), "end"))
    ]
    assert [child.fork for child in children] == [at for at, token in enumerate(root.tokens) if token == fork]
    assert [child.text.strip().split(",")[0] for child in children] == ["It is optional"] * 3
    read, rest = "", root.text
    for number, child in enumerate(children, 1):
        head, rest = rest.split(f"{number}.", 1)
        name, rest = rest.split(":", 1)
        read += f"{head}{number}.{name}:{child.text}"
    assert read + rest == found.text
    assert fork not in found.tokens
    assert len(found.tokens) + 3 == sum(len(thread.tokens) for thread in found.threads) == found.statistics.tokens
    line = demo.generate(THREE, Decoding(fork=False))
    assert len(line.threads) == line.statistics.threads == 1
    assert line.threads[0].tokens == line.tokens == demo.generate(THREE, Decoding(max_depth=0)).tokens
    for stop in ("2. high", "value. Its", ":\n1"):
        ways: tuple[dict[str, Any], ...] = ({}, {"mask_slots": 0}, {"max_threads": 1})
        for options in ways:
            cut = demo.generate(THREE, Decoding(stop=stop, **options))
            assert cut.text == found.text[: found.text.index(stop)]
            assert "stop" in [thread.ending for thread in cut.threads]
