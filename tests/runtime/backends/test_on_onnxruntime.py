"""ONNX Runtime on the CPU: the weights that it loads, and logits that no layout of the KV buffers changes."""

from __future__ import annotations

import gc
import os
import re
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from onnx import AttributeProto, GraphProto, ModelProto, NodeProto, TensorProto, helper

from spaceport.exporter.export import ExportOptions
from spaceport.graphs.contract.faults import OptionFault
from spaceport.graphs.contract.formats import FORMATS
from spaceport.graphs.contract.manifest import DATA_FILE, MODEL_FILE, record_of
from spaceport.kernels import native_library
from spaceport.kernels.native_library import DOMAIN
from spaceport.runtime import backends
from spaceport.runtime.backends import on_onnxruntime
from spaceport.runtime.backends.graph_file import (
    ExternalTensor,
    external_files,
    external_tensors,
    imported_version,
    operators,
)
from spaceport.runtime.backends.on_onnxruntime import OnnxRuntimeEngine, open_engine
from spaceport.runtime.bundle import Bundle, BundleError, open_bundle
from spaceport.runtime.engine import NO_MOVES, Batch, Engine, EngineOptions, slots_in_order
from spaceport.runtime.memory import KvMemory
from support.exported import bundle_of
from support.layouts import Layout, fed
from support.native_models import rms
from support.paths import TINY
from support.small_bundle import edit
from support.stand_in_driver import engine_on_cpu

needs_library = pytest.mark.skipif(native_library.library_path() is None, reason="no C++ compiler")

INT8 = ExportOptions(FORMATS["int8"])
CAPACITY = 512
# Rows, slots before them, and visible length of calls that follow each other: a prompt, drafts that lengthen what is
# visible by turns, and new texts, for which less than half of the buffers is enough.
CALLS = ((60, 0, 64), (1, 60, 64), (9, 61, 128), (1, 62, 64), (9, 63, 128), (64, 72, 192), (1, 136, 192), (1, 30, 64))
CALLS += ((3, 0, 64), (100, 3, 448), (1, 103, 128))


def step(rows: int, first: int, visible: int, seed: int = 0) -> Batch:
    """A chain behind the first slots."""
    slots = np.arange(first, first + rows)[None]
    mask = np.arange(visible) <= slots[0][:, None]
    tokens = np.random.default_rng(seed).integers(8, 600, (1, rows))
    return Batch(0, tokens, slots, slots, mask[None, None], np.arange(rows)[None])


@pytest.mark.parametrize("most", [2, 4096])
def test_memory_of_earlier_calls_gives_the_logits_of_new_memory(
    most: int, tiny_bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(on_onnxruntime, "_MOST_CALLS", most)
    bundle = open_bundle(tiny_bundle)
    keeping, renewing = (open_engine(bundle, EngineOptions(CAPACITY, 1)) for _ in range(2))
    for seed, call in enumerate(CALLS):
        batch = step(*call, seed)
        renewing._calls.clear()
        renewing._flat.clear()
        assert keeping.run(batch).tobytes() == renewing.run(batch).tobytes()
    assert len(keeping._calls) <= most
    assert keeping._flat["logits"].size == 100 * bundle.manifest.signature.vocab_size


SHAPE = (20, 4, 2, 4096, 16)  # layers x requests x heads x slots x values
BYTES = 4 * 20 * 4 * 2 * 4096 * 16


def taken() -> int:
    """Bytes of memory that this process has without files."""
    found = re.search(r"RssAnon:\s+(\d+) kB", Path("/proc/self/status").read_text("utf-8"))
    assert found is not None
    return 1024 * int(found[1])


def use_huge_pages(memory: KvMemory, request: int, visible: int) -> None:
    """In all layers of a request."""
    for _ in range(SHAPE[0]):
        memory.use_huge_pages(request, 1, visible)


def test_a_short_text_takes_little_of_the_memory() -> None:
    before = taken()
    memory = KvMemory(SHAPE, np.float32)
    assert taken() - before < BYTES / 20
    memory.array[:, :, :, :64] = 1
    assert BYTES / 100 < taken() - before < BYTES / 20
    assert memory.array.sum(dtype=np.float64) == 20 * 4 * 2 * 64 * 16


def test_huge_pages_change_no_content() -> None:
    memory = KvMemory(SHAPE, np.float32)
    memory.array[:, :, :, :1500] = np.arange(1500)[:, None]
    expected = memory.array.copy()
    use_huge_pages(memory, 1, 1500)
    assert memory.array.tobytes() == expected.tobytes()
    memory.array[-1, -1, -1, -1, -1] = 7  # all of it can be written


def test_buffers_beyond_all_memory_are_refused(tiny_bundle: Path) -> None:
    with pytest.raises(MemoryError, match="bytes of KV buffers"):
        KvMemory((2**40, 2**20), np.float32)
    with pytest.raises(MemoryError, match="bytes of KV buffers"):
        open_engine(open_bundle(tiny_bundle), EngineOptions(2**40, 1))


LENGTH = 70
TOKENS = np.random.default_rng(2).integers(8, 600, LENGTH + 1)
ORDER = np.arange(LENGTH)
MIXED = np.concatenate([np.arange(40), 40 + np.random.default_rng(3).permutation(50)[:30]])  # gaps behind slot 39


def feed(engine: Engine, request: int, slots: NDArray[np.int64]) -> None:
    """Compute the rows of a prompt into these slots."""
    mask = np.zeros((1, 1, LENGTH, 128), np.bool_)
    for row in range(LENGTH):
        mask[0, 0, row, slots[: row + 1]] = True
    engine.run(Batch(request, TOKENS[None, :LENGTH], ORDER[None], slots[None], mask, np.array([[0]])))


def following(engine: Engine, request: int) -> NDArray[np.float32]:
    """The logits of the next row behind the lowest slots."""
    mask = (np.arange(128) <= LENGTH)[None, None, None]
    at = np.array([[LENGTH]])
    return engine.run(Batch(request, TOKENS[None, LENGTH:], at, at, mask, np.array([[0]]))).copy()


@pytest.mark.parametrize("open_with", [open_engine, engine_on_cpu])
@pytest.mark.parametrize("slots", [ORDER, MIXED], ids=["in order", "with gaps"])
@pytest.mark.parametrize("requests", [1, 3])
def test_a_row_has_the_same_logits_behind_copied_and_restored_rows_as_behind_computed_ones(
    open_with: Callable[[Bundle, EngineOptions], Engine], slots: NDArray[np.int64], requests: int, any_tiny_bundle: Path
) -> None:
    bundle = open_bundle(any_tiny_bundle)
    append = bundle.manifest.signature.lowering == "append"
    if open_with is engine_on_cpu and (bundle.manifest.native or append):
        pytest.skip("engine_on_cpu runs the scatter-lowered formats of GPUs")
    if append and slots is MIXED:
        pytest.skip("an append engine has no gaps between rows of one call")
    engine, fresh = (open_with(bundle, EngineOptions(192, count)) for count in (requests, 1))
    # Without native operators, rows in other slots add up in another order.
    within = 0 if slots is ORDER or (bundle.manifest.native and native_library.library_path()) else 1e-3
    feed(fresh, 0, ORDER)
    rows, expected = fresh.saved(0, LENGTH), following(fresh, 0)
    for target in {0, requests - 1}:
        feed(engine, 0, slots)
        engine.copy(0, target, slots)
        assert np.abs(following(engine, target) - expected).max() <= within
        engine.clear(target)
        engine.restore(target, rows)
        assert (following(engine, target) == expected).all()


def test_slots_in_order_are_counted_from_the_first_one() -> None:
    found = [slots_in_order(np.array(slots, np.int64)) for slots in ([], [0, 1, 2], [0, 2, 1], [1, 0], [0, 1, 3])]
    assert found == [0, 3, 1, 0, 2]


def tensor(location: str) -> TensorProto:
    found = TensorProto(name="w", data_type=TensorProto.FLOAT, dims=[2], data_location=TensorProto.EXTERNAL)
    for key, value in (("location", location), ("offset", "64"), ("length", "8")):
        found.external_data.add(key=key, value=value)
    return found


def test_external_data_in_all_parts_of_a_model_is_found() -> None:
    model = ModelProto(ir_version=11, producer_name="location")
    assert external_files(model.SerializeToString()) == external_files(b"") == frozenset()
    model.graph.initializer.append(tensor("a"))
    model.graph.initializer.append(TensorProto(name="inner", raw_data=b"location" * 9))
    model.graph.sparse_initializer.add(values=tensor("b"), indices=tensor("c"))
    node = NodeProto(op_type="If")
    node.attribute.append(AttributeProto(name="t", t=tensor("d")))
    node.attribute.append(AttributeProto(name="ts", tensors=[tensor("e")]))
    node.attribute.append(AttributeProto(name="g", g=GraphProto(initializer=[tensor("f")])))
    inner = GraphProto(node=[NodeProto(attribute=[node.attribute[0]])])
    node.attribute.append(AttributeProto(name="gs", graphs=[inner]))
    node.attribute.append(AttributeProto(name="s", strings=[b"location", b"x"]))
    node.attribute.add(name="sp").sparse_tensor.values.CopyFrom(tensor("g"))
    model.graph.node.append(node)
    model.functions.add(name="f").node.append(NodeProto(attribute=[AttributeProto(name="t", t=tensor("h"))]))
    model.functions[0].attribute_proto.append(AttributeProto(name="t", t=tensor("i")))
    model.training_info.add().algorithm.initializer.append(tensor("j"))
    assert external_files(model.SerializeToString()) == set("abcdefghij")
    assert imported_version(model.SerializeToString(), DOMAIN) == 0
    for domain, version in (("", 23), (DOMAIN, 3), ("another", 5)):
        model.opset_import.add(domain=domain, version=version)
    assert imported_version(model.SerializeToString(), DOMAIN) == 3
    assert external_files(model.SerializeToString()) == set("abcdefghij")
    inner.node[0].op_type = "Add"
    node.attribute.append(AttributeProto(name="then", g=inner))
    model.graph.node.append(node)
    assert operators(model.SerializeToString()) == {"If", "Add", ""}


def test_the_initializers_of_the_main_graph_that_have_their_content_in_files_are_found() -> None:
    model = ModelProto(ir_version=11)
    inner = AttributeProto(name="g", g=GraphProto(initializer=[tensor("another")]))
    model.graph.node.append(NodeProto(op_type="If", attribute=[inner]))
    model.graph.initializer.append(TensorProto(name="inner", dims=[9], raw_data=b"location" * 9))
    assert external_tensors(model.SerializeToString()) == external_tensors(b"") == []
    model.graph.initializer.extend([tensor("a"), tensor("b")])
    model.graph.initializer[2].dims.extend([300, 0])
    expected = [ExternalTensor("w", 1, (2,), "a", 64, 8), ExternalTensor("w", 1, (2, 300, 0), "b", 64, 8)]
    assert external_tensors(model.SerializeToString()) == expected


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"a graph", "unknown wire type|ends within a value"),
        (b"\x3a\xff\x01a", "ends within a value"),
        (b"\x3a", "ends within a value"),
        (b"\x08" + b"\xff" * 20, "a number of more than ten bytes"),
        (b"\x0b", "the unknown wire type 3"),
    ],
)
def test_what_is_no_model_is_refused(content: bytes, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        external_files(content)


@given(st.binary(max_size=60))
def test_any_content_is_read_or_refused(content: bytes) -> None:
    for start in (b"", b"\x3a" + bytes([len(content)])):
        for read in (external_files, external_tensors, operators, lambda model: imported_version(model, "spaceport")):
            with suppress(ValueError):
                read(start + content)


# Native bundles


def native_engine(requests: int = 1, slots: int = 192) -> OnnxRuntimeEngine:
    folder = bundle_of(TINY, INT8)
    return open_engine(open_bundle(folder), EngineOptions(slots, requests))


@needs_library
@pytest.mark.parametrize("slots", [ORDER[::-1].copy(), MIXED], ids=["reversed", "with gaps"])
def test_a_text_continues_equally_where_its_rows_were_moved_with_their_scales(slots: NDArray[np.int64]) -> None:
    engine, fresh = native_engine(2), native_engine()
    feed(fresh, 0, ORDER)
    expected = following(fresh, 0)
    for request in (0, 1):
        feed(engine, request, slots)
    untouched = engine.saved(0, 192)
    moved = slots != ORDER
    engine.move(1, [(slots[moved], ORDER[moved])])
    assert following(engine, 1).tobytes() == expected.tobytes()
    assert all((before == now).all() for before, now in zip(untouched, engine.saved(0, 192), strict=True))
    engine.move(0, [(slots[moved], ORDER[moved]), NO_MOVES])
    assert following(engine, 0).tobytes() == expected.tobytes()


def test_a_request_is_cleared_with_its_scales() -> None:
    engine = native_engine(2)
    assert sum(buffers.nbytes for buffers in engine._kv) == engine.signature.kv_bytes(2, 192)
    for request in (0, 1):
        feed(engine, request, ORDER)
    keys, scales = engine.saved(1, LENGTH)
    assert keys.dtype == np.int8
    assert scales.dtype == np.float32
    assert scales.all()
    engine.clear(0)
    assert not any(part.any() for part in engine.saved(0, 192))
    assert all((before == now).all() for before, now in zip((keys, scales), engine.saved(1, LENGTH), strict=True))


def test_copied_weights_give_the_logits_of_mapped_ones_from_memory_that_no_file_changes(tmp_path: Path) -> None:
    folder = shutil.copytree(bundle_of(TINY, INT8), tmp_path / "bundle")
    mapped, copied = (
        open_engine(open_bundle(folder, copy_weights=copies), EngineOptions(192, 1)) for copies in (False, True)
    )
    gc.collect()
    assert mapped.run(step(9, 0, 64)).tobytes() == copied.run(step(9, 0, 64)).tobytes()
    del mapped
    gc.collect()
    assert str(folder / DATA_FILE) not in Path("/proc/self/maps").read_text("utf-8")
    before = copied.run(step(9, 0, 64)).tobytes()
    (folder / DATA_FILE).write_bytes(b"")
    assert copied.run(step(9, 0, 64)).tobytes() == before


def changed_bundle(folder: Path, change: Callable[[ModelProto], None]) -> Path:
    """A native bundle with another graph."""
    shutil.copytree(bundle_of(TINY, INT8), folder)
    model = ModelProto.FromString((folder / MODEL_FILE).read_bytes())
    change(model)
    (folder / MODEL_FILE).write_bytes(model.SerializeToString())
    with (folder / MODEL_FILE).open("rb") as stream:
        record = record_of(stream)
    edit(folder, lambda entries: entries["files"][MODEL_FILE].update(sha256=record.sha256, size=record.size))
    return folder


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("offset", "-64", r"has bytes -64 to .*: expected \d+ bytes for the shape"),
        ("offset", str(2**62), "has bytes 4611686018427387904 to"),
        ("length", "8", r"expected \d+ bytes for the shape"),
        ("kind", TensorProto.BFLOAT16, "has the element type 16: expected 1, 2"),
    ],
)
def test_copied_weights_outside_of_their_file_are_refused(
    key: str, value: str | int, message: str, tmp_path: Path
) -> None:
    def change(model: ModelProto) -> None:
        changed = next(each for each in model.graph.initializer if each.external_data)
        if key == "kind":
            changed.data_type = int(value)
        for entry in changed.external_data:
            if entry.key == key:
                entry.value = str(value)

    folder = changed_bundle(tmp_path / "bundle", change)
    with pytest.raises(BundleError, match=message):
        open_engine(open_bundle(folder, copy_weights=True), EngineOptions(64, 1))


def test_weights_that_are_not_copied_are_read_from_the_bundle_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of attributes; without a folder, onnxruntime would take a file of this name in the current one."""

    def add(model: ModelProto) -> None:
        value = tensor(DATA_FILE)
        model.graph.node.insert(0, helper.make_node("Constant", [], ["constant"], value=value))
        model.graph.node.insert(1, helper.make_node("Identity", ["constant"], ["same"]))

    folder = changed_bundle(tmp_path / "bundle", add)
    monkeypatch.chdir(tmp_path)
    open_engine(open_bundle(folder, copy_weights=True), EngineOptions(64, 1))


def test_weights_without_memory_and_weights_that_change_meanwhile_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = shutil.copytree(bundle_of(TINY, INT8), tmp_path / "bundle")
    bundle = open_bundle(folder, copy_weights=True)

    def fail(descriptor: int) -> Any:
        raise MemoryError("7 bytes of weights")

    with monkeypatch.context() as without_memory:
        without_memory.setattr(on_onnxruntime, "copied_file", fail)
        with pytest.raises(OptionFault, match=r"7 bytes of weights do not fit into memory: map them \(--map-weights"):
            backends.open_engine(bundle, "onnxruntime", EngineOptions(64, 1))
    os.truncate(folder / DATA_FILE, 64)
    with pytest.raises(BundleError, match=f"{DATA_FILE}: was changed or replaced while it was opened: open it again"):
        open_engine(bundle, EngineOptions(64, 1))


@needs_library
@pytest.mark.parametrize("most_folded", [64_000_000, 0])
def test_without_the_library_a_native_bundle_runs_and_its_engine_says_so(
    monkeypatch: pytest.MonkeyPatch, most_folded: int
) -> None:
    compiled = native_engine()
    assert compiled.notes == ()
    monkeypatch.setattr(on_onnxruntime, "library_path", lambda: None)
    monkeypatch.setattr(on_onnxruntime, "MOST_FOLDED", most_folded)
    standard = native_engine()
    (note,) = standard.notes
    assert re.search(r"not compiled .* much slower; install a C\+\+ compiler .* then install Spaceport again", note)
    found, expected = (fed(engine, TOKENS[:LENGTH].tolist(), Layout((LENGTH,))) for engine in (standard, compiled))
    # Where float sums differ in their last bit, a code of 8 bits may be the next one.
    assert rms(found, expected) <= 0.02
    assert (found.argmax(-1) == expected.argmax(-1)).mean() > 0.95


@needs_library
def test_an_older_library_and_an_unknown_instruction_set_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    own, newer, folder = native_library.VERSION, native_library.VERSION + 1, bundle_of(TINY, INT8)
    changes: list[tuple[Callable[[pytest.MonkeyPatch], None], str]] = [
        (
            lambda patch: patch.setenv("SPACEPORT_KERNELS", "sse9"),
            "SPACEPORT_KERNELS is sse9: this processor has .*portable; name one of them",
        ),
        (
            lambda patch: patch.setattr(native_library, "version", lambda library: 0),
            f"have version 0, expected {own} or newer: install Spaceport again",
        ),
        (
            lambda patch: patch.setattr(on_onnxruntime, "imported_version", lambda model, domain: newer),
            f"have version {own}, expected {newer} or newer: install Spaceport again, in the version",
        ),
    ]
    for change, message in changes:
        with monkeypatch.context() as patch:
            change(patch)
            with pytest.raises(BundleError, match=f"{folder}: .*{message}"):
                native_engine()
