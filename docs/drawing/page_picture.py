"""The picture of the page of a service: a race over one prompt.

Run `spaceport serve BUNDLE`, then `python docs/drawing/page_picture.py URL PROMPT`: it writes docs/page.webp. The machine
should do nothing else. It needs Chromium and the package playwright.
"""

from __future__ import annotations

import shutil
import sys
from base64 import b64decode, b64encode
from pathlib import Path

from playwright.sync_api import sync_playwright

PICTURE = Path(__file__).parents[1] / "page.webp"
_LONGEST = 300_000  # milliseconds
_TO_WEBP = """async source => {
  const picture = new Image();
  picture.src = source;
  await picture.decode();
  const canvas = document.createElement('canvas');
  [canvas.width, canvas.height] = [picture.width, picture.height];
  canvas.getContext('2d').drawImage(picture, 0, 0);
  return canvas.toDataURL('image/webp', 0.9);
}"""


def draw(url: str, prompt: str) -> None:
    """Write the picture."""
    with sync_playwright() as playwright:
        chromium = shutil.which("chromium") or shutil.which("google-chrome")
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1120, "height": 700}, color_scheme="light")
        page.goto(url)
        page.locator("#model option").first.wait_for(state="attached")
        page.check("#race")
        page.fill("#prompt", prompt)
        page.keyboard.press("Enter")
        page.locator(".race .result").wait_for(timeout=_LONGEST)
        page.locator('#send:has-text("Send")').wait_for()
        screenshot = b64encode(page.screenshot(animations="disabled")).decode()
        address: str = browser.new_page().evaluate(_TO_WEBP, f"data:image/png;base64,{screenshot}")
        PICTURE.write_bytes(b64decode(address.partition(",")[2]))
        browser.close()


if __name__ == "__main__":
    draw(*sys.argv[1:3])
