"""Turns: one process works at a time, each round begins with another one, and a failure ends nobody else's turns."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest

from spaceport.tools.bench.compare.turns import WorkerPool, measure_all, read
from support.fake_subjects import WORKLOAD, fake_run_options, fake_subject


def quiet(_: str) -> None:
    pass


def run(folder: Path, *options: dict[str, object], rounds: int = 2) -> WorkerPool:
    subjects = [fake_subject(f"fake{i}", folder, **given) for i, given in enumerate(options)]  # type: ignore[arg-type]
    return measure_all(fake_run_options(folder, rounds), subjects, quiet)


def test_turns_never_overlap_and_every_round_begins_with_another_subject(tmp_path: Path) -> None:
    log = tmp_path / "turns.txt"
    run(tmp_path, {"log": str(log)}, {"log": str(log)})
    turns = [line.split() for line in log.read_text("utf-8").splitlines()]
    assert len(turns) == 3 * 3 * 2  # rounds with the warm-up, measures, subjects
    times = [(float(begun), float(ended)) for *_, begun, ended in turns]
    assert all(ended <= begun for (_, ended), (begun, _) in pairwise(times))
    first = [Path(model).name for name, model, *_ in turns if name == "decode"][::2]
    assert first == ["fake1", "fake0", "fake1"]
    for earlier, later in zip(turns[::2], turns[1::2], strict=True):
        assert (earlier[0], earlier[2]) == (later[0], later[2])  # the same measure with the same prompt
        assert earlier[1] != later[1]


def test_records_hold_a_turn_of_each_round_without_the_warm_up(tmp_path: Path) -> None:
    record = run(tmp_path, {"step": 0.25}, rounds=3).records["fake0"]
    assert {name: list(turns) for name, turns in record.turns.items()} == {
        "decode": [0, 1, 2],
        "prefill": [0, 1, 2],
        "2 requests": [0, 1, 2],
    }
    assert record.turns["decode"][0].value == pytest.approx(250)
    assert record.turns["prefill"][0].value == pytest.approx(4)
    assert record.turns["2 requests"][0].value == pytest.approx(8)
    assert record.absent == {"1 row": "it cannot", "4 rows": "it cannot"}
    assert record.used_bytes > 0


def test_a_measure_that_fails_is_left_out_and_the_process_starts_again(tmp_path: Path) -> None:
    pool = run(tmp_path, {"fails": "prefill"}, {})
    failed, whole = pool.records.values()
    assert "no prefill today" in failed.absent["prefill"]
    assert list(failed.turns) == ["decode", "2 requests"]
    assert list(whole.turns) == ["decode", "prefill", "2 requests"]
    assert len(whole.turns["prefill"]) == 2


def test_a_subject_that_cannot_be_opened_is_absent(tmp_path: Path) -> None:
    pool = run(tmp_path, {"fails": "open"}, {}, rounds=1)
    (absent,) = pool.absent
    assert absent.name == "fake0"
    assert "no model today" in absent.reason
    assert list(pool.records) == ["fake1"]


def test_a_turn_during_which_another_process_works_does_not_count(tmp_path: Path) -> None:
    options = fake_run_options(tmp_path, rounds=1)
    pool = WorkerPool(options, quiet)
    try:
        pool.add(fake_subject("first", tmp_path))
        pool.add(fake_subject("second", tmp_path, spins=60.0))
        worker = pool.workers["second"]
        worker.ask("decode", {"prompt": [3], "tokens": 2})  # its thread goes on, and nobody has waited for it
        pool.run_round(0)
    finally:
        pool.close()
    first, second = pool.records.values()
    assert pool.repeated == 1
    assert list(first.turns) == ["decode", "prefill", "2 requests"]
    assert second.turns == {}
    assert "still computes 1 s after its turn" in second.absent["decode"]


@pytest.mark.slow
def test_spinning_threads_are_waited_for_between_turns(tmp_path: Path) -> None:
    log = tmp_path / "turns.txt"
    pool = run(tmp_path, {"spins": 0.2, "log": str(log)}, {"log": str(log)}, rounds=1)
    assert pool.repeated == 0
    assert [len(record.turns) for record in pool.records.values()] == [3, 3]


def test_all_processes_end_with_the_measurement(tmp_path: Path) -> None:
    assert run(tmp_path, {}, rounds=1).workers == {}


def test_the_files_of_a_model_are_read_before_it_is_opened(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"1")
    read(tmp_path)
    read(tmp_path / "a")
    assert WORKLOAD.length == 16
