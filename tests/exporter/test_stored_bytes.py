"""The predicted bytes of weights are those that real exports write."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch import Tensor

from spaceport.exporter.atomic_folder import TargetError
from spaceport.exporter.checkpoint import load_model, open_checkpoint
from spaceport.exporter.dry_run import dry_run
from spaceport.exporter.export import ExportOptions, build_decoder, export, needed_space
from spaceport.graphs.contract.faults import OptionFault
from spaceport.graphs.int8 import InputScale, LinearScales
from spaceport.graphs.quantize import integer_modules
from spaceport.graphs.weight_quantization import Quantization
from support.families import FAMILIES, Family, build
from support.paths import TINY
from support.published import write_checkpoint

# No constant of these models has from 65 to 256 bytes: the exporter may join such, and then stores them elsewhere.
SIZES: dict[str, Any] = {"vocab_size": 640, "hidden_size": 256, "head_dim": 64, "intermediate_size": 256}
FLOAT = {
    "float32": ExportOptions(),
    "float16, append": ExportOptions("append", "float16"),
    "int4, bfloat16, append": ExportOptions("append", "bfloat16", "int4"),
    "float8, float16, append": ExportOptions("append", "float16", "float8"),
    "int8, float activations": ExportOptions(weights="int8", requested_activations="float"),
}
INTEGER = {"int4": ExportOptions(weights="int4"), "int8": ExportOptions(weights="int8")}

# Cases of each run; all others are nightly, since each exports a model.
EACH_RUN = {("llama", "float32")}


def cases(first: Sequence[str], second: Sequence[str]) -> list[Any]:
    """All pairs of two names as parameters of a test."""
    return [
        pytest.param(one, other, marks=() if (one, other) in EACH_RUN else pytest.mark.nightly)
        for one in first
        for other in second
    ]


def saved(name: str, folder: Path, **sizes: Any) -> Path:
    (family,) = (one for one in FAMILIES if one.name == name)
    own = {name: size for name, size in SIZES.items() if name != "head_dim" or family.model_type != "falcon"}
    model = build(replace(family, options={**family.options, **own, **sizes}))
    return write_checkpoint(folder, model)


def compared(checkpoint: Path, target: Path, options: ExportOptions) -> tuple[int, int]:
    """Predicted and real bytes of model.onnx.data; parameters and signature must be equal."""
    expected = dry_run(checkpoint, options)
    manifest = export(checkpoint, target, options)
    assert (expected.parameters, expected.signature) == (manifest.parameters, manifest.signature)
    assert (expected.max_positions, expected.options.activations) == (manifest.max_positions, manifest.activations)
    return expected.files["model.onnx.data"], (target / "model.onnx.data").stat().st_size


@pytest.mark.slow
@pytest.mark.parametrize(("name", "options"), cases(["llama", "falcon, 40B style", "glm"], [*FLOAT]))
def test_the_data_file_has_exactly_the_predicted_bytes(name: str, options: str, tmp_path: Path) -> None:
    predicted, real = compared(saved(name, tmp_path / "checkpoint"), tmp_path / "bundle", FLOAT[options])
    assert predicted == real


@pytest.mark.slow
@pytest.mark.parametrize(("options", "embeddings"), cases([*INTEGER], ["tied", "untied"]))
def test_with_quantized_activations_the_prediction_is_within_one_percent(
    options: str, embeddings: str, tmp_path: Path
) -> None:
    checkpoint = saved("llama", tmp_path / "checkpoint", tie_word_embeddings=embeddings == "tied")
    predicted, real = compared(checkpoint, tmp_path / "bundle", INTEGER[options])
    assert abs(predicted / real - 1) < 0.01


@pytest.mark.parametrize(
    "options",
    [
        ExportOptions(weights="int4"),
        ExportOptions("append", "float16", "int4"),
        *(ExportOptions(weights="int8", requested_activations=kind) for kind in ("int8", "float")),
    ],
    ids=str,
)
def test_the_files_without_a_name_have_exactly_the_predicted_bytes(options: ExportOptions, tmp_path: Path) -> None:
    checkpoint = open_checkpoint(TINY, options.tokens)
    streamed = needed_space(load_model(checkpoint, options.dtype, tmp_path), options)
    bundle = needed_space(load_model(checkpoint, options.dtype), options)
    scales = None
    if options.activations == "int8" and options.weights == "int8":  # values do not change sizes
        names = integer_modules(load_model(checkpoint, options.dtype))
        scales = dict.fromkeys(names, LinearScales(InputScale(None)))
    decoder, _ = build_decoder(checkpoint, options, scales=scales, scratch=tmp_path)
    assert streamed - bundle == sum(tensor.nbytes for tensor in on_disk(decoder.quantization))
    predicted = dry_run(TINY, options).files
    assert bundle == predicted["model.onnx.data"] + predicted.get("quantization_scales.safetensors", 0)


def on_disk(quantization: Quantization) -> Iterator[Tensor]:
    """The codes and scales of a streamed export that are in files without a name, each once."""
    integers = quantization.integers
    for layer in quantization.layers.values():
        yield from (layer.codes, layer.scale)
    if integers is not None:
        yield from (layer.codes for name, layer in integers.layers.items() if not (integers.tied and name == "lm_head"))
    for table in (quantization.embedding, integers and integers.embedding):
        if table is not None:
            yield table.codes


def test_an_export_is_refused_before_it_quantizes_if_the_disk_is_too_small(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options, stages = ExportOptions(weights="int4"), list[str]()
    checkpoint, scratch = open_checkpoint(TINY, options.tokens), tmp_path / "partial"
    scratch.mkdir()
    free = needed_space(load_model(checkpoint, "float32", scratch), options)
    monkeypatch.setattr("shutil.disk_usage", lambda folder: SimpleNamespace(free=free))
    build_decoder(checkpoint, options, scratch=scratch)
    free -= 1
    with pytest.raises(TargetError, match=r"MB free, the bundle needs about"):
        build_decoder(checkpoint, options, stages.append, scratch=scratch)
    assert stages == ["loading the weights"]


def test_a_model_without_layers_that_can_be_quantized_is_refused(tmp_path: Path) -> None:
    (family,) = (one for one in FAMILIES if one.name == "gpt2")
    folder = tmp_path / "checkpoint"
    write_checkpoint(folder, build(Family(family.name, family.model_type, family.structure, family.options)))
    with pytest.raises(OptionFault, match=r"no linear layer that can be quantized .*--weights same"):
        dry_run(folder, ExportOptions(weights="int4", requested_activations="float"))
