"""Tokenizer information: what clients need that join prompts from token ids."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
from starlette.testclient import TestClient

from spaceport.runtime.session import Runtime
from spaceport.tools.serve.application import application
from spaceport.tools.serve.options import ServiceOptions

pytestmark = pytest.mark.slow

PROMPT = "import json\n\n\ndef load(path):\n"


def test_clients_that_join_prompts_from_token_ids_can_tokenize(demo_bundle: Path) -> None:
    opener = partial(Runtime.open, demo_bundle)
    with TestClient(application({"demo": opener, "other": opener}, ServiceOptions())) as client, opener() as runtime:
        check(client, runtime)


def check(client: TestClient, runtime: Runtime) -> None:
    info = client.get("/tokenizer_info", params={"model": "demo"}).json()
    assert info["bos_token"] == "<s>"
    assert "messages" in info["chat_template"]
    assert client.get("/tokenizer_info").status_code == 404  # two models

    def alone(text: str) -> list[int]:
        given = {"model": "demo", "prompt": text, "add_special_tokens": False}
        found: list[int] = client.post("/tokenize", json=given).json()["tokens"]
        return found

    assert [runtime.tokenizer.token_to_id("<s>"), *alone(PROMPT)] == runtime.tokens_of(PROMPT)
    assert alone("<s>") == [runtime.tokenizer.token_to_id("<s>")]
    given = {"model": "demo", "prompt": "x" * 2_000_000, "add_special_tokens": False}
    assert client.post("/tokenize", json=given).status_code == 400
