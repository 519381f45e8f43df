"""Fake runtime: a runner of `python -m benchmarks` that computes nothing, or fails as its settings say."""

from __future__ import annotations

import sys
import threading
import time
from pathlib import Path
from typing import Any


class FakeRunner:
    """Settings: step (seconds), log (file of calls), fails (a call), spins (seconds after each call)."""

    PACKAGES = ()

    def __init__(self, settings: dict[str, Any]) -> None:
        if settings.get("fails") == "open":
            raise RuntimeError("no model today")
        if "spaceport" in sys.modules:
            raise RuntimeError("a worker of another runtime imported spaceport")
        self.settings, self.step = settings, float(settings["step"])

    def decode(self, prompt: list[int], tokens: int, ends: list[int]) -> dict[str, Any]:
        """As many tokens as fit, the last one an end token."""
        self._call("decode", prompt)
        text = [*prompt[: tokens - 1], *ends[:1]]
        return {"output": text, "tokens": len(text), "seconds": self.step * len(text), "steps": len(text) // 2}

    def rows(self, prompt: list[int], rows: list[int], repeats: int) -> list[float]:
        self._call("rows", prompt)
        return [self.step * len(rows)] * repeats

    def prefill(self, prompt: list[int]) -> float:
        self._call("prefill", prompt)
        return self.step * len(prompt)

    def concurrent(self, prompts: list[list[int]], tokens: int) -> tuple[int, float]:
        self._call("concurrent", prompts[0])
        return len(prompts) * tokens, self.step * tokens

    def _call(self, name: str, prompt: list[int]) -> None:
        if self.settings.get("fails") == name:
            raise RuntimeError(f"no {name} today")
        print("noise on stdout")
        begun = time.monotonic()
        with Path(self.settings["log"]).open("a", encoding="utf-8") as file:
            file.write(f"{self.settings['model']} {name} {prompt[0]} {begun}\n")
        if spins := self.settings.get("spins"):
            threading.Thread(target=_spin, args=(spins,), daemon=True).start()


def _spin(seconds: float) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        pass
