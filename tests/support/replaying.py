"""Replaying: a session that replays calls as CUDA graphs do, with the addresses that were bound at capture."""

from __future__ import annotations

from threading import get_ident
from typing import Any

import onnxruntime as ort


class ReplayingSession:
    """An onnxruntime session on the CPU."""

    def __init__(self, session: ort.InferenceSession) -> None:
        self._session = session
        self.captured: dict[tuple[int, str], Recorded] = {}  # by OS thread and graph id, as in onnxruntime
        self.replays = 0
        self.plain = 0

    def io_binding(self) -> Recorded:
        return Recorded(self._session)

    def run_with_iobinding(self, binding: Recorded, options: ort.RunOptions) -> None:
        number = options.get_run_config_entry("gpu_graph_id")
        if number == "-1":
            self.plain += 1
            self._session.run_with_iobinding(binding.binding)
            return
        key = (get_ident(), number)
        self.replays += key in self.captured
        graph = self.captured.setdefault(key, binding.copy())
        for _ in range(3):  # a capture runs the graph more than once
            self._session.run_with_iobinding(graph.binding)


class Recorded:
    """A binding that records the bound addresses."""

    def __init__(self, session: ort.InferenceSession) -> None:
        self.binding = session.io_binding()
        self._session = session
        self._inputs: dict[str, tuple[Any, ...]] = {}
        self._outputs: dict[str, tuple[Any, ...]] = {}

    def bind_input(self, name: str, *address: Any) -> None:
        self._inputs[name] = address
        self.binding.bind_input(name, *address)

    def bind_output(self, name: str, *address: Any) -> None:
        self._outputs[name] = address
        self.binding.bind_output(name, *address)

    def copy(self) -> Recorded:
        """The same addresses, in a binding that stays unchanged."""
        copy = Recorded(self._session)
        for name, address in self._inputs.items():
            copy.bind_input(name, *address)
        for name, address in self._outputs.items():
            copy.bind_output(name, *address)
        return copy

    def get_outputs(self) -> Any:
        return self.binding.get_outputs()

    def get_outputs_as_ortvaluevector(self) -> Any:
        return self.binding.get_outputs_as_ortvaluevector()
