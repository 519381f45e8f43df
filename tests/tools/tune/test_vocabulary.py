"""Vocabulary: new tokens start as the mean of the existing ones, in every tensor with one row per token."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from spaceport.exporter.checkpoint import TokenFlags, open_checkpoint
from spaceport.runtime.decoding import Decoding
from spaceport.tools.reference import checkpoint_runtime
from spaceport.tools.tune.job import TuningJob
from spaceport.tools.tune.settings import TrainingSettings
from spaceport.tools.tune.token_names import DEFAULT
from spaceport.tools.tune.tunable_model import open_tunable_model
from spaceport.tools.tune.tuning import tune
from spaceport.tools.tune.vocabulary import VocabularyError, add_tokens, embedding_rows
from support.families import FAMILIES, VOCAB, build
from support.paths import TINY

NAMES = ("[M]", "[Fork]", "[Child]")


def tokenizer_of(size: int) -> Any:
    """A character tokenizer with a given number of tokens."""
    pieces = {"</s>": 0, "<unk>": 1, **{chr(0x100 + number): number for number in range(2, size)}}
    backend = Tokenizer(models.WordLevel(pieces, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>", unk_token="<unk>")


def model_of(name: str, **options: Any) -> PreTrainedModel:
    family = next(family for family in FAMILIES if family.name == name)
    return build(replace(family, options={**family.options, **options}))


@pytest.mark.parametrize(
    ("name", "options", "tables"),
    [
        ("llama", {"tie_word_embeddings": True}, 1),
        ("llama", {"tie_word_embeddings": False}, 2),
        ("phi", {}, 3),  # its head has a bias
    ],
)
def test_a_vocabulary_grows_to_a_multiple_of_64_with_mean_rows(name: str, options: dict[str, Any], tables: int) -> None:
    model, tokenizer = model_of(name, **options), tokenizer_of(VOCAB)
    before = [rows.detach().clone() for rows in embedding_rows(model)]
    assert add_tokens(tokenizer, model, NAMES) == [VOCAB, VOCAB + 1, VOCAB + 2]
    after = embedding_rows(model)
    assert len(before) == len(after) == tables
    assert model.config.vocab_size == 128
    for old, new in zip(before, after, strict=True):
        assert new.shape == (128, *old.shape[1:])
        assert torch.equal(new[:VOCAB], old)
        assert torch.equal(new[VOCAB:], old.mean(0).expand_as(new[VOCAB:]))
    ids = torch.tensor([[3, 4, VOCAB]])
    assert model(ids).logits.shape == (1, 3, 128)


def test_unused_rows_are_used_before_the_vocabulary_grows() -> None:
    model, tokenizer = model_of("llama"), tokenizer_of(VOCAB - 3)
    before = embedding_rows(model)[0].detach().clone()
    assert add_tokens(tokenizer, model, NAMES) == [VOCAB - 3, VOCAB - 2, VOCAB - 1]
    (rows, *_) = embedding_rows(model)
    assert rows.shape == before.shape
    assert torch.equal(rows[: VOCAB - 3], before[: VOCAB - 3])
    assert torch.equal(rows[VOCAB - 3 :], before[: VOCAB - 3].mean(0).expand(3, -1))


def test_existing_tokens_keep_their_rows_and_ordinary_ones_are_refused() -> None:
    model, tokenizer = model_of("llama"), tokenizer_of(VOCAB - 3)
    tokenizer.add_tokens([AddedToken(name, special=True) for name in NAMES])
    before = [rows.detach().clone() for rows in embedding_rows(model)]
    assert add_tokens(tokenizer, model, NAMES) == [VOCAB - 3, VOCAB - 2, VOCAB - 1]
    assert add_tokens(tokenizer, model, ()) == []
    with pytest.raises(
        VocabularyError, match="'ĥ' is an ordinary token of the tokenizer already: expected a name that"
    ):
        add_tokens(tokenizer, model, ("[N]", chr(0x125)))
    assert len(tokenizer) == model.config.vocab_size == VOCAB
    assert all(torch.equal(old, new) for old, new in zip(before, embedding_rows(model), strict=True))


def test_tokenizer_truncation_and_padding_are_disabled(tmp_path: Path) -> None:
    folder = shutil.copytree(TINY, tmp_path / "base")
    backend = Tokenizer.from_file(str(folder / "tokenizer.json"))
    text = "import json and answer everything that is asked"
    expected = backend.encode(text, add_special_tokens=False).ids
    backend.enable_truncation(8)
    backend.enable_padding(length=200)
    backend.save(str(folder / "tokenizer.json"))
    tunable = open_tunable_model(open_checkpoint(folder, TokenFlags()), TrainingSettings(), DEFAULT)
    assert len(expected) > 8
    assert tunable.encoder.encode(text) == expected


def test_a_model_with_a_grown_vocabulary_is_tuned_and_drafts_change_no_output(tmp_path: Path) -> None:
    checkpoint = tmp_path / "checkpoint"
    model_of("phi").save_pretrained(checkpoint)
    tokenizer_of(VOCAB).save_pretrained(checkpoint)
    (checkpoint / "generation_config.json").write_text(json.dumps({"eos_token_id": 0}))
    data = tmp_path / "data.jsonl"
    data.write_text(json.dumps({"text": "".join(chr(0x100 + number) for number in range(2, 30))}), "utf-8")
    settings = TrainingSettings(method="embeddings", mask_slots=2, epochs=2, cutoff=32)
    tune(TuningJob(checkpoint, tmp_path / "tuned", (data,), settings))
    opened = open_checkpoint(tmp_path / "tuned", TokenFlags())
    assert (opened.tokens.mask, opened.config.vocab_size) == ((VOCAB,), 128)
    with checkpoint_runtime(opened, 64, 1) as runtime:
        plain, drafted = (
            runtime.generate(chr(0x105) * 4, Decoding(max_tokens=8, mask_slots=slots)).tokens for slots in (0, 2)
        )
    assert plain == drafted
