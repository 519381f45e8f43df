"""KServe schema: JSON schemas of KServe's objects, from the models in its Python package, which is not imported."""

from __future__ import annotations

import ast
import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any

_PLAIN = {"str": "string", "int": "integer", "bool": "boolean", "float": "number", "object": "object"}
_KUBERNETES = "io.k8s.api.core.v1."


def kserve_schema(kind: str, definitions: dict[str, Any]) -> dict[str, Any]:
    """The schema of an object such as V1beta1InferenceService; `definitions` are those of Kubernetes."""
    spec = find_spec("kserve")
    assert spec is not None
    assert spec.submodule_search_locations is not None
    found: dict[str, Any] = dict(definitions)
    _add(kind, Path(spec.submodule_search_locations[0]) / "models", found)
    return {"$ref": f"#/$defs/{kind}", "$defs": found}


def _add(kind: str, models: Path, found: dict[str, Any]) -> None:
    """Add the schema of a model, and of those that it is made of; unknown fields are refused."""
    types, names = _fields(models / f"{_file_name(kind)}.py")
    properties: dict[str, Any] = {}
    found[kind] = {"type": "object", "additionalProperties": False, "properties": properties}
    for field, kind_of_field in types.items():
        properties[names[field]] = _schema(kind_of_field, models, found)


def _fields(file: Path) -> tuple[dict[str, str], dict[str, str]]:
    """The types of a model's fields, and their names in YAML."""
    assigned = {
        node.targets[0].id: node.value
        for node in ast.walk(ast.parse(file.read_text("utf-8")))
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)
    }
    return ast.literal_eval(assigned["openapi_types"]), ast.literal_eval(assigned["attribute_map"])


def _schema(kind: str, models: Path, found: dict[str, Any]) -> dict[str, Any]:
    if item := re.fullmatch(r"list\[(.+)\]", kind):
        return {"type": "array", "items": _schema(item[1], models, found)}
    if item := re.fullmatch(r"dict\(str, (.+)\)", kind):
        return {"type": "object", "additionalProperties": _schema(item[1], models, found)}
    if kind in _PLAIN:
        return {"type": _PLAIN[kind]}
    if (known := f"{_KUBERNETES}{kind.removeprefix('V1')}") in found:
        return {"$ref": f"#/$defs/{known}"}
    if kind not in found and (models / f"{_file_name(kind)}.py").exists():
        _add(kind, models, found)
    return {"$ref": f"#/$defs/{kind}"} if kind in found else {}  # {}: what our files do not use


def _file_name(kind: str) -> str:
    """The module of a model: v1beta1_model_spec for V1beta1ModelSpec."""
    words = re.sub(r"([A-Z]+)([A-Z][a-z])", r"\1_\2", kind)
    return re.sub(r"([a-z0-9])([A-Z])", r"\1_\2", words).lower()
