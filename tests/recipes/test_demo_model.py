"""Demo model: correct answers to questions about held-out functions, the steps that forks and drafts save, shipped files."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from recipes.functions import answer, functions_in, question
from spaceport.runtime.decoding import Decoding
from spaceport.runtime.session import Runtime
from spaceport.tools.demo.modes import timed, verdicts
from spaceport.tools.demo.prompts import MODEL, prompts_of

pytestmark = pytest.mark.on_change("tools/demo/model")

HELD_OUT = (  # of files that nothing was learned of
    "formatstring( cols, colwidth = _colwidth, spacing = _spacing )",
    "dump( node, annotate_fields = True, include_attributes = False, *, indent = None )",
    "spilldescriptors( msg, attrs, predicate )",
    "finditer( pattern, string, flags = 0 )",
    "fullmatch( pattern, string, flags = 0 )",
)


@pytest.fixture(scope="module")
def runtime(demo_bundle: Path) -> Iterator[Runtime]:
    with Runtime.open(demo_bundle, threads=1, max_seq_len=512, step_costs="standard") as opened:
        yield opened


@pytest.mark.parametrize("fork", [False, True])
def test_answers_about_held_out_functions_are_correct(runtime: Runtime, fork: bool) -> None:
    correct = 0
    for text in HELD_OUT:
        (function,) = functions_in(f"def {text}: ...")
        prompt = [{"role": "user", "content": question(function)}]
        completion = runtime.generate(prompt, Decoding(max_tokens=240, fork=fork))
        correct += completion.text == answer(function)
        assert len(completion.threads) == (1 + len(function.parameters) if fork else 1)
    assert correct >= len(HELD_OUT) - 1


def test_chains_and_modes_take_the_steps_that_the_demo_shows(runtime: Runtime) -> None:
    prompts = prompts_of(MODEL)
    chains = [Decoding(mask_slots=slots, draft="chain", fork=False) for slots in (0, 1, 3, 5)]
    steps = [runtime.generate(prompts["fullmatch"], chain).statistics.steps for chain in chains]
    assert steps == [97, 49, 26, 18]


def test_each_decoding_mode_takes_the_steps_that_the_demo_shows(runtime: Runtime) -> None:
    (found,) = timed(runtime, [prompts_of(MODEL)["fullmatch"]], 160, 1)
    costs = [(run.completion.statistics, len(run.completion.tokens)) for (run,) in found.values()]
    # [Fork]s count as tokens that were written, and not as tokens of the text
    assert [(count, cost.tokens, cost.threads) for cost, count in costs] == [(96, 96, 1)] * 2 + [(96, 99, 4)] * 2
    plain, drafted, forked, both = (cost.steps for cost, _ in costs)
    assert (plain, forked) == (97, 56)
    assert drafted <= 22  # these depend on how drafts are planned
    assert both <= 22
    assert list(verdicts(found, runtime.bundle.manifest.tokens.child).values()) == ["-", "identical"] * 2


def test_the_shipped_model_has_acceptance_rates_of_all_mask_slots() -> None:
    sar = json.loads((MODEL / "sar_config.json").read_text("utf-8"))
    assert [len(measured["rates"]) for measured in sar["acceptance"]] == [5]
