"""Options: groups in --help, former names, unused ones; and of `spaceport serve` from flags, variables and a file."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from functools import partial
from inspect import signature
from pathlib import Path
from typing import Any, ClassVar

import click
import pytest
from click.testing import CliRunner

from spaceport import __version__
from spaceport.graphs.contract.faults import OptionFault
from spaceport.runtime.decoding import Decoding
from spaceport.runtime.limits import DEFAULT_LIMITS
from spaceport.runtime.sampling.grammar import Grammar
from spaceport.runtime.sampling.option_fields import OptionField, documented, option, option_fields
from spaceport.runtime.sampling.sampler import Sampling
from spaceport.runtime.session import Runtime
from spaceport.serving.openapi import schemas
from spaceport.serving.options import ServiceOptions
from spaceport.tools.cli import OK, USAGE, Commands, cli, name_flags, run
from spaceport.tools.cli.configuration import entry, tomllib
from spaceport.tools.cli.generate import command as generate
from spaceport.tools.cli.options import (
    Renamed,
    Sectioned,
    Unused,
    declared_options,
    declared_values,
    refuse_unused,
)
from spaceport.tools.cli.serve import command as serve
from spaceport.tools.cli.serve import openers_of, service_options_of
from support.paths import DOCS, ROOT

Shown = pytest.CaptureFixture[str]
FIELDS_PAGE = (DOCS / "service_fields.md").read_text("utf-8")


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


def shown_help(shown: Shown, *arguments: str) -> str:
    assert run([*arguments]) == OK
    return shown.readouterr().out


def test_the_list_of_commands_fits_on_a_screen(capsys: Shown, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    lines = shown_help(capsys, "--help").splitlines()
    assert len(lines) <= 24
    assert max(map(len, lines)) <= 80
    assert {line.split()[0] for line in lines if line.startswith("  ")} >= Commands.summaries.keys()
    assert shown_help(capsys, "-V") == shown_help(capsys, "--version")


@pytest.mark.parametrize("arguments", [[], ["generate"], ["bench"], ["bench", "decode"]], ids=" ".join)
def test_help_command_shows_the_help_of_a_command(capsys: Shown, arguments: list[str]) -> None:
    assert shown_help(capsys, "help", *arguments) == shown_help(capsys, *arguments, "--help")
    assert run(["help", "genrate"]) == USAGE
    assert "did you mean generate?" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["generate", "serve", "export", "tune"])
def test_help_lists_the_usual_options_of_commands_with_many_and_help_all_every_one(capsys: Shown, name: str) -> None:
    chosen = Commands().get_command(click.Context(cli), name)
    assert isinstance(chosen, Sectioned)
    options = {option.name: option for option in chosen.params if isinstance(option, click.Option)}
    assert chosen.usual <= options.keys()  # type: ignore[operator]
    flags = {name: re.compile(rf"^  (-\w, )?{option.opts[0]}\b", re.MULTILINE) for name, option in options.items()}
    shown = {name for name, flag in flags.items() if flag.search(shown_help(capsys, chosen.name or "", "--help"))}
    assert shown == set(chosen.usual)
    assert 8 <= len(shown) <= 15
    every = shown_help(capsys, chosen.name or "", "--help-all")
    assert {name for name, flag in flags.items() if flag.search(every)} == options.keys()


@pytest.mark.torch  # every command is imported
def test_every_command_with_more_than_20_options_has_usual_ones() -> None:
    for name in Commands.summaries:
        chosen = Commands().get_command(click.Context(cli), name)
        assert chosen is not None
        if sum(isinstance(parameter, click.Option) for parameter in chosen.params) > 20:
            assert isinstance(chosen, Sectioned)
            assert chosen.usual


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["genrate"], "there is no command genrate: did you mean generate?"),
        (["xyzzy"], "there is no command xyzzy: `spaceport --help` lists the commands"),
        (["bench", "decod"], "there is no command decod: did you mean decode?"),
    ],
)
def test_a_mistyped_command_is_an_error_that_names_a_similar_one(
    capsys: Shown, arguments: list[str], message: str
) -> None:
    assert run(arguments) == USAGE
    assert message in capsys.readouterr().err


def test_the_package_runs_as_a_module() -> None:
    done = subprocess.run([sys.executable, "-m", "spaceport", "-V"], capture_output=True, text=True, check=True)
    assert done.stdout == f"spaceport, version {__version__}\n"


def test_shells_complete_commands_and_options() -> None:
    for words, expected in (("spaceport ge", "generate"), ("spaceport generate --js", "--json-schema")):
        result = CliRunner(
            env={
                "_SPACEPORT_COMPLETE": "bash_complete",
                "COMP_WORDS": words,
                "COMP_CWORD": str(len(words.split()) - 1),
            }
        ).invoke(cli, prog_name="spaceport")
        assert f"plain,{expected}" in result.stdout.splitlines()
    source = CliRunner(env={"_SPACEPORT_COMPLETE": "bash_source"}).invoke(cli, prog_name="spaceport")
    assert "complete -o nosort -F _spaceport_completion spaceport" in source.stdout


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


DECLARED = [(kind, declared) for kind in (Decoding, Sampling, Grammar) for declared in option_fields(kind)]


@pytest.mark.parametrize(("kind", "declared"), DECLARED, ids=lambda value: getattr(value, "name", ""))
def test_every_declared_option_is_in_the_docstring_the_help_the_schema_and_the_docs(
    kind: type, declared: OptionField
) -> None:
    assert f"- `{declared.name}`: {declared.described}" in " ".join((kind.__doc__ or "").split())
    components = schemas(DEFAULT_LIMITS, 16)
    flags = {flag: parameter for parameter in generate.params for flag in parameter.opts}
    if declared.flag is not None:
        (first_words,) = re.findall(r"^[^`]{1,30}", declared.text)
        assert str(getattr(flags[declared.flag], "help", "")).startswith(first_words)
    if declared.request is not None:
        structure, _, field = declared.request.rpartition(".")
        owner = {"": "ChatBody", "spaceport": "Own", "structured_outputs": "StructuredOutputs"}[structure]
        property_schema = components[owner]["properties"][field]
        assert structure == "structured_outputs" or property_schema["description"].startswith(declared.text)
    if declared.flag is not None or declared.request is not None:
        row = re.findall(rf"^\| `{declared.name}` .*", FIELDS_PAGE, re.MULTILINE)[0]
        assert f"| {declared.text}" in row
        assert declared.default_text in row


def literals(file: Path) -> list[str]:
    """The texts in a Python file; those of f-strings are their parts."""
    found = ast.walk(ast.parse(file.read_text("utf-8")))
    return [node.value for node in found if isinstance(node, ast.Constant) and isinstance(node.value, str)]


def test_the_text_of_an_option_is_written_once() -> None:
    texts = {declared.text for _, declared in DECLARED}
    written = Counter(text for file in product_files() for text in literals(file) if text in texts)
    assert {text: count for text, count in written.items() if count != 1} == {}
    assert written.keys() == texts
    pages = "\n".join(page.read_text("utf-8") for page in DOCS.glob("*.md") if page.name != "service_fields.md")
    assert [text for text in texts if text in pages] == []
    helps = Counter(
        ast.unparse(keyword.value)
        for file in (ROOT / "tools/cli").glob("*.py")
        for call in ast.walk(ast.parse(file.read_text("utf-8")))
        if isinstance(call, ast.Call)
        for keyword in call.keywords
        if keyword.arg == "help" and isinstance(keyword.value, ast.Constant | ast.JoinedStr)
    )
    assert [text for text, count in helps.items() if count > 1] == []


def product_files() -> Iterator[Path]:
    """The Python files of the product, each once."""
    for folder in ("graphs", "exporter", "runtime", "serving", "tools", "benchmarks", "recipes", "docs"):
        yield from (ROOT / folder).rglob("*.py")


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
        for parameter in chosen.params if chosen is not None else ():
            if isinstance(parameter, Renamed):
                yield from ((name, former, parameter.opts[0]) for former in parameter.former)


@pytest.mark.torch
def test_former_names_of_options_still_work(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert {*renamed_options()} == {
        ("export", "--calibrate", "--calibration-data"),
        ("build", "--flavour", "--backend"),
        ("build", "--prompt-rows", "--prefill-rows"),
        ("check", "--long", "--long-context"),
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


def test_a_file_that_never_ends_or_is_nested_deeply_is_refused(capsys: Shown, tmp_path: Path) -> None:
    fifo = tmp_path / "fifo.toml"
    os.mkfifo(fifo)
    for name in (str(fifo), "/dev/zero", str(tmp_path), file_of(tmp_path, "# " * 2**19 + "#")):
        assert f"{name} is not a file of at most {2**20} bytes" in refused(capsys, "--config", name)
    assert "is not TOML" in refused(capsys, "--config", file_of(tmp_path, "port = " + "[" * 100_000))


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
