"""Questions on the page: two answers side by side, their passages, and the words that an answer has from them."""

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from indexing.retrieval.retriever import Retriever
from retro.inference.language_model import LanguageModel
from retro.server.app import make_app
from retro.server.settings import ServeSettings
from tests.retro.server.browser import LAPTOP, MARKS, PHONE, Page, expect
from tests.retro.server.conftest import CHAT_TEMPLATE, listening
from tests.retro.server.test_page_access import violations
from tests.retro.server.test_page_explains import answer_with

pytestmark = MARKS

CHAT = "**/v1/chat/completions"
ATTACK = "<img src=x onerror=\"document.title = 'run'\"><script>document.title = 'run'</script> <b>bold</b>"
ANSWER = f"It was {ATTACK} in 1987, says <i>Ada</i> Lovelace."


@pytest.fixture(scope="module")
def url(retriever: Retriever, language_model: LanguageModel, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of a model with room for passages."""
    template = tmp_path_factory.mktemp("template") / "chat.jinja"
    template.write_text(CHAT_TEMPLATE)
    settings = ServeSettings(name="tiny", chat_template=str(template))
    with listening(make_app(retriever, replace(language_model, context=512), settings)) as opened:
        yield opened


def ask(page: Page, question: str = "title 42", tokens: int = 12) -> None:
    page.locator("#ask-text").fill(question)
    page.get_by_label("Tokens of an answer").evaluate("(field, value) => (field.value = value)", tokens)
    page.keyboard.press("Enter")


def wait(page: Page, turns: int = 1) -> None:
    """Wait until both answers of the last turn are complete."""
    expect(page.locator("#ask .turn")).to_have_count(turns)
    expect(page.locator("#ask .stop")).to_be_hidden()
    expect(page.locator("#ask .running")).to_have_count(0)


def stream_of(*choices: dict[str, Any]) -> str:
    events = [json.dumps({"choices": [{"index": 0, "finish_reason": None} | choice]}) for choice in choices]
    return "".join(f"data: {event}\n\n" for event in [*events, "[DONE]"])


def answer_from_a_hostile_passage(page: Page) -> None:
    """Answer questions with words of two passages; document, title and answer contain HTML."""
    passages = [
        {"number": number, "title": f"<i>{number}</i>", "document_id": f"<i>{number}</i>", "source": "", "text": text}
        | {"chunk_id": number, "score": 1.0}
        for number, text in enumerate(["𝄞 nothing, but Ada Lovelace.", f"𝄞 In 1987 {ATTACK} was. " + "long " * 900], 1)
    ]
    quotes = []
    for number, words in ((2, ATTACK), (1, "Lovelace")):
        here, there = ANSWER.index(words), passages[number - 1]["text"].index(words)
        spans = {"text": [here, here + len(words)], "passage_text": [there, there + len(words)]}
        quotes.append(spans | {"passage": number, "words": len(words.split())})
    trust = {"share": 0.64, "prompt_tokens": 9, "low_because": None}
    empty = {"passages": None, "quotes": None, "quoted": None, "copied": None, "trust": None}
    last = empty | {"quotes": quotes, "quoted": 0.75, "copied": 0.123, "trust": trust}
    body = stream_of(
        {"delta": {"role": "assistant", "content": ""}, "retrieval": empty | {"passages": passages}},
        {"delta": {"role": None, "content": ANSWER[:20]}},
        {"delta": {"role": None, "content": ANSWER[20:]}, "finish_reason": "stop", "retrieval": last},
    )
    page.route(CHAT, lambda route: route.fulfill(status=200, content_type="text/event-stream", body=body))


def test_a_question_has_two_answers_and_both_keep_their_own_conversation(open_page, url: str) -> None:
    page, sent = open_page(url), list[dict[str, Any]]()
    page.on(
        "request", lambda request: sent.append(request.post_data_json) if "chat/completions" in request.url else None
    )
    ask(page)
    wait(page)
    first = [pane.text_content() for pane in page.locator("#ask .answer").all()]
    assert all(first)
    assert page.locator("#ask .pane h4").all_text_contents() == ["With the datastore", "Without"]
    expect(page.locator("#ask .sources .traced").first).to_contain_text("Title 42")
    expect(page.locator("#ask .grounds").first).to_have_text(
        re.compile(r"\d+% of the words .* copied \d+% of the answer and trusted the datastore \d+%")
    )
    expect(page.locator("#ask .grounds").nth(1)).to_be_hidden()
    expect(page.locator("#status")).to_have_text("Both answers are complete.")
    ask(page, "<b>why</b>?")
    wait(page, 2)
    expect(page.locator("#ask .question").last).to_have_text("<b>why</b>?")
    on, off = sorted(sent[2:], key=lambda request: request["model"])
    assert [(on["model"], on["retrieval"]), off["model"]] == [("tiny", {"passages": 4}), "tiny:off"]
    assert "retrieval" not in off
    for request, answer in ((on, page.locator(".answer").nth(0)), (off, page.locator(".answer").nth(1))):
        texts = [message["content"] for message in request["messages"]]
        said = answer.evaluate("node => node.textContent")
        assert texts == ["title 42", said, "<b>why</b>?"]
    page.get_by_role("button", name="New conversation").click()
    expect(page.locator("#ask .turn")).to_have_count(0)
    expect(page.locator("#ask .sources")).to_be_hidden()
    ask(page)
    wait(page)
    assert len(sent[4]["messages"]) == 1


def test_words_of_a_passage_are_marked_on_both_sides_and_hostile_text_stays_text(open_page, url: str) -> None:
    page = open_page(url, **LAPTOP)
    answer_from_a_hostile_passage(page)
    ask(page)
    wait(page)
    answer, panel = page.locator("#ask .answer").first, page.locator("#ask .sources")
    assert answer.text_content() == ANSWER
    assert answer.locator("mark").all_text_contents() == [ATTACK, "Lovelace"]
    assert [each.get_attribute("data-ranks") for each in answer.locator("mark").all()] == ["2", "1"]
    assert panel.locator("mark").all_text_contents() == ["Lovelace", ATTACK]
    assert panel.locator("summary b").all_text_contents() == ["<i>1</i>", "<i>2</i>"]
    assert page.locator("#ask img, #ask script, #ask .answer b, #ask i").count() == 0
    assert page.title() != "run"
    expect(page.locator("#ask .grounds").first).to_have_text(
        "75% of the words are in the passages word for word. "
        "The model copied 12% of the answer and trusted the datastore 64%."
    )
    passages, linked = panel.locator(".traced"), re.compile("linked")
    answer.locator("mark").first.hover()
    expect(passages.nth(1)).to_have_class(linked)
    expect(passages.nth(0)).not_to_have_class(linked)
    expect(panel.locator("mark").nth(1)).to_be_in_viewport()
    passages.nth(0).locator("mark").hover()
    expect(answer.locator("mark").nth(1)).to_have_class(linked)
    expect(answer.locator("mark").nth(0)).not_to_have_class(linked)
    answer.locator("mark").nth(0).focus()
    page.keyboard.press("ArrowRight")
    expect(answer.locator("mark").nth(1)).to_be_focused()
    expect(passages.nth(0)).to_have_class(linked)
    page.keyboard.press("Enter")
    expect(passages.nth(0).locator("summary")).to_be_focused()


def test_the_panel_has_the_passages_of_the_answer_that_is_pointed_at(open_page, url: str) -> None:
    page = open_page(url, **LAPTOP)
    ask(page)
    wait(page)
    first = page.locator("#ask .sources .traced").first.text_content()
    answer_from_a_hostile_passage(page)
    ask(page, "another question")
    wait(page, 2)
    expect(page.locator("#ask .sources .traced").first).to_contain_text("Ada Lovelace")
    page.locator("#ask .question").first.hover()
    expect(page.locator("#ask .sources .traced").first).to_have_text(first)


SHIFTS = """
() => {
  window.shifted = [];
  new PerformanceObserver((list) => {
    for (const entry of list.getEntries()) if (!entry.hadRecentInput) window.shifted.push([entry.value, ...entry.sources.map(({ node }) => node?.className)]);
  }).observe({ type: "layout-shift" });
}
"""


@pytest.mark.parametrize("context", [LAPTOP, PHONE], ids=["laptop", "phone"])
def test_nothing_moves_while_answers_are_written_and_they_can_be_stopped(open_page, url: str, context: dict) -> None:
    page = open_page(url, **context)
    ask(page)
    wait(page)
    page.evaluate(SHIFTS)
    page.route(CHAT, lambda route: route.continue_(post_data=route.request.post_data_json | {"ignore_eos": True}))
    ask(page, "another question", tokens=900)
    stop = page.get_by_role("button", name="Stop")
    page.wait_for_function("() => document.querySelectorAll('.answer')[2]?.clientHeight > 150")
    expect(page.locator(".answer").nth(2)).to_have_attribute("aria-busy", "true")
    expect(stop).to_be_in_viewport()
    stop.click()
    wait(page, 2)
    expect(page.locator(".pane .state").nth(2)).to_contain_text("stopped")
    expect(page.locator(".answer").nth(2)).to_have_attribute("aria-busy", "false")
    expect(page.locator("#ask-text")).to_be_focused()
    assert page.evaluate("window.shifted") == []


def test_an_error_shows_its_message_and_the_question_can_be_asked_again(open_page, url: str) -> None:
    page = open_page(url, errors=True)
    body = json.dumps({"error": {"message": "the shelf is on fire.", "type": "x", "param": None, "code": None}})
    page.route(CHAT, lambda route: route.fulfill(status=503, content_type="application/json", body=body))
    ask(page)
    expect(page.locator("#ask .problem")).to_have_count(2)
    expect(page.locator("#ask .problem").first).to_contain_text("the shelf is on fire.")
    page.unroute(CHAT)
    page.locator("#ask .problem").first.get_by_role("button", name="Try again").click()
    wait(page)
    assert page.locator("#ask .answer").first.text_content()
    expect(page.locator("#ask .problem")).to_have_count(0)


def test_a_model_that_does_not_chat_says_so_and_an_address_asks_its_question(open_page, url: str) -> None:
    page = open_page("about:blank")
    answer_with(page, "**/datastore", lambda body: body["model"].update(chat=False))
    page.goto(f"{url}/#/ask")
    expect(page.locator("#ask .notice")).to_contain_text("--chat-template")
    expect(page.locator("#ask form")).to_be_hidden()
    page = open_page(f"{url}/#/ask?text=title+42")
    expect(page.locator("#ask .question")).to_have_text("title 42")


@pytest.mark.parametrize(("scheme", "context"), [("light", LAPTOP), ("dark", PHONE)], ids=["laptop", "phone"])
def test_axe_finds_no_violation_in_a_conversation(open_page, url: str, scheme: str, context: dict) -> None:
    page = open_page(url, color_scheme=scheme, **context)
    answer_from_a_hostile_passage(page)
    assert violations(page) == []
    ask(page, "x" * 300)
    wait(page)
    page.get_by_text("Settings").click()
    page.locator("#ask .answer mark").first.focus()
    assert violations(page) == []
    assert page.evaluate("document.documentElement.scrollWidth") == context["viewport"]["width"]
