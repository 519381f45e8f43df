"""Medusa: published heads draft in a bundle, and the text stays the base model's.

The heads of support/published_heads.py predict exactly with the right offset: k + 1 tokens per step.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from spaceport.exporter.checkpoint import SAR_FILE, TokenFlags, load_model, open_checkpoint
from spaceport.exporter.export import ExportOptions, export
from spaceport.exporter.heads_file import HEADS_FILE
from spaceport.exporter.quiet import quiet_libraries
from spaceport.runtime.backends import open_engine
from spaceport.runtime.backends.engine_options import EngineOptions
from spaceport.runtime.backends.on_device import DeviceEngine
from spaceport.runtime.backends.on_onnxruntime import open_selection, open_session, session_options
from spaceport.runtime.bundle import open_bundle, read_manifest
from spaceport.runtime.decoding import Decoding
from spaceport.runtime.engine import Batch
from spaceport.runtime.sampling.grammar import Grammar
from spaceport.runtime.sampling.sampler import Sampling
from spaceport.runtime.session import Runtime
from spaceport.tools.bench.decode.benchmark import benchmark
from spaceport.tools.bench.decode.options import DecodeOptions
from spaceport.tools.bench.decode.replay import implied_tokens_per_step
from spaceport.tools.cli import run
from spaceport.tools.cli.exit_codes import INPUT, OK, USAGE
from spaceport.tools.verify.acceptance.measure import measure
from spaceport.tools.verify.acceptance.reference_answers import ReferenceAnswer, Segment
from support.adopted_models import LIMITS, answers, checked_acceptance
from support.published import PADDED, exact_model, text, write_checkpoint
from support.published_heads import BASE, exact_heads, write_published_heads

HEADS = 3


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    quiet_libraries()
    return tmp_path_factory.mktemp("medusa")


@pytest.fixture(scope="module")
def base(folder: Path) -> Path:
    return write_checkpoint(folder / "base", exact_model())


@pytest.fixture(scope="module")
def published(folder: Path) -> Path:
    """Heads as FasterDecoding/medusa-vicuna-7b-v1.3: a file of torch.save, and a config.json that names fewer heads."""
    return write_published_heads(folder / "heads", exact_heads(exact_model(), HEADS))


@pytest.fixture(scope="module")
def adopted(folder: Path, base: Path, published: Path) -> Path:
    assert run(["adopt", str(base), str(published), str(folder / "adapter")]) == OK
    return folder / "adapter"


@pytest.fixture(scope="module")
def bundle(folder: Path, base: Path, adopted: Path) -> Path:
    export(base, folder / "bundle", ExportOptions(adapter=adopted))
    return folder / "bundle"


def per_step(bundle: Path, **options: Any) -> tuple[list[int], float]:
    """The tokens of a bundle with these drafts, and its tokens per step."""
    with Runtime.open(bundle, max_seq_len=256, step_costs="free") as runtime:
        found = runtime.generate(text(0, 5), Decoding(max_tokens=33, **options))
    return list(found.tokens), (len(found.tokens) - 1) / (found.statistics.steps - 1)


@pytest.mark.slow
def test_exact_heads_draft_all_tokens_of_a_step_and_the_text_is_the_base_models(bundle: Path) -> None:
    assert per_step(bundle, mask_slots=0) == (text(5, 33), 1.0)
    for heads in range(1, HEADS + 1):
        tokens, steps = per_step(bundle, mask_slots=heads, draft="chain")
        assert tokens == text(5, 33)
        assert steps == pytest.approx(32 / -(-32 // (heads + 1)))
    assert per_step(bundle, draft="chain") == (text(5, 33), HEADS + 1)
    tokens, steps = per_step(bundle, lookup=0)
    assert (tokens, steps) == (text(5, 33), HEADS + 1)


@pytest.mark.nightly
@pytest.mark.parametrize("offset", [-1, 1])
def test_heads_with_another_offset_draft_nothing(offset: int, folder: Path, base: Path) -> None:
    heads = write_published_heads(folder / f"offset {offset}", exact_heads(exact_model(), HEADS, offset))
    assert run(["adopt", str(base), str(heads), str(folder / f"adapter {offset}")]) == OK
    export(base, folder / f"bundle {offset}", ExportOptions(adapter=folder / f"adapter {offset}"))
    assert per_step(folder / f"bundle {offset}", draft="chain") == (text(5, 33), 1.0)


def test_drafts_of_heads_are_counted_by_their_name(bundle: Path) -> None:
    with Runtime.open(bundle, max_seq_len=256, step_costs="free") as runtime:
        statistics = runtime.generate(text(0, 5), Decoding(max_tokens=33, draft="chain")).statistics
    assert statistics.accepted_by_source == statistics.drafted_by_source == {"head": 24}
    assert statistics.accepted_by_depth == [8, 8, 8]
    assert statistics.mask_rows == 0


def test_a_bundle_names_its_heads_and_has_no_mask_slots(bundle: Path) -> None:
    manifest = read_manifest(bundle)
    assert (manifest.signature.heads, manifest.max_mask_slots, manifest.max_draft_tokens) == (HEADS, 0, HEADS)
    with (
        Runtime.open(bundle, max_seq_len=256, step_costs="free") as runtime,
        pytest.raises(ValueError, match="mask_slots is 4: expected 0 to 3, the number of heads of the bundle"),
    ):
        runtime.generate("text", Decoding(mask_slots=HEADS + 1))


def test_files_of_torch_and_of_safetensors_are_adopted_alike(
    folder: Path, base: Path, adopted: Path, tmp_path: Path
) -> None:
    heads = write_published_heads(tmp_path / "heads", exact_heads(exact_model(), HEADS), ".safetensors")
    assert run(["adopt", str(base), str(heads), str(tmp_path / "adapter")]) == OK
    names = {file.name for file in adopted.iterdir()}
    assert {file.name for file in (tmp_path / "adapter").iterdir()} == names
    for name in names:
        assert (tmp_path / "adapter" / name).read_bytes() == (adopted / name).read_bytes()


def test_heads_inside_a_whole_checkpoint_are_adopted(base: Path, adopted: Path, tmp_path: Path) -> None:
    whole = write_checkpoint(tmp_path / "whole", exact_model(), medusa_num_heads=HEADS, medusa_num_layers=1)
    file = whole / "model.safetensors"
    heads = {f"medusa_head.{name}": tensor for name, tensor in exact_heads(exact_model(), HEADS).items()}
    save_file(
        {**load_file(file), **{name: tensor.contiguous() for name, tensor in heads.items()}}, file, {"format": "pt"}
    )
    assert run(["adopt", str(whole), str(tmp_path / "adapter")]) == OK
    assert (tmp_path / "adapter" / HEADS_FILE).read_bytes() == (adopted / HEADS_FILE).read_bytes()
    assert open_checkpoint(whole, TokenFlags(), adapter=tmp_path / "adapter").heads is not None


def test_heads_are_stored_in_the_type_in_which_they_were_published(base: Path, tmp_path: Path) -> None:
    tensors = {name: tensor.half() for name, tensor in exact_heads(exact_model(), HEADS).items()}
    heads = write_published_heads(tmp_path / "heads", tensors)
    assert run(["adopt", str(base), str(heads), str(tmp_path / "adapter"), "--max-mask-slots", "2"]) == OK
    stored = load_file(tmp_path / "adapter" / HEADS_FILE)
    assert {name.split(".")[0] for name in stored} == {"0", "1"}
    assert all(torch.equal(stored[name], tensors[name]) and stored[name].dtype == torch.float16 for name in stored)


def test_the_report_names_what_was_found(
    base: Path, published: Path, adopted: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["adopt", str(base), str(published), "--dry-run"]) == OK
    shown = capsys.readouterr().out
    for expected in (BASE, "3 of 3 in", "config.json names 2", "written      nothing", "--adapter TARGET"):
        assert expected in shown
    assert run(["adopt", str(base), str(published)]) == USAGE
    assert "no TARGET" in capsys.readouterr().err
    assert run(["adopt", str(base), str(published), "--dry-run", "--json"]) == OK
    report = json.loads(capsys.readouterr().out)
    assert (report["method"], report["mask_tokens"], report["adapter"]) == ("medusa", {}, None)
    assert report["heads"] | {"files": 0} == {
        "files": 0,
        "named_base": BASE,
        "count": HEADS,
        "blocks": 1,
        "present": HEADS,
        "configured": 2,
    }
    assert json.loads((adopted / SAR_FILE).read_text("utf-8")) == {
        "mask_tokens": [],
        "method": "medusa",
        "adapter": published.name,
        "heads": {"count": HEADS, "blocks": 1},
    }


def _without(name: str) -> Any:
    return lambda tensors: tensors.pop(name)


@pytest.mark.parametrize(
    ("change", "config", "options", "message"),
    [
        (_without("1.1.weight"), {}, [], "has no tensor 1.1.weight: expected 9 of heads"),
        (_without("1.0.linear.bias"), {}, [], "has no tensor 1.0.linear.bias: expected 9 of heads"),
        (
            lambda tensors: tensors.update({"0.0.linear.weight": torch.zeros(32, 48)}),
            {},
            [],
            f"0.0.linear.weight has shape (32, 48): expected (32, 32), which the base model has; copy the file again, or give "
            f"the base model that the heads were trained on, which config.json calls {BASE}",
        ),
        (
            lambda tensors: tensors.update({"2.1.weight": torch.zeros(PADDED + 1, 32)}),
            {},
            [],
            f"2.1.weight has shape ({PADDED + 1}, 32): expected ({PADDED}, 32)",
        ),
        (
            lambda tensors: [tensors.pop(name) for name in [*tensors] if name.startswith("1.")],
            {},
            [],
            "has the heads [0, 2] with output matrices at [1]: expected the heads 0, 1",
        ),
        (lambda tensors: tensors.update({"cross.q": torch.zeros(2)}), {}, [], "has the tensor cross.q: expected names"),
        (lambda tensors: None, {"medusa_num_heads": 4}, [], "medusa_num_heads is 4: expected 1 to 3, the heads in the"),
        (lambda tensors: None, {"medusa_num_layers": 2}, [], "medusa_num_layers is 2: expected 1, the residual blocks"),
        (lambda tensors: None, {}, ["--max-mask-slots", "4"], "--max-mask-slots is 4: expected 1 to 3, the heads in"),
        (lambda tensors: None, {}, ["--mask-token", "638"], "--mask-token has no effect: heads draft without mask"),
        (lambda tensors: None, {}, ["--noise-seed", "1"], "--noise-seed has no effect"),
        (
            lambda tensors: tensors.update({"0.1.weight": torch.full((PADDED, 32), torch.nan)}),
            {},
            [],
            "0.1.weight has numbers that are not finite",
        ),
    ],
)
def test_heads_that_do_not_fit_are_refused(
    change: Any,
    config: dict[str, Any],
    options: list[str],
    message: str,
    base: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    tensors = exact_heads(exact_model(), HEADS)
    change(tensors)
    heads = write_published_heads(tmp_path / "heads", tensors, **config)
    assert run(["adopt", str(base), str(heads), str(tmp_path / "adapter"), *options]) in (INPUT, USAGE)
    assert message in capsys.readouterr().err
    assert not (tmp_path / "adapter").exists()


class _Code:
    def __reduce__(self) -> Any:
        return print, ("this pickle runs code",)


@pytest.mark.parametrize("content", [_Code(), [1, 2], {"0.1.weight": 3}])
def test_a_pickle_with_anything_but_tensors_is_refused(
    content: Any, base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    heads = write_published_heads(tmp_path / "heads", {})
    torch.save(content, heads / "medusa_lm_head.pt")
    assert run(["adopt", str(base), str(heads), "--dry-run"]) == INPUT
    shown = capsys.readouterr()
    assert "expected what torch.save writes" in shown.err or "expected a dictionary of tensors" in shown.err
    assert "runs code" not in shown.out


def test_a_model_has_heads_or_mask_slots(
    base: Path, published: Path, adopted: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    masked = write_checkpoint(tmp_path / "masked", exact_model(), pard_token=638)
    assert run(["adopt", str(masked), str(published), "--dry-run"]) == INPUT
    assert "has mask tokens, which draft already" in capsys.readouterr().err
    options = ["--adapter", str(adopted), "--mask-token", "638"]
    assert run(["export", str(base), str(tmp_path / "bundle"), *options]) in (INPUT, USAGE)
    assert capsys.readouterr().err
    entries = json.loads((adopted / SAR_FILE).read_text("utf-8"))
    for file in adopted.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / SAR_FILE).write_text(json.dumps({**entries, "mask_tokens": ["638"]}), "utf-8")
    base_file = json.loads((tmp_path / "base.json").read_text("utf-8"))
    (tmp_path / "base.json").write_text(json.dumps({**base_file, "tokens": {"638": 638}}), "utf-8")
    assert run(["export", str(base), str(tmp_path / "bundle"), "--adapter", str(tmp_path)]) == INPUT
    assert "has 3 heads, and mask tokens 638: expected one of them" in capsys.readouterr().err


def test_heads_without_their_base_model_are_refused(
    published: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["adopt", str(published), str(tmp_path / "adapter")]) == INPUT
    assert f"without its base model: expected CHECKPOINT [ADAPTER] TARGET, with the folder of {BASE}" in (
        capsys.readouterr().err
    )


def test_heads_are_not_tuned(base: Path, adopted: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = tmp_path / "data.jsonl"
    data.write_text('{"prompt": "import json", "response": "import os"}\n', "utf-8")
    options = ["--adapter", str(adopted), "--adapter-only", "--method", "gated-lora"]
    assert run(["tune", str(base), str(tmp_path / "tuned"), str(data), *options]) == INPUT
    assert "has heads, which are not tuned" in capsys.readouterr().err


def test_the_heads_of_an_adapter_folder_have_to_fit_the_base_model(
    base: Path, adopted: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for file in adopted.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / SAR_FILE).write_text(json.dumps({"mask_tokens": [], "heads": {"count": 4, "blocks": 1}}), "utf-8")
    checkpoint = open_checkpoint(base, TokenFlags(), adapter=tmp_path)
    with pytest.raises(ValueError, match=r"has no tensor 3.0.linear.bias and 2 more: expected 12 of heads"):
        load_model(checkpoint, "float32")
    (tmp_path / SAR_FILE).write_text(json.dumps({"mask_tokens": [], "heads": {"count": 0, "blocks": 1}}), "utf-8")
    with pytest.raises(ValueError, match="expected a count of 1 to 64"):
        open_checkpoint(base, TokenFlags(), adapter=tmp_path)


@pytest.mark.slow
def test_every_command_that_reads_drafts_takes_heads(
    base: Path, adopted: Path, bundle: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = answers(tmp_path)
    found = checked_acceptance(bundle, base, adopted, data, capsys)
    assert (found["mask_slots"], found["predictor"]) == (HEADS, "head")
    assert run(["acceptance", str(bundle), str(data), *LIMITS]) == OK
    assert "head 3" in capsys.readouterr().out
    assert run(["inspect", str(bundle)]) == OK
    assert "draft heads           3" in capsys.readouterr().out
    assert run(["plan", str(bundle), "--threads", "1", "--acceptance", "1"]) == OK
    planned = capsys.readouterr().out
    assert re.search(r"^Acceptance rate 1: [1-4]\.\d\d tokens per step, ", planned, re.MULTILINE)
    assert "mask slots" not in planned


def test_a_replay_gives_heads_the_rates_of_its_table(bundle: Path) -> None:
    acceptance = (0.9, 0.5, 0.7)
    options = DecodeOptions(replay=acceptance, fixed=(2, 3), max_tokens=96, limit=6, rounds=1, context=16, threads=1)
    report = benchmark(bundle, None, options, lambda _: None)
    found = {mode.mode: mode for mode in report.modes}
    assert found["plain"].tokens_per_step == 1.0
    for heads in (2, 3):
        chain = found[f"fixed {heads}"]
        assert chain.tokens_per_step == pytest.approx(implied_tokens_per_step(acceptance[:heads]), rel=0.09)
        assert [rate.rate for rate in chain.by_depth] == pytest.approx([0.9, 0.45, 0.315][:heads], abs=0.07)
        assert set(chain.by_source) == {"head"}
    assert report.identical


def test_accuracy_of_exact_heads_is_complete(bundle: Path) -> None:
    with Runtime.open(bundle, max_seq_len=256) as runtime:
        found = measure(
            runtime, [ReferenceAnswer(1, tuple(text(0, 5)), (Segment(tuple(text(0, 5)), tuple(text(5, 30))),))], 20, 3
        )
    assert found.reference.accuracy == found.generated.accuracy == [1.0] * (1 + HEADS)
    assert found.generated.tokens_per_step[HEADS] == pytest.approx(20 / 6)


def test_a_device_engine_selects_the_tokens_of_heads_as_the_plain_engine(bundle: Path) -> None:
    opened = open_bundle(bundle)
    options = EngineOptions(128, 2)
    session = open_session(opened, session_options(1, "same"), ["CPUExecutionProvider"])
    selection = open_selection(opened, ["CPUExecutionProvider"])
    assert selection is not None
    device = DeviceEngine(session, opened.manifest.signature, options, "cpu", "cpu", selection=selection)
    plain = open_engine(opened, "onnxruntime", options)
    rows = np.arange(5)[None].repeat(2, axis=0)
    mask = np.zeros((2, 1, 5, 64), np.bool_)
    mask[..., :5] = np.tri(5, dtype=np.bool_)
    batch = Batch(0, np.array([text(0, 5), text(2, 5)]), rows, rows, mask, np.array([[4, 1, 0], [4, 4, 2]]))
    expected = plain.run(batch)
    assert device.run(batch).tobytes() == expected.tobytes()
    assert expected.shape == (2, 3 * (1 + HEADS), PADDED)
    for request, found in enumerate(device.select(batch)):
        assert found.best(()) == expected[request].argmax(-1).tolist()
        assert found.best(())[1 : 1 + HEADS] == text(6 + 2 * request, HEADS)
    with Runtime(opened, device, 128) as runtime:
        found = runtime.generate(text(0, 5), Decoding(max_tokens=33, draft="chain"))
    assert (list(found.tokens), found.statistics.steps) == (text(5, 33), 9)


OPTIONS = {
    "greedy": {},
    "sampled": {"sampling": Sampling(temperature=1.5, seed=3)},
    "penalties": {"sampling": Sampling(repetition_penalty=1.3, frequency_penalty=0.4)},
    "grammar": {"grammar": Grammar(regex="[a-z ]{5,60}")},
    "logprobs": {"logprobs": 2},
}


def test_requests_of_every_kind_write_the_same_with_heads_and_without(bundle: Path) -> None:
    found = []
    with Runtime.open(bundle, max_seq_len=256, max_requests=3, step_costs="free") as runtime:
        for drafts in ({"mask_slots": 0}, {"draft": "chain"}, {}):
            running = [
                runtime.stream(text(start, 6), Decoding(max_tokens=24, **options, **drafts))  # type: ignore[arg-type]
                for start, options in enumerate(OPTIONS.values())
            ]
            done = [one.completion() for one in running]
            found.append([(one.tokens, one.ending) for one in done])
            heads = [one.statistics.accepted_by_source.get("head", 0) for one in done]
            assert all(heads) == bool(drafts.get("mask_slots", 1))
    assert found[0] == found[1] == found[2]
    assert found[0][0][0] == tuple(text(6, 24))
