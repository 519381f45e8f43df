"""The default format depends on the machine, the model and its size; an export says why."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig

from spaceport.exporter import export as chooser
from spaceport.exporter.checkpoint import model_without_values
from spaceport.exporter.checkpoint_files import ModelFiles, require_checkpoint
from spaceport.exporter.export import ExportOptions, Machine, choose_format, why_not_native
from spaceport.graphs.contract.faults import OptionFault
from spaceport.graphs.contract.formats import FORMATS
from spaceport.runtime.bundle import open_bundle
from spaceport.tools.cli import USAGE, run
from spaceport.tools.cli.export import command
from support.families import TINY as WIDTHS
from support.families import family_of
from support.gguf_files import random_model, stored_tensors, write_gguf
from support.paths import TINY

LLAMA = {"hidden_size": 768, "intermediate_size": 2048, "num_attention_heads": 12, "num_key_value_heads": 4}
SIZES: dict[str, dict[str, Any]] = {
    "18 million": {**LLAMA, "num_hidden_layers": 2, "vocab_size": 4000},
    "110 million": {**LLAMA, "num_hidden_layers": 12, "vocab_size": 20000},
    "430 million": {**LLAMA, "num_hidden_layers": 60, "vocab_size": 20000},
}


def configuration(folder: Path, size: str) -> ModelFiles:
    """A folder with the configuration of a model of this size, and without weights."""
    folder.mkdir()
    config = {"model_type": "llama", **SIZES[size]}
    (folder / "config.json").write_text(json.dumps(config))
    return ModelFiles(folder, config)


@pytest.mark.parametrize(
    ("size", "machine", "name", "reason"),
    [
        ("18 million", "cpu", "float32", "fewer bits gain nothing in a model of 18.[0-9] million weights"),
        ("110 million", "cpu", "int8", "a model of 1[01][0-9].[0-9] million weights loses too much in int4"),
        ("430 million", "cpu", "int4", "4[0-9][0-9].[0-9] million weights; --format int8 is closer to float32"),
        ("430 million", "gpu", "float16", "for a GPU"),
    ],
)
def test_the_default_depends_on_the_size_of_the_model_and_the_machine(
    size: str, machine: Machine, name: str, reason: str, tmp_path: Path
) -> None:
    chosen, why, _ = choose_format(configuration(tmp_path / "llama", size), None, machine)
    assert chosen == FORMATS[name]
    assert re.match(f"format {name}: {reason}", why)
    assert "\n" not in why


def test_a_model_without_native_operators_stays_float32(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chooser, "why_not_native", lambda model: "its layers have no norms")
    chosen, why, _ = choose_format(configuration(tmp_path / "llama", "430 million"), None, "cpu")
    assert (chosen.name, why) == ("float32", "format float32: its layers have no norms; --format float16 is for GPUs")


def test_a_gguf_file_keeps_its_weights_if_native_operators_have_their_types(tmp_path: Path) -> None:
    model = random_model()
    matrices = [name for name, weight in stored_tensors(model).items() if weight.ndim > 1]
    for kind, count, name in (
        ("Q8_0", 99, "stored"),
        ("Q8_0", 10, "stored"),
        ("F32", 9, "float32"),
        ("F16", 99, "float32"),
    ):
        file = write_gguf(tmp_path / f"{kind}.gguf", model, dict.fromkeys(matrices[:count], kind))
        assert choose_format(require_checkpoint(file), None, "cpu")[0] == FORMATS[name]
    with pytest.raises(OptionFault, match=r"has no matrix in a type that native operators have \(Q4_0, "):
        choose_format(require_checkpoint(file), "stored", "cpu")


@pytest.mark.parametrize(
    ("options", "formats", "reason"),
    [
        ("--for gpu", ("float16", "scatter"), "format float16: for a GPU"),
        ("--for gpu --lowering append", ("float16", "append"), "format float16: for a GPU"),
        ("--lowering append", ("float16", "append"), "format float16: for a GPU"),
        ("--attention operator", ("float16", "scatter"), "format float16: for a GPU"),
        ("--for cpu", ("int8", "scatter"), "format int8: a model of "),
        ("--format float32", ("float32", "scatter"), "format float32: references"),
        ("--format int4", ("int4", "scatter"), "format int4: CPUs"),
        ("--format float16-int4", ("float16-int4", "append"), "format float16-int4: GPUs with TensorRT"),
        ("--for gpu --format int4", None, "--for has no effect with --format: leave --format out"),
    ],
)
def test_a_named_format_wins_and_the_reason_for_each_is_one_line(
    options: str, formats: tuple[str, str] | None, reason: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = configuration(tmp_path / "llama", "110 million")
    arguments = [str(files.path), str(tmp_path / "bundle"), *options.split()]
    if formats is None:
        assert run(["export", *arguments]) == USAGE
        assert reason in capsys.readouterr().err
        return
    given = command.make_context("export", arguments).params
    for_tensorrt = given["lowering"] == "append" or given["attention"] == "operator"
    machine: Machine = given["machine"] or ("gpu" if for_tensorrt else "cpu")
    chosen = choose_format(files, given["format"], machine)
    assert (chosen.format.name, ExportOptions(chosen.format, given["lowering"]).lowering) == formats
    assert chosen.reason.startswith(reason)
    assert chosen.measurable == (options == "--for cpu")
    assert "\n" not in chosen.reason


@pytest.mark.parametrize(("largest", "name"), [(9.0, "int4"), (0.0, "int8")])
def test_a_measurement_of_int4_decides_where_it_is_quick(
    largest: float, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(chooser, "_SMALL", 0)
    monkeypatch.setattr(chooser, "MEASURED", range(1, 10**9))
    monkeypatch.setattr(chooser, "LARGEST_DIVERGENCE", largest)
    assert run(["export", str(TINY), str(tmp_path / "bundle")]) == 0
    assert open_bundle(tmp_path / "bundle").manifest.format == name
    err = capsys.readouterr().err
    assert "format int4, or int8 if int4 differs too much from float32" in err
    assert re.search(rf"format int4: top-1 agreement .*, mean KL [0-9.e-]+, {largest:g} at most", err)


def test_an_unknown_format_is_refused() -> None:
    with pytest.raises(OptionFault, match="format is 'int7': expected stored, int4, int8, float32"):
        choose_format(require_checkpoint(TINY), "int7", "cpu")


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("llama", None),
        ("gemma3", None),
        ("gpt_neox", None),
        ("ministral3", "queries that are scaled by their position"),
        ("falcon, 40B style", "an attention of its own"),
        ("gpt2", "no o_proj in GPT2Attention"),
        ("qwen3_moe", None),
    ],
)
def test_families_that_native_operators_do_not_know_are_float32_by_default(name: str, reason: str | None) -> None:
    family = family_of(name)
    sizes = {"n_embd": 64, "n_inner": 96} if name == "gpt2" else {"hidden_size": 64, "intermediate_size": 96}
    config = AutoConfig.for_model(family.model_type, **{**WIDTHS, **family.options, **sizes})
    found = why_not_native(model_without_values(config, "float32"))
    assert found is None if reason is None else reason in (found or "")
