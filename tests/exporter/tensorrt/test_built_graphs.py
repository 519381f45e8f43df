"""Built graphs: TensorRT-RTX builds every family without a GPU, with fused attention where it has a kernel."""

from __future__ import annotations

import re
import shutil
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch

from spaceport.exporter.export import ExportOptions
from spaceport.exporter.tensorrt import to_tensorrt
from spaceport.exporter.tensorrt.append_graph import append_graph
from spaceport.exporter.tensorrt.to_tensorrt import (
    AttentionPlan,
    BuildOptions,
    Library,
    Shapes,
    attention_of,
    logger_of,
    open_library,
)
from spaceport.exporter.to_onnx import to_onnx
from spaceport.graphs.contract.formats import FORMATS
from spaceport.graphs.contract.signature import Signature
from spaceport.graphs.decoder import decoder_of
from spaceport.runtime.bundle import open_bundle, read_manifest
from spaceport.tools.cli import OK, USAGE, run
from support.append_bundle import Attending
from support.exported import bundle_of
from support.families import FAMILIES, Family, build
from support.paths import TINY

pytest.importorskip("tensorrt_rtx", reason="builds with TensorRT-RTX: pip install 'spaceport[tensorrt-rtx]'")

Capture = pytest.CaptureFixture[str]
SHAPES = Shapes(capacity=1024, requests=4, step_rows=64, prompt_rows=512)

# head size 64, as in most large models
WIDE = {"hidden_size": 128, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 64, "sliding_window": 16}
WIDE_HEADS = Family("mistral, wide heads", "mistral", WIDE)


@pytest.fixture(autouse=True)
def own_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Record trusted engines in a folder of the test instead of the user's."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


@cache
def library() -> Library:
    return open_library("tensorrt-rtx")


def attention_in(folder: Path, signature: Signature, target: str = "sm89") -> AttentionPlan:
    """How attention runs in the engine for a target."""
    model = append_graph(folder, signature, SHAPES.capacity)
    engine = to_tensorrt.build(library(), model, folder, signature, BuildOptions(target, SHAPES))
    assert engine.plan.nbytes > 100_000
    assert engine.activation > 0
    return engine.attention


@pytest.mark.parametrize(
    ("attending", "expected"),
    [
        (Attending("float16", head_dim=64, layers=2), AttentionPlan(0, "")),
        (Attending("bfloat16", head_dim=64), AttentionPlan(0, "")),
        (Attending("float32", layers=2), AttentionPlan(2, "TensorRT has no fused kernel for float32")),
        (Attending(head_dim=8), AttentionPlan(1, "TensorRT has no fused kernel for heads of 8")),
        (Attending(head_dim=264), AttentionPlan(1, "TensorRT has no fused kernel for heads of 264")),
        (Attending(head_dim=12), AttentionPlan(1, "TensorRT has no fused kernel for heads of 12", in_graph=True)),
        (
            Attending("float32", head_dim=12, softcap=5.0),
            AttentionPlan(1, "TensorRT has no fused kernel with softcap", in_graph=True),
        ),
    ],
    ids=str,
)
def test_attention_is_fused_where_a_kernel_exists_and_matmuls_elsewhere(
    attending: Attending, expected: AttentionPlan, tmp_path: Path
) -> None:
    manifest = attending.write(tmp_path / "bundle")
    assert attention_in(tmp_path / "bundle", manifest.signature) == expected


def test_attention_is_decomposed_if_the_library_lacks_the_expected_kernel(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another version may support fewer head sizes."""
    monkeypatch.setattr(to_tensorrt, "_FUSED_HEADS", range(8, 257, 8))
    attending = Attending(head_dim=8, layers=2)
    attending.write(tmp_path / "bundle")
    assert attention_of(attending.model(), attending.signature) == AttentionPlan(0, "")
    found = attention_in(tmp_path / "bundle", attending.signature)
    assert found == AttentionPlan(2, f"{library().name} has no fused kernel for it")


def test_the_build_reports_attention_that_is_not_fused(tmp_path: Path, capfd: Capture) -> None:
    folder = tmp_path / "bundle"
    Attending(softcap=5.0).write(folder)
    assert run(["build", str(folder), "--target", "sm89"]) == OK
    assert capfd.readouterr().out.splitlines()[0] == (
        "attention of 1 layer is decomposed into MatMul and Softmax: TensorRT has no fused kernel with softcap"
    )
    (record,) = open_bundle(folder).manifest.engines.values()
    assert record.decomposed == 1
    assert run(["build", str(folder), "--target", "sm89"]) == OK
    assert "TensorRT has no fused kernel with softcap" in capfd.readouterr().out, "also for an existing engine"
    assert run(["inspect", str(folder)]) == OK
    assert "1 layer decomposed" in capfd.readouterr().out


def test_engines_compute_in_float32_with_memory_from_the_runtime() -> None:
    trt = library().module
    config = to_tensorrt._config(library(), trt.Builder(logger_of(trt)), BuildOptions("sm89", SHAPES))
    assert not config.get_flag(trt.BuilderFlag.TF32)
    assert config.get_flag(trt.BuilderFlag.REQUIRE_USER_ALLOCATION)


OLDER = r"--target is {}: {} needs {} or newer; .* exported in another format than {} \(--format\)"


@pytest.mark.parametrize(
    ("name", "target", "older", "message"),
    [
        ("float16", "sm89", None, ""),
        ("float16-float8", "sm89", "sm80", OLDER.format("sm80", "float8", "sm89", "float16-float8")),
        ("bfloat16-int4", "sm80", "sm75", OLDER.format("sm75", "bfloat16", "sm80", "bfloat16-int4")),
        pytest.param("bfloat16", "sm80", None, "", marks=pytest.mark.nightly),
        pytest.param("float16-int4", "sm80", None, "", marks=pytest.mark.nightly),
    ],
)
def test_bundles_are_built_for_gpus_that_support_their_types(
    name: str, target: str, older: str | None, message: str, tmp_path: Path, capfd: Capture
) -> None:
    bundle = bundle_of(TINY, ExportOptions(FORMATS[name], "append"))
    assert attention_in(bundle, read_manifest(bundle).signature, target).decomposed == 0
    if older is not None:  # no engine is built, also not for the target that has the type
        folder = shutil.copytree(bundle, tmp_path / "bundle")
        assert run(["build", str(folder), "--target", f"{target},{older}"]) == USAGE
        (line,) = capfd.readouterr().err.splitlines()
        assert re.search(message, line)
        assert not open_bundle(folder).manifest.engines


@pytest.mark.nightly
@pytest.mark.parametrize("target", ["sm80", "sm89"])
@pytest.mark.parametrize(
    "family",
    [*(family for family in FAMILIES if "append" in family.lowerings), WIDE_HEADS],
    ids=lambda family: family.name,
)
def test_an_engine_of_a_familys_graph_is_built(family: Family, target: str, tmp_path: Path) -> None:
    """In half precision, with one layer, unless layers differ."""
    if not {"layer_types", "max_window_layers", "n_layer", "attn_logit_softcapping"} & set(family.options):
        family = replace(family, options={**family.options, "num_hidden_layers": 1})
    decoder, _ = decoder_of(build(family, torch.float16), "append", "operator" if family.replaceable else "plain")
    to_onnx(decoder, tmp_path)
    attention = attention_in(tmp_path, decoder.signature, target)
    fused = decoder.signature.head_dim >= 16 and family.structure not in ("eager", "softcap")
    assert attention.decomposed == (0 if fused else decoder.signature.layers)
    assert attention.in_graph == (family.structure == "softcap")
