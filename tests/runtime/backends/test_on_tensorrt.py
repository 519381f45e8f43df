"""TensorRT: its engines generate what ONNX Runtime generates, keep to what is bound once, and fail with their reasons."""

from __future__ import annotations

import gc
import hashlib
import json
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from spaceport.graphs.contract.signature import Signature
from spaceport.runtime import Decoding, Runtime, Sampling
from spaceport.runtime.backends.on_tensorrt import STEPS
from spaceport.runtime.backends.on_torch import TorchEngine
from spaceport.runtime.bundle import BundleError
from spaceport.runtime.engine import NO_MOVES, EngineFault, capacity_for
from support.paths import TINY
from support.small_bundle import forking_copy
from support.stand_in_tensorrt import (
    Kind,
    Location,
    Plan,
    Specialization,
    StandInContext,
    StandInDevice,
    api_of,
    batch_of_rows,
    opened,
    plan_of,
)

LENGTH = 320
TEXTS = ("The harbour was quiet when", "a b c d e f g h", "In the morning the")
SCANNER: str = json.loads((TINY / "prompts.json").read_text("utf-8"))["end of json/scanner.py"]  # it has many lines
DECODINGS = (
    Decoding(max_tokens=48, mask_slots=0),
    Decoding(max_tokens=48),
    Decoding(max_tokens=48, draft="chain"),
    Decoding(max_tokens=40, sampling=Sampling(temperature=1.0, seed=3)),
)


@pytest.fixture
def plan(tiny_append_bundle: Path) -> Plan:
    return plan_of(tiny_append_bundle)


@pytest.fixture
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where this machine keeps what it knows of engines."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return tmp_path / "state"


@contextmanager
def runtime_of(path: Path, requests: int = 1, graphs: bool = True) -> Iterator[tuple[Runtime, StandInDevice]]:
    """A runtime over a stand-in engine with capacity for one request more than needed."""
    device, plan = StandInDevice(), plan_of(path)
    capacity = capacity_for(plan.bundle.manifest, LENGTH)
    plan.record = replace(plan.record, capacity=capacity, requests=requests + 1)
    with Runtime(plan.bundle, opened(plan, device, requests, graphs), LENGTH) as runtime:
        yield runtime, device


def contexts(engine: Any) -> list[StandInContext]:
    return [context.run for context in engine._contexts]


@pytest.mark.parametrize("graphs", [True, False])
def test_an_engine_writes_what_onnx_runtime_writes(graphs: bool, tiny_append_bundle: Path, tmp_path: Path) -> None:
    bundle = forking_copy(tiny_append_bundle, tmp_path / "bundle")
    with (
        Runtime.open(bundle, max_seq_len=LENGTH, threads=1, step_costs="standard") as plain,
        runtime_of(bundle, graphs=graphs) as (runtime, device),
    ):
        for prompt in (*TEXTS[:2], SCANNER):
            for decoding in DECODINGS:
                expected, got = plain.generate(prompt, decoding), runtime.generate(prompt, decoding)
                assert [thread.tokens for thread in got.threads] == [thread.tokens for thread in expected.threads]
                # Drafts follow step costs and probabilities, which are those of each engine.
                assert abs(got.statistics.steps - expected.statistics.steps) <= 2
            assert (len(got.threads) > 1) == (prompt is SCANNER)
        assert (device.captured > 3 and device.replayed > 2 * device.captured) == graphs
        runtime.generate(list(range(10, 150)), Decoding(max_tokens=1))  # more rows than a step has
        for context in contexts(runtime.engine):
            past = [name for name in context.bound if name.startswith("past")]
            assert sorted(past) == sorted(tensor.name for tensor in runtime.engine.signature.past), "bound once"
        assert max(ran["input_ids"][1] for ran in contexts(runtime.engine)[STEPS].ran) <= 64


def test_texts_beside_each_other_are_those_alone(tiny_append_bundle: Path) -> None:
    """Calls over ranges of requests, with idle ones between, of different widths."""
    with runtime_of(tiny_append_bundle) as (alone, _), runtime_of(tiny_append_bundle, requests=3) as (together, device):
        decodings = [Decoding(max_tokens=10 + 12 * number) for number in range(5)]
        prompts = [TEXTS[number % 3] * (1 + 3 * number) for number in range(5)]
        streams = [together.stream(p, d) for p, d in zip(prompts, decodings, strict=True)]
        got = [stream.completion().tokens for stream in streams]
        assert got == [alone.generate(p, d).tokens for p, d in zip(prompts, decodings, strict=True)]
        assert {ran["input_ids"][0] for ran in contexts(together.engine)[STEPS].ran} >= {1, 3}
        assert device.replayed


def torch_engine() -> TorchEngine:
    engine = TorchEngine(lambda: (), Signature(3, 2, 3, 50, "float32", "append"), 8, 4, "cpu")
    engine._kv = torch.arange(engine._kv.numel(), dtype=torch.float32).reshape(engine._kv.shape)
    return engine


@pytest.mark.parametrize(("sources", "targets"), [([1, 2, 3], [0, 1, 2]), ([0, 5], [5, 0]), ([7, 6], [1, 0])])
def test_slots_are_all_read_before_any_is_moved_and_each_request_has_its_own_moves(
    sources: list[int], targets: list[int]
) -> None:
    engine = torch_engine()
    before, expected = engine._kv.clone(), engine._kv.clone()
    expected[:, 1, :, targets] = before[:, 1, :, sources]
    expected[:, 3, :, 2] = before[:, 3, :, 5]
    engine.move(1, [(np.array(sources), np.array(targets)), NO_MOVES, (np.array([5]), np.array([2]))])
    assert torch.equal(engine._kv, expected)


@pytest.mark.parametrize("target", [0, 1, 2])
def test_all_slots_are_read_before_any_is_copied_to_another_request(target: int) -> None:
    engine = torch_engine()
    expected = engine._kv.clone()
    expected[:, target, :, :4] = engine._kv[:, 0][:, :, [2, 0, 7, 1]]
    engine.copy(0, target, np.array([2, 0, 7, 1]))
    assert torch.equal(engine._kv, expected)


def test_only_the_slots_of_a_request_are_cleared_and_nothing_moves_where_nothing_has_to() -> None:
    engine = torch_engine()
    before = engine._kv.clone()
    engine.move(0, [NO_MOVES])
    assert torch.equal(engine._kv, before)
    engine._kv[:, 0] = float("nan")
    engine.clear(0)
    assert not engine._kv[:, 0].any()
    assert torch.equal(engine._kv[:, 1:], before[:, 1:])
    engine.restore(0, engine.saved(2, 5))
    assert torch.equal(engine._kv[:, 0, :, :5], before[:, 2, :, :5])
    assert not engine._kv[:, 0, :, 5:].any()


def kernels(engine: Any) -> tuple[Any, Any]:
    """The configurations of the two contexts, which have one cache of kernels."""
    steps, prompts = (context.config for context in contexts(engine))
    assert steps is not None
    assert prompts is not None
    assert steps.cache is prompts.cache
    return steps, prompts


def test_what_is_compiled_is_found_again(plan: Plan, state: Path) -> None:
    with Runtime(plan.bundle, opened(plan), LENGTH) as runtime:
        steps, prompts = kernels(runtime.engine)
        assert steps.dynamic_shapes_kernel_specialization_strategy is Specialization.EAGER  # it is captured
        assert prompts.dynamic_shapes_kernel_specialization_strategy is Specialization.LAZY
        assert steps.cache.content == b""
        runtime.generate("The harbour", Decoding(max_tokens=5))
        content = steps.cache.content
    (file,) = (state / "spaceport" / "kernels").iterdir()
    assert file.read_bytes() == hashlib.sha256(content).digest() + content
    again = opened(plan)
    assert kernels(again)[0].cache.content == content
    file.write_bytes(bytes(32) + b"compiled and damaged")
    again = opened(plan, graphs=False)
    steps, _ = kernels(again)
    assert steps.cache.content == b""
    assert steps.dynamic_shapes_kernel_specialization_strategy is Specialization.LAZY


@pytest.mark.parametrize("compiles", [True, False])
def test_where_nothing_can_be_kept_or_is_compiled_nothing_fails(plan: Plan, state: Path, compiles: bool) -> None:
    plan.compiles = compiles  # TensorRT itself compiles nothing while it runs
    if compiles:
        state.mkdir()
        (state / "spaceport").write_text("a file in the way")
    with Runtime(plan.bundle, opened(plan), LENGTH) as runtime:
        assert all((context.config is not None) == compiles for context in contexts(runtime.engine))
        runtime.generate("The harbour", Decoding(max_tokens=5))
    assert state.exists() == compiles


WRONG: list[tuple[str, str, Any, str]] = [
    ("alias", "present.0.key", None, "present.0.key is not written in place of past_key_values.0.key"),
    ("alias", "present.1.value", "past_key_values.1.key", "present.1.value is not written in place"),
    ("dtype", "past_key_values.0.key", Kind.HALF, "past_key_values.0.key has the type Kind.HALF, FLOAT is expected"),
    ("location", "slot_ids", Location.HOST, "slot_ids is read on the host"),
    ("shape", "past_key_values.1.key", (-1, 2, 512, 16), "past_key_values.1.key has the shape"),
    ("shape", "logits", (-1, -1, 7), "logits has the shape"),
    ("mode", "logits", None, "logits is no output"),
    ("more", "extra", None, r"its tensors are not the contract's \(extra\)"),
]


@pytest.mark.parametrize(("what", "name", "instead", "message"), WRONG, ids=[f"{w[0]} {w[1]}" for w in WRONG])
def test_an_engine_that_breaks_the_contract_is_refused(
    what: str, name: str, instead: Any, message: str, plan: Plan
) -> None:
    plan.changes = {what: {name: instead}}
    with pytest.raises(BundleError, match=rf"stand-in.engine: {message}.*build it again"):
        opened(plan)


class Refusing(StandInDevice):
    """A GPU that captures nothing."""

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        raise RuntimeError("CUDA error: operation not permitted when stream is capturing")


def test_every_failure_has_its_kind_and_the_words_of_the_library(plan: Plan) -> None:
    def broken(**changes: Any) -> Plan:
        return replace(plan, **changes)

    with pytest.raises(BundleError, match="it has 1 profiles, 2 are expected"):
        opened(broken(profiles=1))
    with pytest.raises(BundleError, match="does not open: the engine plan file is not compatible: build it again"):
        opened(broken(why_not="the engine plan file is not compatible"))
    with pytest.raises(EngineFault, match="opens no context for profile 0: setOptimizationProfileAsync: no"):
        opened(broken(switches=False))
    refusing = opened(plan, Refusing())
    refusing.run(batch_of_rows(1))
    with pytest.raises(EngineFault, match=r"cannot be captured as a CUDA graph \(CUDA error: operation not permitted"):
        refusing.run(batch_of_rows(1))
    narrow = replace(plan.record, step_rows=4, prefill_rows=8)
    message = r"takes no input_ids of shape \[1, 16\]: setInputShape: .* not within profile 1"
    with pytest.raises(EngineFault, match=message):
        opened(broken(record=narrow)).run(batch_of_rows(16))
    shape = r"tensorrt-rtx failed in a step of shape \(B 1, T 1, A 64, R 1\): enqueueV3: the GPU has caught fire"
    with pytest.raises(EngineFault, match=shape):
        opened(broken(fails=True)).run(batch_of_rows(1))


@pytest.mark.parametrize(
    "said",
    [
        "[defaultAllocator.cpp::allocate::31] Error Code 1: Cuda Runtime (out of memory)",
        "[executionContext.cpp::ExecutionContext::470] Error Code 2: OutOfMemory (no further information)",
    ],
)
def test_a_full_gpu_is_distinguished_from_a_broken_engine(said: str, plan: Plan) -> None:
    plan.why_not = said
    api = api_of(plan, StandInDevice())
    with pytest.raises(MemoryError):
        opened(plan, api=api)
    plan.why_not = "the engine plan file is not compatible"
    with pytest.raises(BundleError, match="does not open: the engine plan file is not compatible"):
        opened(plan, api=api)


def test_each_of_several_engines_reports_its_own_failure(plan: Plan) -> None:
    """The library knows the logger of the first one only, and may send it messages when that one is closed."""
    device = StandInDevice()
    api = api_of(plan, device)
    one, other = (opened(plan, device, api=api) for _ in range(2))
    one.close()
    del one
    gc.collect()
    plan.fails = True
    for engine in (other, opened(plan, device, api=api)):
        with pytest.raises(EngineFault, match="enqueueV3: the GPU has caught fire"):
            engine.run(batch_of_rows(1))


def test_a_closed_engine_runs_nothing_and_holds_no_memory(plan: Plan) -> None:
    device = StandInDevice()
    engine: Any = opened(plan, device)
    assert engine.working == device.working, "all work on its buffers goes to the stream of its calls"
    for _ in range(3):
        engine.run(batch_of_rows(1))
    weights = weakref.ref(engine._kernels.engine)
    engine.close()
    gc.collect()
    assert weights() is None
    assert (device.waited, device.given_back) == (4, 1)
    held = [value for value in vars(engine).values() if isinstance(value, torch.Tensor)]
    assert len(held) > 3
    assert not any(tensor.untyped_storage().nbytes() for tensor in held)
    with pytest.raises(EngineFault, match="tensorrt-rtx: the engine is closed"):
        engine.run(batch_of_rows(1))
