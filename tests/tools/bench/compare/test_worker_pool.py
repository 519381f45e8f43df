"""Worker pool: one worker computes at a time, the order rotates, and a failure does not affect other workers."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest

from spaceport.tools.bench.compare.worker_pool import WorkerPool, measure_all, read_files
from support.fake_subjects import WORKLOAD, fake_run_options, fake_subject


def quiet(_: str) -> None:
    pass


def run(folder: Path, *options: dict[str, object], rounds: int = 2) -> WorkerPool:
    subjects = [fake_subject(f"fake{i}", folder, **given) for i, given in enumerate(options)]  # type: ignore[arg-type]
    return measure_all(fake_run_options(folder, rounds), subjects, quiet)


def test_measurements_never_overlap_and_every_round_starts_with_another_subject(tmp_path: Path) -> None:
    log = tmp_path / "calls.txt"
    run(tmp_path, {"log": str(log)}, {"log": str(log)})
    calls = [line.split() for line in log.read_text("utf-8").splitlines()]
    assert len(calls) == 3 * 3 * 2  # rounds with the warm-up, metrics, subjects
    times = [(float(begun), float(ended)) for *_, begun, ended in calls]
    assert all(ended <= begun for (_, ended), (begun, _) in pairwise(times))
    first = [Path(model).name for name, model, *_ in calls if name == "decode"][::2]
    assert first == ["fake1", "fake0", "fake1"]
    for earlier, later in zip(calls[::2], calls[1::2], strict=True):
        assert (earlier[0], earlier[2]) == (later[0], later[2])  # the same metric with the same prompt
        assert earlier[1] != later[1]


def test_records_have_a_measurement_of_each_round_but_not_of_the_warm_up(tmp_path: Path) -> None:
    record = run(tmp_path, {"step": 0.25}, rounds=3).records["fake0"]
    assert {name: list(by_round) for name, by_round in record.measurements.items()} == {
        "decode": [0, 1, 2],
        "prefill": [0, 1, 2],
        "2 requests": [0, 1, 2],
    }
    assert record.measurements["decode"][0].value == pytest.approx(250)
    assert record.measurements["prefill"][0].value == pytest.approx(4)
    assert record.measurements["2 requests"][0].value == pytest.approx(8)
    assert record.skipped == {"1 row": "it cannot", "4 rows": "it cannot"}
    assert record.resident_bytes_decode > 0


def test_a_metric_that_fails_is_skipped_and_the_worker_is_restarted(tmp_path: Path) -> None:
    pool = run(tmp_path, {"fails": "prefill"}, {})
    failed, whole = pool.records.values()
    assert "no prefill today" in failed.skipped["prefill"]
    assert list(failed.measurements) == ["decode", "2 requests"]
    assert list(whole.measurements) == ["decode", "prefill", "2 requests"]
    assert len(whole.measurements["prefill"]) == 2


def test_a_subject_that_cannot_be_opened_is_skipped(tmp_path: Path) -> None:
    pool = run(tmp_path, {"fails": "open"}, {}, rounds=1)
    (skipped,) = pool.skipped
    assert skipped.name == "fake0"
    assert "no model today" in skipped.reason
    assert list(pool.records) == ["fake1"]


def test_a_measurement_during_which_another_worker_computes_is_repeated(tmp_path: Path) -> None:
    options = fake_run_options(tmp_path, rounds=1)
    pool = WorkerPool(options, quiet)
    try:
        pool.add(fake_subject("first", tmp_path))
        pool.add(fake_subject("second", tmp_path, spins=60.0))
        worker = pool.workers["second"]
        worker.call("decode", {"prompt": [3], "tokens": 2})  # its thread continues after the answer
        pool.run_round(0)
    finally:
        pool.close()
    first, second = pool.records.values()
    assert pool.repeated == 1
    assert list(first.measurements) == ["decode", "prefill", "2 requests"]
    assert second.measurements == {}
    assert "still busy 1 s after its measurement" in second.skipped["decode"]


@pytest.mark.slow
def test_spinning_threads_are_waited_for_between_measurements(tmp_path: Path) -> None:
    log = tmp_path / "calls.txt"
    pool = run(tmp_path, {"spins": 0.2, "log": str(log)}, {"log": str(log)}, rounds=1)
    assert pool.repeated == 0
    assert [len(record.measurements) for record in pool.records.values()] == [3, 3]


def test_all_workers_end_with_the_comparison(tmp_path: Path) -> None:
    assert run(tmp_path, {}, rounds=1).workers == {}


def test_the_files_of_a_model_are_read_once(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"1")
    read_files(tmp_path)
    read_files(tmp_path / "a")
    assert WORKLOAD.length == 16
