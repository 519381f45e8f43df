"""Flag names: an error of the runtime names the flags of the command that was run."""

from __future__ import annotations

from pathlib import Path

import click
import pytest

from spaceport.tools.cli import run
from spaceport.tools.cli.exit_codes import USAGE
from spaceport.tools.cli.flag_names import name_flags


@click.command()
@click.option("--max-seq-len", type=int)
@click.option("--seed", type=int)
@click.option("--ban-token", "banned", multiple=True)
@click.argument("prompt_file")
def command() -> None:
    """A command."""


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ("max_seq_len is 1: expected 2 to 1024", "--max-seq-len is 1: expected 2 to 1024"),
        ("raise max_seq_len (--max-seq-len)", "raise --max-seq-len"),
        ("raise max_seq_len (--max-seq-len; the model goes up to 9)", "raise --max-seq-len (the model goes up to 9)"),
        ("shorten it, or raise max_seq_len", "shorten it, or raise --max-seq-len"),
        ("seed is -1: expected a seed of at least 0", "--seed is -1: expected a seed of at least 0"),
        ("banned is 3", "--ban-token is 3"),
        ("give Decoding(max_seq_len=4)", "give Decoding(max_seq_len=4)"),
        ("max_seq_lens and prompt_file", "max_seq_lens and prompt_file"),
        ("max_tokens is 0", "max_tokens is 0"),
    ],
)
def test_only_option_names_of_the_command_become_flags(message: str, expected: str) -> None:
    assert name_flags(message, command) == expected


def test_without_a_command_a_message_stays_as_it_is() -> None:
    assert name_flags("max_seq_len is 1", None) == "max_seq_len is 1"


@pytest.mark.parametrize("arguments", [["generate", "{bundle}", "a"], ["inspect", "{bundle}"], ["audit", "{bundle}"]])
def test_errors_of_the_runtime_name_flags(
    tiny_bundle: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], arguments: list[str]
) -> None:
    prompts = tmp_path / "prompts"
    prompts.write_text("a\n")
    words = [str(tiny_bundle) if word == "{bundle}" else word for word in arguments]
    words += [str(prompts)] * (arguments[0] == "audit")
    assert run([*words, "--max-seq-len", "1"]) == USAGE
    assert "spaceport: --max-seq-len is 1: expected 2 to 1024" in capfd.readouterr().err
