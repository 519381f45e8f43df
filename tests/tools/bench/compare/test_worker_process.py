"""Worker process: one call at a time, and clear errors if a process fails."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from spaceport.tools.bench.compare.worker_process import UnsupportedCall, Worker, WorkerFailed, busy_seconds, start
from support.fake_subjects import fake_subject

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
    assert answer["versions"] == {}
    assert answer["open_seconds"] >= 0
    return worker


def test_output_of_libraries_is_not_taken_for_an_answer(workers: list[Worker], tmp_path: Path) -> None:
    worker = opened(workers, tmp_path)
    found = worker.call("decode", PROMPT)
    assert not isinstance(found, UnsupportedCall)
    assert found["value"] == [0.01, 0.01]
    assert found["seconds"] >= 0.01
    assert worker.resident_bytes() > 1_000_000
    worker.wait_until_idle(5)
    assert "noise on stdout" in worker.log.read_text("utf-8")


def test_an_unsupported_call_is_answered_with_the_reason(workers: list[Worker], tmp_path: Path) -> None:
    worker = opened(workers, tmp_path)
    assert worker.call("rows", {"prompt": [3], "rows": [4], "repeats": 1}) == UnsupportedCall("it cannot")
    assert worker.call("decode", PROMPT) != UnsupportedCall("it cannot")


def test_an_error_is_reported_with_the_last_output_line_and_the_log(workers: list[Worker], tmp_path: Path) -> None:
    worker = opened(workers, tmp_path, fails="decode")
    with pytest.raises(WorkerFailed, match="exit code 1 and printed last: RuntimeError: no decode today") as caught:
        worker.call("decode", PROMPT)
    assert str(worker.log) in str(caught.value)
    with pytest.raises(WorkerFailed, match="no decode today"):
        worker.call("decode", PROMPT)


def test_a_process_that_does_not_answer_is_reported(workers: list[Worker], tmp_path: Path) -> None:
    worker = opened(workers, tmp_path, hangs="decode")
    worker.timeout = 0.2
    with pytest.raises(WorkerFailed, match=r"no answer within 0\.2 s"):
        worker.call("decode", PROMPT)


def test_a_thread_that_continues_to_compute_is_waited_for(workers: list[Worker], tmp_path: Path) -> None:
    worker = opened(workers, tmp_path, spins=0.4)
    worker.call("decode", PROMPT)
    before = worker.cpu_seconds()
    worker.wait_until_idle(20)
    assert worker.cpu_seconds() > before
    assert busy_seconds() > 0


def test_a_thread_that_never_ends_is_an_error(workers: list[Worker], tmp_path: Path) -> None:
    worker = opened(workers, tmp_path, forever=True)
    with pytest.raises(WorkerFailed, match=r"still busy 0\.2 s after its measurement"):
        worker.wait_until_idle(0.2)


def test_an_environment_without_an_interpreter_names_setup(tmp_path: Path) -> None:
    subject = fake_subject("fake", tmp_path)
    lost = type(subject)(subject.name, tmp_path / "bin" / "python", subject.adapter, subject.model, "")
    with pytest.raises(WorkerFailed, match="expected an interpreter; add --setup"):
        start(lost, 1, tmp_path / "logs", 1.0)
