"""Recipes: both of them from the first command to the last, at a small scale, and their prompts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from recipes.__main__ import CODER_PROMPTS, own_prompts, recipes
from spaceport.tools.demo.prompts import MODEL

pytestmark = pytest.mark.on_change("recipes")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("recipe", "tuned"), [(("chat", "--prompts", 3), 2), pytest.param(("coder",), 1, marks=pytest.mark.nightly)]
)
def test_an_adapter_is_trained(recipe: tuple[object, ...], tuned: int, tmp_path: Path, demo_bundle: Path) -> None:
    (tmp_path / "base.bundle").symlink_to(demo_bundle)
    texts = [f"Explain the parameters of f( a, b, c = {number} )" for number in range(4)]
    (tmp_path / "own_prompts.json").write_text(json.dumps(texts), "utf-8")
    words = [*recipe, tmp_path, "--base", MODEL, "--trial"]
    done = CliRunner().invoke(recipes, [str(word) for word in words])
    assert done.exit_code == 0, f"{done.output}{done.exception}"
    commands = [line.split()[2] for line in done.output.splitlines() if line[:1] == "$"]
    assert commands == [*["distill"] * 3, *["tune"] * tuned, "acceptance"]
    sar = json.loads((tmp_path / "adapter" / "sar_config.json").read_text("utf-8"))
    assert len(sar["acceptance"][0]["rates"]) == 4


def test_prompts_of_the_coder_are_not_those_it_is_measured_with() -> None:
    trained, held_out = (
        {json.loads(line)["prompt"] for line in file.read_text("utf-8").splitlines()}
        for file in (CODER_PROMPTS, CODER_PROMPTS.parents[2] / "tools" / "demo" / "coder" / "heldout.jsonl")
    )
    assert (len(trained), len(held_out)) == (889, 100)
    assert trained.isdisjoint(held_out)


def test_own_prompts_are_different_finished_messages(tiny_bundle: Path, tmp_path: Path) -> None:
    own = own_prompts(tiny_bundle, tmp_path / "own.json", 3)
    assert len(set(own)) == 3
    assert all(len(text) > 11 and text == text.strip() for text in own)
    assert own_prompts(tmp_path, tmp_path / "own.json", 3) == own  # from the file
