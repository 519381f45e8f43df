"""Sign: a key pair, a signed bundle, and the commands that require its signature."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from click import Option

from spaceport.exporter.signing import PRIVATE_FILE, PUBLIC_FILE
from spaceport.exporter.tensorrt.engines import store_engine
from spaceport.graphs.contract.ed25519 import SIGNATURE_FILE, read_public_key
from spaceport.graphs.contract.manifest import DATA_FILE
from spaceport.runtime.bundle import read_manifest
from spaceport.tools.cli import Commands, run
from spaceport.tools.cli.exit_codes import INPUT, OK, USAGE
from support.small_bundle import ENGINE, RECORD, new_bundle

OPENING = ("generate", "inspect", "check", "audit", "plan", "build", "distill", "acceptance")


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    return new_bundle(tmp_path / "bundle")


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    assert run(["sign", "--new-key", str(tmp_path / "keys")]) == OK
    return tmp_path / "keys"


def signed_by(bundle: Path, capfd: pytest.CaptureFixture[str]) -> str:
    """The row of `inspect` that names the signer."""
    capfd.readouterr()
    assert run(["inspect", str(bundle)]) == OK
    (line,) = [line for line in capfd.readouterr().out.splitlines() if line.startswith("signed by")]
    return line.removeprefix("signed by").strip()


def test_a_signed_bundle_is_shown_and_opened_with_its_key(
    bundle: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    keys = tmp_path / "keys"
    assert run(["sign", "--new-key", str(keys)]) == OK
    created = capfd.readouterr().out
    fingerprint = read_public_key(keys / PUBLIC_FILE).fingerprint
    assert f"{keys / PUBLIC_FILE}: public key {fingerprint}\n" in created
    require = ["--require-signature", str(keys / PUBLIC_FILE)]
    assert signed_by(bundle, capfd) == "nobody (no signature)"
    assert run(["inspect", str(bundle), *require]) == INPUT
    assert "has no signature" in capfd.readouterr().err
    assert run(["sign", str(bundle), "--key", str(keys / PRIVATE_FILE)]) == OK
    assert capfd.readouterr().out == f"{bundle}: signed with key {fingerprint}\n"
    assert signed_by(bundle, capfd) == f"key {fingerprint}"
    assert run(["inspect", str(bundle), *require, "--json"]) == OK
    assert json.loads(capfd.readouterr().out)["signed"] == {
        "signed": True,
        "valid": True,
        "key": fingerprint,
        "problem": "",
    }


def test_a_build_makes_the_signature_visibly_invalid(
    bundle: Path, keys: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run(["sign", str(bundle), "--key", str(keys / PRIVATE_FILE)]) == OK
    store_engine(bundle, ENGINE, memoryview(b"engine!"), replace(RECORD, graph=read_manifest(bundle).graph))
    assert signed_by(bundle, capfd).startswith("INVALID: not a signature of this manifest")
    assert run(["inspect", str(bundle), "--require-signature", str(keys / PUBLIC_FILE)]) == INPUT
    assert run(["sign", str(bundle), "--key", str(keys / PRIVATE_FILE)]) == OK
    assert run(["inspect", str(bundle), "--require-signature", str(keys / PUBLIC_FILE)]) == OK


def test_a_damaged_bundle_is_not_signed(bundle: Path, keys: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (bundle / DATA_FILE).write_bytes(b"other weights")
    assert run(["sign", str(bundle), "--key", str(keys / PRIVATE_FILE)]) == INPUT
    assert "the manifest says" in capfd.readouterr().err
    assert not (bundle / SIGNATURE_FILE).exists()


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        ([], USAGE, "no BUNDLE: expected BUNDLE with --key PRIVATE_KEY, or --new-key FOLDER"),
        (["BUNDLE"], USAGE, "no --key: expected BUNDLE with --key"),
        (["BUNDLE", "--new-key", "FOLDER"], USAGE, "creates a key pair and signs nothing: leave BUNDLE and --key out"),
        (["BUNDLE", "--key", "missing.pem"], INPUT, "missing.pem: No such file or directory: expected a readable"),
        (["BUNDLE", "--key", "PUBLIC"], INPUT, "is a public key: expected the private key"),
    ],
)
def test_mistakes_are_refused_with_what_to_do(
    bundle: Path, keys: Path, capfd: pytest.CaptureFixture[str], arguments: list[str], code: int, message: str
) -> None:
    named = {"BUNDLE": str(bundle), "FOLDER": str(bundle.with_name("new")), "PUBLIC": str(keys / PUBLIC_FILE)}
    assert run(["sign", *(named.get(each, each) for each in arguments)]) == code
    assert message in capfd.readouterr().err
    assert not (bundle / SIGNATURE_FILE).exists()


@pytest.mark.parametrize("name", OPENING)
@pytest.mark.torch
def test_every_command_that_opens_a_bundle_can_require_a_signature(name: str) -> None:
    import click

    command = Commands("spaceport").get_command(click.Context(click.Command("spaceport")), name)
    assert command is not None
    flags = [flag for option in command.params if isinstance(option, Option) for flag in option.opts]
    assert "--require-signature" in flags


@pytest.mark.parametrize("name", ["generate", "inspect", "audit", "plan", "distill", "acceptance"])
def test_commands_refuse_an_unsigned_bundle(
    name: str, bundle: Path, keys: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "a"}]}\n')
    rest = {
        "generate": ["a"],
        "audit": [str(prompts)],
        "distill": [str(prompts), str(tmp_path / "out.jsonl")],
        "acceptance": [str(prompts)],
    }
    arguments = [name, str(bundle), *rest.get(name, []), "--require-signature", str(keys / PUBLIC_FILE)]
    assert run(arguments) == INPUT
    assert "has no signature" in capfd.readouterr().err
