"""Workers: one computes at a time, the order rotates, and a failure is reported and does not affect the others."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from spaceport.tools.bench.compare.subjects import ADAPTERS
from spaceport.tools.bench.compare.worker_pool import WorkerPool, measure_all, read_files
from spaceport.tools.bench.compare.worker_process import UnsupportedCall, Worker, WorkerFailed, busy_seconds, start
from support.fake_subjects import fake_run_options, fake_subject

pytestmark = pytest.mark.on_change("tests/support/fake_runtime.py", "tools/bench/compare/adapters")  # starts processes
PROMPT = {"prompt": [3, 4, 5], "tokens": 3}


@pytest.fixture
def workers(tmp_path: Path) -> Iterator[list[Worker]]:
    running: list[Worker] = []
    yield running
    for worker in running:
        worker.close()


def opened(workers: list[Worker], folder: Path, **options: Any) -> Worker:
    subject = fake_subject("fake", folder, **options)
    worker = start(subject, 1, folder / "logs", 20.0)
    workers.append(worker)
    answer = worker.call("open", {"model": "m", "threads": 1, **subject.options})
    assert not isinstance(answer, UnsupportedCall)
    assert set(answer) == {"import_seconds", "open_seconds", "versions"}
    assert (answer["versions"], answer["open_seconds"] >= 0) == ({}, True)
    return worker


def run(folder: Path, *options: dict[str, object], rounds: int = 2) -> WorkerPool:
    subjects = [fake_subject(f"fake{i}", folder, **given) for i, given in enumerate(options)]  # type: ignore[arg-type]
    return measure_all(fake_run_options(folder, rounds), subjects, lambda _: None)


def test_a_worker_answers_calls_and_output_of_libraries_is_not_taken_for_an_answer(
    workers: list[Worker], tmp_path: Path
) -> None:
    worker = opened(workers, tmp_path, spins=0.4)
    assert worker.call("rows", {"prompt": [3], "rows": [4], "repeats": 1}) == UnsupportedCall("it cannot")
    found = worker.call("decode", PROMPT)
    assert not isinstance(found, UnsupportedCall)
    assert found["value"] == [0.01, 0.01]
    assert found["seconds"] >= 0.01
    assert worker.resident_bytes() > 1_000_000
    before = worker.cpu_seconds()
    worker.wait_until_idle(20)  # for a thread that continues to compute
    assert worker.cpu_seconds() > before
    assert busy_seconds() > 0
    assert "noise on stdout" in worker.log.read_text("utf-8")


def test_a_call_that_fails_is_reported_with_the_last_output_line_and_the_log(
    workers: list[Worker], tmp_path: Path
) -> None:
    worker = opened(workers, tmp_path, fails="decode")
    with pytest.raises(WorkerFailed, match="exit code 1 and printed last: RuntimeError: no decode today") as caught:
        worker.call("decode", PROMPT)
    assert str(worker.log) in str(caught.value)
    with pytest.raises(WorkerFailed, match="no decode today"):
        worker.call("decode", PROMPT)
    worker = opened(workers, tmp_path, hangs="decode")
    worker.timeout = 0.2
    with pytest.raises(WorkerFailed, match=r"no answer within 0\.2 s"):
        worker.call("decode", PROMPT)
    worker = opened(workers, tmp_path, forever=True)
    with pytest.raises(WorkerFailed, match=r"still busy 0\.2 s after its measurement"):
        worker.wait_until_idle(0.2)


def test_adapters_import_only_the_standard_library_at_module_level() -> None:
    for script in ADAPTERS.glob("*.py"):
        tree = ast.parse(script.read_text("utf-8"))
        top = [node for node in tree.body if isinstance(node, (ast.Import, ast.ImportFrom))]
        names = {(node.module or "") if isinstance(node, ast.ImportFrom) else node.names[0].name for node in top}
        assert {name.split(".")[0] for name in names} <= set(sys.stdlib_module_names)
        if script.stem not in ("on_spaceport", "__init__"):
            assert "spaceport." not in script.read_text("utf-8").split('"""', 2)[2]


def test_measurements_never_overlap_and_every_round_but_the_warm_up_is_recorded(tmp_path: Path) -> None:
    log = tmp_path / "calls.txt"
    pool = run(tmp_path, {"log": str(log), "step": 0.25}, {"log": str(log), "spins": 0.05})
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
    pool = run(tmp_path, {"fails": "prefill"}, {}, {"fails": "open"}, rounds=1)
    failed, whole = pool.records.values()
    assert "no prefill today" in failed.skipped["prefill"]
    assert list(failed.measurements) == ["decode", "2 requests"]
    assert list(whole.measurements) == ["decode", "prefill", "2 requests"]
    (skipped,) = pool.skipped
    assert (skipped.name, "no model today" in skipped.reason) == ("fake2", True)
    read_files(tmp_path / "fake0")
    read_files(tmp_path / "fake0" / "weights")


def test_a_measurement_during_which_another_worker_computes_is_repeated(tmp_path: Path) -> None:
    pool = WorkerPool(fake_run_options(tmp_path, rounds=1), lambda _: None)
    try:
        pool.add(fake_subject("first", tmp_path))
        pool.add(fake_subject("second", tmp_path, spins=60.0))
        pool.workers["second"].call("decode", {"prompt": [3], "tokens": 2})  # its thread continues after the answer
        pool.run_round(0)
    finally:
        pool.close()
    first, second = pool.records.values()
    assert pool.repeated == 1
    assert list(first.measurements) == ["decode", "prefill", "2 requests"]
    assert second.measurements == {}
    assert "still busy 1 s after its measurement" in second.skipped["decode"]
