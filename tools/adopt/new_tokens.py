"""New tokens: tokens that an adopted method adds to the tokenizer of its base model."""

from __future__ import annotations

from typing import Any

from tokenizers import AddedToken

from spaceport.exporter.sar_config import CheckpointError
from spaceport.tools.adopt.given import Given


def new_tokens(given: Given, tokenizer: Any, kind: str, count: int) -> dict[str, int]:
    """The ids that the tokenizer gives to new tokens of a kind, one for each mask slot."""
    texts = [f"<|{kind}_{slot}|>" for slot in range(1, count + 1)]
    backend = tokenizer.backend_tokenizer
    if any(backend.token_to_id(text) is not None for text in texts):
        raise CheckpointError(
            f"{given.checkpoint}: its tokenizer has the token {texts[0]} already: expected a base model without adopted {kind}"
        )
    tokenizer.add_tokens([AddedToken(text, special=True, normalized=False) for text in texts])
    return {text: int(backend.token_to_id(text)) for text in texts}
