"""Methods: the files show which method it is, and what is missing where they do not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from spaceport.exporter.sar_config import CheckpointError
from spaceport.tools.adopt.given import Given, Request
from spaceport.tools.adopt.methods import find_method

BASE, ADAPTER = Path("base"), Path("adapter")


def found(adapter: Path | None, config: dict[str, Any], training: dict[str, Any], request: Request) -> tuple[str, str]:
    method, evidence = find_method(Given(BASE, adapter, config, training, request))
    return method.name, evidence


@pytest.mark.parametrize(
    ("adapter", "config", "training", "request_", "expected"),
    [
        (None, {"pard_token": 7}, {}, Request(), ("pard", "pard_token 7 in config.json")),
        (ADAPTER, {}, {"noise": "uniform", "mask_token_id": 7}, Request(), ("uno", "noise uniform in config.json")),
        (ADAPTER, {}, {"mask_token_id": 7}, Request(), ("gated-lora", "mask_token_id 7 in config.json")),
        (ADAPTER, {"mask_token_id": 7}, {}, Request(), ("gated-lora", "mask_token_id 7 in config.json")),
        (ADAPTER, {}, {}, Request(mask_tokens=("9",)), ("gated-lora", "--mask-token 9")),
        (ADAPTER, {}, {}, Request(method="uno"), ("uno", "--method uno")),
        (BASE / "linear_spec_lora", {}, {"mask_token_id": 7}, Request(), ("nemotron", "folder linear_spec_lora")),
        (
            ADAPTER,
            {"model_type": "nemotron_labs_diffusion", "dlm_paradigm": "bidirectional", "mask_token_id": 7},
            {},
            Request(),
            ("nemotron", "model_type nemotron_labs_diffusion"),
        ),
        (ADAPTER, {"mask_token_id": 7}, {}, Request(method="nemotron"), ("nemotron", "--method nemotron")),
        (
            ADAPTER,
            {},
            {"noise": "uniform", "mask_token_id": 7},
            Request("gated-lora"),
            ("gated-lora", "mask_token_id 7 in config.json"),
        ),
    ],
)
def test_the_files_show_the_method(
    adapter: Path | None, config: dict[str, Any], training: dict[str, Any], request_: Request, expected: tuple[str, str]
) -> None:
    assert found(adapter, config, training, request_) == expected


@pytest.mark.parametrize(
    ("adapter", "request_", "message"),
    [
        (
            None,
            Request(),
            r"base: config.json names no mask token: expected pard_token, ptd_token_id or mask_token_id in it",
        ),
        (None, Request(method="pard"), r"base: config.json names no mask token"),
        (ADAPTER, Request(), r"adapter: no mask token is known, and no noise: .*--mask-token .*--method uno"),
    ],
)
def test_what_is_missing_is_named(adapter: Path | None, request_: Request, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        found(adapter, {}, {}, request_)
