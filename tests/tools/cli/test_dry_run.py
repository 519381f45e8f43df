"""`spaceport export --dry-run` reports sizes without writing, and its options are refused elsewhere."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from spaceport.graphs.contract.faults import OptionFault
from spaceport.runtime.scheduling.capacity import capacity_for
from spaceport.runtime.session import Runtime
from spaceport.tools.cli import cli
from support.paths import TINY


def run(*arguments: object) -> str:
    result = CliRunner().invoke(cli, ["export", *map(str, arguments)], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


def test_a_dry_run_predicts_the_cache_that_the_runtime_allocates(tmp_path: Path, tiny_bundle: Path) -> None:
    limits = ("--max-seq-len", 100, "--max-requests", 3)
    found = json.loads(run(TINY, tmp_path / "bundle", "--dry-run", "--json", *limits))
    assert not list(tmp_path.iterdir())
    with Runtime.open(tiny_bundle, backend="onnxruntime", max_seq_len=100, max_requests=3) as runtime:
        manifest = runtime.bundle.manifest
        slots = capacity_for(manifest, 100)
        assert found["run"]["kv"] == manifest.signature.kv_bytes(3, slots) == slots * 3 * found["run"]["kv_slot"]
        assert found["run"]["kv"] == runtime.engine._memory.nbytes  # type: ignore[attr-defined]
        assert found["parameters"] == manifest.parameters


def test_a_gpu_fits_exactly_what_the_runtime_needs(tmp_path: Path) -> None:
    need = json.loads(run(TINY, tmp_path / "bundle", "--dry-run", "--json"))["run"]["total"]
    for memory, fits in ((need / 1e6, True), ((need - 1) / 1e6, False)):
        found = run(TINY, tmp_path / "bundle", "--dry-run", "--json", "--gpu-memory", f"{memory:.6f}MB")
        assert json.loads(found)["fits"]["gpu"] is fits
    assert "runtime on the GPU" in run(TINY, tmp_path / "bundle", "--dry-run", "--gpu-memory", "24GB")


def test_weights_that_a_cpu_dequantizes_are_counted_as_float32(tmp_path: Path) -> None:
    for activations, dequantized in (("float", True), ("int8x2", False)):
        options = ("--dry-run", "--weights", "int8", "--activations", activations)
        found = json.loads(run(TINY, tmp_path / "bundle", *options, "--json"))
        weights = found["run"]["weights"]
        assert found["run"]["cpu_weights"] == (4 * found["parameters"] if dequantized else weights)
        assert found["run"]["cpu_total"] - found["run"]["total"] == found["run"]["cpu_weights"] - weights
        shown = run(TINY, tmp_path / "bundle", *options)
        assert ("in all on a CPU: weights as float32" in shown) == dequantized


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--gpu-memory", "24GB"), "--gpu-memory has no effect without --dry-run: add --dry-run"),
        (("--dry-run", "--overwrite"), "--overwrite has no effect with --dry-run"),
        (("--dry-run", "--max-seq-len", "100000"), "--max-seq-len is 100000: expected 2 to .* the model's limit"),
        (("--dry-run", "--max-requests", "0"), "--max-requests is 0: expected at least 1"),
    ],
)
def test_an_option_without_effect_or_out_of_range_is_refused(
    arguments: tuple[str, ...], message: str, tmp_path: Path
) -> None:
    with pytest.raises(OptionFault, match=message):
        CliRunner().invoke(cli, ["export", str(TINY), str(tmp_path / "b"), *arguments], catch_exceptions=False)


def test_a_gpu_memory_without_unit_is_refused(tmp_path: Path) -> None:
    result = CliRunner().invoke(cli, ["export", str(TINY), str(tmp_path / "b"), "--dry-run", "--gpu-memory", "24XB"])
    assert result.exit_code
    assert "expected a size above 0 such as 24GB" in result.output
