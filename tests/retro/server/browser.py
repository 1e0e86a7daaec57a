"""Tests in a real Chromium: Playwright drives the system's (Debian package `chromium`). Without it they are skipped."""

import json
import shutil
from typing import Any

import pytest

from tests.conftest import PATIENCE
from tests.retro.server.conftest import TEXT

sync_api = pytest.importorskip("playwright.sync_api")
expect, Page = sync_api.expect, sync_api.Page
expect.set_options(timeout=1000 * PATIENCE)

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
MARKS = [pytest.mark.browser, pytest.mark.skipif(not CHROMIUM, reason="no Chromium (Debian's package chromium)")]
ARGUMENTS = ("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking")
VIEWS = ("ask", "generation", "passage", "neighbors", "trace", "datastore")
BUTTONS = {
    "neighbors": "Find neighbors",
    "passage": "Show where neighbors help",
    "generation": "Write on",
    "trace": "Find where it occurs",
}
LONG = TEXT * 6
ASKED = {"neighbors": LONG, "passage": LONG, "generation": TEXT, "trace": LONG}
PHONE = {"viewport": {"width": 390, "height": 844}, "has_touch": True, "is_mobile": True}
LAPTOP = {"viewport": {"width": 1366, "height": 768}}


def form_of(view: str) -> str:
    """Return the address of a view that begins with its empty form, not with an example."""
    return f"#/{view}?text="


def submit(page: Page, view: str, text: str) -> None:
    """Fill the form of a view, which must be shown, and submit it."""
    change = page.locator(f"#{view}").get_by_role("button", name="Change text")
    if change.is_visible():
        change.click()
    page.locator(f"#{view} textarea").fill(text)
    page.get_by_role("button", name=BUTTONS[view]).click()


def ask(page: Page, view: str, text: str = "") -> None:
    """Open a view, submit a text (default: one that fits the model's context) and wait for the whole answer."""
    page.evaluate("address => (location.hash = address)", form_of(view))
    expect(page.locator(f"#{view}")).to_be_visible()
    submit(page, view, text or ASKED[view])
    shown = {"neighbors": ".neighbor", "passage": ".token:not(.first)", "generation": ".pane", "trace": ".traced"}[view]
    expect(page.locator(f"#{view} .results {shown}").first).to_be_visible()
    expect(page.locator(".pane.running")).to_have_count(0)


def download(page: Page, view: str) -> dict[str, Any]:
    """Save the answer of a view, which must be shown, and return it."""
    page.locator(f"#{view}-strip summary").click()
    with page.expect_download() as saved:
        page.locator(f"#{view}").get_by_role("button", name="Download JSON").click()
    answer: dict[str, Any] = json.loads(saved.value.path().read_text())
    return answer
