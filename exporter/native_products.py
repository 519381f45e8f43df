"""Give the products of a traced graph to native operators, for models of which they compute nothing else."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import onnx_ir.passes.common as passes
from torch import Tensor, nn
from transformers import PreTrainedModel

from spaceport.exporter.graph_passes import constant, lazy
from spaceport.exporter.native_weights import Matrix, format_of_matrix, rounded
from spaceport.exporter.quantized_weights import matmuls_of
from spaceport.graphs.contract.manifest import MODEL_FILE
from spaceport.graphs.parts import BLOCK
from spaceport.graphs.quantization import linear_modules
from spaceport.graphs.streamed_weights import values_of
from spaceport.kernels.functions import add_functions
from spaceport.kernels.native_library import DOMAIN, VERSION


def native_matrices(model: PreTrainedModel, format_name: str) -> dict[str, Matrix]:
    """The matrices of linear modules in a native format, by name; the output embedding in that of tables."""
    head = model.get_output_embeddings()
    names = {module: name for name, module in model.named_modules()}
    modules: dict[str, nn.Linear] = dict(linear_modules(model))
    matrices = {
        name: rounded(module.weight, format_of_matrix(name, module.weight, format_name))
        for name, module in modules.items()
        if _fits(module)
    }
    if type(head) is nn.Linear and _fits(head):
        matrices[names[head]] = rounded(head.weight, format_name, table=True)
    return matrices


def _fits(module: nn.Linear) -> bool:
    return module.in_features % BLOCK == 0


def store_native_products(model: ir.Model, weights: Mapping[str, Tensor], matrices: Mapping[str, Matrix]) -> None:
    """Replace the matmuls with these weights by native products."""
    for node, name in matmuls_of(model, weights):
        matrix, graph = matrices[name], model.graph
        packed = lazy(partial(_packed, matrix), ir.DataType.UINT8, (matrix.bytes,))
        width = constant(graph, f"native.width.{matrix.outputs}", ir.tensor(np.array([matrix.outputs], np.int64)))
        inputs = constant(graph, f"native.inputs.{matrix.inputs}", ir.tensor(np.array([-1, matrix.inputs], np.int64)))
        shape = ir.node("Shape", [node.inputs[0]], {"start": 0, "end": -1})
        flat = ir.node("Reshape", [node.inputs[0], inputs])
        bias = node.inputs[2] if node.op_type == "Gemm" and len(node.inputs) > 2 else None
        product = ir.node(
            "NormProduct",
            [flat.outputs[0], None, None, constant(graph, f"{name}.packed", packed), bias],
            {
                "norm": "none",
                "epsilon": 0.0,
                "activation": "none",
                "widths": [matrix.outputs],
                "formats": matrix.format.name,
                "rank": 0,
            },
            domain=DOMAIN,
        )
        whole = ir.node("Concat", [shape.outputs[0], width], {"axis": 0})
        back = ir.node("Reshape", [product.outputs[0], whole.outputs[0]])
        new, old = [shape, flat, product, whole, back], node.outputs[0]
        ir.convenience.replace_nodes_and_values(graph, node, [node], new, [old], back.outputs)
    model.opset_imports[DOMAIN] = VERSION
    passes.RemoveUnusedNodesPass()(model)


def add_bodies(folder: Path) -> None:
    """Add the functions of native operators to the graph in a folder."""
    model = onnx.load(str(folder / MODEL_FILE), load_external_data=False)
    add_functions(model)
    (folder / MODEL_FILE).write_bytes(model.SerializeToString())


def weights_of(model: PreTrainedModel, names: Mapping[str, object]) -> dict[str, Tensor]:
    """The weights of linear modules by name."""
    return {name: values_of(model.get_submodule(name).weight) for name in names}  # type: ignore[arg-type]


def _packed(matrix: Matrix) -> ir.TensorProtocol:
    return ir.tensor(np.concatenate(list(matrix.packed())))
