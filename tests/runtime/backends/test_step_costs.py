"""Step costs: measured once for a machine and a bundle, whatever happens to the file that they are stored in."""

from __future__ import annotations

import json
import os
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from multiprocessing import get_context
from pathlib import Path

import pytest

from spaceport.graphs.contract.exactness import Exactness
from spaceport.graphs.contract.faults import OptionFault
from spaceport.runtime.backends.step_costs import Measurements, cache_folder, load, store
from spaceport.runtime.costs import StepCosts
from spaceport.runtime.decoding import Decoding
from spaceport.runtime.session import Runtime

TABLE = StepCosts(256, ((1, 0.010), (4, 0.013)), 8, ((1, 0.020),), slot=1e-6, row_slot=2e-7)
EXACT = Exactness(0.0, 1e-6, 1e-5, (2, 9, 33))
FOUND = Measurements(EXACT, TABLE)
VALID = {"schema": 5, "exactness": asdict(EXACT), "table": asdict(TABLE)}


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache folder of the user's."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "spaceport" / "step-costs"


def test_a_table_is_read_as_it_was_written(tmp_path: Path) -> None:
    (tmp_path / "valid.json").write_text(json.dumps(VALID))
    (tmp_path / "valid.json").chmod(0o600)
    assert load(tmp_path / "valid.json") == FOUND
    store(tmp_path / "a" / "table.json", FOUND)
    assert load(tmp_path / "a" / "table.json") == FOUND


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "null",
        "7",
        '{"schema": 5}',
        json.dumps({**VALID, "schema": 4}),
        json.dumps({**VALID, "schema": 6}),
        json.dumps({**VALID, "exactness": {"rows": -1, "slots": 0, "tolerated": 0, "widths": [2]}}),
        json.dumps({**VALID, "exactness": None}),
        json.dumps({**VALID, "table": {**asdict(TABLE), "single": [[1, -1]]}}),
        json.dumps({**VALID, "table": {**asdict(TABLE), "single": [[1]]}}),
        json.dumps({**VALID, "table": {**asdict(TABLE), "visible": float("inf")}}),
        "[" * 90_000,
    ],
)
def test_a_damaged_file_is_no_table(tmp_path: Path, text: str) -> None:
    (tmp_path / "table.json").write_text(text)
    assert load(tmp_path / "table.json") is None
    assert load(tmp_path / "none.json") is None
    assert load(tmp_path) is None


@pytest.mark.parametrize("umask", [0o000, 0o002, 0o022])
def test_a_table_is_this_users_alone_whatever_the_umask(tmp_path: Path, umask: int) -> None:
    file = tmp_path / "costs" / "table.json"
    previous = os.umask(umask)
    try:
        store(file, FOUND)
        store(file, FOUND)
    finally:
        os.umask(previous)
    assert (file.stat().st_mode & 0o777, file.parent.stat().st_mode & 0o777) == (0o600, 0o700)
    assert load(file) == FOUND


def test_a_table_that_another_user_could_have_written_is_not_used(tmp_path: Path) -> None:
    file = tmp_path / "costs" / "table.json"
    store(file, FOUND)
    file.chmod(0o666)
    assert load(file) is None
    store(file, FOUND)
    assert load(file) == FOUND
    file.parent.chmod(0o777)
    assert load(file) is None
    with pytest.raises(PermissionError, match="other users may write to it"):
        store(file, FOUND)


def test_a_fifo_instead_of_a_table_does_not_block(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "table.json")
    assert load(tmp_path / "table.json") is None


def test_costs_are_measured_once_for_a_bundle(tiny_bundle: Path, cache: Path) -> None:
    def opened(max_requests: int = 1) -> StepCosts:
        with Runtime.open(tiny_bundle, max_seq_len=128, threads=1, max_requests=max_requests) as runtime:
            return runtime.costs

    first = opened()
    assert opened() == first
    (file,) = cache.iterdir()
    assert opened(max_requests=2).requests == 2  # another table, in another file
    assert len([*cache.iterdir()]) == 2
    file.write_text("damaged")
    assert opened() != first
    assert load(file) is not None
    os.utime(file, (2**32, 2**32))  # a clock that is far ahead
    stored = load(file)
    assert stored is not None
    assert opened() == stored.table


def test_other_versions_are_measured_again(tiny_bundle: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Runtime.open(tiny_bundle, max_seq_len=128, threads=1):
        pass
    monkeypatch.setattr("spaceport.runtime.backends.step_costs.version", lambda package: "99")
    with Runtime.open(tiny_bundle, max_seq_len=128, threads=1):
        pass
    assert len([*cache.iterdir()]) == 2


def test_a_process_that_may_use_fewer_cores_has_costs_of_its_own(
    tiny_bundle: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for cores in ({0}, {0, 1}):
        monkeypatch.setattr(os, "sched_getaffinity", lambda process, cores=cores: cores, raising=False)
        with Runtime.open(tiny_bundle, max_seq_len=128):
            pass
    assert len([*cache.iterdir()]) == 2


def test_a_disk_without_space_keeps_nobody_from_decoding(
    tiny_bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("not a folder")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with Runtime.open(tiny_bundle, max_seq_len=128, threads=1) as runtime:
        assert runtime.costs.single
        assert runtime.generate("The harbour", Decoding(max_tokens=4)).tokens


def _store_and_load(file: Path) -> bool:
    for number in range(30):
        store(file, Measurements(EXACT, StepCosts(256, ((1, 0.01 + number / 1000),))))
        if load(file) is None:
            return False
    return True


@pytest.mark.slow
def test_processes_that_write_at_the_same_time_leave_a_whole_file(tmp_path: Path) -> None:
    with ProcessPoolExecutor(4, get_context("spawn")) as pool:
        assert all(pool.map(_store_and_load, [tmp_path / "table.json"] * 4))
    assert [path.name for path in tmp_path.iterdir()] == ["table.json"]
    assert json.loads((tmp_path / "table.json").read_text())["schema"] == 5


@pytest.mark.parametrize("home", ["", "relative"])
def test_the_cache_is_the_users(home: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", home)
    assert cache_folder() == Path.home() / ".cache" / "spaceport" / "step-costs"


def test_standard_costs_repeat_the_steps_of_a_request(demo_bundle: Path, cache: Path) -> None:
    with Runtime.open(demo_bundle, max_seq_len=256, threads=1, step_costs="standard") as runtime:
        texts = [runtime.generate("def read(self, size=-1):\n", Decoding(max_tokens=60)) for _ in range(3)]
    assert len({(text.statistics.steps, text.statistics.rows) for text in texts}) == 1
    (file,) = cache.iterdir()
    assert load(file) == Measurements(runtime.exactness, None)  # only whether its drafts are exact
    with Runtime.open(demo_bundle, max_seq_len=256, threads=1) as measured:
        assert load(file) == Measurements(runtime.exactness, measured.costs)


def test_a_source_that_does_not_exist_is_refused(tiny_bundle: Path) -> None:
    with pytest.raises(OptionFault, match="step_costs is 'estimated': expected measured, standard, free"):
        Runtime.open(tiny_bundle, threads=1, step_costs="estimated")  # type: ignore[arg-type]
