"""Record the page of `retro serve` as an animation: the passage that it opens with, and what the model copies from
neighbors.

    retro serve retro-demo/datastore --checkpoint retro-demo/retro
    python -m docs.record_page http://127.0.0.1:8080 docs/where-it-helps.gif

It needs Playwright, Pillow and Chromium (Debian's package `chromium`), as the tests of the page do.
"""

import argparse
import io
import shutil
from pathlib import Path
from typing import Any

from PIL import Image

_SIZE = {"width": 980, "height": 640}  # from 960 on, neighbors are next to the text
_FIRST, _TOKEN, _LAST = 2500, 1000, 2500  # milliseconds
_TOKENS = 6  # that the pointer visits
_COLORS = 128
_PATIENCE = 120_000  # milliseconds until the passage is scored


def record(url: str) -> list[tuple[Image.Image, int]]:
    """Frames of the page and their milliseconds."""
    from playwright.sync_api import sync_playwright

    frames: list[tuple[Image.Image, int]] = []
    with sync_playwright() as playwright:
        chromium = shutil.which("chromium") or shutil.which("chromium-browser")
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox", "--disable-gpu"])
        page = browser.new_page(viewport=_SIZE, color_scheme="light", reduced_motion="reduce")

        def keep(milliseconds: int) -> None:
            page.wait_for_timeout(100)
            frames.append((Image.open(io.BytesIO(page.screenshot())).convert("RGB"), milliseconds))

        page.goto(url)
        page.locator("#passage .token.helped").first.wait_for(timeout=_PATIENCE)
        keep(_FIRST)
        row = page.locator("#passage .chunk-row:not(.folded)").first
        row.evaluate("row => window.scrollBy(0, row.closest('.passage').getBoundingClientRect().top - 12)")
        keep(_FIRST // 2)
        for token in _visited(row):
            token.hover()
            keep(_TOKEN)
        frames[-1] = (frames[-1][0], _LAST)
        browser.close()
    return frames


def _visited(row: Any) -> list[Any]:
    """Copied tokens of a chunk at equal distances."""
    copied = row.locator(".token.helped.copied").all() or row.locator(".token.helped").all()
    return copied[:: max(1, len(copied) // _TOKENS)][:_TOKENS]


def main() -> None:
    """Write the GIF."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url", help="address of a running `retro serve` with a checkpoint")
    parser.add_argument("output", type=Path, help="the GIF")
    arguments = parser.parse_args()
    images, milliseconds = zip(*record(arguments.url), strict=True)
    both = Image.new("RGB", (_SIZE["width"], 2 * _SIZE["height"]))
    for number, image in enumerate((images[0], images[-1])):
        both.paste(image, (0, number * _SIZE["height"]))
    palette = both.quantize(_COLORS)
    first, *others = (image.quantize(palette=palette, dither=Image.Dither.NONE) for image in images)
    first.save(arguments.output, save_all=True, append_images=others, duration=milliseconds, loop=0, optimize=True)


if __name__ == "__main__":
    main()
