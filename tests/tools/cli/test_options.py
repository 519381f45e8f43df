"""Options: groups in --help, unused ones; and of `spaceport serve` from flags, variables and a file."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import partial
from inspect import signature
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner

from spaceport import __version__
from spaceport.runtime.decoding import Decoding
from spaceport.runtime.limits import DEFAULT_LIMITS
from spaceport.runtime.sampling.grammar import Grammar
from spaceport.runtime.sampling.option_fields import documented, option, option_fields
from spaceport.runtime.sampling.sampler import Sampling
from spaceport.runtime.session import Runtime
from spaceport.serving.options import ServiceOptions
from spaceport.tools.cli import OK, USAGE, Commands, cli, name_flags, run
from spaceport.tools.cli.generate import command as generate
from spaceport.tools.cli.options import Sectioned, declared_options, declared_values, sections
from spaceport.tools.cli.serve import command as serve
from spaceport.tools.cli.serve import openers_of, service_options_of

Shown = pytest.CaptureFixture[str]


@sections({"temperature": "Sampling"})
@click.command(cls=Sectioned)
@click.option("--limit", type=int, help="Read the first N prompts.")
@click.option("--max-seq-len", type=int)
@click.option("--temperature", type=float, help="Sampling temperature; 0 = greedy.")
@click.option("--ban-token", "banned", multiple=True, help="Never generate this token.")
@click.argument("prompt_file", required=False)
def command(**given: object) -> None:
    """A command."""


def test_help_lists_options_in_groups() -> None:
    shown = CliRunner().invoke(command, ["--help"]).output
    assert re.findall(r"^(\w+):$", shown, re.MULTILINE) == ["Options", "Sampling", "Help"]
    assert shown.index("Sampling:") < shown.index("--ban-token") < shown.index("Help:")


def shown_help(shown: Shown, *arguments: str) -> str:
    assert run([*arguments]) == OK
    return shown.readouterr().out


@pytest.mark.parametrize("arguments", [[], ["generate"], ["bench"], ["bench", "decode"]], ids=" ".join)
def test_help_command_shows_the_help_of_a_command(capsys: Shown, arguments: list[str]) -> None:
    assert shown_help(capsys, "help", *arguments) == shown_help(capsys, *arguments, "--help")


@pytest.mark.torch  # every command is imported
@pytest.mark.parametrize("name", Commands.summaries)
def test_help_lists_the_usual_options_of_commands_with_many_and_help_all_every_one(capsys: Shown, name: str) -> None:
    chosen = Commands().get_command(click.Context(cli), name)
    assert chosen is not None
    options = {option.name: option for option in chosen.params if isinstance(option, click.Option)}
    if len(options) <= 20:
        return
    assert isinstance(chosen, Sectioned)
    assert options.keys() >= set(chosen.usual)
    flags = {name: re.compile(rf"^  (-\w, )?{option.opts[0]}\b", re.MULTILINE) for name, option in options.items()}
    shown = {name for name, flag in flags.items() if flag.search(shown_help(capsys, chosen.name or "", "--help"))}
    assert shown == set(chosen.usual)
    assert 8 <= len(shown) <= 15
    every = shown_help(capsys, chosen.name or "", "--help-all")
    assert {name for name, flag in flags.items() if flag.search(every)} == options.keys()


def test_the_package_runs_as_a_module() -> None:
    done = subprocess.run([sys.executable, "-m", "spaceport", "-V"], capture_output=True, text=True, check=True)
    assert done.stdout == f"spaceport, version {__version__}\n"


def test_shells_complete_commands_and_options() -> None:
    for words, number, expected in (
        ("spaceport ge", "1", "generate"),
        ("spaceport generate --js", "2", "--json-schema"),
    ):
        variables = {"_SPACEPORT_COMPLETE": "bash_complete", "COMP_WORDS": words, "COMP_CWORD": number}
        result = CliRunner(env=variables).invoke(cli, prog_name="spaceport")
        assert f"plain,{expected}" in result.stdout.splitlines()


@documented
@dataclass(frozen=True)
class Declaring:
    """Options."""

    warmth: float = option(0.5, "How warm it is.", 0, 9)
    names: tuple[str, ...] = ()  # no option
    loud: bool = option(False, "Say it loudly; `max_seq_len` is no limit.")
    words: Sequence[str] = option((), "A word.", unset="none", flag="--word", metavar="TEXT")


def test_a_declared_option_is_a_flag_with_its_text_its_range_and_its_default() -> None:
    declaring = click.command()(declared_options(Declaring)(lambda **given: click.echo(repr(given))))
    shown = CliRunner().invoke(declaring, ["--help"]).output
    assert "--warmth X   How warm it is (0 to 9; default: 0.5)." in shown
    assert "--loud       Say it loudly; --max-seq-len is no limit." in shown
    assert "--word TEXT  A word (repeatable)." in shown
    result = CliRunner().invoke(declaring, ["--warmth", "2", "--word", "a", "--word", "b"])
    assert ast.literal_eval(result.output) == {"warmth": 2.0, "loud": None, "words": ("a", "b")}
    assert declared_values(Declaring, {"warmth": 2.0, "loud": None, "words": ()}) == {"warmth": 2.0}


def test_every_declared_flag_is_one_of_generate() -> None:
    flags = {flag for parameter in generate.params for flag in parameter.opts}
    declared = {option.flag for kind in (Decoding, Sampling, Grammar) for option in option_fields(kind)}
    assert declared - {None} <= flags


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
    of_the_command = {"host", "port", "config", "log_format", "log_level", "api_key_file"}
    names = {option.name for option in serve.params} - of_the_command
    assert names - service - runtime == {"bundles"}
    (opener,) = openers_of(given()).values()
    assert isinstance(opener, partial)
    assert opener.keywords.keys() == names & runtime | {"limits"}


def test_options_of_serve_arrive_where_they_belong(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("SPACEPORT_API_KEY", raising=False)
    (tmp_path / "keys").write_text("sk-1\n", "utf-8")
    service = "--key-metrics --no-page --drain-timeout 3 --tool-format json --audit-rate 0.5"
    runtime = "--max-requests 3 --no-prefix-cache --limit logprobs=5"
    options = given(*service.split(), *runtime.split(), "--api-key-file", str(tmp_path / "keys"))
    assert service_options_of(options) == ServiceOptions(
        keys=("sk-1",), key_metrics=True, page=False, drain_timeout=3.0, tool_format="json", audit_rate=0.5
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


def test_flags_override_variables_and_variables_override_the_file(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = file_of(tmp_path, "port = 1\nmax-requests = 2\nqueue_limit = 3\nkey_metrics = true\npage = false\n")
    monkeypatch.setenv("SPACEPORT_PORT", "11")
    monkeypatch.setenv("SPACEPORT_MAX_REQUESTS", "12")
    values = given("--config", file, "--port", "21")
    assert (values["port"], values["max_requests"], values["queue_limit"], values["host"]) == (21, 12, 3, "127.0.0.1")
    assert (values["key_metrics"], values["page"]) == (True, False)
    monkeypatch.setenv("SPACEPORT_CONFIG", file)
    assert given()["queue_limit"] == 3


def test_bundles_and_limits_are_tables_of_the_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = file_of(tmp_path, '[models]\nchat = "a/b"\n"my code" = "c"\n[limits]\nstop_strings = 32\n')
    values = serve.make_context("serve", ["--config", file]).params
    assert values["bundles"] == {"chat": "a/b", "my code": "c"}
    assert values["limits"].stop_strings == 32
    values = serve.make_context("serve", ["--config", file, "other=d", "--limit", "logprobs=5"]).params
    assert values["bundles"] == {"other": "d"}
    assert (values["limits"].logprobs, values["limits"].stop_strings) == (5, DEFAULT_LIMITS.stop_strings)
    monkeypatch.setenv("SPACEPORT_MODELS", "one=x two=y")
    assert serve.make_context("serve", ["--config", file]).params["bundles"] == {"one": "x", "two": "y"}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("prot = 1", "`prot` is not an option: `port` is one"),
        ("port = 'x'", "`port`: 'x' is not a valid integer"),
        ("max_requests = 1.5", "`max_requests`: '1.5' is not a valid integer"),
        ("max_requests = true", "`max_requests`: 'True' is not a valid integer"),
        ("key_metrics = 3", "`key_metrics`: '3' is not a valid boolean"),
        ("models = 3", "`models` is 3: expected a table"),
        ("[limits]\nstop_stings = 3", "--limit is 'stop_stings=3': expected NAME=N with one of"),
        ("port = 70000", "`port`: 70000 is not in the range 0<=x<=65535"),
        ("max-requests = 1\nmax_requests = 2", "`max_requests` is given twice"),
        ("api_key = 'sk-secret'", "`api_key` is not an option: `api_key_file` is one"),
        ("port = ", "cannot be read: Invalid value"),
    ],
)
def test_an_error_in_the_file_names_the_file_and_the_option(
    capsys: Shown, tmp_path: Path, content: str, message: str
) -> None:
    file = file_of(tmp_path, content)
    assert run(["serve", "--config", file]) == USAGE
    found = capsys.readouterr().err
    assert file in found or "--limit" in message
    assert message in found
    assert "secret" not in found


def test_a_file_that_never_ends_or_is_nested_deeply_is_refused(capsys: Shown, tmp_path: Path) -> None:
    fifo = tmp_path / "fifo.toml"
    os.mkfifo(fifo)
    for name in (str(fifo), "/dev/zero", str(tmp_path), file_of(tmp_path, "# " * 2**19 + "#")):
        assert run(["serve", "--config", name]) == USAGE
        assert f"{name} is not a file of at most {2**20} bytes" in capsys.readouterr().err
    for name in ("none.toml", file_of(tmp_path, "port = " + "[" * 100_000)):
        assert run(["serve", "--config", name]) == USAGE
        assert f"{name} cannot be read" in capsys.readouterr().err
