"""Tuning review: unusual tokenizers, templates and checkpoints."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import cast

import pytest
import torch
from tokenizers import Tokenizer, models
from transformers import AutoTokenizer

from spaceport.exporter.checkpoint import TokenFlags, load_model, open_checkpoint
from spaceport.graphs.contract.faults import InputFault, OptionFault
from spaceport.graphs.contract.manifest import TokenIds
from spaceport.runtime.session import Runtime
from spaceport.tools.tune.batches import require_forks
from spaceport.tools.tune.conversation_encoder import ConversationEncoder, conversation_encoder_with
from spaceport.tools.tune.conversations import TEXT, Conversation, Turn
from spaceport.tools.tune.curves import draw_curves
from spaceport.tools.tune.distill import distill
from spaceport.tools.tune.inputs import identity_of
from spaceport.tools.tune.job import TuningJob
from spaceport.tools.tune.methods import apply_method
from spaceport.tools.tune.packing import successors
from spaceport.tools.tune.samples import NO_PARENT, TOO_SHORT, prepare
from spaceport.tools.tune.settings import TrainingSettings
from spaceport.tools.tune.token_names import DEFAULT
from spaceport.tools.tune.tunable_model import open_tunable_model
from spaceport.tools.tune.tuned_checkpoint import _wide_enough
from spaceport.tools.tune.tuning import tune
from support.paths import TINY

MASK = 4


def letters() -> ConversationEncoder:
    """A tokenizer with two letters that drops all others, without a template."""
    backend = Tokenizer(models.BPE(vocab={"h": 0, "i": 1, "</s>": 2, "[M]": 3}, merges=[]))
    return conversation_encoder_with(backend, None, TokenIds(mask=(3,), fork=None, child=None, end=(2,)))


def asked(prompt: str, response: str) -> Conversation:
    return Conversation(1, (Turn("user", prompt), Turn("assistant", response)))


def test_the_first_token_has_no_loss_if_the_prompt_has_no_tokens() -> None:
    (sample,) = prepare([asked("zzz", "hi")], letters(), 64).whole
    assert sample.ids.tolist() == [0, 1, 2]
    assert sample.learned.tolist() == [False, True, True]
    assert successors(sample).tolist() == [1, 2, NO_PARENT]


def test_a_text_without_a_token_is_counted() -> None:
    assert prepare([Conversation(1, (Turn(TEXT, "zzz"),))], letters(), 64).counts[TOO_SHORT] == 1


@pytest.mark.parametrize("answer", ["a", "s", "ant", "<", "/s"])
def test_an_answer_that_also_occurs_in_the_template_is_located(answer: str) -> None:
    def render(turns: Sequence[Turn], ask: bool) -> str:
        return "".join(f"<{turn.role}>: {turn.content}</s>\n" for turn in turns)

    backend = AutoTokenizer.from_pretrained(TINY).backend_tokenizer
    encoder = conversation_encoder_with(backend, render, TokenIds(mask=(MASK,), fork=None, child=None, end=(1, 3)))
    (exchange,) = encoder.exchanges(asked("Which?", answer))
    assert (exchange.lead, exchange.answer, exchange.after) == ("<assistant>: ", answer, "</s>\n")


def test_gated_adapters_train_the_embeddings_of_mask_tokens_only() -> None:
    model = load_model(open_checkpoint(TINY, TokenFlags()), "float32")
    table = model.get_input_embeddings().weight
    before = table.detach().clone()
    merge = apply_method(model, TrainingSettings(method="gated-lora"), TokenIds(mask=(MASK,), fork=5, child=6))
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    model(input_ids=torch.tensor([[0, MASK, 5, 6, 7]])).logits.square().sum().backward()
    torch.optim.SGD(trainable, lr=0.1).step()
    merge()
    assert [token for token in range(len(before)) if not torch.equal(table[token], before[token])] == [MASK]
    assert table.grad is None


def test_tokenizer_truncation_and_padding_are_disabled(tmp_path: Path) -> None:
    folder = tmp_path / "base"
    shutil.copytree(TINY, folder)
    backend = Tokenizer.from_file(str(folder / "tokenizer.json"))
    text = "import json and answer everything that is asked"
    expected = backend.encode(text, add_special_tokens=False).ids
    backend.enable_truncation(8)
    backend.enable_padding(length=200)
    backend.save(str(folder / "tokenizer.json"))
    tunable = open_tunable_model(open_checkpoint(folder, TokenFlags()), TrainingSettings(), DEFAULT)
    assert len(expected) > 8
    assert tunable.encoder.encode(text) == expected


def test_saved_answers_may_contain_any_line_end_and_a_partial_character(tmp_path: Path) -> None:
    file, answer = tmp_path / "answers.jsonl", "a\u20285\u2028b\x85c"
    line = json.dumps({"line": 1, "outcome": "finished", "text": answer}, ensure_ascii=False)
    file.write_bytes(line.encode() + b'\n{"line": 2, "text": "\xe2\x80')
    nobody = cast(Runtime, None)  # the answer is there already, so nothing is written
    (found,) = distill([asked("Which?", "old")], nobody, file, 64, Counter())
    assert found.answer == answer


@pytest.mark.parametrize("slots", [0, 5, 64])
def test_curves_show_every_mask_slot(slots: int, tmp_path: Path) -> None:
    lines = [
        {"kind": kind, "step": step, "losses": [1.0] * (slots + 1), "accuracies": [0.5] * (slots + 1)}
        for kind in ("training", "validation")
        for step in (1, 2)
    ]
    draw_curves(lines, tmp_path / "training.svg")  # matplotlib warns of a plot without space, and warnings are errors


def test_a_target_that_contains_an_input_is_refused(tmp_path: Path) -> None:
    inside = tmp_path / "run" / "checkpoint-5"
    shutil.copytree(TINY, inside)
    shutil.copy(TINY / "config.json", tmp_path / "run")
    data = tmp_path / "data.jsonl"
    data.write_text('{"text": "Hello."}\n', "utf-8")
    with pytest.raises(
        OptionFault, match=r"run: contains the input .*checkpoint-5, which would be overwritten: choose another folder"
    ):
        tune(TuningJob(inside, tmp_path / "run", (data,), TrainingSettings(), overwrite=True))
    shutil.copy(data, tmp_path / "run")
    with pytest.raises(OptionFault, match=r"run: contains the input .*data\.jsonl, which"):
        tune(TuningJob(TINY, tmp_path / "run", (tmp_path / "run" / "data.jsonl",), TrainingSettings(), overwrite=True))


def test_a_fork_objective_needs_forked_data() -> None:
    prepared = prepare([asked("hi", "hi")], letters(), 64)
    for objective in ("apar", "both"):
        with pytest.raises(
            InputFault, match=f"no answer forks, with --objective {objective}: expected answers with numbered lists"
        ):
            require_forks(TrainingSettings(objective), prepared)
    require_forks(TrainingSettings("sar"), prepared)


def test_weights_beyond_the_float16_range_are_written_as_float32() -> None:
    narrow, wide = torch.tensor([65504.0]), torch.tensor([70000.0])
    assert _wide_enough([narrow, torch.tensor([1 << 40]), torch.empty(0)], torch.float16) == torch.float16
    assert _wide_enough([narrow, wide], torch.float16) == torch.float32
    assert _wide_enough([narrow, wide], torch.bfloat16) == torch.bfloat16


@pytest.mark.parametrize("name", ["chat_template.jinja", "tokenizer_config.json", "generation_config.json"])
def test_a_changed_template_or_end_token_prevents_a_resume(name: str, tmp_path: Path) -> None:
    shutil.copytree(TINY, tmp_path / "base")
    job = TuningJob(tmp_path / "base", tmp_path / "tuned", (), TrainingSettings())
    before = identity_of(job)
    file = tmp_path / "base" / name
    file.write_text(file.read_text("utf-8") + "\n", "utf-8")
    assert identity_of(job) != before
