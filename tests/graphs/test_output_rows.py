"""Output rows: selected rows have the same logits as without selection."""

from __future__ import annotations

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from spaceport.graphs.output_rows import rows_selected
from support.paths import TINY


def test_selected_rows_have_the_same_logits_as_without_selection() -> None:
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float32).eval()
    ids, rows = torch.arange(12)[None] + 3, [11, 0, 5]
    with torch.no_grad():
        before = model(input_ids=ids).logits
        with rows_selected(model, lambda hidden: hidden[:, rows]):
            selected = model(input_ids=ids).logits
        after = model(input_ids=ids).logits
    assert selected.shape == (1, 3, before.shape[-1])
    torch.testing.assert_close(selected, before[:, rows])
    assert torch.equal(after, before)
