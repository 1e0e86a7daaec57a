"""The page in a real Chromium over the real server: what a person sees, with a mouse, a keyboard, a phone, in the dark.

The system's Chromium is driven by Playwright (Debian's package `chromium`); without it these tests are skipped.
"""

import json
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from indexing.retrieval.retriever import Retriever
from retro.inference.language_model import LanguageModel
from retro.server.app import make_app
from retro.server.settings import ServeSettings
from tests.conftest import PATIENCE, build_local, tiny_config
from tests.retro.server.conftest import TEXT, Make, listening

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
pytestmark = [pytest.mark.browser, pytest.mark.skipif(not CHROMIUM, reason="no Chromium (Debian's package chromium)")]
sync_api = pytest.importorskip("playwright.sync_api")
expect, Page, Browser = sync_api.expect, sync_api.Page, sync_api.Browser
expect.set_options(timeout=1000 * PATIENCE)

QUIET = ("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking")
VIEWS = ("neighbors", "passage", "generation", "datastore")
LONG = TEXT * 6


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_api.sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=CHROMIUM, args=list(QUIET))
        yield started
        started.close()


@pytest.fixture
def open_page(browser: Browser) -> Iterator[Callable[..., Page]]:
    """Opens a page in a context of its own. Whatever the console calls an error fails the test, unless `errors` are meant."""
    opened = []

    def new(address: str, errors: bool = False, **context) -> Page:
        page = browser.new_context(**context).new_page()
        page.set_default_timeout(1000 * PATIENCE)
        said: list[str] = []
        page.on("pageerror", lambda error: said.append(str(error)))
        page.on("console", lambda message: said.append(message.text) if message.type == "error" else None)
        page.goto(address)
        opened.append((page, [] if errors else said))
        return page

    yield new
    for page, said in opened:
        page.context.close()
        assert said == []


def ask(page: Page, view: str, text: str, button: str) -> None:
    page.locator(f"#{view} textarea").fill(text)
    page.get_by_role("button", name=button).click()


# --- neighbors -------------------------------------------------------------------------------------------------------


def test_shared_runs_are_marked_alike_on_both_sides_and_stand_in_the_stored_text(
    open_page, url: str, retriever: Retriever
) -> None:
    page = open_page(url)
    chunk = retriever.chunk(40)
    ask(page, "neighbors", chunk.text, "Find neighbors")
    card = page.locator("article.chunk").first
    expect(card.locator(".neighbor").first).to_be_visible()
    neighbor = card.locator(".neighbor").first
    mark = neighbor.locator("mark").first
    key = mark.get_attribute("data-keys").split()[0]

    def run_of(side) -> str:
        return "".join(side.locator(f'mark[data-keys~="{key}"]').all_text_contents())

    assert run_of(neighbor) == run_of(card.locator(".query"))
    stored = retriever.search([chunk.text], 3).hits[0]
    assert any(run_of(neighbor) in hit.text + hit.continuation for hit in stored)
    mark.hover()
    expect(card.locator(f'.query mark[data-keys~="{key}"]').first).to_have_class(re.compile("active"))


def test_a_neighbor_leads_to_its_document_where_it_is_marked(open_page, url: str, retriever: Retriever) -> None:
    page = open_page(url, viewport={"width": 900, "height": 300})
    ask(page, "neighbors", retriever.chunk(90).text, "Find neighbors")
    link = page.locator(".neighbor h4 a").first
    number = int(re.search(r"chunk=(\d+)", link.get_attribute("href")).group(1))
    link.click()
    found = page.locator("#document [aria-current]")
    expect(found).to_have_count(1)
    assert found.locator("pre").text_content() == retriever.chunk(number).text
    expect(found).to_be_focused()
    expect(found).to_be_in_viewport()
    page.go_back()
    expect(page.locator(".neighbor").first).to_be_visible()  # the address holds the query


def test_filters_and_ranking_are_sent_and_an_address_can_be_shared(open_page, url: str, retriever: Retriever) -> None:
    page = open_page(url)
    page.get_by_role("button", name="Add a filter").click()
    page.get_by_label("Column").select_option("title")
    page.get_by_label("Value").fill("Title 7")
    page.get_by_label("Ranked by").select_option("hybrid")
    with page.expect_request("**/neighbors") as sent:
        ask(page, "neighbors", TEXT, "Find neighbors")
    assert sent.value.post_data_json["filters"] == {"title": ["Title 7"]}
    assert sent.value.post_data_json["rerank"] == "hybrid"
    for each in (page, open_page(page.url)):
        expect(each.locator(".neighbor").first).to_be_visible()
        assert set(each.locator(".neighbor h4 a").all_text_contents()) == {"Title 7"}


def test_what_documents_hold_is_shown_and_never_run(open_page, tmp_path: Path) -> None:
    attack = "<script>document.title = 'run'</script><img src=x onerror=\"document.title = 'run'\"> & <b>bold</b> "
    corpus = tmp_path / "corpus.jsonl"
    texts = [attack * 3 + f"text {number} of the document" for number in range(40)]
    corpus.write_text(
        "".join(json.dumps({"id": f"<i>{n}</i>/{n}", "text": text}) + "\n" for n, text in enumerate(texts))
    )
    datastore = build_local(tiny_config(tmp_path, corpus))
    with listening(make_app(Retriever.open(datastore.folder), None, ServeSettings())) as url:
        page = open_page(url)
        ask(page, "neighbors", texts[0], "Find neighbors")
        expect(page.locator(".neighbor").first).to_be_visible()
        assert "<script>" in page.locator("article.chunk .query pre").first.text_content()
        page.locator(".neighbor h4 a").first.click()
        expect(page.locator("#document .results")).to_contain_text("onerror")
        assert page.locator("main script, main img, pre b, h2 i").count() == 0
        assert page.title() != "run"


# --- the model -------------------------------------------------------------------------------------------------------


def test_tokens_of_a_passage_are_its_text_colored_by_the_sign_of_the_difference(open_page, url: str) -> None:
    page = open_page(f"{url}/#/passage")
    with page.expect_response("**/score") as answered:
        ask(page, "passage", LONG, "Color the passage")
    tokens = page.locator(".token")
    expect(tokens.first).to_be_visible()
    assert "".join(tokens.all_text_contents()) == LONG
    differences = [each["difference"] for each in answered.value.json()["tokens"]]
    assert any(differences)
    for token, difference in list(zip(tokens.all(), differences, strict=True))[::7]:
        kind = token.get_attribute("class").split()
        assert ("helped" in kind, "hurt" in kind) == (difference > 0, difference < 0)
    tokens.nth(5).click()
    expect(page.locator(".readout")).to_contain_text("nats")


def test_two_texts_grow_side_by_side_and_stop_when_told(open_page, url: str) -> None:
    page = open_page(f"{url}/#/generation")
    page.get_by_label("Tokens").fill("900")
    ask(page, "generation", TEXT, "Generate")
    expect(page.locator(".pane")).to_have_count(2)
    expect(page.locator(".generated").first).to_have_text(re.compile(r"\S.{10}", re.DOTALL))
    expect(page.locator(".pane.running")).to_have_count(2)  # text is there before it is complete
    page.get_by_role("button", name="Stop").click()
    expect(page.locator(".pane.running")).to_have_count(0)
    expect(page.locator(".pane .state").first).to_contain_text("stopped")


def test_the_same_seed_writes_the_same_text_again(open_page, url: str) -> None:
    page = open_page(f"{url}/#/generation")
    page.get_by_label("Tokens").fill("12")
    texts = []
    for _ in range(2):
        ask(page, "generation", TEXT, "Generate")
        expect(page.locator(".pane.running")).to_have_count(0)
        expect(page.locator(".pane .state").last).to_contain_text("limit")
        texts.append(page.locator(".generated").all_text_contents())
    assert texts[0] == texts[1]


def test_without_a_checkpoint_the_model_views_say_how_to_have_one(open_page, app_with: Make) -> None:
    with listening(app_with(model=False)) as url:
        for view in ("passage", "generation"):
            page = open_page(f"{url}/#/{view}")
            expect(page.locator(f"#{view} .results")).to_contain_text("--checkpoint")


# --- everywhere ------------------------------------------------------------------------------------------------------


def test_statistics_are_those_of_the_datastore(open_page, url: str, retriever: Retriever) -> None:
    page = open_page(f"{url}/#/datastore")
    shown = page.locator("#datastore .results")
    expect(shown).to_contain_text(f"{retriever.datastore.train.num_chunks:,}")
    expect(shown).to_contain_text(retriever.datastore.fingerprint)


def test_a_phone_never_scrolls_sideways(open_page, url: str) -> None:
    page = open_page(url, viewport={"width": 360, "height": 700}, has_touch=True, is_mobile=True)
    ask(page, "neighbors", LONG + "x" * 300, "Find neighbors")
    expect(page.locator(".neighbor").first).to_be_visible()
    wide = []
    for view in VIEWS:
        page.locator(f"#tab-{view}").click()
        if view == "passage":
            ask(page, view, LONG + "y" * 300, "Color the passage")
            expect(page.locator(".token").first).to_be_visible()
        expect(page.locator(f"#{view}")).to_be_visible()
        wide.append(page.evaluate("document.documentElement.scrollWidth"))
    assert wide == [360] * len(VIEWS)


def test_everything_is_reached_by_keys(open_page, url: str) -> None:
    page = open_page(url)
    page.locator("#tab-neighbors").focus()
    for view in ("passage", "generation", "datastore", "neighbors"):
        page.keyboard.press("ArrowRight")
        expect(page.locator(f"#{view}")).to_be_visible()
        expect(page.locator(f"#tab-{view}")).to_be_focused()
        outline = "getComputedStyle(document.activeElement).outlineStyle"
        assert (
            page.evaluate(outline) != "none"
            or page.evaluate("getComputedStyle(document.activeElement).boxShadow") != "none"
        )
    page.keyboard.press("Tab")
    expect(page.locator("#neighbors textarea")).to_be_focused()
    page.keyboard.type("the index of a chunk")
    page.keyboard.press("Control+Enter")
    expect(page.locator(".neighbor").first).to_be_visible()
    expect(page.locator("#status")).to_contain_text("found")


CONTRAST = """
(selector) => {
  const channel = (value) => (value /= 255) <= 0.04045 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4;
  const luminance = ([r, g, b]) => 0.2126 * channel(r) + 0.7152 * channel(g) + 0.0722 * channel(b);
  const numbers = (color) => color.match(/[\\d.]+/g).map(Number);
  const behind = (node) => {
    for (; node; node = node.parentElement) {
      const [r, g, b, alpha = 1] = numbers(getComputedStyle(node).backgroundColor);
      if (alpha === 1) return [r, g, b];
    }
    return [255, 255, 255];
  };
  return [...document.querySelectorAll(selector)].filter((node) => node.checkVisibility()).map((node) => {
    const [light, dark] = [luminance(numbers(getComputedStyle(node).color)), luminance(behind(node))].sort((a, b) => b - a);
    return (light + 0.05) / (dark + 0.05);
  });
}
"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_stands_out_in_light_and_dark(open_page, url: str, scheme: str) -> None:
    page = open_page(url, color_scheme=scheme)
    ask(page, "neighbors", LONG, "Find neighbors")
    expect(page.locator(".neighbor").first).to_be_visible()
    selectors = (
        "p",
        "button",
        "[role=tab]",
        "label",
        "pre",
        "mark",
        "dt",
        "dd",
        "h3",
        "h4 a",
        ".served",
        "small",
        "option",
    )
    for selector in selectors:
        found = page.evaluate(CONTRAST, f"body {selector}")
        assert all(ratio >= 4.5 for ratio in found), (selector, min(found))
    background = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (sum(map(float, re.findall(r"[\d.]+", background)[:3])) > 380) == (scheme == "light")


def test_a_filter_stays_on_one_line_on_a_phone(open_page, url: str) -> None:
    page = open_page(url, viewport={"width": 390, "height": 800}, has_touch=True, is_mobile=True)
    page.get_by_role("button", name="Add a filter").click()
    word = page.locator(".filter span", has_text="is")
    assert word.bounding_box()["height"] < 2 * float(
        word.evaluate("node => parseFloat(getComputedStyle(node).fontSize)")
    )
    assert page.evaluate("document.documentElement.scrollWidth") == 390


def test_fields_of_a_row_stand_at_one_height(open_page, url: str) -> None:
    page = open_page(url)
    number, choice = (page.locator(f"#neighbors [name={name}]").bounding_box() for name in ("k", "rerank"))
    assert (number["y"], number["height"]) == (choice["y"], choice["height"])


@pytest.mark.parametrize(
    ("status", "heading"),
    [(503, "unavailable"), (422, "Invalid request"), (413, "Invalid request"), (404, "Not found")],
)
def test_an_error_that_stays_offers_no_second_try_and_no_waiting(
    open_page, url: str, status: int, heading: str
) -> None:
    page = open_page(url, errors=True)
    body = json.dumps({"error": {"message": "no.", "type": "x", "param": None, "code": None}})
    answer = {"status": status, "content_type": "application/json", "headers": {"Retry-After": "5"}, "body": body}
    page.route("**/neighbors", lambda route: route.fulfill(**answer))
    ask(page, "neighbors", TEXT, "Find neighbors")
    problem = page.get_by_role("alert")
    expect(problem).to_contain_text(heading)
    expect(problem).not_to_contain_text("Wait")
    expect(problem.get_by_role("button", name="Try again")).to_have_count(int(status == 503))


def introduced(page: Page) -> None:
    """The page shows what is served: in its header, by filters, by the largest numbers that its fields take."""
    expect(page.locator(".served")).to_contain_text("chunks")
    expect(page.get_by_role("button", name="Add a filter")).to_be_visible()
    expect(page.locator("#neighbors input[name=k]")).to_have_attribute("max", "100")


def test_a_server_that_did_not_answer_at_first_is_introduced_on_a_second_try(open_page, url: str) -> None:
    page = open_page("about:blank", errors=True)
    page.route("**/datastore", lambda route: route.abort())
    page.goto(url)
    expect(page.locator("header").get_by_role("alert")).to_contain_text("does not answer")
    page.unroute("**/datastore")
    page.get_by_role("button", name="Try again").click()
    introduced(page)


def test_a_token_given_later_introduces_the_server(open_page, app_with: Make) -> None:
    with listening(app_with(token="secret")) as url:
        page = open_page(url, errors=True)
        page.get_by_role("button", name="Cancel").click()
        expect(page.locator("header").get_by_role("alert")).to_contain_text("token")
        ask(page, "neighbors", TEXT, "Find neighbors")
        page.get_by_label("Token", exact=True).fill("secret")
        page.get_by_role("button", name="Use token").click()
        expect(page.locator(".neighbor").first).to_be_visible()
        introduced(page)


def test_the_api_is_described_without_a_token(open_page, app_with: Make) -> None:
    with listening(app_with(token="secret")) as url:
        page = open_page(f"{url}/#/datastore", errors=True)
        page.get_by_role("button", name="Cancel").click()
        page.get_by_role("link", name="HTTP API").click()
        expect(page.get_by_text("POST /neighbors", exact=True)).to_be_visible()


@pytest.mark.parametrize(("status", "heading"), [(500, "Server error"), (429, "busy")])
def test_an_error_is_told_in_the_servers_words_and_can_be_tried_again(
    open_page, url: str, status: int, heading: str
) -> None:
    page = open_page(url, errors=True)
    body = json.dumps({"error": {"message": "the shelf is on fire.", "type": "x", "param": None, "code": None}})
    page.route("**/neighbors", lambda route: route.fulfill(status=status, content_type="application/json", body=body))
    ask(page, "neighbors", TEXT, "Find neighbors")
    problem = page.get_by_role("alert")
    expect(problem).to_contain_text("the shelf is on fire.")
    expect(problem).to_contain_text(heading)
    page.unroute("**/neighbors")
    page.get_by_role("button", name="Try again").click()
    expect(page.locator(".neighbor").first).to_be_visible()


def test_a_token_is_asked_for_until_the_right_one_is_given(open_page, app_with: Make) -> None:
    with listening(app_with(token="secret")) as url:
        page = open_page(f"{url}/#/datastore", errors=True)
        dialog = page.locator("#token-dialog")
        for given in ("wrong", "secret"):
            expect(dialog).to_be_visible()
            page.get_by_label("Token", exact=True).fill(given)
            page.get_by_role("button", name="Use token").click()
        expect(page.locator("#datastore table").first).to_be_visible()
        expect(dialog).not_to_be_visible()


def test_nothing_is_asked_of_anyone_but_the_server(open_page, url: str) -> None:
    page = open_page("about:blank")
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    page.goto(url)
    ask(page, "neighbors", TEXT, "Find neighbors")
    expect(page.locator(".neighbor").first).to_be_visible()
    for view in VIEWS:
        page.locator(f"#tab-{view}").click()
    page.goto(f"{url}/docs")
    assert len(asked) > 10
    assert all(each.startswith(url) for each in asked)


def test_the_model_that_is_shown_is_the_one_that_is_served(open_page, url: str, language_model: LanguageModel) -> None:
    page = open_page(f"{url}/#/datastore")
    expect(page.locator("#datastore .results")).to_contain_text(language_model.checkpoint.fingerprint)
