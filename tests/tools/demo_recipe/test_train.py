"""Demo recipe: both presets, from sources to an exported checkpoint, at a small scale."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from spaceport.exporter.checkpoint import TokenFlags, open_checkpoint
from spaceport.tools.demo.prompts import PROMPTS_FILE
from spaceport.tools.demo_recipe.corpus import Corpus, collect, save
from spaceport.tools.demo_recipe.sources import Source, read_source, stdlib_paths
from spaceport.tools.demo_recipe.train import MODEL, PRESETS, main, train

pytestmark = pytest.mark.on_change("tools/demo/model")

MODULES = ("/copy.py", "/json/decoder.py", "/shlex.py", "/textwrap.py")


def few(folder: Path) -> Corpus:
    sources = [read_source(path) for path in stdlib_paths() if path.as_posix().endswith(MODULES)]
    renamed = (Source(f"renamed/{number}.py", sources[-1].text) for number in range(1000))
    held_out = next(source for source in renamed if source.held_out)
    corpus = collect([source for source in sources[:-1] if not source.held_out] + [held_out], lists=0)
    save(corpus, folder)
    return corpus


@pytest.mark.parametrize("name", ["demo", pytest.param("code", marks=pytest.mark.nightly)])
def test_a_preset_is_trained(name: str, tmp_path: Path) -> None:
    settings = replace(PRESETS[name].settings, batch_size=2, micro_batch_size=2, cutoff=64, anchors=2)
    preset = replace(PRESETS[name], write_corpus=few, settings=settings)
    target = tmp_path / "tuned"
    train(tmp_path / "work", target, preset, max_steps=2)
    checkpoint = open_checkpoint(target, TokenFlags())
    assert checkpoint.max_mask_slots == 5
    assert (checkpoint.tokens.fork is not None) == (name == "demo")
    assert json.loads((target / PROMPTS_FILE).read_text("utf-8")) == preset.prompts
    assert (target / "README.md").read_text("utf-8").startswith(f"# tuned\n\n{preset.about}\n\n")
    assert json.loads((target / "config.json").read_text("utf-8"))["dtype"] == "float16"
    assert not (tmp_path / "tuned.training").exists()


def test_only_the_demo_preset_replaces_the_shipped_model() -> None:
    assert json.loads((MODEL / PROMPTS_FILE).read_text("utf-8")) == PRESETS["demo"].prompts
    result = CliRunner().invoke(main, ["--preset", "code"])
    assert result.exit_code == 2
    assert "--preset code without TARGET" in result.output
