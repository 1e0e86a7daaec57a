"""Record the page of `retro serve`: a passage and what the model copies from neighbors as an animation, or a picture of each view.

    retro serve retro-demo/datastore --checkpoint retro-demo/retro
    python -m docs.record_page http://127.0.0.1:8080 docs/where-it-helps.gif
    python -m docs.record_page http://127.0.0.1:8080 views/ --question "What is an index?"

It needs Playwright, Pillow and Chromium (Debian's package `chromium`), as the tests of the page do.
"""

import argparse
import io
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from PIL import Image

_SIZE = {"width": 980, "height": 640}  # from 960 on, neighbors are next to the text
_FIRST, _TOKEN, _LAST = 2500, 1000, 2500  # milliseconds
_TOKENS = 6  # that the pointer visits
_COLORS = 128
_PATIENCE = 120_000  # milliseconds until an answer is there
_ANSWERED = {
    "ask": ".pane:first-child:not(.running) .answer[aria-busy=false]",
    "generation": ".strip b, .first-difference",
    "passage": ".token.helped",
    "neighbors": ".neighbor",
    "trace": ".strip",
    "datastore": "table",
}
"""What a view shows when its answer is there."""


def record(url: str) -> list[tuple[Image.Image, int]]:
    """Frames of *Where it helps* and their milliseconds."""
    frames: list[tuple[Image.Image, int]] = []
    with _opened() as page:

        def keep(milliseconds: int) -> None:
            page.wait_for_timeout(100)
            frames.append((Image.open(io.BytesIO(page.screenshot())).convert("RGB"), milliseconds))

        page.goto(f"{url}/#/passage")
        page.locator("#passage .token.helped").first.wait_for(timeout=_PATIENCE)
        keep(_FIRST)
        text = page.locator("#passage .tokens")
        text.evaluate("text => window.scrollBy(0, text.closest('.passage').getBoundingClientRect().top - 12)")
        keep(_FIRST // 2)
        for token in _visited(text):
            token.hover()
            keep(_TOKEN)
        frames[-1] = (frames[-1][0], _LAST)
    return frames


def picture_views(url: str, folder: Path, question: str) -> None:
    """Write `VIEW.png` for each view of the page; *Ask* only for a model that chats."""
    folder.mkdir(parents=True, exist_ok=True)
    with _opened() as page:
        page.goto(url)
        page.locator("[role=tab][aria-selected=true]").wait_for(timeout=_PATIENCE)
        views = [tab.get_attribute("data-view") for tab in page.locator("[role=tab]").all()]
        for view in views:
            page.goto(f"{url}/#/{view}?{urlencode({'text': question}) if view == 'ask' else ''}")
            page.reload()
            if view == "ask" and not page.locator("#ask form").is_visible():
                continue
            page.locator(f"#{view} {_ANSWERED[view]}").first.wait_for(timeout=_PATIENCE)
            page.screenshot(path=folder / f"{view}.png")


@contextmanager
def _opened() -> Iterator[Any]:
    """A page in Chromium."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        chromium = shutil.which("chromium") or shutil.which("chromium-browser")
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox", "--disable-gpu"])
        yield browser.new_page(viewport=_SIZE, color_scheme="light", reduced_motion="reduce")
        browser.close()


def _visited(text: Any) -> list[Any]:
    """Copied tokens of a text at equal distances."""
    copied = text.locator(".token.helped.copied").all() or text.locator(".token.helped").all()
    return copied[:: max(1, len(copied) // _TOKENS)][:_TOKENS]


def main() -> None:
    """Write the GIF or the pictures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url", help="address of a running `retro serve` with a checkpoint")
    parser.add_argument("output", type=Path, help="a file *.gif, or a folder for a picture of each view")
    parser.add_argument("--question", default="What is an index?", help="for the picture of Ask")
    arguments = parser.parse_args()
    if arguments.output.suffix != ".gif":
        picture_views(arguments.url, arguments.output, arguments.question)
        return
    images, milliseconds = zip(*record(arguments.url), strict=True)
    both = Image.new("RGB", (_SIZE["width"], 2 * _SIZE["height"]))
    for number, image in enumerate((images[0], images[-1])):
        both.paste(image, (0, number * _SIZE["height"]))
    palette = both.quantize(_COLORS)
    first, *others = (image.quantize(palette=palette, dither=Image.Dither.NONE) for image in images)
    first.save(arguments.output, save_all=True, append_images=others, duration=milliseconds, loop=0, optimize=True)


if __name__ == "__main__":
    main()
