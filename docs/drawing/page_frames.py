"""Page frames: how many frames per second Chromium draws of the page while tokens arrive fast.

Run `python docs/drawing/page_frames.py TRACE [TOKENS]`, with a file of `spaceport generate --trace TRACE`: its steps are sent to
the page again and again, 1,000 tokens per second, until there are TOKENS (5,000). The median of three answers is printed.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from itertools import cycle
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import uvicorn
from chromium import open_browser, running
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from spaceport.serving.application import page_routes

RATE = 1000  # tokens per second
ROUNDS = 3

COUNT_FRAMES = """() => {
  window.frames_drawn = 0;
  window.counting = performance.now();
  const count = () => { window.frames_drawn += 1; requestAnimationFrame(count); };
  requestAnimationFrame(count);
}"""
FRAMES = "() => window.frames_drawn / ((performance.now() - window.counting) / 1000)"


def events(trace: dict[str, Any], tokens: int) -> list[tuple[int, str]]:
    """Events of an answer, each with the number of tokens up to it."""
    steps = [step for step in trace["steps"] if any(rows["generated"] for rows in step["rows"])]
    known = {"threads": trace["threads"][:1], "texts": trace["texts"]}
    found: list[tuple[int, str]] = []
    sent = 0
    for step in cycle(steps):
        if sent >= tokens:
            return found
        sent += sum(rows["generated"] for rows in step["rows"])
        text = "".join("".join(rows["pieces"]) for rows in step["rows"])
        moved = {**step, "kv_slots": len(trace["prompt"]) + sent}
        growth = {"steps": [moved], **(known if not found else {"threads": [], "texts": {}})}
        found.append((sent, event({"delta": {"content": text}, "spaceport": growth})))
    raise ValueError("the trace has no step that generates a token")


def event(choice: dict[str, Any]) -> str:
    return f"data: {json.dumps({'choices': [{'index': 0, **choice}]})}\n\n"


def service(trace: dict[str, Any], tokens: int) -> Starlette:
    """The page, and an endpoint that answers with the events at a fixed rate."""
    prepared = events(trace, tokens)

    async def sent() -> AsyncIterator[str]:
        started = perf_counter()
        for count, one in prepared:
            await asyncio.sleep(max(0.0, started + count / RATE - perf_counter()))
            yield one
        yield event({"delta": {}, "spaceport": {"ending": "end"}})
        yield "data: [DONE]\n\n"

    async def answer(_: Request) -> Response:
        return StreamingResponse(sent(), media_type="text/event-stream")

    async def models(_: Request) -> Response:
        return JSONResponse({"data": [{"id": "recorded", "has_chat_template": True}]})

    routes = [Route("/v1/chat/completions", answer, methods=["POST"]), Route("/v1/models", models)]
    return Starlette(routes=[*page_routes(), *routes])


def measured(page: Any, url: str, tokens: int) -> tuple[float, float]:
    """Frames per second while one answer grows, and its seconds."""
    page.goto(url)
    page.locator("#model option").first.wait_for(state="attached")
    page.fill("#prompt", "Go on.")
    started = perf_counter()
    page.keyboard.press("Enter")
    page.evaluate(COUNT_FRAMES)
    page.locator('#send:has-text("Send")').wait_for(timeout=30_000 + tokens * 20)
    return float(page.evaluate(FRAMES)), perf_counter() - started


def main(file: Path, tokens: int = 5000) -> None:
    """Print frames per second and the seconds of an answer."""
    server = uvicorn.Server(uvicorn.Config(service(json.loads(file.read_text()), tokens), port=0, log_level="warning"))
    with running(server) as url, open_browser() as browser:
        page = browser.new_page(viewport={"width": 1120, "height": 700})
        rounds = [measured(page, url, tokens) for _ in range(ROUNDS)]
    frames, seconds = (median(values) for values in zip(*rounds, strict=True))
    print(f"{tokens} tokens in {seconds:.1f} s: {frames:.0f} frames per second")


if __name__ == "__main__":
    main(Path(sys.argv[1]), *map(int, sys.argv[2:3]))
