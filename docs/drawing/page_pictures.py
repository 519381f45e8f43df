"""Page pictures: a screenshot and an animation of the page of a service, while it answers a question.

Run `python docs/drawing/page_pictures.py BUNDLE LIST QUESTION`: it writes docs/page_live.webp, in which the model answers the
first message with forked threads, and docs/page.webp, a race with the second one.
"""

from __future__ import annotations

import io
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from threading import Thread
from time import monotonic, sleep
from typing import Any

import uvicorn
from PIL import Image

from spaceport.runtime.session import Runtime
from spaceport.serving.application import application
from spaceport.serving.server import Server


@contextmanager
def open_browser() -> Iterator[Any]:
    """A Chromium without a window."""
    from playwright.sync_api import sync_playwright

    found = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if found is None:
        sys.exit("no Chromium is installed: apt-get install chromium")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=found, args=["--no-sandbox"])
        yield browser
        browser.close()


@contextmanager
def running(server: uvicorn.Server) -> Iterator[str]:
    """The address of a server while it runs."""
    thread = Thread(target=server.run)
    thread.start()
    while not server.started:
        sleep(0.1)
    yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    server.should_exit = True
    thread.join()


DOCS = Path(__file__).parents[1]
FRAME = 0.12  # seconds between two frames
LARGEST = (840, 525)  # pixels of the animation
MOST = 90  # frames
SENT = '#send:has-text("Send")'


def main(bundle: Path, listing: str, question: str) -> None:
    """Write both pictures."""
    opener = partial(Runtime.open, bundle, threads=1, max_requests=2, prefix_cache=True)
    app = application({bundle.name.partition(".")[0]: opener})
    server = Server(uvicorn.Config(app, port=0, log_level="warning"), app.state.service)
    with running(server) as url, open_browser() as browser:
        page = browser.new_page(viewport={"width": 1120, "height": 700}, color_scheme="light")
        page.goto(url)
        frames = film(page, listing)
        page.reload()
        page.locator("#model option").first.wait_for(state="attached")
        page.check("#race")
        ask(page, question)
        page.locator(SENT).wait_for(timeout=120_000)
        page.wait_for_timeout(300)
        whole = Image.open(io.BytesIO(page.screenshot()))
    whole.save(DOCS / "page.webp", quality=82, method=6)
    first, *others = [frame.resize(LARGEST, Image.Resampling.LANCZOS) for frame in frames]
    first.save(
        DOCS / "page_live.webp",
        save_all=True,
        append_images=others,
        duration=[*[int(FRAME * 1000)] * len(others), 2500],
        loop=0,
        quality=60,
        method=6,
    )


def ask(page: Any, question: str) -> None:
    """Send a question with settings that show drafts and threads."""
    page.fill("#prompt", question)
    page.keyboard.press("Enter")
    page.locator('#send:has-text("Stop")').wait_for()


def film(page: Any, question: str) -> list[Image.Image]:
    """Frames of the page while it answers with forked threads."""
    page.locator("#model option").first.wait_for(state="attached")
    page.click("#options")
    page.check("#fork")
    page.click("text=Done")
    ask(page, question)
    frames: list[Image.Image] = []
    end = monotonic() + MOST * FRAME
    while monotonic() < end:
        begin = monotonic()
        frames.append(Image.open(io.BytesIO(page.screenshot())))
        if page.locator(SENT).count():
            break
        sleep(max(0.0, FRAME - (monotonic() - begin)))
    page.locator(SENT).wait_for(timeout=120_000)
    page.wait_for_timeout(500)
    frames.append(Image.open(io.BytesIO(page.screenshot())))
    return frames


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:4])
