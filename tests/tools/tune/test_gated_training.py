"""Training of gated adapters: frozen weights in bfloat16, trained token embeddings, time budgets, further training."""

from __future__ import annotations

import json
import math
import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from spaceport.exporter.adapter import ADAPTER_FILE
from spaceport.exporter.checkpoint import TokenFlags, open_checkpoint
from spaceport.exporter.sar_config import read_sar_config
from spaceport.graphs.contract.faults import OptionFault
from spaceport.graphs.contract.mask_layout import MaskLayout
from spaceport.graphs.input_rows import use_input_rows
from spaceport.tools.cli import run
from spaceport.tools.cli.exit_codes import OK, USAGE
from spaceport.tools.tune import training
from spaceport.tools.tune.frozen_dtype import convert_frozen
from spaceport.tools.tune.job import TrainingCallbacks, TuningJob
from spaceport.tools.tune.packing import PackedBatch
from spaceport.tools.tune.prefetch import Prefetch, StepBatches
from spaceport.tools.tune.settings import TrainingSettings
from spaceport.tools.tune.token_embeddings import train_token_embeddings
from spaceport.tools.tune.tuning import tune
from support.families import FAMILIES, build
from support.gated_training import SETTINGS, trained, write_lists
from support.paths import TINY

pytestmark = pytest.mark.slow


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return write_lists(tmp_path / "data.jsonl")


def llama() -> Any:
    return build(next(family for family in FAMILIES if family.name == "llama")).requires_grad_(False)


# Frozen weights


def test_frozen_weights_are_restored_exactly() -> None:
    model = llama()
    trained = model.model.layers[0].self_attn.q_proj.weight.requires_grad_(True)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    restore = convert_frozen(model, torch.bfloat16)
    assert trained.dtype == torch.float32
    assert {each.dtype for each in model.parameters() if each is not trained} == {torch.bfloat16}
    restore()
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert {each.dtype for each in model.parameters()} == {torch.float32}


def test_training_in_bfloat16_leaves_the_base_weights_as_they_were(data: Path, tmp_path: Path) -> None:
    tune(TuningJob(TINY, tmp_path / "tuned", (data,), SETTINGS, bf16=True))
    before, after = load_file(TINY / "model.safetensors"), load_file(tmp_path / "tuned" / "model.safetensors")
    for name, tensor in before.items():
        changed = (after[name] != tensor).flatten(1).any(1) if tensor.dim() > 1 else after[name] != tensor
        assert changed.nonzero().flatten().tolist() == ([4] if "embed_tokens" in name else [])  # the mask token


# Token embeddings


@pytest.mark.parametrize("tied", [True, False])
def test_only_the_logits_of_predicted_tokens_change(tied: bool) -> None:
    model = llama()
    if not tied:
        model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone(), requires_grad=False)
    else:
        model.lm_head.weight = model.model.embed_tokens.weight
    ids = torch.tensor([[7, 9, 11]])  # none of the trained tokens
    before = model(input_ids=ids).logits
    merge = train_token_embeddings(model, [90, 93, 95], predicted=[93])
    assert torch.equal(model(input_ids=ids).logits[..., :93], before[..., :93])
    for rows in (each for each in model.parameters() if each.requires_grad):
        torch.nn.init.normal_(rows)
    changed = model(input_ids=ids).logits
    others = [token for token in range(before.shape[-1]) if token != 93]
    assert torch.equal(changed[..., others], before[..., others])
    assert not torch.allclose(changed[..., 93], before[..., 93])
    behind = model(input_ids=torch.tensor([[7, 93, 11]])).logits
    apart = merge()
    assert (apart is not None) == tied
    if apart is not None:
        assert apart.tokens == (93,)
        use_input_rows(model, apart)
    torch.testing.assert_close(model(input_ids=ids).logits[..., 93], changed[..., 93])
    found = model(input_ids=torch.tensor([[7, 93, 11]])).logits
    torch.testing.assert_close(found[..., :90], behind[..., :90])


# Time budget and prefetching


class Clock(SimpleNamespace):
    """A clock that stands still until a step is done."""

    now = 0.0

    def perf_counter(self) -> float:
        return self.now


def test_a_time_budget_ends_the_training_and_its_learning_rate(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    monkeypatch.setattr(training, "time", clock)
    rates: list[float] = []

    def step(done: training.Training) -> None:
        clock.now += 1.0
        rates.append(done.learning_rate())

    budget = replace(SETTINGS, max_steps=50, time_budget=4.0)
    outcome = tune(TuningJob(TINY, tmp_path / "tuned", (data,), budget, log_every=1), TrainingCallbacks(on_step=step))
    assert len(rates) == 5  # the fifth step begins when the budget is used up to the last moment
    shares = [(18 / 4 * seconds - 1) / 17 for seconds in (1, 2, 3, 4)]  # of 18 steps, the first of which is the warm-up
    assert rates[:4] == pytest.approx(
        [SETTINGS.learning_rate * (0.5 + 0.5 * math.cos(math.pi * share)) for share in shares], abs=1e-12
    )
    last = outcome.last("training")
    assert last is not None
    assert last["seconds_left"] == 0
    assert "\n| steps | 5 |\n" in (tmp_path / "tuned" / "README.md").read_text("utf-8")


def test_an_unused_time_budget_changes_nothing(data: Path, tmp_path: Path) -> None:
    for name, budget in (("one", None), ("two", 1e6)):
        tune(TuningJob(TINY, tmp_path / name, (data,), replace(SETTINGS, time_budget=budget)))
    one, two = (load_file(tmp_path / name / ADAPTER_FILE) for name in ("one", "two"))
    assert all(torch.equal(tensor, two[name]) for name, tensor in one.items())


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("soon", "'soon': expected hours, minutes and seconds such as 1h30m, 100m or 90s"),
        ("", "'': expected hours"),
        ("0s", "--time-budget is 0.0: expected more than 0"),
    ],
)
def test_an_invalid_time_budget_is_refused(
    capsys: pytest.CaptureFixture[str], data: Path, tmp_path: Path, given: str, message: str
) -> None:
    assert run(["tune", str(TINY), str(tmp_path / "tuned"), str(data), "--time-budget", given]) == USAGE
    assert message in capsys.readouterr().err


def test_prefetched_steps_are_those_asked_for() -> None:
    threads: list[str] = []

    def prepare(step: int) -> StepBatches:
        threads.append(threading.current_thread().name)
        empty = PackedBatch(*(torch.empty(0) for _ in range(6)))
        return StepBatches((empty,), torch.tensor([step, step]), step)

    prefetch = Prefetch(prepare)
    assert [prefetch.take(step, following=step < 3).rows for step in (0, 1, 2, 3)] == [0, 1, 2, 3]
    assert len(threads) == 4
    assert threads[0] == threading.current_thread().name
    assert all("prefetch" in name for name in threads[1:])
    assert prefetch.take(7, following=False).rows == 7  # a resumed training


# Further training


def test_an_adapter_can_be_trained_further(data: Path, tmp_path: Path) -> None:
    first = trained(data, tmp_path / "first")
    still = replace(SETTINGS, learning_rate=1e-12, max_steps=1, rank=9, alpha=1.0)
    same = trained(data, tmp_path / "same", still, adapter=tmp_path / "first")
    assert all(torch.equal(tensor, same[name]) for name, tensor in first.items())
    entry = json.loads((tmp_path / "same" / "sar_config.json").read_text())["mask_adapter"]
    assert (entry["rank"], entry["alpha"]) == (2, 32.0)
    further = trained(data, tmp_path / "further", adapter=tmp_path / "first")
    assert any(not torch.equal(tensor, further[name]) for name, tensor in first.items())


def test_an_adapter_keeps_its_rank(capsys: pytest.CaptureFixture[str], data: Path, tmp_path: Path) -> None:
    trained(data, tmp_path / "first")
    order = ["tune", str(TINY), str(tmp_path / "t"), str(data), "--adapter", str(tmp_path / "first")]
    gated = [*order, "--method", "gated-lora"]
    assert run([*gated, "--rank", "4"]) == USAGE
    assert "--rank has no effect with --adapter: use those of the folder" in capsys.readouterr().err
    assert run(order) == USAGE
    assert "--adapter has no effect with --method full: use --method gated-lora" in capsys.readouterr().err
    assert run([*gated, "--max-steps", "1", "--batch-size", "1"]) == OK
    with pytest.raises(OptionFault, match="--adapter with --method full: expected --method gated-lora"):
        tune(TuningJob(TINY, tmp_path / "u", (data,), TrainingSettings(), adapter=tmp_path / "first"))


def test_the_layout_of_mask_slots_is_written_and_kept_by_a_further_training(data: Path, tmp_path: Path) -> None:
    block = MaskLayout(shift=False, group="block")
    once = replace(SETTINGS, max_steps=1)
    first, second = tmp_path / "first", tmp_path / "second"
    trained(data, first, replace(once, shift=False, group="block", distinct=True))
    entries = read_sar_config(first)
    assert (entries["shift"], entries["group"], len(entries["mask_tokens"])) == (False, "block", once.mask_slots + 1)
    trained(data, second, replace(once, distinct=True), adapter=first)
    for folder in (first, second):
        opened = open_checkpoint(TINY, TokenFlags(), adapter=folder)
        assert (opened.mask_layout, opened.max_mask_slots) == (block, once.mask_slots)
