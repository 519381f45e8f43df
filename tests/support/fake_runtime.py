"""Fake runtime: a runner of `bench compare` that computes nothing, or fails as its options say."""

from __future__ import annotations

import sys
import threading
import time
from pathlib import Path
from typing import Any


class FakeRunner:
    """Options: step (seconds), log (file of turns), fails (measure), spins (seconds after each call), forever, hangs."""

    LIBRARIES = ("json",)
    PACKAGES = ()

    def __init__(self, settings: dict[str, Any]) -> None:
        if settings.get("fails") == "open":
            raise RuntimeError("no model today")
        self.settings = settings
        if "spaceport" in sys.modules:
            raise RuntimeError("a worker of another runtime imported spaceport")
        if settings.get("forever"):
            threading.Thread(target=_spin, args=(60.0,), daemon=True).start()

    def decode(self, prompt: list[int], tokens: int) -> list[float]:
        self._turn("decode", prompt)
        return [self.settings["step"]] * (tokens - 1)

    def rows(self, prompt: list[int], rows: list[int], repeats: int) -> list[float]:
        raise NotImplementedError("it cannot")

    def prefill(self, prompt: list[int]) -> float:
        self._turn("prefill", prompt)
        return len(prompt) * float(self.settings["step"])

    def requests(self, prompts: list[list[int]], tokens: int) -> tuple[int, float]:
        self._turn("requests", prompts[0])
        return len(prompts) * tokens, tokens * float(self.settings["step"])

    def answer(self, prompt: list[int], tokens: int, ends: list[int], lookup: int) -> dict[str, Any]:
        """As many tokens as fit, the last one an end token; prompt lookup halves the time after the first token."""
        self._turn("answer", prompt)
        step = float(self.settings["step"])
        return {
            "tokens": [*prompt[: tokens - 1], *ends[:1]],
            "first_tokens": 1,
            "first_token_seconds": step,
            "seconds": step * (1 + min(len(prompt), tokens - 1) / (2 if lookup else 1)),
        }

    def _turn(self, name: str, prompt: list[int]) -> None:
        if self.settings.get("fails") == name:
            raise RuntimeError(f"no {name} today")
        if self.settings.get("hangs") == name:
            time.sleep(60)
        print("noise on stdout")
        begun = time.monotonic()
        time.sleep(0.01)
        if log := self.settings.get("log"):
            with Path(log).open("a", encoding="utf-8") as file:
                file.write(f"{name} {self.settings['model']} {prompt[0]} {begun} {time.monotonic()}\n")
        if spins := self.settings.get("spins"):
            threading.Thread(target=_spin, args=(spins,), daemon=True).start()


def _spin(seconds: float) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        pass
