"""Build attention: fused where TensorRT has a kernel, matmuls elsewhere, and the build reports it."""

from __future__ import annotations

from pathlib import Path

import pytest

from spaceport.exporter.tensorrt import to_tensorrt
from spaceport.exporter.tensorrt.append_graph import append_graph
from spaceport.exporter.tensorrt.profiles import Shapes
from spaceport.exporter.tensorrt.to_tensorrt import (
    AttentionPlan,
    BuildOptions,
    Library,
    attention_of,
    build,
    open_library,
)
from spaceport.graphs.contract.manifest import Manifest
from spaceport.runtime.bundle import open_bundle
from spaceport.tools.cli import run
from spaceport.tools.cli.exit_codes import OK
from support.append_bundle import Attending

pytest.importorskip("tensorrt_rtx", reason="builds with TensorRT-RTX: pip install 'spaceport[tensorrt-rtx]'")

RECIPE = BuildOptions("sm89", Shapes(1024, 4, 64, 512))

Capture = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def own_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Record trusted engines in a folder of the test instead of the user's."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


@pytest.fixture(scope="module")
def library() -> Library:
    return open_library("tensorrt-rtx")


def written_bundle(tmp_path: Path, attending: Attending) -> tuple[Path, Manifest]:
    manifest = attending.write(tmp_path / "bundle")
    return tmp_path / "bundle", manifest


@pytest.mark.parametrize(
    ("attending", "expected"),
    [
        (Attending("float16", head_dim=64, layers=2), AttentionPlan(0, "")),
        (Attending("bfloat16", head_dim=64), AttentionPlan(0, "")),
        (Attending("float32", layers=2), AttentionPlan(2, "TensorRT has no fused kernel for float32")),
        (Attending(head_dim=8), AttentionPlan(1, "TensorRT has no fused kernel for heads of 8")),
        (Attending(head_dim=264), AttentionPlan(1, "TensorRT has no fused kernel for heads of 264")),
        (Attending(head_dim=12), AttentionPlan(1, "TensorRT has no fused kernel for heads of 12", in_graph=True)),
        (Attending(softcap=5.0), AttentionPlan(1, "TensorRT has no fused kernel with softcap", in_graph=True)),
        (
            Attending("float32", head_dim=12, softcap=5.0),
            AttentionPlan(1, "TensorRT has no fused kernel with softcap", in_graph=True),
        ),
    ],
    ids=str,
)
def test_attention_is_fused_where_a_kernel_exists_and_matmuls_elsewhere(
    attending: Attending, expected: AttentionPlan, tmp_path: Path, library: Library
) -> None:
    folder, manifest = written_bundle(tmp_path, attending)
    model = append_graph(folder, manifest.signature, 1024)
    found = build(library, model, folder, manifest.signature, RECIPE)
    assert found.attention == expected
    assert found.activation > 0


def test_attention_is_decomposed_if_the_library_lacks_the_expected_kernel(
    tmp_path: Path, library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another version may support fewer head sizes."""
    monkeypatch.setattr(to_tensorrt, "_FUSED_HEADS", range(8, 257, 8))
    folder, manifest = written_bundle(tmp_path, Attending(head_dim=8, layers=2))
    model = append_graph(folder, manifest.signature, 1024)
    assert attention_of(model, manifest.signature) == AttentionPlan(0, "")
    found = build(library, model, folder, manifest.signature, RECIPE)
    assert found.attention == AttentionPlan(2, f"{library.name} has no fused kernel for it")


def test_the_build_reports_attention_that_is_not_fused(tmp_path: Path, capfd: Capture) -> None:
    folder, _ = written_bundle(tmp_path, Attending(softcap=5.0))
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
