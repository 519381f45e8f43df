"""CUDA: what runs on a GPU runs on the CPU here, and gives what the plain engine gives."""

from __future__ import annotations

import _ctypes
import gc
import json
import re
import shutil
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from threading import get_ident
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest
from hypothesis import given
from hypothesis import strategies as st

from spaceport.exporter.atomic_folder import write_manifest
from spaceport.exporter.to_onnx import write_selection
from spaceport.graphs.contract.manifest import MANIFEST_FILE, SELECTION_FILE
from spaceport.runtime.backends import on_cuda, on_tensorrt, open_engine
from spaceport.runtime.backends.machine import Gpu
from spaceport.runtime.backends.on_cuda import PLAIN, DeviceEngine, GraphChoice
from spaceport.runtime.backends.on_onnxruntime import open_selection, open_session, session_options
from spaceport.runtime.backends.on_tensorrt import CudaGraphs
from spaceport.runtime.backends.staging import CallShape
from spaceport.runtime.bundle import Bundle, BundleError, open_bundle
from spaceport.runtime.decoding import Decoding
from spaceport.runtime.engine import NO_MOVES, Batch, Engine, EngineFault, EngineOptions, capacity_for
from spaceport.runtime.sampling.sampler import Sampling
from spaceport.runtime.session import Runtime
from support.paths import TINY
from support.small_bundle import forking_copy
from support.stand_in_driver import StandInDriver, stand_in_memory


class ReplayingSession:
    """An onnxruntime session on the CPU."""

    def __init__(self, session: ort.InferenceSession) -> None:
        self._session = session
        self.captured: dict[tuple[int, str], Recorded] = {}  # by OS thread and graph id, as in onnxruntime
        self.replays = 0
        self.plain = 0

    def io_binding(self) -> Recorded:
        return Recorded(self._session)

    def run_with_iobinding(self, binding: Recorded, options: ort.RunOptions) -> None:
        number = options.get_run_config_entry("gpu_graph_id")
        if number == "-1":
            self.plain += 1
            self._session.run_with_iobinding(binding.binding)
            return
        key = (get_ident(), number)
        self.replays += key in self.captured
        graph = self.captured.setdefault(key, binding.copy())
        for _ in range(3):  # a capture runs the graph more than once
            self._session.run_with_iobinding(graph.binding)


class Recorded:
    """A binding that records the bound addresses."""

    def __init__(self, session: ort.InferenceSession) -> None:
        self.binding = session.io_binding()
        self._session = session
        self._addresses: dict[tuple[str, str], tuple[Any, ...]] = {}

    def __getattr__(self, method: str) -> Any:
        call = getattr(self.binding, method)

        def bind(name: str, *address: Any) -> None:
            self._addresses[method, name] = address
            call(name, *address)

        return bind if method in ("bind_input", "bind_output") else call

    def copy(self) -> Recorded:
        """The same addresses, in a binding that stays unchanged."""
        copy = Recorded(self._session)
        for (method, name), address in self._addresses.items():
            getattr(copy, method)(name, *address)
        return copy


PROMPTS: list[str] = [*json.loads((TINY / "prompts.json").read_text("utf-8")).values()]
LENGTH, REQUESTS = 192, 3


def session_of(bundle: Bundle) -> ort.InferenceSession:
    options = session_options(1)
    options.add_session_config_entry("session.record_ep_graph_assignment_info", "1")
    return open_session(bundle, options, ["CPUExecutionProvider"])


def options_of(bundle: Bundle) -> EngineOptions:
    return EngineOptions(capacity_for(bundle.manifest, LENGTH), REQUESTS)


def device_engine(
    bundle: Bundle, selects: bool = True, driver: StandInDriver | None = None
) -> tuple[DeviceEngine, ReplayingSession]:
    """What a GPU would run, with memory and session of the CPU."""
    session = ReplayingSession(session_of(bundle))
    selection = open_selection(bundle, ["CPUExecutionProvider"]) if selects else None
    signature = bundle.manifest.signature
    memory, options = stand_in_memory(driver), options_of(bundle)
    return DeviceEngine(session, signature, options, "cpu", "cpu", memory, True, selection=selection), session


def texts(runtime: Runtime, asked: Sequence[tuple[str, Decoding]]) -> list[list[int]]:
    """The tokens of texts that are written at the same time."""
    streams = [runtime.stream(prompt, decoding) for prompt, decoding in asked]
    return [list(stream.completion().tokens) for stream in streams]


@pytest.fixture(scope="module")
def forking_bundle(tiny_bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return forking_copy(tiny_bundle, tmp_path_factory.mktemp("forking") / "bundle")


@pytest.mark.parametrize("kind", ["forking_bundle", "half_bundle"])
def test_texts_are_those_of_the_plain_engine_with_selected_tokens_with_logits_and_in_turns(
    kind: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request that needs logits has them, and the others in its calls have them too."""
    bundle = open_bundle(request.getfixturevalue(kind))
    (engine, session), (whole, _) = device_engine(bundle), device_engine(bundle, selects=False)
    calls: Counter[str] = Counter()
    for name in ("select", "run"):
        call = getattr(engine, name)
        monkeypatch.setattr(engine, name, lambda batch, call=call, name=name: calls.update([name]) or call(batch))
    greedy = [
        Decoding(max_tokens=40, mask_slots=slots, trace=slots == 5, draft="chain" if slots == 3 else "tree")
        for slots in (5, 3, 0)
    ]
    others = [Decoding(max_tokens=12, logprobs=2), Decoding(max_tokens=25, sampling=Sampling(temperature=1.0, seed=3))]
    mixed = [(PROMPTS[number % 3], one) for number, one in enumerate((*greedy, *others))]
    with (
        Runtime(bundle, engine, LENGTH) as ours,
        Runtime(bundle, whole, LENGTH) as by_logits,
        Runtime(bundle, open_engine(bundle, "onnxruntime", options_of(bundle)), LENGTH) as plain,
    ):
        for one in greedy:
            assert texts(ours, [(PROMPTS[0], one)]) == texts(plain, [(PROMPTS[0], one)])
        assert calls["select"] > 20
        assert calls["run"] == 0
        assert texts(ours, mixed) == texts(by_logits, mixed) == texts(plain, mixed)
        assert calls["run"] > 10
        before = calls["run"]
        assert texts(ours, [(PROMPTS[1], greedy[0])]) == texts(plain, [(PROMPTS[1], greedy[0])])
        assert calls["run"] == before
    assert session.replays > 10
    assert session.plain > 10


def test_a_bundle_without_a_selection_graph_runs_by_its_logits(tiny_bundle: Path) -> None:
    bundle = open_bundle(tiny_bundle)
    files = dict(bundle.manifest.files)
    del files[SELECTION_FILE]
    older = replace(bundle, manifest=replace(bundle.manifest, files=files))
    assert open_selection(older, ["CPUExecutionProvider"]) is None
    engine, _ = device_engine(older)
    assert not engine.selects
    with Runtime(older, engine, LENGTH) as runtime:
        assert runtime.generate(PROMPTS[0], Decoding(max_tokens=8)).tokens


def test_a_selection_graph_of_another_vocabulary_is_refused(tiny_bundle: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(tiny_bundle, tmp_path / "bundle", ignore=shutil.ignore_patterns(MANIFEST_FILE))
    write_selection(folder / SELECTION_FILE, 11)
    write_manifest(folder, open_bundle(tiny_bundle).manifest)
    bundle = open_bundle(folder)
    with pytest.raises(BundleError, match=r"selection.onnx: has the input logits tensor\(float\) \[\?, \?, 11\]"):
        open_selection(bundle, ["CPUExecutionProvider"])


def one_row(engine: Engine, request: int) -> Batch:
    """A row that sees itself and one slot that was written long ago."""
    ids, slots = np.full((1, 1), 5, np.int64), np.full((1, 1), 3, np.int64)
    mask = np.zeros((1, 1, 1, 64), np.bool_)
    mask[..., [3, 7]] = True
    return Batch(request, ids, ids, slots, mask, np.zeros((1, 1), np.int64))


def test_what_is_no_number_ends_with_the_request_that_wrote_it_and_never_moves(tiny_bundle: Path) -> None:
    engine, _ = device_engine(open_bundle(tiny_bundle))
    engine.move(0, [NO_MOVES, NO_MOVES])
    with pytest.raises(EngineFault, match="nothing moves"):
        engine.move(0, [(np.array([3]), np.array([1]))])
    clean = [engine.run(one_row(engine, request)).copy() for request in range(REQUESTS)]
    memory = engine._kv.numpy()
    memory.view(np.float32)[:] = np.nan
    assert np.isnan(engine.run(one_row(engine, 1))).all()
    engine.clear(1)
    assert np.array_equal(engine.run(one_row(engine, 1)), clean[1])
    assert np.isnan(engine.run(one_row(engine, 0))).all()
    assert np.isnan(engine.run(one_row(engine, 2))).all()


def test_kv_slots_are_zeroed_and_copied_on_the_device_in_one_call_for_each_run_of_slots(tiny_bundle: Path) -> None:
    driver = StandInDriver()
    engine, _ = device_engine(open_bundle(tiny_bundle), driver=driver)
    assert driver.calls["cuMemsetD8_v2"] == 1
    assert not engine._kv.numpy().any()
    for work, copies in (
        (lambda: engine.copy(0, 1, np.arange(40)), 1),
        (lambda: engine.copy(0, 1, np.array([0, 1, 7, 8, 3])), 3),
        (lambda: engine.copy(1, 1, np.arange(40)), 0),  # they are there already
        (lambda: engine.copy(1, 1, np.array([0, 1, 7, 8])), 1 + 1),  # and back from where they are read first
        (lambda: engine.restore(2, engine.saved(0, 30)), 2),
    ):
        before = driver.calls["cuMemcpy3D_v2"]
        work()
        assert driver.calls["cuMemcpy3D_v2"] - before == copies
    assert engine.copy_bandwidth(size=4096, rounds=2) > 0
    assert driver.calls["cuMemcpyDtoD_v2"] == 2
    assert driver.current == 0
    driver.broken = "cuMemcpy3D_v2"
    with pytest.raises(EngineFault, match="the NVIDIA driver failed in cuMemcpy3D_v2 with code 700"):
        engine.copy(0, 1, np.arange(4))
    assert driver.current == 0
    engine.close()
    engine.close()
    assert driver.calls["cuDevicePrimaryCtxRelease_v2"] == 1


def test_cuda_libraries_of_packages_anywhere_on_the_path_are_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """onnxruntime looks beside itself only, and reports what it misses on standard output."""
    folder = tmp_path / "nvidia" / "cu99" / "lib"
    folder.mkdir(parents=True)
    monkeypatch.syspath_prepend(tmp_path)
    shutil.copy(_ctypes.__file__, folder / "libpresent.so.99")
    (folder / "libbroken.so.99").write_text("no library")
    names = ("libpresent.so.99", "libbroken.so.99", "libmissing.so.99")
    failing = "".join(f"Failed to load {name}: cannot open\n" for name in names)
    monkeypatch.setattr(ort, "preload_dlls", lambda: print(f"Failed to load {folder}/{names[0]}: no\n{failing}"))
    assert on_cuda.preload() == ("libbroken.so.99", "libmissing.so.99")


def test_an_engine_holds_no_memory_and_no_thread_when_it_is_closed_or_let_go_of(tiny_bundle: Path) -> None:
    before = {*threading.enumerate()}
    engine, session = device_engine(open_bundle(tiny_bundle))
    engine.run(one_row(engine, 0))
    (thread,) = {thread for thread in threading.enumerate() if thread.name.startswith("spaceport-graphs")} - before
    weights, buffers = weakref.ref(session._session), weakref.ref(engine._kv)
    del session
    engine.close()
    gc.collect()
    assert (weights(), buffers()) == (None, None)
    assert not thread.is_alive()
    with pytest.raises(EngineFault, match="the engine is closed"):
        engine.run(one_row(engine, 0))
    left, session = device_engine(open_bundle(tiny_bundle))  # which nobody closes
    left.run(one_row(left, 0))
    weights = weakref.ref(session._session)
    del left, session
    gc.collect()
    assert weights() is None


def test_what_one_os_thread_captured_is_played_for_all(tiny_bundle: Path) -> None:
    engine, session = device_engine(open_bundle(tiny_bundle))
    step = one_row(engine, 0)
    found = [engine.run(step).copy() for _ in range(6)]
    for _ in range(3):
        with ThreadPoolExecutor(1) as other:
            found.append(other.submit(engine.run, step).result().copy())
    assert len(session.captured) == 1
    assert session.replays == 9 - 3 - 1
    assert all(np.array_equal(logits, found[0]) for logits in found)


def graph_ids(graphs: GraphChoice, first: int, shape: CallShape, calls: int) -> list[int]:
    return [int(graphs.options(first, shape).get_run_config_entry("gpu_graph_id")) for _ in range(calls)]


def test_calls_of_few_rows_that_come_again_get_a_graph_each() -> None:
    graphs = GraphChoice(most=2)
    step, other, wide = CallShape(1, 9, 128, 9), CallShape(1, 9, 192, 9), CallShape(1, 128, 128, 1)
    assert graph_ids(graphs, 0, wide, 9) == [PLAIN] * 9
    assert graph_ids(graphs, 0, step, 5) == [PLAIN] * 3 + [0, 0]
    assert graph_ids(graphs, 1, step, 4) == [PLAIN] * 3 + [1]
    assert graph_ids(graphs, 0, other, 9) == [PLAIN] * 9, "there are as many graphs as there may be"
    assert graph_ids(graphs, 0, step, 1) + graph_ids(graphs, 1, step, 1) == [0, 1]


def played(keys: str, most: int = 3) -> tuple[str, str, str, CudaGraphs]:
    """The keys whose work was done, prepared and captured, in their order."""
    done, prepared, captured = list[str](), list[str](), list[str]()

    def capture(work: Callable[[], None]) -> Callable[[], None]:
        work()
        key = done.pop()
        assert key == done[-1], "what is captured has just been done plainly"
        captured.append(key)
        return lambda: done.append(key)

    graphs = CudaGraphs(capture, most)
    for key in keys:
        graphs.run(key, lambda key=key: done.append(key), lambda key=key: prepared.append(key))
    return "".join(done), "".join(prepared), "".join(captured), graphs


@given(keys=st.text("abcde", max_size=40))
def test_what_is_played_is_done_in_its_order(keys: str) -> None:
    done, _, _, graphs = played(keys)
    assert done == keys
    assert len(graphs._graphs) <= 3


def test_calls_are_captured_the_second_time_and_the_least_recently_used_graph_goes_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert played("aaaaa")[:3] == ("aaaaa", "aa", "a")
    assert played("aabbaccbc", most=2)[2] == "abcb"
    monkeypatch.setattr(on_tensorrt, "_MOST_SEEN", 20)
    *_, captured, graphs = played("abcdefghijklmnopqrstuvwxyz")
    assert len(graphs._seen) <= 21, "calls that never come again are forgotten"
    assert not captured


def test_an_engine_without_cuda_graphs_says_why_and_names_what_runs_on_the_cpu(
    tiny_bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bundle, refusing = open_bundle(tiny_bundle), True
    on_cpu = session_of(bundle)

    def session(bundle: Bundle, graphs: bool) -> ort.InferenceSession:
        if graphs and refusing:
            raise RuntimeError("This session cannot use the graph capture feature as requested by the user")
        return on_cpu

    monkeypatch.setattr(on_cuda, "_session", session)
    graphs, nodes = on_cuda.open_on_gpu(bundle, True)[1]
    assert graphs == "no CUDA graphs: onnxruntime did not put the whole graph on the GPU"
    assert re.fullmatch("on the CPU, not on the GPU: .*RMSNormalization node_RMSNormalization.* and [0-9]+ more", nodes)
    assert " Shape " not in nodes
    assert on_cuda.open_on_gpu(bundle, False)[1] == (nodes,)
    monkeypatch.setattr(ort, "__version__", "1.29.1")
    assert on_cuda.open_on_gpu(bundle, True)[1][0].startswith("no CUDA graphs: onnxruntime 1.29.1 has faults")
    monkeypatch.setattr(ort, "__version__", "1.30.0")
    refusing = False
    assert on_cuda.open_on_gpu(bundle, True)[1] == ()
    (all_of_them,) = on_cuda.cpu_nodes(on_cpu, frozenset())
    assert "Shape node_Shape" in all_of_them
    every = {node.op_type for part in on_cpu.get_provider_graph_assignment_info() for node in part.get_nodes()}
    assert on_cuda.cpu_nodes(on_cpu, every) == ()


def test_a_full_gpu_is_distinguished_from_a_broken_graph(tiny_bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for said, full in (
        ("CUDA failure 2: out of memory ; GPU=0 ; expr=cudaMalloc((void**)&p, size);", True),
        ("BFCArena::AllocateRawInternal Failed to allocate memory for requested buffer of size 4294967296", True),
        ("Load model from model.onnx failed:Protobuf parsing failed.", False),
    ):
        assert (on_cuda._NO_MEMORY.search(said) is not None) == full
    monkeypatch.setattr(on_cuda, "gpu", lambda: Gpu("NVIDIA Test", "sm89", 24 * 10**9))
    assert on_cuda.out_of_memory(open_bundle(tiny_bundle), EngineOptions(10**6, 8)) == (
        "0.0 GB of weights and 6.1 GB of KV buffers (8 requests of 1000000 slots) do not fit into the 24.0 GB of the NVIDIA "
        "Test: lower max_seq_len or max_requests"
    )
