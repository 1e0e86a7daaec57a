"""The page can be read and used by everyone: axe-core's rules, contrast of borders and signs, and no sideways scrolling."""

import re

import pytest

from tests.retro.server.browser import BUTTONS, LONG, MARKS, PHONE, Page, ask, expect, form_of

axe = pytest.importorskip("axe_playwright_python.sync_playwright")
pytestmark = MARKS

DESKTOP = {"viewport": {"width": 1280, "height": 900}}


def violations(page: Page) -> list[str]:
    """Return the rules of axe-core that the page breaks, and the first element that does."""
    found = axe.Axe().run(page, options={"resultTypes": ["violations"]}).response["violations"]
    return [f"{each['impact']}: {each['id']} {each['nodes'][0]['target']}" for each in found]


@pytest.mark.parametrize(("scheme", "context"), [("light", DESKTOP), ("dark", PHONE)], ids=["desktop", "phone"])
def test_axe_finds_no_violation_and_no_view_scrolls_sideways(open_page, url: str, scheme: str, context: dict) -> None:
    page = open_page(url + form_of("neighbors"), color_scheme=scheme, **context)

    def check(view: str) -> None:
        assert violations(page) == [], view
        assert page.evaluate("document.documentElement.scrollWidth") == context["viewport"]["width"], view

    page.get_by_text("Words used here").click()
    page.get_by_role("button", name="Add a filter").click()
    check("filter")
    page.get_by_role("button", name="Remove this filter").click()
    for view in BUTTONS:
        page.evaluate("address => (location.hash = address)", form_of(view))
        if view == "generation":
            page.get_by_text("How tokens are chosen").click()
            page.get_by_label("Tokens to write").fill("40")
        ask(page, view, "x" * 40 if view == "generation" else LONG + "x" * 300)
        page.locator(f"#{view}-strip summary").click()
        if view == "passage":
            page.locator("#passage .token").last.click()
        check(view)
    page.locator("#tab-datastore").click()
    expect(page.locator("#datastore table").first).to_be_visible()
    check("datastore")
    page.locator("#tab-neighbors").click()
    page.locator(".neighbor h4 a").first.click()
    expect(page.locator("#document [aria-current]")).to_be_visible()
    check("document")


def test_the_api_description_has_a_form_for_each_endpoint_and_leads_back_to_the_page(open_page, url: str) -> None:
    page = open_page(f"{url}/docs")
    expect(page).to_have_title("HTTP API of tiny")
    operation = page.locator(".opblock", has=page.locator("[data-path='/tokenize']")).first
    operation.click()
    operation.get_by_role("button", name="Execute").click()
    expect(operation.locator(".live-responses-table")).to_contain_text('"count"')
    page.get_by_role("link", name="Page to try it in a browser").click()
    expect(page.get_by_role("tab").first).to_be_visible()


COLORS = """
([selector, property, pseudo]) => [...document.querySelectorAll(selector)].filter((node) => node.checkVisibility()).map((node) => {
  const behind = [];
  for (let each = pseudo || property === "color" ? node : node.parentElement; each; each = each.parentElement) {
    behind.push(getComputedStyle(each).backgroundColor);
  }
  return [getComputedStyle(node, pseudo)[property], behind];
})
"""


def rgba(color: str) -> tuple[float, float, float, float]:
    """Read `rgb(…)` or `color(srgb …)` as parts from 0 to 1."""
    numbers = [float(each) for each in re.findall(r"[\d.]+(?:e-?\d+)?", color)]
    scale = 1.0 if color.startswith("color(") else 255.0
    alpha = numbers[3] if len(numbers) > 3 else 1.0
    return numbers[0] / scale, numbers[1] / scale, numbers[2] / scale, alpha


def contrast(color: str, behind: list[str]) -> float:
    """Return the contrast of WCAG 2 between a color and the backgrounds behind it, the nearest first."""
    below = (1.0, 1.0, 1.0)
    for each in reversed(behind):
        *parts, alpha = rgba(each)
        below = tuple(alpha * own + (1 - alpha) * under for own, under in zip(parts, below, strict=True))

    def luminance(parts: tuple[float, ...]) -> float:
        linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    dark, light = sorted((luminance(rgba(color)[:3]), luminance(below)))
    return (light + 0.05) / (dark + 0.05)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_borders_and_signs_have_the_contrast_of_wcag_aa(open_page, url: str, scheme: str) -> None:
    page = open_page(url + form_of("neighbors"), color_scheme=scheme)
    page.get_by_role("button", name="Add a filter").click()
    expect(page.locator("#neighbors .examples button").first).to_be_visible()
    background = rgba(page.evaluate("getComputedStyle(document.body).backgroundColor"))
    assert (sum(background[:3]) > 1.5) == (scheme == "light")

    def least(selector: str, attribute: str, pseudo: str | None = None) -> float:
        found = page.evaluate(COLORS, [selector, attribute, pseudo])
        assert found, selector
        return min(contrast(*each) for each in found)

    for selector in ("input", "select", "textarea", ".examples button"):
        assert least(f"#neighbors {selector}", "borderTopColor") >= 3, selector
    ask_text = LONG + "\n\n" + LONG
    page.get_by_role("button", name="Remove this filter").click()
    ask(page, "passage", ask_text)
    # The strongest color that a token can have.
    page.locator("#passage .token").evaluate_all(
        "nodes => nodes.forEach(node => node.style.setProperty('--strength', 1))"
    )
    page.evaluate("document.querySelectorAll('.token').forEach(node => node.classList.add('newline'))")
    assert least("#passage .token", "color") >= 4.5
    assert least("#passage .token.newline", "color", "::before") >= 4.5
    page.locator("#passage .found").evaluate_all("nodes => nodes.forEach(node => (node.hidden = false))")
    assert least("#passage .neighbor mark", "color") >= 4.5
    page.locator("#passage .neighbor mark").evaluate_all("nodes => nodes.forEach(node => node.classList.add('linked'))")
    assert least("#passage .neighbor mark.linked", "color") >= 4.5
    assert least("#passage-strip .helped", "color") >= 4.5
    assert least("#passage-strip .hurt", "color") >= 4.5
    ask(page, "neighbors", "neighbor vector")
    assert least("mark.word", "color") >= 4.5
    page.locator("#tab-generation").click()
    expect(page.locator(".first-difference").first).to_be_visible()
    assert least(".first-difference", "color") >= 4.5
