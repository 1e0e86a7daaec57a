"""What a visitor sees first, without typing: a chat or a prompt where retrieval matters, a held-out passage in color; and a question's
hits."""

from typing import Any

import pytest

from indexing.retrieval.retriever import Retriever
from indexing.store.datastore import Datastore
from retro.server.app import make_app
from retro.server.settings import ServeSettings
from tests.retro.server.browser import LAPTOP, MARKS, PHONE, Page, expect, form_of, submit
from tests.retro.server.conftest import TEXT, Make, listening
from tests.retro.server.test_page_explains import answer_with

pytestmark = MARKS

COLORED = "#passage .tokens .token.helped, #passage .tokens .token.hurt"
QUESTION = "neighbor vector"
ABOVE_THE_FOLD = """
nodes => nodes.filter((node) => {
  const { top, bottom, width } = node.getBoundingClientRect();
  const covering = width && document.elementFromPoint(node.getBoundingClientRect().left + 1, top + 1);
  const colored = getComputedStyle(node).backgroundColor !== "rgba(0, 0, 0, 0)";
  return node.checkVisibility() && top >= 0 && bottom <= innerHeight && covering === node && colored;
}).length
"""


def opened(open_page, url: str, **context) -> Page:
    """Open *Where it helps* without a text and wait for the colored text."""
    page = open_page(f"{url}/#/passage", **context)
    expect(page.locator(COLORED).first).to_be_attached()
    return page


@pytest.mark.parametrize(("chat", "view"), [(True, "ask"), (False, "generation")])
def test_a_model_with_a_chat_template_opens_with_questions_another_one_with_a_text(
    open_page, url: str, chat: bool, view: str
) -> None:
    page = open_page("about:blank")
    answer_with(page, "**/datastore", lambda body: body["model"].update(chat=chat))
    page.goto(url)
    expect(page.locator(f"#tab-{view}")).to_have_attribute("aria-selected", "true")
    expect(page.locator(f"#{view} form")).to_be_visible()


# --- where it helps --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("scheme", "context"), [("light", LAPTOP), ("dark", PHONE)], ids=["laptop", "phone"])
def test_where_it_helps_begins_with_colored_tokens_above_the_fold(
    open_page, url: str, context: dict, scheme: str
) -> None:
    page = opened(open_page, url, color_scheme=scheme, **context)
    expect(page.locator("#tab-passage")).to_have_attribute("aria-selected", "true")
    assert page.locator(COLORED).evaluate_all(ABOVE_THE_FOLD) >= 8
    expect(page.locator("#passage-strip .verdict")).to_be_in_viewport()
    assert page.evaluate("scrollY") == 0


def test_the_best_example_is_first_named_by_its_path_and_shown(open_page, url: str) -> None:
    name = {"document_id": "lib/email/header.py", "title": "header"}
    page = open_page("about:blank")
    answer_with(page, "**/examples?*", lambda body: body["examples"][0].update(name))
    with page.expect_response("**/examples?*") as answered, page.expect_request("**/score") as sent:
        page.goto(f"{url}/#/passage")
    best, *others = answered.value.json()["examples"]
    assert best["gain"] >= max(each["gain"] for each in others if each["gain"] is not None)
    assert sent.value.post_data_json["text"] == best["text"].replace("\r\n", "\n")
    first = page.locator("#passage .examples button").first
    expect(first).to_have_attribute("title", best["document_id"])
    expect(first).to_contain_text(best["document_id"])
    expect(first).to_have_attribute("aria-pressed", "true")
    expect(page.locator("#passage .examples [aria-pressed=true]")).to_have_count(1)


def test_an_address_with_a_text_and_a_form_in_use_are_left_alone(open_page, url: str) -> None:
    page = open_page(url + "#/passage?text=" + "the+index+" * 30)
    expect(page.locator("#passage .examples button").first).to_be_visible()
    expect(page.locator(COLORED).first).to_be_attached()
    assert "".join(page.locator("#passage .token").all_text_contents()) == "the index " * 30
    page = open_page(url + form_of("passage"))
    expect(page.locator("#passage .examples button").first).to_be_visible()
    expect(page.locator("#passage textarea")).to_have_value("")
    expect(page.locator("#passage .empty")).to_be_visible()


def test_a_datastore_without_a_model_opens_on_its_search_and_model_views_name_the_option(
    open_page, app_with: Make
) -> None:
    with listening(app_with(model=False)) as url:
        page = open_page(url)
        expect(page.locator("#tab-neighbors")).to_have_attribute("aria-selected", "true")
        expect(page.locator("#neighbors textarea")).to_be_visible()
        for view in ("ask", "passage", "generation"):
            expect(open_page(f"{url}/#/{view}").locator(f"#{view} .notice")).to_contain_text("--checkpoint")


# --- write -----------------------------------------------------------------------------------------------------------


def test_write_begins_with_a_prompt_and_marks_the_first_difference(open_page, url: str) -> None:
    page = open_page(f"{url}/#/generation")
    marks = page.locator("#generation .first-difference")
    expect(marks.first).to_be_visible()
    with_neighbors, without = (
        [
            (part.text_content(), "first-difference" in part.get_attribute("class").split())
            for part in pane.locator(".piece").all()
        ]
        for pane in page.locator(".pane").all()
    )
    place = next(n for n, (on, off) in enumerate(zip(with_neighbors, without, strict=False)) if on[0] != off[0])
    for pieces in (with_neighbors, without):
        assert pieces[place][1]
        assert not any(marked for _, marked in pieces[: max(0, place - 3)])  # a word may begin some tokens before
    bold = page.locator("#generation-strip b").all_text_contents()
    assert len(set(bold)) == 2
    for word, pieces in zip(bold, (with_neighbors, without), strict=True):
        assert word in "".join(text for text, marked in pieces if marked)


@pytest.mark.parametrize(
    ("on", "off", "words"),
    [
        ("a cat sat", "a car sat", ["cat", "car"]),
        ("a cat sat", "a cathedral", ["cat", "cathedral"]),
        ("a cat\nsat", "a cat sits", ["sat", "sits"]),
        ("a cat sat", "a cat sat", []),
        ("a cat", "a cat sat", []),
    ],
)
def test_the_first_differing_word_is_found(open_page, url: str, on: str, off: str, words: list[str]) -> None:
    script = """
    async (texts) => {
      const { markDifference } = await import("./parts/pane.js");
      const cards = texts.map((text) => {
        const [card, generated] = [document.createElement("div"), document.createElement("pre")];
        generated.className = "generated";
        for (const part of text.match(/\\s?\\S{1,2}/g)) generated.append(Object.assign(document.createElement("span"), { className: "piece", textContent: part }));
        card.append(generated);
        return card;
      });
      const words = markDifference(cards);
      return [words, cards.map((card) => [...card.querySelectorAll(".first-difference")].map((node) => node.textContent).join(""))];
    }
    """
    found, marked = open_page(url + form_of("datastore")).evaluate(script, [on, off])
    assert found == words
    assert [each.strip() for each in marked if each] == words


# --- questions -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kinds", "retrieval"), [(["dense", "sparse", "hybrid"], "hybrid"), (["dense"], "dense")])
def test_a_question_is_searched_by_words_and_vectors_if_the_index_has_words(
    open_page, url: str, kinds: list[str], retrieval: str
) -> None:
    page = open_page("about:blank")
    answer_with(page, "**/datastore", lambda body: body.update(retrieval=kinds))
    page.goto(url + form_of("neighbors"))
    with page.expect_request("**/neighbors") as sent:
        submit(page, "neighbors", QUESTION)
    assert sent.value.post_data_json["retrieval"] == retrieval


def test_a_question_that_is_sent_early_waits_for_what_the_index_has(open_page, url: str) -> None:
    page, held = open_page("about:blank"), list[Any]()
    page.route("**/datastore", lambda route: held.append(route))
    page.goto(url + form_of("neighbors"))
    with page.expect_request("**/neighbors") as sent:
        submit(page, "neighbors", QUESTION)
        for route in held:
            answer = route.fetch()
            route.fulfill(response=answer, json=answer.json() | {"retrieval": ["dense"]})
    assert sent.value.post_data_json["retrieval"] == "dense"


def test_hits_of_one_document_are_grouped_and_have_bars(open_page, url: str) -> None:
    def change(body: dict) -> None:
        hits = body["chunks"][0]["neighbors"]
        for number, hit in enumerate(hits):
            hit.update(
                text=f"{'abcdefgh'[number] * 30} a Vector", document_id=f"doc-{'abaca'[number]}", score=1 / (number + 1)
            )

    page = open_page(url + form_of("neighbors"))
    answer_with(page, "**/neighbors", change)
    submit(page, "neighbors", QUESTION)
    groups = page.locator("#neighbors .document-hits")
    expect(groups).to_have_count(3)
    ranks = [[each.text_content() for each in group.locator("h4 .rank").all()] for group in groups.all()]
    assert ranks == [["1", "3", "5"], ["2"], ["4"]]
    expect(groups.first.locator("details.others .neighbor").first).to_be_hidden()
    groups.first.locator("details.others > summary").click()
    widths = {
        neighbor.locator(".rank").text_content(): neighbor.locator(".strength > span").evaluate(
            "node => parseFloat(node.style.width)"
        )
        for neighbor in page.locator("#neighbors .neighbor").all()
    }
    assert widths == {str(rank): pytest.approx(100 / rank, abs=0.01) for rank in range(1, 6)}


def test_words_of_a_question_are_marked_in_its_hits(open_page, url: str) -> None:
    text = "Vectors of a revector are not the NEIGHBOR: neighborhood, 向量"

    def change(body: dict) -> None:
        body["chunks"][0]["neighbors"][0].update(text=text, continuation="", spans=[])

    page = open_page(url + form_of("neighbors"))
    answer_with(page, "**/neighbors", change)
    submit(page, "neighbors", QUESTION + " 向量")
    neighbor = page.locator("#neighbors .neighbor").first
    expect(neighbor.locator("pre").first).to_contain_text("revector")
    assert neighbor.locator("mark.word").all_text_contents() == ["Vectors", "NEIGHBOR", "向量"]
    expect(neighbor.locator("pre.text")).to_have_text(text)
    submit(page, "neighbors", TEXT * 4)  # not a question
    expect(page.locator("#neighbors article.chunk").nth(1)).to_be_visible()
    expect(page.locator("#neighbors mark.word")).to_have_count(0)


# --- what it finds, trace --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("view", ["neighbors", "trace"])
def test_search_and_trace_begin_with_an_example_that_was_run_and_an_empty_form(
    open_page, voting_datastore: Datastore, view: str
) -> None:
    with listening(make_app(Retriever.open(voting_datastore.folder), None, ServeSettings())) as url:
        page = open_page(f"{url}/#/{view}")
        expect(page.locator(f"#{view}-strip")).to_be_visible()
        expect(page.locator(f"#{view} textarea")).to_be_visible()
        expect(page.locator(f"#{view} textarea")).to_have_value("")
        expect(page.locator(f"#{view} .examples [aria-pressed=true]")).to_have_count(1)


def test_a_text_without_runs_is_in_one_column_and_suggests_shorter_runs(open_page, voting_datastore: Datastore) -> None:
    with listening(make_app(Retriever.open(voting_datastore.folder), None, ServeSettings())) as url:
        page = open_page(url + form_of("trace"))
        submit(page, "trace", "z1 q2 z3 q4 " * 5)
        card = page.locator("#trace .results .notice")
        expect(card).to_contain_text("Try a smaller number of tokens")
        expect(card.locator("pre")).to_contain_text("z1 q2")
        expect(page.locator("#trace .found")).to_have_count(0)


def test_the_header_and_the_names_of_examples_are_whole_on_a_phone(open_page, url: str) -> None:
    name = {"document_id": "lib/email/header/of/a/long/path/header.py", "title": "header"}
    page = open_page("about:blank", **PHONE)
    answer_with(page, "**/examples?*", lambda body: body["examples"][0].update(name))
    page.goto(f"{url}/#/passage")
    expect(page.locator(COLORED).first).to_be_attached()
    for selector in (".served", "[role=tab]", ".answered .examples button"):
        for node in page.locator(selector).all():
            if node.is_visible():
                assert node.evaluate("node => node.scrollWidth <= node.clientWidth + 1"), selector
                box = node.bounding_box()
                assert box["x"] >= 0
                assert box["x"] + box["width"] <= 390
    expect(page.locator("#passage .examples button").first).to_contain_text("header.py")
    expect(page.locator("#passage .examples .folder").first).to_be_hidden()
