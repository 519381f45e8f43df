"""Steps of a small decoder of native operators: rows, slots, threads and instruction sets change no bit of the logits."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnx
import pytest
from numpy.typing import NDArray

from spaceport.kernels.functions import add_functions
from spaceport.kernels.steps import Decoder, ModelWriter, Shape
from support.native_operators import available_sets, forced, library

pytestmark = pytest.mark.skipif(library() is None, reason="no C++ compiler")

SHAPE = Shape(layers=2, width=64, mlp=96, vocabulary=100, heads=4, kv_heads=2, head_size=16, biases=True)
TOKENS, SLOTS = 40, 96


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return ModelWriter(tmp_path_factory.mktemp("decoder"), SHAPE, "int4", "int8").write()


def logits(decoder: Decoder, groups: Sequence[int], slots: NDArray[np.int64]) -> bytes:
    """The logits of 40 tokens, fed in groups of rows and stored in these slots."""
    ids = np.random.default_rng(0).integers(0, SHAPE.vocabulary, TOKENS)
    outputs, first = [], 0
    for count in groups:
        rows = np.arange(first, first + count)
        visible = np.zeros((count, SLOTS), bool)
        for i, row in enumerate(rows):
            visible[i, slots[: row + 1]] = True
        outputs.append(decoder.step(ids[rows], rows, slots[rows], visible))
        first += count
    assert first == TOKENS
    return np.concatenate(outputs).tobytes()


@pytest.mark.parametrize("threads", [1, 2])
def test_logits_are_equal_in_any_groups_and_slots_on_all_sets(model: Path, threads: int) -> None:
    dice = np.random.default_rng(1)
    found = set()
    for set_name in available_sets():
        with forced(set_name):
            decoder = Decoder(model, SHAPE, library(), SLOTS, threads)
        for groups in ([TOKENS], [1] * TOKENS, [9, 1, 6, 2, 12, 3, 5, 2]):
            for slots in (np.arange(SLOTS), dice.permutation(SLOTS)):
                found.add(logits(decoder, groups, slots))
    assert len(found) == 1


def test_the_same_file_runs_without_the_library(model: Path) -> None:
    path = model.with_name("functions.onnx")
    graph = onnx.load(model, load_external_data=False)
    add_functions(graph)
    path.write_bytes(graph.SerializeToString())
    results = []
    for chosen in (library(), None):
        decoder = Decoder(path, SHAPE, chosen, SLOTS)
        results.append(np.frombuffer(logits(decoder, [30, 10], np.arange(SLOTS)), np.float32))
    assert results[0].tobytes() != results[1].tobytes()
    assert np.abs(results[0] - results[1]).max() <= 1e-2 * np.abs(results[0]).max()  # of a random, sensitive model
