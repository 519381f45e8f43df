"""Options: --help lists them in groups, former names still work, and unused ones are errors."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

import click
import pytest
from click.testing import CliRunner

from spaceport.graphs.contract.faults import OptionFault
from spaceport.tools.cli import Commands, cli, run
from spaceport.tools.cli.exit_codes import USAGE
from spaceport.tools.cli.options import Renamed, Sectioned, Unused, refuse_unused


class Grouped(Sectioned):
    headings: ClassVar = {"temperature": "Sampling"}


@click.command(cls=Grouped)
@click.option("--limit", type=int, help="Read the first N prompts.")
@click.option("--temperature", type=float, help="Sampling temperature; 0 = greedy.")
@click.option("--ban-token", cls=Renamed, former=["--ban"], multiple=True, help="Never generate this token.")
@click.option("--exact", "exact_match", cls=Renamed, former=["--precise", "-p"], is_flag=True)
@click.pass_context
def command(context: click.Context, **given: object) -> None:
    """A command."""
    refuse_unused(context, [Unused(not given["temperature"], ("ban_token",), "without --temperature", "add it")])
    click.echo(repr(given))


def test_help_lists_options_in_groups_and_no_former_names() -> None:
    shown = CliRunner().invoke(command, ["--help"]).output
    assert re.findall(r"^(\w+):$", shown, re.MULTILINE) == ["Options", "Sampling", "Help"]
    assert shown.index("Sampling:") < shown.index("--ban-token") < shown.index("Help:")
    assert not re.search(r"--ban\b(?!-token)|--precise|-p\b", shown)


@pytest.mark.parametrize("name", ["--ban-token", "--ban"])
def test_a_renamed_option_accepts_both_names(name: str) -> None:
    result = CliRunner().invoke(command, ["--temperature", "1", name, "a", name, "b"])
    assert "'ban_token': ('a', 'b')" in result.output


def test_a_renamed_flag_accepts_all_its_names() -> None:
    for name in ("--exact", "--precise", "-p"):
        assert "'exact_match': True" in CliRunner().invoke(command, [name]).output


def test_an_error_about_a_former_name_names_the_present_one() -> None:
    result = CliRunner().invoke(command, ["--ban", "a"])
    assert isinstance(result.exception, OptionFault)
    assert str(result.exception) == "--ban-token has no effect without --temperature: add it, or leave it out"


def test_a_default_is_no_unused_option() -> None:
    assert CliRunner().invoke(command, []).exit_code == 0


def renamed_options() -> Iterator[tuple[str, str, str]]:
    """Each former name of an option: its command, the name and the present one."""
    for name in Commands.summaries:
        chosen = Commands().get_command(click.Context(cli), name)
        for option in chosen.params if chosen is not None else ():
            if isinstance(option, Renamed):
                yield from ((name, former, option.opts[0]) for former in option.former)


@pytest.mark.torch
def test_former_names_of_options_still_work() -> None:
    renamed = {
        ("export", "--calibrate", "--calibration-data"),
        ("build", "--flavour", "--backend"),
        ("build", "--prompt-rows", "--prefill-rows"),
        ("check", "--long", "--long-context"),
        ("tune", "--whole-rate", "--unfork-rate"),
    }
    assert {*renamed_options()} == renamed


@pytest.mark.torch
def test_a_former_name_sets_the_present_option(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert run(["check", str(tmp_path), "--long", "3"]) == USAGE
    assert "--long-context is 3: expected at least 32" in capfd.readouterr().err
