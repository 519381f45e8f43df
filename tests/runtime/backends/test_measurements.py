"""Measurements: engines whose rows or slots change logits are recognized, and costs are those of usual calls, measured once."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from spaceport.graphs.contract.exactness import Exactness, tolerated_noise, unmeasured
from spaceport.graphs.contract.faults import OptionFault
from spaceport.graphs.contract.signature import Signature
from spaceport.kernels.native_library import library_path
from spaceport.runtime.backends import measurements
from spaceport.runtime.backends.measurements import (
    Measurements,
    idle,
    known_exactness,
    load,
    measure_exactness,
    measure_step_costs,
    measured_here,
)
from spaceport.runtime.backends.private_files import replace_private
from spaceport.runtime.backends.staging import CallShape, Staging
from spaceport.runtime.bundle import Bundle, open_bundle
from spaceport.runtime.costs import CostSource, StepCosts, relative_costs
from spaceport.runtime.decoding import Decoding
from spaceport.runtime.engine import CPU_COSTS, Batch, Engine, EngineOptions, Moves, SelectedRows
from spaceport.runtime.session import Runtime
from support.hash_engine import HashEngine, Language
from support.hash_runtime import hash_runtime
from support.small_bundle import fill

FLOAT = 1e-5  # tolerated noise with float activations


class SlotEngine(Engine):
    """Logits of a row depend on the tokens that it sees; they change with the order of slots or from a width on."""

    device = "cpu"
    costs = CPU_COSTS

    def __init__(
        self, order: float = 0.0, width: int = 99, capacity: int = 64, rows: int = 64, factor: float = 1 + 1e-4
    ) -> None:
        self.signature = Signature(1, 1, 1, 50, "float32", "scatter")
        self.capacity, self.rows, self.requests = capacity, rows, 1
        self._order, self._width, self._factor = order, width, factor
        self.slots = np.zeros(capacity, np.int64)

    def run(self, batch: Batch) -> NDArray[np.float32]:
        assert batch.requests == 1
        count = batch.input_ids.shape[1]
        assert count <= self.rows
        assert batch.slot_ids.max() < self.capacity
        self.slots[batch.slot_ids[0]] = batch.input_ids[0]
        seen = self.slots[: batch.attention_mask.shape[-1]] * batch.attention_mask[0, 0]  # rows x slots
        weights = 1 + self._order * np.arange(seen.shape[1])
        sums = (seen * weights).sum(axis=1) + batch.input_ids[0]
        if count >= self._width:
            sums = sums * self._factor
        logits = sums[batch.logit_rows[0], None] / (1 + np.arange(50))
        return logits[None].astype(np.float32)

    def move(self, first: int, moves: Sequence[Moves]) -> None: ...

    def copy(self, source: int, target: int, slots: NDArray[np.int64]) -> None:
        self.slots[: slots.size] = self.slots[slots]

    def clear(self, request: int) -> None:
        self.slots[:] = 0

    def close(self) -> None: ...


def test_an_engine_whose_logits_do_not_depend_on_the_call_drafts_in_trees() -> None:
    engine = SlotEngine()
    found = measure_exactness(engine, FLOAT)
    assert (found.rows, found.allows_drafts) == (0.0, True)
    assert found.widths == (2, 3, 8, 9, 33)
    assert str(found) == "equal unless two tokens are equally likely (within 1e-07): draft trees, threads in parallel"
    assert not engine.slots.any()


@pytest.mark.parametrize(("tolerated", "allowed"), [(0.0, False), (1e-9, False), (1.0, True)])
def test_logits_that_depend_on_the_order_of_slots_allow_no_drafts(tolerated: float, allowed: bool) -> None:
    found = measure_exactness(SlotEngine(order=1e-3), tolerated)
    assert found.rows == 0
    assert 1e-4 < found.slots < 1e-1
    assert found.allows_drafts == allowed


@pytest.mark.parametrize("width", [2, 3, 8, 9, 33])
def test_logits_that_depend_on_the_number_of_rows_allow_no_drafts(width: int) -> None:
    found = measure_exactness(SlotEngine(width=width), FLOAT)
    assert found.rows == pytest.approx(1e-4, rel=0.01)
    assert not found.allows_drafts
    assert str(found) == "not exact (noise 1e-04 with other rows and KV slots): no drafts unless they are requested"
    assert measure_exactness(SlotEngine(width=width), 1e-3).allows_drafts
    assert not measure_exactness(SlotEngine(width=width, factor=float("nan")), FLOAT).allows_drafts


@pytest.mark.parametrize(("capacity", "rows", "widths"), [(64, 4, (2, 3)), (8, 64, (2, 3)), (2, 64, ()), (64, 1, ())])
def test_a_small_engine_is_probed_within_its_limits(capacity: int, rows: int, widths: tuple[int, ...]) -> None:
    assert measure_exactness(SlotEngine(capacity=capacity, rows=rows), FLOAT).widths == widths


@pytest.mark.parametrize(("device", "place"), [("cpu", "this CPU"), ("cuda:0 (NVIDIA X)",) * 2])
def test_a_runtime_drafts_nothing_unless_asked_where_drafts_are_not_exact(device: str, place: str) -> None:
    base = hash_runtime(Language(1, quality=80))
    assert isinstance(base.engine, HashEngine)
    base.engine.device = device
    inexact = replace(unmeasured(base.bundle.manifest), rows=1e-3, widths=(2, 9))
    with base, Runtime(base.bundle, base.engine, base.max_seq_len, exactness=inexact) as runtime:
        (note,) = runtime.notes
        assert note.startswith(f"drafts are off by default: on {place}, logits of this bundle change")
        assert base.notes == ()
        usual = base.generate((1, 2, 3), Decoding(max_tokens=30))
        plain = runtime.generate((1, 2, 3), Decoding(max_tokens=30))
        asked = runtime.generate((1, 2, 3), Decoding(max_tokens=30, mask_slots=2))
    assert usual.tokens == plain.tokens == asked.tokens
    assert usual.statistics.candidate_rows > 0
    assert plain.statistics.candidate_rows == 0 < asked.statistics.candidate_rows


def test_gpus_may_add_up_in_another_order_for_another_number_of_rows(half_bundle: Path) -> None:
    """Noise of float16 that was emulated is up to 4.1e-3: it would turn drafts off with the limit of CPUs."""
    manifest = open_bundle(half_bundle).manifest
    emulated = Exactness(4.1e-3, 4.1e-3, tolerated_noise(manifest, "cuda:0 (NVIDIA X)"))
    assert emulated.allows_drafts
    assert not replace(emulated, tolerated=tolerated_noise(manifest, "cpu")).allows_drafts
    assert tolerated_noise(replace(manifest, format="int8"), "cuda:0 (NVIDIA X)") == 0


@pytest.mark.parametrize("bundle", ["tiny_bundle", "half_bundle"])
def test_default_drafts_of_a_model_are_those_that_its_measured_noise_allows(
    bundle: str, request: pytest.FixtureRequest
) -> None:
    path: Path = request.getfixturevalue(bundle)
    with Runtime.open(path, max_seq_len=128, threads=1, step_costs="free") as runtime:
        found, manifest = runtime.exactness, runtime.bundle.manifest
    assert found.tolerated == tolerated_noise(manifest, "cpu")
    assert len(found.widths) >= 2
    assert found.rows <= found.tolerated  # kernels compute a row in the same way in every call, on every CPU so far
    assert found.allows_drafts


@pytest.mark.skipif(library_path() is None, reason="no C++ compiler")
def test_native_operators_are_exact_by_construction_and_measured_as_such(
    tiny_int8_bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Runtime.open(tiny_int8_bundle, max_seq_len=128, threads=1, step_costs="free") as runtime:
        assert runtime.exactness == measurements.EXACT
        measured = measure_exactness(runtime.engine, 0.0)
    assert (measured.rows, measured.slots) == (0, 0)
    assert len(measured.widths) >= 2
    bundle, options = open_bundle(tiny_int8_bundle), EngineOptions(256, 1)
    compiled = measurements._file(bundle, "onnxruntime", "cpu", options)
    monkeypatch.setattr(measurements, "library_path", lambda: None)
    assert known_exactness(bundle, "onnxruntime", "cpu", options) != measurements.EXACT
    assert measurements._file(bundle, "onnxruntime", "cpu", options) != compiled  # costs of standard operators


def store(file: Path, stored: Measurements) -> None:
    replace_private(file, json.dumps(asdict(stored)).encode())


TABLE = StepCosts(256, ((1, 0.010), (4, 0.013)), 8, ((1, 0.020),), slot=1e-6, row_slot=2e-7)
EXACT = Exactness(0.0, 1e-6, 1e-5, (2, 9, 33))
FOUND = Measurements(EXACT, TABLE)
MASK = 5
VALID = {"schema": 7, "exactness": asdict(EXACT), "table": asdict(TABLE), "times": 0}


@dataclass
class TickingEngine(HashEngine):
    """An engine whose calls take a while for themselves, each row and each visible slot; now and then much longer."""

    time: float = 0.0
    call: float = 0.01
    masked: float = 0.0  # seconds more with a mask row

    def run(self, batch: Batch) -> NDArray[np.float32]:
        self.calls += 1
        visible = batch.attention_mask.shape[-1]
        requests, rows = batch.input_ids.shape
        usual = self.call * (1 + 0.1 * requests * rows + requests * rows * visible / 10_000)
        usual += self.masked * bool((batch.input_ids == MASK).any())
        self.time += 50 * usual if self.calls <= 1 or self.calls % 5 == 0 else usual
        return np.zeros((1, 1, 1), np.float32)


def usual(rows: int, requests: int = 1) -> float:
    """Seconds of an undisturbed call with 256 visible slots."""
    return 0.01 * (1 + 0.1256 * requests * rows)


def measured(engine: TickingEngine, budget: float = 1e9) -> StepCosts:
    """What is measured where nothing else runs."""
    return measure_step_costs(engine, MASK, budget, lambda: engine.time, lambda: engine.time)


def test_costs_are_those_of_calls_that_have_become_usual() -> None:
    table = measured(TickingEngine(Language(1), 2048, 4))
    assert [rows for rows, _ in table.single] == [1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 16, 17, 24, 33, 36, 64]
    assert dict(table.single) == pytest.approx({rows: usual(rows) for rows, _ in table.single})
    assert dict(table.batched) == pytest.approx({rows: usual(rows, 4) for rows in (1, 4, 9)})
    assert (table.visible, table.requests) == (256, 4)
    assert (table.slot, table.row_slot) == (pytest.approx(1e-6), pytest.approx(1e-6))
    # calls of 64 requests would take longer than there is time, and memory that nobody may ever need
    table = measured(TickingEngine(Language(1), 2048, 64))
    assert table.requests == 8
    assert dict(table.batched) == pytest.approx({rows: usual(rows, 8) for rows in (1, 4, 9)})
    small = TickingEngine(Language(1), 16, 1)
    small.rows = 8
    table = measured(small)
    assert [rows for rows, _ in table.single] == [*range(1, 9)]
    assert (table.visible, table.slot, table.batched) == (16, 0.0, ())


@dataclass
class SelectingTicks(TickingEngine):
    """An engine whose calls take half as long if it selects tokens, since it copies no logits."""

    selects: bool = True

    def select(self, batch: Batch) -> list[SelectedRows]:
        started = self.time
        self.run(batch)
        self.time -= (self.time - started) / 2
        return []


def test_steps_cost_what_decoding_pays_where_tokens_are_selected_on_the_device() -> None:
    found, whole = (dict(measured(kind(Language(1), 256, 1)).single) for kind in (SelectingTicks, TickingEngine))
    assert found == pytest.approx({rows: time / 2 for rows, time in whole.items()})


def test_steps_with_drafts_cost_what_a_mask_row_adds() -> None:
    found, plain = (measured(TickingEngine(Language(1), 256, 2, masked=masked)) for masked in (0.004, 0.0))
    more = {rows: time - dict(plain.single)[rows] for rows, time in found.single}
    assert more == pytest.approx({rows: 0.004 * (rows > 1) for rows in more})
    assert [time for _, time in found.batched] == pytest.approx([usual(1, 2), usual(4, 2) + 0.004, usual(9, 2) + 0.004])


@pytest.mark.parametrize(("call", "most"), [(0.0001, 16), (0.05, 6), (1.0, 2)])
def test_measuring_takes_no_longer_than_the_budget_by_much(call: float, most: int) -> None:
    """A large model is measured at fewer points, the most informative ones."""
    engine = TickingEngine(Language(1), 256, 1, call=call)
    table = measured(engine, 2.0)
    assert len(table.single) <= most
    assert table.single[0][0] == 1
    # a call of one and of four rows is timed a few times whatever it takes; the engine's first call is disturbed
    assert engine.time <= max(2.0, 12 * 2 * call) + 3 * 50 * 1.2 * call


def test_the_calls_that_are_timed_are_what_they_seem() -> None:
    """None of their rows only fills up, and all of them are visible."""
    engine = HashEngine(Language(1, window=8), 512, 2)
    for rows in (1, 36):
        batch = idle(engine, rows)
        assert Staging(engine.signature, 512, 512).padded(batch) == CallShape(1, rows, 256, rows)
        assert batch.slot_ids.tolist() == [[*range(256 - rows, 256)]]
        assert idle(engine, rows, mask=MASK).input_ids.tolist() == [[0, *[0] * (rows - 2), *[MASK] * (rows > 1)]]
        assert batch.sliding_attention_mask is batch.attention_mask


def test_a_table_is_read_as_it_was_written_by_this_user_alone(tmp_path: Path) -> None:
    (tmp_path / "valid.json").write_text(json.dumps(VALID))
    (tmp_path / "valid.json").chmod(0o600)
    assert load(tmp_path / "valid.json") == FOUND
    file = tmp_path / "costs" / "table.json"
    store(file, FOUND)
    assert load(file) == FOUND
    file.chmod(0o666)
    assert load(file) is None
    store(file, FOUND)
    assert load(file) == FOUND


@pytest.mark.parametrize(
    "text",
    [
        *("", "{", "[]", "null", "7", '{"schema": 7}', "[" * 90_000),
        json.dumps({**VALID, "schema": 6}),
        json.dumps({**VALID, "exactness": {"rows": -1, "slots": 0, "tolerated": 0, "widths": [2]}}),
        json.dumps({**VALID, "table": {**asdict(TABLE), "single": [[1, -1]]}}),
        json.dumps({**VALID, "table": {**asdict(TABLE), "single": [[1]]}}),
        json.dumps({**VALID, "table": {**asdict(TABLE), "visible": float("inf")}}),
    ],
)
def test_a_damaged_file_is_no_table(tmp_path: Path, text: str) -> None:
    (tmp_path / "table.json").write_text(text)
    (tmp_path / "table.json").chmod(0o600)
    assert load(tmp_path / "table.json") is None
    assert load(tmp_path / "none.json") is None
    assert load(tmp_path) is None


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache folder of the user's."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "spaceport" / "step-costs"


Measure = Callable[..., StepCosts]


@pytest.fixture
def opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Measure:
    """Opens an engine with this number of requests; each measurement has another result."""
    times = iter(range(1, 100))
    monkeypatch.setattr(measurements, "measure_exactness", lambda engine, tolerated: EXACT)
    monkeypatch.setattr(
        measurements,
        "measure_step_costs",
        lambda engine, mask: replace(
            TABLE, single=((1, float(next(times))),), requests=engine.requests if mask == first_mask else 99
        ),
    )
    (tmp_path / "bundle").mkdir()
    bundle = Bundle(tmp_path / "bundle", fill(tmp_path / "bundle"))
    first_mask = bundle.manifest.tokens.mask[0]

    def opened(requests: int = 1, source: CostSource = "measured") -> StepCosts:
        engine = HashEngine(Language(1), 256, requests)
        return measured_here(bundle, "onnxruntime", engine, EngineOptions(256, requests), source)[0]

    return opened


def test_costs_are_the_lowest_of_three_openings(opened: Measure, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    single = [((1, 3.0), (4, 9.0)), ((1, 5.0), (2, 7.0), (4, 8.0)), ((1, 4.0), (2, 9.0), (4, 6.0)), ((1, 1.0),)]
    tables = [
        replace(TABLE, single=points, requests=1, batched=(), slot=float(number))
        for number, points in enumerate(single, 1)
    ]
    exactness = [EXACT]
    monkeypatch.setattr(measurements, "measure_exactness", lambda engine, tolerated: exactness.pop())  # once
    monkeypatch.setattr(measurements, "measure_step_costs", lambda engine, mask: tables.pop(0))
    assert opened(source="free").single == ((1, 1.0), (2, 1.0))  # measures nothing
    assert [opened().single for _ in range(3)] == [
        single[0],
        ((1, 3.0), (2, 7.0), (4, 8.0)),
        ((1, 3.0), (2, 6.0), (4, 6.0)),
    ]
    assert opened().single == ((1, 3.0), (2, 6.0), (4, 6.0))
    assert opened().slot == 1, "of the measurement with the shortest plain step"
    assert len(tables) == 1


def test_costs_are_measured_for_a_machine_and_a_bundle(
    opened: Measure, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = opened()
    assert [opened() for _ in range(3)] == [first] * 3
    (file,) = cache.iterdir()
    assert opened(requests=2).requests == 2  # another table, in another file
    assert len([*cache.iterdir()]) == 2
    file.write_text("damaged")
    assert opened() != first
    assert load(file) is not None
    for cores in ({0}, {0, 1}):  # that this process may use
        monkeypatch.setattr(os, "sched_getaffinity", lambda process, cores=cores: cores, raising=False)
        monkeypatch.setattr(measurements, "installed_version", lambda package: "1")
        opened()
    monkeypatch.setattr(measurements, "installed_version", lambda package: "2")
    opened()
    assert len([*cache.iterdir()]) == 2 + 2 + 1


def test_a_source_that_does_not_exist_is_refused(opened: Measure) -> None:
    with pytest.raises(OptionFault, match="step_costs is 'estimated': expected measured, standard, free"):
        opened(source="estimated")


def test_a_disk_without_space_keeps_nobody_from_decoding(
    opened: Measure, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("not a folder")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert opened().single == ((1, 1.0),)


def test_standard_costs_repeat_the_steps_of_a_request(demo_bundle: Path, cache: Path) -> None:
    with Runtime.open(demo_bundle, max_seq_len=256, threads=1, step_costs="standard") as runtime:
        texts = [runtime.generate("def read(self, size=-1):\n", Decoding(max_tokens=60)) for _ in range(3)]
    assert len({(text.statistics.steps, text.statistics.rows) for text in texts}) == 1
    (file,) = cache.iterdir()
    assert load(file) == Measurements(runtime.exactness, None)  # only whether its drafts are exact
    with Runtime.open(demo_bundle, max_seq_len=256, threads=1) as measured:
        assert load(file) == Measurements(runtime.exactness, measured.costs, 1)


POINTS = StepCosts(256, ((1, 0.010), (4, 0.013), (16, 0.025)), 8, ((1, 0.020), (4, 0.050)), slot=1e-6, row_slot=2e-7)


@pytest.mark.parametrize(
    ("rows", "requests", "visible", "seconds"),
    [
        *((1, 1, None, 0.010), (2, 1, None, 0.011), (16, 1, None, 0.025), (1, 8, None, 0.020), (4, 8, None, 0.050)),
        (28, 1, None, 0.037),  # the last slope goes on
        *((1, 1, 1256, 0.011), (11, 1, 1256, 0.020 + 0.003), (1, 1, 0, 0.010 - 128e-6)),
    ],
)
def test_a_table_is_read_between_its_points(rows: int, requests: int, visible: int | None, seconds: float) -> None:
    assert POINTS.call_seconds(rows, requests, visible) == pytest.approx(seconds)


def test_fewer_requests_than_were_measured_lie_between_and_python_code_takes_its_time() -> None:
    assert POINTS.call_seconds(4) < POINTS.call_seconds(1, 4) < POINTS.call_seconds(1, 8)
    short = StepCosts(1024, ((1, 0.010),), slot=2e-5)
    assert short.call_seconds(1, 1, 0) == pytest.approx(0.002)  # fewer visible slots never save a whole step
    for threads, python in ((1, 5e-5 + 1e-4 + 8e-6), (2, 5e-5 + 8e-6)):
        assert POINTS.seconds(2, 4, None, threads) == pytest.approx(POINTS.call_seconds(2, 4) + 2 * 4 * python)


@pytest.mark.parametrize(
    "values",
    [
        *({"single": single} for single in ((), ((0, 1.0),), ((4, 1.0), (1, 1.0)), ((1, 1.0), (1, 1.0)), ((1, 0.0),))),
        *({"single": single} for single in (((1, math.nan),), ((1, 1e308), (2, 1.7e308)), ((1, 5e-324),))),
        *({"single": ((1, 1.0),), **wrong} for wrong in ({"row_slot": 1e300}, {"slot": -1.0}, {"requests": 0})),
    ],
)
def test_a_table_that_makes_no_sense_is_refused(values: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="step costs"):
        StepCosts(256, **values)  # type: ignore[arg-type]


@given(st.integers(1, 64), st.integers(1, 64), st.integers(1, 8), st.integers(1, 4096))
def test_curves_rise_from_a_plain_step(most: int, threads: int, requests: int, visible: int) -> None:
    curve = POINTS.curve(most, threads, requests, visible)
    assert curve.times[0] == 1
    assert list(curve.times) == sorted(curve.times)
    assert len(curve.times) == most
    assert 0 <= curve.least == min(curve.slopes)


def test_planning_takes_longer_relative_to_a_short_step() -> None:
    short, long = (StepCosts(256, ((1, seconds), (4, 1.2 * seconds))).curve(4) for seconds in (2e-4, 2e-2))
    assert short.planning > 0.1
    assert long.planning < 0.01
    assert short.times[1] > 1 + short.planning  # a draft was planned
    assert relative_costs(0.1).curve(4).planning == 0
