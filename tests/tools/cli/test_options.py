"""Options: --help lists them in groups, former names still work, unused ones are errors, and errors name flags."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import fields
from functools import partial
from inspect import signature
from pathlib import Path
from typing import Any, ClassVar

import click
import pytest
from click.testing import CliRunner

from spaceport.graphs.contract.faults import OptionFault
from spaceport.runtime.session import Runtime
from spaceport.tools.cli import Commands, cli, run
from spaceport.tools.cli.exit_codes import USAGE
from spaceport.tools.cli.flag_names import name_flags
from spaceport.tools.cli.options import Renamed, Sectioned, Unused, refuse_unused
from spaceport.tools.cli.serve import command as serve
from spaceport.tools.cli.service_settings import openers_of, service_options_of
from spaceport.tools.serve.options import ServiceOptions


class Grouped(Sectioned):
    headings: ClassVar = {"temperature": "Sampling"}


@click.command(cls=Grouped)
@click.option("--limit", type=int, help="Read the first N prompts.")
@click.option("--max-seq-len", type=int)
@click.option("--temperature", type=float, help="Sampling temperature; 0 = greedy.")
@click.option("--ban-token", "banned", cls=Renamed, former=["--ban"], multiple=True, help="Never generate this token.")
@click.option("--exact", "exact_match", cls=Renamed, former=["--precise", "-p"], is_flag=True)
@click.argument("prompt_file", required=False)
@click.pass_context
def command(context: click.Context, **given: object) -> None:
    """A command."""
    refuse_unused(context, [Unused(not given["temperature"], ("banned",), "without --temperature", "add it")])
    click.echo(repr(given))


def test_help_lists_options_in_groups_and_no_former_names() -> None:
    shown = CliRunner().invoke(command, ["--help"]).output
    assert re.findall(r"^(\w+):$", shown, re.MULTILINE) == ["Options", "Sampling", "Help"]
    assert shown.index("Sampling:") < shown.index("--ban-token") < shown.index("Help:")
    assert not re.search(r"--ban\b(?!-token)|--precise|-p\b", shown)


def test_a_renamed_option_accepts_all_its_names_and_errors_name_the_present_one() -> None:
    for name in ("--ban-token", "--ban"):
        result = CliRunner().invoke(command, ["--temperature", "1", name, "a", name, "b"])
        assert "'banned': ('a', 'b')" in result.output
    for name in ("--exact", "--precise", "-p"):
        assert "'exact_match': True" in CliRunner().invoke(command, [name]).output
    fault = CliRunner().invoke(command, ["--ban", "a"]).exception
    assert isinstance(fault, OptionFault)
    assert str(fault) == "--ban-token has no effect without --temperature: add it, or leave it out"
    assert CliRunner().invoke(command, []).exit_code == 0  # a default is no unused option


def renamed_options() -> Iterator[tuple[str, str, str]]:
    """Each former name of an option: its command, the name and the present one."""
    for name in Commands.summaries:
        chosen = Commands().get_command(click.Context(cli), name)
        for option in chosen.params if chosen is not None else ():
            if isinstance(option, Renamed):
                yield from ((name, former, option.opts[0]) for former in option.former)


@pytest.mark.torch
def test_former_names_of_options_still_work(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert {*renamed_options()} == {
        ("export", "--calibrate", "--calibration-data"),
        ("build", "--flavour", "--backend"),
        ("build", "--prompt-rows", "--prefill-rows"),
        ("check", "--long", "--long-context"),
        ("tune", "--whole-rate", "--unfork-rate"),
    }
    assert run(["check", str(tmp_path), "--long", "3"]) == USAGE
    assert "--long-context is 3: expected at least 32" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ("max_seq_len is 1: expected 2 to 1024", "--max-seq-len is 1: expected 2 to 1024"),
        ("raise max_seq_len (--max-seq-len)", "raise --max-seq-len"),
        ("raise max_seq_len (--max-seq-len; the model goes up to 9)", "raise --max-seq-len (the model goes up to 9)"),
        ("limit is -1: expected a limit of at least 0", "--limit is -1: expected a limit of at least 0"),
        ("banned is 3", "--ban-token is 3"),
        ("give Decoding(max_seq_len=4)", "give Decoding(max_seq_len=4)"),
        ("max_seq_lens and prompt_file", "max_seq_lens and prompt_file"),
        ("max_tokens is 0", "max_tokens is 0"),
    ],
)
def test_only_option_names_of_the_command_become_flags(message: str, expected: str) -> None:
    assert name_flags(message, command) == expected
    assert name_flags(message, None) == message


def test_errors_of_the_runtime_name_flags(tiny_bundle: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "prompts").write_text("a\n")
    for name, rest in (("generate", ["a"]), ("inspect", []), ("audit", [str(tmp_path / "prompts")])):
        assert run([name, str(tiny_bundle), *rest, "--max-seq-len", "1"]) == USAGE
        assert "spaceport: --max-seq-len is 1: expected 2 to 1024" in capfd.readouterr().err


def given(*arguments: str) -> dict[str, Any]:
    return serve.make_context("serve", ["chat=/mnt/chat", *arguments]).params


def test_each_option_of_serve_is_one_of_the_service_or_of_its_runtimes() -> None:
    service = {each.name for each in fields(ServiceOptions)}
    runtime = set(signature(Runtime.open).parameters)
    of_the_command = {"host", "port", "config", "print_config", "log_format", "log_level", "otel", "api_key_file"}
    names = {option.name for option in serve.params} - of_the_command
    assert names - service - runtime == {"bundles"}
    (opener,) = openers_of(given()).values()
    assert isinstance(opener, partial)
    assert opener.keywords.keys() == names & runtime | {"limits"}


def test_options_of_serve_arrive_where_they_belong(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("SPACEPORT_API_KEY", raising=False)
    (tmp_path / "keys").write_text("sk-1\n", "utf-8")
    service = "--strict --no-page --drain-timeout 3 --tool-format json --audit-rate 0.5"
    runtime = "--max-requests 3 --no-prefix-cache --limit logprobs=5"
    options = given(*service.split(), *runtime.split(), "--api-key-file", str(tmp_path / "keys"))
    assert service_options_of(options) == ServiceOptions(
        keys=("sk-1",), strict=True, page=False, drain_timeout=3.0, tool_format="json", audit_rate=0.5
    )
    opener: Any = openers_of(options)["chat"]
    assert opener.args == ("/mnt/chat",)
    assert (opener.keywords["max_requests"], opener.keywords["prefix_cache"]) == (3, False)
    assert opener.keywords["limits"].logprobs == 5
