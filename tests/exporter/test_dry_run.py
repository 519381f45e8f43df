"""A dry run predicts the parameters, bytes and memory of an export, and refuses what an export would refuse.

Published sizes are those of the papers: Llama 2 (Touvron et al., 2023, with the published config.json) and Falcon (Almazrouei
et al., 2023). Vicuna 7B v1.5 and 13B v1.5 have the sizes of Llama 2.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch import Tensor
from transformers import LlamaForCausalLM

from spaceport.exporter.atomic_folder import TargetError
from spaceport.exporter.checkpoint import load_model, open_checkpoint
from spaceport.exporter.dry_run import DryRun, dry_run
from spaceport.exporter.export import ExportOptions, build_decoder, needed_space
from spaceport.exporter.mechanisms import DraftAdditions
from spaceport.exporter.sar_config import CheckpointError
from spaceport.graphs.contract.faults import OptionFault
from spaceport.graphs.mechanism import Heads
from spaceport.graphs.quantization import Quantization
from spaceport.graphs.traits import UnsupportedModel
from spaceport.runtime.bundle import open_bundle
from support.exported import bundle_of
from support.families import build, family_of
from support.paths import TESTS, TINY
from support.published import write_checkpoint
from support.published_checkpoints import CONFIGS

INDEX = "model.safetensors.index.json"
TINY_CONFIG: dict[str, Any] = json.loads((TINY / "config.json").read_text("utf-8"))

SIZES: dict[str, Any] = json.loads((TESTS / "data" / "published_sizes.json").read_text("utf-8"))["shipped"]


def folder_of(content: dict[str, Any], folder: Path) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(content), "utf-8")
    return folder


@pytest.mark.parametrize("name", SIZES)
def test_a_published_configuration_has_the_published_number_of_parameters(name: str, tmp_path: Path) -> None:
    config, parameters, (layers, heads, head_dim) = SIZES[name].values()
    found = dry_run(folder_of(config, tmp_path), ExportOptions(dtype="float16"))
    assert found.parameters == parameters
    assert found.signature.kv_bytes(1, 1) == 2 * layers * heads * head_dim * 2
    rotary = 4 * head_dim // 2  # at most; inline in model.onnx if small
    assert 0 <= found.files["model.onnx.data"] - 2 * parameters <= rotary


def copied(folder: Path, **changes: Any) -> Path:
    """The tiny checkpoint's configuration with changes, and its weights."""
    folder_of({**TINY_CONFIG, **changes}, folder)
    (folder / "model.safetensors").symlink_to(TINY / "model.safetensors")
    return folder


def test_what_an_export_would_refuse_is_refused(tmp_path: Path) -> None:
    assert dry_run(TINY, ExportOptions()).checked_headers
    assert not dry_run(folder_of(TINY_CONFIG, tmp_path / "config"), ExportOptions()).checked_headers
    wide = copied(tmp_path / "wide", intermediate_size=2 * TINY_CONFIG["intermediate_size"])
    untied = copied(tmp_path / "untied", tie_word_embeddings=False)
    part = copied(tmp_path / "part")
    names = {"weight_map": {"x": "model.safetensors", "y": "model-2.safetensors"}}
    (part / INDEX).write_text(json.dumps(names), "utf-8")
    outside = copied(tmp_path / "outside")
    (outside / INDEX).write_text(json.dumps({"weight_map": {"x": "../part/model.safetensors"}}), "utf-8")
    adapted = copied(tmp_path / "adapted")
    (adapted / "mask_adapter.safetensors").touch()
    (tmp_path / "empty").mkdir()
    for folder, message in (
        (wide, r"has shape .*config.json describes .*copy the config.json"),
        (untied, r"has no lm_head.weight, and tie_word_embeddings is false: expected"),
        (part, r"1 of 2 weight files are missing, such as model-2.safetensors: expected"),
        (outside, r"weight_map has the file '../part/model.safetensors': expected the names of files beside the index"),
        (adapted, r"does not count: expected the base model; run it on that folder"),
        (tmp_path / "empty", r"no config.json in it: copy that of the checkpoint"),
        (tmp_path / "none", r"no such folder: expected a folder with config.json, or a GGUF file"),
        (folder_of({"model_type": "t5"}, tmp_path / "t5"), "'t5' is not a decoder-only causal language model:"),
    ):
        with pytest.raises(CheckpointError, match=message):
            dry_run(folder, ExportOptions())
    bloom = folder_of({"model_type": "bloom", "hidden_size": 32, "n_layer": 1, "n_head": 4}, tmp_path / "bloom")
    with pytest.raises(UnsupportedModel, match=r"takes no position_ids: .*expected rotary"):
        dry_run(bloom, ExportOptions())
    gpt2 = write_checkpoint(tmp_path / "gpt2", build(family_of("gpt2")))
    with pytest.raises(OptionFault, match=r"no linear layer that can be quantized .*--weights same"):
        dry_run(gpt2, ExportOptions(weights="int4", requested_activations="float"))


def test_the_cache_is_passed_as_the_argument_that_a_model_has(monkeypatch: pytest.MonkeyPatch) -> None:
    here, forward = dry_run(TINY, ExportOptions()), LlamaForCausalLM.forward
    (name,) = {"cache", "past_key_values"} & inspect.signature(forward).parameters.keys()

    def with_cache(self: Any, input_ids: Tensor, position_ids: Tensor, cache: object, **others: Any) -> object:
        """As from version 5.24 of transformers on."""
        return forward(self, input_ids=input_ids, position_ids=position_ids, **{name: cache}, **others)

    def with_past(self: Any, input_ids: Tensor, position_ids: Tensor, past_key_values: object, **others: Any) -> object:
        """As before."""
        return forward(self, input_ids=input_ids, position_ids=position_ids, **{name: past_key_values}, **others)

    for other in (with_cache, with_past):
        monkeypatch.setattr(LlamaForCausalLM, "forward", other)
        assert dry_run(TINY, ExportOptions()) == here


LAYER = 4 * 2048 * 2048 + 3 * 2048 * 8192 + 2 * 2048  # parameters of a layer of `found`


def found(folder: Path, options: ExportOptions | None = None, **changes: Any) -> DryRun:
    sizes = {"hidden_size": 2048, "intermediate_size": 8192, "num_attention_heads": 16, "num_key_value_heads": 16}
    folder_of({**TINY_CONFIG, **sizes, "head_dim": 128, **changes}, folder)
    return dry_run(folder, options or ExportOptions())


def test_further_layers_need_the_memory_of_their_traced_graph_only(tmp_path: Path) -> None:
    few, many = (found(tmp_path, num_hidden_layers=layers) for layers in (2, 22))
    assert few.memory.streamed
    assert few.memory.weights == many.memory.weights
    assert LAYER * 4 <= few.memory.weights <= 1.5 * LAYER * 4
    assert 0 < many.memory.total - few.memory.total < LAYER * 4


def test_memory_depends_on_embeddings_heads_and_precision(tmp_path: Path) -> None:
    small, large = (found(tmp_path, vocab_size=vocab, tie_word_embeddings=False) for vocab in (1000, 100_000))
    assert large.memory.weights / small.memory.weights == pytest.approx(100_000 * 2048 / LAYER)  # as a layer
    whole, half = (found(tmp_path, ExportOptions(dtype=dtype)) for dtype in ("float32", "bfloat16"))
    assert half.memory.weights == pytest.approx(whole.memory.weights / 2, rel=1e-6)
    plain = found(tmp_path, tie_word_embeddings=False)
    vocab = plain.signature.vocab_size
    both = dry_run(tmp_path, ExportOptions(), DraftAdditions((), vocab, [Heads(3, 1)]))
    added = both.parameters - plain.parameters
    assert added > 3 * 2048 * vocab
    assert both.memory.weights - plain.memory.weights == 4 * (added + 2 * 2048 * vocab)


def test_a_checkpoint_that_cannot_be_streamed_needs_memory_for_the_model(tmp_path: Path) -> None:
    content, parameters, _ = SIZES["llama-2-7b"].values()
    converted = dry_run(folder_of(CONFIGS["qwen"], tmp_path / "converted"), ExportOptions())
    remote = dry_run(folder_of(content, tmp_path / "remote"), ExportOptions(remote_code=True))
    assert [each.memory.streamed for each in (converted, remote)] == [False, False]
    assert remote.memory.weights == 2 * 4 * parameters
    assert (remote.temporary, converted.temporary) == (0, 0)
    for name, streamed in (("llama", True), ("mixtral", False)):  # the headers say whether matrices are merged
        checkpoint = write_checkpoint(tmp_path / name, build(family_of(name)))
        assert dry_run(checkpoint, ExportOptions()).memory.streamed is streamed
        (checkpoint / "model.safetensors").unlink()
        assert dry_run(checkpoint, ExportOptions()).memory.streamed  # not known yet


# No constant of these models has from 65 to 256 bytes: the exporter may join such, and then stores them elsewhere.
WIDE: dict[str, Any] = {"vocab_size": 640, "hidden_size": 256, "head_dim": 64, "intermediate_size": 256}
OPTIONS = {
    "float32": ExportOptions(),
    "float16, append": ExportOptions("append", "float16"),
    "int4, bfloat16, append": ExportOptions("append", "bfloat16", "int4"),
    "float8, float16, append": ExportOptions("append", "float16", "float8"),
    "int8, float activations": ExportOptions(weights="int8", requested_activations="float"),
    "int4": ExportOptions(weights="int4"),
    "int8": ExportOptions(weights="int8"),
}


def require_predicted(checkpoint: Path, options: ExportOptions, tolerance: float) -> None:
    """Assert that a dry run predicts the bundle of a checkpoint."""
    expected, bundle = dry_run(checkpoint, options), bundle_of(checkpoint, options)
    manifest = open_bundle(bundle).manifest
    assert (expected.parameters, expected.signature) == (manifest.parameters, manifest.signature)
    assert (expected.max_positions, expected.options.activations) == (manifest.max_positions, manifest.activations)
    real = (bundle / "model.onnx.data").stat().st_size
    assert abs(expected.files["model.onnx.data"] - real) <= tolerance * real


@pytest.mark.parametrize("name", ["float32", "int4", "int8", "int4, bfloat16, append", "float8, float16, append"])
def test_the_bytes_of_the_tiny_bundles_are_predicted(name: str) -> None:
    require_predicted(TINY, OPTIONS[name], 0.02 if name == "int8" else 0)


@pytest.mark.nightly
@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("family", ["llama", "falcon, 40B style", "glm"])
def test_the_data_file_has_the_predicted_bytes(family: str, name: str, tmp_path: Path) -> None:
    kind, options = family_of(family), OPTIONS[name]
    own = {size: value for size, value in WIDE.items() if size != "head_dim" or kind.model_type != "falcon"}
    model = build(replace(kind, options={**kind.options, **own, "tie_word_embeddings": family == "llama"}))
    exact = options.activations == "float"
    require_predicted(write_checkpoint(tmp_path / "checkpoint", model), options, 0 if exact else 0.02)


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
    decoder, _ = build_decoder(checkpoint, options, scratch=tmp_path)
    assert streamed - bundle == sum(tensor.nbytes for tensor in on_disk(decoder.quantization))
    predicted = dry_run(TINY, options).files
    assert bundle == predicted["model.onnx.data"]


def on_disk(quantization: Quantization) -> Iterator[Tensor]:
    """The codes and scales of a streamed export that are in files without a name, each once."""
    for name, layer in quantization.layers.items():
        if not (quantization.tied and name == "lm_head"):
            yield layer.codes
        if not quantization.limbs:
            yield layer.scale
    if quantization.embedding is not None:
        yield quantization.embedding.codes


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
