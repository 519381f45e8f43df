"""Integer attention: close to float attention, equal in PyTorch and ONNX Runtime, and the same in every order of slots."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnxruntime as ort
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from spaceport.graphs.attention import additive_mask, grouped_attention
from spaceport.graphs.integer_attention import AttentionRecorder, IntegerAttention, use_integer_attention
from spaceport.graphs.quantization import AttentionScales

KV_HEADS, GROUPS, WIDTH = 2, 3, 16
Array = NDArray[np.float32]


class Case:
    """Random queries, keys and values of a text, in which a row sees each earlier one."""

    def __init__(self, rows: int, slots: int, seed: int = 0) -> None:
        dice = torch.Generator().manual_seed(seed)
        self.query = torch.randn(1, KV_HEADS * GROUPS, rows, WIDTH, generator=dice)
        self.key = torch.randn(1, KV_HEADS, slots, WIDTH, generator=dice) + 2 * torch.arange(WIDTH) / WIDTH
        self.value = torch.randn(1, KV_HEADS, slots, WIDTH, generator=dice)
        self.visible = torch.arange(slots)[None] <= torch.arange(slots - rows, slots)[:, None]
        self.mask = additive_mask(self.visible[None, None], torch.float32)


def measured(case: Case, softcap: float | None = None) -> AttentionScales:
    slots = case.key.shape[2]
    recorder = AttentionRecorder(torch.ones(1, slots, dtype=torch.bool))
    query = case.query.repeat(1, 1, -(-slots // case.query.shape[2]), 1)[:, :, :slots]
    with recorder.measuring():
        recorder._attention(nn.Identity(), query, case.key, case.value, None, softcap=softcap)
    (scales,) = recorder.scales
    return scales


def attention_of(scales: AttentionScales) -> IntegerAttention:
    module = nn.Module()
    module.device, module.dtype = torch.device("cpu"), torch.float32
    (attention,) = use_integer_attention(module, [scales])  # type: ignore[arg-type]
    return attention


class Whole(nn.Module):
    """Quantizes keys and values, and attends to them."""

    def __init__(self, attention: IntegerAttention, softcap: float | None) -> None:
        super().__init__()
        self.attention, self.softcap = attention, softcap

    def forward(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
        stored = self.attention.stored_keys(key), self.attention.stored_values(value)
        found: Tensor = self.attention(query, *stored, mask, WIDTH**-0.5, self.softcap)
        return found


def session_of(attention: IntegerAttention, folder: Path, softcap: float | None = None) -> ort.InferenceSession:
    case, dynamic = Case(3, 64), torch.export.Dim.DYNAMIC
    axes = ({2: dynamic}, {2: dynamic}, {2: dynamic}, {2: dynamic, 3: dynamic})
    program = torch.onnx.export(
        Whole(attention, softcap).eval(),
        (case.query, case.key, case.value, case.mask),
        dynamo=True,
        opset_version=23,
        input_names=["query", "key", "value", "mask"],
        dynamic_shapes=axes,
        verbose=False,
    )
    assert program is not None
    program.save(folder / "attention.onnx")
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    return ort.InferenceSession(folder / "attention.onnx", options, providers=["CPUExecutionProvider"])


def run(session: ort.InferenceSession, case: Case, rows: slice = slice(None), order: Tensor | None = None) -> Array:
    order = torch.arange(case.key.shape[2]) if order is None else order
    tensors = {
        "query": case.query[:, :, rows],
        "key": case.key[:, :, order],
        "value": case.value[:, :, order],
        "mask": case.mask[:, :, rows][..., order],
    }
    (found,) = session.run(None, {name: np.ascontiguousarray(tensor.numpy()) for name, tensor in tensors.items()})
    return np.asarray(found, np.float32)


@pytest.fixture(scope="module")
def session(tmp_path_factory: pytest.TempPathFactory) -> ort.InferenceSession:
    return session_of(attention_of(measured(Case(70, 200))), tmp_path_factory.mktemp("graph"))


@pytest.mark.parametrize("softcap", [None, 5.0])
def test_it_is_close_to_float_attention(tmp_path: Path, softcap: float | None) -> None:
    case = Case(9, 200)
    attention = attention_of(measured(case, softcap))
    expected = grouped_attention(case.query, case.key, case.value, case.mask, WIDTH**-0.5, softcap)
    stored = attention.stored_keys(case.key), attention.stored_values(case.value)
    found = attention(case.query, *stored, case.mask, WIDTH**-0.5, softcap)
    assert float((found - expected).norm() / expected.norm()) < 0.02
    graph = run(session_of(attention, tmp_path, softcap), case)
    assert np.abs(graph - found.numpy()).max() < 1e-3 * float(found.abs().max())


@pytest.mark.parametrize("slots", [64, 200, 1500])
def test_a_row_is_the_same_in_every_order_of_slots_alone_and_with_others(
    session: ort.InferenceSession, slots: int
) -> None:
    case = Case(36, slots)
    expected = run(session, case)
    for seed in range(3):
        order = torch.randperm(slots, generator=torch.Generator().manual_seed(seed))
        assert np.array_equal(run(session, case, order=order), expected)
        assert np.array_equal(run(session, case, slice(4, 5), order), expected[:, :, 4:5])
        assert np.array_equal(run(session, case, slice(3, 12), order), expected[:, :, 3:12])


def test_slots_that_a_row_does_not_see_change_nothing(session: ort.InferenceSession) -> None:
    case, longer = Case(9, 64), Case(9, 192, seed=1)
    longer.query = case.query
    places = torch.randperm(192, generator=torch.Generator().manual_seed(2))[:64]
    for mine, others in ((case.key, longer.key), (case.value, longer.value)):
        others[:, :, places] = mine
    visible = torch.zeros(9, 192, dtype=torch.bool)
    visible[:, places] = case.visible
    longer.mask = additive_mask(visible[None, None], torch.float32)
    assert np.array_equal(run(session, longer), run(session, case))


def test_a_row_that_sees_nothing_is_finite(session: ort.InferenceSession) -> None:
    case = Case(2, 64)
    case.mask[:, :, 0] = additive_mask(torch.zeros(64, dtype=torch.bool), torch.float32)
    assert np.isfinite(run(session, case)).all()


def test_many_equal_weights_and_one_large_one_keep_their_proportions() -> None:
    """Two limbs: of 4,096 slots with a weight of one thousandth each, none is lost beside a slot with weight 1."""
    case = Case(1, 4097)
    target = np.log(1000) * WIDTH**0.5
    case.query[:] = torch.ones(WIDTH)
    case.key[:] = 0
    case.key[:, :, 0] = target / WIDTH
    case.value[:] = 1
    case.value[:, :, 0] = -1
    attention = attention_of(measured(case))
    stored = attention.stored_keys(case.key), attention.stored_values(case.value)
    found = attention(case.query, *stored, case.mask, WIDTH**-0.5)
    expected = grouped_attention(case.query, case.key, case.value, case.mask, WIDTH**-0.5)
    assert torch.allclose(found, expected, atol=0.03)


def test_keys_and_values_have_one_step_per_head_that_cuts_off_nothing_of_the_texts() -> None:
    case = Case(9, 200)
    attention = attention_of(measured(case))
    keys, values = attention.stored_keys(case.key), attention.stored_values(case.value)
    assert keys.dtype == values.dtype == torch.int8
    assert values.abs().amax(dim=(0, 2, 3)).tolist() == [127, 127]
    assert [int(largest) for largest in keys.abs().amax(dim=(0, 2, 3))] == [115, 115]  # room for others: 127 / 1.1
    rotated = keys * attention.keys[:, None, None] + attention.center
    assert torch.allclose(rotated @ attention.rotation.T, case.key, atol=0.05)
    assert float(attention.center.abs().max()) > 1  # keys are around 1


def test_padding_is_not_measured() -> None:
    case, dice = Case(8, 8), torch.Generator().manual_seed(5)
    real = torch.arange(8)[None] >= 3
    found = []
    for padding in (1.0, 1000.0):
        recorder = AttentionRecorder(real)
        states = [states.clone() for states in (case.query, case.key, case.value)]
        for tensor in states:
            tensor[:, :, :3] = padding * torch.randn(tensor[:, :, :3].shape, generator=dice)
        with recorder.measuring():
            recorder._attention(nn.Identity(), *states, None)
        found += recorder.scales
    for name, tensor in vars(found[0]).items():
        assert torch.equal(tensor, getattr(found[1], name)), name
