"""Comparison of runtimes: which are measured, the same prompts for all, figures, and a bundle beside a fake runtime."""

from __future__ import annotations

import json
from contextlib import closing
from itertools import pairwise
from pathlib import Path

import pytest

from spaceport.tools.bench.compare import (
    CompareOptions,
    Measurement,
    WorkerPool,
    compare_runtimes,
    comparison_report,
    paired,
)
from spaceport.tools.bench.machine import ProcessFailed
from spaceport.tools.bench.report import Spread, spread
from spaceport.tools.bench.rivals import (
    PEERS,
    ComparedRuntime,
    Peer,
    Skipped,
    WorkFolder,
    peer_subject,
    read_files,
    start_worker,
)
from spaceport.tools.cli import INPUT, OK, USAGE, run
from support.fake_subjects import FAKE, WORKLOAD, fake_pool, fake_subject, installed
from support.paths import TINY

pytestmark = pytest.mark.on_change("tests/support/fake_runtime.py", "tools/bench/adapters")
BY_NAME = {peer.name: peer for peer in PEERS}
SMALL = "--context 12 --tokens 4 --rows 1,4 --prefill 16 --requests 2 --request-context 6 --request-tokens 5 --rounds 2"


def skipped(peer: str, work: WorkFolder) -> str:
    """Why a peer is skipped."""
    found = peer_subject(BY_NAME[peer], work, TINY, None, ())
    assert isinstance(found, Skipped)
    return found.reason


def subject(peer: str, work: WorkFolder, gguf: Path | None = None) -> ComparedRuntime:
    found = peer_subject(BY_NAME[peer], work, TINY, gguf, ())
    assert isinstance(found, ComparedRuntime)
    return found


def test_a_peer_is_skipped_until_its_environment_and_model_exist(tmp_path: Path) -> None:
    work = WorkFolder(tmp_path, TINY)
    assert f"at {tmp_path}/environments/ctranslate2: add --setup" in skipped("ctranslate2 int8", work)
    installed(work, "ctranslate2")
    assert f"no converted model at {work.models}/ctranslate2-int8: add --setup" in skipped("ctranslate2 int8", work)
    work.model("ctranslate2-int8").mkdir(parents=True)
    found = subject("ctranslate2 int8", work)
    assert (found.name, found.options, found.is_bundle) == ("ctranslate2 int8", {"compute_type": "int8"}, False)
    (record,) = work.environment("ctranslate2").glob("*.json")
    record.write_text(json.dumps(["ctranslate2==1.0"]), "utf-8")  # other pins
    assert not work.installed("ctranslate2")
    assert "add --gguf FILE" in skipped("llama.cpp", work)
    installed(work, "llama.cpp")
    (tmp_path / "Some-Model.Q4_1.gguf").write_bytes(b"GGUF")
    assert subject("llama.cpp", work, tmp_path / "Some-Model.Q4_1.gguf").name == "llama.cpp Q4_1"


def measurements(*values: float) -> dict[int, Measurement]:
    return {number: Measurement(value, 1.0, 0.25) for number, value in enumerate(values)}


def test_ratios_are_paired_by_round_and_above_one_is_slower() -> None:
    assert spread([3.0, 1.0, 2.0]) == Spread(2.0, 1.0, 3.0)  # the median and the range
    assert paired("ms", measurements(15, 20, 24), measurements(10, 20, 12)) == Spread(1.5, 1.0, 2.0)
    assert paired("tokens/s", measurements(50, 200, 50), measurements(100, 100, 50)) == Spread(1.0, 0.5, 2.0)
    assert paired("ms", {1: Measurement(30, 1, 0)}, measurements(10, 20)) == Spread(1.5, 1.5, 1.5)
    assert paired("ms", {5: Measurement(30, 1, 0)}, measurements(10, 20)) is None


def test_the_command_measures_a_bundle_and_reports_skipped_runtimes(
    tiny_bundle: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["bench", "compare", str(TINY), "--work", str(tmp_path), "--bundle", str(tiny_bundle), *SMALL.split()]
    outputs = ["--json", "--plot", str(tmp_path / "plot.svg"), "--markdown", str(tmp_path / "page.md")]
    assert run([*command, *outputs]) == OK
    data = json.loads(capsys.readouterr().out)
    (ours,) = data["subjects"]
    assert ours["name"] == "spaceport float32"
    assert ours["skipped"] == {}
    assert set(ours["versions"]) == {"spaceport", "onnxruntime", "numpy"}
    for name in ("decode", "1 row", "4 rows", "prefill", "2 requests"):
        result = ours["results"][name]
        assert len(result["values"]) == 2
        assert 0 < result["spread"]["low"] <= result["spread"]["median"] <= result["spread"]["high"]
        assert result["ratios"] == {"spaceport float32": {"median": 1, "low": 1, "high": 1}}
    assert ours["resident_bytes_open"] > 10_000_000
    assert len(data["skipped"]) == 6
    assert all("add --" in skipped["reason"] for skipped in data["skipped"])
    assert (tmp_path / "plot.svg").read_text("utf-8").startswith("<svg")
    assert "| spaceport float32 |" in (tmp_path / "page.md").read_text("utf-8")


def test_a_peer_is_measured_together_with_the_bundle(tiny_bundle: Path, tmp_path: Path) -> None:
    installed(WorkFolder(tmp_path, TINY), "ctranslate2")
    peer = Peer("fake int4", "ctranslate2", FAKE, (), "none", {"step": 10.0})
    found = compare_runtimes(
        CompareOptions(TINY, tmp_path, (tiny_bundle,), (peer,), None, WORKLOAD, 1, 1, setup=False), print
    )
    ours, fake = found.subjects
    assert (ours.name, fake.name) == ("spaceport float32", "fake int4")
    assert found.references == ("spaceport float32",)
    assert fake.results["decode"].ratios["spaceport float32"].median > 100
    assert fake.results["prefill"].ratios["spaceport float32"].median > 100
    assert fake.skipped == {"1 row": "it cannot", "4 rows": "it cannot"}
    assert "Time relative to spaceport float32" in comparison_report(found).markdown()


def test_mistakes_are_reported_before_anything_is_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for options, code, message in (
        ("", INPUT, "has no bundle of tiny: give --bundle, or add --setup"),
        ("--rounds 0", USAGE, "expected at least 1 of each"),
        ("--rows 1,x", USAGE, "expected comma-separated whole numbers"),
        ("--peers nobody", USAGE, "--peers names 'nobody'"),
        ("--gguf none.gguf", INPUT, "none.gguf: no such file: expected a GGUF file"),
        ("--plot none/there.svg", USAGE, "does not exist: create it first"),
    ):
        assert run(["bench", "compare", str(TINY), "--work", str(tmp_path), *options.split()]) == code
        assert message in capsys.readouterr().err


def measure(folder: Path, *options: dict[str, object], rounds: int = 2) -> WorkerPool:
    subjects = [fake_subject(f"fake{i}", folder, **given) for i, given in enumerate(options)]  # type: ignore[arg-type]
    pool = fake_pool(folder)
    pool.measure(subjects, rounds)
    return pool


def test_a_call_that_fails_is_reported_with_the_last_output_line_and_the_log(tmp_path: Path) -> None:
    for option, message in (
        ({"fails": "decode"}, "exit code 1 and printed last: RuntimeError: no decode today"),
        ({"hangs": "decode"}, r"no answer within 0\.5 s"),
    ):
        subject = fake_subject("fake", tmp_path, **option)
        with closing(start_worker(subject, 1, tmp_path / "logs", 20.0)) as worker:
            worker.call("open", {"model": "m", "threads": 1, **subject.options})
            worker.timeout = 0.5
            with pytest.raises(ProcessFailed, match=message) as caught:
                worker.call("decode", {"prompt": [3, 4, 5], "tokens": 3})
        assert str(worker.log) in str(caught.value)


def test_measurements_never_overlap_and_every_round_but_the_warm_up_is_recorded(tmp_path: Path) -> None:
    log = tmp_path / "calls.txt"
    pool = measure(tmp_path, {"log": str(log), "step": 0.25}, {"log": str(log), "spins": 0.05})
    calls = [line.split() for line in log.read_text("utf-8").splitlines()]
    assert len(calls) == 3 * 3 * 2  # rounds with the warm-up, metrics, subjects
    times = [(float(begun), float(ended)) for *_, begun, ended in calls]
    assert all(ended <= begun for (_, ended), (begun, _) in pairwise(times))
    first = [Path(model).name for name, model, *_ in calls if name == "decode"][::2]
    assert first == ["fake1", "fake0", "fake1"]
    for earlier, later in zip(calls[::2], calls[1::2], strict=True):
        assert (earlier[0], earlier[2]) == (later[0], later[2])  # the same metric with the same prompt
        assert earlier[1] != later[1]
    record = pool.records["fake0"]
    values = {name: [by_round[0].value, len(by_round)] for name, by_round in record.measurements.items()}
    assert values == {"decode": [250, 2], "prefill": [4, 2], "2 requests": [8, 2]}
    assert record.skipped == {"1 row": "it cannot", "4 rows": "it cannot"}
    assert record.resident_bytes_decode > 0
    assert (pool.repeated, pool.workers) == (0, {})  # spinning threads were waited for, and all workers have ended


def test_what_fails_is_skipped_and_a_worker_is_restarted(tmp_path: Path) -> None:
    pool = measure(tmp_path, {"fails": "prefill"}, {}, {"fails": "open"}, rounds=1)
    failed, whole = pool.records.values()
    assert "no prefill today" in failed.skipped["prefill"]
    assert list(failed.measurements) == ["decode", "2 requests"]
    assert list(whole.measurements) == ["decode", "prefill", "2 requests"]
    (skipped,) = pool.skipped
    assert (skipped.name, "no model today" in skipped.reason) == ("fake2", True)
    read_files(tmp_path / "fake0")
    read_files(tmp_path / "fake0" / "weights")
