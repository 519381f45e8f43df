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
from spaceport.tools.demo_recipe.packages import installed
from spaceport.tools.demo_recipe.sources import Source, read_source, stdlib_paths
from spaceport.tools.demo_recipe.train import MODEL, PRESETS, main, train

MODULES = ("argparse.py", "copy.py", "json/decoder.py", "shlex.py", "textwrap.py")


def few(folder: Path) -> Corpus:
    paths = [path for path in stdlib_paths() if path.as_posix().endswith(tuple(f"/{name}" for name in MODULES))]
    sources = [read_source(path) for path in paths]
    renamed = (Source(f"renamed/{number}.py", sources[-1].text) for number in range(1000))
    held_out = next(source for source in renamed if source.held_out)
    corpus = collect([source for source in sources[:-1] if not source.held_out] + [held_out], lists=0)
    save(corpus, folder)
    return corpus


@pytest.mark.parametrize("name", ["demo", pytest.param("code", marks=pytest.mark.nightly)])
def test_a_preset_is_trained_and_can_be_resumed(name: str, tmp_path: Path) -> None:
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


def test_without_a_target_the_recipe_replaces_the_shipped_model() -> None:
    assert json.loads((MODEL / PROMPTS_FILE).read_text("utf-8")) == PRESETS["demo"].prompts


def test_the_code_preset_never_replaces_the_shipped_model() -> None:
    result = CliRunner().invoke(main, ["--preset", "code"])
    assert result.exit_code == 2
    assert "--preset code without TARGET" in result.output


def test_packages_are_held_out_whole() -> None:
    sources = installed()
    by_package: dict[str, set[bool]] = {}
    for source in sources:
        by_package.setdefault(source.path, set()).add(source.held_out)
    assert all(len(held_out) == 1 for held_out in by_package.values())
    assert 0 < sum(next(iter(held_out)) for held_out in by_package.values()) < len(by_package) / 3
