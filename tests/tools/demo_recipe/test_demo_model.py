"""Demo model: correct answers, steps saved and shipped files, on held-out functions; and how they are evaluated."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from spaceport.runtime.decode.statistics import Statistics
from spaceport.runtime.decoding import Decoding
from spaceport.runtime.session import Runtime
from spaceport.tools.demo.prompts import MODEL, prompts_of
from spaceport.tools.demo.timing import timed, verdicts
from spaceport.tools.demo_recipe.evaluate import NOTE, QuestionAnswers, cost_of, evaluate, show
from spaceport.tools.demo_recipe.parameter_answers import answer, verify
from spaceport.tools.demo_recipe.signatures import functions_in, read_signature
from spaceport.tools.demo_recipe.train import PRESETS
from spaceport.tools.verify.acceptance.answers import Answer, AnswerThread

pytestmark = pytest.mark.on_change("tools/demo/model")

FORK, CHILD, END = 90, 91, 92
LIST, SENTENCE = functions_in("def f(a, b, c): ...\ndef g(a): ...\n")

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


def test_answers_are_correct_and_drafts_and_forks_save_most_steps(
    runtime: Runtime, capsys: pytest.CaptureFixture[str]
) -> None:
    stages: list[str] = []
    functions = [read_signature(text) for text in HELD_OUT]
    found = evaluate(runtime, [*functions, SENTENCE], ["import os\nimport sys\n" * 3], stages.append)
    assert stages
    assert (found.lists.questions, found.sentences.questions) == (len(HELD_OUT), 1)
    assert found.lists.forks_correct == found.lists.questions
    assert min(found.lists.exact, found.lists.exact_unforked) >= 3
    plain, *drafting = found.costs
    assert [cost.changed for cost in found.costs] == [0] * len(found.costs)
    assert plain.chat_tokens == plain.chat_steps
    assert plain.source_tokens == plain.source_steps > 0
    assert plain.plain_steps / plain.parallel_steps >= 1.8
    assert drafting[-1].chat_tokens / drafting[-1].chat_steps >= 4.5
    show(found, 1)
    assert NOTE in capsys.readouterr().out
    assert json.loads(json.dumps(found.as_dict()))["note"] == NOTE


def test_the_shipped_prompts_have_the_expected_answers(runtime: Runtime) -> None:
    prompts = prompts_of(MODEL)
    assert list(prompts) == list(PRESETS["demo"].prompts)
    for fork in (False, True):
        completion = runtime.generate(prompts["fullmatch"], Decoding(max_tokens=160, fork=fork))
        assert (completion.text, completion.ending) == (FULLMATCH, "end")
    chains = [Decoding(mask_slots=slots, draft="chain", fork=False) for slots in (0, 1, 3, 5)]
    steps = [runtime.generate(prompts["fullmatch"], chain).statistics.steps for chain in chains]
    assert steps == [97, 49, 26, 18]


def test_each_decoding_mode_takes_the_steps_that_the_demo_shows(runtime: Runtime) -> None:
    (found,) = timed(runtime, [prompts_of(MODEL)["fullmatch"]], 160, 1)
    costs = [(run.completions[0].statistics, run.tokens) for (run,) in found.values()]
    # [Fork]s count as tokens that were written, and not as tokens of the text
    assert [(count, cost.tokens, cost.threads) for cost, count in costs] == [(96, 96, 1)] * 2 + [(96, 99, 4)] * 2
    plain, drafted, forked, both = (cost.steps for cost, _ in costs)
    assert (plain, forked) == (97, 56)
    assert drafted <= 22  # these depend on how drafts are planned
    assert both <= 18
    assert list(verdicts(found).values()) == ["-", "identical"] * 2


def test_the_shipped_model_matches_the_recipe() -> None:
    assert sum(file.stat().st_size for file in MODEL.iterdir()) < 5_000_000
    sar = json.loads((MODEL / "sar_config.json").read_text("utf-8"))
    assert [len(measured["rates"]) for measured in sar.pop("acceptance")] == [5]
    assert sar == {"mask_tokens": ["[M]"], "mask_slots": 5, "fork_token": "[Fork]", "child_token": "[Child]"}
    last = json.loads((MODEL / "metrics.jsonl").read_text("utf-8").splitlines()[-1])
    assert last["step"] == last["steps"]
    assert np.isfinite(last["losses"]).all()
    assert "templated" in (MODEL / "README.md").read_text("utf-8")


def line(tokens: tuple[int, ...], fork: int | None = None) -> AnswerThread:
    return AnswerThread((1, 2), (*tokens, END), fork, "end")


def in_one_line(tokens: tuple[int, ...], steps: int) -> Answer:
    return Answer((line(tokens),), Statistics(steps=steps))


def written(children: int = 3, drafted: bool = False) -> QuestionAnswers:
    """Forked, sequential and unforked answers; with drafts, two tokens per step."""
    right, share = verify(LIST, answer(LIST)), 2 if drafted else 1
    root = line((10, FORK, 11, FORK, 12, FORK, 13))
    threads = (root, *(line((20, 21, 22, 23, 24), 2 * child + 1) for child in range(children)))
    together, sequential = (Answer(threads, Statistics(steps=steps // share)) for steps in (12, 26))
    whole = in_one_line((10, 20, 11), 4 // share)
    return QuestionAnswers(LIST, together, sequential, whole, right, right)


def test_drafting_cost_sums_the_steps_of_each_decoding_mode_and_counts_changed_outputs() -> None:
    chats = {0: [written(), written()], 1: [written(drafted=True)] * 2}
    sources = {0: [in_one_line((30, 31, 32), 4)], 1: [in_one_line((30, 31, 32), 2)]}
    plain, drafted = (cost_of(slots, chats, sources) for slots in (0, 1))
    assert (plain.parallel_steps, drafted.parallel_steps) == (2 * 12, 2 * 6)
    assert plain.plain_steps == drafted.plain_steps == 2 * (4 + 3 * 5 + 1)  # root, three details, the end
    assert (plain.sequential_steps, drafted.sequential_steps) == (2 * 26, 2 * 13)
    assert plain.sequential_tokens == drafted.sequential_tokens == 2 * (8 + 3 * 6)
    assert (drafted.chat_tokens, drafted.chat_steps, drafted.source_tokens, drafted.source_steps) == (8, 4, 4, 2)
    assert (drafted.as_dict()["chat_tokens_per_step"], drafted.as_dict()["fewer_steps"]) == (2, 20 / 6)
    chats[1][0], sources[1][0] = written(children=2, drafted=True), in_one_line((31,), 1)
    assert (cost_of(0, chats, sources).changed, cost_of(1, chats, sources).changed) == (0, 2)
