"""`spaceport bench serve`: services and the embedded runtime give the right answers under load."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from spaceport.tools.bench.serve.subjects import EmbeddedRuntime
from spaceport.tools.cli import run
from spaceport.tools.cli.exit_codes import ACCURACY, INPUT, OK, USAGE

Capture = pytest.CaptureFixture[str]
PROMPTS = ("import json\n\n\ndef load(path):\n", "def close(self):\n", "class Reader:\n", "for line in lines:\n")


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(json.dumps({"text": one}) + "\n" for one in PROMPTS), "utf-8")
    return file


@pytest.mark.slow
def test_all_answers_are_right_while_clients_leave(
    prompts: Path, demo_bundle: Path, tmp_path: Path, capsys: Capture
) -> None:
    shares = ["--cancelled", "0.2", "--dropped", "0.1", "--slow", "0.1", "--unstreamed", "0.3"]
    load = [
        "--clients",
        "1,12",
        "--requests",
        "24",
        "--max-tokens",
        "40",
        "--rounds",
        "1",
        "--max-requests",
        "4",
        "--ramp",
        "0",
    ]
    table = tmp_path / "table.md"
    target = ["--bundle", str(demo_bundle), "--queue-limit", "2", "--json", "--markdown", str(table)]
    assert run(["bench", "serve", str(prompts), *target, *load, *shares]) == OK
    found = json.loads(capsys.readouterr().out)
    assert found["identical"]
    by_key = {(one["subject"], one["clients"]): one for one in found["loads"]}
    assert set(by_key) == {(name, clients) for name in ("embedded", "spaceport") for clients in (1, 12)}
    for (name, clients), one in by_key.items():
        figures = one["figures"]
        counts = {each: figures[each] for each in ("answered", "left", "refused", "failed")}
        assert sum(counts.values()) == 24
        assert figures["compared"] == figures["answered"] > 0
        assert (counts["failed"], counts["left"] > 0) == (0, True)
        assert (counts["refused"] > 0) == (clients == 12)  # 4 at a time, 2 wait
        assert figures["drafts"]["mean_acceptance_length"] >= 1  # whether drafts pay depends on the machine
        assert one["statuses"].keys() <= {"200", "503"}
        assert figures["main_thread_per_token"] is not None, name
    service = next(one for one in found["resources"] if one["subject"] == "spaceport")
    first, *_, last = service["samples"]
    assert len(service["samples"]) == 3  # after the warm-up and two runs
    left = sum(one["figures"]["left"] for one in found["loads"] if one["subject"] == "spaceport")
    assert (
        last["file_descriptors"] <= first["file_descriptors"] + 2 < first["file_descriptors"] + left
    )  # some close late
    assert "answers equal those of `Runtime.generate`" in table.read_text("utf-8")
    assert {one["reference"] for one in found["ratios"]} == {"embedded"}


@pytest.mark.slow
def test_a_wrong_answer_is_reported(
    prompts: Path, demo_bundle: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    def swapped(self: EmbeddedRuntime, workload: Any) -> Any:
        found = right(self, workload)
        return [found[1], found[0], *found[2:]]

    right = EmbeddedRuntime.expected
    monkeypatch.setattr(EmbeddedRuntime, "expected", swapped)
    load = ["--clients", "2", "--requests", "4", "--max-tokens", "8", "--rounds", "1", "--ramp", "0", "--no-embedded"]
    assert run(["bench", "serve", str(prompts), "--bundle", str(demo_bundle), *load]) == ACCURACY
    shown = capsys.readouterr().out
    assert "2 of 4 answers equal" in shown
    assert "spaceport, 2 clients, prompt 1:" in shown


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([], "nothing to measure: expected --bundle BUNDLE, --url URL or both"),
        (["--url", "localhost:8000"], "'localhost:8000' is no address of a service"),
        (["--url", "=http://localhost:8000"], "has an empty name"),
        (["--bundle", "x", "--clients", "a"], "--clients"),
        (["--bundle", "x", "--requests", "2", "--seconds", "1"], "expected one of --requests and --seconds"),
        (["--bundle", "x", "--setup"], "add --gguf FILE"),
        (["--bundle", "x", "--rounds", "0"], "--rounds is 0"),
    ],
)
def test_mistakes_are_named_before_anything_starts(
    prompts: Path, given: list[str], message: str, capsys: Capture
) -> None:
    assert run(["bench", "serve", str(prompts), *given]) == USAGE
    assert message in capsys.readouterr().err


def test_a_service_that_does_not_run_is_named(prompts: Path, capsys: Capture) -> None:
    assert run(["bench", "serve", str(prompts), "--url", "http://127.0.0.1:1"]) == INPUT
    assert "expected a running service" in capsys.readouterr().err
    assert run(["bench", "serve", str(prompts), "--bundle", "x", "--gguf", "none.gguf"]) == INPUT
    assert "expected a GGUF file" in capsys.readouterr().err
