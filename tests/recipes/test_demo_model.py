"""Demo model: correct answers to questions about held-out functions, the steps that forks and drafts save, shipped files."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from spaceport.runtime.decoding import Decoding
from spaceport.runtime.session import Runtime
from spaceport.tools.bench.decode_measuring import DecodeOptions, measure_modes, modes_for
from spaceport.tools.cli.demo import MODE_TITLES
from spaceport.tools.demo.prompts import MODEL, prompts_of
from spaceport.verify.prompts import TokenizedPrompt
from support.paths import TESTS

pytestmark = pytest.mark.on_change("verify", "tests/data/demo_answers.json")

# Questions about functions of files that nothing was learned of, and their answers
HELD_OUT: dict[str, str] = json.loads((TESTS / "data" / "demo_answers.json").read_text("utf-8"))


@pytest.fixture(scope="module")
def runtime(demo_bundle: Path) -> Iterator[Runtime]:
    with Runtime.open(demo_bundle, threads=1, max_seq_len=512, step_costs="standard") as opened:
        yield opened


@pytest.mark.parametrize("fork", [False, True])
def test_answers_about_held_out_functions_are_correct(runtime: Runtime, fork: bool) -> None:
    correct = 0
    for question, answer in HELD_OUT.items():
        completion = runtime.generate([{"role": "user", "content": question}], Decoding(max_tokens=240, fork=fork))
        correct += completion.text == answer
        assert len(completion.threads) == (1 + answer.count(": It is") if fork else 1)
    assert correct >= len(HELD_OUT) - 1


def test_chains_and_modes_take_the_steps_that_the_demo_shows(runtime: Runtime) -> None:
    prompts = prompts_of(MODEL)
    chains = [Decoding(mask_slots=slots, draft="chain", fork=False) for slots in (0, 1, 3, 5)]
    steps = [runtime.generate(prompts["fullmatch"], chain).statistics.steps for chain in chains]
    assert steps == [97, 49, 26, 18]


def test_each_decoding_mode_takes_the_steps_that_the_demo_shows(runtime: Runtime) -> None:
    prompt = TokenizedPrompt(1, tuple(runtime.tokens_of(prompts_of(MODEL)["fullmatch"])))
    modes = modes_for(runtime.bundle.manifest, 160, MODE_TITLES)
    found = measure_modes(modes, runtime, [prompt], DecodeOptions(160, rounds=1), lambda line: None)
    costs = [one.statistics for mode in modes for one in found.completions if one.mode == mode.name]
    # [Fork]s count as tokens that were written, and not as tokens of the text
    assert [(cost.tokens, cost.threads) for cost in costs] == [(96, 1)] * 2 + [(99, 4)] * 2
    plain, drafted, forked, both = (cost.steps for cost in costs)
    assert (plain, forked) == (97, 56)
    assert drafted <= 22  # these depend on how drafts are planned
    assert both <= 22
    assert found.differences == []


def test_the_shipped_model_has_acceptance_rates_of_all_mask_slots() -> None:
    sar = json.loads((MODEL / "sar_config.json").read_text("utf-8"))
    assert [len(measured["rates"]) for measured in sar["acceptance"]] == [5]
