"""TensorRT: its engines generate what ONNX Runtime generates; settings are made once, and buffers updated in place."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from spaceport.runtime import Decoding, Runtime, Sampling
from spaceport.runtime.backends import open_engine
from spaceport.runtime.backends.engine_options import EngineOptions
from spaceport.runtime.backends.on_tensorrt import PROMPTS, STEPS
from spaceport.runtime.backends.timing import measure
from spaceport.runtime.bundle import BundleError
from spaceport.runtime.engine import NO_MOVES, Batch, EngineFault
from spaceport.runtime.scheduling.capacity import capacity_for
from spaceport.tools.demo.prompts import prompts_of
from support.exported import exported_once
from support.paths import DEMO
from support.stand_in_tensorrt import (
    Kind,
    Location,
    Plan,
    Specialization,
    StandInContext,
    StandInDevice,
    batch_of_rows,
    opened,
    plan_of,
)

LENGTH = 320
PROMPTS_OF_TINY = ("The harbour was quiet when", "a b c d e f g h", "In the morning the")


@pytest.fixture(scope="session")
def demo_append(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return exported_once(tmp_path_factory, "append", DEMO)


@contextmanager
def runtime_of(path: Path, requests: int = 1, graphs: bool = True) -> Iterator[tuple[Runtime, StandInDevice]]:
    """A runtime over a stand-in engine with capacity for one request more than needed."""
    device = StandInDevice()
    bundle, plan = plan_of(path, 0)
    bundle, plan = plan_of(path, capacity_for(bundle.manifest, LENGTH), requests + 1)
    with Runtime(bundle, opened(bundle, plan, device, requests, graphs), LENGTH) as runtime:
        yield runtime, device


DECODINGS = (
    Decoding(max_tokens=48, mask_slots=0),
    Decoding(max_tokens=48),
    Decoding(max_tokens=48, draft="chain"),
    Decoding(max_tokens=40, sampling=Sampling(temperature=1.0, seed=3)),
)


@pytest.mark.parametrize("graphs", [True, False])
def test_an_engine_writes_what_onnx_runtime_writes(graphs: bool, tiny_append_bundle: Path) -> None:
    with (
        Runtime.open(tiny_append_bundle, max_seq_len=LENGTH, threads=1, step_costs="standard") as plain,
        runtime_of(tiny_append_bundle, graphs=graphs) as (runtime, device),
    ):
        for prompt in PROMPTS_OF_TINY:
            for decoding in DECODINGS:
                expected, got = plain.generate(prompt, decoding), runtime.generate(prompt, decoding)
                assert got.tokens == expected.tokens
                assert got.statistics.steps == expected.statistics.steps
        assert (device.captured > 3 and device.replayed > 2 * device.captured) == graphs


@pytest.mark.parametrize("graphs", [True, False])
def test_any_call_gives_the_logits_of_onnx_runtime(graphs: bool, tiny_append_bundle: Path) -> None:
    """The same shapes again and again, of one request or two, so that graphs are played for the range they were made of."""
    bundle, plan = plan_of(tiny_append_bundle, 1024, 3)
    engine = opened(bundle, plan, StandInDevice(), 3, graphs)
    plain = open_engine(bundle, "onnxruntime", EngineOptions(1024, 3))
    dice = np.random.default_rng(0)
    held = np.zeros((3, 1024), np.bool_)
    for number in range(24):
        rows, first, count = int(dice.choice((1, 3, 7))), int(dice.integers(0, 3)), 1 + number % 2
        batch = chain_of(rows, min(first, 3 - count), count, 4 * number, held, dice)
        got, expected = engine.run(batch), plain.run(batch)
        assert got.shape == expected.shape
        assert np.abs(got - expected).max() < 1e-4


def chain_of(
    rows: int, first: int, count: int, height: int, held: NDArray[np.bool_], dice: np.random.Generator
) -> Batch:
    """Rows behind whatever each request has written before, which differs from request to request."""
    addresses_of = np.tile(np.arange(height, height + rows), (count, 1))
    held[first : first + count, height:] = False
    mask = np.repeat(held[first : first + count, None, None, :192], rows, axis=2)
    mask[:, 0, :, height : height + rows] = np.tri(rows, dtype=np.bool_)
    held[first : first + count, height : height + rows] = True
    ids = dice.integers(8, 400, (count, rows))
    return Batch(first, ids, addresses_of, addresses_of, mask, np.tile(np.arange(rows), (count, 1)))


def test_forked_threads_are_those_of_onnx_runtime(demo_append: Path) -> None:
    prompt = prompts_of(DEMO)["fullmatch"]
    with (
        Runtime.open(demo_append, max_seq_len=LENGTH, threads=1) as plain,
        runtime_of(demo_append) as (runtime, _),
    ):
        for decoding in (Decoding(max_tokens=160), Decoding(max_tokens=160, mask_slots=0)):
            expected, got = plain.generate(prompt, decoding), runtime.generate(prompt, decoding)
            assert [thread.tokens for thread in got.threads] == [thread.tokens for thread in expected.threads]
            assert len(got.threads) > 1


def test_texts_beside_each_other_are_those_alone(tiny_append_bundle: Path) -> None:
    """Calls over ranges of requests, with idle ones between, of different widths."""
    with (
        runtime_of(tiny_append_bundle) as (alone, _),
        runtime_of(tiny_append_bundle, requests=3) as (together, device),
    ):
        decodings = [Decoding(max_tokens=10 + 12 * number) for number in range(5)]
        prompts = [PROMPTS_OF_TINY[number % 3] * (1 + 3 * number) for number in range(5)]
        streams = [together.stream(p, d) for p, d in zip(prompts, decodings, strict=True)]
        got = [stream.completion().tokens for stream in streams]
        assert got == [alone.generate(p, d).tokens for p, d in zip(prompts, decodings, strict=True)]
        shapes = [ran["input_ids"] for ran in contexts(together)[STEPS].ran]
        assert {shape[0] for shape in shapes} >= {1, 3}
        assert device.replayed


def test_buffers_are_bound_once(tiny_append_bundle: Path) -> None:
    with runtime_of(tiny_append_bundle) as (runtime, _):
        for length in (3, 140):
            runtime.generate(list(range(10, 10 + length)), Decoding(max_tokens=64))
        for context in contexts(runtime):
            past = [name for what, name in context.calls if what == "address" and name.startswith("past")]
            assert sorted(past) == sorted(tensor.name for tensor in runtime.engine.signature.past)
        assert max(ran["input_ids"][1] for ran in contexts(runtime)[STEPS].ran) <= 64


def test_prompts_have_a_profile_of_their_own(tiny_append_bundle: Path) -> None:
    with runtime_of(tiny_append_bundle) as (runtime, device):
        runtime.generate(list(range(10, 140)), Decoding(max_tokens=2))
        assert [ran["input_ids"][1] for ran in contexts(runtime)[PROMPTS].ran] == [192]
        assert all(ran["logit_rows"][1] == 1 for ran in contexts(runtime)[PROMPTS].ran)
        assert device.captured == 0


def test_what_was_spoilt_is_cleared(tiny_append_bundle: Path) -> None:
    with runtime_of(tiny_append_bundle, requests=2) as (runtime, device):
        expected = runtime.generate("The harbour", Decoding(max_tokens=20)).tokens
        buffers = next(tensor for tensor in device.memory if tensor.dim() == 5)
        buffers[:, 0] = float("nan")
        buffers[:, 1] = 7.0
        runtime.engine.clear(0)
        assert not buffers[:, 0].any()
        assert (buffers[:, 1] == 7.0).all()
        assert runtime.generate("The harbour", Decoding(max_tokens=20)).tokens == expected


def test_a_step_that_fails_tells_what_the_library_says(tiny_append_bundle: Path) -> None:
    bundle, plan = plan_of(tiny_append_bundle, 1024)
    plan.fails = True
    with (
        Runtime(bundle, opened(bundle, plan, StandInDevice()), LENGTH) as runtime,
        pytest.raises(
            EngineFault,
            match=r"tensorrt-rtx failed in a step of shape \(B 1, T \d+, A 64, R \d+\): enqueueV3: the GPU has caught fire",
        ),
    ):
        runtime.generate("The harbour")


def test_a_closed_engine_says_so(tiny_append_bundle: Path) -> None:
    with runtime_of(tiny_append_bundle) as (runtime, _):
        engine: Any = runtime.engine
        batch = batch_of_rows(1)
    engine.close()
    with pytest.raises(EngineFault, match="tensorrt-rtx: the engine is closed"):
        engine.run(batch)


def test_an_engine_is_timed_in_the_profile_of_steps(tiny_append_bundle: Path) -> None:
    bundle, plan = plan_of(tiny_append_bundle, 1024)
    device = StandInDevice()
    engine = opened(bundle, plan, device)
    assert dict(measure(engine).single)[1] > 0
    steps, prompts = contexts_of(engine)
    assert {ran["input_ids"] for ran in steps.ran} >= {(1, 1), (1, 16), (1, 36), (1, 64)}
    assert not prompts.ran
    assert device.captured == len({(ran["input_ids"], ran["attention_mask"]) for ran in steps.ran})


def test_what_is_compiled_is_found_again(tiny_append_bundle: Path, state: Path) -> None:
    bundle, plan = plan_of(tiny_append_bundle, 1024)
    with Runtime(bundle, opened(bundle, plan, StandInDevice()), LENGTH) as runtime:
        steps, prompts = (context.config for context in contexts(runtime))
        assert steps is not None
        assert prompts is not None
        assert steps.cache is prompts.cache
        assert steps.dynamic_shapes_kernel_specialization_strategy is Specialization.EAGER  # it is captured
        assert prompts.dynamic_shapes_kernel_specialization_strategy is Specialization.LAZY
        assert steps.cache is not None
        assert steps.cache.content == b""
        runtime.generate("The harbour", Decoding(max_tokens=5))
        content = steps.cache.content
    (file,) = (state / "spaceport" / "kernels").iterdir()
    assert file.read_bytes() == hashlib.sha256(content).digest() + content
    engine = opened(bundle, plan, StandInDevice())
    again = contexts_of(engine)[0].config
    assert again is not None
    assert again.cache is not None
    assert again.cache.content == content
    file.write_bytes(b"of another driver")
    engine = opened(bundle, plan, StandInDevice(), graphs=False)
    fresh = contexts_of(engine)[0].config
    assert fresh is not None
    assert fresh.cache is not None
    assert fresh.cache.content == b""
    assert fresh.dynamic_shapes_kernel_specialization_strategy is Specialization.LAZY


def test_where_nothing_can_be_kept_nothing_fails(tiny_append_bundle: Path, state: Path) -> None:
    (state / "spaceport").parent.mkdir(parents=True, exist_ok=True)
    (state / "spaceport").write_text("a file in the way")
    bundle, plan = plan_of(tiny_append_bundle, 1024)
    with Runtime(bundle, opened(bundle, plan, StandInDevice()), LENGTH) as runtime:
        runtime.generate("The harbour", Decoding(max_tokens=5))


def test_tensorrt_itself_compiles_nothing_while_it_runs(tiny_append_bundle: Path, state: Path) -> None:
    bundle, plan = plan_of(tiny_append_bundle, 1024)
    plan.compiles = False
    with Runtime(bundle, opened(bundle, plan, StandInDevice()), LENGTH) as runtime:
        assert all(context.config is None for context in contexts(runtime))
        runtime.generate("The harbour", Decoding(max_tokens=5))
    assert not state.exists()


@pytest.fixture
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where this machine keeps what it knows of engines."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return tmp_path / "state"


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
    what: str, name: str, instead: Any, message: str, tiny_append_bundle: Path
) -> None:
    bundle, plan = plan_of(tiny_append_bundle, 1024)
    plan.changes = {what: {name: instead}}
    with pytest.raises(BundleError, match=rf"stand-in.engine: {message}.*build it again"):
        opened(bundle, plan, StandInDevice())


def test_an_engine_with_one_profile_is_refused(tiny_append_bundle: Path) -> None:
    bundle, plan = plan_of(tiny_append_bundle, 1024)
    plan.profiles = 1
    with pytest.raises(BundleError, match="it has 1 profiles, 2 are expected"):
        opened(bundle, plan, StandInDevice())


def test_an_engine_that_does_not_open_tells_the_reason(tiny_append_bundle: Path) -> None:
    bundle, plan = plan_of(tiny_append_bundle, 1024)
    plan.opens = False
    with pytest.raises(BundleError, match="does not open: the engine plan file is not compatible: build it again"):
        opened(bundle, plan, StandInDevice())


def test_nothing_moves_where_nothing_has_to(tiny_append_bundle: Path) -> None:
    with runtime_of(tiny_append_bundle) as (runtime, device):
        buffers = next(tensor for tensor in device.memory if tensor.dim() == 5)
        before = buffers.clone()
        runtime.engine.move(0, [NO_MOVES])
        assert (buffers == before).all()


def contexts(runtime: Runtime) -> list[StandInContext]:
    return contexts_of(runtime.engine)


def contexts_of(engine: Any) -> list[StandInContext]:
    return [context.run for context in engine._contexts]


def test_the_stand_in_refuses_what_lies_outside_a_profile(tiny_append_bundle: Path) -> None:
    """So that the tests above would fail if an engine were fed with what its profile does not take."""
    bundle, plan = plan_of(tiny_append_bundle, 1024, step_rows=4, prompt_rows=8)
    engine: Any = opened(bundle, plan, StandInDevice())
    stood: Plan = plan
    assert stood.record.prefill_rows == 8
    batch = batch_of_rows(16)
    with pytest.raises(
        EngineFault, match=r"takes no input_ids of shape \[1, 16\]: setInputShape: .* not within profile 1"
    ):
        engine.run(batch)
