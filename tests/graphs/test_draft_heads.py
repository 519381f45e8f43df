"""Draft heads: a row has the lines of each head behind its own line, which stays as it is."""

from __future__ import annotations

import numpy as np
import torch

from spaceport.exporter.quiet import quiet_libraries
from spaceport.graphs.contract.signature import Signature, logit_rows
from spaceport.graphs.draft_heads import add_heads, expected_shapes
from support.gguf_files import HIDDEN, random_model
from support.mask_rows import rows_batch, torch_engine
from support.published_heads import random_heads, reference_lines

COUNT, BLOCKS = 3, 2


def test_the_lines_of_a_row_are_its_own_and_those_of_each_head() -> None:
    quiet_libraries()
    model, ids = random_model("llama", tied=False), [5, 99, 204, 17, 33, 8, 61]
    tensors = random_heads(COUNT, BLOCKS, HIDDEN, model.config.vocab_size)
    with torch.no_grad():
        hidden = model.model(torch.tensor([ids])).last_hidden_state[0]  # behind the final norm
    plain = torch_engine(random_model("llama", tied=False))
    add_heads(model, COUNT, BLOCKS, tensors)
    heads = torch_engine(model)
    assert (plain.signature.heads, plain.signature.lines) == (0, 1)
    assert (heads.signature.heads, heads.signature.lines) == (COUNT, 1 + COUNT)
    own, lines = (engine.run(rows_batch(ids))[0] for engine in (plain, heads))
    assert lines.shape == (len(ids) * (1 + COUNT), model.config.vocab_size)
    assert np.array_equal(lines[:: 1 + COUNT], own)
    for head, expected in enumerate(reference_lines(tensors, hidden, COUNT, BLOCKS), 1):
        assert np.abs(lines[head :: 1 + COUNT] - expected.numpy()).max() < 1e-4 * float(expected.abs().max())


def test_heads_have_the_names_of_published_files() -> None:
    assert expected_shapes(2, 1, 8, 20) == {
        "0.0.linear.weight": (8, 8),
        "0.0.linear.bias": (8,),
        "0.1.weight": (20, 8),
        "1.0.linear.weight": (8, 8),
        "1.0.linear.bias": (8,),
        "1.1.weight": (20, 8),
    }
    assert expected_shapes(1, 0, 8, 20) == {"0.0.weight": (20, 8)}


def test_heads_count_as_logits_of_a_row() -> None:
    signature = Signature(2, 2, 8, 32_000, "float16", "scatter", heads=5)
    assert signature.row_logits == 6 * 32_000
    assert logit_rows(4096, 32_000) == 262
    assert logit_rows(4096, signature.row_logits) == 128
    assert signature.outputs[0].shape == ("B", "L", 32_000)
