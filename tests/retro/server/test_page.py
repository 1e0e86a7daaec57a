"""The web page in a real Chromium with a real server: mouse, keyboard, phone and dark mode."""

import json
import re
from pathlib import Path

import pytest

from indexing.retrieval.retriever import Retriever
from retro.inference.language_model import LanguageModel
from retro.server.app import make_app
from retro.server.settings import ServeSettings
from tests.conftest import build_local, tiny_config
from tests.retro.server.browser import MARKS, VIEWS, Page, expect, form_of, submit
from tests.retro.server.conftest import TEXT, Make, listening

pytestmark = MARKS


# --- neighbors -------------------------------------------------------------------------------------------------------


def test_a_neighbor_links_to_its_chunk_in_the_document(open_page, url: str, retriever: Retriever) -> None:
    page = open_page(url + form_of("neighbors"), viewport={"width": 900, "height": 300})
    submit(page, "neighbors", retriever.lookup.chunk(90).text)
    link = page.locator(".neighbor h4 a").first
    number = int(re.search(r"chunk=(\d+)", link.get_attribute("href")).group(1))
    link.click()
    found = page.locator("#document [aria-current]")
    expect(found).to_have_count(1)
    assert found.locator("pre").text_content() == retriever.lookup.chunk(number).text
    expect(found).to_be_focused()
    expect(found).to_be_in_viewport()
    page.go_back()
    expect(page.locator(".neighbor").first).to_be_visible()  # the URL contains the query


def test_a_filter_offers_values_and_is_sent_and_restored_from_the_url_with_the_ranking(open_page, url: str) -> None:
    page = open_page(url + form_of("neighbors"))
    page.get_by_role("button", name="Add a filter").click()
    page.get_by_label("Column").select_option("title")
    page.get_by_label("Value").fill("title 1")
    options = page.locator("datalist option")
    expect(options.first).to_have_attribute("value", re.compile("^Title 1"))
    offered = [each.get_attribute("value") for each in options.all()]
    assert all("Title 1" in each for each in offered)
    page.get_by_label("Value").fill(offered[0])
    page.get_by_label("Found by").select_option("hybrid")
    with page.expect_request("**/neighbors") as sent:
        submit(page, "neighbors", TEXT)
    assert sent.value.post_data_json["filters"] == {"title": [offered[0]]}
    assert sent.value.post_data_json["retrieval"] == "hybrid"
    for each in (page, open_page(page.url)):
        expect(each.locator(".neighbor").first).to_be_visible()
        assert set(each.locator(".neighbor h4 a").all_text_contents()) == {offered[0]}


def test_html_in_documents_is_escaped(open_page, tmp_path: Path) -> None:
    attack = "<script>document.title = 'run'</script><img src=x onerror=\"document.title = 'run'\"> & <b>bold</b> "
    corpus = tmp_path / "corpus.jsonl"
    texts = [attack * 3 + f"text {number} of the document" for number in range(40)]
    corpus.write_text(
        "".join(json.dumps({"id": f"<i>{n}</i>/{n}", "text": text}) + "\n" for n, text in enumerate(texts))
    )
    datastore = build_local(tiny_config(tmp_path, corpus))
    with listening(make_app(Retriever.open(datastore.folder), None, ServeSettings())) as url:
        page = open_page(url + form_of("neighbors"))
        submit(page, "neighbors", texts[0])
        expect(page.locator(".neighbor").first).to_be_visible()
        assert "<script>" in page.locator("article.chunk .query pre").first.text_content()
        page.locator(".neighbor h4 a").first.click()
        expect(page.locator("#document .results")).to_contain_text("onerror")
        assert page.locator("main script, main img, pre b, h2 i").count() == 0
        assert page.title() != "run"


# --- the model -------------------------------------------------------------------------------------------------------


def test_two_texts_generate_in_parallel_and_can_be_stopped(open_page, url: str) -> None:
    page = open_page(url + form_of("generation"))
    page.get_by_label("Tokens to write").fill("900")
    submit(page, "generation", TEXT)
    expect(page.locator(".pane")).to_have_count(2)
    expect(page.locator(".generated").first).to_have_text(re.compile(r"\S.{10}", re.DOTALL))
    expect(page.locator(".pane.running")).to_have_count(2)  # text appears before it is complete
    page.get_by_role("button", name="Stop").click()
    expect(page.locator(".pane.running")).to_have_count(0)
    expect(page.locator(".pane .state").first).to_contain_text("stopped")


# --- everywhere ------------------------------------------------------------------------------------------------------


def test_the_datastore_view_shows_its_statistics_and_the_model(
    open_page, url: str, retriever: Retriever, language_model: LanguageModel
) -> None:
    shown = open_page(f"{url}/#/datastore").locator("#datastore .results")
    expect(shown).to_contain_text(language_model.checkpoint.fingerprint)
    expect(shown).to_contain_text(f"{retriever.datastore.train.num_chunks:,}")
    expect(shown).to_contain_text(retriever.datastore.fingerprint)


def test_every_view_is_usable_by_keyboard(open_page, url: str) -> None:
    page = open_page(url + form_of("neighbors"))
    page.locator("#tab-neighbors").focus()
    for view in ("trace", "datastore", "ask", "generation", "passage", "neighbors"):
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
    expect(page.locator("#neighbors .neighbor").first).to_be_visible()
    expect(page.locator("#status")).to_contain_text("found")


def test_a_view_that_was_left_announces_nothing(open_page, url: str) -> None:
    page, held = open_page(url + form_of("generation")), []
    page.route("**/generate", lambda route: held.append(route), times=2)
    with page.expect_request("**/generate"):
        submit(page, "generation", TEXT)
    page.locator("#tab-neighbors").click()
    expect(page.locator("#status")).to_contain_text("found")
    for each in held:
        each.continue_()
    expect(page.locator("#generation .stop")).to_have_count(0)  # both texts are complete
    assert "found" in page.locator("#status").text_content()


def expect_server_details(page: Page) -> None:
    """Expect the server's details: in the header, in the filters and in the limits of the fields."""
    expect(page.locator(".served")).to_contain_text("chunks")
    expect(page.locator(".filters")).not_to_have_attribute("hidden", "")
    expect(page.locator("#neighbors input[name=k]")).to_have_attribute("max", "100")


def test_retry_loads_the_server_details_after_a_failed_start(open_page, url: str) -> None:
    page = open_page("about:blank", errors=True)
    page.route("**/datastore", lambda route: route.abort())
    page.goto(url)
    expect(page.locator("header").get_by_role("alert")).to_contain_text("does not answer")
    page.unroute("**/datastore")
    page.get_by_role("button", name="Try again").click()
    expect_server_details(page)


@pytest.mark.parametrize(("status", "retry"), [(503, True), (429, True), (422, False)])
def test_an_error_shows_its_message_and_offers_a_retry_unless_it_is_permanent(
    open_page, url: str, status: int, retry: bool
) -> None:
    page = open_page(url + form_of("neighbors"), errors=True)
    body = json.dumps({"error": {"message": "the shelf is on fire.", "type": "x", "param": None, "code": None}})
    page.route("**/neighbors", lambda route: route.fulfill(status=status, content_type="application/json", body=body))
    submit(page, "neighbors", TEXT)
    problem = page.get_by_role("alert")
    expect(problem).to_contain_text("the shelf is on fire.")
    again = problem.get_by_role("button", name="Try again")
    expect(again).to_have_count(int(retry))
    page.unroute("**/neighbors")
    if retry:
        again.click()
        expect(page.locator(".neighbor").first).to_be_visible()


def test_the_page_prompts_until_the_token_is_valid_and_then_loads_the_server_details(open_page, app_with: Make) -> None:
    with listening(app_with(token="secret")) as url:
        page = open_page(url + form_of("neighbors"), errors=True)
        page.get_by_role("button", name="Cancel").click()
        expect(page.locator("header").get_by_role("alert")).to_contain_text("token")
        submit(page, "neighbors", TEXT)
        dialog = page.locator("#token-dialog")
        for given in ("wrong", "secret"):
            expect(dialog).to_be_visible()
            page.get_by_label("Token", exact=True).fill(given)
            page.get_by_role("button", name="Use token").click()
        expect(page.locator(".neighbor").first).to_be_visible()
        expect(dialog).not_to_be_visible()
        expect_server_details(page)


def test_all_requests_go_to_the_server(open_page, url: str) -> None:
    page = open_page("about:blank")
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    page.goto(url + form_of("neighbors"))
    submit(page, "neighbors", TEXT)
    expect(page.locator(".neighbor").first).to_be_visible()
    for view in VIEWS:
        page.locator(f"#tab-{view}").click()
    page.goto(f"{url}/docs")
    assert len(asked) > 10
    assert all(each.startswith(url) for each in asked)
