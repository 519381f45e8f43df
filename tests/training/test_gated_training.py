"""Training of gated adapters: frozen weights, time budgets, further training, forks beside drafts, and draft corrections."""

from __future__ import annotations

import json
import math
import shutil
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from spaceport.exporter.checkpoint import TokenFlags, load_model, open_checkpoint
from spaceport.exporter.checkpoint_files import read_sar_config, write_sar_config
from spaceport.exporter.draft_files import EMBEDDINGS_FILE, read_mechanisms, write_mechanisms
from spaceport.graphs.contract.draft_methods import CORRECTION_FILE, MaskLayout
from spaceport.graphs.contract.faults import OptionFault
from spaceport.graphs.mechanism import Factors, InputRows
from spaceport.runtime.decoding import Decoding
from spaceport.runtime.session import Runtime
from spaceport.training import training
from spaceport.training.acceptance import DraftPrompt, measure
from spaceport.training.methods import train_token_embeddings
from spaceport.training.settings import TrainingSettings, TuningJob
from spaceport.training.tuning import train
from spaceport.verify.reference import checkpoint_runtime
from support.exported import bundle_of
from support.families import FAMILIES, build
from support.paths import TINY
from support.tunings import after_each_step, stopped

M = TypeVar("M")
ADAPTER_FILE = "mask_adapter.safetensors"
FACTORS_FILE = "draft_correction.safetensors"

pytestmark = pytest.mark.slow

SMALL = TrainingSettings(method="gated-lora", batch_size=2, mask_slots=3, rank=2, cutoff=160, warmup=0.0, epochs=60)
SETTINGS = replace(SMALL, max_steps=6, anchors=4, correction_rank=2)
CORRECTED = replace(SMALL, max_steps=8, anchors=8, correction_rank=4, learning_rate=0.01)
LIST = "Three:\n\n1. Red: the colour of fire\n2. Green: the colour of grass\n3. Blue: the colour of the sea"
APART = replace(SETTINGS, objective="apar", max_steps=9, learning_rate=0.05, unfork_rate=0.0)  # forks, without drafts


class Adapters:
    """Adapters trained on four requests with the same answer, and those that several tests read."""

    def __init__(self, folder: Path, answer: str) -> None:
        self.folder = folder
        self.data = folder / "data.jsonl"
        lines = [{"prompt": f"Which {number}?", "response": answer} for number in range(4)]
        self.data.write_text("".join(json.dumps(line) + "\n" for line in lines), "utf-8")
        self.drafting = cache(lambda: self.trained("drafting"))
        self.forking = cache(lambda: self.trained("forking", APART, adapter=self.drafting()))

    def job(self, name: str, settings: TrainingSettings = SETTINGS, **more: Any) -> TuningJob:
        return replace(TuningJob(TINY, self.folder / name, (self.data,), settings, adapter_only=True), **more)

    def trained(self, name: str, settings: TrainingSettings = SETTINGS, **more: Any) -> Path:
        train(self.job(name, settings, **more))
        return self.folder / name


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> Adapters:
    return Adapters(tmp_path_factory.mktemp("adapters"), LIST)


@pytest.fixture(scope="module")
def corrections(tmp_path_factory: pytest.TempPathFactory) -> Adapters:
    return Adapters(tmp_path_factory.mktemp("corrections"), "Red or green, and then blue.")


def same(one: Path, other: Path, file: str = ADAPTER_FILE) -> bool:
    """Whether two adapter folders have the same tensors."""
    found, expected = load_file(one / file), load_file(other / file)
    return found.keys() == expected.keys() and all(torch.equal(each, expected[name]) for name, each in found.items())


def mechanism(folder: Path, kind: type[M]) -> M:
    """The mechanism of a kind in a checkpoint or adapter folder."""
    return next(found for found in read_mechanisms(folder, read_sar_config(folder)) if isinstance(found, kind))


# Frozen weights


def test_training_in_bfloat16_leaves_the_base_weights_as_they_were(adapters: Adapters, tmp_path: Path) -> None:
    train(TuningJob(TINY, tmp_path / "tuned", (adapters.data,), SETTINGS, bf16=True))
    before, after = load_file(TINY / "model.safetensors"), load_file(tmp_path / "tuned" / "model.safetensors")
    for name, tensor in before.items():
        changed = (after[name] != tensor).flatten(1).any(1) if tensor.dim() > 1 else after[name] != tensor
        assert changed.nonzero().flatten().tolist() == ([4] if "embed_tokens" in name else [])  # the mask token


# Token embeddings


@pytest.mark.parametrize("tied", [True, False])
def test_only_the_logits_of_predicted_tokens_change(tied: bool) -> None:
    llama = next(family for family in FAMILIES if family.name == "llama")
    model = build(replace(llama, options={**llama.options, "tie_word_embeddings": tied})).requires_grad_(False)
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
        apart.apply(model)
    torch.testing.assert_close(model(input_ids=ids).logits[..., 93], changed[..., 93])
    found = model(input_ids=torch.tensor([[7, 93, 11]])).logits
    torch.testing.assert_close(found[..., :90], behind[..., :90])


# Time budget and prefetching


def test_a_time_budget_ends_the_training_and_its_learning_rate(
    adapters: Adapters, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rates: list[float] = []
    clock = SimpleNamespace(perf_counter=lambda: float(len(rates)))  # which stands still until a step is done
    monkeypatch.setattr(training, "time", clock)

    def step(done: training.Training) -> None:
        rates.append(0.0)
        rates[-1] = done.learning_rate()

    budget = replace(SETTINGS, epochs=9, max_steps=50, time_budget=4.0)
    job = TuningJob(TINY, tmp_path / "tuned", (adapters.data,), budget, log_every=1, adapter_only=True)
    with after_each_step(step):
        outcome = train(job)
    assert len(rates) == 4
    shares = [(18 / 4 * seconds - 1) / 17 for seconds in (1, 2, 3, 4)]  # of 18 steps, the first of which is the warm-up
    expected = [SETTINGS.learning_rate * (0.5 + 0.5 * math.cos(math.pi * share)) for share in shares]
    assert rates == pytest.approx(expected, abs=1e-12)
    last = outcome.last("training")
    assert last is not None
    assert last["seconds_left"] == 0
    assert "\n| steps | 4 |\n" in (tmp_path / "tuned" / "README.md").read_text("utf-8")


# Further training


def test_an_adapter_is_trained_further_with_its_ranks(adapters: Adapters) -> None:
    first = adapters.drafting()
    still = replace(SETTINGS, learning_rate=1e-12, max_steps=1, rank=9, alpha=1.0, mask_slots=None)
    unchanged = adapters.trained("same", still, adapter=first)
    assert same(unchanged, first)
    config = json.loads((unchanged / "sar_config.json").read_text())
    entry = config["mechanisms"]["mask_adapter"]
    assert (config["mask_slots"], entry["rank"], entry["alpha"]) == (3, 2, 32.0)
    more = adapters.trained("more", replace(still, mask_slots=4), adapter=first)
    assert json.loads((more / "sar_config.json").read_text())["mask_slots"] == 4
    message = "--correction-rank is 8, the draft correction that is trained further has rank 2"
    with pytest.raises(OptionFault, match=message):
        adapters.trained("other", replace(SETTINGS, correction_rank=8), adapter=first)


def test_the_layout_of_mask_slots_is_written_and_kept_by_a_further_training(adapters: Adapters) -> None:
    once = replace(SETTINGS, max_steps=1, distinct=True)
    first = adapters.trained("block", replace(once, shift=False, group="block"))
    written = read_sar_config(first)
    assert written.layout == MaskLayout(shift=False, group="block")
    assert len(written.mask_tokens or ()) == once.slots + 1
    for folder in (first, adapters.trained("further block", once, adapter=first)):
        opened = open_checkpoint(TINY, TokenFlags(), adapter=folder)
        assert (opened.drafts.layout, opened.drafts.mask_slots) == (
            MaskLayout(shift=False, group="block"),
            once.mask_slots,
        )


# Forks


def test_an_adapter_learns_to_fork_in_rows_of_its_own_without_changing_its_drafts(adapters: Adapters) -> None:
    drafting, forking = adapters.drafting(), adapters.forking()
    assert same(forking, drafting)
    assert same(forking, drafting, FACTORS_FILE)
    config = json.loads((forking / "sar_config.json").read_text())
    assert (config["mask_slots"], config["fork_by_default"]) == (3, False)
    before, after = (load_file(folder / EMBEDDINGS_FILE) for folder in (drafting, forking))
    rows = {int(token): row for token, row in zip(after["ids"], after["input"], strict=True)}
    for token, row in zip(before["ids"], before["input"], strict=True):
        torch.testing.assert_close(rows[int(token)], row)
    found = mechanism(forking, InputRows)
    checkpoint = open_checkpoint(TINY, TokenFlags(), adapter=forking)
    assert found.tokens == checkpoint.tokens.fork_ids
    embedding: Any = load_model(checkpoint, "float32").get_input_embeddings()
    fork = torch.tensor(found.tokens)
    assert torch.equal(embedding(fork), found.rows)
    assert not torch.allclose(embedding.weight[fork], found.rows)  # input and output rows are trained apart


def test_drafts_or_forks_that_are_trained_further_leave_the_other_as_it_is(adapters: Adapters) -> None:
    forking = adapters.forking()
    drafts = adapters.trained("drafts", replace(SETTINGS, max_steps=2), adapter=forking)
    assert not same(drafts, forking)
    assert torch.equal(mechanism(drafts, InputRows).rows, mechanism(forking, InputRows).rows)
    forks = adapters.trained("forks", replace(APART, max_steps=1, learning_rate=1e-12), adapter=forking)
    torch.testing.assert_close(mechanism(forks, InputRows).rows, mechanism(forking, InputRows).rows)


def test_drafts_do_not_learn_to_avoid_tokens_that_are_never_generated(
    adapters: Adapters, corrections: Adapters, tmp_path: Path
) -> None:
    def with_child_row_times(scale: float) -> Path:
        folder = shutil.copytree(adapters.forking(), tmp_path / f"{scale}")
        tables = load_file(folder / EMBEDDINGS_FILE)
        child = open_checkpoint(TINY, TokenFlags(), adapter=folder).tokens.child
        for name in tables.keys() - {"ids"}:
            tables[name][tables["ids"] == child] *= scale
        save_file(tables, folder / EMBEDDINGS_FILE)
        return folder

    settings, data = replace(SETTINGS, max_steps=2), (corrections.data,)
    own, negated = (
        adapters.trained(f"scaled {x}", settings, adapter=with_child_row_times(x), data=data) for x in (1.0, -1.0)
    )
    assert same(own, negated)
    assert same(own, negated, FACTORS_FILE)


def test_forks_are_trained_beside_a_gated_adapter_and_are_not_the_default(adapters: Adapters) -> None:
    both = adapters.trained("both", replace(APART, objective="both"))
    stored = load_file(both / EMBEDDINGS_FILE)
    table: Tensor = load_model(open_checkpoint(TINY, TokenFlags()), "float32").get_input_embeddings().weight  # type: ignore[operator]
    assert all((row != table[token]).any() for token, row in zip(stored["ids"], stored["input"], strict=True))
    texts = []
    for adapter, by_default in ((None, True), (both, False)):  # the tiny checkpoint names the fork tokens already
        with checkpoint_runtime(open_checkpoint(TINY, TokenFlags(), adapter=adapter), 200, 1) as runtime:
            assert runtime.bundle.manifest.fork_by_default == by_default
            fork = False if by_default else None
            texts.append(runtime.generate("User: Which 1?\n", Decoding(max_tokens=40, fork=fork)).tokens)
    assert texts[0] == texts[1]


def test_a_correction_and_input_rows_go_with_their_checkpoint_into_the_bundle(tmp_path: Path) -> None:
    random = torch.Generator().manual_seed(0)
    hidden, fork = 96, 630  # an unused row of the table: no text has this token
    checkpoint = shutil.copytree(TINY, tmp_path / "checkpoint", ignore=shutil.ignore_patterns("*.py", "*.md", "__*"))
    write_mechanisms(checkpoint, [Factors(*(torch.randn(hidden, 4, generator=random) for _ in range(2)))])
    scores = []
    for sign in (1, -1):
        write_mechanisms(checkpoint, [InputRows((fork,), sign * torch.ones(1, hidden))])
        write_sar_config(checkpoint, {"fork_by_default": sign < 0})
        bundle = bundle_of(checkpoint)
        with Runtime.open(bundle, max_seq_len=100) as runtime:
            scores.append(runtime.score([5, fork, 7, 8]).logprobs)
            assert runtime.bundle.manifest.fork_by_default == (sign < 0)
        assert (bundle / CORRECTION_FILE).exists()
    assert scores[0][0] == scores[1][0]
    assert scores[0][1] != scores[1][1]  # read from its input row


def test_acceptance_is_measured_along_corrected_drafts_which_change_no_text(corrections: Adapters) -> None:
    longer = replace(CORRECTED, max_steps=60, learning_rate=0.03)
    folder = corrections.trained("long", longer, validation=(corrections.data,))
    line = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()][-1]
    assert (line["kind"], len(line["corrected"])) == ("validation", 3)
    assert line["losses"][0] > 0  # a frozen base's next token, which is not measured while it trains
    assert sum(line["corrected"]) > sum(line["accuracies"][1:])
    assert "| validation: accuracy with the draft correction | - |" in (folder / "README.md").read_text()
    decoding = Decoding(max_tokens=48, mask_slots=3, draft="chain")
    with checkpoint_runtime(open_checkpoint(TINY, TokenFlags(), adapter=folder), 128) as runtime:
        prompts = [runtime.tokens_of(f"User: Which {number}?\n") for number in range(3)]
        drafted = [runtime.generate(ids, decoding) for ids in prompts]
        assert [each.tokens for each in drafted] == [
            runtime.generate(ids, Decoding(max_tokens=48, mask_slots=0, lookup=0)).tokens for ids in prompts
        ]
        samples = [DraftPrompt(tuple(ids)) for ids in prompts]
        measured = measure(runtime, samples, 48).all
        assert measured.steps == sum(each.statistics.steps for each in drafted)
    plain = shutil.copytree(folder, corrections.folder / "uncorrected")
    (plain / FACTORS_FILE).unlink()
    entries = json.loads((plain / "sar_config.json").read_text())
    del entries["mechanisms"]["draft_correction"]
    (plain / "sar_config.json").write_text(json.dumps(entries))
    with checkpoint_runtime(open_checkpoint(TINY, TokenFlags(), adapter=plain), 128) as runtime:
        assert measure(runtime, samples, 48).all.steps > measured.steps


def test_a_correction_does_not_change_how_the_adapter_is_trained_from_its_first_step(corrections: Adapters) -> None:
    """Its loss has no gradient for the adapter; only the limit on the gradients' norm is shared."""
    loose = replace(CORRECTED, clip=1e9)
    one = corrections.trained("one", loose)
    two = corrections.trained("two", replace(loose, correction_rank=0))
    assert same(one, two)
    assert not (two / FACTORS_FILE).exists()
    assert mechanism(one, Factors).rank == 4
    assert mechanism(one, Factors).after.abs().max() > 0  # it begins with zeros
    still = replace(CORRECTED, learning_rate=1e-12, max_steps=1, correction_rank=0)
    again = mechanism(corrections.trained("same", still, adapter=one), Factors)
    for half in ("before", "after"):
        torch.testing.assert_close(getattr(again, half), getattr(mechanism(one, Factors), half), rtol=2e-3, atol=1e-6)


def test_a_resumed_training_in_bfloat16_has_the_adapter_and_correction_of_an_uninterrupted_one(
    corrections: Adapters,
) -> None:
    whole = corrections.trained("whole", CORRECTED, bf16=True)
    stopped(corrections.job("resumed", CORRECTED, bf16=True), after=3)
    resumed = corrections.trained("resumed", CORRECTED, bf16=True, resume=True)
    assert same(resumed, whole)
    assert same(resumed, whole, FACTORS_FILE)
