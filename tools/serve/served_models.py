"""Served models: the open bundles of a service by name."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from hashlib import sha256
from typing import Any

from spaceport.graphs.contract.manifest import TEMPLATE_FILE
from spaceport.runtime.session import Runtime
from spaceport.runtime.tool_calls.functions import ToolFormat, format_of
from spaceport.tools.serve.failures import Failure


@dataclass(frozen=True)
class ServedModel:
    """An open bundle with the name under which clients ask for it."""

    name: str
    runtime: Runtime
    created: int = field(default_factory=lambda: int(time.time()))

    @cached_property
    def chat_template(self) -> str:
        """The source of the chat template; empty: the model has none."""
        files, bundle = self.runtime.bundle.manifest.files, self.runtime.bundle
        return bundle.read(TEMPLATE_FILE).decode("utf-8", "replace") if TEMPLATE_FILE in files else ""

    @cached_property
    def tool_format(self) -> ToolFormat:
        """How the model writes calls of functions, as its chat template does."""
        return format_of(self.chat_template)

    @cached_property  # each event of a stream has it
    def fingerprint(self) -> str:
        """First digits of the digest of the bundle's manifest, which has the digests of its files."""
        return f"fp_{sha256(self.runtime.bundle.manifest_content).hexdigest()[:16]}"

    def entry(self) -> dict[str, Any]:
        """The model as an entry of the list of models."""
        return {
            "id": self.name,
            "object": "model",
            "created": self.created,
            "owned_by": "spaceport",
            "root": self.name,
            "max_model_len": self.runtime.max_seq_len,
            "has_chat_template": bool(self.chat_template),
        }


class ServedModels:
    """The open bundles of a service by name."""

    def __init__(self, models: list[ServedModel]) -> None:
        self._models = {model.name: model for model in models}

    def __iter__(self) -> Iterator[ServedModel]:
        return iter(self._models.values())

    def find(self, name: str | None) -> ServedModel:
        """The model that a request asks for; a request that names none gets the only one."""
        if name is None and len(self._models) == 1:
            return next(iter(self._models.values()))
        if name is None or name not in self._models:
            known = ", ".join(map(repr, self._models))
            asked = "no model is given" if name is None else f"the model {name!r} does not exist"
            raise Failure(404, f"{asked}: expected {known}", param="model", code="model_not_found")
        return self._models[name]
