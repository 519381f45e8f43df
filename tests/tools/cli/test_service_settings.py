"""Service settings: no option of `spaceport serve` is lost on its way to the service and its runtimes."""

from __future__ import annotations

from dataclasses import fields
from functools import partial
from inspect import signature
from pathlib import Path
from typing import Any

import pytest

from spaceport.runtime.session import Runtime
from spaceport.tools.cli.serve import command
from spaceport.tools.cli.service_settings import openers_of, service_options_of
from spaceport.tools.serve.options import ServiceOptions

_OF_THE_COMMAND = {"host", "port", "config", "print_config", "log_format", "log_level", "otel", "api_key_file"}


def given(*arguments: str) -> dict[str, Any]:
    return command.make_context("serve", ["chat=/mnt/chat", *arguments]).params


def test_each_option_is_one_of_the_service_or_of_its_runtimes() -> None:
    service = {each.name for each in fields(ServiceOptions)}
    runtime = set(signature(Runtime.open).parameters)
    names = {option.name for option in command.params} - _OF_THE_COMMAND
    assert names - service - runtime == {"bundles"}
    (opener,) = openers_of(given()).values()
    assert isinstance(opener, partial)
    assert opener.keywords.keys() == names & runtime | {"limits"}


def test_options_arrive_where_they_belong(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("SPACEPORT_API_KEY", raising=False)
    (tmp_path / "keys").write_text("sk-1\n", "utf-8")
    options = given(
        *("--strict", "--no-page", "--drain-timeout", "3", "--tool-format", "json", "--audit-rate", "0.5"),
        *(
            "--api-key-file",
            str(tmp_path / "keys"),
            "--max-requests",
            "3",
            "--no-prefix-cache",
            "--limit",
            "logprobs=5",
        ),
    )
    assert service_options_of(options) == ServiceOptions(
        keys=("sk-1",), strict=True, page=False, drain_timeout=3.0, tool_format="json", audit_rate=0.5
    )
    opener: Any = openers_of(options)["chat"]
    assert opener.args == ("/mnt/chat",)
    assert (opener.keywords["max_requests"], opener.keywords["prefix_cache"]) == (3, False)
    assert opener.keywords["limits"].logprobs == 5
