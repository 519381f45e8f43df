"""ONNX Runtime's CUDA provider without a GPU: what it takes, captures, launches and copies on CUDA libraries that do nothing.

`make cuda-setup` installs it. Values and times are those of a GPU alone: test_gpu.py."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch

from spaceport.exporter.checkpoint import quiet_libraries
from spaceport.exporter.export import ExportOptions
from spaceport.graphs.contract.formats import FORMATS
from spaceport.graphs.contract.manifest import MODEL_FILE
from spaceport.runtime.backends.graph_file import operators
from spaceport.tools.cli.inspect import CUDA_OPERATORS
from stand_in_cuda.libraries import environment
from support.exported import bundle_of
from support.families import FAMILIES, build, family_of, graph_of
from support.paths import DEMO, DOCS, TESTS, TINY
from support.programs import Missing

pytestmark = [pytest.mark.nightly, pytest.mark.torch]

LEG = TESTS / "stand_in_cuda" / "leg.py"
DTYPES = ("float16", "bfloat16")

Found = dict[str, Any]


@pytest.fixture(scope="module")
def variables(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment of a process that has ONNX Runtime with CUDA."""
    try:
        return environment(tmp_path_factory.mktemp("cuda"))
    except Missing as reason:
        pytest.skip(str(reason))


def found_of(variables: Mapping[str, str], kind: str, folder: Path, paths: Mapping[str, Path]) -> dict[str, Found]:
    """What a process with CUDA found, which prints no warnings."""
    command = [sys.executable, str(LEG), kind, str(folder), *(f"{name}={path}" for name, path in paths.items())]
    done = subprocess.run(command, env=variables, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    found: dict[str, Found] = json.loads(done.stdout)
    return found


@pytest.fixture(scope="module")
def bundles() -> dict[str, Path]:
    """Bundles of 5 and 3 layers in both types, and with the operator Attention."""
    return {
        f"{checkpoint.name} {dtype}": bundle_of(checkpoint, ExportOptions(FORMATS[dtype]))
        for checkpoint in (DEMO, TINY)
        for dtype in DTYPES
    } | {
        f"{checkpoint.name} operator": bundle_of(checkpoint, ExportOptions(FORMATS["float16"], attention="operator"))
        for checkpoint in (DEMO, TINY)
    }


@pytest.fixture(scope="module")
def steps(
    variables: dict[str, str], bundles: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Found]:
    return found_of(variables, "steps", tmp_path_factory.mktemp("steps"), bundles)


def test_a_step_is_captured_and_replayed_in_place_with_one_copy_each_way(steps: dict[str, Found]) -> None:
    for found in steps.values():
        assert found["notes"] == []
        captured, replayed = found["captured"], found["replayed"]
        assert captured["captures"] == 1
        assert captured["waits"] == 0, "a capture allocates nothing and waits for nothing"
        assert set(captured["copies"].values()) == {0}, "neither of KV buffers nor between the GPU and the host"
        assert found["in place"]
        assert (found["replays"], found["stale"]) == (found["steps"], 0)
        copies, copied = replayed["copies"], replayed["bytes"]
        assert (copies["HtoD"], copies["DtoH"], copies["DtoD"]) == (found["steps"], found["steps"], 0)
        assert copied["HtoD"] <= found["steps"] * found["input bytes"]
        assert copied["DtoH"] == found["steps"] * found["token bytes"]


def of_a_layer(steps: dict[str, Found], kind: str, counted: str) -> float:
    """What a layer adds to a captured step."""
    deep, flat = steps[f"model {kind}"], steps[f"tiny {kind}"]
    added: float = (deep["captured"][counted] - flat["captured"][counted]) / (deep["layers"] - flat["layers"])
    return added


@pytest.mark.parametrize(
    ("kind", "kernels", "products"), [("float16", 20, 9), ("bfloat16", 20, 9), ("operator", 23, 7)]
)
def test_a_layer_launches_as_many_kernels_as_the_page_says(
    steps: dict[str, Found], kind: str, kernels: int, products: int
) -> None:
    assert (of_a_layer(steps, kind, "kernels"), of_a_layer(steps, kind, "products")) == (kernels, products)
    row = next(line for line in (DOCS / "gpus.md").read_text("utf-8").splitlines() if "launches per layer" in line)
    assert f" {kernels} kernels, {products} products " in row
    fused = [name for name in steps[f"model {kind}"]["captured"]["names"] if "attention_kernel_batched" in name]
    assert bool(fused) == (kind == "operator"), "memory-efficient attention"


def test_nodes_on_the_cpu_are_those_that_inspect_names(variables: dict[str, str], tmp_path: Path) -> None:
    """Of every family: computations of shapes, and what inspect expects to have no kernel; values are copied for no other."""
    quiet_libraries()
    graphs = {
        family.name: graph_of(family, build(family, torch.float16), "scatter")[0]
        for family in FAMILIES
        if "scatter" in family.lowerings
    }
    for name, found in found_of(variables, "placed", tmp_path, graphs).items():
        expected = operators(graphs[name].read_bytes()) - CUDA_OPERATORS
        assert bool(found["notes"]) == bool(expected), f"{name}: {found['notes']}, inspect expects {expected}"
        assert expected <= set(found["on the CPU"])
        assert expected or not found["copies"], name


def test_an_operator_without_a_kernel_is_named_and_turns_cuda_graphs_off(
    variables: dict[str, str], tmp_path: Path
) -> None:
    graph, _ = graph_of(family_of("llama"), build(family_of("llama"), torch.float16), "scatter")
    model = onnx.load(graph)
    first = next(node for node in model.graph.node if node.op_type == "Softmax")
    value, first.input[0] = first.input[0], "bent"
    position = list(model.graph.node).index(first)
    model.graph.node.insert(position, onnx.helper.make_node("Atan", [value], ["bent"], name="bend"))
    onnx.save(model, tmp_path / MODEL_FILE)
    (found,) = found_of(variables, "placed", tmp_path, {"bent": tmp_path / MODEL_FILE}).values()
    assert found["notes"] == ["on the CPU, not on the GPU: Atan bend"]
    assert found["copies"] == 2
    assert "Atan" not in CUDA_OPERATORS
