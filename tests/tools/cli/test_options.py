"""Options: groups in --help, former names, unused ones; and of `spaceport serve` from flags, variables and a file."""

from __future__ import annotations

import os
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
from spaceport.serving.options import ServiceOptions
from spaceport.tools.cli import OK, USAGE, Commands, cli, name_flags, run
from spaceport.tools.cli.configuration import entry, tomllib
from spaceport.tools.cli.options import Renamed, Sectioned, Unused, refuse_unused
from spaceport.tools.cli.serve import command as serve
from spaceport.tools.cli.serve import openers_of, service_options_of

Shown = pytest.CaptureFixture[str]


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


def test_only_option_names_of_the_command_become_flags() -> None:
    for message, expected in (
        ("max_seq_len is 1: expected 2 to 1024", "--max-seq-len is 1: expected 2 to 1024"),
        ("raise max_seq_len (--max-seq-len; the model goes up to 9)", "raise --max-seq-len (the model goes up to 9)"),
        ("limit is -1: expected a limit", "--limit is -1: expected a limit"),
        ("banned is 3", "--ban-token is 3"),
        ("give Decoding(max_seq_len=4)", "give Decoding(max_seq_len=4)"),
        ("max_seq_lens and prompt_file", "max_seq_lens and prompt_file"),
    ):
        assert name_flags(message, command) == expected
        assert name_flags(message, None) == message


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


@pytest.fixture(autouse=True)
def no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    """No variable of the machine sets an option."""
    for name in [name for name in os.environ if name.startswith("SPACEPORT_")]:
        monkeypatch.delenv(name)


def file_of(folder: Path, content: str) -> str:
    file = folder / "serve.toml"
    file.write_text(content, "utf-8")
    return str(file)


def printed(shown: Shown, *arguments: str) -> tuple[dict[str, Any], dict[str, str]]:
    """The options that --print-config prints, and the source of each."""
    assert run(["serve", "--print-config", *arguments]) == OK
    text = shown.readouterr().out
    sources = re.findall(r"^(\S+) = .*  # (.*)$", text, re.MULTILINE)
    return tomllib.loads(text), dict(sources)


def refused(shown: Shown, *arguments: str) -> str:
    assert run(["serve", "--print-config", *arguments]) == USAGE
    return shown.readouterr().err


def test_flags_override_variables_and_variables_override_the_file(
    capsys: Shown, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = file_of(tmp_path, "port = 1\nmax-requests = 2\nqueue_limit = 3\nstrict = true\n")
    monkeypatch.setenv("SPACEPORT_PORT", "11")
    monkeypatch.setenv("SPACEPORT_MAX_REQUESTS", "12")
    values, sources = printed(capsys, "--config", file, "--port", "21")
    assert (values["port"], sources["port"]) == (21, "command line")
    assert (values["max_requests"], sources["max_requests"]) == (12, "environment, SPACEPORT_MAX_REQUESTS")
    assert (values["queue_limit"], sources["queue_limit"]) == (3, "file")
    assert (values["strict"], sources["strict"]) == (True, "file")
    assert (values["host"], sources["host"]) == ("127.0.0.1", "default")
    monkeypatch.setenv("SPACEPORT_CONFIG", file)
    assert printed(capsys)[0]["queue_limit"] == 3


def test_bundles_and_limits_are_tables_of_the_file(
    capsys: Shown, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = file_of(tmp_path, '[models]\nchat = "a/b"\n"my code" = "c"\n[limits]\nstop_strings = 32\n')
    values, sources = printed(capsys, "--config", file)
    assert values["models"] == {"chat": "a/b", "my code": "c"}
    assert values["limits"] == {"stop_strings": 32}
    assert sources["chat"] == "file"
    values, _ = printed(capsys, "--config", file, "other=d", "--limit", "logprobs=5")
    assert (values["models"], values["limits"]) == ({"other": "d"}, {"logprobs": 5})
    monkeypatch.setenv("SPACEPORT_MODELS", "one=x two=y")
    values, sources = printed(capsys, "--config", file)
    assert values["models"] == {"one": "x", "two": "y"}
    assert sources["one"] == "environment, SPACEPORT_MODELS"


def test_what_is_printed_can_be_read_again(capsys: Shown, tmp_path: Path) -> None:
    given = ["chat=/x", "--port", "1", "--limit", "stop_chars=9", "--no-prefix-cache", "--require-signature", "k.pub"]
    assert run(["serve", "--print-config", *given]) == OK
    text = capsys.readouterr().out
    values, sources = printed(capsys, "--config", file_of(tmp_path, text))
    assert values == tomllib.loads(text)
    assert set(sources.values()) == {"file"}
    unset = set(re.findall(r"^# (\S+) is not set$", text, re.MULTILINE))
    options = {option.name for option in serve.params} - {"config", "print_config", "bundles", "limits"}
    assert unset | set(values) == options | {"models", "limits"}


def test_keys_are_counted_and_never_shown_and_a_variable_with_a_typing_error_is_reported(
    capsys: Shown, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPACEPORT_API_KEY", "sk-secret-1,sk-secret-2")
    monkeypatch.setenv("SPACEPORT_MAX_REQUSTS", "1")
    monkeypatch.setenv("SPACEPORT_SERVICE_HOST", "10.0.0.1")  # set by Kubernetes
    assert run(["serve", "--print-config"]) == OK
    shown = capsys.readouterr()
    assert "# keys that clients may send: 2" in shown.out
    assert "secret" not in shown.out + shown.err
    (warning,) = shown.err.splitlines()
    assert "SPACEPORT_MAX_REQUSTS has no effect: SPACEPORT_MAX_REQUESTS is an option" in warning


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("prot = 1", "`prot` is not an option: `port` is one"),
        ("port = '1'", "`port` is a string ('1'): expected a whole number"),
        ("[models]\na = {b = 1}", "`models`: `a` is a table: expected a string"),
        ("port = 70000", "`port`: 70000 is not in the range 0<=x<=65535"),
        ("max-requests = 1\nmax_requests = 2", "`max_requests` is given twice"),
        ("api_key = 'sk-secret'", "`api_key` is not an option: `api_key_file` is one"),
    ],
)
def test_an_error_in_the_file_names_the_file_and_the_option(
    capsys: Shown, tmp_path: Path, content: str, message: str
) -> None:
    file = file_of(tmp_path, content)
    found = refused(capsys, "--config", file)
    assert file in found
    assert message in found
    assert "secret" not in found


def test_an_error_names_the_variable_the_flag_or_the_file(capsys: Shown, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "none.toml cannot be read" in refused(capsys, "--config", "none.toml")
    assert "'--port': 'x'" in refused(capsys, "--port", "x")
    for name, value, message in (
        ("MAX_REQUESTS", "many", "Invalid value for SPACEPORT_MAX_REQUESTS: 'many'"),
        ("MAX_REQUESTS", "tcp://10.0.0.1:80", "rename the service"),
        ("LIMITS", "stop_strings=3 stop_stings=3", "Invalid value for SPACEPORT_LIMITS: --limit is 'stop_stings=3'"),
    ):
        with monkeypatch.context() as patch:
            patch.setenv(f"SPACEPORT_{name}", value)
            assert message in refused(capsys)


@pytest.mark.parametrize("value", ['a"b\\c\n\x7f\x01é', True, 3, -2.5, float("inf"), ["a", 1], Path("/x y")])
def test_an_entry_is_read_as_it_was_given(value: Any) -> None:
    expected = str(value) if isinstance(value, Path) else value
    assert tomllib.loads(entry('k "1"', value)) == {'k "1"': expected}
    with pytest.raises(TypeError, match="object has no spelling"):
        entry("a", object())
