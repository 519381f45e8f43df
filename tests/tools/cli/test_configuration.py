"""Configuration: flags, environment variables and the file of --config set the options of `spaceport serve`."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest

from spaceport.tools.cli import run
from spaceport.tools.cli.configuration import tomllib
from spaceport.tools.cli.exit_codes import OK, USAGE
from spaceport.tools.cli.serve import command
from spaceport.tools.cli.toml_text import entry

Shown = pytest.CaptureFixture[str]


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
    options = {option.name for option in command.params} - {"config", "print_config", "bundles", "limits"}
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
        ("xyzzy = 1", "`xyzzy` is not an option: expected one of host, port,"),
        ("port = '1'", "`port` is a string ('1'): expected a whole number"),
        ("port = true", "`port` is a boolean ('True'): expected a whole number"),
        ("strict = 1", "`strict` is a whole number ('1'): expected true or false"),
        ("[models]\na = {b = 1}", "`models`: `a` is a table: expected a string"),
        ("[limits]\nstop_stings = 3", "expected NAME=N with one of prompt_chars"),
        ("[limits]\nstop_strings = -1", "--limit is 'stop_strings=-1'"),
        ("port = 70000", "`port`: 70000 is not in the range 0<=x<=65535"),
        ("port = 1\nport = 2", "is not TOML: "),
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
    assert run(["serve"]) == USAGE
    assert "no bundle is given" in capsys.readouterr().err
    monkeypatch.setenv("SPACEPORT_MAX_REQUESTS", "many")
    assert "Invalid value for SPACEPORT_MAX_REQUESTS: 'many'" in refused(capsys)
    monkeypatch.setenv("SPACEPORT_MAX_REQUESTS", "tcp://10.0.0.1:80")
    assert "rename the service" in refused(capsys)
    monkeypatch.delenv("SPACEPORT_MAX_REQUESTS")
    monkeypatch.setenv("SPACEPORT_LIMITS", "stop_strings=3 stop_stings=3")
    assert "Invalid value for SPACEPORT_LIMITS: --limit is 'stop_stings=3'" in refused(capsys)
    monkeypatch.delenv("SPACEPORT_LIMITS")
    assert "'--port': 'x'" in refused(capsys, "--port", "x")


@pytest.mark.parametrize("value", ['a"b\\c\n\x7f\x01é', True, 3, -2.5, float("inf"), ["a", 1], Path("/x y")])
def test_an_entry_is_read_as_it_was_given(value: Any) -> None:
    expected = str(value) if isinstance(value, Path) else value
    assert tomllib.loads(entry('k "1"', value)) == {'k "1"': expected}
    with pytest.raises(TypeError, match="object has no spelling"):
        entry("a", object())
