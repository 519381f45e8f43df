"""Demo model: correct answers, steps saved and shipped files, on held-out functions; and how they are evaluated."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from recipes.evaluate import evaluate
from recipes.signatures import functions_in, read_signature
from recipes.train import PROMPTS
from spaceport.runtime.decoding import Decoding
from spaceport.runtime.session import Runtime
from spaceport.tools.demo.modes import timed, verdicts
from spaceport.tools.demo.prompts import MODEL, prompts_of

pytestmark = pytest.mark.on_change("tools/demo/model")

(SENTENCE,) = functions_in("def g(a): ...\n")

# Of files that nothing was learned of, in the order in which the recipe holds them out.
HELD_OUT = (
    "formatstring( cols, colwidth = _colwidth, spacing = _spacing )",
    "dump( node, annotate_fields = True, include_attributes = False, *, indent = None )",
    "spilldescriptors( msg, attrs, predicate )",
    "finditer( pattern, string, flags = 0 )",
)
FULLMATCH = """\
These are the parameters of fullmatch:
1. pattern: It is required, and it is given by name or as the first value.
2. string: It is required, and it is given by name or as the second value.
3. flags: It is optional, and it is given by name or as the third value. Its default is the number 0.

Of these 3, 2 are required."""


@pytest.fixture(scope="module")
def runtime(demo_bundle: Path) -> Iterator[Runtime]:
    with Runtime.open(demo_bundle, threads=1, max_seq_len=512, step_costs="standard") as opened:
        yield opened


def test_answers_are_correct_and_drafts_and_forks_save_most_steps(runtime: Runtime) -> None:
    stages: list[str] = []
    functions = [read_signature(text) for text in HELD_OUT]
    found = evaluate(runtime, [*functions, SENTENCE], ["import os\nimport sys\n" * 3], stages.append)
    assert stages
    lists = found["lists"]
    assert (lists["questions"], found["sentences"]["questions"]) == (len(HELD_OUT), 1)
    assert lists["forks_correct"] == lists["questions"]
    assert min(lists["exact"], lists["exact_unforked"]) >= 3
    plain, *drafting = found["costs"]
    assert [cost["changed"] for cost in found["costs"]] == [0] * len(found["costs"])
    assert plain["chat_tokens"] == plain["chat_steps"]
    assert plain["source_tokens"] == plain["source_steps"] > 0
    assert plain["fewer_steps"] >= 1.8
    assert drafting[-1]["chat_tokens_per_step"] >= 4.5
    assert json.loads(json.dumps(found)) == found


def test_the_shipped_prompts_have_the_expected_answers(runtime: Runtime) -> None:
    prompts = prompts_of(MODEL)
    assert list(prompts) == list(PROMPTS)
    for fork in (False, True):
        completion = runtime.generate(prompts["fullmatch"], Decoding(max_tokens=160, fork=fork))
        assert (completion.text, completion.ending) == (FULLMATCH, "end")
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
    assert both <= 18
    assert list(verdicts(found, runtime.bundle.manifest.tokens.child).values()) == ["-", "identical"] * 2


def test_the_shipped_model_matches_the_recipe() -> None:
    assert sum(file.stat().st_size for file in MODEL.iterdir()) < 5_000_000
    sar = json.loads((MODEL / "sar_config.json").read_text("utf-8"))
    assert [len(measured["rates"]) for measured in sar.pop("acceptance")] == [5]
    assert sar == {"mask_tokens": ["[M]"], "mask_slots": 5, "fork_token": "[Fork]", "child_token": "[Child]"}
    last = json.loads((MODEL / "metrics.jsonl").read_text("utf-8").splitlines()[-1])
    assert last["step"] == last["steps"]
    assert np.isfinite(last["losses"]).all()
    assert "templated" in (MODEL / "README.md").read_text("utf-8")
