"""Build families: TensorRT-RTX builds an engine from the graph of every family, without a GPU."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch

from spaceport.exporter.tensorrt import to_tensorrt
from spaceport.exporter.tensorrt.append_graph import append_graph
from spaceport.exporter.tensorrt.builder_monitor import BuildMessages, logger_of
from spaceport.exporter.tensorrt.profiles import Shapes
from spaceport.exporter.tensorrt.to_tensorrt import BuildOptions, Library, open_library
from spaceport.exporter.to_onnx import DEFAULT_OPSET, to_onnx
from spaceport.graphs.contract.faults import OptionFault
from spaceport.graphs.contract.signature import Precision, Signature, Weights
from spaceport.graphs.decoder import decoder_of
from spaceport.runtime.bundle import read_manifest
from support.exported import exported_once
from support.families import FAMILIES, Family, build
from support.paths import TINY

pytest.importorskip("tensorrt_rtx", reason="builds with TensorRT-RTX: pip install 'spaceport[tensorrt-rtx]'")

SHAPES = Shapes(capacity=1024, requests=4, step_rows=64, prompt_rows=512)
TARGETS = (pytest.param("sm80", marks=pytest.mark.nightly), "sm89")

# The structures of each run: TensorRT fuses the attention of one, and not of the other. Nightly runs build all.
STRUCTURES = ("plain", "softcap")

# head size 64, as in most large models
WIDE_HEADS = Family(
    "mistral, wide heads",
    "mistral",
    "windowed",
    {
        "hidden_size": 128,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 64,
        "sliding_window": 16,
    },
)


def fewer(family: Family) -> Family:
    """The family with one layer, unless its layers differ."""
    if {"layer_types", "max_window_layers", "n_layer", "attn_logit_softcapping"} & set(family.options):
        return family
    return replace(family, options={**family.options, "num_hidden_layers": 1})


def cases() -> list[object]:
    """Every family with the append lowering; each run covers the structures that matter to TensorRT."""
    return [
        pytest.param(
            fewer(family),
            marks=() if family.each_run and family.structure in STRUCTURES else pytest.mark.nightly,
            id=family.name,
        )
        for family in FAMILIES
        if "append" in family.lowerings
    ]


@cache
def library() -> Library:
    return open_library("tensorrt-rtx")


def exported(family: Family, folder: Path) -> Signature:
    """The family's append graph in half precision."""
    decoder, _ = decoder_of(build(family, torch.float16), "append", "operator" if family.replaceable else "plain")
    to_onnx(decoder, folder, DEFAULT_OPSET["append"])
    return decoder.signature


def attention_in(folder: Path, signature: Signature, target: str) -> to_tensorrt.AttentionPlan:
    """How attention runs in the engine for a target."""
    model = append_graph(folder, signature, SHAPES.capacity)
    engine = to_tensorrt.build(library(), model, folder, signature, BuildOptions(target, SHAPES))
    assert engine.plan.nbytes > 100_000
    return engine.attention


@pytest.mark.slow
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("family", cases())
def test_an_engine_of_a_familys_graph_is_built(family: Family, target: str, tmp_path: Path) -> None:
    signature = exported(family, tmp_path)
    attention = attention_in(tmp_path, signature, target)
    fused = signature.head_dim >= 16 and family.structure not in ("eager", "softcap")
    assert attention.decomposed == (0 if fused else signature.layers)
    assert attention.in_graph == (family.structure == "softcap")


def test_engines_compute_in_float32_with_memory_from_the_runtime() -> None:
    trt = library().module
    config = to_tensorrt._config(library(), trt.Builder(logger_of(trt, BuildMessages())), BuildOptions("sm89", SHAPES))
    assert not config.get_flag(trt.BuilderFlag.TF32)
    assert config.get_flag(trt.BuilderFlag.REQUIRE_USER_ALLOCATION)


@pytest.mark.slow
@pytest.mark.parametrize("target", TARGETS)
def test_heads_of_64_are_built_fused(target: str, tmp_path: Path) -> None:
    signature = exported(fewer(WIDE_HEADS), tmp_path)
    assert attention_in(tmp_path, signature, target) == to_tensorrt.AttentionPlan(0, "")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "weights", "target"),
    [
        pytest.param("bfloat16", "same", "sm80", marks=pytest.mark.nightly),
        ("float16", "float8", "sm89"),
        pytest.param("float16", "int4", "sm80", marks=pytest.mark.nightly),
    ],
)
def test_quantized_bundles_are_built_for_gpus_that_support_the_type(
    tmp_path_factory: pytest.TempPathFactory, dtype: Precision, weights: Weights, target: str
) -> None:
    bundle = exported_once(tmp_path_factory, "append", TINY, dtype, weights)
    signature = read_manifest(bundle).signature
    model = append_graph(bundle, signature, SHAPES.capacity)
    engine = to_tensorrt.build(library(), model, bundle, signature, BuildOptions(target, SHAPES))
    assert engine.attention.decomposed == 0
    if weights == "float8":
        model = append_graph(bundle, signature, SHAPES.capacity)
        with pytest.raises(OptionFault, match=r"--target is sm80: .* without --weights float8"):
            to_tensorrt.build(library(), model, bundle, signature, BuildOptions("sm80", SHAPES))
